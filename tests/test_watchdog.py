"""Nothing hangs in silence: who is stuck, where, since when. And do the ranks hold the same?"""

import math
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
from conftest import TINY, Process, after_updates, processes, rows, until

import data
import train
from steady.checkpoints import disk
from steady.checkpoints.run_dir import RunDir
from steady.checkpoints.state import Progress
from steady.guard.stop import Stop
from steady.ranks import hangs, ranks, watchdog
from steady.ranks.ranks import rank_list
from steady.ranks.replicas import Replicas, ReplicasDiffer, checksums
from steady.ranks.watchdog import PATIENT, Watchdog
from steady.watch.report import report

FLAGS = ["--max_steps", "100000", "--out_dir", "run", "--log_interval", "20",
         "--save_interval", "20", "--eval_interval", "0", "--no_compile"]

# --- one rank, on a clock that the test drives -----------------------------------------------


def watch(seconds=10, step=50) -> Watchdog:
    """A watchdog without threads, of a run that is far from its first steps."""
    watchdog = Watchdog(seconds)
    watchdog.follow(Progress(step=0), RunDir(None))
    watchdog.progress.step = step
    watchdog.clock = SimpleNamespace(current="forward", since=1.0)
    watchdog.measure(0.0)
    return watchdog


def begin(watchdog: Watchdog, phase: str):
    clock = watchdog.clock
    clock.current, clock.since = phase, clock.since + 1


def seconds_until_judged(watchdog: Watchdog, most=1000) -> int | None:
    for second in range(most):
        if watchdog.judge():
            return second
        watchdog.measure(1.0)


@pytest.mark.parametrize("step, phase, modules, times", [
    (50, "forward", [], 1), (2, "forward", [], 1),
    (1, "forward", [], PATIENT), (0, "forward", [], PATIENT),
    (50, "evaluation", [], PATIENT), (50, "checkpoint", [], PATIENT), (50, "logging", [], PATIENT),
    # a rollback that verifies checkpoints, one that is waited for, and a recompilation
    (50, "other", ["steady.checkpoints.disk", "steady.checkpoints.checkpoint"], PATIENT),
    (50, "other", ["threading", "steady.checkpoints.writer"], PATIENT),
    (50, "forward", ["torch._dynamo.convert_frame"], PATIENT),
    (50, "forward", ["cmd", "pdb", "bdb", "__main__"], None),  # at a breakpoint
])
def test_a_phase_may_take_so_long(step, phase, modules, times):
    watchdog = watch(10, step)
    begin(watchdog, phase)
    watchdog.measure(0.0)
    watchdog.stack = lambda: [(module, f"/x/{module}.py", 1, "f") for module in modules]
    assert seconds_until_judged(watchdog) == (times and 10 * times + 1)


def test_a_rank_in_a_debugger_is_waited_for():
    watchdog = watch(10)
    watchdog.notes, watchdog.heard = {1: note("forward", limit=math.inf)}, {1: 1e9}
    assert seconds_until_judged(watchdog) is None
    watchdog.notes = {1: note("forward")}
    assert seconds_until_judged(watchdog) is not None


def test_start_up_may_take_longer():
    watchdog = watch(10)
    watchdog.progress = watchdog.clock = None
    watchdog.where, watchdog.age = (0, "start-up", 0.0), 0.0
    assert seconds_until_judged(watchdog) == 10 * PATIENT + 1


def test_progress_counts():
    watchdog = watch(10)
    for _ in range(100):
        begin(watchdog, "forward")
        watchdog.measure(5.0)
        assert not watchdog.judge()


def test_a_rank_that_was_started_again_is_named(capsys):
    watchdog = watch(10)
    answers = {ranks.RESTARTED: b"3"}
    watchdog.store = SimpleNamespace(check=lambda keys: False)
    watchdog.beside = SimpleNamespace(check=lambda keys: keys == [ranks.RESTARTED], get=answers.get)
    watchdog.listen()
    assert "rank 3" in watchdog.verdict and "rank 3" in capsys.readouterr().err


def test_a_process_that_was_stopped_blames_nobody(monkeypatch):
    """Ctrl-Z for an hour: the clock has jumped when the next look comes."""
    watchdog, clock, left = watch(10), [0.0], []
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


# --- what the notes of all ranks say ---------------------------------------------------------


