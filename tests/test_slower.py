"""Slower than before: since when, machine or program, and the line. Slow from the first step: what
could be avoided, and nothing else. Rows with a known answer.
"""

import itertools
import json
import math
import os
import random
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import python

from steady.watch import machine
from steady.watch.history import History
from steady.watch.lines import OTHERS, longer_lines
from steady.watch.report import findings, news, report, report_text
from steady.watch.slow import slow
from steady.watch.slower import LINE_SURE, slowdown
from tests.bench.diagnosis import RESULTS, diagnosed, kept, score
from tests.bench.slowdowns import row_of

SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.5, "optimizer": 0.12, "other": 0.05}
STEP_MS, EVERY, PLANTED = 25.0, 20, 60  # ms; steps between logs; the log after which it is planted


def wobble(rng, logs: int, size: float) -> np.ndarray:
    """How much slower the machine is at each log: a random walk that comes back, in blocks."""
    walk = np.zeros(logs)
    for i in range(1, logs):
        walk[i] = 0.9 * walk[i - 1] + rng.normal(0, size * 0.44)
    return np.exp(np.clip(walk, -size, size))


def made(seed=0, logs=120, wobbles=0.2, noise=0.02, phase=None, share=0.0, factor=1.0,
         probes=True, more=lambda late: {}, shares=SHARES):
    """Rows: from log PLANTED on `phase` takes `share` of a step more and all of them `factor`."""
    rng, rows = np.random.default_rng(seed), []
    machine_is = wobble(rng, logs, wobbles)
    for i in range(logs):
        late = i >= PLANTED
        slower = machine_is[i] * (factor if late else 1.0)
        ms = {name: STEP_MS * part * slower * rng.lognormal(0, noise)
              for name, part in shares.items()}
        if phase and late:
            ms[phase] = ms.get(phase, 0.0) + STEP_MS * share
        row = row_of((i + 1) * EVERY, **ms) | {"perf/cpu_queue_ms": 0.01, "perf/gc_ms": 0.0}
        row["perf/thread_ms"] = 0.15 * row["perf/step_ms"]  # a thread that is always busy
        if probes:
            row["machine/cpu_sum_us"] = 10 * slower * rng.lognormal(0, 0.01)
        rows.append(row | more(late))
    return rows


def detect(rows) -> list:
    return slowdown(History(rows))


def live(rows) -> list[tuple[int, object]]:
    """(step, finding) of those reported while the run went on."""
    history, reported = History(), []
    for row in rows:
        history.append(row)
        for found in news(history):
            reported.append((row["step"], found))
            history.append({"step": row["step"], "finding": found.row()})
    return reported


def codes(found) -> list[str]:
    return [part.code for part in found.parts]


def of_program(found) -> list:
    return [each for each in found if each.side == "program"]


@pytest.mark.parametrize("phase, share, factor", [
    *((phase, 0.06, 1.0) for phase in SHARES), ("data", 0.3, 2.0)])  # beside a slower machine
@pytest.mark.parametrize("seed", range(3))
def test_what_is_planted_comes_first_while_the_machine_wobbles(phase, share, factor, seed):
    found = detect(made(seed, phase=phase, share=share, factor=factor))
    assert all(sum(ms for _, ms in each.values["phases"]) < 1.2 * each.ms for each in found), found
    (event,) = of_program(found)
    (name, ms), *_ = event.values["phases"]
    assert name == phase and not event.values["creeps"]
    assert ms == pytest.approx(share * STEP_MS, rel=0.35)
    assert abs(event.since - PLANTED * EVERY) <= 3 * EVERY


@pytest.mark.parametrize("phase", ["data", "forward", "optimizer"])
@pytest.mark.parametrize("logs", [2, 3, 4])
def test_what_begins_after_a_few_logs_is_found_and_has_not_ended(phase, logs):
    """The first ten define the usual time, most of them already slow."""
    for seed in range(4):
        rows = made(seed, wobbles=0.05, phase=phase, share=0.5)[PLANTED - logs:]
        (event,) = of_program(detect(rows))
        assert abs(event.since - PLANTED * EVERY) <= EVERY and event.until is None, (seed, event)
        assert event.values["phases"][0] == (phase, pytest.approx(0.5 * STEP_MS, rel=0.2))


