"""Slow-downs: since when steps take longer, and by how much, from the rows of metrics.jsonl.

While training (monitor.py) and afterwards (steady/watch/report.py), from the same rows. Why they
do is in causes.py.
"""

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from steady.watch.causes import COMMON, COMPUTE, explain, mean_row, ms_of
from steady.watch.profile import add_profiles
from steady.watch.sinks import OUTSIDE_PHASES, STEP_PHASES

MIN_STEPS = 20  # shorter log intervals are merged: the mean of a few steps is mostly noise
BASELINE = 10  # points that say how long each phase takes normally
KEPT = 128  # points that are kept: of each some kilobytes
CERTAIN_LOOKS = 60  # of the sampler, since it began: with fewer, lines are worth waiting for
PATIENCE = 32  # points for which they are waited for
NEEDED = ("perf/step_ms_median", "perf/step_ms", "perf/tflops")


@dataclass(eq=False)
class SlowDown:
    """Something that takes longer since a step. In ms/step of equal work."""

    since: int  # the first step, about
    found: int  # the step of the log that found it
    before: float
    after: float
    percent: float  # of a step
    series: str = COMMON  # of which values: also a phase
    since_range: tuple[int, int] = (0, 0)  # where `since` lies with 95 %
    creeps: bool = False  # a gradual rise, not a jump
    phases: list = field(default_factory=list)  # (name, ms/step added), the largest first
    causes: list = field(default_factory=list)  # causes.Cause
    blames: str = "unclear"  # or "machine", "program"
    ended: int | None = None  # step

    @property
    def kind(self) -> str:
        """"step", or an outside phase."""
        return self.series if self.series in OUTSIDE_PHASES else "step"


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
        self.newest = deque(maxlen=5)
        self.lower = deque(maxlen=10)  # (normal, its end, event): levels below, and their rises

    def add(self, step: int, value: float, unit: float | None = None) -> SlowDown | None:
        """The event that begins with this value; or one that ends, which then has `ended`.

        unit: what a rise is relative to; None: the level.
        """
        self.newest.append(value)
        if self.lower and len(self.newest) == 5:
            normal, end, event = self.lower[-1]
            if sorted(self.newest)[2] < end:
                self.lower.pop()
                self.normal, self.rising, self.sum = normal, [], 0.0
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
                         percent=100 * (after - self.mean) / self.unit)
        self.lower.append((self.normal, 0.7 * self.mean + 0.3 * after, event))
        self.normal, self.rising, self.sum = [], [], 0.0
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
    left = []  # squared errors of a jump, and of a line, at each k
    for x in (i >= k).astype(float), np.maximum(0.0, i - k + 1.0):  # [n - 1, n]
        x = x - x.mean(1, keepdims=True)
        explained = np.maximum(0.0, x @ y) ** 2 / np.maximum((x * x).sum(1), 1e-12)
        left.append(np.maximum(y @ y - explained, 1e-30))
    jump, line = left
    creeps = bool(n * np.log(jump.min() / line.min()) > 4.0)  # only if a line is clearly better
    sums = line if creeps else jump
    likely = np.flatnonzero(n * np.log(sums / sums.min()) <= 5.0) + 1
    return int(sums.argmin()) + 1, (int(likely[0]), int(likely[-1])), creeps


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
        self.usual = {}  # event that lasts → the points before it
        self.unsaid = []  # of these, those that `add` has not returned
        self.waits = True  # for more looks of the sampler, to know what is normal, or a cause

    def add(self, row: dict) -> list[SlowDown]:
        """The events that are worth saying since this row, and those of them that end with it."""
        # the first step of a process; and steps that are traced or looked at for a leak
        if "perf/startup_s" in row or row.get("perf/disturbed"):
            self.block, self.step = [], row["step"]
            return []
        if not all(row.get(name) for name in NEEDED):  # null: it was not finite
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

    def learn(self):
        """What is normal for a phase, from the newest points."""
        for event in [*self.usual]:
            if event.series in STEP_PHASES:  # nothing would see it return to normal
                del self.usual[event]
        rows = [p["row"] for p in list(self.points)[-BASELINE:]]
        self.normal = {"work": float(np.median([row["work"] for row in rows]))}
        for name in STEP_PHASES:
            self.normal[name] = float(np.median([ms_of(row, name) for row in rows]))
            self.levels[name] = Cusum()

    def watch(self, point: dict) -> list[SlowDown]:
        newest = (p["row"]["work"] / self.normal["work"]
                  for p in itertools.islice(reversed(self.points), BASELINE))
        if not any(0.9 < work < 1.1 for work in newest):  # other work, with other shares of phases
            self.learn()
        row, steps = point["row"], point["last"] - point["first"] + 1
        point["values"] = values = self.split(row)
        for name in OUTSIDE_PHASES:
            total = row.get(f"perf/{name}_ms", 0.0) * steps
            if total > 0:  # its cost a step since it was last done
                since = self.seen.get(name, point["first"] - 1)
                values[name] = total / (point["last"] - since)
                self.seen[name] = point["last"]
        for name, value in values.items():
            unit = None if name == COMMON else values[COMMON]
            found = self.levels.setdefault(name, Cusum()).add(point["last"], value, unit)
            if found and found.ended is None:
                self.begin(found, name)
        ended = [event for event in self.usual if event.ended is not None]
        said = [event for event in ended if event not in self.unsaid]
        for event in ended:
            self.describe(event)
            del self.usual[event]
        self.unsaid = [event for event in self.unsaid if event in self.usual]
        return said + self.to_say()

    def split(self, row: dict) -> dict[str, float]:
        """{series: ms/step of equal work}: what each phase has alone, and what all share.

        They share what the middle one of forward, backward and optimizer is longer by than normal:
        what is planted in one of them does not move it, a slower machine moves all.
        """
        work = row["work"]
        ms = {name: ms_of(row, name) for name in STEP_PHASES}
        factors = [ms[name] / self.normal[name] for name in COMPUTE if self.normal[name]]
        factor = statistics.median_low(factors) if factors else 1.0
        alone = {name: value - factor * self.normal[name] for name, value in ms.items()
                 if 0.9 < work / self.normal["work"] < 1.1}
        common = row["perf/step_ms"] / work - sum(alone.values())
        # what is alone varies by more on a machine that is slower
        alone = {name: value / max(1.0, factor) for name, value in alone.items()}
        return {**alone, COMMON: common}

    def begin(self, event: SlowDown, series: str):
        """Take up a rise of a series, unless it is part of an event that is known."""
        event.series, event.since_range = series, (event.since, event.since)
        points = [p for p in self.points if p["last"] < event.since]
        # the step at which the level below this one began
        began = max((e.ended or e.since for e in self.events if e.series == series), default=0)
        level = sum(began < p["first"] for p in points)
        self.usual[event] = points[-max(BASELINE, level):] or [self.points[0]]
        self.describe(event)
        for other in self.usual:
            if (other is not event and other.kind == event.kind
                    and (other.series in STEP_PHASES) == (series in STEP_PHASES)
                    and event.since <= other.found):  # it began before that was known
                del self.usual[event]
                return
        self.events.append(event)
        self.unsaid.append(event)

    def after(self, event: SlowDown) -> list[dict]:
        """The points since its beginning."""
        points = [p for p in self.points if p["values"]]
        if event.ended is not None:
            points = points[:-3]  # it has ended where three of five are normal again
        return [p for p in points if event.since <= p["first"]] or points[-1:]

    def describe(self, event: SlowDown):
        """Since when, whether it is a jump, the phases and the causes, from all that is known."""
        if event.ended is None:
            self.locate(event)
        usual = [p for p in self.usual[event] if p["last"] < event.since] or self.usual[event][:1]
        if event.kind == "step":
            event.before = float(np.median([p["row"]["perf/step_ms"] / p["row"]["work"]
                                            for p in usual]))
        vars(event).update(explain(event, usual, self.after(event)))

    def locate(self, event: SlowDown):
        """Since when, between which steps that is sure, and whether it is a jump."""
        before = self.usual[event]
        points = before + [p for p in self.points if p["first"] > before[-1]["last"]]
        points = [p for p in points if event.series in p["values"]]
        if self.points[0]["first"] > event.since or len(points) < 8:
            return  # so long ago that no point before it is left
        k, (low, high), creeps = change_point(
            np.array([p["values"][event.series] for p in points]))
        if points[k]["first"] <= event.found:  # not a later change
            event.since, event.creeps = points[k]["first"], creeps
            event.since_range = points[low]["first"], points[high]["first"]

    def to_say(self) -> list[SlowDown]:
        """Of the active events those that have become worth saying, once their cause is known or
        there is nothing more to wait for."""
        out, self.waits = [], False
        for event in self.unsaid:
            self.describe(event)
            after = self.after(event)
            looks = sum(n for p in after for lines in p["profile"].values() for n in lines.values())
            if 0 < looks < CERTAIN_LOOKS and len(after) <= PATIENCE:
                self.waits = True
            elif worth_saying(event):
                out.append(event)
        self.unsaid = [event for event in self.unsaid if event not in out]
        return out

    def finish(self) -> list[SlowDown]:
        """At the end of the rows: all events, from all that is known."""
        for event in self.usual:
            self.describe(event)
        return [*self.events]
