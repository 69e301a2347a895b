"""A slow-down is found and its cause is named: each is provoked in a small run of the real program,
on a clock that the test drives. `python -m tests.bench diagnosis` provokes them really.
"""

import gc
import json
import math

import pytest
from conftest import before
from test_monitor import Clock, make, spend, step
from test_slower import codes, row_of

import data
import monitor
import train
from steady.checkpoints import writer
from steady.watch import machine, slower
from steady.watch import sinks as telemetry
from steady.watch.history import OUTSIDE_PHASES, OWN_PHASES
from steady.watch.report import report
from tools.report import main


class Driven(Clock):
    """A step takes 6 or 7 ms, 1 ms from each reading to the next, and nothing else is measured.

    As there is no noise, intervals can be short.
    """

    interval = 4  # steps between logs
    step = 0  # updates made
    slow_from = 13 * interval  # the last step before the provocation

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, tick=1e-3)
        monkeypatch.setattr(slower, "MIN_STEPS", self.interval)
        monkeypatch.setattr(machine, "SECONDS_BETWEEN", math.inf)
        monkeypatch.setattr(machine, "threads", lambda: {})
        # of the machine that the tests run on, which others may use
        monkeypatch.setattr(machine, "counters", lambda: {})
        monkeypatch.setattr(machine.Probe, "read", lambda *_: {"machine/cpu_sum_us": 10.0})
        monkeypatch.setattr(machine, "read_resources", lambda *_: {})

    @property
    def late(self) -> bool:
        return self.step >= self.slow_from


@pytest.fixture
def clock(monkeypatch):
    return Driven(monkeypatch)


@pytest.fixture
def provoke(run, tmp_path, monkeypatch):
    """provoke(clock, *flags) → (events that the report of a run names, what it printed)."""

    def provoke(clock, *flags, intervals=22, **how):
        def begin_step(seed, step, rank):
            clock.step = step

        before(train, "seed_everything", begin_step, monkeypatch.setattr)
        told = run("--max_steps", intervals * clock.interval, "--log_interval", clock.interval,
                   "--out_dir", "r", "--eval_interval", 0, "--save_interval", 0,
                   "--n_layer", 1, "--seq_len", 16, "--batch_size", 4, *flags, **how)
        return slowdowns(tmp_path / "r"), told

    return provoke


def slowdowns(folder) -> list:
    return [found for found in report(folder)["findings"] if found.code == "slower"]


def the_event(events, clock, kind="step"):
    """Without noise there is one event and no other."""
    (event,) = events
    assert event.phase == kind and abs(event.since - clock.slow_from) <= 2 * clock.interval, event
    return event


def test_garbage_collection(provoke, monkeypatch, clock):
    def collect(when, info):
        clock.advance(0.02 * (when == "stop" and clock.late))

    before(train, "update", lambda *_: clock.late and gc.collect(), monkeypatch.setattr)
    gc.callbacks.append(collect)
    try:
        events, _ = provoke(clock)
    finally:
        gc.callbacks.remove(collect)
    assert "gc" in codes(the_event(events, clock))


def test_a_list_that_is_rewritten_at_each_save(provoke, monkeypatch, clock):
    history = []

    def rewrite(run):
        previous = run.monitor.phase("checkpoint")
        if clock.late:
            history.extend(range(100_000))
            clock.advance(len(history) * 1e-7)
        run.monitor.phase(previous)

    before(train, "save_checkpoint", rewrite, monkeypatch.setattr)
    events, _ = provoke(clock, "--save_interval", clock.interval, intervals=30)
    event = the_event(events, clock, "checkpoint")
    assert event.values["creeps"] and codes(event) == ["checkpoint grows"]


@pytest.mark.parametrize("phase, owner, name, flags", [
    ("data", data.Mixture, "batch", []),
    # by the loop, which waits for the thread that writes
    ("checkpoint", writer.Writer, "wait", ["--save_interval", Driven.interval]),
    ("logging", telemetry.TensorBoard, "write", ["--tensorboard"]),
    ("evaluation", train, "eval_batches", ["--eval_interval", Driven.interval])])
def test_what_is_slow_in_or_between_steps(provoke, monkeypatch, clock, phase, owner, name, flags):
    before(owner, name, lambda *_: clock.advance(0.5 * clock.late), monkeypatch.setattr)
    events, told = provoke(clock, *flags)
    event = the_event(events, clock, "step" if phase == "data" else phase)
    assert not event.values["creeps"] and codes(event) == [phase]
    assert "warning: step" in told and "slower since about step" in told
    if phase == "data":
        assert event.since == clock.slow_from + 1
        assert event.values["phases"] == [("data", pytest.approx(500, rel=0.02))]
        assert event.parts[0].ms == pytest.approx(500, rel=0.02)


def test_longer_sequences_are_more_work_and_not_slower(provoke, monkeypatch, clock):
    before(train.Transformer, "forward",
           lambda model, tokens, *_: clock.advance(tokens.numel() * 1e-4), monkeypatch.setattr)
    step, size = clock.slow_from, ["--d_model", 64, "--seq_len"]
    provoke(clock, "--max_steps", step, "--save_interval", clock.interval, *size, 64)
    events, told = provoke(clock, "--resume", f"r/checkpoints/step_{step:08d}.pt", *size, 256,
                           "--allow_change", "seq_len")
    assert events == [] and "steady: never slower" in told


