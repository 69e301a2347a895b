"""The sampler: the lines at which it looks, and their names. Traces of three steps on request."""

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, after_step, python, rows, until

from steady.watch import machine
from steady.watch import sampler as profile
from steady.watch.clock import Clock
from steady.watch.history import PHASES
from steady.watch.lines import parts_of
from steady.watch.sampler import LEAST, Sampler, Tracer
from steady.watch.slower import mean_row

FRAMES = []


class Watched(torch.nn.Module):
    def forward(self, x):
        FRAMES.append(sys._getframe())
        return x


def through_libraries(model):
    return json.loads("[1]", object_hook=None) and model(torch.ones(1))


def clock_in(phase: str) -> Clock:
    clock = Clock(torch.device("cpu"), sampled=False)
    clock.phase(phase)
    return clock


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.setattr(profile.threading.Thread, "start", lambda self: None)
    return Sampler(clock_in("forward"))


def place_of(sampler, phase: str, frame) -> str:
    """The line of a profile after looks at this frame in a phase."""
    sampler.clock.current = phase
    for _ in range(LEAST):
        sampler.look(frame)
    (place,) = sampler.read(1)["profile"][phase]
    return place


def test_a_look_skips_torch_and_the_standard_library(sampler):
    through_libraries(Watched())
    frame = FRAMES.pop()
    for _ in range(LEAST - 1):
        sampler.look(frame)
    assert sampler.read(1) == {}  # too few yet
    sampler.look(frame)
    (line,) = sampler.read(1)["profile"]["forward"]
    inner, caller = line.split(" < ")  # with torch's own Module.__call__ between them
    function = "Watched.forward" if sys.version_info >= (3, 11) else "forward"
    assert inner.startswith("tests/test_sampler.py:") and inner.endswith(f" {function}")
    assert caller.startswith("tests/test_sampler.py:") and caller.endswith(" through_libraries")
    assert sampler.read(1) == {}
    sampler.look(None)  # a thread that has ended
    assert sampler.counts


@pytest.mark.parametrize("file, shown, library", [
    (f"{profile.LIBRARY}/site-packages/transformers/model.py", "transformers/model.py:1 f", ""),
    ("/home/me/project/my_data.py", "project/my_data.py:1 f", ""),
    (f"{profile.ROOT}/steady/ranks/muon.py", "steady/ranks/muon.py:1 f", ""),
    # in a compute phase time in NumPy is work on the host; time in torch is the model's
    (f"{profile.LIBRARY}/json/decoder.py", "tests/test_sampler.py:", "json"),
    (f"{profile.NUMPY}/lib/function.py", "tests/test_sampler.py:", "numpy"),
    (f"{profile.TORCH}/nn/functional.py", "tests/test_sampler.py:", ""),
    (f"{profile.COMPILED[1]}_me/ab/cd.py", "tests/test_sampler.py:", ""),
    ("<eval_with_key>.3", "tests/test_sampler.py:", ""),
    ("<ipython-input-3-5f0a>", "<ipython-input-3-5f0a>:1 f", ""),  # a cell, typed in a terminal
    (f"{profile.ROOT}/monitor.py", "tests/test_sampler.py:", "")])
def test_which_files_and_libraries_are_named(sampler, file, shown, library):
    space = {"sys": sys}
    exec(compile("def f(): return sys._getframe()", file, "exec"), space)
    for phase, named in (("forward", library), ("logging", "")):
        line = place_of(sampler, phase, space["f"]())
        assert line.startswith(shown) and parts_of(line)[2] == named


@pytest.fixture
def interval():
    """A switch interval that no other sampler of this process restores."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(4e-3)
    yield 4e-3
    sys.setswitchinterval(before)


def test_it_looks_until_it_is_closed(interval, monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    others = set(threading.enumerate())
    sampler = Sampler(clock_in("data"))
    (thread,) = set(threading.enumerate()) - others
    assert until(lambda: sampler.counts.total() > 3)
    assert thread.is_alive()
    busy = machine.busiest({thread.native_id: (0.0, 0.0)}, {thread.native_id: (9.0, 0.0)}, 1)
    assert "busiest_thread" not in busy  # it is not the program's
    assert busy["perf/thread_ms"] == 0.0  # else the program's first thread would not be an increase
    older = [str(thread.native_id - n) for n in range(40)]  # torch's own, on many cores
    monkeypatch.setattr(machine.proc, "names", lambda _: older)
    assert thread.native_id in machine.threads()
    sampler.close()
    assert until(lambda: not thread.is_alive())
    assert until(lambda: sys.getswitchinterval() == pytest.approx(interval))


def test_a_look_that_fails_is_the_last_one_and_leaves_the_interval(interval, monkeypatch, capsys):
    def fail(sampler, _):
        assert sys.getswitchinterval() == pytest.approx(profile.SWITCH_SECONDS)
        seen.append(sampler)
        raise RuntimeError("no looks")

    seen, others = [], set(threading.enumerate())
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    monkeypatch.setattr(profile.Sampler, "look", fail)
    sampler = Sampler(clock_in("data"))
    assert until(lambda: sampler in seen and not set(threading.enumerate()) - others)
    assert until(lambda: sys.getswitchinterval() == pytest.approx(interval))
    assert seen.count(sampler) == 1
    assert "RuntimeError: no looks" in capsys.readouterr().out


DEEP = """
import gc, sys, threading, time, torch
from steady.watch import clock, sampler

