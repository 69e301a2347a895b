"""What must happen when things go wrong, each fault really provoked in a small run.

TABLE says which test covers which fault; a test sees to it that they exist.
"""

import ast
import errno
import io
import itertools
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TINY, Process, column, free_port, processes, rows, wait_for

import checkpoint
import config
import data
import prepare
import train
from checkpoint import list_checkpoints, problem
from model import Transformer

TABLE = {
    "kill -9 again and again": "test_killed_again_and_again",
    "killed between write, sync, rename and rotation": "test_killed_at_a_bad_moment",
    "newest checkpoint cut short, flipped, zeroed": "test_a_damaged_checkpoint_is_set_aside",
    "any flipped bit": "test_every_flipped_bit_is_found",
    "every checkpoint bad": "test_never_starts_at_0_silently",
    "disk full while saving": "test_a_full_disk_while_saving",
    "disk full in metrics or TensorBoard": "test_a_full_disk_stops_no_training",
    "transient I/O error": "test_what_may_pass_is_tried_again",
    "permanent error": "test_what_will_not_pass_is_not",
    "output directory read-only or a file": "test_a_place_that_cannot_be_written",
    "two runs in one directory": "test_one_writer_a_directory",
    "launcher killed": "test_orphans_notice",
    "SIGTERM": "test_sigterm_saves_and_resumes_bit_for_bit",
    "SIGTERM to torchrun or one rank": "test_a_signal_to_one_rank_stops_all_at_one_step",
    "SIGTERM with loader workers": "test_loader_workers_do_not_die_first",
    "second Ctrl-C in a slow save": "test_a_second_ctrl_c_exits_at_once",
    "signal during a periodic save": "test_a_signal_during_a_save",
    "one rank dies": "test_a_rank_that_dies",
    "one rank raises": "test_a_rank_that_raises",
    "exception in forward": "test_an_exception_saves_the_last_step",
    "exception in optimizer.step": "test_half_an_update_is_not_saved",
    "not finite gradient on one rank":
        "test_what_is_not_finite_on_one_rank_is_skipped_counted_and_told",
    "not finite for long": "test_rollback_steps_over_the_bad_samples",
    "NaN in the weights": "test_weights_that_are_not_finite_are_not_saved",
    "out of memory": "test_out_of_memory_says_what_to_try",
    "data changed": "test_other_data_is_refused",
    "architecture changed": "test_a_checkpoint_of_another_model_is_refused",
    "compile or DDP switched": "test_compile_and_ranks_are_free_to_change",
    "optimizer in another order": "test_another_order_of_parameters_is_refused",
    "malicious pickle": "test_a_pickle_is_not_executed",
    "links and strangers": "test_strangers_are_left_alone",
    "start in a directory that holds a run": "test_run_directories",
    "one checkpoint kept and an early best": "test_one_newest_and_the_best_both_stay",
    "finished run": "test_kill_and_auto_resume_is_the_undisturbed_run_bit_for_bit",
    "clock jumps backwards": "test_a_clock_that_jumps_back",
    "code that comes with a model": "test_code_of_others_is_not_run_unless_it_is_trusted",
    "all targets of a micro-batch ignored": "test_documents_with_nothing_to_learn_are_no_nan",
    "a malformed line among many; not UTF-8": "test_a_bad_line_is_named_or_left_out_and_counted",
    "preparation interrupted": "test_what_is_interrupted_leaves_the_old_data_alone",
    "a token id that its type cannot hold": "test_an_id_never_wraps",
    "documents resumed on other ranks": "test_other_ranks_and_a_resume_see_the_same_samples",
}  # fmt: skip
FLAGS = [*TINY, "--eval_interval", "0", "--no_tensorboard"]


def test_the_table_names_tests_that_exist():
    names = {node.name for path in Path(__file__).parent.glob("test_*.py")
             for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.FunctionDef)}  # fmt: skip
    assert set(TABLE.values()) <= names


def final(run_dir: Path) -> dict:
    path = list_checkpoints(run_dir / "checkpoints")[-1]
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same_end(one: Path, two: Path):
    a, b = final(one), final(two)
    for key in ("step", "model", "optimizers", "scaler", "position"):
        assert checkpoint.compare(a[key], b[key], key)[1] == []


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.checkpoint_step(p) for p in list_checkpoints(run_dir / "checkpoints")]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of 12 steps with checkpoints of steps 4, 8 and 12; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    process = Process(folder, [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4])
    assert process.code() == 0, process.text()
    return folder / "r"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