def test_recompilation(provoke, monkeypatch, clock):
    import torch._dynamo.utils

    stats = torch._dynamo.utils.counters["stats"]
    monkeypatch.setitem(stats, "unique_graphs", 1)

    def compile_again(*_):
        if clock.late:
            stats["unique_graphs"] += 1
            clock.advance(0.02)

    before(train.Transformer, "forward", compile_again, monkeypatch.setattr)
    assert "compilations" in codes(the_event(provoke(clock)[0], clock))


@pytest.fixture
def drive(tmp_path, clock, monkeypatch):
    """drive(ms, …) → the events of some intervals of steps in which ms() says {phase: ms}."""
    clock.tick = 0.0

    def drive(ms, intervals=22, **options):
        steps = intervals * clock.interval
        monkeypatch.setattr(machine, "SECONDS_BETWEEN", 0.0)
        m = make(tmp_path, log_interval=clock.interval, max_steps=steps, **options)
        for clock.step in range(steps):
            spend(m, clock, **ms())
            step(m, clock.step + 1)
        m.close()
        return slowdowns(tmp_path)

    return drive


def test_a_slow_rank_is_named(drive, clock, monkeypatch):
    """Rank 0 waits for rank 1, whose forward pass takes 30 ms more, for an unknown reason."""
    def gather(parts, group):
        *same, own, metrics = parts
        more = [30 * clock.late * (phase == "forward") for phase in OWN_PHASES]
        return [parts, [*same, [ms + late for ms, late in zip(own, more, strict=True)], metrics]]

    monkeypatch.setattr(monitor, "gather", gather)
    monkeypatch.setattr(monitor.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(monitor.dist, "get_world_size", lambda: 2)
    event = the_event(drive(lambda: dict(forward=3, backward=5, waiting=30 * clock.late)), clock)
    assert event.values["phases"] == [("waiting", pytest.approx(30))]
    (cause,) = event.parts
    assert (cause.values["rank"], cause.values["phase"]) == (1, "forward")
    assert cause.values["ratio"] == pytest.approx((3 + 5 + 30) / (3 + 5))
    assert event.side == "unclear"


def test_an_allocator_that_tries_again_in_the_report_too(drive, clock, monkeypatch, tmp_path, tool):
    monkeypatch.setattr(machine, "read_resources", lambda *_: {
        "memory/alloc_retries": clock.step * clock.late})
    event = the_event(drive(lambda: dict(forward=10, backward=10 + 10 * clock.late)), clock)
    assert event.values["phases"] == [("backward", pytest.approx(10))]
    assert codes(event)[0] == "allocator"
    told = tool(main, tmp_path).out
    assert "backward +10 ms" in told and str(event.parts[0]) in told


def test_a_list_in_the_loop_that_is_traversed_each_time(drive, clock):
    event = drive(lambda: dict(forward=10, other=max(0, clock.step - clock.slow_from) / 4))[0]
    assert event.values["creeps"] and event.side == "program"
    assert event.values["phases"][0][0] == "other"
    assert abs(event.since - clock.slow_from) <= clock.interval + 1


def test_cpu_contention_and_its_end(drive, clock, monkeypatch, tmp_path, capsys):
    queued, began = [0.0], clock.slow_from

    def ms():
        slow = began <= clock.step < began + 9 * clock.interval
        queued[0] += 20 * slow
        return dict(forward=3 + 20 * slow, backward=5)

    monkeypatch.setattr(machine, "threads", lambda: {1: (0.0, queued[0])})
    event = the_event(drive(ms, intervals=36), clock)
    assert codes(event)[0] == "contention"
    assert 0 < event.until - (began + 9 * clock.interval) <= 10 * clock.interval
    assert "step time is back to normal; it was longer since step" in capsys.readouterr().out
    assert f"it ended at step {event.until}" in report(tmp_path)["verdict"][0]


@pytest.mark.slow
def test_simulated_runs():
    """The benchmark has more of them; python -m tests.bench slowdowns."""
    from tests.bench import slowdowns

    found = slowdowns.simulate(30)
    assert found["recall"] >= 0.95 and found["precision"] >= 0.95 and found["phase"] >= 0.9
    assert slowdowns.false_alarms(1_000_000, 50) == 0


def test_the_reports_of_two_runs_and_the_exit_codes(run, tmp_path, tool, monkeypatch, clock):
    for name, seconds in (("a", 0.005), ("b", 0.02)):
        with monkeypatch.context() as patch:
            before(train.Transformer, "forward",
                   lambda *_, seconds=seconds: clock.advance(seconds), patch.setattr)
            run("--max_steps", 40, "--out_dir", name)
    assert "verdict" in tool(main, "a").out
    first, second = json.loads(tool(main, "a", "b", "--json").out)
    assert first["step"] == second["step"] == 40 and set(OUTSIDE_PHASES) < set(first["seconds"])
    assert sum(first["seconds"].values()) == pytest.approx(first["wall_s"])
    assert second["seconds"]["forward"] > 2 * first["seconds"]["forward"]
    (tmp_path / "c").mkdir()  # it crashed before its first log
    (tmp_path / "c/metrics.jsonl").write_text('{"step": 0, "order": {}}\n')
    assert "nan" not in tool(main, "a", "c", "b").out
    assert "no such run" in tool(main, tmp_path, expect=2).err


def test_throughput_and_peak_are_not_lower_for_the_last_log(tmp_path):
    """Which is of the one step that is left, and had to wait."""
    lines = [json.dumps(row_of(50 * i, forward=x) | {
        "perf/tokens_per_second": 1e6 / x, "memory/peak_gb": 50 - x})
        for i, x in enumerate([10.0] * 20 + [40.0], start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = report(tmp_path)["figures"]
    assert found["perf/tokens_per_second"] == pytest.approx(1e5) and found["memory/peak_gb"] == 40