@pytest.mark.parametrize("shares", [SHARES, {"other": 1}, {"other": 0.95, "optimizer": 0.05}])
@pytest.mark.parametrize("probe", ["slower", "as before", "none", "another"])
def test_a_slower_machine_is_told_by_its_probe(probe, shares):
    rows = made(factor=1.3, wobbles=0.02, probes=probe != "none", shares=shares)
    for row in rows if probe == "as before" else ():
        row["machine/cpu_sum_us"] = 10.0
    for row in rows[:PLANTED] if probe == "another" else ():  # before an update of this program
        row["machine/cpu_probe_us"] = row.pop("machine/cpu_sum_us") / 3
    (event,) = detect(rows)
    assert abs(event.since - PLANTED * EVERY) <= 3 * EVERY
    assert event.values["percent"] == pytest.approx(30, abs=5)
    if probe == "slower":
        assert (event.side, codes(event)[0]) == ("machine", "probe"), event.parts
    else:
        assert (event.side, codes(event)) == ("unclear", ["unexplained"])
        assert event.parts[0].ms == pytest.approx(0.3 * STEP_MS, rel=0.2)


def test_where_a_machine_is_many_times_slower_no_phase_is_blamed():
    """Ten times slower, what the phases differ by is ten times as large, too."""
    for seed in range(15):
        rows = made(seed, factor=12, noise=0.05, wobbles=0.1)
        for row in rows[PLANTED:]:
            row["perf/cpu_queue_ms"] = 0.9 * row["perf/step_ms"]
        events = detect(rows)
        assert not of_program(events), (seed, events)
        event = max(events, key=lambda each: each.ms)
        assert abs(event.since - PLANTED * EVERY) <= 6 * EVERY and event.ms > 5 * event.of, seed
        assert codes(event)[0] == "contention", event


def test_a_second_change_on_top_of_the_first_is_found():
    rows = made(wobbles=0.05, phase="forward", share=0.2)
    for row in rows[90:]:
        for name in ("perf/data_ms", "perf/step_ms", "perf/step_ms_median"):
            row[name] += 0.2 * STEP_MS
        row["perf/tflops"] = 1 / row["perf/step_ms"]
    first, second = of_program(detect(rows))
    assert [each.values["phases"][0][0] for each in (first, second)] == ["forward", "data"]
    assert abs(second.since - 90 * EVERY) <= 3 * EVERY


@pytest.mark.slow
def test_a_change_long_ago_keeps_its_beginning_and_is_reported_once():
    rows = made(phase="data", share=0.3, wobbles=0.05, logs=300)
    (event,) = detect(rows)  # and not the machine's 5 % up and down
    assert abs(event.since - PLANTED * EVERY) <= EVERY and event.side == "program"
    assert event.values["phases"][0] == ("data", pytest.approx(0.3 * STEP_MS, rel=0.1))
    ((step, _),) = live(rows[:120])
    assert step <= (PLANTED + 10) * EVERY


stops = itertools.count()


@pytest.mark.parametrize("more, cause, readings", [
    (lambda late: {"machine/throttled_ms": 8 * late}, "quota", None),
    (lambda late: {"machine/steal_ms": 8 * late}, "stolen", None),
    (lambda late: {"perf/cpu_queue_ms": 8 * late}, "contention", None),
    (lambda late: {"machine/disk_ms": 8 * late}, "disk", None),
    (lambda late: {"machine/stops": 3 * next(stops) if late else 0}, "stopped", None),
    (lambda late: {"perf/clock_mhz": 1900 - 500 * late}, "clocks", "1400 MHz"),
    (lambda late: {"perf/clock_mhz": 1900 - 500 * late, "machine/gpu_celsius": 88,
                   "machine/gpu_watts": 650.0}, "clocks", "1400 MHz, 88 °C, 650 W")])
def test_what_the_kernel_or_a_gpu_says_is_the_machine(more, cause, readings):
    (event,) = detect(made(factor=1.3, wobbles=0.02, probes=False, more=more))
    assert event.side == "machine" and codes(event)[0] == cause
    assert event.parts[0].values == ({"readings": readings} if readings else {})


def test_a_queue_explains_of_a_phase_what_its_share_of_a_step_can_have_met():
    """Not all that one phase has more than the others, as a neighbour comes at the same time."""
    (event,) = detect(made(phase="other", share=0.2, wobbles=0.0,
                           more=lambda late: {"perf/cpu_queue_ms": 3.0 if late else 0.01}))
    assert event.side == "program" and codes(event) == ["unexplained", "contention"]
    assert 0.8 <= event.parts[0].ms / event.ms < 0.9, event