# --- killed ---


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_again_and_again(run, corpus, tmp_path, ranks):
    """At random moments, start-up and saving included, until it has got to its end."""
    last = 150 if ranks == 1 else 100
    flags = [*FLAGS, "--data", corpus, "--max_steps", last, "--save_interval", 3, "--dropout",
             "0.1", "--auto-resume"]  # fmt: skip
    for process in processes(tmp_path, ranks, [*flags, "--out_dir", "whole"]):
        assert process.code() == 0, process.text()
    dice, kills, newest = random.Random(ranks), 0, 0
    while True:
        for log in tmp_path.glob("log*"):
            log.unlink()
        group = processes(tmp_path, ranks, [*flags, "--out_dir", "killed"])
        if kills < (8 if ranks == 1 else 6):
            if dice.random() < 0.8:  # else while it starts
                group[0].wait_for("\nstep ")
            time.sleep(dice.uniform(0, 0.3))
            dice.choice(group).kill(signal.SIGKILL)
            for process in group[1:] and group:  # as torchrun does: who starts up hears of nothing
                process.kill(signal.SIGTERM)
        codes = [process.code() for process in group]
        found = steps(tmp_path / "killed")
        assert not found or found[-1] >= newest, "it has lost a checkpoint"
        newest = found[-1] if found else 0
        if codes == [0] * ranks:
            break
        kills += 1
        assert kills < 60, group[0].text()
    assert kills > 4
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    logged = list(column(tmp_path / "killed", "train/loss"))
    assert logged == sorted(set(logged)) and logged[-1] == last


@pytest.mark.parametrize("moment", ["write", "sync", "verify", "rename", "rotate"])
def test_killed_at_a_bad_moment(run, corpus, tmp_path, moment):
    def hook():
        def die_at(count, call):
            def wrapped(*args, **kwargs):
                counter[0] += 1
                if counter[0] == count:
                    os._exit(9)
                return call(*args, **kwargs)

            counter = [0]
            return wrapped

        if moment == "write":
            checkpoint.SealedFile.pass_on = die_at(30, checkpoint.SealedFile.pass_on)
        elif moment == "verify":
            checkpoint.problem = die_at(2, checkpoint.problem)
        elif moment == "rotate":
            checkpoint.rotate = die_at(2, checkpoint.rotate)
        else:
            name = {"sync": "fsync", "rename": "replace"}[moment]
            plain, calls = getattr(os, name), [0]

            def call(*args):
                calls[0] += "step_" in str(args) or moment == "sync"
                if calls[0] == 4:
                    os._exit(9)
                return plain(*args)

            setattr(checkpoint.os, name, call)

    flags = [*FLAGS, "--data", corpus, "--save_interval", 2, "--keep_checkpoints", 1,
             "--out_dir", "r"]  # fmt: skip
    process = Process(tmp_path, flags, hook)
    assert process.code() == 9, process.text()
    left = list_checkpoints(tmp_path / "r" / "checkpoints")
    assert all(problem(path) is None for path in left) and (left or moment == "write")
    run(*FLAGS, "--auto-resume", "--out_dir", "r", bare=True)
    assert steps(tmp_path / "r") == [12]
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


# --- damaged files ---


def cut(size):
    def damage(path):
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return damage


def flip(path, position=None, bit=3):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut(0), cut(10), cut(20_000), cut(-1), cut(-20), flip, zero])
def test_a_damaged_checkpoint_is_set_aside(run, copy, finished, damage):
    damage(copy / "checkpoints/step_00000012.pt")
    told = run("--auto-resume", "--out_dir", "r", bare=True)
    assert "step_00000012.pt: " in told and "set aside as .corrupt" in told
    assert "step_00000008.pt at step 8" in told
    assert (copy / "checkpoints/step_00000012.pt.corrupt").exists()
    assert_same_end(finished, copy)


def test_every_flipped_bit_is_found(copy):
    path, dice = copy / "checkpoints/step_00000008.pt", random.Random(0)
    content = path.read_bytes()
    assert problem(path) is None
    with zipfile.ZipFile(path) as archive:  # it is still a zip file like any other
        assert archive.testzip() is None
    size = len(content)
    for position in [0, size - 1, size - 25, size - 30, *(dice.randrange(size) for _ in range(80))]:
        flip(path, position, dice.randrange(8))
        assert problem(path), position
        path.write_bytes(content)


def test_never_starts_at_0_silently(run, copy):
    for path in list_checkpoints(copy / "checkpoints"):
        flip(path)
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file() and p.name != "lock"}
    for _ in range(2):
        told = run("--auto-resume", "--out_dir", "r", bare=True, expect=2)
        assert "no checkpoint is whole" in told and "--overwrite" in told
    after = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file() and p.name != "lock"}
    assert before == after


