"""Is it the machine or the program? Rows whose answer is known, on a machine that wobbles."""

import itertools
import os
import signal

import numpy as np
import pytest
import torch

from steady.watch import machine
from steady.watch.causes import Cause
from steady.watch.sinks import OUTSIDE_PHASES
from steady.watch.slowdowns import SlowdownDetector, change_point, worth_saying

SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.5, "optimizer": 0.12, "other": 0.05}
STEP_MS, EVERY, PLANTED = 25.0, 20, 60  # ms; steps between logs; the log after which it is planted


def wobble(rng, logs: int, size: float) -> np.ndarray:
    """How much slower the machine is at each log: a random walk that comes back, in blocks."""
    walk = np.zeros(logs)
    for i in range(1, logs):
        walk[i] = 0.9 * walk[i - 1] + rng.normal(0, size * 0.44)
    return np.exp(np.clip(walk, -size, size))


def made(seed=0, logs=120, wobbles=0.2, noise=0.02, phase=None, share=0.0, creeps=False,
         factor=1.0, probes=True, more=lambda late: {}):
    """Rows: from log PLANTED on `phase` takes `share` of a step more and all of them `factor`."""
    rng, rows = np.random.default_rng(seed), []
    machine_is = wobble(rng, logs, wobbles)
    for i in range(logs):
        late = i >= PLANTED
        slower = machine_is[i] * (factor if late else 1.0)
        ms = {name: STEP_MS * part * slower * rng.lognormal(0, noise)
              for name, part in SHARES.items()}
        grown = (i - PLANTED + 1) / (logs - PLANTED) if creeps else 1.0
        if phase and late:
            ms[phase] += STEP_MS * share * grown
        total = sum(ms.values())
        row = {f"perf/{name}_ms": value for name, value in ms.items()}
        row |= dict.fromkeys((f"perf/{name}_ms" for name in OUTSIDE_PHASES), 0.0)
        row |= {"step": (i + 1) * EVERY, "perf/step_ms": total, "perf/step_ms_median": total,
                "perf/tflops": 1 / total, "perf/cpu_queue_ms": 0.01, "perf/gc_ms": 0.0}
        if probes:
            row["machine/cpu_probe_us"] = 10 * slower * rng.lognormal(0, 0.01)
        rows.append(row | more(late))
    return rows


def detect(rows) -> tuple[list, list]:
    """(events, those that were returned while the run went on)."""
    detector, said = SlowdownDetector(), []
    for row in rows:
        said += [event for event in detector.add(row) if event.ended is None]
    return detector.finish(), said


def codes(event) -> list[str]:
    return [cause.code for cause in event.causes]


def of_program(events) -> list[dict]:
    return [event for event in events if event.blames == "program"]