def note(phase="waiting", host="a", entered=7, waits=None, kind="all_reduce of [4160]", **other):
    waits = phase == "waiting" if waits is None else waits
    return dict(step=811, phase=phase, age=90.0, limit=60, host=host, pid=1, ended=False,
                waits=waits, at="", groups={"0": [entered, entered * waits, kind * waits]}) | other


@pytest.mark.parametrize("notes, silent, code, blamed, doing", [
    ([note(), note(), note("data", "b", entered=6, at="data.py:41 in f")], [],
     "stuck", [2], "data.py:41 in f"),
    # on a GPU a rank may still fill its queue while its collective waits: the one behind is stuck
    ([note("backward"), note("forward", entered=6), note()], [], "stuck", [1], ""),
    ([note("data")] * 4, [], "stuck", [0, 1, 2, 3], ""),  # on the same disk
    # a rank is silent on a host that answers
    ([note(gone={"1": "stopped"}), note("forward")], [1], "stopped", [1], "stopped, last heard"),
    ([note(gone={"1": "dead"}), note("forward")], [1], "dead", [1], "dead, last heard then"),
    ([note(), note("forward")], [1], "no answer", [1], "no answer, last heard then"),
    # a host is silent; the gravest of several comes first
    ([note(), note(host="b"), note(host="b")], [1, 2], "unreachable", [1, 2], "unreachable, last"),
    ([note(), note(gone={"0": "dead"}), note(host="b")], [0, 2], "dead", [0], "dead, last heard"),
    # a collective was skipped
    ([note(), note(kind="broadcast of [2]", at="mine.py:3 in f"), note()], [],
     "mismatch", [1], "waits in broadcast of [2] at mine.py:3 in f"),
    # one of two: it is in the next collective, of another group, which the other has not begun
    ([note(groups={"0": [7, 7, "all_gather of [9]"], "1": [4, 0, ""]}),
      note(groups={"0": [6, 0, ""], "1": [5, 5, "all_reduce of [2]"], "2": [1, 0, ""]})], [],
     "mismatch", [1], "waits in all_reduce of [2]"),
    ([note(), note(host="b")], [], "network", [], "waits in all_reduce of [4160]"),
    # the network fails while one rank has more of it behind it: it lacks none
    ([note(), note(host="b", groups={"0": [8, 8, "broadcast of [2]"]})], [], "network", [],
     "waits in all_reduce of [4160]"),
    ([note(), note(host="b", groups={"0": [7, 6, "all_reduce of [9]"]})], [], "network", [],
     "waits in all_reduce of [4160]"),
])
def test_who_is_to_blame(notes, silent, code, blamed, doing):
    hang = hangs.find(dict(enumerate(notes)), dict.fromkeys(silent, 90.0))
    assert (hang.code, hang.blamed) == (code, blamed)
    assert doing in hang.table.splitlines()[0]


def test_what_is_printed_of_a_hang():
    """The wording, in this one place; elsewhere codes and ranks."""
    notes = {0: note(), 1: note(), 2: note("data", "b", entered=6, at="data.py:41 in f")}
    hang = hangs.find(notes, {})
    assert hang.headline == "rank 2 (host b) is stuck in data of step 812"
    assert hang.table.splitlines() == [
        "  rank 2      b  data of step 812     1m30s  data.py:41 in f",
        "  ranks 0, 1  a  waiting of step 812  1m30s  waits in all_reduce of [4160]"]
    for code in hangs.HEADLINES:
        told = hangs.describe(code, [1], notes, {}, {}).headline
        assert told and "{" not in told


# --- what a rank concludes from them ---------------------------------------------------------


