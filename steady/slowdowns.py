"""Slow-downs: since when steps take longer, by how much, and why, from the rows of metrics.jsonl.

The same rows give the same events while training (monitor.py) and afterwards (steady/report.py).
"""

from collections import deque

import numpy as np

from steady.telemetry import OUTSIDE_PHASES, OWN_PHASES, STEP_PHASES

MIN_STEPS = 20  # shorter log intervals are merged: the mean of a few steps is mostly noise
COUNTS = ("perf/compilations", "perf/slowest_rank", "perf/slowest_rank_phase")  # not measurements
DATA_ADVICE = "more --num_workers, a faster disk, or less work for each sample"
CAUSES = {
    "work": "longer sequences or a larger batch: more work, not slower",
    "logging": "a sink that blocks: try another --tensorboard_dir or a larger --log_interval",
    "evaluation": "evaluation, slower or more frequent: see --eval_steps and --eval_interval",
    "checkpoint": "checkpoints, slower or more frequent: a faster disk, a larger --save_interval",
    "checkpoint grows": "something saved each time grows, such as a list that is rewritten",
    "data": f"the loop waits for data: {DATA_ADVICE}",
    "loader memory": "a loader whose memory grows: look for what it keeps",
    "gc": "Python's garbage collector: call gc.freeze() after start-up or make fewer objects",
    "compilations": "recompilation: shapes or flags change; TORCH_LOGS=recompiles names them",
    "allocator": "the CUDA allocator runs out of memory and retries: try a smaller "
                 "--micro_batch_size, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    "clocks": "lower GPU clocks: its temperature or its power limit",
    "contention": "CPU contention: other processes run on these cores",
    "loop": "something in the loop grows, such as a list that is traversed each time",
}


class Cusum:
    """Finds when a series rises above its level: a one-sided CUSUM chart.

    E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954). Each value adds to a sum its
    excess over the level, less an allowance of half the smallest rise to find (2.5 %) or one
    standard deviation; a rise is found where the sum passes a threshold of 10 % or 8 standard
    deviations. One value adds at most a sixth of that, so an outlier alone is never a rise.

    The first `least` values define the level, and so do later ones in control, up to 50. After a
    rise the higher level is learned anew; the lower one is kept, to see the series return to it.
    """

    def __init__(self, least: int = 10):
        self.least = least
        self.mean = 0.0  # the level
        self.normal, self.rising = [], []  # [(value, row)] that define it; since the sum was 0
        self.sum, self.since = 0.0, 0  # since: the last step at which the sum was 0
        self.newest = deque(maxlen=5)
        self.lower = deque(maxlen=10)  # (normal, event): levels below this one and their rises

    def add(self, step: int, value: float, row: dict, unit: float | None = None) -> dict | None:
        """The event that begins with this value; or one that ends, which then has "ended".

        unit: what a rise is relative to; None: the level. A new event has the rows before and
        since in "rows".
        """
        self.newest.append(value)
        if self.lower and len(self.newest) == 5:
            normal, event = self.lower[-1]
            if np.median(self.newest) < 0.7 * event["before"] + 0.3 * event["after"]:
                self.lower.pop()
                self.normal, self.rising, self.sum = normal, [], 0.0
                self.learn(unit)
                event["ended"] = step
                return event
        if len(self.normal) < self.least:
            self.normal.append((value, row))
            self.since = step
            if len(self.normal) == self.least:
                self.learn(unit)
            return None
        excess = (value - self.mean) / self.unit - self.allowance
        self.sum += min(excess, self.threshold / 6)
        if self.sum <= 0:
            if len(self.normal) < 50:  # with those that rose and fell again, or it would be low
                self.normal += [*self.rising, (value, row)]
                self.learn(unit)
            self.sum, self.since, self.rising = 0.0, step, []
            return None
        self.rising = [*self.rising[-99:], (value, row)]
        return None if self.sum < self.threshold else self.begin_event(step)

    def learn(self, unit: float | None):
        values = np.array([value for value, _ in self.normal])
        # from differences, which a gradual rise hardly widens; 0.954 = 0.6745 sqrt(2)
        sigma = float(np.median(np.abs(np.diff(values)))) / 0.954
        self.mean = float(np.minimum(values, np.median(values) + 5 * sigma).mean())
        self.unit = unit or self.mean
        self.allowance = max(0.025, sigma / self.unit)
        self.threshold = max(0.1, 8 * sigma / self.unit)

    def begin_event(self, step: int) -> dict:
        values = np.array([value for value, _ in self.rising])
        after = float(np.median(values[-10:]))
        # after a jump most values are close to the newest ones, in a gradual rise few are
        close = values > 0.3 * self.mean + 0.7 * np.median(values[-3:])
        rows = [[row for _, row in pairs] for pairs in (self.normal[-20:], self.rising)]
        event = dict(since=self.since + 1, found=step, before=self.mean, after=after, rows=rows,
                     percent=100 * (after - self.mean) / self.unit, creeps=bool(close.mean() < 0.6))
        self.lower.append((self.normal, event))
        self.normal, self.rising, self.sum = [], [], 0.0
        return event


