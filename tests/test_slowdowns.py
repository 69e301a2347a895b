"""A slow-down is found, and its cause is named: each is really provoked in a small real run."""

import gc
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch

import data
import monitor
import train
from monitor import OUTSIDE_PHASES, report

# These look at the time that things take, on a machine that may be busy with something else.
pytestmark = pytest.mark.flaky(reruns=3)

SLOW_FROM = 260  # step: 13 intervals of 20 are learned as normal


@pytest.fixture
def provoke(run, tmp_path):
    """provoke(*flags) → (events that the report of a run tells, what it printed)."""

    def provoke(*flags, steps=440, **how):
        told = run("--max_steps", steps, "--log_interval", 20, "--out_dir", "r", "--optimizer",
                   "adamw", "--eval_interval", 0, "--save_interval", 0, "--no_tensorboard",
                   "--n_layer", 1, "--seq_len", 16, "--batch_size", 4, *flags, **how)  # fmt: skip
        return report(tmp_path / "r")["slowdowns"], told

    return provoke


def every_step(monkeypatch, do):
    """Call do(step) at the beginning of each step of the loop."""
    plain = train.seed_everything

    def seeded(seed, step, rank):
        do(step)
        plain(seed, step, rank)

    monkeypatch.setattr(train, "seed_everything", seeded)


def the_one(events, kind="step"):
    found = [e for e in events if e["kind"] == kind
             and SLOW_FROM - 60 <= e["since"] <= SLOW_FROM + 100]  # fmt: skip
    assert found, events
    return found[0]


def slower_steps(events):
    # on a busy machine steps do become slower by themselves, but not by so much
    return [e for e in events if e["kind"] == "step" and e["percent"] > 120]


def test_data_stalls(provoke, monkeypatch):
    plain, calls = data.Mixture.batch, iter(range(10**9))

    def batch(self, start, stop):
        if next(calls) > SLOW_FROM:
            time.sleep(0.02)
        return plain(self, start, stop)

    monkeypatch.setattr(data.Mixture, "batch", batch)
    events, told = provoke()
    event = the_one(events)
    assert event["phases"][0][0] == "data" and event["phases"][0][1] == pytest.approx(20, rel=0.3)
    assert "waits for data" in event["causes"][0]
    assert "warning: step" in told and "slower since about step" in told


def test_a_loader_whose_memory_grows(provoke, monkeypatch):
    plain, kept = data.Mixture.batch, []

    def batch(self, start, stop):
        if start // 4 > SLOW_FROM:
            kept.append(bytearray(2_000_000))
            sum(block.count(1) for block in kept[-100:])  # and goes through what it keeps
            time.sleep(0.02)
        return plain(self, start, stop)

    monkeypatch.setattr(data.Mixture, "batch", batch)
    ballast = bytearray(b"x") * 10**9  # the worker begins as a copy of a large process
    events, _ = provoke("--num_workers", 1)
    del ballast
    assert "a loader whose memory grows" in the_one(events)["causes"][0]


def test_garbage_collection(provoke, monkeypatch):
    kept = []

    def make_objects(step):
        if step == SLOW_FROM:
            gc.enable()
            kept.extend([[i] for i in range(300_000)])
        if step > SLOW_FROM:
            gc.collect()

    every_step(monkeypatch, make_objects)
    events, _ = provoke()
    assert "garbage collector" in the_one(events)["causes"][0]


def test_a_list_that_is_rewritten_at_each_save(provoke, monkeypatch, tmp_path):
    plain, history = train.save_checkpoint, []

    def save(run, **how):
        previous = run.monitor.phase("checkpoint")
        if run.step > SLOW_FROM:
            history.extend(range(20_000))
            (tmp_path / "history.json").write_text(json.dumps(history))
        plain(run, **how)
        run.monitor.phase(previous)

    monkeypatch.setattr(train, "save_checkpoint", save)
    events, _ = provoke("--save_interval", 20, steps=600)
    event = the_one(events, "checkpoint")
    assert event["creeps"] and "grows" in event["causes"][0]


def test_slow_checkpoints(provoke, monkeypatch):
    plain = train.os.fsync
    slow = []
    every_step(monkeypatch, lambda step: slow.append(1) if step == SLOW_FROM else None)
    monkeypatch.setattr(train.os, "fsync", lambda file: (time.sleep(0.15 * len(slow)), plain(file)))
    events, _ = provoke("--save_interval", 20)
    event = the_one(events, "checkpoint")
    assert not event["creeps"] and "slower or more frequent" in event["causes"][0]
    assert not slower_steps(events)


def test_a_sink_that_blocks(provoke, monkeypatch):
    plain = monitor.Monitor.write_tensorboard

    def write(self, step, row):
        if step > SLOW_FROM:
            time.sleep(0.3)
        plain(self, step, row)

    monkeypatch.setattr(monitor.Monitor, "write_tensorboard", write)
    events, _ = provoke("--tensorboard")
    assert "a sink that blocks" in the_one(events, "logging")["causes"][0]
    assert not slower_steps(events)


def test_evaluation_is_not_taken_for_training(provoke, monkeypatch):
    plain = train.eval_batches
    slow = []

    def batches(*args):
        time.sleep(0.3 * len(slow))
        yield from plain(*args)

    every_step(monkeypatch, lambda step: slow.append(1) if step == SLOW_FROM else None)
    monkeypatch.setattr(train, "eval_batches", batches)
    events, _ = provoke("--eval_interval", 20)
    assert "evaluation" in the_one(events, "evaluation")["causes"][0]
    assert not slower_steps(events)


