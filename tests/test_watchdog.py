"""Nothing hangs in silence: who is stuck, where, since when. And do the ranks hold the same?"""

import ctypes
import itertools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import after_updates, before, rows

import train
from steady.checkpoints.checkpoint import find_corruption
from steady.checkpoints.run_dir import RunDir
from steady.checkpoints.state import Progress
from steady.guard.stop import Stop
from steady.ranks.replicas import ReplicasDiffer, checksums, compare_checksums
from steady.ranks.watchdog import PATIENT, Watchdog, describe, find, table

FLAGS = ["--max_steps", "100000", "--out_dir", "run", "--log_interval", "20",
         "--save_interval", "20", "--eval_interval", "0", "--no_compile"]


def watch(step=50, phase="forward") -> Watchdog:
    """A watchdog of 10 seconds without threads, of a run that is far from its first steps."""
    watchdog, progress = Watchdog(10), Progress(step=0)
    watchdog.follow(progress, RunDir(None), SimpleNamespace(current=phase, since=1.0))
    progress.step = step
    watchdog.measure(0.0)
    return watchdog


@pytest.mark.parametrize("step, phase, modules, times", [
    (50, "forward", [], 1), (2, "forward", [], 1),
    (1, "forward", [], PATIENT), (0, "forward", [], PATIENT),
    (50, "evaluation", [], PATIENT), (50, "checkpoint", [], PATIENT), (50, "logging", [], PATIENT),
    # a rollback that verifies checkpoints, one that is waited for, and a recompilation
    (50, "other", ["steady.checkpoints.disk", "steady.checkpoints.checkpoint"], PATIENT),
    (50, "other", ["threading", "steady.checkpoints.writer"], PATIENT),
    (50, "forward", ["torch._dynamo.convert_frame"], PATIENT),
    (None, "start-up", [], PATIENT)])
def test_a_phase_may_take_so_long(step, phase, modules, times):
    watchdog = Watchdog(10) if step is None else watch(step, phase)
    seconds, watchdog.stack = 0, lambda: [(module, "") for module in modules]
    while seconds < 100 and not watchdog.judge():
        watchdog.measure(1.0)
        seconds += 1
    assert seconds == 10 * times + 1


def test_progress_counts():
    watchdog = watch()
    for _ in range(100):
        watchdog.clock.since += 1
        watchdog.measure(5.0)
        assert not watchdog.judge()


