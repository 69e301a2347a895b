"""What must happen when things go wrong: each fault is provoked in a small run."""

import errno
import fcntl
import itertools
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import zipfile
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    after,
    after_step,
    after_updates,
    assert_same_end,
    before,
    column,
    contents,
    finished_run,
    largest_file,
    poison,
    raising,
    rows,
    saved,
    steps,
    until,
    wait_for,
)
from fsspec.implementations.local import LocalFileSystem
from torch import nn

import data
import train
from model import Transformer
from steady.checkpoints import backup, checkpoint, disk, run_dir, writer
from steady.checkpoints.checkpoint import Checkpoint, compare, find_corruption, list_checkpoints
from steady.guard.process import begin
from steady.guard.stop import Stop
from steady.options import ConfigError
from steady.tokens.files import write_tokens
from steady.watch import sinks as telemetry
from tools import generate as generation
from tools import prepare

FLAGS = ["--eval_interval", "0", "--no_compile"]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of 12 steps with checkpoints of steps 4, 8 and 12; tests change copies of it."""
    return finished_run(tmp_path_factory.mktemp("finished"), corpus, *FLAGS, "--save_interval", 4)


@pytest.fixture
def long_run(start, tmp_path):
    """long_run(*flags) → the processes of a run that does not end by itself and has saved."""
    def long_run(*flags, ranks=1):
        group = start(*FLAGS, "--out_dir", "r", "--max_steps", 100_000, "--save_interval", 20,
                      *flags, ranks=ranks)
        assert until(lambda: steps(tmp_path / "r")), group[0].text()
        return group

    return long_run


# --- killed ---


@pytest.mark.parametrize("owner, name, number", [
    (torch._C.PyTorchFileWriter, "write_record", 30), (os, "fsync", 4),
    (checkpoint, "find_corruption", 2), (os, "replace", 6), (writer, "rotate", 2)])
def test_killed_at_a_bad_moment(run, tmp_path, owner, name, number):
    def hook(rank):
        calls = itertools.count(1)
        before(owner, name, lambda *_: next(calls) == number and os._exit(9))

    run(*FLAGS, "--save_interval", 2, "--keep_checkpoints", 1, "--out_dir", "r", hook=hook,
        expect=9)
    left = list_checkpoints(tmp_path / "r/checkpoints")
    assert not any(map(Checkpoint.find_damage, left)) and (left or name == "write_record")
    run(*FLAGS, "--auto-resume", "--out_dir", "r", bare=True)
    assert steps(tmp_path / "r") == [12]
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


def test_a_checkpoint_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """The order of the calls that matters when the power fails, which no test can provoke."""
    calls = []

    def record(name, *args):
        if name == "fsync":
            calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{args[0]}")))
        calls.append(name)
        if name == "posix_fadvise":
            raise OSError(errno.EINVAL, "not on this file system")  # it is only advice

    for owner, name in ((torch, "save"), (os, "fsync"), (os, "posix_fadvise"),
                        (checkpoint, "find_corruption"), (os, "replace")):
        before(owner, name, partial(record, name), monkeypatch.setattr)
    writer.write_checkpoint(tmp_path / "c.pt", {"weight": torch.arange(10_000)})
    assert calls == ["save", f"c.pt.tmp-{os.getpid()}", "fsync", "posix_fadvise",
                     "find_corruption", "replace", tmp_path.name, "fsync"]


# --- damaged files ---


def flip(path, position=None, bit=3):
    """By default in the middle of its largest tensor."""
    content = bytearray(path.read_bytes())
    if position is None:
        with zipfile.ZipFile(path) as archive:
            tensor = archive.read(max(archive.infolist(), key=lambda each: each.file_size))
        position = content.index(tensor) + len(tensor) // 2
    content[position] ^= 1 << bit
    path.write_bytes(content)


def odd(path, **fields):
    """Fields of another type; None: missing."""
    state = torch.load(path, weights_only=True) | fields
    torch.save({name: value for name, value in state.items() if value is not None}, path)


@pytest.mark.parametrize("damage, why", [
    (lambda path: os.truncate(path, 0), "cut short, or not a checkpoint"),
    (flip, "its checksum is wrong"), (partial(odd, model=None), "missing or wrong: model"),
    (partial(odd, step="12"), "missing or wrong: step"),
    (partial(odd, step=-12), "missing or wrong: step"), (partial(odd, x=Path()), "holds pathlib"),
    (lambda path: shutil.copy(path.with_name("step_00000008.pt"), path), "renamed: of step 8"),
    (lambda path: writer.write_checkpoint(path, [1, 2]), "not a checkpoint")])
def test_a_damaged_checkpoint_is_set_aside(run, copy, finished, damage, why):
    damage(copy / "checkpoints/step_00000012.pt")
    output = run("--auto-resume", "--out_dir", "r", "--keep_checkpoints", 1, bare=True)
    assert f"step_00000012.pt: {why}" in output and "; set aside" in output
    assert "step_00000008.pt at step 8" in output
    assert (copy / "checkpoints/step_00000012.pt.set-aside").exists()
    assert_same_end(finished, copy)


def test_every_flipped_bit_that_matters_and_missing_end_is_found(copy):
    """No checksum covers what nobody reads: padding, and dates in the directory of a zip file."""
    path, dice = copy / "checkpoints/step_00000008.pt", random.Random(0)
    content = path.read_bytes()
    assert find_corruption(path) is None
    size, whole, found = len(content), torch.load(path, weights_only=True), 0
    for position in [*range(0, 200, 9), *range(size - 200, size, 9),
                     *(dice.randrange(size) for _ in range(200))]:
        flip(path, position, dice.randrange(8))
        if find_corruption(path):
            found += 1
        else:
            assert compare(torch.load(path, weights_only=True), whole)[1] == [], position
        path.write_bytes(content)
    assert found > 150
    for damaged in (content[:20_000], content[:-1], bytes(size)):
        path.write_bytes(damaged)
        assert find_corruption(path), len(damaged)


def test_never_starts_at_0_silently(run, copy):
    """Where only leftovers of a run are there, and where all checkpoints are damaged."""
    def refused(*said):
        before = contents(copy, "lock")
        output = run("--auto-resume", "--out_dir", "r", bare=True, expect=2)
        assert all(words in output for words in (*said, "--overwrite"))
        assert contents(copy, "lock") == before

    folder, left = copy / "checkpoints", ["best.pt", "step_00000008.pt.set-aside"]
    for old, new in zip((12, 8), left, strict=True):
        (folder / f"step_{old:08}.pt").rename(folder / new)
    (folder / "step_00000004.pt").unlink()
    refused(*left, "--resume")
    run("--resume", "r/checkpoints/best.pt", "--max_steps", 14, bare=True)
    assert steps(copy) == [12, 14] and list(column(copy, "train/loss"))[-3:] == [12, 13, 14]
    for found in list_checkpoints(folder):
        flip(found.path)
    for _ in range(2):
        refused("no checkpoint is valid")


def test_optimizer_state_follows_the_names_of_its_parameters(run, copy, tmp_path, monkeypatch):
    """Not their order, which a fork may change; nor is what others hold taken."""
    path = copy / "checkpoints/step_00000012.pt"
    flags = ["--auto-resume", "--max_steps", 20, "--out_dir"]
    shutil.copytree(copy, tmp_path / "same")
    state = torch.load(path, weights_only=True)
    for optimizer, names in zip(state["optimizers"], state["optimizer_names"], strict=True):
        names.reverse()
        optimizer["state"] = {len(names) - 1 - i: x for i, x in optimizer["state"].items()}
    del state["optimizer_classes"]  # as in older checkpoints
    writer.write_checkpoint(path, state)
    for name in ("r", "same"):
        run(*flags, name, bare=True)
    assert not compare(saved(copy)["model"], saved(tmp_path / "same")["model"])[1]
    state["optimizer_names"][1][0] = "another"
    writer.write_checkpoint(path, state)
    assert "other parameters" in run("--resume", path, "--out_dir", "new", bare=True, expect=2)
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.Adam)
    assert "optimizer Muon AdamW -> Muon Adam." in run(*flags, "same", bare=True, expect=2)
    run(*flags, "same", "--max_steps", 21, "--allow_change", "optimizer", bare=True)


def test_another_format_is_refused_and_not_set_aside(run, copy):
    writer.write_checkpoint(copy / "checkpoints/step_00000014.pt", {"format": 0})
    told = run("--auto-resume", "--out_dir", "r", bare=True, expect=2)
    assert f"format 0; this version reads {checkpoint.FORMAT};" in told and steps(copy)[-1] == 14


def test_a_pickle_is_not_executed(run, copy, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    evil = {"format": checkpoint.FORMAT, "step": Evil()}
    torch.save(evil, tmp_path / "saved.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(evil) * 100)
    for name in ("saved.pt", "pickle.pt"):
        output = run("--resume", tmp_path / name, "--out_dir", "new", expect=2)
        assert "not a checkpoint that can be read" in output
    assert not (tmp_path / "touched").exists() and not (tmp_path / "new").exists()


def test_other_files_are_left_alone(run, copy, tmp_path):
    folder = copy / "checkpoints"
    others = [folder / name for name in ("step_9.backup", "step_00000001.pt.tmp-notes", "step_1.pt",
                                         "mine/rank_0_of_1.pt")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("not ours")
    (folder / "step_00000003.pt.tmp-123").write_text("left by a save that was killed")
    run("--auto-resume", "--out_dir", "r", "--max_steps", 20, "--keep_checkpoints", 1, bare=True)
    assert steps(copy) == [20] and all(path.exists() for path in others)
    assert not (folder / "step_00000003.pt.tmp-123").exists()


def test_the_newest_and_the_best_are_kept(run, tmp_path, monkeypatch):
    """Also where the best has to be copied, as there are no hard links, and no folder is synced."""
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(next(numbers), "not on this file system")

    numbers = itertools.cycle([errno.EINVAL, errno.EBADF, errno.ENOTSUP])
    before(os, "fsync", fsync, monkeypatch.setattr)
    monkeypatch.setattr(os, "link", raising(PermissionError(errno.EPERM, "no hard links")))
    monkeypatch.setattr(train, "evaluate", lambda run: float(run.progress.step))
    flags = ["--keep_checkpoints", 1, "--eval_interval", 2, "--save_interval", 1]
    assert "could not be written" not in run("--out_dir", "r", *flags)
    assert steps(tmp_path / "r") == [12] and saved(tmp_path / "r")["best_loss"] == 2
    path = tmp_path / "r/checkpoints/best.pt"
    assert torch.load(path, weights_only=True)["step"] == 2 and find_corruption(path) is None


# --- the disk ---


@pytest.mark.parametrize("works, there", [([1, 4], [2, 8]), ([1, 4, 8], [2, 8, 16])])
def test_a_full_disk_while_saving(run, tmp_path, monkeypatch, works, there):
    """Training continues, until too many saves in a row have failed; as it ends it tries again."""
    plain, calls = writer.write_checkpoint, itertools.count(1)

    def limited(*args):
        with largest_file(resource.RLIM_INFINITY if next(calls) in works else 10_000):
            plain(*args)

    monkeypatch.setattr(writer, "write_checkpoint", limited)
    output = run("--out_dir", "r", "--max_steps", 40, "--save_interval", 2, "--eval_interval", 0,
                 expect=1)
    assert "Traceback" not in output
    assert "could not be written: [Errno 27] File too large" in output.splitlines()[-1]
    assert "step 4: the checkpoint could not be written (1 of 3)" in output
    assert "step 14: the checkpoint could not be written (3 of 3)" in output
    assert "3 checkpoints in a row could not be written" in output
    assert steps(tmp_path / "r") == there  # the 4th save succeeded and reset the count
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


def test_a_save_without_a_thread_or_a_folder(run, tmp_path, monkeypatch):
    """The system's limit of threads comes too late to matter; a lost folder is made again."""
    def lose():
        shutil.rmtree(tmp_path / "r/checkpoints")
        monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("no new thread")))

    after_step(2, lose, monkeypatch.setattr)
    run("--out_dir", "r", "--max_steps", 8, "--save_interval", 4)
    assert steps(tmp_path / "r") == [4, 8]
    telemetry.alert("is lost, and nothing else")