def test_longer_sequences_are_more_work_and_not_slower(provoke):
    provoke("--max_steps", SLOW_FROM, "--save_interval", 20, "--seq_len", 64, "--d_model", 64)
    events, told = provoke("--resume", f"r/checkpoints/step_{SLOW_FROM:08d}.pt", "--seq_len", 256,
                           "--d_model", 64, "--allow_change", "seq_len")  # fmt: skip
    assert "more work, not slower" in the_one(events, "work")["causes"][0]
    assert "more work, not slower" in told
    assert not slower_steps(events)


def test_cpu_contention(provoke, monkeypatch):
    crowd = []

    def start(step):
        if step == SLOW_FROM:
            burn = [sys.executable, "-c", "while True: pass"]
            crowd.extend(subprocess.Popen(burn) for _ in range(3 * data.usable_cores()))

    every_step(monkeypatch, start)
    try:
        events, _ = provoke()
    finally:
        for process in crowd:
            process.kill()
    assert "CPU contention" in the_one(events)["causes"][0]


def test_recompilation(provoke, monkeypatch):
    """The number of the step is given to what is compiled, and a graph is made for each."""
    plain, calls = train.Transformer.forward, iter(range(10**9))

    numbered = torch.compile(lambda targets, n: targets + 0 * n, backend="eager", dynamic=False)

    def compile(self, dynamic=None):
        self.forward = lambda tokens, targets: plain(
            self, tokens, numbered(targets, max(0, next(calls) - SLOW_FROM))
        )

    monkeypatch.setattr(train.Transformer, "compile", compile)
    limits = dict(recompile_limit=1000, accumulated_recompile_limit=1000)
    with torch._dynamo.config.patch(limits):
        events, _ = provoke("--compile", steps=400)
    torch._dynamo.reset()
    assert "recompilation" in the_one(events)["causes"][0]


def test_a_slow_rank_is_named(provoke, monkeypatch):
    plain = train.Transformer.forward
    calls = iter(range(10**9))

    def forward(self, tokens, targets):
        if next(calls) > SLOW_FROM and os.environ["RANK"] == "1":
            time.sleep(0.02)
        return plain(self, tokens, targets)

    monkeypatch.setattr(train.Transformer, "forward", forward)
    events, _ = provoke("--micro_batch_size", 2, ranks=2)
    event = the_one(events)
    assert event["phases"][0][0] == "waiting"
    assert "rank 1 is slow" in event["causes"][0] and "forward" in event["causes"][0]


def test_what_no_signal_explains_is_called_unexplained(provoke, monkeypatch):
    plain = train.Transformer.forward
    calls = iter(range(10**9))

    def forward(self, tokens, targets):
        if next(calls) > SLOW_FROM:
            time.sleep(0.02)
        return plain(self, tokens, targets)

    monkeypatch.setattr(train.Transformer, "forward", forward)
    event = the_one(provoke()[0])
    assert event["phases"][0][0] == "forward" and event["causes"][0].startswith("unexplained")


def test_the_end_of_a_slow_down_is_told(provoke, monkeypatch):
    every_step(monkeypatch, lambda n: time.sleep(0.03 * (SLOW_FROM < n <= SLOW_FROM + 200)))
    events, told = provoke(steps=720)
    assert SLOW_FROM + 200 < the_one(events)["ended"] <= SLOW_FROM + 400
    assert "back to normal" in told


def test_simulated_runs():
    """The benchmark has more of them; python -m tests.bench slowdowns."""
    from tests.bench import slowdowns

    found = slowdowns.simulate(60, seed=5)
    assert found["recall"] >= 0.95 and found["precision"] >= 0.95 and found["phase"] >= 0.9
    assert slowdowns.false_alarms(1_000_000, seed=6) == 0


def test_two_rises_that_end_are_both_told_to_have_ended():
    """10 ms, then 20, then 40, then 10 again: as where one cause came on top of another."""
    watch, told = monitor.Watch(), []
    outside = {f"perf/{name}_ms": 0.0 for name in OUTSIDE_PHASES}
    for i, ms in enumerate([10.0] * 30 + [20.0] * 40 + [40.0] * 40 + [10.0] * 40, start=1):
        told += watch.add(
            {"step": 50 * i, "perf/step_ms": ms, "perf/step_ms_median": ms, "perf/tflops": 1 / ms,
             "perf/forward_ms": ms, **outside}
        )  # fmt: skip
    began = [e["since"] for e in told if "ended" not in e]
    assert began == [1501, 3501] and not watch.active
    assert sorted(e["since"] for e in told if "ended" in e) == began


def test_more_than_six_values_are_needed_and_one_wild_value_is_not_believed():
    level = monitor.Level()
    for step in range(100):
        told = level.add(step, 1e6 if step == 50 else 1.0 + 0.001 * math.sin(step), {})
        assert told is None, step


def test_the_reports_of_two_runs_and_the_exit_codes(run, tmp_path, capsys):
    for name, extra in (("a", ()), ("b", ("--n_layer", 12))):
        run("--max_steps", 40, "--out_dir", name, "--no_tensorboard", *extra)
    capsys.readouterr()
    assert monitor.main(["a"]) == 0 and "verdict" in capsys.readouterr().out
    assert monitor.main(["a", "b", "--fail-on-regression", "50"]) == 3
    table = capsys.readouterr().out
    assert "forward" in table and "x)" in table
    assert monitor.main(["b", "a", "--fail_on_regression", "50"]) == 0
    capsys.readouterr()
    assert monitor.main(["a", "b", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["step"] == second["step"] == 40 and set(OUTSIDE_PHASES) < set(first["seconds"])
    assert sum(first["seconds"].values()) == pytest.approx(first["wall_s"], rel=0.01)
    assert monitor.main([str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