def test_a_process_that_was_stopped_blames_nobody(monkeypatch):
    """Ctrl-Z for an hour: the clock has jumped when the next look comes."""
    watchdog, clock, left = watch(), [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog.end = left.append

    def wait(period):
        clock[0] += 3600
        return clock[0] > 4 * 3600

    watchdog.ended = SimpleNamespace(wait=wait, is_set=lambda: False)
    watchdog.look()
    assert not left and watchdog.age < 10


def test_off():
    before = threading.active_count()
    with Watchdog(0):
        assert threading.active_count() == before


def note(phase="waiting", host="a", step=811, line="", **other):
    return dict(step=step, phase=phase, age=90.0, limit=60, host=host, ended=False,
                waits=phase == "waiting", line=line) | other


@pytest.mark.parametrize("notes, silent, code, blamed", [
    ([note(), note(), note("data", "b", line="data.py:41 in f")], [], "stuck", [2]),
    # on a GPU a rank may still fill its queue while its collective waits: the one behind is stuck
    ([note("backward", step=812), note("forward"), note(step=812)], [], "stuck", [1]),
    ([note("data")] * 4, [], "stuck", [0, 1, 2, 3]),  # on the same disk
    ([note(), note("forward"), note(host="b")], [1, 2], "silent", [1, 2]),
    ([note(), note(line="mine.py:3 in f"), note()], [], "waiting", [1]),
    ([note(), note(host="b")], [], "waiting", [])])
def test_who_is_to_blame(notes, silent, code, blamed):
    assert find(dict(enumerate(notes)), silent) == (code, blamed)
    assert describe(code, blamed, notes)


def test_what_is_printed_of_a_hang():
    """The wording, in this one place; elsewhere codes and ranks."""
    notes = {0: note(), 1: note(), 2: note("data", "b", line="data.py:41 in f")}
    headline = describe("stuck", [2], notes)
    assert headline == "rank 2 (host b): stuck in data of step 812 at data.py:41 in f"
    assert table([2], notes).splitlines() == [
        "  rank 2  b  data of step 812     1m30s  data.py:41 in f",
        "  rank 0  a  waiting of step 812  1m30s", "  rank 1  a  waiting of step 812  1m30s"]
    many = table([30], {rank: note() for rank in range(100)}).splitlines()
    assert many[0].startswith("  rank 30") and many[-1] == "  and 84 more ranks"


@pytest.mark.parametrize("rank, notes, silent, expected", [
    # rank 0 may take that long for a checkpoint: nobody says anything
    (9, {0: dict(phase="checkpoint", limit=360, waits=False)}, (), None),
    (0, {5: dict(phase="start-up", limit=360, waits=False)}, (), None),
    (8, {}, range(8), ("silent", [*range(8)])),
    (0, {3: dict(phase="data", waits=False), 4: dict(ended=True)}, (4,), ("stuck", [3])),
    (9, {}, None, ("store", []))])
def test_what_a_rank_of_many_concludes(rank, notes, silent, expected):
    """Of 16 on two hosts, waiting for 200 s and knowing these notes."""
    dog = watch(phase="waiting")
    dog.rank, dog.store, dog.awake, dog.age = rank, object(), 1000.0, 200.0
    dog.answered = 0.0 if silent is None else 1000.0
    for each in range(16):
        heard = 1000.0 - (100.0 if each in (silent or ()) else 1.0)
        dog.notes[each] = note(host="ab"[each // 8], age=200.0, heard=heard) | notes.get(each, {})
    hang = dog.judge()
    assert (hang and hang[:2]) == expected


def at_step(step: int, work):
    """Call `work` in the forward pass of this step; for a hook."""
    calls = itertools.count(1)
    before(train.Transformer, "forward", lambda *_: next(calls) == step and work())


def hang_of(folder) -> dict:
    (row,) = (row for row in rows(folder / "run") if "hang" in row)
    return row


def test_a_process_alone_is_warned_once_and_goes_on(start, tmp_path):
    """It asks its user something, who is away."""
    reader, writer = os.pipe()

    def hook(rank):
        os.dup2(reader, 0)
        sys.stdin = open(0, closefd=False)
        at_step(60, input)

    (process,) = start(*FLAGS, "--max_steps", 70, "--hang_seconds", 1, hook=hook)
    process.wait_for("no progress")
    time.sleep(1)
    os.write(writer, b"yes\n")
    assert process.code() == 0, process.text()
    assert process.text().count("warning: no progress: ") == 1
    hang = hang_of(tmp_path)
    assert (hang["step"], hang["hang_code"], hang["hang_ranks"]) == (59, "stuck", [0])
    stacks = (tmp_path / "run/stacks/rank_0.txt").read_text()
    assert re.search(r'test_watchdog.py", line \d+ in <lambda>', stacks)


def stuck(kind: str):
    Path("stuck").touch()
    if kind == "sleep":
        time.sleep(1000)
    if kind == "file":
        os.mkfifo("fifo")
        open("fifo").read()
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "no answer":  # the regular expression engine keeps Python's lock
        re.match("(a+)+$", "a" * 60 + "b")
    if kind == "C":  # a call that no signal interrupts, and that does not hold Python's lock
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


def die(rank: int):
    """As gloo may miss it: rank 0 would wait for ever."""
    def requested(self):
        if self.steps == 50:
            self.phase("waiting")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        self.steps += 1
        return plain(self)

    plain, Stop.requested, Stop.steps = Stop.requested, requested, 0


def skip_a_collective():
    def all_gather_object(found, own, *args, **kwargs):
        calls.append(1)
        if len(calls) < 6:
            plain(found, own, *args, **kwargs)
        else:
            found[:] = [own] * len(found)

    plain, calls = torch.distributed.all_gather_object, []
    torch.distributed.all_gather_object = all_gather_object


@pytest.mark.parametrize("kind, ranks, flags, code", [
    ("sleep", 2, [], "stuck"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("file", 4, ["--parallel", "zero3"], "stuck"),
        ("stopped", 4, ["--parallel", "zero3"], "silent"),
        ("no answer", 4, [], "silent"),
        ("dead", 2, ["--monitoring", "off"], "silent"),
        ("a collective less", 3, ["--batch_size", "12"], "waiting")))])
def test_a_rank_that_hangs_is_named(start, tmp_path, kind, ranks, flags, code):
    def hook(rank):
        if kind == "dead":
            die(rank)
        elif rank == ranks - 1:
            at_step(60, lambda: stuck(kind)) if code != "waiting" else skip_a_collective()

    group = start(*FLAGS, "--hang_seconds", 3, *flags, ranks=ranks, hook=hook)
    assert [process.code() for process in group[:-1]] == [1] * (ranks - 1)
    group[-1].kill(signal.SIGKILL if code == "silent" else 0)  # as torchrun does
    assert group[-1].code() == (-9 if code == "silent" else 1)
    printed = "".join(process.text() for process in group)
    assert printed.count("failed: no progress") == 1
    hang, checkpoints = hang_of(tmp_path), tmp_path / "run/checkpoints"
    assert (hang["hang_code"], hang["hang_ranks"]) == (code, [ranks - 1]), printed
    if kind == "sleep":
        line = r"rank 1 .* forward of step 60 at .*test_watchdog.py:\d+ in stuck"
        assert re.search(line, hang["hang"])
        assert "in stuck" in (tmp_path / "run/stacks/rank_1.txt").read_text()
        assert (checkpoints / "step_00000059.pt").exists()  # rank 0 has saved it
    if kind == "dead":
        assert find_corruption(checkpoints / "step_00000040.pt") is None
    if code == "waiting":
        assert "saved the last completed step" not in printed  # sums may be of different steps


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(start):
    def hook(rank):
        if rank == 1:
            time.sleep(1000)
        os.environ["WORLD_SIZE"] = "5" if rank == 3 else "4"  # of another launch

    group = start("--hang_seconds", 1, ranks=4, hook=hook)
    assert group[0].code() == group[2].code() == group[3].code() == 1
    group[1].kill(signal.SIGKILL)
    group[1].code()
    assert "rank 0 has waited 6 s for ranks 1, 3 of 4 ranks to start" in group[0].text()
    assert "Traceback" not in group[0].text()


def test_a_bit_that_flips_changes_the_checksum():
    parameters = [torch.randn(30, 7), torch.randn(5), torch.randn(4, 4).bfloat16()]
    before = checksums(parameters)
    for k, tensor in enumerate(parameters):
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).view(-1)
        for bit in range(8 * tensor.element_size()):
            mask = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(bits.dtype)
            bits[3] ^= mask
            differs = checksums(parameters) != before
            bits[3] ^= mask
            assert differs.tolist() == [i == k for i in range(3)]
    assert checksums(parameters).equal(before)


@pytest.mark.parametrize("size, bad, words, agreed", [
    (1, [1], "weights of rank 1 differ from those of other ranks, first in blocks.0.up.w", None),
    (1, [0], "weights of rank 0 differ", 20),
    (1, [2, 3], "weights of ranks 2, 3 differ", 20),  # as many: which are wrong is unknown
    # copies of a model on two ranks each: ranks 0 and 2, 1 and 3 hold the same
    (2, [1, 3], None, None),
    (2, [3], "weights of rank 3 differ", 20),
    (4, [3], "weights of rank 3 differ.* random numbers in `update`, or a buffer of each", None)])
def test_which_rank_differs_in_what(size, bad, words, agreed):
    names, whole = ["embedding.weight", "blocks.0.up.weight"], ["blocks.0.up.weight"] * (size == 4)
    shards = SimpleNamespace(size=size, whole=whole)
    table = np.array([[1, 5 if rank in bad else 4] for rank in range(4)])
    if words is None:
        return compare_checksums(table, names, shards, 30, 20)
    with pytest.raises(ReplicasDiffer, match=words) as caught:
        compare_checksums(table, names, shards, 30, 20)
    assert caught.value.agreed == agreed and "last agreed at step 20" in str(caught.value)


@pytest.mark.parametrize("drifts, every, step, agreed, kept", [
    pytest.param(1, 4, 8, 4, ["step_00000004.pt", "step_00000006.pt"], marks=pytest.mark.slow),
    (0, 4, 8, 4, ["step_00000004.pt", "step_00000006.pt.set-aside"]),  # it writes the checkpoints
    (1, 1000, 12, 0, ["step_00000008.pt", "step_00000010.pt"])])  # the last step
def test_a_replica_that_drifts_ends_the_run(run, tmp_path, drifts, every, step, agreed, kept):
    def hook(rank):
        def drift(run):  # beside a buffer that is another tensor after each step
            run.model.register_buffer("count", torch.tensor(run.progress.step))
            if rank == drifts and run.progress.step == 5:
                next(run.model.blocks[1].parameters()).data.view(torch.int32).view(-1)[5] ^= 1

        after_updates(drift)

    text = run(*FLAGS, "--batch_size", 6, "--log_interval", 4, "--save_interval", 2,
               "--keep_checkpoints", 2, "--check_replicas_interval", every, "--max_steps", 12,
               ranks=3, hook=hook, expect=1)
    assert f"failed: step {step}: the weights of rank {drifts} differ" in text
    assert "first in blocks.1" in text
    assert f"agreed at step {agreed}" in text and "Traceback" not in text
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step*")) == kept