def watch_several(rank, notes: dict, silent=(), seconds=60, monkeypatch=None) -> Watchdog:
    """Rank `rank` of 16 on two hosts, which waits for 200 s and knows these notes."""
    names = ("RANK", rank), ("LOCAL_RANK", rank % 8), ("WORLD_SIZE", 16), ("LOCAL_WORLD_SIZE", 8)
    for name, value in names:
        monkeypatch.setenv(name, str(value))
    watchdog = watch(seconds)
    watchdog.store, watchdog.awake = object(), 1000.0
    begin(watchdog, "waiting")
    watchdog.measure(0.0)
    watchdog.age = 200.0
    for each in range(16):
        watchdog.notes[each] = note(host="ab"[each // 8], age=200.0, beat=5) | notes.get(each, {})
        watchdog.heard[each] = 1000.0 - (100.0 if each in silent else 1.0)
    return watchdog


@pytest.mark.parametrize("rank, notes, silent, expected", [
    # rank 0 may take that long for a checkpoint: nobody says anything
    (1, {0: dict(phase="checkpoint", limit=360, waits=False)}, (), None),
    (9, {0: dict(phase="checkpoint", limit=360, waits=False)}, (), None),
    (0, {5: dict(phase="start-up", limit=360, waits=False)}, (), None),
    (9, {8: dict(pid=2**22 + 1)}, (0, 1, 8), ("dead", [8])),
    (8, {}, range(8), ("unreachable", [*range(8)])),
    (0, {3: dict(phase="data", waits=False)}, (), ("stuck", [3])),
    (0, {3: dict(phase="data", waits=False), 4: dict(ended=True)}, (4,), ("stuck", [3])),
    (9, {}, range(16), ("store", [])),  # its own notes do not come back
])
def test_what_a_rank_of_many_concludes(rank, notes, silent, expected, monkeypatch):
    hang = watch_several(rank, notes, silent, monkeypatch=monkeypatch).judge()
    assert (hang and (hang.code, hang.blamed)) == expected


def test_one_rank_speaks_for_all(monkeypatch, capsys):
    """Two come to a verdict at once; without a store each speaks."""
    written = {}
    store = SimpleNamespace(compare_set=lambda key, _, text: written.setdefault(key, text.encode()))
    for each, times in ((store, 1), (object(), 2)):
        for rank in (0, 1):
            watchdog = watch_several(rank, {}, monkeypatch=monkeypatch)
            watchdog.store, watchdog.period = each, 0.01
            watchdog.last_words(hangs.Hang("mismatch", [], "a hang", ""))
            assert watchdog.mixed
        assert capsys.readouterr().err.count("no progress: a hang") == times


def test_the_last_signs_of_a_rank(monkeypatch):
    watchdog = watch_several(0, {}, monkeypatch=monkeypatch)
    for rank in range(8):
        watchdog.notes[rank]["pid"] = 2**22 + 1 if rank == 3 else os.getpid()
    assert watchdog.last_signs() == "rank 3 is dead"


def test_rank_lists():
    assert rank_list([3]) == "rank 3"
    assert rank_list([0, 1, 3, 4, 5]) == "ranks 0, 1, 3 to 5"


def test_states_of_processes():
    assert hangs.state_of(os.getpid()) == ""
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    assert hangs.gone({0: dict(pid=os.getpid()), 1: dict(pid=child)}) == {"1": "stopped"}
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert hangs.state_of(child) == "dead"  # a zombie
    os.waitpid(child, 0)
    assert hangs.state_of(child) == "dead"


# --- real runs -------------------------------------------------------------------------------


def at_step(step: int, work):
    """Call `work` in the forward pass of this step; for a hook."""
    plain, calls = train.Transformer.forward, []

    def forward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            work()
        return plain(self, *args, **kwargs)

    train.Transformer.forward = forward


def hang_of(folder) -> dict:
    (row,) = (row for row in rows(folder / "run") if "hang" in row)
    return row


def test_one_process_alone_whose_data_does_not_come(corpus, tmp_path):
    def hook():
        plain = data.Mixture.batch

        def batch(self, start, stop):
            if start >= 50 * 8:
                time.sleep(1000)
            return plain(self, start, stop)

        data.Mixture.batch = batch
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # or it would only be warned

    flags = [*TINY, "--data", corpus, *FLAGS, "--save_interval", "30"]
    process = Process(tmp_path, [*flags, "--hang_seconds", "3"], hook)
    assert process.code() == 1
    hang = hang_of(tmp_path)
    assert (hang["step"], hang["hang_code"], hang["hang_ranks"]) == (49, "stuck", [0])
    assert hang["hang"] in process.text()
    assert re.search(r"data of step 50 +\ds +tests/test_watchdog.py:\d+ in batch", process.text())
    assert "in batch" in (tmp_path / "run/stacks/rank_0.txt").read_text()
    again = Process(tmp_path, [*flags, "--max_steps", "60", "--auto-resume"])
    assert again.code() == 0, again.text()
    assert hang_of(tmp_path)["step"] == 30  # where it went on: the reason is kept
    assert any("in data of step 50" in line for line in report(tmp_path / "run")["verdict"])


def test_a_process_alone_is_warned_once_and_goes_on(corpus, tmp_path):
    """It asks its user something, who is away."""
    reader, writer = os.pipe()

    def hook():
        os.dup2(reader, 0)
        sys.stdin = open(0, closefd=False)
        at_step(60, input)

    flags = [*TINY, "--data", corpus, *FLAGS, "--max_steps", "70", "--hang_seconds", "1"]
    process = Process(tmp_path, flags, hook)
    process.wait_for("no progress")
    time.sleep(1)
    os.write(writer, b"yes\n")
    assert process.code() == 0, process.text()
    assert process.text().count("warning: no progress: ") == 1
    assert hang_of(tmp_path)["step"] == 59
    assert (tmp_path / "run/stacks/rank_0.txt").exists()


def stuck(kind: str):
    if kind == "sleep":
        time.sleep(1000)
    if kind == "loop":
        while True:
            pass
    if kind == "file":
        os.mkfifo("fifo")
        open("fifo").read()
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "no answer":  # the regular expression engine keeps Python's lock
        re.match("(a+)+$", "a" * 60 + "b")


def run_stuck(corpus, folder, kind: str, ranks: int, flags=()):
    """All ranks but the last are done; returns what they printed."""
    def hook(rank):
        if rank == ranks - 1:
            at_step(60, lambda: stuck(kind))

    group = processes(folder, ranks, [*TINY, "--data", corpus, *FLAGS, "--hang_seconds", "3",
                                      *flags], hook)
    silent = kind in ("stopped", "no answer")  # those do not end by themselves, but are killed
    assert [process.code() for process in group] == [*[1] * (ranks - 1), -9 if silent else 1]
    printed = "".join(process.text() for process in group)
    assert printed.count("failed: no progress") == 1
    return printed


def test_a_rank_that_hangs_is_named_and_loses_no_step(corpus, tmp_path):
    printed = run_stuck(corpus, tmp_path, "sleep", 2)
    hang = hang_of(tmp_path)
    assert (hang["hang_code"], hang["hang_ranks"]) == ("stuck", [1])
    assert re.search(r"rank 1 .* forward of step 60 .*test_watchdog.py:\d+ in stuck", printed)
    assert re.search(r"rank 0 .* waits in all_r", printed)
    assert "in stuck" in (tmp_path / "run/stacks/rank_1.txt").read_text()
    assert (tmp_path / "run/checkpoints/step_00000059.pt").exists()  # rank 0 has saved it


def test_a_dead_rank_that_gloo_does_not_notice(corpus, tmp_path):
    """Rank 0 would wait for ever."""
    def hook(rank):
        watchdog.LAST_WORDS = 1.0
        plain = Stop.requested

        def requested(self):
            if self.steps == 50:
                self.phase("waiting")
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1000)
            self.steps += 1
            return plain(self)

        Stop.requested, Stop.steps = requested, 0

    flags = [*TINY, "--data", corpus, *FLAGS, "--monitoring", "off", "--hang_seconds", "3"]
    group = processes(tmp_path, 2, flags, hook)
    assert [process.code() for process in group] == [1, -9]
    assert (hang_of(tmp_path)["hang_code"], hang_of(tmp_path)["hang_ranks"]) == ("dead", [1])
    path = tmp_path / "run/checkpoints/step_00000040.pt"
    assert path.exists() and disk.find_corruption(path) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind, flags", [
    ("loop", []), ("file", ["--parallel", "zero3"]), ("stopped", ["--parallel", "zero3"]),
    ("no answer", [])])
