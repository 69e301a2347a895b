"""Slow-down detection on simulated runs whose answer is known.

    python -m tests.bench slowdowns

A step takes 100 ms with log-normal noise of 1 to 5 %, and one in twenty, at random, 1.5 to 10
times as long. A third of the traces jumps by 5 to 50 % at a random moment, a third creeps by 0.01
to 0.05 % a step, a third does neither. An alarm is in time within 10 logs of the moment at which
the step has become 5 % slower. Precision: share of alarms that come after a slow-down began;
recall: share of slow traces found in time; phase: share of those in which the phase that grew is
named first; shape: share of those whose jump or creep is named as such.
"""

import numpy as np

from steady.watch.history import LOGS, OUTSIDE_PHASES, STEP_PHASES, History
from steady.watch.slower import slowdown
from tests.bench.common import Figure

SHARES = {"data": 0.05, "forward": 0.3, "backward": 0.45, "optimizer": 0.15, "other": 0.05}


def row_of(step: int, **ms) -> dict:
    """Of a log: so many ms/step in these phases, and none in others."""
    row = {f"perf/{name}_ms": ms.get(name, 0.0) for name in (*STEP_PHASES, *OUTSIDE_PHASES)}
    total = sum(ms.get(name, 0.0) for name in STEP_PHASES)
    return row | {"step": step, "perf/step_ms": total, "perf/step_ms_median": total,
                  "perf/tflops": 1 / total}


def trace(rng, logs: int, kind: str, log_interval: int):
    """(rows, step at which it is 5 % slower or None, phase that grows)."""
    steps = np.arange(1, logs * log_interval + 1)
    noise = np.exp(rng.normal(0, rng.uniform(0.01, 0.05), len(steps)))
    spikes = np.where(rng.random(len(steps)) < 0.05, rng.uniform(1.5, 10, len(steps)), 1.0)
    start = rng.integers(20 * log_interval, 60 * log_interval)
    extra, slow_at = np.zeros(len(steps)), None
    if kind == "jump":
        extra = rng.uniform(0.05, 0.5) * (steps > start)
        slow_at = start
    elif kind == "creep":
        rate = rng.uniform(1e-4, 5e-4)
        extra = rate * np.maximum(0, steps - start)
        slow_at = start + int(0.05 / rate)
    phase = rng.choice(list(SHARES))
    ms = (100 * (1 + extra) * noise * spikes).reshape(logs, log_interval)
    grown = (100 * extra).reshape(logs, log_interval).mean(1)
    mean, median = ms.mean(1), np.median(ms, 1)
    rows = []
    for i in range(logs):
        of = {name: share * (mean[i] - grown[i]) for name, share in SHARES.items()}
        of[phase] += grown[i]
        rows.append(row_of((i + 1) * log_interval, **of) | {"perf/step_ms_median": median[i]})
    return rows, slow_at, phase


def simulate(traces: int, logs: int = 120, log_interval: int = 50) -> dict:
    rng = np.random.default_rng(0)
    found = alarms = false = phases = shapes = slow = 0
    for i in range(traces):
        kind = ("none", "jump", "creep")[i % 3]
        rows, slow_at, phase = trace(rng, logs, kind, log_interval)
        events = slowdown(History(rows))
        early = events if slow_at is None else []
        if kind == "jump":  # nothing to find before it, but in the five logs that may look slower
            early = [e for e in events if e.since < slow_at - 5 * log_interval]
        false, alarms = false + len(early), alarms + len(events)
        slow += slow_at is not None
        in_time = slow_at is not None and slow_at // log_interval + 10
        true = slowdown(History(rows[:in_time])) if in_time else []
        if true := [e for e in true if e not in early]:
            found += 1
            facts = dict(true[0].values)
            phases += bool(facts["phases"]) and facts["phases"][0][0] == phase
            shapes += facts["creeps"] == (kind == "creep")
    return dict(recall=found / slow, precision=1 - false / max(1, alarms),
                phase=phases / max(1, found), shape=shapes / max(1, found))


def false_alarms(steps: int, log_interval: int) -> int:
    """Alarms in `steps` steps of noise, in runs of a million steps each."""
    rng = np.random.default_rng(1)
    logs = min(steps, 10**6) // log_interval
    count = 0
    for _ in range(max(1, steps // 10**6)):
        rows = trace(rng, logs, "none", log_interval)[0]
        # windows as the monitor has them, each half new
        count += sum(len(slowdown(History(rows[i : i + LOGS]))) for i in range(0, logs, LOGS // 2))
    return count


def main(options) -> list[Figure]:
    traces, quiet_steps = (30, 100_000) if options.quick else (1000, 20_000_000)
    for log_interval in (50, 10, 1):
        steps = quiet_steps * log_interval // 50
        n = false_alarms(steps, log_interval)
        print(f"false alarms in {steps:,} quiet steps logged every {log_interval}: {n}")
    aims = dict(recall=">= 0.95", precision=">= 0.95", phase=">= 0.9", shape="")
    return [Figure(f"slow-downs in simulated runs: {name}", f"{traces:,} runs, answer known",
                   [value], aims[name]) for name, value in simulate(traces).items()]
