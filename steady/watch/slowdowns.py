"""Slow-downs: since when steps take longer, and by how much, from the rows of metrics.jsonl.

While training (monitor.py) and afterwards (steady/watch/report.py), from the same rows. Why they
do is in causes.py.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from steady.watch.causes import COMMON, COMPUTE, RARE, explain, mean_row
from steady.watch.profile import add_profiles
from steady.watch.sinks import OUTSIDE_PHASES, STEP_PHASES

MIN_STEPS = 20  # shorter log intervals are merged: the mean of a few steps is mostly noise
BASELINE = 10  # points that say how long each phase takes normally
KEPT = 128  # points that are kept: of each some kilobytes
CERTAIN_LOOKS = 60  # of the sampler, since it began: with fewer, lines are worth waiting for
NEEDED = ("perf/step_ms_median", "perf/step_ms", "perf/tflops")
OUTSIDE = [f"perf/{name}_ms" for name in OUTSIDE_PHASES]


@dataclass(eq=False)
class SlowDown:
    """Something that takes longer, or more work, since a step. In ms/step of equal work."""

    since: int  # the first step, about
    found: int  # the step of the log that found it
    before: float
    after: float
    percent: float  # of a step
    levels: tuple[float, float]  # of its series, before and after
    searched_from: int  # the step after which the lower level began
    kind: str = "step"  # or "work", or an outside phase
    series: str = COMMON  # of which values: also a phase, or "work"
    since_range: tuple[int, int] = (0, 0)  # where `since` lies with 95 %
    creeps: bool = False  # a gradual rise, not a jump
    phases: list = field(default_factory=list)  # (name, ms/step added), the largest first
    causes: list = field(default_factory=list)  # causes.Cause
    blames: str = "unclear"  # or "machine", "program"
    ended: int | None = None  # step
    unseen: bool = False  # steps do other work since `ended`, so it may go on
    said: bool = False  # returned by SlowdownDetector.add

    def __post_init__(self):
        self.usual = []  # points before it, while it lasts; no field, so in no report


def worth_saying(event: SlowDown) -> bool:
    """Not what came to nothing, nor the little ups and downs of a machine that others use."""
    least = 1 if event.blames == "program" else 10
    return event.kind != "step" or event.percent >= least


class Cusum:
    """Finds when a series rises above its level: a one-sided CUSUM chart.

    E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954). Each value adds to a sum its
    excess over the level, less an allowance of half the smallest rise to find (2.5 %) or one
    standard deviation; a rise is found where the sum passes a threshold of 10 % or 8 standard
    deviations. One value adds at most a sixth of that, so an outlier alone is never a rise.

    The first BASELINE values define the level, and so do later ones in control, up to 50. After a
    rise the higher level is learned anew; the lower one is kept, to see the series return to it.
    """

    def __init__(self):
        self.mean = 0.0  # the level
        self.normal, self.rising = [], []  # values that define it; since the sum was 0
        self.sum, self.since = 0.0, 0  # since: the last step at which the sum was 0
        self.began = 0  # the step after which this level began
        self.newest = deque(maxlen=5)
        self.lower = deque(maxlen=10)  # (normal, event): levels below this one and their rises

    def add(self, step: int, value: float, unit: float | None = None) -> SlowDown | None:
        """The event that begins with this value; or one that ends, which then has `ended`.

        unit: what a rise is relative to; None: the level.
        """
        self.newest.append(value)
        if self.lower and len(self.newest) == 5:
            normal, event = self.lower[-1]
            low, high = event.levels
            if sorted(self.newest)[2] < 0.7 * low + 0.3 * high:
                self.lower.pop()
                self.normal, self.rising, self.sum, self.began = normal, [], 0.0, step
                self.learn(unit)
                event.ended = step
                return event
        if len(self.normal) < BASELINE:
            self.normal.append(value)
            self.since = step
            if len(self.normal) == BASELINE:
                self.learn(unit)
            return None
        excess = (value - self.mean) / self.unit - self.allowance
        self.sum += min(excess, self.threshold / 6)
        if self.sum <= 0:
            if len(self.normal) < 50:  # with those that rose and fell again, or it would be low
                self.normal += [*self.rising, value]
                self.learn(unit)
            self.sum, self.since, self.rising = 0.0, step, []
            return None
        self.rising = [*self.rising[-99:], value]
        return None if self.sum < self.threshold else self.begin_event(step)

    def learn(self, unit: float | None):
        values = np.array(self.normal)
        # from differences, which a gradual rise hardly widens; 0.954 = 0.6745 sqrt(2)
        sigma = float(np.median(np.abs(np.diff(values)))) / 0.954
        middle = np.median(values)
        self.mean = float(np.clip(values, middle - 5 * sigma, middle + 5 * sigma).mean())
        self.unit = unit or self.mean
        self.allowance = max(0.025, sigma / self.unit)
        self.threshold = max(0.1, 8 * sigma / self.unit)

    def begin_event(self, step: int) -> SlowDown:
        after = float(np.median(self.rising[-10:]))
        event = SlowDown(since=self.since + 1, found=step, before=self.mean, after=after,
                         percent=100 * (after - self.mean) / self.unit, levels=(self.mean, after),
                         searched_from=self.began)
        self.lower.append((self.normal, event))
        self.normal, self.rising, self.sum, self.began = [], [], 0.0, self.since
        return event


def change_point(values: np.ndarray) -> tuple[int, tuple[int, int], bool]:
    """(first index after the most likely change, its 95 % interval, whether it is a gradual rise).

    Least squares of two models with as many parameters: a jump at k, and a line that rises from k
    on. The interval is of all k whose likelihood is not much less than that of the best.
    """
    n = len(values)
    smooth = np.array([np.median(values[max(0, i - 2) : i + 3]) for i in range(n)])
    noise = 1.5 * np.median(np.abs(values - smooth)) + 1e-9 * np.abs(values).max()
    y = np.clip(values, smooth - 3 * noise, smooth + 3 * noise)  # outliers are no changes
    y = y - y.mean()
    i, k = np.arange(n), np.arange(1, n)[:, None]
    models = {False: (i >= k).astype(float), True: np.maximum(0.0, i - k + 1.0)}  # [n - 1, n]
    left = {}
    for creeps, x in models.items():
        x = x - x.mean(1, keepdims=True)
        left[creeps] = (y @ y) - np.maximum(0.0, x @ y) ** 2 / np.maximum((x * x).sum(1), 1e-12)
    floor = n * noise**2 * 1e-3 + 1e-30
    best = {creeps: max(float(sums.min()), floor) for creeps, sums in left.items()}
    creeps = n * np.log(best[False] / best[True]) > 4.0  # a jump, unless a line is clearly better
    sums = np.maximum(left[creeps], floor)
    likely = np.flatnonzero(n * np.log(sums / sums.min()) <= 5.0) + 1
    return int(sums.argmin()) + 1, (int(likely[0]), int(likely[-1])), bool(creeps)


class SlowdownDetector:
    """Watches the time of a step, its work, and what is done between steps.

    Each point is about MIN_STEPS steps. What all phases share (COMMON) is watched apart from what
    each has alone: so neither a plant in one phase nor a machine that wobbles hides in the other.
    """

    def __init__(self):
        self.levels = {}  # series → Cusum
        self.block, self.step = [], 0  # rows not evaluated yet, and the step before them
        self.points = deque(maxlen=KEPT)  # dicts: first and last step, row, values of the series
        self.normal = {}  # phase → ms of equal work, and "work", when the run began
        self.seen = {}  # outside phase → the step at which it was last done
        self.tflop = None  # work of a step when the run began
        self.events = deque(maxlen=100)  # also those that ended
        self.waits = False  # for more looks, to know the cause of an event

    def add(self, row: dict) -> list[SlowDown]:
        """The events that are worth saying since this row, and those of them that end with it."""
        # the first step of a process; and steps that are traced or looked at for a leak
        if "perf/startup_s" in row or row.get("perf/disturbed"):
            self.block, self.step = [], row["step"]
            return []
        if not all(row.get(name) for name in NEEDED):
            # null: it was not finite. A GPU with a log at each step times none with an evaluation.
            between = {name: row[name] for name in OUTSIDE if row.get(name)}
            self.block = [*self.block[-MIN_STEPS:], between] if between else self.block
            return []
        tflop = row["perf/tflops"] * row["perf/step_ms"]
        self.tflop = self.tflop or tflop
        self.block.append(row | {"work": tflop / self.tflop})
        if row["step"] - self.step < MIN_STEPS:
            return []
        point = dict(first=self.step + 1, last=row["step"], row=mean_row(self.block), values={},
                     profile=add_profiles(self.block))
        self.block, self.step = [], row["step"]
        self.points.append(point)
        if self.normal:
            return self.watch(point)
        if len(self.points) < BASELINE:
            return []
        self.learn()
        return [event for point in list(self.points) for event in self.watch(point)]

    @property
    def active(self) -> list[SlowDown]:
        return [event for event in self.events if event.ended is None]

    def learn(self):
        """What is normal for a phase, from the newest points."""
        for event in self.active:
            if event.series in STEP_PHASES:  # nothing would see it return to normal
                event.ended, event.unseen = self.points[-1]["last"], True
        rows = [p["row"] for p in list(self.points)[-BASELINE:]]
        self.normal = {"work": float(np.median([row["work"] for row in rows]))}
        for name in STEP_PHASES:
            ms = [row.get(f"perf/{name}_ms", 0.0) / row["work"] for row in rows]
            self.normal[name] = float(np.median(ms))
            self.levels[name] = Cusum()

    def watch(self, point: dict) -> list[SlowDown]:
        row, steps, lasted = point["row"], point["last"] - point["first"] + 1, self.active
        newest = (p["row"]["work"] / self.normal["work"]
                  for p in itertools.islice(reversed(self.points), BASELINE))
        if not any(0.9 < work < 1.1 for work in newest):  # other work, with other shares of phases
            self.learn()
        factor, values = self.split(row)
        step_ms, slower = values[COMMON], max(1.0, factor)
        for name in STEP_PHASES:  # varies by more on a machine that is slower
            if name in values:
                values[name] /= slower
        for name in OUTSIDE_PHASES:
            total = row.get(f"perf/{name}_ms", 0.0) * steps
            if total > 0:  # its cost a step since it was last done
                since = self.seen.get(name, point["first"] - 1)
                values[name] = total / (point["last"] - since)
                if name != "checkpoint":  # which is written, not computed
                    values[name] /= slower
                self.seen[name] = point["last"]
        point["values"] = values
        for name, value in ({"work": row["work"]} | values).items():
            unit = None if name in ("work", COMMON, RARE) else step_ms
            found = self.levels.setdefault(name, Cusum()).add(point["last"], value, unit)
            if found and found.ended is None:
                self.begin(found, name)
        ended = [event for event in lasted if event.ended is not None]
        for event in ended:
            self.describe(event)
            event.usual = []
        return [event for event in ended if event.said] + self.to_say()

    def split(self, row: dict) -> tuple[float, dict[str, float]]:
        """(factor, {series: ms/step of equal work}): what each phase has alone, and the rest.

        The factor is that by which the middle one of forward, backward and optimizer is longer
        than normal: what is planted in one of them does not move it, a slower machine moves all.
        """
        ms = {name: row.get(f"perf/{name}_ms", 0.0) / row["work"] for name in STEP_PHASES}
        usual = sum(self.normal[name] for name in STEP_PHASES)
        factors = sorted(ms[name] / self.normal[name] for name in COMPUTE
                         if self.normal[name] > 0.02 * usual)
        factor = factors[(len(factors) - 1) // 2] if factors else 1.0
        alone = {name: value - factor * self.normal[name] for name, value in ms.items()
                 if 0.9 < row["work"] / self.normal["work"] < 1.1}
        rest = {name: row[column] / row["work"] - sum(alone.values())
                for name, column in ((COMMON, "perf/step_ms_median"), (RARE, "perf/step_ms"))}
        if rest[COMMON] < 0.25 * factor * usual:  # a few steps had that, not the middle one
            rest[COMMON] = factor * usual
        return factor, alone | rest

    def begin(self, event: SlowDown, name: str):
        """Take up a rise of a series, unless it is part of an event that is known."""
        event.series, event.since_range = name, (event.since, event.since)
        event.kind = "step" if name in (COMMON, RARE, *STEP_PHASES) else name
        self.locate(event)
        for other in self.alike(event):
            goes_on = other.series == name and event.creeps and other.creeps
            if other.ended is None and (event.since <= other.found or goes_on):
                return  # it began before that was known, or is more of the same
        self.events.append(event)
        low = max((e.since for e in self.alike(event) if e.ended is None), default=0)
        points = [p for p in self.points if p["values"] and p["last"] < event.since]
        normal = [p for p in points if p["first"] >= low and not any(
            e.since <= p["first"] <= (e.ended or 0) for e in self.alike(event))]
        event.usual = (normal[-50:] if len(normal) >= BASELINE
                       else points[-BASELINE:] or [self.points[0]])
        self.describe(event)

    def alike(self, event: SlowDown) -> list[SlowDown]:
        """The other events of what phases share; or of what some have alone."""
        return [e for e in self.events if e is not event and e.kind == event.kind
                and (e.series in STEP_PHASES) == (event.series in STEP_PHASES)]

    def locate(self, event: SlowDown):
        """Since when, between which steps that is sure, and whether it is a jump."""
        if self.points[0]["first"] > event.since:
            return  # so long ago that no point before it is left
        found = [p for p in self.points if event.series in p["values"]
                 and event.searched_from < p["first"] <= self.end(event)]
        if len(found) < 8:
            return
        values = np.array([p["values"][event.series] for p in found])
        k, (low, high), creeps = change_point(values)
        if found[k]["first"] <= event.found:  # not a later change
            event.since, event.creeps = found[k]["first"], creeps
            event.since_range = found[low]["first"], found[high]["first"]

    def end(self, event: SlowDown) -> float:
        """The last step of which a later event has no part."""
        later = [e.since - 1 for e in self.alike(event)
                 if e.found > event.found and e.since > event.since]
        return min([*later, event.ended or math.inf])

    def describe(self, event: SlowDown):
        """Compute phases and causes from the points before and since."""
        if event.kind == "step":
            event.before = float(np.mean([p["row"]["perf/step_ms_median"] / p["row"]["work"]
                                          for p in event.usual]))
        vars(event).update(explain(event, event.usual, self.after(event)))

    def after(self, event: SlowDown) -> list[dict]:
        points, end = [p for p in self.points if p["values"]], self.end(event)
        if event.ended is not None:
            points = points[:-3]  # it has ended where three of five are normal again
        after = [p for p in points if event.since <= p["first"] <= end] or points[-1:]
        # of what creeps how far it has come, not its mean
        return after[-max(8, len(after) // 4) :] if event.creeps else after

    def to_say(self) -> list[SlowDown]:
        """Of the active events those that have become worth saying, once their cause is known or
        there is nothing more to wait for."""
        out, self.waits = [], False
        for event in self.active:
            if event.said:
                continue
            after = self.after(event)
            n = len(after)
            if n > 32 and n & (n - 1):  # it hardly grows, and may last for days
                continue
            if event.kind == "step" and event.found < self.points[-1]["last"]:
                self.locate(event)
                self.describe(event)
            looks = sum(n for p in after for lines in p["profile"].values() for n in lines.values())
            known = sum(cause.ms or 0.0 for cause in event.causes if cause.code != "unexplained")
            if worth_saying(event) and (not looks or looks >= CERTAIN_LOOKS or known
                                        > 0.5 * (event.after - event.before)):
                event.said = True
                out.append(event)
            elif n <= 32:
                self.waits = True
        return out

    def finish(self) -> list[SlowDown]:
        """At the end of the rows: all events, from all that is known."""
        for event in self.active:
            if event.kind == "step":
                self.locate(event)
                self.describe(event)
        return [*self.events]
