"""Slow from the first step: the avoidable part of a step, its line or option, and nothing else."""

import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from test_slower import made, value

from steady.watch.history import History
from steady.watch.lines import OTHERS
from steady.watch.report import findings, news, report, report_text
from steady.watch.slow import slow
from tests.bench.diagnosis import RESULTS, kept

STEP_MS = 25.0


def rows_of(ms: dict, profile: dict | None = None, logs=20, every=20, **columns) -> list[dict]:
    """Logs of a constant run. ms: by phase. profile: {phase: {place: looks}} of each log."""
    ms = {"data": 0.5, "forward": 8.0, "backward": 13.0, "optimizer": 3.0, "other": 0.5,
          "logging": 0.0, "evaluation": 0.0, "checkpoint": 0.0} | ms
    step = sum(x for name, x in ms.items() if name not in ("logging", "evaluation", "checkpoint"))
    row = {f"perf/{name}_ms": x for name, x in ms.items()}
    row |= {"perf/step_ms": step, "perf/step_ms_median": step, "perf/tokens_per_second": 1e6 / step}
    usual = {"forward": {"model.py:5 forward < train.py:9 train": 4},
             "backward": {"train.py:10 train": 6}, "optimizer": {"train.py:11 train": 2}}
    return [row | {"step": every * i, "profile": usual | (profile or {})} | columns
            for i in range(1, logs + 1)]


def parts_of(rows, sources=None) -> dict[str, object]:
    history = History(rows)
    history.sources |= sources or {}
    found = slow(history)
    return {part.code: part for part in found[0].parts} if found else {}


def test_a_healthy_run_gets_no_advice():
    assert parts_of(rows_of({})) == {}
    assert parts_of(rows_of({"evaluation": 1.0, "logging": 0.3, "checkpoint": 0.5})) == {}
    evaluated = rows_of({"evaluation": 4.0}, {"evaluation": {"my.py:5 evaluate": 9}})
    assert parts_of(evaluated, {"my.py:5": "for x in range(9): f(x)"}) == {}
    rank = {"perf/slowest_rank": 1, "perf/slowest_rank_ratio": 1.1, "perf/slowest_rank_phase": 1}
    assert parts_of(rows_of({"waiting": 2.0}, **rank)) == {}


def test_runs_that_were_healthy_before_something_was_planted_get_none():
    """Also beside a neighbour whose load came and went."""
    for run in kept(RESULTS):
        before = [row for row in run["rows"] if row["step"] <= run["at"]]
        assert slow(History(before)) == [], run["number"]


def test_a_slow_data_set_in_the_training_process_names_its_line():
    place = "my_data.py:6 augment < data.py:132 batch"
    found = parts_of(rows_of({"data": 14.0}, {"data": {place: 10, "data.py:9 batch": 1}}),
                     {"my_data.py:6": "time.sleep(0.01)"})
    line = found["line"]
    assert line.line == "my_data.py:6 augment" and value(line, "source") == "time.sleep(0.01)"
    assert line.ms == pytest.approx(14.0 * 10 / 11)


@pytest.mark.parametrize("place", [OTHERS, "data.py:132 loader < train.py:8 train",
                                   "my.py:8 <module> | multiprocessing", "my.py:8 f | selectors"])
def test_a_loop_starved_by_its_loader_processes_or_by_no_line_with_a_name(place):
    looks = {"data": {place: 9}}
    found = parts_of(rows_of({"data": 14.0}, looks))
    assert list(found) == ["data"] and found["data"].ms == pytest.approx(14.0)


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
    ("my.py:8 <lambda>", "loss_of = lambda x, y: loss(x, y)", False),
])
def test_in_a_compute_phase_only_lines_known_to_be_avoidable(place, text, named):
    rows = rows_of({"forward": 16.0}, {"forward": {place: 4, "model.py:5 forward": 4}})
    found = parts_of(rows, {place.partition(" ")[0]: text})
    assert (found.keys() == {"line"}) == named, found
    if named:
        assert found["line"].ms == pytest.approx(8.0)


def test_a_loop_without_phases_is_not_avoidable():
    phases = dict(forward=0.0, backward=0.0, optimizer=0.0, other=25.0)
    for text, codes in (("loss = model(x)", []), ("time.sleep(1)", ["line"])):
        found = parts_of(rows_of(phases, {"other": {"my.py:8 <module>": 30}}), {"my.py:8": text})
        assert list(found) == codes


def test_lines_in_phases_of_the_loop_s_own_are_not_avoidable():
    rows = rows_of({"other": 9.0}, {"other": {"my.py:8 rollout": 30}})
    assert list(parts_of(rows)) == ["line"]
    rows[5]["about"] = {"own_phases": 1}
    assert parts_of(rows) == {}


def test_on_a_gpu_no_line_of_a_compute_phase_is_a_gain():
    """The host waits there for kernels that have to run in any case."""
    place, text = "train.py:80 train", {"train.py:80": "total += loss.item()"}
    gpu = {"memory/allocated_gb": 1.0}
    assert parts_of(rows_of({"forward": 16.0}, {"forward": {place: 9}}, **gpu), text) == {}
    assert list(parts_of(rows_of({"other": 6.0}, {"other": {place: 9}}, **gpu), text)) == ["line"]


def test_a_function_left_to_run_eagerly_is_named_once():
    rows = rows_of({}, logs=30)
    for row in rows[12:]:
        row["perf/eager_functions"] = 2
    (found,) = findings(History(rows))
    assert (found.code, found.since, value(found, "count")) == ("eager", 260, 2)
    again = History([*rows, {"step": 600, "finding": found.row()}])
    assert news(again) == []


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
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


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
])
def test_causes_that_are_columns(ms, columns, code, gain):
    found = parts_of(rows_of(ms, **columns))
    assert list(found) == [code] and found[code].ms == pytest.approx(gain)


def test_rare_heavy_steps_as_of_a_profiler():
    rows = rows_of({"other": 6.0})
    for row in rows:
        row["perf/step_ms_median"] = 25.0
    assert parts_of(rows)["rare"].ms == pytest.approx(5.5)
    for i, row in enumerate(rows):  # of graphs compiled again and again
        row["perf/compilations"] = i
    assert list(parts_of(rows)) == ["compilations"]


def test_a_last_log_of_a_few_steps_does_not_count_as_much_as_the_others():
    rows = rows_of({}, logs=6)
    last = rows_of({"checkpoint": 100.0})[0]
    assert parts_of([*rows, last | {"step": 123}]) == {} != parts_of([*rows, last | {"step": 140}])


def test_a_verdict_does_not_contradict_what_was_reported(tmp_path):
    told = {"code": "slower", "since": 40, "text": "step slower since about step 40"}
    rows = [*rows_of({}), {"step": 400, "finding": told}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(tmp_path)["verdict"] == [told["text"]]


def test_time_is_promised_once():
    """A line in data, whose garbage is collected meanwhile: together no more than the phase."""
    rows = rows_of({"data": 10.0}, {"data": {"my_data.py:6 augment": 9}}, **{"perf/gc_ms": 9.0})
    (found,) = slow(History(rows))
    assert sum(part.ms for part in found.parts) <= found.ms + 1e-9 <= found.of
    assert found.ms <= 10.0 + 9.0


def test_it_is_reported_once_also_after_a_restart():
    rows = rows_of({"data": 14.0}, {"data": {"my_data.py:6 augment": 9}}, logs=60)
    history, reported = History(), []
    for row in rows:
        history.append(row)
        for found in news(history):
            reported.append((row["step"], found.code))
            history.append({"step": row["step"], "finding": found.row()})
    assert reported == [(120, "slow")]
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