def test_a_report_waits_until_a_line_is_known():
    """The first looks after the change are too few."""
    rows = itertools.count()

    def looks(late):
        lines = {"model.py:5 attend": 1 + 2 * late, "model.py:9 norm": 1}
        return {"profile": {"forward": lines}} if next(rows) % 4 == 0 else {}

    made_rows = made(phase="forward", share=0.5, wobbles=0.01, more=looks)
    ((step, event),) = live(made_rows)
    assert codes(event)[0] == "line"
    assert detect([row for row in made_rows if row["step"] < step])  # known before, without it


def test_a_cause_found_later_is_reported_again_once():
    """At first the sampler has not met the line; then it does."""
    rows = made(phase="forward", share=0.5, wobbles=0.01)
    for i, row in enumerate(rows):
        lines = {"model.py:5 attend": 3, "model.py:9 norm": 3}
        if i >= PLANTED + 10:
            lines["model.py:7 plant"] = 12
        row["profile"] = {"forward": lines} if not PLANTED <= i < PLANTED + 10 else {}
    first, second = live(rows)
    assert first[1].cause == "unexplained" and second[1].cause == "line"
    assert "model.py:7 plant" in second[1].parts[0].line and first[1].since == second[1].since


@pytest.mark.parametrize("ratio, code, blames", [
    (1.8, "slow rank", "unclear"), (1.02, "network", "machine"), (None, "unexplained", "program")])
def test_a_slow_rank_or_a_slow_network_or_a_wait_of_one_process(ratio, code, blames):
    (event,) = detect(made(wobbles=0.02, phase="waiting", share=0.4, more=lambda late: {
        "perf/slowest_rank": 3, "perf/slowest_rank_ratio": ratio if late else 1.02,
        "perf/slowest_rank_phase": 1} if ratio else {}))
    assert codes(event)[0] == code and event.side == blames


def test_a_rank_that_waits_for_one_that_evaluates_alone_is_not_said_to_be_slow():
    logs = itertools.count()
    (event,) = detect(made(wobbles=0.02, phase="data", share=0.4, logs=80, more=lambda late: {
        "perf/slowest_rank": 1, "perf/slowest_rank_ratio": 9.0 if next(logs) == 70 else 1.02,
        "perf/slowest_rank_phase": 2}))
    assert codes(event) == ["data"] and event.side == "program"


def test_backward_that_may_have_waited_for_another_rank_is_not_said_to_be_the_program():
    ranks = {"perf/slowest_rank": 0, "perf/slowest_rank_ratio": 1.02, "perf/slowest_rank_phase": 1}
    for columns, blames in (({}, "program"), (ranks, "unclear")):
        (event,) = detect(made(wobbles=0.02, phase="backward", share=0.4,
                               more=lambda late, columns=columns: columns))
        assert event.side == blames


def test_longer_sequences_without_a_count_of_tokens_are_not_all_phases():
    rows = made(wobbles=0.02)
    for row in rows[PLANTED:]:
        del row["perf/tflops"]
        more = {f"perf/{name}_ms": 2 * row[f"perf/{name}_ms"] for name in ("forward", "backward")}
        row |= more | {"perf/step_ms": row["perf/step_ms"] + sum(more.values()) / 2}
    (event,) = detect(rows)
    assert event.ms > 0.5 * STEP_MS and event.side == "unclear" and "all phases" not in str(event)


def test_the_machine_is_read_and_stops_are_counted(tmp_path):
    before = signal.getsignal(signal.SIGCONT)
    reader = machine.Machine(torch.device("cpu"), 0, tmp_path)
    try:
        os.kill(os.getpid(), signal.SIGCONT)
        row = reader.read(1)
        assert "machine/cpu_sum_us" in row and row["machine/stops"] == 1
        assert "machine/cpu_sum_us" not in reader.read(2)  # not at every log
        reader.slow_read = -1e9, *reader.slow_read[1:]
        row = reader.read(3)
        assert row["machine/cpu_sum_us"] > 0 and row["machine/steal_ms"] >= 0
    finally:
        reader.close()
    assert signal.getsignal(signal.SIGCONT) == before


def test_the_probe_needs_one_core():
    """Beside four busy processes a product on two threads took half a second, twice a second."""
    code = ("import os, torch; from steady.watch.machine import Probe; task = '/proc/self/task'\n"
            "probe, threads = Probe(torch.device('cpu')), os.listdir(task)\n"
            "print(*probe.read(), os.listdir(task) == threads)\n"
            "with torch.autograd.profiler.profile() as left_on: probe.read()\n"
            "assert not left_on.function_events  # or it seems that the machine is slower")
    assert python("-c", code, OMP_NUM_THREADS="4")[0] == "machine/cpu_sum_us True\n"