def test_whatever_a_rank_hangs_in(corpus, tmp_path, kind, flags):
    printed = run_stuck(corpus, tmp_path, kind, 4, flags)
    hang, code = hang_of(tmp_path), kind if kind in ("stopped", "no answer") else "stuck"
    assert (hang["hang_code"], hang["hang_ranks"]) == (code, [3]), printed


@pytest.mark.slow
def test_a_loader_process_that_is_stopped_does_not_stay(corpus, tmp_path):
    def hook():
        plain = data.Mixture.batch

        def batch(self, start, stop):
            if start >= 50 * 8:
                Path("loader").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            return plain(self, start, stop)

        data.Mixture.batch = batch
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # else it would be left alone

    process = Process(tmp_path, [*TINY, "--data", corpus, *FLAGS, "--num_workers", "1",
                                 "--hang_seconds", "3"], hook)
    assert process.code() == 1
    assert "stuck in data" in process.text()
    loader = int((tmp_path / "loader").read_text())
    assert until(lambda: hangs.state_of(loader) == "dead")


@pytest.mark.slow
def test_a_collective_that_one_rank_skips(corpus, tmp_path):
    def hook(rank):
        plain, calls = torch.distributed.all_gather_object, []

        def all_gather_object(found, own, *args, **kwargs):
            calls.append(1)
            if len(calls) < 6 or rank != 2:
                plain(found, own, *args, **kwargs)
            else:
                found[:] = [own] * len(found)

        torch.distributed.all_gather_object = all_gather_object

    group = processes(tmp_path, 3, [*TINY, "--data", corpus, *FLAGS, "--hang_seconds", "3",
                                    "--batch_size", "12"], hook)
    assert [process.code() for process in group] == [1] * 3
    printed = "".join(process.text() for process in group)
    hang = hang_of(tmp_path)
    assert (hang["hang_code"], hang["hang_ranks"]) == ("mismatch", [2]), printed
    assert "saved the last completed step" not in printed  # sums may be of different steps