class SlowdownDetector:
    """Watches the time of a step, its work, and what is done between steps.

    An event is a dict: kind ("step", "work" or an outside phase), since and found (steps), before
    and after (ms a step), percent (of a step), creeps (a gradual rise, not a jump), phases
    [(name, ms a step added)], causes, and ended (a step) once it is over.
    """

    def __init__(self):
        self.levels = {name: Cusum() for name in ("median", "work", *OUTSIDE_PHASES)}
        self.levels["mean"] = Cusum(20)  # rare slow steps make the mean uneven
        self.block, self.step = [], 0  # rows not evaluated yet, and the step before them
        self.seen = {}  # outside phase → the step at which it was last done
        self.tflop = None  # work of a step when the run began
        self.active = {}  # kind → events that were returned and have not ended, of one series

    def add(self, row: dict) -> list[dict]:
        """The events that begin with this row, and those that end."""
        if "perf/startup_s" in row:  # the first step of a process
            self.block, self.step = [], row["step"]
            return []
        if row.get("perf/step_ms_median") is None:
            return []
        tflop = row["perf/tflops"] * row["perf/step_ms"]
        self.tflop = self.tflop or tflop
        self.block.append(row | {"work": tflop / self.tflop})
        if row["step"] - self.step < MIN_STEPS:
            return []
        row, steps = mean_row(self.block), row["step"] - self.step
        self.block, self.step = [], row["step"]
        step_ms = self.levels["mean"].mean or row["perf/step_ms"]
        series = [  # (name, value, unit of its rise)
            ("work", row["work"], None),
            ("median", row["perf/step_ms_median"] / row["work"], None),
            ("mean", row["perf/step_ms"] / row["work"], None),
        ]
        for name in OUTSIDE_PHASES:
            total = row[f"perf/{name}_ms"] * steps
            if total > 0:  # its cost a step since it was last done
                since = self.seen.get(name, self.step - steps)
                series.append((name, total / (self.step - since), step_ms))
                self.seen[name] = self.step
        return [event for values in series if (event := self.update(*values, row))]

    def update(self, name: str, value: float, unit: float | None, row: dict) -> dict | None:
        event = self.levels[name].add(self.step, value, row, unit)
        if event is None:
            return None
        kind = "step" if name in ("median", "mean") else name
        active = self.active.setdefault(kind, deque(maxlen=10))
        if "ended" in event:
            if event not in active:
                return None
            active.remove(event)
            return event
        event |= dict(kind=kind, series=name)
        event |= explain(event, *event.pop("rows"))
        if active and active[-1]["series"] != name:  # median and mean rise for the same reason
            return None
        active.append(event)
        return event