def test_a_gpu_is_read_as_far_as_it_reports(monkeypatch, tmp_path):
    def read(device):
        row = machine.read_resources(torch.device(device), tmp_path / "gone")
        return {name: x for name, x in row.items() if not name.startswith("memory/")}

    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _: Counter())
    assert read("cuda") == {}  # no GPU, or no nvidia-ml-py
    for name, value in dict(clock_rate=1410, temperature=84, power_draw=350_500).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert read("cpu") == {}
    assert read("cuda") == {
        "perf/clock_mhz": 1410, "machine/gpu_celsius": 84, "machine/gpu_watts": 350.5}


def test_rare_slow_steps_that_stop_are_no_slow_down():
    """Stalls are in the mean, not in the median: with their end, the rest seemed to be longer."""
    rows = made(wobbles=0.01)
    for row in rows[:PLANTED]:
        row["perf/data_ms"] += 7.5
        row["perf/step_ms"] += 7.5
        row["perf/tflops"] = 1 / row["perf/step_ms"]
    assert detect(rows) == []


@pytest.mark.parametrize("column", ["perf/compilations", "memory/alloc_retries", "machine/stops"])
def test_what_happened_once_does_not_make_all_steps_slower(column):
    (event,) = detect(made(wobbles=0.02, factor=1.3, more=lambda late: {column: 1 + late}))
    assert event.side == "machine" and codes(event)[0] == "probe"


@pytest.mark.slow
def test_two_rises_that_end_are_both_reported_to_have_ended():
    """10 ms, then 20, then 40, then 10 again: as where one cause came on top of another."""
    ms = [10.0] * 30 + [20.0] * 40 + [40.0] * 40 + [10.0] * 40
    reported = live([row_of(50 * i, forward=x) for i, x in enumerate(ms, start=1)])
    began = [found.since for _, found in reported if found.until is None]
    ended = [found.since for _, found in reported if found.until is not None]
    assert began == [1501, 3501] and sorted(ended) == began


def test_steps_that_wait_now_and_then_are_no_slow_down_of_the_others():
    """One step in 50 waits 2.5 s for data, from 751 to 1500; the median step takes 30 ms all along:
    without those 50 ms/step it would take -20 ms, and be slower at the end."""
    rows = [row_of(n, forward=30.0, data=50.0 * (750 < n <= 1500)) | {"perf/step_ms_median": 30.0}
            for n in range(50, 3001, 50)]
    (event,) = detect(rows)
    assert (event.since, event.values["phases"]) == (751, [("data", 50.0)]) and event.until == 1501
    assert event.values["percent"] == pytest.approx(167, abs=1)


def test_what_is_done_now_and_then_counts_for_all_steps_since_the_last_time():
    """A checkpoint every 150 steps takes 300 ms, and 1.2 s from step 6001 on."""
    rows = [row_of(n, forward=10.0, checkpoint=(n % 150 == 0) * (300 if n <= 6000 else 1200) / 50)
            for n in range(50, 12001, 50)]
    (event,) = detect(rows)
    assert event.phase == "checkpoint" and 6001 <= event.since <= 6151
    assert (event.of, event.ms) == (pytest.approx(2), pytest.approx(6))
    assert event.values["percent"] == pytest.approx(60)  # of a step


def profiles(slower: str, ms: float, looks: int = 40):
    """Looks at a forward pass of three lines; one takes so many ms more once it is late."""
    usual = {"attend": 3.0, "project": 3.0, "norm": 1.5}  # of 0.3 STEP_MS

    def more(late: bool) -> dict:
        lines = {name: t + (ms if late and name == slower else 0.0) for name, t in usual.items()}
        return {"profile": {"forward": {f"model.py:{i} {name} < model.py:9 forward":
                                        round(looks * t / sum(lines.values()))
                                        for i, (name, t) in enumerate(lines.items())}}}

    return more


@pytest.mark.parametrize("shares", [SHARES, {"forward": 1}])
@pytest.mark.parametrize("slower", ["attend", "norm"])
def test_the_line_that_became_slower_is_named(slower, shares):
    share, of_usual = 0.2, SHARES["forward"] / shares["forward"]
    rows = made(1, phase="forward", share=share, more=profiles(slower, share * STEP_MS * of_usual),
                shares=shares, wobbles=0.2 if shares is SHARES else 0.02)
    (event,) = of_program(detect(rows))
    assert codes(event) == ["line"] and event.since <= (PLANTED + 3) * EVERY
    (line,) = event.parts
    assert line.values["phase"] == "forward" and f" {slower} < model.py:9 forward" in line.line
    assert abs(line.ms - share * STEP_MS) < max(line.values["error"], 0.2 * share * STEP_MS)