def on_collection(phase, info):
    if threading.current_thread().name == "steady sampler":
        time.sleep(2e-4)  # lets the main thread run on

def worth(file):  # none: a look walks the whole stack
    gc.set_threshold(1)
    return False

def deep(n):
    gc.set_threshold(700)
    return deep(n - 1) if n else sum(range(9000))

gc.freeze()  # a collection is short
gc.callbacks.append(on_collection)
sampler.SECONDS = sampler.MOMENT = 1e-4
sampler.worth_naming = worth
looks = sampler.Sampler(clock.Clock(torch.device("cpu"), sampled=False))
end = time.time() + 60
while looks.counts.total() < 30 and time.time() < end:
    deep(400)
print(looks.counts.total() >= 30, gc.isenabled())
"""


def test_a_look_beside_collections_does_not_crash():
    """Before Python 3.12 one that begins as a frame object is made crashes."""
    assert python("-c", DEEP)[0] == "True True\n"


def test_an_instruction_without_a_line_counts_for_the_first_of_its_function(sampler):
    """As the beginning of a generator: there Python says None."""
    code = test_a_look_skips_torch_and_the_standard_library.__code__
    place = place_of(sampler, "forward", SimpleNamespace(f_code=code, f_lineno=None, f_back=None))
    assert place.startswith(f"tests/test_sampler.py:{code.co_firstlineno} ")


def test_a_look_keeps_no_tensor_alive(monkeypatch):
    def step():
        tensor = torch.ones(1)
        assert until(lambda: sampler.counts.total() > 1)
        seen = sampler.counts.total()
        monkeypatch.setattr(profile, "SECONDS", 600)  # after the next look
        assert until(lambda: sampler.counts.total() > seen)
        time.sleep(0.1)
        return weakref.ref(tensor)

    monkeypatch.setattr(profile, "SECONDS", 0.001)
    sampler = Sampler(clock_in("forward"))
    assert step()() is None
    sampler.close()


@pytest.mark.parametrize("collects", [True, False])
def test_collections_are_as_before_after_a_look(collects):
    if not collects:
        gc.disable()
    try:
        with profile.frame_of(threading.get_ident()) as frame:
            assert frame and gc.isenabled() == (collects and sys.version_info >= (3, 12))
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_nothing_else_asks_for_the_frames_of_another_thread():
    """The rule of `frame_of` holds for all: the watchdog looks while set-up collects."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("steady/**/*.py"), *ROOT.glob("tools/*.py")]
    asking = [path.name for path in files if "_current_frames()" in path.read_text()]
    assert asking == ["sampler.py"]


def test_the_thread_of_the_steps_is_looked_at(sampler):
    """The Monitor may have been made in another."""
    sampler.thread_id = 0
    sampler.read(1)
    assert sampler.thread_id == threading.get_ident()


def test_beside_a_model_s_phases_the_line_that_calls_a_model_is_named(sampler):
    """As in an evaluation: the model's own lines are no news."""
    through_libraries(Watched())
    frame, named = FRAMES.pop(), []
    for phase in ("other", "forward", "other"):  # at first it may be a loop without phases
        named.append(parts_of(place_of(sampler, phase, frame))[1].rpartition(".")[2])
    assert named == ["forward", "forward", "through_libraries"]


def test_looks_past_twice_a_usual_step_also_count_as_of_heavy_steps(sampler):
    clock, here = sampler.clock, sys._getframe()
    log = eval(compile("sys._getframe()", f"{profile.HERE}/gather.py", "eval"))
    clock.usual_ms = 1e3
    for phase, spent, frame in (("forward", 1.9, here), ("forward", 3.0, here), ("other", 3.0, log),
                                ("waiting", 3.0, here), ("evaluation", 3.0, here)):
        clock.current, clock.since, clock.step_seconds = phase, time.perf_counter(), spent
        for _ in range(LEAST):
            sampler.look(frame)
    found = mean_row([sampler.read(1)])
    looks = {phase: n.total() for phase, n in found["profile"].items()}
    assert looks == dict.fromkeys(("other", "waiting", "evaluation", "heavy steps"), LEAST) | {
        "forward": 2 * LEAST} and found["looks"] == 5 * LEAST


def test_a_run_writes_where_its_looks_were(run, tmp_path, monkeypatch):
    """And the source text of each line, once."""
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    monkeypatch.setattr(profile, "LEAST", 1)
    run("--out_dir", "r", "--log_interval", 4)
    found = mean_row(rows(tmp_path / "r"))["profile"]
    assert found and found.keys() <= {*PHASES, "heavy steps"}
    places = {name for lines in found.values() for name in lines}
    assert any("train.py:" in name for name in places), places
    sources = [line for row in rows(tmp_path / "r") for line in row.get("sources", {}).items()]
    lines = (ROOT / "train.py").read_text().splitlines()
    of_train = {n: text for n, text in sources if n.startswith("train.py:")}
    assert of_train == {n: lines[int(n.partition(":")[2]) - 1].strip() for n in of_train} != {}
    assert len(sources) == len({n for n, _ in sources})
    run("--out_dir", "off", "--monitoring", "off")
    assert not mean_row(rows(tmp_path / "off"))["profile"]


def test_a_fork_waits_for_a_look():
    """Or in the child the lock would stay taken, the interval short, and collections off."""
    profile.LOOK.acquire()
    threading.Timer(0.1, profile.LOOK.release).start()
    if not (child := os.fork()):
        os._exit(profile.LOOK.locked())
    assert os.waitpid(child, 0)[1] == 0


def keep_the_lock():
    sum(range(400_000))  # in C: about 10 ms


def test_a_function_in_c_that_keeps_pythons_lock_gets_its_share_of_looks(monkeypatch):
    """Not the line after it, at which the sampler gets the lock."""
    monkeypatch.setattr(profile, "SECONDS", 0.03)
    sampler, end = Sampler(clock_in("other")), time.perf_counter() + 60
    while sampler.counts.total() < 200 and time.perf_counter() < end:
        time.sleep(0.005)
        keep_the_lock()
    sampler.close()
    looks = [n for (_, place, _), n in sampler.counts.items()
             if place[0] and place[0][0] is keep_the_lock.__code__]
    assert sum(looks) > 0.2 * sampler.counts.total()  # of two thirds of the time


# --- traces: their files stay few ---


@pytest.fixture
def signalled(monkeypatch):
    """signalled(step) sends this process SIGUSR2 after that step."""
    return lambda step: after_step(step, lambda: signal.raise_signal(signal.SIGUSR2),
                                   monkeypatch.setattr)


def test_a_signal_writes_a_trace_of_three_steps(run, tmp_path, signalled):
    signalled(4)
    handler = signal.getsignal(signal.SIGUSR2)
    told = run("--out_dir", "r", "--log_interval", 2)
    assert signal.getsignal(signal.SIGUSR2) == handler
    (file,) = (tmp_path / "r/traces").iterdir()
    assert file.name == "step_5.json" and f"r/traces/{file.name}" in told
    events = json.loads(file.read_text())["traceEvents"]
    assert sum("AdamW" in event["name"] or "Muon" in event["name"]
               for event in events if event.get("cat") == "user_annotation") >= 3
    written = rows(tmp_path / "r")
    assert [row["trace"] for row in written if "trace" in row] == ["r/traces/step_5.json"]
    # their steps say nothing of the speed
    assert [row["step"] for row in written if "perf/disturbed" in row] == [6, 8]
    assert "trace of three steps" in told


def test_three_steps_from_one_that_is_asked_for_are_traced(run, tmp_path):
    run("--out_dir", "r", "--trace", 8)
    assert [path.name for path in (tmp_path / "r/traces").iterdir()] == ["step_8.json"]
    assert [row["step"] for row in rows(tmp_path / "r") if "perf/disturbed" in row] == [8, 12]
    assert "\ntrace:" not in (tmp_path / "r/config.yaml").read_text()


def test_a_full_disk_stops_no_training(run, tmp_path, signalled, monkeypatch):
    signalled(2)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/traces").write_text("a file of the user's")
    assert "step 12/12" in run("--out_dir", "r")


def test_a_fork_that_profiles_by_itself_goes_on(run, tmp_path, signalled):
    signalled(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert "step 12/12" in run("--out_dir", "r")
    assert not list((tmp_path / "r/traces").glob("*"))


@pytest.mark.slow
def test_a_trace_of_one_of_several_ranks(run, tmp_path):
    def hook(rank):
        after_step(4, lambda: rank == 0 and signal.raise_signal(signal.SIGUSR2))

    run("--out_dir", "r", "--log_interval", 2, ranks=2, hook=hook)
    assert [path.name for path in (tmp_path / "r/traces").iterdir()] == ["step_5.json"]


@pytest.mark.parametrize("last", [3, 4])
def test_the_warnings_of_waits_end_with_the_trace(tmp_path, monkeypatch, last):
    """Also where the run ends in the middle of it."""
    modes = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Mock())
    tracer = Tracer(tmp_path, SimpleNamespace(type="cuda"), at=2)
    for step in range(1, last + 1):
        tracer.step(step)
    assert modes == ([2, "warn"] if last == 3 else [2, "warn", 2])
    tracer.close()
    assert modes == [2, "warn", 2]