def test_check_checkpoints_lists_them(run, copy):
    flip(copy / "checkpoints/step_00000008.pt")
    told = run("--check_checkpoints", "r", bare=True, expect=1)
    assert "step_00000008.pt" in told and told.count("INVALID: its checksum is wrong") == 1
    assert told.count(" valid") == 2 and "        12 " in told


def test_a_checkpoint_of_an_earlier_version_is_read(run, tmp_path):
    """Written by the version before checksums and positions were in the file."""
    old = tmp_path / "step_00000004.pt"
    shutil.copy(Path(__file__).parent / "fixtures/format_1.pt", old)
    told = run("--resume", old, "--out_dir", "r", "--n_layer", 1, "--n_head", 1, "--d_model", 16,
               "--d_ff", 32, "--max_steps", 8, "--eval_interval", 8)  # fmt: skip
    assert "at step 4" in told
    assert column(tmp_path / "r", "val/loss")[8] == pytest.approx(3.849582, rel=1e-4)


def test_another_order_of_parameters_is_refused(run, copy):
    path = copy / "checkpoints/step_00000012.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer_names"][1].reverse()
    checkpoint.write_checkpoint(path, state)
    told = run("--auto-resume", "--out_dir", "r", "--max_steps", 20, bare=True, expect=2)
    assert "its optimizer holds other parameters, or in another order" in told


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_executed(run, copy, tmp_path):
    torch.save({"format": 1, "step": Evil(tmp_path / "touched")}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(tmp_path / "touched")) * 100)
    for name in ("evil.pt", "plain.pt"):
        told = run("--resume", tmp_path / name, "--out_dir", "new", expect=2)
        assert "not a checkpoint that can be read" in told
    assert not (tmp_path / "touched").exists() and not (tmp_path / "new").exists()


def test_strangers_are_left_alone(run, copy, tmp_path):
    folder, outside = copy / "checkpoints", tmp_path / "outside.pt"
    outside.write_text("not ours")
    strangers = [
        folder / "step_9.backup",
        folder / "step_00000001.pt.tmp-notes",
        folder / "step_1.pt",
    ]
    for path in strangers:
        path.write_text("not ours")
    (folder / "step_00000099.pt").symlink_to(outside)
    (folder / "step_00000001.pt").symlink_to(outside)
    (folder / "step_00000003.pt.tmp-123").write_text("the rest of a killed save")
    run("--auto-resume", "--out_dir", "r", "--max_steps", 20, "--keep_checkpoints", 1, bare=True)
    assert steps(copy) == [20] and outside.read_text() == "not ours"
    assert all(path.exists() for path in strangers)
    assert (folder / "step_00000099.pt").is_symlink() and (folder / "step_00000001.pt").is_symlink()
    assert not (folder / "step_00000003.pt.tmp-123").exists()


def test_one_newest_and_the_best_both_stay(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda run, step: float(step))
    run("--out_dir", "r", "--keep_checkpoints", 1, "--eval_interval", 2, "--save_interval", 2)
    folder = tmp_path / "r" / "checkpoints"
    assert steps(tmp_path / "r") == [12]
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["step"] == 2 and problem(folder / "best.pt") is None
    assert final(tmp_path / "r")["best_loss"] == 2


def test_milestones_stay(run, tmp_path):
    run("--out_dir", "r", "--keep_checkpoints", 2, "--save_interval", 1, "--keep_every", 5)
    assert steps(tmp_path / "r") == [5, 10, 11, 12]


# --- the disk ---


def test_a_full_disk_while_saving(run, corpus, tmp_path):
    """Training goes on without, from the last good checkpoint, until too many have failed."""

    def hook():
        plain, calls = checkpoint.write_checkpoint, [0]

        def limited(*args):
            calls[0] += 1
            size = 10_000 if 2 <= calls[0] <= 3 or calls[0] >= 5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                plain(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

        checkpoint.write_checkpoint = limited

    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 40, "--save_interval", 2]
    process = Process(tmp_path, flags, hook)
    assert process.code() == 1, process.text()
    told = process.text()
    assert "step 4: the checkpoint could not be written, training goes on (1 of 3)" in told
    assert "3 checkpoints in a row could not be written" in told
    assert steps(tmp_path / "r") == [2, 8]  # the 4th save went well, and counts begin anew
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