@pytest.mark.parametrize("shares", [SHARES, {"forward": 1}])
def test_lines_that_keep_their_shares_are_not_blamed(shares):
    """All of them longer alike, as on a slower machine, or beside work that no look has met."""
    found = detect(made(1, factor=1.5, more=profiles("none", 0.0), shares=shares))
    assert found and not any("line" in codes(event) for event in found)


def test_less_work_in_the_same_time_is_no_slow_down():
    """Such as fewer tokens that count, in batches of the same shape; or layers frozen from now on:
    the forward pass takes as long as before, and the rest half of it."""
    for seed in range(4):
        rows, frozen = made(seed, wobbles=0.0), made(seed, wobbles=0.05)
        for row, other in zip(rows[PLANTED:], frozen[PLANTED:], strict=True):
            row["perf/tflops"] *= 0.6
            ms = {name: other[f"perf/{name}_ms"] / (1 + (name != "forward")) for name in SHARES}
            other |= row_of(other["step"], **ms)
        assert detect(rows) == detect(frozen) == []


@pytest.mark.parametrize("side, shares", [("program", SHARES), ("unclear", {"other": 1.0})])
def test_where_the_work_of_steps_varies_a_slow_down_is_told_once(side, shares):
    rows = made(wobbles=0.02, phase=next(iter(shares)), share=1.0, shares=shares)
    for n, row in enumerate(rows):  # as with texts of all lengths
        row |= {name: x * (1 + 0.2 * math.sin(n)) for name, x in row.items() if "_ms" in name}
    (event,) = detect(rows)
    assert event.side == side and event.ms == pytest.approx(STEP_MS, rel=0.1)


def test_of_a_function_the_line_that_has_grown_is_named():
    """By more than a slower machine would explain, and not of three looks."""
    looks = ({"m.py:1 f": 60, "m.py:2 f": 10, "m.py:9 g": 30},
             {"m.py:1 f": 60, "m.py:2 f": 110, "m.py:3 f": 5, "m.py:9 g": 30, OTHERS: 5})
    for factor in (1.0, 1.5):
        (ms, _, place), (_, _, other) = longer_lines([10.0, 21.0], looks, factor)
        assert (place, other) == ("m.py:2 f", "m.py:9 g")
        assert ms == pytest.approx(17.5 - factor * 7.0)
    ((ms, error, _),) = longer_lines([0.1, 5.0], ({}, {"data.py:5 augment": 3}), 1.0)
    assert ms < LINE_SURE * error  # three looks are too few


def test_real_runs_are_diagnosed_as_well_as_ever():
    """Runs in which something was planted, kept with the answer by `tests.bench diagnosis`."""
    runs = kept(RESULTS)
    assert {run["threads"] for run in runs} == {0, 1, 2}
    assert len({run["kind"] for run in runs}) >= 15
    scores = [score(run, diagnosed(run["rows"])) for run in runs]
    for name, least in (("found", 0.94), ("since", 0.98), ("named", 0.86), ("blame", 0.97),
                        ("not the program", 1.0), ("quiet", 0.75), ("no wrong line", 0.99),
                        ("no wrong cause", 0.95)):
        values = [each[name] for each in scores if name in each]
        assert sum(values) >= least * len(values), name


# --- slow from the first step ---


def rows_of(ms: dict, profile: dict | None = None, logs=20, every=20, **columns) -> list[dict]:
    """Logs of a constant run. ms: by phase. profile: {phase: {place: looks}} of each log."""
    ms = {"data": 0.5, "forward": 8.0, "backward": 13.0, "optimizer": 3.0, "other": 0.5} | ms
    usual = {"forward": {"model.py:5 forward < train.py:9 train": 4},
             "backward": {"train.py:10 train": 6}, "optimizer": {"train.py:11 train": 2}}
    return [row_of(every * i, **ms) | {"profile": usual | (profile or {})} | columns
            for i in range(1, logs + 1)]


def parts_of(rows, sources=None) -> dict[str, object]:
    history = History([{"step": 0, "sources": sources or {}}, *rows])
    return {part.code: part for found in slow(history) for part in found.parts}


