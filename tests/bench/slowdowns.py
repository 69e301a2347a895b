"""Slow-down detection on simulated runs whose answer is known.

    python -m tests.bench slowdowns

A step takes 100 ms with log-normal noise of 1 to 5 %, and one in twenty, at random, 1.5 to 10
times as long. A third of the traces jumps by 5 to 50 % at a random moment, a third creeps by 0.01
to 0.05 % a step, a third does neither. An alarm is in time within 10 logs of the moment at which
the step has become 5 % slower. Precision: share of alarms that come after a slow-down began;
recall: share of slow traces found in time; phase: share of those in which the phase that grew is
named first; shape: share of those whose jump or creep is named as such.

The same again on a machine that others use: forward, backward and optimizer take as much longer as
they did at each log of a real run (wobble.txt), up to three times, with the probes and the time in
the run queue of that run. There, only events that are blamed on the program count.
"""

from pathlib import Path

import numpy as np

from monitor import SlowdownDetector
from tests.bench.common import Figure

# columns: forward, backward, optimizer; probes of cache and memory, relative; share of time queued
WOBBLE = np.loadtxt(Path(__file__).with_name("wobble.txt"))
SHARES = {"data": 0.05, "forward": 0.3, "backward": 0.45, "optimizer": 0.15, "other": 0.05}


def trace(rng, logs: int, kind: str, log_interval: int = 50):
    """(rows, step at which it is 5 % slower or None, phase that grows, whether it creeps)."""
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
        row = {f"perf/{name}_ms": share * (mean[i] - grown[i]) for name, share in SHARES.items()}
        row[f"perf/{phase}_ms"] += grown[i]
        row |= dict.fromkeys(("perf/logging_ms", "perf/evaluation_ms", "perf/checkpoint_ms"), 0.0)
        row |= {"step": int(steps[(i + 1) * log_interval - 1]), "perf/step_ms": mean[i],
                "perf/step_ms_median": median[i], "perf/tflops": 1 / mean[i]}
        rows.append(row)
    return rows, slow_at, phase, kind == "creep"


def on_a_busy_machine(rng, rows: list[dict]) -> list[dict]:
    """The same run where the machine was as slow as in a stretch of the recorded run."""
    at, out = rng.integers(len(WOBBLE)), []
    for i, row in enumerate(rows):
        slower = WOBBLE[(at + i) % len(WOBBLE)]
        factors = dict(zip(("forward", "backward", "optimizer"), slower, strict=False))
        ms = {name: row[f"perf/{name}_ms"] for name in SHARES}
        # what was planted is not made longer: it may be a sleep
        normal = {name: SHARES[name] * min(ms[n] / SHARES[n] for n in SHARES) for name in SHARES}
        more = {name: normal[name] * (factors.get(name, slower[0]) - 1) for name in SHARES}
        total = row["perf/step_ms"] + sum(more.values())
        row = row | {f"perf/{name}_ms": ms[name] + more[name] for name in SHARES}
        row["perf/step_ms_median"] *= total / row["perf/step_ms"]
        out.append(row | {
            "perf/step_ms": total, "perf/tflops": 1 / total,
            "perf/cpu_queue_ms": slower[5] * total, "machine/cpu_probe_us": 10 * slower[3],
        })
    return out


def simulate_busy(traces: int, seed: int = 0, logs: int = 120, log_interval: int = 50) -> dict:
    """Jumps of 10 to 50 % of a normal step; a third of the runs has none."""
    rng = np.random.default_rng(seed)
    slow = found = phases = in_time = false = 0
    for i in range(traces):
        rows, slow_at, phase, _ = trace(rng, logs, "jump" if i % 3 else "none", log_interval)
        watch = SlowdownDetector()
        for row in on_a_busy_machine(rng, rows):
            watch.add(row)
        blamed = [e for e in watch.finish() if e.blames == "program"]
        near = [e for e in blamed if slow_at and abs(e.since - slow_at) <= 10 * log_interval]
        slow, found = slow + bool(slow_at), found + bool(near)
        false += len(blamed) - len(near)
        if near:
            phases += near[0].phases[:1] != [] and near[0].phases[0][0] == phase
            in_time += abs(near[0].since - slow_at) <= 3 * log_interval
    return dict(recall=found / slow, phase=phases / max(1, found), since=in_time / max(1, found),
                false=false)


def simulate(traces: int, seed: int = 0, logs: int = 120, log_interval: int = 50) -> dict:
    rng = np.random.default_rng(seed)
    found = alarms = false = phases = shapes = slow = 0
    late = []
    for i in range(traces):
        kind = ("none", "jump", "creep")[i % 3]
        rows, slow_at, phase, creeps = trace(rng, logs, kind, log_interval)
        watch = SlowdownDetector()
        events = [e for row in rows for e in watch.add(row) if e.ended is None]
        slow += slow_at is not None
        early = [e for e in events if slow_at is None or e.found < min(slow_at, e.since)]
        if kind == "jump":
            early = [e for e in events if e.found <= slow_at]
        false, alarms = false + len(early), alarms + len(events)
        true = [e for e in events if e not in early]
        if slow_at is None:
            continue
        if true and true[0].found <= slow_at + 10 * log_interval:
            found += 1
            phases += bool(true[0].phases) and true[0].phases[0][0] == phase
            shapes += true[0].creeps == creeps
        else:
            late.append(kind)
    return dict(
        traces=traces, slow=slow, precision=1 - false / max(1, alarms), recall=found / slow,
        phase=phases / max(1, found), shape=shapes / max(1, found), false=false,
        late_jumps=late.count("jump"), late_creeps=late.count("creep"),
    )


def false_alarms(steps: int, seed: int = 1, log_interval: int = 50) -> int:
    """Alarms in `steps` steps of noise, in runs of a million steps each."""
    rng = np.random.default_rng(seed)
    logs = min(steps, 10**6) // log_interval
    count = 0
    for _ in range(max(1, steps // 10**6)):
        watch = SlowdownDetector()
        rows = trace(rng, logs, "none", log_interval)[0]
        count += sum(e.ended is None for row in rows for e in watch.add(row))
    return count


def main(options) -> list[Figure]:
    traces, quiet_steps = (30, 100_000) if options.quick else (1000, 20_000_000)
    found = simulate(traces)
    for name, value in found.items():
        print(f"{name:12s} {value:.4g}")
    for log_interval in (50, 10, 1):
        steps = quiet_steps * log_interval // 50
        n = false_alarms(steps, log_interval=log_interval)
        print(f"false alarms in {steps:,} quiet steps logged every {log_interval}: {n}")
    busy = simulate_busy(traces // 2)
    for name, value in busy.items():
        print(f"on a busy machine: {name:12s} {value:.4g}")
    found |= {f"{name}, on a busy machine": busy[name] for name in ("recall", "phase", "since")}
    aims = dict(recall=">= 0.95", precision=">= 0.95", phase=">= 0.9", shape="")
    aims |= {f"{name}, on a busy machine": ">= 0.95" for name in ("recall", "phase", "since")}
    return [Figure(f"slow-downs in simulated runs: {name}", f"{traces:,} runs, answer known",
                   [found[name]], aim) for name, aim in aims.items()]
