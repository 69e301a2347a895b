"""Slow-downs: since when steps take longer, by how much, and why, from the rows of metrics.jsonl.

While training (monitor.py) and afterwards (steady/watch/report.py), from the same rows.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from steady.watch.causes import COMPUTE, explain, mean_row
from steady.watch.profile import add_profiles
from steady.watch.sinks import OUTSIDE_PHASES, STEP_PHASES

MIN_STEPS = 20  # shorter log intervals are merged: the mean of a few steps is mostly noise
BASELINE = 10  # points that say how long each phase takes normally
NEEDED = ("perf/step_ms_median", "perf/step_ms", "perf/tflops")
OUTSIDE = [f"perf/{name}_ms" for name in OUTSIDE_PHASES]
KEPT = 128  # points that are kept: of each some kilobytes


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
    series: str = "median"  # of which values: also "mean", or a phase
    since_range: tuple[int, int] = (0, 0)  # where `since` lies with 95 %
    creeps: bool = False  # a gradual rise, not a jump
    phases: list = field(default_factory=list)  # (name, ms/step added), the largest first
    intervals: dict = field(default_factory=dict)  # phase → half the 95 % interval of that
    causes: list = field(default_factory=list)  # causes.Cause
    blames: str = "unclear"  # or "machine", "program"
    ended: int | None = None  # step
    unseen: bool = False  # steps do other work since `ended`, so it may go on
    updated: int | None = None  # the step at which the main cause was found to be another one
    superseded: bool = False  # part of one that was found later
    said: bool = False  # on the screen


class Cusum:
    """Finds when a series rises above its level: a one-sided CUSUM chart.

    E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954). Each value adds to a sum its
    excess over the level, less an allowance of half the smallest rise to find (2.5 %) or one
    standard deviation; a rise is found where the sum passes a threshold of 10 % or 8 standard
    deviations. One value adds at most a sixth of that, so an outlier alone is never a rise.

    The first `least` values define the level, and so do later ones in control, up to 50. After a
    rise the higher level is learned anew; the lower one is kept, to see the series return to it.
    """

    def __init__(self, least: int = BASELINE):
        self.least = least
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
        if len(self.normal) < self.least:
            self.normal.append(value)
            self.since = step
            if len(self.normal) == self.least:
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


def headline(event: SlowDown) -> tuple:
    """What of an event is worth saying again if it changes."""
    lines_known = any(cause.code == "lines" for cause in event.causes)
    return event.blames, [name for name, _ in event.phases[:1]], event.percent >= 10, lines_known


class SlowdownDetector:
    """Watches the time of a step, its work, and what is done between steps.

    Each time that an event has lasted twice as long, its causes are computed anew.
    """

    def __init__(self):
        self.levels = {name: Cusum() for name in (
            "median", "work", *OUTSIDE_PHASES, *STEP_PHASES)}
        self.levels["mean"] = Cusum(20)  # rare slow steps make the mean uneven
        self.block, self.step = [], 0  # rows not evaluated yet, and the step before them
        self.points = deque(maxlen=KEPT)  # dicts: first and last step, row, values of the series
        self.normal = {}  # phase → ms of equal work, and "work", when the run began
        self.seen = {}  # outside phase → the step at which it was last done
        self.tflop = None  # work of a step when the run began
        self.active = {}  # kind → events that were returned and have not ended
        self.steps = deque(maxlen=20)  # the newest events of kind "step", also those that ended
        self.before = {}  # id of an active event → points before it

    def add(self, row: dict) -> list[SlowDown]:
        """The events that begin with this row, those that end, and those whose main cause has
        changed, now that more is known ("updated")."""
        if "perf/startup_s" in row:  # the first step of a process
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

    def learn(self) -> list[SlowDown]:
        """What is normal for a phase, from the newest points. Returns the events that this ends."""
        ended = [e for e in self.active.get("step", ()) if e.series in STEP_PHASES]
        for event in ended:  # nothing would see it return to normal
            self.active["step"].remove(event)
            event.ended, event.unseen = self.points[-1]["last"], True
        rows = [p["row"] for p in list(self.points)[-BASELINE:]]
        self.normal = {"work": float(np.median([row["work"] for row in rows]))}
        for name in STEP_PHASES:
            ms = [row.get(f"perf/{name}_ms", 0.0) / row["work"] for row in rows]
            self.normal[name] = float(np.median(ms))
            self.levels[name] = Cusum()
        return ended

    def watch(self, point: dict) -> list[SlowDown]:
        row, steps = point["row"], point["last"] - point["first"] + 1
        newest = (p["row"]["work"] / self.normal["work"]
                  for p in itertools.islice(reversed(self.points), BASELINE))
        ended = []
        if not any(0.9 < work < 1.1 for work in newest):  # other work, with other shares of phases
            ended = self.learn()
        step_ms = self.levels["mean"].mean or row["perf/step_ms"]
        point["factor"], point["values"] = self.split(row)
        series = [("work", row["work"], None)]
        # on a machine that is slower, what a phase has alone takes longer, and varies by more
        slower = max(1.0, point["factor"])
        for name, value in point["values"].items():
            if name in STEP_PHASES:
                series.append((name, value / slower, step_ms))
            else:
                series.append((name, value, None))
        for name in OUTSIDE_PHASES:
            total = row.get(f"perf/{name}_ms", 0.0) * steps
            if total > 0:  # its cost a step since it was last done
                since = self.seen.get(name, point["first"] - 1)
                value = total / (point["last"] - since)
                if name != "checkpoint":  # which is written, not computed
                    value /= slower
                series.append((name, value, step_ms))
                point["values"][name] = value
                self.seen[name] = point["last"]
        found = [event for values in series if (event := self.update(point, *values))]
        return ended + found + self.reconsider(point)

    def split(self, row: dict) -> tuple[float, dict[str, float]]:
        """(factor, {series: ms/step of equal work}): what each phase has beside it, and the rest.

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
        rest = {name: row[f"perf/step_{column}"] / row["work"] - sum(alone.values())
                for name, column in (("median", "ms_median"), ("mean", "ms"))}
        if rest["median"] < 0.25 * factor * usual:  # a few steps had that, not the middle one
            rest["median"] = factor * usual
        return factor, alone | rest

    def update(self, point: dict, name: str, value: float, unit: float | None) -> SlowDown | None:
        event = self.levels[name].add(point["last"], value, unit)
        if event is None:
            return None
        kind = "step" if name in ("median", "mean", *STEP_PHASES) else name
        active = self.active.setdefault(kind, deque(maxlen=10))
        if event.ended is not None:
            if event not in active:
                return None
            active.remove(event)
            self.describe(event)
            return event
        event.kind, event.series, event.since_range = kind, name, (event.since, event.since)
        self.locate(event)
        if any(self.same(event, other) for other in active):
            return None
        for other in [e for e in active if self.part_of(e, event)]:
            other.superseded = True
            active.remove(other)
            self.steps = deque((e for e in self.steps if e is not other), self.steps.maxlen)
        active.append(event)
        if kind == "step":
            self.steps.append(event)
        self.describe(event)
        known = {id(e) for events in self.active.values() for e in events}
        self.before = {key: points for key, points in self.before.items() if key in known}
        return event

    def same(self, event: SlowDown, other: SlowDown) -> bool:
        """Whether a rise that was found belongs to an event that was reported already."""
        if {event.series, other.series} == {"median", "mean"}:
            return True  # they rise for the same reason
        if event.series == other.series:
            goes_on = other.creeps and event.creeps
            return goes_on or event.since <= other.found
        if event.series in STEP_PHASES and other.series in STEP_PHASES:
            return self.together(event, other)
        return self.part_of(event, other)

    def part_of(self, event: SlowDown, other: SlowDown) -> bool:
        """Whether all phases are a little slower because one is much slower: caches go cold. Or one
        a little more than the others, as all are much slower: not all by the same factor."""
        if (event.series in STEP_PHASES) == (other.series in STEP_PHASES):
            return False
        little, much = (e.levels[1] - e.levels[0] for e in (event, other))
        return much > 2 * little and self.together(event, other)

    def together(self, event: SlowDown, other: SlowDown) -> bool:
        """Whether they may have begun at the same step."""
        margin = 3 * (self.points[-1]["last"] - self.points[-1]["first"] + 1)
        low, high = other.since_range
        return low - margin <= event.since <= high + margin

    def locate(self, event: SlowDown):
        """Since when, between which steps that is sure, and whether it is a jump."""
        if self.points[0]["first"] > event.since:
            return  # so long ago that no point before it is left
        name, end = event.series, self.span(event, event.series)[1]
        found = [p for p in self.points
                 if name in p["values"] and event.searched_from < p["first"] <= end]
        if len(found) < 8:
            return
        k, (low, high), event.creeps = change_point(np.array([p["values"][name] for p in found]))
        event.since = found[k]["first"]
        event.since_range = found[low]["first"], found[high]["first"]

    def span(self, event: SlowDown, series: str | None = None) -> tuple[float, float]:
        """(where an earlier event begins or ends, where a later one begins), of this series."""
        others = [e for e in self.steps if e is not event and series in (None, e.series)]
        earlier = [e.since for e in others if e.found < event.found and e.ended is None]
        began = min(event.since, event.found)
        later = [e.since - 1 for e in others
                 if e.found > event.found and e.since > began]
        return max(earlier, default=0), min([*later, (event.ended or math.inf)])

    def describe(self, event: SlowDown):
        """Compute phases and causes from all points before and since."""
        key, (begin, end) = id(event), self.span(event)
        points = [p for p in self.points if p["values"]]
        if event.ended is not None:
            points = points[:-3]  # it has ended where three of five are normal again
        if key not in self.before:
            before = [p for p in points if p["last"] < event.since] or points[:1]
            normal = [p for p in before if p["first"] >= begin and not self.within_ended(p)]
            self.before[key] = normal[-50:] if len(normal) >= BASELINE else before[-BASELINE:]
        after = [p for p in points if event.since <= p["first"] <= end] or points[-1:]
        if event.kind == "step":
            event.before = float(np.mean([p["row"]["perf/step_ms_median"] / p["row"]["work"]
                                             for p in self.before[key]]))
        if event.creeps:  # how far it has come, not its mean
            after = after[-max(8, len(after) // 4) :]
        others = {e.series for e in self.active.get("step", ()) if e is not event}
        vars(event).update(explain(event, self.before[key], after, others))
        if event.ended is not None:
            del self.before[key]

    def within_ended(self, point: dict) -> bool:
        """Whether a point lies in a slow-down that has ended since."""
        return any(e.since <= point["first"] <= (e.ended or 0) for e in self.steps)

    def reconsider(self, point: dict) -> list[SlowDown]:
        """Active slow-downs of steps, each time twice as many points are known of them."""
        changed = []
        for event in self.active.get("step", ()):
            n = sum(p["first"] >= event.since for p in self.points)
            if n < 8 or n & (n - 1) or n == KEPT or point["last"] == event.found:
                continue
            before = headline(event)
            self.locate(event)
            self.describe(event)
            if before != headline(event):
                event.updated = point["last"]
                changed.append(event)
        return changed

    def finish(self):
        """At the end of the rows: compute what lasts until then from all that is known."""
        for event in self.active.get("step", ()):
            self.locate(event)
            self.describe(event)