def test_a_healthy_run_gets_no_advice():
    """Nor do runs before something was planted, also beside a neighbour that came and went."""
    assert parts_of(rows_of({})) == {}
    assert parts_of(rows_of({"evaluation": 1.0, "logging": 0.3, "checkpoint": 0.5})) == {}
    evaluated = rows_of({"evaluation": 4.0}, {"evaluation": {"my.py:5 evaluate": 9}})
    assert parts_of(evaluated, {"my.py:5": "for x in range(9): f(x)"}) == {}
    rank = {"perf/slowest_rank": 1, "perf/slowest_rank_ratio": 1.1, "perf/slowest_rank_phase": 1}
    assert parts_of(rows_of({"waiting": 2.0}, **rank)) == {}
    for run in kept(RESULTS):
        before = [row for row in run["rows"] if row["step"] <= run["at"]]
        assert slow(History(before)) == [], run["number"]


@pytest.mark.parametrize("every, logs", [(20, 6), (1, 100)])
def test_a_slow_data_set_in_the_training_process_names_its_line(every, logs):
    looks = {"data": {"my_data.py:6 augment < data.py:132 batch": 10, "data.py:9 batch": 1}}
    rows = rows_of({"data": 14.0}, looks, logs, every)
    line = parts_of(rows, {"my_data.py:6": "time.sleep(0.01)"})["line"]
    assert line.line == "my_data.py:6 augment" and line.values["source"] == "time.sleep(0.01)"
    assert line.ms == pytest.approx(14.0 * 10 / 11)


@pytest.mark.parametrize("place", [OTHERS, "data.py:132 loader < train.py:8 train",
                                   "my.py:8 <module> | multiprocessing", "my.py:8 f | selectors"])
def test_a_loop_starved_by_its_loader_processes_or_by_no_line_with_a_name(place):
    found = parts_of(rows_of({"data": 14.0}, {"data": {place: 9}}))
    assert list(found) == ["data"] and found["data"].ms == pytest.approx(14.0)


def test_a_line_that_waits_for_another_rank_is_said_to_wait():
    rows = rows_of({"data": 14.0}, {"data": {"my.py:8 gather": 9}})
    for text, advice in (("dist.all_gather(out, n)", "it waits for the slowest rank"),
                         ("torch.gather(x, 1, i)", "--num_workers 2, or less work per sample"),
                         ("json.loads(row)", "--num_workers 2, or less work per sample")):
        assert parts_of(rows, {"my.py:8": text})["line"].values["advice"] == advice


@pytest.mark.parametrize("place, text, named", [
    ("train.py:80 train", "total += loss.item()", True),
    ("train.py:80 train", "torch.cuda.synchronize()", True),
    ("metrics.py:8 accuracy < train.py:80 train | numpy", "order = np.sort(x)", True),
    ("metrics.py:8 f.<genexpr> < train.py:80 train", "sum(i for i in rows)", True),
    ("model.py:60 forward < model.py:90 forward", "x = self.proj(x)", False),
    ("model.py:60 forward < model.py:90 forward", "y = torch.einsum('ij,jk', x, w)", False),
    ("model.py:60 forward", "loss = F.cross_entropy(logits.view(-1, 9), y)", False),
    ("model.py:60 forward", "for i in range(9): x = f(x)", False),
    ("model.py:60 forward.<listcomp>", "[expert(x) for expert in self.experts]", False),
    ("my.py:8 f.<genexpr>", "sum(F.mse_loss(head(h), y) for head in heads)", False),
    ("my.py:8 <lambda>", "loss_of = lambda x, y: loss(x, y)", False)])
def test_in_a_compute_phase_only_lines_known_to_be_avoidable(place, text, named):
    rows = rows_of({"forward": 16.0}, {"forward": {place: 4, "model.py:5 forward": 4}})
    found = parts_of(rows, {place.partition(" ")[0]: text})
    expected = {"line": pytest.approx(8.0)} if named else {}
    assert {code: part.ms for code, part in found.items()} == expected, found


def test_a_loop_without_phases_or_with_its_own_is_not_avoidable():
    phases = dict(forward=0.0, backward=0.0, optimizer=0.0, other=25.0)
    for text, codes in (("loss = model(x)", []), ("time.sleep(1)", ["line"])):
        found = parts_of(rows_of(phases, {"other": {"my.py:8 <module>": 30}}), {"my.py:8": text})
        assert list(found) == codes
    rows = rows_of({"other": 9.0}, {"other": {"my.py:8 rollout": 30}})
    assert list(parts_of(rows)) == ["line"]
    rows[5]["phase/rollout_ms"] = 9.0
    assert parts_of(rows) == {}