@pytest.mark.parametrize("phase", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_planted_comes_first_while_the_machine_wobbles(phase, seed):
    events = of_program(detect(made(seed, phase=phase, share=0.06))[0])
    assert len(events) == 1, events
    (event,) = events
    assert event.phases[0][0] == phase and not event.creeps
    assert event.phases[0][1] == pytest.approx(0.06 * STEP_MS, rel=0.35)
    assert abs(event.since - PLANTED * EVERY) <= 3 * EVERY
    assert event.since_range[0] <= PLANTED * EVERY + 1 <= event.since_range[1] + EVERY


def test_a_wobbling_machine_is_never_blamed_on_the_program():
    for seed in range(10):
        for event in detect(made(seed, wobbles=0.25))[0]:
            assert event.blames != "program", (seed, event)


@pytest.mark.parametrize("probes, blames", [(True, "machine"), (False, "unclear")])
def test_a_slower_machine_is_told_by_its_probe(probes, blames):
    (event,) = detect(made(factor=1.3, wobbles=0.02, probes=probes))[0]
    assert event.blames == blames and abs(event.since - PLANTED * EVERY) <= 3 * EVERY
    assert event.percent == pytest.approx(30, abs=5)
    if probes:
        assert codes(event)[0] == "probe", event.causes
    else:
        assert event.causes == [Cause("unexplained", pytest.approx(0.3 * STEP_MS, rel=0.2))]


def test_where_a_machine_is_many_times_slower_no_phase_is_blamed():
    """Ten times slower, what the phases differ by is ten times as large, too."""
    for seed in range(15):
        rows = made(seed, factor=12, noise=0.05, wobbles=0.1)
        for row in rows[PLANTED:]:
            row["perf/cpu_queue_ms"] = 0.9 * row["perf/step_ms"]
        events = detect(rows)[0]
        assert all(event.series not in SHARES for event in events), (seed, events)
        event = max(events, key=lambda e: e.percent)
        assert abs(event.since - PLANTED * EVERY) <= 6 * EVERY and event.percent > 500, seed
        assert codes(event)[0] == "contention", event


def test_a_slower_program_is_not_a_slower_machine():
    """All phases take longer, and the probe does not: nobody is blamed."""
    rows = made(wobbles=0.02, factor=1.3)
    for row in rows:
        row["machine/cpu_probe_us"] = 10.0
    (event,) = detect(rows)[0]
    assert event.blames == "unclear" and codes(event) == ["unexplained"]


def test_a_second_change_on_top_of_the_first_is_found():
    rows = made(wobbles=0.05, phase="forward", share=0.2)
    for row in rows[90:]:
        for name in ("perf/data_ms", "perf/step_ms", "perf/step_ms_median"):
            row[name] += 0.2 * STEP_MS
        row["perf/tflops"] = 1 / row["perf/step_ms"]
    first, second = of_program(detect(rows)[0])
    assert (first.phases[0][0], second.phases[0][0]) == ("forward", "data")
    assert abs(second.since - 90 * EVERY) <= 3 * EVERY


def test_what_began_long_ago_keeps_its_beginning():
    events, said = detect(made(phase="data", share=0.3, wobbles=0.05, logs=600))
    (event,) = of_program(events)
    assert abs(event.since - PLANTED * EVERY) <= EVERY and said.count(event) == 1
    assert event.phases[0] == ("data", pytest.approx(0.3 * STEP_MS, rel=0.1))
    assert [e for e in events if worth_saying(e)] == [event]  # not the machine's 5 % up and down


@pytest.mark.parametrize("column, ms, cause", [
    ("machine/throttled_ms", 8, "quota"), ("machine/steal_ms", 8, "stolen"),
    ("perf/cpu_queue_ms", 8, "contention"), ("machine/disk_ms", 8, "disk"),
    ("machine/stops", 5, "stopped"),
])
def test_what_the_kernel_says_is_the_machine(column, ms, cause):
    def more(late):
        return {column: ms * late}

    rows = made(factor=1.3, wobbles=0.02, probes=False, more=more)
    for i, row in enumerate(rows) if column == "machine/stops" else ():
        row[column] = 3 * max(0, i - PLANTED)  # so far
    (event,) = detect(rows)[0]
    assert event.blames == "machine" and codes(event)[0] == cause


def test_a_queue_explains_of_a_phase_what_its_share_of_a_step_can_have_met():
    """Not all that one phase has more than the others, as a neighbour comes at the same time."""
    rows = made(phase="other", share=0.2, wobbles=0.0,
                more=lambda late: {"perf/cpu_queue_ms": 3.0 if late else 0.01})
    (event,) = detect(rows)[0]
    assert event.blames == "program" and codes(event) == ["unexplained", "contention"]
    assert 0.8 <= event.causes[0].ms / (event.after - event.before) < 0.9, event


@pytest.mark.parametrize("more, readings", [
    ({"machine/gpu_celsius": 88, "machine/gpu_watts": 650.0}, "1400 MHz, 88 °C, 650 W"),
    ({}, "1400 MHz"),
])
def test_lower_clocks_of_a_gpu_come_with_what_it_reports(more, readings):
    rows = made(factor=1.3, wobbles=0.02, probes=False,
                more=lambda late: {"perf/clock_mhz": 1400 if late else 1900} | more)
    (event,) = detect(rows)[0]
    assert event.blames == "machine" and codes(event)[0] == "clocks"
    assert event.causes[0].values == {"readings": readings}


def test_what_is_said_waits_until_a_line_is_known():
    """The first looks after the change are too few."""
    rows = itertools.count()

    def looks(late):
        lines = {"model.py:5 attend": 1 + 2 * late, "model.py:9 norm": 1}
        return {"profile": {"forward": lines}} if next(rows) % 4 == 0 else {}

    detector, said, waited = SlowdownDetector(), [], 0
    for row in made(phase="forward", share=0.5, wobbles=0.01, more=looks):
        said += [(row["step"], event, codes(event)) for event in detector.add(row)]
        waited += detector.waits
    ((step, event, found),) = said
    assert found[0] == "line" and event.found < step and waited and not detector.waits


@pytest.mark.parametrize("ratio, code, blames", [(1.8, "slow rank", "unclear"),
                                                 (1.02, "network", "machine")])
def test_a_slow_rank_or_a_slow_network(ratio, code, blames):
    rows = made(wobbles=0.02, more=lambda late: {
        "perf/slowest_rank": 3, "perf/slowest_rank_ratio": ratio if late else 1.02,
        "perf/slowest_rank_phase": 1, "perf/waiting_ms": 2.0 + 10.0 * late})
    for row in rows:
        row["perf/step_ms"] += row["perf/waiting_ms"]
        row["perf/step_ms_median"] = row["perf/step_ms"]
        row["perf/tflops"] = 1 / row["perf/step_ms"]
    (event,) = detect(rows)[0]
    assert codes(event)[0] == code and event.blames == blames


def test_change_points():
    rng, found = np.random.default_rng(0), 0
    for _ in range(40):
        creeps, k = bool(rng.integers(2)), int(rng.integers(20, 80))
        i = np.arange(100)
        rise = np.maximum(0, i - k + 1.0) / 20 if creeps else 1.0 * (i >= k)
        values = 10 + rise + rng.normal(0, 0.2, 100)
        values[rng.integers(0, 100, 3)] += 5  # outliers
        at, (low, high), shape = change_point(values)
        found += abs(at - k) <= (8 if creeps else 1) and low <= k <= high and shape == creeps
    assert found >= 38


def test_the_machine_is_read():
    reader = machine.Machine(torch.device("cpu"))
    try:
        assert "machine/cpu_probe_us" in reader.read(1)
        assert "machine/cpu_probe_us" not in reader.read(2)  # not at every log
        reader.slow_read = -1e9, *reader.slow_read[1:]
        row = reader.read(3)
        assert row["machine/cpu_probe_us"] > 0 and row["machine/steal_ms"] >= 0
    finally:
        reader.close()


def test_a_gpu_is_read_as_far_as_it_reports(monkeypatch):
    assert machine.gpu_readings(torch.device("cuda")) == {}  # no GPU, or no nvidia-ml-py
    for name, value in dict(clock_rate=1410, temperature=84, power_draw=350_500).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert machine.gpu_readings(torch.device("cpu")) == {}
    assert machine.gpu_readings(torch.device("cuda")) == {
        "perf/clock_mhz": 1410, "machine/gpu_celsius": 84, "machine/gpu_watts": 350.5}


def test_stops_are_counted():
    before = signal.getsignal(signal.SIGCONT)
    reader = machine.Machine(torch.device("cpu"))
    try:
        os.kill(os.getpid(), signal.SIGCONT)
        assert reader.read(1)["machine/stops"] == 1
    finally:
        reader.close()
    assert signal.getsignal(signal.SIGCONT) == before


# --- what once was taken for something else ---


def test_rare_slow_steps_that_stop_are_no_slow_down():
    """Stalls are in the mean, not in the median: with their end, the rest seemed to be longer."""
    rows = made(wobbles=0.01)
    for row in rows[:PLANTED]:
        row["perf/data_ms"] += 7.5
        row["perf/step_ms"] += 7.5
        row["perf/tflops"] = 1 / row["perf/step_ms"]
    assert [event for event in detect(rows)[0] if worth_saying(event)] == []


@pytest.mark.parametrize("column", ["perf/compilations", "memory/alloc_retries", "machine/stops"])
def test_what_happened_once_does_not_make_all_steps_slower(column):
    (event,) = detect(made(wobbles=0.02, factor=1.3, more=lambda late: {column: 1 + late}))[0]
    assert event.blames == "machine" and codes(event)[0] == "probe"


@pytest.mark.parametrize("name", ["perf/tflops", "perf/step_ms", "perf/logging_ms",
                                  "perf/step_ms_median", "perf/forward_ms"])
@pytest.mark.parametrize("value", [None, 0.0, "gone"])
def test_rows_with_holes_are_passed_over(name, value):
    rows = made(phase="forward", share=0.3)
    for row in rows[::7]:
        if value == "gone":
            del row[name]
        else:
            row[name] = value
    detect(rows)