def test_a_rank_that_never_starts_is_named(corpus, tmp_path):
    def hook(rank):
        if rank == 1:
            time.sleep(1000)

    group = processes(tmp_path, 3, [*TINY, "--data", corpus, "--batch_size", "6", "--hang_seconds",
                                    "1"], hook)
    assert group[0].code() == group[2].code() == 1
    group[1].kill(signal.SIGKILL)
    group[1].code()
    assert "rank 0 has waited 6 s for rank 1 of 3 ranks to start" in group[0].text()
    assert "Traceback" not in group[0].text()


# --- replicas --------------------------------------------------------------------------------


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
    (1, [1], "rank 1 holds other weights than ranks 0, 2, 3, in blocks.0.up.weight;", None),
    (1, [0], "rank 0 holds other weights than ranks 1 to 3", 20),
    (1, [2, 3], "ranks 0 to 3 hold different weights, .* cannot be told", 20),
    # copies of a model on two ranks each: ranks 0 and 2, 1 and 3 hold the same
    (2, [1, 3], None, None),
    (2, [3], "ranks 1, 3 hold different weights", 20),
])
def test_which_rank_differs_in_what(size, bad, words, agreed):
    replicas = Replicas({"embedding.weight": None, "blocks.0.up.weight": None}, size, 10, 20)
    table = np.array([[1, 5 if rank in bad else 4] for rank in range(4)])
    if words is None:
        return replicas.compare(table, 30)
    with pytest.raises(ReplicasDiffer, match=words) as caught:
        replicas.compare(table, 30)
    assert caught.value.agreed == agreed and "last agreed at step 20" in str(caught.value)


@pytest.mark.parametrize("drifts, every, step, agreed, kept", [
    pytest.param(1, 4, 8, 4, ["step_00000004.pt", "step_00000006.pt"], marks=pytest.mark.slow),
    (0, 4, 8, 4, ["step_00000004.pt", "step_00000006.pt.set-aside"]),  # it writes the checkpoints
    (1, 1000, 12, 0, ["step_00000008.pt", "step_00000010.pt"]),  # the last step
])
def test_a_replica_that_drifts_ends_the_run(corpus, tmp_path, drifts, every, step, agreed, kept):
    def hook(rank):
        def drift(run):
            if rank == drifts and run.progress.step == 5:
                weight = next(run.model.blocks[1].parameters())
                weight.data.view(torch.int32).view(-1)[5] ^= 1

        after_updates(drift)

    flags = [*TINY, "--data", corpus, *FLAGS, "--batch_size", "6", "--log_interval", "4",
             "--save_interval", "2", "--keep_checkpoints", "2", "--check_replicas_interval", every,
             "--max_steps", "12"]
    group = processes(tmp_path, 3, flags, hook)
    assert [process.code() for process in group] == [1, 1, 1]
    text = group[0].text()
    others = "ranks 0, 2" if drifts else "ranks 1, 2"
    assert f"failed: step {step}: rank {drifts} holds other weights than {others}, in b" in text
    assert f"agreed at step {agreed}" in text and "Traceback" not in text
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step*")) == kept