def test_on_a_gpu_no_line_of_a_compute_phase_is_a_gain():
    """The host waits there for kernels that have to run in any case."""
    place, text = "train.py:80 train", {"train.py:80": "total += loss.item()"}
    gpu = {"memory/allocated_gb": 1.0}
    assert parts_of(rows_of({"forward": 16.0}, {"forward": {place: 9}}, **gpu), text) == {}
    assert list(parts_of(rows_of({"other": 6.0}, {"other": {place: 9}}, **gpu), text)) == ["line"]


def test_a_function_left_to_run_eagerly_is_named_once():
    rows = [*rows_of({}, logs=12), *rows_of({}, logs=30, **{"perf/eager_functions": 2})[12:]]
    (found,) = findings(History(rows))
    assert (found.code, found.since, found.values["count"]) == ("eager", 260, 2)
    assert news(History([*rows, {"step": 600, "finding": found.row()}])) == []


@pytest.mark.slow
def test_a_compiled_function_that_reaches_the_limit_of_recompilations_is_counted():
    """In a process of its own: the counters are the process's."""
    code = """
import torch
from steady.watch.machine import compiler
assert compiler() == {}
double = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
counts = []
for n in range(12):
    double(torch.ones(2), float(n))
    counts.append(compiler())
assert counts[3]["perf/eager_functions"] == 0 < counts[3]["perf/compilations"]
assert counts[-1]["perf/eager_functions"] == 1, counts[-1]
"""
    python("-c", code)


@pytest.mark.parametrize("ms, columns, code, gain", [
    ({"backward": 18.0}, {"perf/gc_ms": 5.0}, "gc", 5.0),
    ({}, {"perf/cpu_queue_ms": 6.0}, "contention", 6.0),
    ({}, {"machine/throttled_ms": 6.0}, "quota", 6.0),
    ({}, {"perf/thread_ms": 8.0, "busiest_thread": "hog"}, "thread", 8.0),
    ({}, {"perf/padding_fraction": 0.5}, "padding", 10.5),
    ({"evaluation": 10.0}, {}, "evaluation", 5.0),
    ({"checkpoint": 10.0}, {}, "checkpoint", 5.0),
    ({"logging": 10.0}, {}, "logging", 9.0),
    ({"waiting": 12.0}, {"perf/slowest_rank": 3, "perf/slowest_rank_ratio": 1.5,
                         "perf/slowest_rank_phase": 1}, "slow rank", 12.0),
    ({"data": 14.0}, {"perf/step_ms_p95": 40.0}, "data", 14.0),  # of 39: each step waits
    ({"data": 14.0}, {"perf/step_ms_median": 25.0, "perf/step_ms_p95": 60.0}, "data", 14.0),
    ({"data": 14.0}, {"perf/step_ms_median": 25.0, "perf/step_ms_p95": 26.0}, "rare data", 14.0)])
def test_causes_that_are_columns(ms, columns, code, gain):
    found = parts_of(rows_of(ms, **columns))
    assert list(found) == [code] and found[code].ms == pytest.approx(gain)


def test_evaluations_at_a_few_logs_of_a_long_run_count_once(tmp_path):
    rows = rows_of({}, logs=1100)
    for row in rows[::4]:
        row["perf/evaluation_ms"] = 20.0  # 5 in the mean
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(tmp_path)["findings"] == slow(History(rows)) == []


def test_rare_heavy_steps_as_of_a_profiler():
    rows = rows_of({"other": 6.0})
    for row in rows:
        row["perf/step_ms_median"] = 25.0
    assert parts_of(rows)["rare"].ms == pytest.approx(5.5)
    for looks, line in (([9, 5, 3], "mine.py:3 flush"), ([9, 5, 4], ""), ([3, 2, 5], "")):
        late = dict(zip(("mine.py:3 flush", "mine.py:9 step", OTHERS), looks, strict=True))
        history = [row | {"profile": row["profile"] | {"heavy steps": late}} for row in rows]
        assert parts_of(history)["rare"].line == line
    for i, row in enumerate(rows):  # of graphs compiled again and again
        row["perf/compilations"] = i
    assert list(parts_of(rows)) == ["compilations"]