def mean_row(rows: list[dict]) -> dict[str, float]:
    """Means of measurements; of counts and sizes the newest, which not every row has."""
    out = {}
    for name in {name: None for row in rows for name in row}:
        values = [row[name] for row in rows if row.get(name) is not None]
        measured = name == "work" or name.startswith("perf/") and name not in COUNTS
        if values:
            out[name] = sum(values) / len(values) if measured else values[-1]
    return out


def explain(event: dict, before: list[dict], after: list[dict]) -> dict:
    """Which phases became longer, and the causes, each with its share of what they added."""
    kind = event["kind"]
    if kind != "step":
        grows = kind == "checkpoint" and event["creeps"]
        ms = round(event["after"] - event["before"], 3)
        return dict(phases=[(kind, ms)] if kind in OUTSIDE_PHASES else [],
                    causes=[CAUSES["checkpoint grows" if grows else kind]])
    old, new = mean_row(before), mean_row(after)
    # ms a step at equal work: what more work costs is no slow-down
    phases = {name: new.get(f"perf/{name}_ms", 0.0) / new["work"]
              - old.get(f"perf/{name}_ms", 0.0) / old["work"] for name in STEP_PHASES}
    longer = {name: ms for name, ms in phases.items() if ms > 0}
    total = sum(longer.values()) or 1e-9
    explained = attribute(longer, old, new, after, event["creeps"])
    unexplained = total - sum(explained.values())
    by_size = sorted(explained.items(), key=lambda item: -item[1])
    causes = [f"{cause} ({min(1, ms / total):.0%})" for cause, ms in by_size]
    if unexplained > 0.05 * total:
        causes.append(f"unexplained ({unexplained / total:.0%})")
    ranked = sorted(phases.items(), key=lambda item: -item[1])
    return dict(phases=[(name, round(ms, 3)) for name, ms in ranked if ms > 0.05 * total],
                causes=causes)


def attribute(longer: dict, old: dict, new: dict, after: list[dict], creeps: bool) -> dict:
    """{cause: ms a step}: what made these phases `longer`, {phase: ms a step}, as far as known."""

    def added(name: str) -> float:
        return new.get(name, 0.0) - old.get(name, 0.0)

    out, total = {}, sum(longer.values()) or 1e-9
    gc_ms = added("perf/gc_ms")
    if gc_ms > 0.05 * total:
        out[CAUSES["gc"]] = gc_ms
        longer = {name: ms * max(0.0, 1 - gc_ms / total) for name, ms in longer.items()}
    ratio, old_ratio = (row.get("perf/slowest_rank_ratio", 1.0) for row in (new, old))
    if ratio > 1.1 and ratio > 1.05 * old_ratio:
        votes = [(row["perf/slowest_rank"], row["perf/slowest_rank_phase"]) for row in after
                 if "perf/slowest_rank" in row]  # none in rows from before more ranks joined
        rank, phase = max(set(votes), key=votes.count)
        text = (f"rank {int(rank)} is slow and the others wait for it: its own work takes "
                f"{ratio:.2f} times as long as theirs, mostly because of {OWN_PHASES[int(phase)]}")
        return out | {text: sum(longer.values())}
    if longer.get("data", 0.0) > 0.05 * total:
        rss = "memory/workers_rss_gb"  # large from the start if the process they copy is
        grows = added(rss) > 0.03 + 0.05 * old.get(rss, 0.0)
        out[CAUSES["loader memory" if grows else "data"]] = longer["data"]
    signs = {
        "compilations": added("perf/compilations") > 0,
        "allocator": added("memory/alloc_retries") > 0,
        "clocks": 0 < new.get("perf/clock_mhz", 0.0) < 0.97 * old.get("perf/clock_mhz", 0.0),
        "contention": added("perf/cpu_queue_ms") > 0.1 * total,
        "loop": creeps and longer.get("other", 0.0) > 0.5 * total,
    }
    cause = next((name for name, present in signs.items() if present), None)
    compute = sum(ms for name, ms in longer.items() if name not in ("data", "waiting"))
    if cause and compute > 0.05 * total:
        out[CAUSES[cause]] = compute
    return out