def test_fewer_checkpoints_make_room_on_a_full_disk(run, tmp_path, monkeypatch):
    """A disk with room for two checkpoints, or for one and config.yaml; torch hides its error."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "r")

    def save(*args):
        if len(steps(tmp_path / "r")) > 1:
            raise RuntimeError("PytorchStreamWriter failed") from full

    def write_yaml(*args):
        if len(steps(tmp_path / "r")) > 1:
            raise full

    before(writer, "write_checkpoint", save, monkeypatch.setattr)
    flags = ["--save_interval", 1, "--eval_interval", 0]
    told = run("--out_dir", "r", *flags, "--keep_checkpoints", 4, expect=1)
    assert "device); free some space, or lower --keep_checkpoints" in told.splitlines()[-1]
    assert steps(tmp_path / "r") == [1, 2]
    before(run_dir, "write_yaml", write_yaml, monkeypatch.setattr)
    told = run("--auto_resume", "--out_dir", "r", "--keep_checkpoints", 1, bare=True)
    assert steps(tmp_path / "r") == [12] and "Traceback" not in told


def test_a_full_disk_in_tensorboard_is_one_line(run, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has its own
    monkeypatch.setattr(train, "train", largest_file(100)(train.train))
    output = run("--out_dir", "r", "--save_interval", 0, "--eval_interval", 0, "--tensorboard")
    for sink in ("TensorBoard", "metrics.jsonl"):
        assert output.count(f"warning: {sink} disabled after a write error") == 1
    assert "Traceback" not in output


@pytest.mark.parametrize("name, limit", [("--out_dir r", 0), ("r/config.yaml", 400)])
def test_a_disk_that_is_full_from_the_start_is_one_line(run, name, limit):
    with largest_file(limit):  # the lock is smaller than 400 bytes
        output = run("--out_dir", "r", expect=2)
    assert output.splitlines()[-1].startswith(f"train.py: error: {name}: ")
    assert "Traceback" not in output and not Path("r/config.yaml").exists()


def test_transient_errors_are_retried_and_others_not(run, tmp_path, monkeypatch, finished):
    """In saving, in naming the best, and in reading, which this run does itself."""
    def fail(calls, errors, *_):
        if number := errors.get(next(calls)):
            raise OSError(number, os.strerror(number))

    saves, slept = itertools.count(1), []
    for owner, name, calls, errors in (
            (torch, "save", saves, {1: errno.EIO, 2: errno.EIO, 4: errno.EACCES}),
            (checkpoint, "link", itertools.count(1), {1: errno.EIO}),
            (data.Mixture, "batch", itertools.count(1), {5: errno.EIO, 6: errno.EIO})):
        before(owner, name, partial(fail, calls, errors), monkeypatch.setattr)
    monkeypatch.setattr(disk, "time", SimpleNamespace(sleep=slept.append))  # others do sleep
    output = run("--out_dir", "r", "--save_interval", 4, "--eval_interval", 12, "--num_workers", 0)
    assert output.count("tried again") == 5 and steps(tmp_path / "r") == [4, 12]
    assert next(saves) == 7  # a step that is saved as the best is not saved again as due
    assert (tmp_path / "r/checkpoints/best.pt").exists()
    assert "step 8: the checkpoint could not be written (1 of 3): [Errno 13]" in output
    assert [s for s in slept if s >= 0.5][:2] == [0.5, 1]
    assert_same_end(finished, tmp_path / "r")


@pytest.mark.parametrize("name", ["", "r/checkpoints"])
def test_an_unwritable_directory_is_refused(run, tmp_path, monkeypatch, name):
    place = tmp_path / "read-only" / name
    place.mkdir(parents=True)
    plain = os.access  # root may write anywhere, so this fault is simulated
    monkeypatch.setattr(os, "access", lambda p, mode: str(p) != str(place) and plain(p, mode))
    output = run("--out_dir", tmp_path / "read-only/r", expect=2)
    assert f"{place} is not a directory to write to" in output and not list(place.iterdir())


@pytest.mark.parametrize("owner, name", [(os, "replace"), (disk, "sync")])
def test_a_run_that_cannot_begin_leaves_nothing(run, copy, tmp_path, monkeypatch, owner, name):
    """Neither a new one nor one that starts from a checkpoint of another."""
    flags = ["--out_dir", "new", "--max_steps", 14]
    for more in ([], ["--resume", "r/checkpoints/step_00000012.pt"]):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(OSError(errno.EIO, "Input/output error")))
            assert "error: new/" in run(*flags, *more, expect=2)
        assert not Path("new").exists()
        run(*flags, *more)
        shutil.rmtree("new")


# --- other processes ---


def test_one_writer_per_directory_whose_loader_workers_do_not_die_first(run, long_run, tmp_path):
    (process,) = long_run("--num_workers", 2)
    for flag in ("--auto-resume", "--overwrite"):
        output = run("--out_dir", "r", flag, expect=2)
        assert f"process {process.pid} on {socket.gethostname()} is writing there" in output
    os.killpg(process.pid, signal.SIGTERM)  # its loader processes receive it too
    assert process.code() == 143, process.text()
    last = steps(tmp_path / "r")[-1]
    assert f"stopped at step {last}" in process.text() and "Traceback" not in process.text()
    run("--auto-resume", "--out_dir", "r", "--max_steps", last + 2, bare=True)  # no lock is left


def test_the_lock_of_a_directory_that_is_moved_away_is_none(run, tmp_path, monkeypatch):
    """Another process with --overwrite does so between the opening of the file and the lock."""
    run("--out_dir", "r")
    before(fcntl, "lockf", lambda *_: os.rename("r", "r.old"), monkeypatch.setattr)
    with pytest.raises(ConfigError, match="is writing there"):
        run_dir.acquire_lock(tmp_path / "r")


def test_a_run_that_was_moved_saves_nothing_among_the_next_ones_checkpoints(run, tmp_path,
                                                                            monkeypatch):
    run(*FLAGS, "--out_dir", "next", "--max_steps", 4)
    others = contents(tmp_path / "next")

    def move(run):
        if run.progress.step == 6:
            run.dir.writer.wait()
            os.rename("r", "moved")
            os.rename("next", "r")

    after_updates(move, monkeypatch.setattr)
    told = run(*FLAGS, "--out_dir", "r", "--save_interval", 3, expect=1)
    assert "another run has begun here, after this one's folder was moved away" in told
    assert contents(tmp_path / "r") == others and steps(tmp_path / "moved") == [3]


def test_a_run_that_began_and_ended_meanwhile_is_kept(run, start, tmp_path, monkeypatch):
    """While the second builds its model, the directory is not locked."""
    plain = train.make_optimizers

    def make_optimizers(*args):
        train.make_optimizers = plain  # before the fork, which would make another one
        (other,) = start(*FLAGS, "--out_dir", "r")
        assert other.code() == 0, other.text()
        return plain(*args)

    monkeypatch.setattr(train, "make_optimizers", make_optimizers)
    assert "--out_dir r: holds a run already" in run("--out_dir", "r", expect=2)
    assert steps(tmp_path / "r")[-1] == 12 and column(tmp_path / "r", "train/loss")[12]


def test_a_file_system_without_lasting_inode_numbers(run, copy, monkeypatch):
    monkeypatch.setattr(run_dir, "os", SimpleNamespace(**vars(os) | {"stat": lambda _: object()}))
    run("--auto_resume", "--out_dir", "r", "--max_steps", 13, bare=True)
    assert 12 in steps(copy)


def test_who_only_reads_renames_nothing(run, copy, tool, monkeypatch):
    """The run may belong to another process, or be read-only."""
    flip(copy / "checkpoints/step_00000012.pt")
    output = run("--out_dir", "r", "--auto-resume", "--eval_only")
    assert "step_00000012.pt: " in output and "passed over" in output and "step 8: valid" in output
    assert generation.open_checkpoint(copy, False)[0].path.name == "step_00000008.pt"
    output = run("--check_checkpoints", "r", bare=True, expect=1)
    assert "step_00000012.pt" in output and output.count("INVALID: its checksum is wrong") == 1
    assert output.count(" valid") == 2 and "valid, step 8, best" in output
    monkeypatch.setattr(zipfile, "ZipFile", raising(PermissionError(13, "denied", "of others")))
    assert "error: of others: denied" in run("--check_checkpoints", "r", bare=True, expect=2)
    assert "[Errno 13] denied: 'of others'" in tool(generation.main, "generate", "r", expect=2).err
    assert steps(copy) == [4, 8, 12]


def test_orphaned_ranks_stop(start, tmp_path):
    """A rank whose launcher is killed saves and stops by itself, though nobody reads its screen."""
    launcher = os.fork()
    if not launcher:
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
        start(*FLAGS, "--out_dir", "r", "--max_steps", 100_000,
              hook=lambda rank: os.dup2(os.open("/dev/full", os.O_WRONLY), 2) and begin())
        time.sleep(1000)
    assert until(lambda: steps(tmp_path / "r"))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert until(lambda: f"stopped at step {steps(tmp_path / 'r')[-1]} by SIGTERM" in (
        tmp_path / "log0.txt").read_text())


# --- signals ---


def test_signals_save_go_on_or_stop_and_resume_bit_for_bit(run, tmp_path, finished, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    for step, number in ((3, signal.SIGUSR1), (6, signal.SIGTERM)):
        after_step(step, lambda n=number: signal.raise_signal(n), monkeypatch.setattr)
    output = run("--out_dir", "r", "--save_interval", 0, "--eval_interval", 0, expect=143)
    assert steps(tmp_path / "r") == [4, 6]
    assert "stopped at step 6 by SIGTERM" in output and "sample" not in output
    assert signal.getsignal(signal.SIGTERM) is handler
    run("--auto-resume", "--out_dir", "r", "--save_interval", 4, "--num_workers", 2, bare=True)
    assert_same_end(finished, tmp_path / "r")


def test_a_signal_to_one_rank_stops_all_at_one_step(long_run, tmp_path):
    """Here as a closed terminal sends it."""
    group = long_run(ranks=2)
    group[1].kill(signal.SIGHUP)
    assert [process.code() for process in group] == [129, 129], group[0].text() + group[1].text()
    assert f"stopped at step {steps(tmp_path / 'r')[-1]} by SIGHUP" in group[0].text()


@pytest.mark.parametrize("number, asked", [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_no_signal_is_lost_that_comes_while_the_ranks_vote(number, asked):
    """At any instruction of `requested`."""
    def at_instruction(n: int) -> bool:
        """Whether there is one; then the signal comes before it."""
        def look(frame, event, arg):
            frame.f_trace_opcodes = frame.f_code is Stop.requested.__code__
            if event == "opcode" and next(count) == n:
                stop.handle(number, None)
            return look

        stop, count, before = Stop(), itertools.count(), sys.gettrace()
        sys.settrace(look)
        found = stop.requested(), stop.save
        sys.settrace(before)
        there = next(count) > n
        assert found[asked] or (stop.requested(), stop.save)[asked] == there, n
        return there

    at_instruction(10**6)  # Python 3.12 counts instructions from the second call on
    assert sum(itertools.takewhile(bool, map(at_instruction, itertools.count()))) > 20


@pytest.mark.parametrize("again", [True, False])
def test_a_save_is_waited_for_unless_ctrl_c_comes_again(start, tmp_path, again):
    """The save of step 8 takes until there is the file `go`."""
    started, received, go = (tmp_path / name for name in ("started", "received", "go"))

    def hook(rank):
        def wait(path, state):
            if "step_00000008" in path.name:
                started.touch()
                wait_for(go, 1000)

        before(writer, "write_checkpoint", wait)
        after(Stop, "handle", lambda *_: received.touch())

    (process,) = start(*FLAGS, "--out_dir", "r", "--save_interval", 4, "--max_steps", 100,
                       hook=hook)
    wait_for(started)
    process.kill(signal.SIGINT)
    wait_for(received)
    assert not process.ends_within(0.2)  # still waiting for the save
    if again:
        process.kill(signal.SIGINT)
    else:
        go.touch()
    assert process.code() == 130, process.text()
    first, *others = steps(tmp_path / "r")
    assert first == 4 and find_corruption(tmp_path / "r/checkpoints/step_00000004.pt") is None
    assert not others if again else f"stopped at step {others[-1]} by SIGINT" in process.text()


# --- ranks ---


def test_a_rank_that_dies(long_run, tmp_path):
    group = long_run("--hang_seconds", 5, ranks=2)
    group[1].kill(signal.SIGKILL)
    assert group[0].code() == 1 and group[1].code() == -9
    output = group[0].text()
    assert "Traceback" not in output
    if "no progress: rank 1 (host" in output:  # gloo misses one in fifty: see EXPERIMENTS.md
        return
    assert "train.py: failed: another rank is gone" in output
    assert f"saved the last completed step, {steps(tmp_path / 'r')[-1]}" in output


def test_a_rank_that_raises(start, tmp_path):
    error = RuntimeError("GET http://host: Connection reset by peer")  # of a fork's own connection

    def hook(rank):
        if rank == 1:
            after_step(3, raising(error))

    group = start(*FLAGS, "--out_dir", "r", ranks=2, hook=hook)
    assert [process.code() for process in group] == [1, 1]
    output = group[1].text()
    assert output.index(f"train.py: failed: RuntimeError: {error}") < output.index("Traceback")
    assert "Traceback" not in group[0].text()
    assert steps(tmp_path / "r") == [3]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compile_and_ranks_can_change_on_resume(run, tmp_path, monkeypatch, backend):
    """1 rank, 2 ranks, 1 rank compiled, 1 rank: the same samples, so the same losses."""
    monkeypatch.setattr(Transformer, "compile", partialmethod(nn.Module.compile, backend=backend))
    flags = [*FLAGS, "--log_interval", 1, "--lr_schedule", "constant", "--optimizer", "adamw"]
    run(*flags, "--out_dir", "whole", "--max_steps", 20)
    flags += ["--out_dir", "r", "--auto-resume", "--max_steps"]
    run(*flags, 5)
    run(*flags, 10, ranks=2)
    assert "compile on" in run(*flags, 15, "--compile")
    run(*flags, 20, "--no_compile")
    one, two = (column(tmp_path / name, "train/loss") for name in ("whole", "r"))
    assert list(one) == list(two) and one == pytest.approx(two, rel=1e-4)


# --- exceptions ---


@pytest.mark.parametrize("error, code, said", [
    (ValueError("bad luck"), 1, "failed: ValueError: bad luck"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (type("InductorError", (Exception,), dict(__module__="torch._inductor.exc"))("no gcc"), 1,
     "failed: InductorError (--no_compile trains without it): no gcc"),
    (torch.OutOfMemoryError("Tried to allocate 20.00 GiB."), 1,
     "out of memory: Tried to allocate 20.00 GiB; try --micro_batch_size 4; the"),
    (RuntimeError("CUDA error: out of memory\nSearch for"), 1, "CUDA error: out of memory; try -")])
def test_an_exception_saves_the_last_step(run, tmp_path, monkeypatch, finished, error, code, said):
    with monkeypatch.context() as patch:
        after_step(5, raising(error), patch.setattr)
        output = run("--out_dir", "r", expect=code)
    assert said in output and "saved the last completed step, 5" in output
    run("--auto-resume", "--out_dir", "r", bare=True)
    assert_same_end(finished, tmp_path / "r")


def test_half_an_update_is_not_saved(run, tmp_path, monkeypatch):
    patch, fails = monkeypatch.setattr, raising(ValueError("bad luck"))
    after_step(5, lambda: patch(torch.optim.AdamW, "step", fails), patch)
    output = run("--out_dir", "r", "--save_interval", 4, expect=1)
    assert steps(tmp_path / "r") == [4] and "saved the last" not in output


# --- not finite ---


BAD = ["--max_steps", 40, "--save_interval", 10, "--eval_interval", 0, "--log_interval", 5,
       "--max_nonfinite", 5]


def test_rollback_skips_the_bad_samples(run, tmp_path, tool):
    output = run("--out_dir", "r", *BAD, "--on_nonfinite", "rollback",
                 hook=lambda rank: poison(160, 240))  # of steps 21 to 30
    assert "warning: 5 steps in a row, up to step 25, had a loss or gradient that was not" in output
    assert "step_00000020.pt, continuing at sample 200" in output
    assert "step_00000020.pt, continuing at sample 240" in output
    assert list(column(tmp_path / "r", "train/loss")) == [1, *range(5, 21, 5), 21, 25, 30, 35, 40]
    assert all(v is not None for v in column(tmp_path / "r", "train/loss").values())
    state = saved(tmp_path / "r")
    assert state["step"] == 40 and state["position"] == 40 * 8 + 80
    assert Checkpoint(tmp_path / "r/checkpoints/step_00000020.pt").state()["position"] == 240
    for step, first in ((20, 152), (21, 240)):
        assert f"--- sample {first}: " in tool(prepare.main, "show", "r", step).out


@pytest.mark.parametrize("flags, stop, last, position, said", [
    (["--on_nonfinite", "abort"], 240, 25, None,
     "failed: 5 steps in a row, up to step 25, had a loss"),
    (["--on_nonfinite", "skip"], 240, 40, 320, "10 of 40 steps, since step 21, were not finite"),
    (["--on_nonfinite", "skip", "--log_interval", 0, "--max_steps", 30], 240, 30, 240,
     "warning: the last 10 steps had a loss or gradient that was not"),
    (["--on_nonfinite", "rollback"], 10**9, 25, None, "failed: 5 steps in a row")])
def test_other_policies(run, tmp_path, flags, stop, last, position, said):
    output = run("--out_dir", "r", *BAD, *flags, hook=lambda rank: poison(160, stop),
                 expect=0 if position else 1)
    assert said in output and "Traceback" not in output
    assert output.count("; rolled back to ") == (3 if "rollback" in flags else 0)
    assert steps(tmp_path / "r")[-1] <= last
    assert not position or saved(tmp_path / "r")["position"] == position


def spoil_weights(monkeypatch, at: int, times: int):
    """A weight becomes infinite after step `at`, the first so many times."""
    def spoil(run):
        if run.progress.step == at and next(visits) < times:
            run.model.blocks[1].mlp.down.weight.data[0, 0] = math.inf

    visits = itertools.count()
    after_updates(spoil, monkeypatch.setattr)


def test_a_run_goes_back_where_its_weights_are_not_finite(run, tmp_path, monkeypatch):
    """At its end; before that they are not saved."""
    spoil_weights(monkeypatch, 5, times=1)
    output = run("--out_dir", "r", "--save_interval", 2, "--eval_interval", 4)
    assert "step 6: the weights are not finite; not saved" in output
    assert output.count("; rolled back to ") == 1
    assert "step_00000004.pt, continuing at sample 96" in output
    state = saved(tmp_path / "r")
    assert state["step"] == 12 and state["position"] == 96 + 64
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_whose_weights_are_never_finite_ends(run, tmp_path, monkeypatch, policy):
    spoil_weights(monkeypatch, 5, times=100)
    output = run("--out_dir", "r", "--save_interval", 2, "--eval_interval", 4, "--max_nonfinite", 3,
                 "--on_nonfinite", policy, expect=1)
    assert output.count("; rolled back to ") == 3
    assert output.count("the weights are not finite at") == 4
    assert steps(tmp_path / "r") == [2, 4] and "Traceback" not in output
    assert torch.load(tmp_path / "r/checkpoints/best.pt", weights_only=True)["step"] == 4


@pytest.mark.parametrize("flags", [[], ["--log_interval", 0], ["--max_nonfinite", 2],
                                   ["--parallel", "zero3"]])
def test_a_learning_rate_that_ends_the_weights_ends_the_run(run, tmp_path, flags):
    output = run("--out_dir", "r", "--learning_rate", 1e30, "--optimizer", "adamw", "--grad_clip",
                 0, *flags, ranks=2 if "zero3" in flags else 1, expect=1)
    assert output.count("train.py: failed: the weights are not finite at") == 1
    assert steps(tmp_path / "r") == []


# --- changes on resume ---


def test_other_data_is_refused(run, tmp_path):
    """Also of the same name and size; but data may move."""
    (tmp_path / "d").mkdir()
    write_tokens(tmp_path / "d/train.bin", [b"abcdefgh" * 2000])
    (tmp_path / "d/train.bin.mask").write_bytes(b"\1" * 16_001)
    flags = ["--data_mode", "stream", "--out_dir", "r", "--auto-resume", "--max_steps"]
    run(*flags, 4, "--data", "d")
    folder = (tmp_path / "d").rename(tmp_path / "moved")
    flags = ["--data", "moved", *flags]
    run(*flags, 6)
    before = contents(folder)
    for name, content, said in (
        ("train.bin", before["train.bin"][:-2], "train.bin"),
        ("train.bin.mask", b"\1" * 16_000 + b"\0", "data has changed: train.bin (16,001 tokens)"),
        ("train.bin", b"\7\0" * 16_001, "data has changed: train.bin (16,001 tokens)"),
    ):
        (folder / name).write_bytes(content)
        told = run(*flags, 8, expect=2)
        assert said in told and ("--allow_change data" in told) == ("changed" in said)
        (folder / name).write_bytes(before[name])
    (folder / "train.bin.mask").unlink()
    write_tokens(folder / "train.bin", [b"something else " * 1000])
    told = run(*flags, 8, expect=2)
    assert "data has changed: train.bin (15,001 tokens)" in told and "--allow_change data" in told
    assert "at step 6" in run(*flags, 8, "--allow_change", "data")


def test_changes_are_listed_and_refused(run, copy):
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20, "--seed", 7, "--batch_size", 4]
    output = run(*flags, bare=True, expect=2)
    assert "seed 1337 -> 7, batch_size 8 -> 4" in output
    assert "--allow_change seed batch_size" in output
    assert "batch_size" in run(*flags, "--allow_change", "seed", bare=True, expect=2)
    run(*flags, "--allow_change", "seed", "batch_size", bare=True)
    assert saved(copy)["position"] == 12 * 8 + 8 * 4  # no sample twice, none skipped


def test_resuming_a_long_run_reads_only_its_tail(copy):
    """Old rows are neither read nor rewritten; only rows of steps to be made again are dropped."""
    path = copy / "metrics.jsonl"
    whole = "".join(f'{{"step": {i // 100_000}, "train/loss": 1.0}}\n' for i in range(300_000))
    whole, late = whole + path.read_text(), '{"step": 12, "y": [null, true, "é"]}\n'
    path.write_text(f'{whole}{{"step": 13, "x": 1}}\n{late}{late}{{"step": 14, "torn')
    os.link(path, copy / "of_another_run")  # as cp -al does
    began = time.process_time()
    file, history, _ = telemetry.open_metrics(path, 12)
    file.close()
    assert history.rows[-1]["step"] == 12 and path.read_text() == whole + 2 * late
    assert (copy / "of_another_run").read_text().endswith('"torn')
    assert time.process_time() - began < 5  # all of it would take longer


def test_a_clock_that_jumps_back(run, tmp_path, monkeypatch):
    hours, plain = itertools.count(0), time.time
    monkeypatch.setattr(time, "time", lambda: plain() - 3600 * next(hours))
    run("--out_dir", "r", "--save_interval", 4)
    values = [v for row in rows(tmp_path / "r") for k, v in row.items()
              if k.startswith(("perf/", "goodput/")) and isinstance(v, (int, float))]
    assert values and min(values) >= 0


# --- backups ---


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket on a local server that speaks S3."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in dict(ACCESS_KEY_ID="x", SECRET_ACCESS_KEY="x", DEFAULT_REGION="us-east-1",
                            ENDPOINT_URL=f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://bucket/run"  # a bucket that is not there yet
    server.stop()


@pytest.mark.parametrize("scheme", ["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_backup_can_be_resumed(run, tmp_path, request, monkeypatch, scheme):
    url = request.getfixturevalue("s3") if scheme == "s3" else f"{scheme}://{tmp_path}/disk2"
    monkeypatch.setattr(train, "evaluate", lambda run: torch.tensor(run.progress.step))
    monkeypatch.setattr(data.Mixture, "count_tokens", lambda *_: torch.tensor(1))
    run("--out_dir", "r", "--backup_to", url, "--save_interval", 2, "--eval_interval", 2)
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    output = run("--resume", url, "--out_dir", "new", "--max_steps", 20, bare=True)
    assert "step_00000012.pt at step 12" in output
    assert torch.load(tmp_path / "new/checkpoints/best.pt", weights_only=True)["step"] == 2
    assert "holds a run already" in run("--resume", url, "--out_dir", "new", expect=2)
    # its history came along, and the new run keeps backing up there
    assert list(column(tmp_path / "new", "train/loss")) == [1, 4, 8, 12, 13, 16, 20]
    assert "at step 20" in run("--resume", url, "--max_steps", 21, bare=True)
    expected = f"error: --resume {url}/r.pt: no valid checkpoint; expected a URL of --backup_to"
    assert expected in run("--resume", f"{url}/r.pt", "--out_dir", "refused", expect=2)
    output = run("--backup_to", "nothing://there", "--out_dir", "refused", expect=2)
    assert "error: --backup_to nothing://there" in output and not (tmp_path / "refused").exists()


def test_a_damaged_backup_is_passed_over(run, tmp_path, backed_up):
    flip(tmp_path / "disk2/checkpoints/step_00000008.pt")
    output = run("--resume", backed_up, "--out_dir", "b", bare=True)
    assert "step_00000008.pt: its checksum is wrong" in output and "at step 4" in output


@pytest.fixture
def backed_up(run, tmp_path) -> str:
    """The URL of the backup of a run in the directory `a`, of 8 steps."""
    url = f"file://{tmp_path}/disk2"
    run("--out_dir", "a", "--backup_to", url, "--max_steps", 8, "--save_interval", 4)
    return url


def test_a_backup_of_another_run_is_refused(run, tmp_path, backed_up):
    run("--out_dir", "b", "--max_steps", 4)
    before = contents(tmp_path, "lock")
    for flags in (["--out_dir", "c"], ["--out_dir", "c", "--auto-resume"], [],
                  ["--out_dir", "a", "--overwrite"],
                  ["--out_dir", "c", "--resume", "a/checkpoints/step_00000004.pt"]):
        output = run(*flags, "--backup_to", backed_up, expect=2)
        assert f"--backup_to {backed_up}: holds another run" in output
        assert f"--resume {backed_up}" in output and contents(tmp_path, "lock") == before
    for flags in ([backed_up, "--eval_only"], [backed_up, "--overwrite"],
                  ["a/checkpoints/step_00000004.pt"]):
        told = run("--out_dir", "b", "--resume", *flags, bare=True, expect=2)
        assert "--out_dir b: holds a run already" in told and contents(tmp_path, "lock") == before
    told = run("--out_dir", "d", "--backup_to", "disk3", hook=lambda rank: after_step(
        2, lambda: shutil.copytree("disk2", "disk3", dirs_exist_ok=True)))  # began just before it
    assert "no backup to disk3, training continues: it now holds another run" in told
    assert steps(tmp_path / "disk3") == [4, 8]
    shutil.move(tmp_path / "a/checkpoints", tmp_path / "moved")  # and there is no other copy
    assert "holds another run" in run("--out_dir", "a", "--auto-resume", bare=True, expect=2)


@pytest.mark.parametrize("place", ["r", ".", "link", "runs/7"])
def test_a_backup_apart_from_the_run_is_expected(run, copy, tmp_path, place):
    (tmp_path / "link").symlink_to(copy)
    before = contents(tmp_path, "lock")
    flags = [] if place == "runs/7" else ["--out_dir", "r", "--auto-resume"]
    for url in (place, f"local://{tmp_path}/x/../{place}"):
        assert f"--backup_to {url}: overlaps the run" in run(*flags, "--backup_to", url, expect=2)
    assert contents(tmp_path, "lock") == before


def test_a_run_goes_on_with_its_own_backup(run, tmp_path, backed_up, monkeypatch):
    files = [tmp_path / "disk2" / name for name in ("config.yaml", "checkpoints/best.pt")]

    def lose(self, asked):  # as somebody else does before each last upload
        self.thread.join(60)
        for file in files:
            file.unlink(missing_ok=True)  # the best may not be there yet

    before(backup.Backup, "close", lose, monkeypatch.setattr)
    run("--auto-resume", "--out_dir", "a", "--max_steps", 12, bare=True)
    assert steps(tmp_path / "disk2") == [4, 8, 12] and all(f.exists() for f in files)
    run("--resume", "a/checkpoints/step_00000004.pt", "--max_steps", 6, "--keep_checkpoints", 1,
        bare=True)
    assert steps(tmp_path / "disk2") == [6]  # without those that it went back from
    run("--resume", backed_up, "--out_dir", "b", "--max_steps", 16, bare=True)
    assert steps(tmp_path / "disk2") == [16]
    told = run("--auto_resume", "--out_dir", "a", "--max_steps", 9, bare=True, expect=2)
    assert "holds step 16 of this run, a only step 12; continue it with --resume" in told


def test_a_failing_backup_does_not_stop_training(run, tmp_path, monkeypatch):
    after(LocalFileSystem, "put_file", lambda _, file, *to: file.endswith(".pt") and os.stat(""),
          monkeypatch.setattr)
    output = run("--out_dir", "r", "--backup_to", f"file://{tmp_path}/b", "--save_interval", 4)
    assert "no backup to file://" in output and "step 12/12" in output
    assert not os.listdir(tmp_path / "b/checkpoints")  # no half of one


def test_a_run_that_is_told_to_stop_waits_for_no_backup(run, tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(backup.Backup, "close", lambda self, asked: copied.append(self.newest.step))
    monkeypatch.setattr(backup.Backup, "upload", lambda *_: None)  # its thread would outlive a run
    flags = ["--out_dir", "r", "--backup_to", f"file://{tmp_path}/b"]
    after_step(6, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch.setattr)
    run(*flags, expect=143)
    assert copied == [] and steps(tmp_path / "r") == [6]
    run(*flags, "--auto_resume")
    assert copied == [12]


# --- verify_resume ---


def test_verify_resume(run, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    flags = ["--patience", 1, "--eval_interval", 1, "--learning_rate", 1]  # ends no part of it
    flags += ["--auto_resume", "--dropout", "0.1"]  # it starts afresh all the same
    assert "verify  steps 4 to 8 resumed: " in run("--verify_resume", 4, *flags)
    flags += ["--learning_rate", 1e-3]  # each evaluation saves
    assert "verify  steps 4 to 8 resumed: " in run("--verify_resume", 4, *flags)
    told = run("--verify_resume", 4, "--init_from", "r", "--eval_only", expect=2)
    assert "--eval_only: not with" in told and "Traceback" not in told
    plain = train.seed_everything  # below, as if dropout did not resume
    count = itertools.count()
    monkeypatch.setattr(train, "seed_everything", lambda *a: plain(next(count), *a[1:]))
    assert "values differ, as model." in run("--verify_resume", 4, "--dropout", "0.1", expect=1)
    monkeypatch.setattr(writer.Writer, "write", lambda *_: None)
    assert "no checkpoint of step 4" in run("--verify_resume", 4, expect=2)
    assert not list((tmp_path / "temporary").glob("steady-verify-*"))