def test_what_began_later_is_not_slow_from_the_start(tmp_path):
    late = rows_of({"data": 14.0}, {"data": {"my_data.py:6 augment": 10}}, logs=60)
    assert parts_of([*rows_of({}, logs=8), *late[8:16]]) == {}
    busy = rows_of({"forward": 30.0}, **{"perf/gc_ms": 12.0, "perf/thread_ms": 12.0})
    assert parts_of([*rows_of({}, logs=8), *busy[8:15]]) == {}
    blocked = rows_of({"logging": 60.0}, logs=60)[20:]
    (found,) = findings(History([*rows_of({"logging": 0.3}), *blocked]))
    assert (found.code, found.phase) == ("slower", "logging")
    rows, told = [*rows_of({}), *late[20:]], {"code": "slow", "since": 20, "text": "slow: told"}
    for step, repeated in ((300, True), (800, False)):  # what was reported, and at which step
        lines = [*rows, {"step": step, "finding": told}]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        assert ("reported at step 300: slow: told" in report(tmp_path)["verdict"]) == repeated


def test_a_last_log_of_a_few_steps_does_not_count_as_much_as_the_others():
    rows = rows_of({}, logs=6)
    last = rows_of({"checkpoint": 100.0})[0]
    assert parts_of([*rows, last | {"step": 123}]) == {} != parts_of([*rows, last | {"step": 140}])


TOLD = {"step": 400, "finding": {"code": "slower", "since": 40, "text": "slower since step 40"}}


@pytest.mark.parametrize("rows, verdict", [
    ([*rows_of({}), TOLD], "reported at step 400: slower since step 40"),
    (rows_of({}), "steady: never slower"),
    (rows_of({}, logs=150, every=1), "too few logs for a verdict")])
def test_a_verdict_contradicts_neither_what_was_reported_nor_the_times(tmp_path, rows, verdict):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(tmp_path)["verdict"] == [verdict]


def test_time_is_promised_once():
    """A line in data, whose garbage is collected meanwhile: together no more than the phase."""
    rows = rows_of({"data": 10.0}, {"data": {"my_data.py:6 augment": 9}}, **{"perf/gc_ms": 9.0})
    (found,) = slow(History(rows))
    assert sum(part.ms for part in found.parts) <= found.ms + 1e-9 <= found.of
    assert found.ms <= 10.0 + 9.0


def test_it_is_reported_once_also_after_a_restart():
    rows = rows_of({"data": 14.0}, {"data": {"my_data.py:6 augment": 9}}, logs=60)
    assert [(step, found.code) for step, found in live(rows)] == [(120, "slow")]
    again = History([*rows[:30], {"step": 600, "finding": {"code": "slow", "since": 20}},
                     rows[30] | {"perf/startup_s": 3.0}, *rows[31:]])
    assert [found.code for found in news(again)] == []


ODD = (None, True, -1, -1e9, 1e300, 10**400, math.inf, math.nan, "", "text", [], [1], {},
       0, 0.0, 5, 1 << 60)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_nobody_foresaw_raise_nothing(seed, tmp_path):
    rng = random.Random(seed)
    rows = made(seed, phase="forward", share=0.3)
    for i, row in enumerate(rows):
        row |= {"train/loss": 3.0, "memory/host_anonymous_gb": 1.0 + i, "val/loss": 2.0,
                "health/nonfinite_steps": 0, "perf/slowest_rank": 1,
                "perf/slowest_rank_ratio": 1.0 + i % 2, "about": {"last_step": 10**6}}
        if rng.random() < 0.5:
            for name in rng.sample(sorted(row), 4):
                row[name] = rng.choice(ODD)
        if rng.random() < 0.2:
            row[rng.choice(["profile", "sources", "finding", "about", "seconds", "evaluated",
                            "busiest_thread", "anomaly", "positions", "hang"])] = rng.choice(ODD)
        if rng.random() < 0.1:
            for name in rng.sample(sorted(row), 6):
                del row[name]
        row["perf/slowest_rank_phase"] = 2  # written by this program alone, as a finding is
    rng.shuffle(rows[30:50])
    odd = [*rows, *ODD, {"step": 3}, {"step": "4"}, {"finding": {"code": "slower", "since": 1}}]
    history = History(odd[:60])
    for row in odd[60:]:
        history.append(row)
    assert isinstance(findings(history) + news(history), list)
    text = "".join(json.dumps(row) + "\n" for row in odd)
    (tmp_path / "metrics.jsonl").write_text(text[: rng.randrange(len(text))])
    assert report_text(report(tmp_path))
    assert np.isfinite(report(tmp_path)["wall_s"])