def failing(number: int, times: int):
    """torch.save that fails at first."""
    plain, calls = torch.save, []

    def save(*args):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return plain(*args)

    return save, calls


def test_what_may_pass_is_tried_again(run, tmp_path, monkeypatch):
    save, calls = failing(errno.EIO, 2)
    slept = []
    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(config.time, "sleep", slept.append)
    told = run("--out_dir", "r", "--save_interval", 6, "--num_workers", 0)
    assert told.count("tried again") == 2 and steps(tmp_path / "r") == [6, 12] and len(calls) == 4
    waits = [s for s in slept if s >= 0.5]
    assert 0.5 <= waits[0] <= 0.75 and 1 <= waits[1] <= 1.5
    assert max(column(tmp_path / "r", "health/retries").values()) >= 2


def test_what_will_not_pass_is_not(run, tmp_path, monkeypatch):
    save, calls = failing(errno.EACCES, 1)
    monkeypatch.setattr(torch, "save", save)
    told = run("--out_dir", "r", "--save_interval", 6)
    assert "tried again" not in told and "training goes on (1 of 3): [Errno 13]" in told
    assert steps(tmp_path / "r") == [12]


def test_data_that_could_not_be_read_is_read_again(run, tmp_path, monkeypatch):
    plain, calls = data.Mixture.batch, itertools.count(1)

    def batch(self, *args):
        if next(calls) in (5, 6):
            raise OSError(errno.EIO, "the disk had a hiccup")
        return plain(self, *args)

    run("--out_dir", "whole")
    monkeypatch.setattr(data.Mixture, "batch", batch)
    monkeypatch.setattr(config.time, "sleep", lambda s: None)
    assert run("--out_dir", "r").count("hiccup; tried again") == 2
    assert_same_end(tmp_path / "whole", tmp_path / "r")


def test_a_place_that_cannot_be_written(run, tmp_path, monkeypatch):
    place = tmp_path / "read-only"
    place.mkdir()
    plain = os.access  # root may write anywhere, so this is the one thing that is not provoked
    monkeypatch.setattr(os, "access", lambda p, mode: str(p) != str(place) and plain(p, mode))
    told = run("--out_dir", place / "r", expect=2)
    assert f"{place} is not writable" in told and not list(place.iterdir())
    (tmp_path / "file").touch()
    assert "is a file; expected a directory" in run("--out_dir", "file", expect=2)


def test_what_is_written_is_not_for_everybody_to_change(run, tmp_path):
    before = os.umask(0)
    try:
        run("--out_dir", "r")
    finally:
        os.umask(before)
    for path in (tmp_path / "r").rglob("*"):
        assert not path.stat().st_mode & 0o002, path


# --- who else is there ---


def test_one_writer_a_directory(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 100_000]
    process = Process(tmp_path, flags)
    wait_for(tmp_path / "r" / "checkpoints" / "step_00000100.pt")
    for flag in ("--auto-resume", "--overwrite"):
        told = run("--out_dir", "r", flag, expect=2)
        assert f"process {process.pid} on {socket.gethostname()} is writing there" in told
    process.kill(signal.SIGKILL)
    process.code()
    run("--auto-resume", "--out_dir", "r", "--max_steps", 200, bare=True)  # its lock went with it


def test_orphans_notice(corpus, tmp_path):
    """A launcher, which starts a rank and is killed."""
    launcher = os.fork()
    if not launcher:
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
        Process(tmp_path, [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 100_000])
        time.sleep(1000)
    wait_for(tmp_path / "r" / "checkpoints" / "step_00000100.pt")
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    for _ in range(3000):
        if "stopped at step" in (tmp_path / "log.txt").read_text():
            break
        time.sleep(0.01)
    step = steps(tmp_path / "r")[-1]
    assert f"stopped at step {step} by SIGTERM" in (tmp_path / "log.txt").read_text()


# --- signals ---


def at_step(monkeypatch, step: int, do):
    """Call `do` in a run just before the update after `step`, once."""
    plain, done = train.learning_rate, []

    def learning_rate(at, cfg):
        if at == step and not done:
            done.append(do())
        return plain(at, cfg)

    monkeypatch.setattr(train, "learning_rate", learning_rate)


def test_sigterm_saves_and_resumes_bit_for_bit(run, tmp_path, monkeypatch):
    run("--out_dir", "whole", "--dropout", "0.1")
    handler = signal.getsignal(signal.SIGTERM)
    at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    told = run("--out_dir", "r", "--dropout", "0.1", expect=143)
    assert steps(tmp_path / "r") == [6]
    assert "stopped at step 6 by SIGTERM; --auto-resume" in told and "sample" not in told
    assert signal.getsignal(signal.SIGTERM) is handler
    run("--auto-resume", "--out_dir", "r", bare=True)
    assert_same_end(tmp_path / "whole", tmp_path / "r")


def test_sigusr1_saves_and_goes_on(run, tmp_path, monkeypatch):
    at_step(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    run("--out_dir", "r", "--save_interval", 0, "--eval_interval", 0)
    assert steps(tmp_path / "r") == [6]


def test_a_signal_to_one_rank_stops_all_at_one_step(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--save_interval", 40]
    group = processes(tmp_path, 2, flags)
    wait_for(tmp_path / "r" / "checkpoints" / "step_00000040.pt")
    group[1].kill(signal.SIGTERM)
    assert [process.code() for process in group] == [143, 143], group[0].text() + group[1].text()
    step = steps(tmp_path / "r")[-1]
    assert f"stopped at step {step} by SIGTERM" in group[0].text()


def test_torchrun_can_be_stopped_and_brings_a_killed_rank_back(run, corpus, tmp_path):
    """Under the real torchrun: kill -9 of a rank, which it starts again, then SIGTERM to all."""
    import subprocess
    import sys

    from conftest import environment

    flags = [*map(str, FLAGS), "--data", str(corpus), "--max_steps", "60", "--save_interval", "5"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                "--max_restarts", "2", "--master_port", str(free_port())]  # fmt: skip
    script = tmp_path / "slow.py"  # the first attempt waits to be killed
    script.write_text(
        "import os, sys, time, train\nplain = train.learning_rate\n"
        "def slow(step, cfg):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if step == 23 and first and os.environ['RANK'] == '1':\n"
        "        open('pid', 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    return plain(step, cfg)\n"
        "train.learning_rate = slow\ncode = train.command(sys.argv[1:])\n"
        "sys.stdout.flush(); os._exit(code)\n"
    )
    process = subprocess.Popen(
        [*launcher, str(script), *flags], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for(tmp_path / "pid")
    time.sleep(0.2)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    told = process.communicate(timeout=120)[0]
    assert process.returncode == 0, told
    assert "resume  runs/001/checkpoints/step_000000" in told
    for whole in processes(tmp_path, 2, [*flags, "--out_dir", "whole"]):
        assert whole.code() == 0
    assert_same_end(tmp_path / "whole", tmp_path / "runs/001")


def test_loader_workers_do_not_die_first(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--num_workers", 2,
             "--save_interval", 20]  # fmt: skip
    process = Process(tmp_path, flags)
    wait_for(tmp_path / "r" / "checkpoints" / "step_00000020.pt")
    os.killpg(process.pid, signal.SIGTERM)  # to its loaders too
    assert process.code() == 143, process.text()
    assert "stopped at step" in process.text() and "Traceback" not in process.text()


def slow_save(seconds: float, started: Path):
    plain = checkpoint.write_checkpoint

    def write(path, state):
        if "step_00000008" in path.name:
            started.touch()
            time.sleep(seconds)
        plain(path, state)

    checkpoint.write_checkpoint = write


def test_a_second_ctrl_c_exits_at_once(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4, "--max_steps", 100]
    started = tmp_path / "started"
    process = Process(tmp_path, flags, lambda: slow_save(1000, started))
    wait_for(started)
    process.kill(signal.SIGINT)
    time.sleep(0.5)
    assert os.waitpid(process.pid, os.WNOHANG)[0] == 0  # it waits for the save
    process.kill(signal.SIGINT)
    assert process.code(20) == 130
    assert steps(tmp_path / "r") == [4]
    assert problem(tmp_path / "r/checkpoints/step_00000004.pt") is None


def test_a_signal_during_a_save(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4, "--max_steps", 20]
    started = tmp_path / "started"

    def hook():
        slow_save(1, started)
        train.learning_rate = lambda step, cfg: time.sleep(0.3 * (step == 8)) or 1e-3

    process = Process(tmp_path, flags, hook)
    wait_for(started)
    process.kill(signal.SIGTERM)
    assert process.code() == 143, process.text()
    found = steps(tmp_path / "r")
    assert found[:2] == [4, 8] and len(found) == 3  # the one that was being written, and the last
    assert all(problem(p) is None for p in list_checkpoints(tmp_path / "r" / "checkpoints"))


# --- ranks ---


def test_a_rank_that_dies(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--save_interval", 40]
    group = processes(tmp_path, 2, flags)
    wait_for(tmp_path / "r" / "checkpoints" / "step_00000040.pt")
    group[1].kill(signal.SIGKILL)
    assert group[0].code() == 1 and group[1].code() == -9
    told = group[0].text()
    assert "train.py: failed: another rank is gone" in told and "Traceback" not in told
    assert f"saved the last completed step, {steps(tmp_path / 'r')[-1]}" in told


def test_a_rank_that_raises(corpus, tmp_path):
    def hook(rank):
        plain = train.learning_rate

        def learning_rate(step, cfg):
            if step == 3 and rank == 1:
                raise ValueError("bad luck")
            return plain(step, cfg)

        train.learning_rate = learning_rate

    group = processes(tmp_path, 2, [*FLAGS, "--data", corpus, "--out_dir", "r"], hook)
    assert [process.code() for process in group] == [1, 1]
    told = group[1].text()
    assert told.index("train.py: failed: ValueError: bad luck") < told.index("Traceback")
    assert "Traceback" not in group[0].text()
    assert steps(tmp_path / "r") == [3]


def test_compile_and_ranks_are_free_to_change(run, corpus, tmp_path):
    """1 rank, 2 ranks, 1 rank compiled, 1 rank: the same samples, so the same losses."""
    flags = [*FLAGS, "--data", corpus, "--log_interval", 1, "--lr_schedule", "constant"]
    run(*flags, "--out_dir", "whole", "--max_steps", 20)
    flags += ["--out_dir", "r", "--auto-resume", "--max_steps"]
    run(*flags, 5)
    for process in processes(tmp_path, 2, [*flags, 10]):
        assert process.code() == 0, process.text()
    run(*flags, 15, "--compile")
    run(*flags, 20, "--no_compile")
    one, two = (column(tmp_path / name, "train/loss") for name in ("whole", "r"))
    assert list(one) == list(two) and list(one.values()) == pytest.approx(
        list(two.values()), rel=1e-3
    )
    model = Transformer(train.config.resolve(config.parse([*TINY, "--vocab_size", "257"])))
    names = list(model.state_dict())
    model.compile()
    assert list(model.state_dict()) == names


# --- exceptions ---


def test_an_exception_saves_the_last_step(run, tmp_path, monkeypatch):
    for error, code, said in ((ValueError("bad luck"), 1, "failed: ValueError: bad luck"),
                              (KeyboardInterrupt(), 130, "interrupted")):  # fmt: skip

        def fail(error=error):
            raise error

        with monkeypatch.context() as patch:
            at_step(patch, 5, fail)
            told = run("--out_dir", f"r{code}", expect=code)
        assert said in told and "saved the last completed step, 5" in told
        run("--auto-resume", "--out_dir", f"r{code}", bare=True)
    run("--out_dir", "whole")
    assert_same_end(tmp_path / "whole", tmp_path / "r1")
    assert_same_end(tmp_path / "whole", tmp_path / "r130")


def test_half_an_update_is_not_saved(run, tmp_path, monkeypatch):
    calls, plain = itertools.count(1), torch.optim.AdamW.step

    def step(self, *args):
        if next(calls) == 6:
            raise ValueError("bad luck")
        return plain(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    told = run("--out_dir", "r", "--save_interval", 4, expect=1)
    assert steps(tmp_path / "r") == [4] and "saved the last" not in told


def test_out_of_memory_says_what_to_try(run, tmp_path, monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    at_step(monkeypatch, 5, fail)
    told = run("--out_dir", "r", expect=1)
    assert "out of memory: Tried to allocate 20.00 GiB. try --micro_batch_size 4; the" in told
    assert steps(tmp_path / "r") == [5]


def test_the_micro_batch_that_fits_is_found(run, tmp_path, monkeypatch):
    plain = Transformer.forward

    def forward(self, tokens, targets):
        if len(tokens) > 5:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")
        return plain(self, tokens, targets)

    run("--out_dir", "whole", "--log_interval", 1)
    monkeypatch.setattr(Transformer, "forward", forward)
    told = run("--out_dir", "r", "--micro_batch_size", "auto", "--log_interval", 1)
    assert "1 x 2 micro-batches of 4" in told
    one, two = (column(tmp_path / name, "train/loss") for name in ("whole", "r"))
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-4)


# --- not finite ---


def poison(monkeypatch, first: int, last: int):
    """The loss of a batch with one of the samples first … last - 1 is not finite."""
    forward, batch = Transformer.forward, data.Mixture.batch

    def bad_batch(self, start, stop):
        out = batch(self, start, stop)
        return data.Batch(torch.full_like(out.tokens, 7)) if start < last and stop > first else out

    def bad_forward(self, tokens, targets):
        loss, count = forward(self, tokens, targets)
        return (loss * math.nan if (tokens == 7).all() else loss), count

    monkeypatch.setattr(data.Mixture, "batch", bad_batch)
    monkeypatch.setattr(Transformer, "forward", bad_forward)


BAD = ["--max_steps", 40, "--save_interval", 10, "--eval_interval", 0, "--log_interval", 5,
       "--max_nonfinite", 5]  # fmt: skip


@pytest.mark.parametrize("monitor", ["light", "off"])
def test_rollback_steps_over_the_bad_samples(run, tmp_path, monkeypatch, monitor):
    poison(monkeypatch, 160, 240)  # those of steps 21 to 30
    told = run("--out_dir", "r", *BAD, "--on_nonfinite", "rollback", "--monitor", monitor)
    assert "warning: 5 steps in a row, up to step 25, had a loss or gradient that was not" in told
    assert "step_00000020.pt, on with sample 200" in told
    assert "step_00000020.pt, on with sample 240" in told
    assert list(column(tmp_path / "r", "train/loss")) == [1, *range(5, 21, 5), 21, 25, 30, 35, 40]
    assert all(v is not None for v in column(tmp_path / "r", "train/loss").values())
    state = final(tmp_path / "r")
    assert state["step"] == 40 and state["position"] == 40 * 8 + 80
    import contextlib

    shown = {}
    for step in (20, 21):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert data.main(["show", str(tmp_path / "r"), str(step)]) == 0
        shown[step] = output.getvalue()
    assert "152" in shown[20] and "240" in shown[21]


def test_rollback_gives_up(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 10**9)
    told = run("--out_dir", "r", *BAD, "--on_nonfinite", "rollback", expect=1)
    assert told.count("; back to ") == 3 and "failed: 5 steps in a row" in told


def test_abort(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 240)
    told = run("--out_dir", "r", *BAD, "--on_nonfinite", "abort", expect=1)
    assert "train.py: failed: 5 steps in a row, up to step 25, had" in told
    assert "Traceback" not in told and steps(tmp_path / "r")[-1] <= 25


def test_skip_goes_on(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 240)
    told = run("--out_dir", "r", *BAD)
    assert "finite again; 10 steps from step 21 on were not" in told
    assert final(tmp_path / "r")["position"] == 320


def test_weights_that_are_not_finite_are_not_saved(run, tmp_path, monkeypatch):
    running, make = [], train.make_monitor
    monkeypatch.setattr(train, "make_monitor", lambda run: running.append(run) or make(run))

    def spoil():
        with torch.no_grad():
            running[0].model.blocks[1].mlp.down.weight[0, 0] = math.inf

    at_step(monkeypatch, 5, spoil)
    told = run("--out_dir", "r", "--save_interval", 2, "--eval_interval", 4)
    assert "step 6: the weights are not finite; not saved" in told
    assert steps(tmp_path / "r") == [2, 4]
    assert torch.load(tmp_path / "r/checkpoints/best.pt", weights_only=True)["step"] == 4


# --- what changed ---


def test_other_data_is_refused(run, copy, corpus, tmp_path):
    other = Path(shutil.copytree(corpus, tmp_path / "other"))
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20, "--data", other]
    run(*flags[:-1], other, "--max_steps", 13, bare=True)  # the same in another place is the same
    os.truncate(other / "train.bin", (other / "train.bin").stat().st_size - 2)
    assert "train.bin" in run(*flags, bare=True, expect=2)
    prepare.write_tokens(other / "train.bin", [b"something else " * 1000])
    told = run(*flags, bare=True, expect=2)
    assert "data has changed: train.bin (15,001 tokens)" in told and "--allow_change data" in told
    assert "at step 13" in run(*flags, "--allow_change", "data", bare=True)


def test_changes_are_listed_and_refused(run, copy):
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20, "--seed", 7, "--batch_size", 4]
    told = run(*flags, bare=True, expect=2)
    assert "seed 1337 -> 7, batch_size 8 -> 4" in told and "--allow_change seed batch_size" in told
    assert "batch_size" in run(*flags, "--allow_change", "seed", bare=True, expect=2)
    run(*flags, "--allow_change", "seed", "batch_size", bare=True)
    assert final(copy)["position"] == 12 * 8 + 8 * 4  # no sample twice, none left out


def test_a_longer_run_says_what_happens_to_the_schedule(run, copy):
    told = run("--auto-resume", "--out_dir", "r", "--max_steps", 24, bare=True)
    assert "max_steps 12 -> 24: the schedule has its new length; the learning rate goes" in told


def test_resuming_reads_no_more_of_a_long_run(run, copy, tmp_path):
    """Rows of a long past are neither read nor rewritten; those of lost steps go."""
    path = copy / "metrics.jsonl"
    own = path.read_text()
    past = [f'{{"step": {i // 100_000}, "train/loss": 1.0}}\n' for i in range(300_000)]
    path.write_text("".join(past) + own + '{"step": 13, "lost": 1}\n{"step": 14, "torn')
    inode, began = path.stat().st_ino, time.perf_counter()
    import monitor

    file, (kept, dropped) = monitor.open_metrics(path, 12)
    took = time.perf_counter() - began
    began = time.perf_counter()
    assert len(monitor.read_rows(path)) > 300_000
    assert took < 0.3 * (time.perf_counter() - began)
    file.close()
    assert path.read_text() == "".join(past) + own and path.stat().st_ino == inode
    assert [row["step"] for row in dropped] == [13] and kept[-1]["step"] == 12


def test_a_clock_that_jumps_back(run, tmp_path, monkeypatch):
    hours = itertools.count(0)
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() - 3600 * next(hours))
    run("--out_dir", "r", "--save_interval", 4)
    monkeypatch.undo()
    values = [v for row in rows(tmp_path / "r") for k, v in row.items()
              if k.startswith(("perf/", "goodput/")) and isinstance(v, (int, float))]  # fmt: skip
    assert values and min(values) >= 0


# --- elsewhere ---


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket of a server on this machine that speaks S3."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in dict(ACCESS_KEY_ID="x", SECRET_ACCESS_KEY="x", DEFAULT_REGION="us-east-1",
                            ENDPOINT_URL=f"http://127.0.0.1:{port}").items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket/run"
    server.stop()


@pytest.mark.parametrize("scheme", ["file", "memory", "s3"])
def test_a_backup_can_be_resumed(run, tmp_path, request, scheme):
    url = {"file": f"file://{tmp_path}/disk2", "memory": f"memory://{tmp_path.name}"}.get(scheme)
    url = url or request.getfixturevalue("s3")
    run("--out_dir", "whole", "--max_steps", 20)
    run("--out_dir", "r", "--backup_to", url, "--backup_interval", 4, "--save_interval", 2)
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    told = run("--resume", url, "--out_dir", "new", "--max_steps", 20, bare=True)
    assert "step_00000012.pt at step 12" in told
    one = f"{url}/checkpoints/step_00000020.pt"  # to where the new run has gone on copying
    assert "at step 20" in run("--resume", one, "--out_dir", "n", "--max_steps", 21, bare=True)
    logged = list(column(tmp_path / "new", "train/loss"))
    assert logged[:3] == [1, 4, 8] and logged[-1] == 20  # its past has come with it
    assert "error: --resume" in run("--resume", f"{url}/none", expect=2)
    told = run("--backup_to", "nothing://there", "--out_dir", "refused", expect=2)
    assert "error: --backup_to nothing://there" in told and not (tmp_path / "refused").exists()


def test_a_backup_that_fails_stops_no_training(run, tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    def fail(*args, **kwargs):
        raise PermissionError(13, "no")

    monkeypatch.setattr(LocalFileSystem, "put_file", fail)
    monkeypatch.setattr(config.time, "sleep", lambda s: None)
    told = run("--out_dir", "r", "--backup_to", f"file://{tmp_path}/b", "--save_interval", 4,
               "--backup_interval", 4)  # fmt: skip
    assert "no backup to file://" in told and "step 12/12" in told


def test_verify_resume(run, tmp_path, monkeypatch):
    assert "verify_resume: identical, " in run("--verify_resume", 4, "--dropout", "0.1")
    plain = train.seed_everything  # what a run would be whose dropout is not resumed
    count = itertools.count()
    monkeypatch.setattr(train, "seed_everything", lambda *a: plain(next(count), *a[1:]))
    told = run("--verify_resume", 4, "--dropout", "0.1", expect=1)
    assert "verify_resume: differs after 4 + 4 steps: model." in told
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("steady-verify-*"))


def test_verify_resume_on_two_ranks(corpus, tmp_path):
    for process in processes(tmp_path, 2, [*FLAGS, "--data", corpus, "--verify_resume", 3]):
        assert process.code() == 0, process.text()
    assert "verify_resume: identical" in (tmp_path / "log0.txt").read_text()
