"""Slower than before: since when steps take longer, by how much, and why.

Time added to all phases in proportion is the machine's; time added to one phase alone is the
program's, and the lines in it that became longer are named. Readings of the kernel, the device and
the probe name the machine's part. The rest is unexplained.
"""

import itertools
import statistics
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import numpy as np

from steady.watch.findings import OF_MACHINE, Finding
from steady.watch.history import COMPUTE, OUTSIDE_PHASES, OWN_PHASES, PHASES, STEP_PHASES, History
from steady.watch.lines import longer_lines, parts_of

COMMON = "all phases"
STEP_COLUMNS = [f"perf/{name}_ms" for name in ("step", *STEP_PHASES)]
# ends of the names of measurements; the rest are counts and sizes
MEASURED = ("_ms", "_us", "_median", "_ratio", "_fraction", "_mhz", "_celsius", "_watts", "work")
WAITS = {"quota": "machine/throttled_ms", "stolen": "machine/steal_ms",
         "contention": "perf/cpu_queue_ms", "disk": "machine/disk_ms",
         "memory": "machine/memory_ms"}
PROBES = "machine/cpu_sum_us", "machine/cpu_probe_us", "machine/gpu_probe_us"
READINGS = {"perf/clock_mhz": "{:.0f} MHz", "machine/gpu_celsius": "{:.0f} °C",
            "machine/gpu_watts": "{:.0f} W"}

# Constants, from `python -m tests.bench diagnosis` and `slowdowns`
MIN_STEPS = 20  # shorter log intervals are merged: the mean of a few steps is mostly noise
BASELINE = 10  # points that define the usual time of each phase
SAME_WORK = 0.9, 1.1  # times the newest work: beyond, phases have other shares of a step
LEAST = 0.025  # of a step: two quiet halves of a run differ by less
WORTH_NAMING = 0.05  # of the time added
LEAST_OF = {"program": 0.01, "machine": 0.1, "unclear": 0.1}  # of a step: machines vary by less
LOWER_CLOCKS = 0.97  # times the GPU's earlier clock
SLOWER_RANK = 1.1  # times the work of the others
LINE_SURE = 1.5  # times half its 95 % interval: the surest of some ten lines is picked
LINE_LEFT = 0.7  # times that half interval must be left to explain: less is noise
CERTAIN_LOOKS = 60  # looks of the sampler, to name a line with certainty
MOST_POINTS = 32  # to wait for so many looks


def slowdown(history: History) -> list[Finding]:
    """All slow-downs in the history worth reporting; `until` is set for those that ended."""
    points = merge(history.rows)
    if len(points) < BASELINE:
        return []
    series = split(points)
    rises = [rise for name, values in series.items() for rise in find_rises(name, values, points)]
    rises.sort(key=lambda rise: rise.found)
    for n, rise in enumerate(rises, start=1):
        following = [other.since for other in rises[n:] if other.series == rise.series]
        end, values = min([*following, rise.until or len(points)]), series[rise.series]
        part = [i for i in values if rise.began <= i < end]
        k, rise.creeps = change_point(np.array([values[i] for i in part]))
        rise.since = part[k]
    events = [rise for n, rise in enumerate(rises)
              if not any(belongs(rise, other) for other in rises[:n])]
    found = [explain(event, series, points, history.sources) for event in events]
    return [f for f in found if f.phase != "step" or f.ms >= LEAST_OF[f.side] * f.of]


def is_certain(found: Finding) -> bool:
    """Whether a live report would name the line, or waiting longer would not help."""
    return not 0 < found.values["looks"] < CERTAIN_LOOKS or found.values["points"] > MOST_POINTS


# --- points of equal work --------------------------------------------------------------------


def merge(rows) -> list[dict]:
    """Points: mean rows over at least MIN_STEPS steps, with the "first" step of each, scaled to
    equal work. Skips first steps of a process, traced steps, and logs without times.

    "work" of a row: FLOPs of a step, or its tokens, relative to the first point.
    """
    points, block, step, whole = [], [], 0, None
    for row in rows:
        if "perf/startup_s" in row or row.get("perf/disturbed"):
            block, step = [], row["step"]
        elif row.get("perf/step_ms_median"):
            rate = row.get("perf/tflops") or row.get("perf/tokens_per_second") or 0.0
            work = rate * row["perf/step_ms"]
            whole = whole or work
            work = work / whole if work else 1.0
            ms = {name: row[name] / work for name in STEP_COLUMNS if name in row}
            block.append(row | ms | {"work": work})
            if row["step"] - step >= MIN_STEPS:
                points.append(mean_row(block) | {"first": step + 1})
                block, step = [], row["step"]
    return points


def mean_row(rows: list[dict]) -> dict:
    """One row: means of measurements, newest counts and sizes, all looks. Rows may lack some."""
    profile = defaultdict(Counter)  # {phase: {place: looks}}
    for row in rows:
        for phase, lines in row.get("profile", {}).items():
            profile[phase].update(lines)  # adds them
    out = {"profile": profile, "looks": sum(profile[x].total() for x in {*profile} & {*PHASES})}
    for name in set().union(*rows) - out.keys():
        values = [row[name] for row in rows if name in row]
        out[name] = sum(values) / len(values) if name.endswith(MEASURED) else values[-1]
        if name == "perf/slowest_rank_ratio":  # median: the others wait while one evaluates alone
            out[name] = float(np.median(values))
    return out


def split(points: list[dict]) -> dict[str, dict[int, float]]:
    """{series: {point: ms/step}}: the time of each phase alone, and the time that all share.

    All share the median growth of forward, backward and optimizer: a cause in one of them does not
    move it, a slower machine moves all. Phases have values at points with as much work as the
    newest, outside phases their cost per step. Before the first such point all share whole steps.
    """
    work = statistics.median_low(point["work"] for point in points[-BASELINE:])
    same = [SAME_WORK[0] < point["work"] / work < SAME_WORK[1] for point in points]
    first, usual = same.index(True), list(itertools.compress(points, same))[:BASELINE]
    normal = {name: float(np.median([ms_of(point, name) for point in usual]))
              for name in STEP_PHASES}
    series = {name: {} for name in (*STEP_PHASES, COMMON)}
    last_done = {}
    for i, point in enumerate(points):
        factors = [ms_of(point, name) / normal[name] for name in COMPUTE if normal[name]]
        factor = statistics.median_low(factors) if len(factors) > 1 else 1.0
        alone = {name: ms_of(point, name) - factor * normal[name]
                 for name in STEP_PHASES if i >= first}
        series[COMMON][i] = point["perf/step_ms"] - sum(alone.values())
        for name, value in alone.items() if same[i] else ():
            series[name][i] = value / max(1.0, factor)  # noise grows with the machine's
        for name in OUTSIDE_PHASES:
            total = ms_of(point, name) * (point["step"] - point["first"] + 1)
            if total > 0:
                since = last_done.get(name, point["first"] - 1)
                series.setdefault(name, {})[i] = total / (point["step"] - since)
                last_done[name] = point["step"]
    return series


def ms_of(row: dict, name: str) -> float:
    return row.get(f"perf/{name}_ms", 0.0)


# --- rises -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Rise:
    """A series above the level it had since the point `began`.

    since, found, until: points. creeps: a gradual rise.
    """

    series: str
    began: int
    since: int
    found: int
    before: float
    after: float
    until: int | None = None
    creeps: bool = False


def belongs(rise: Rise, other: Rise) -> bool:
    """Whether a rise is part of an event: it began before that event was found."""
    of_steps = {rise.series, other.series} <= {*STEP_PHASES}
    return (of_steps or rise.series == other.series) and rise.since <= other.found


def find_rises(name: str, series: dict[int, float], points: list[dict]) -> list[Rise]:
    """Rises of a series, by a one-sided CUSUM chart.

    E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954). Each value adds to a sum its
    excess over the level, less an allowance of half the smallest rise to find (2.5 %) or one
    standard deviation; a rise is found where the sum passes a threshold of 10 % or 8 standard
    deviations. One value adds at most a sixth of that, so an outlier alone is never a rise. The
    first BASELINE values, or those before an early rise, define the level, as do later ones in
    control, up to 50. The higher level is learned anew; the lower is kept, to see a return to it.
    """
    rises, lower = [], []  # lower: (values of a level, its upper end, the rise above it)
    normal, rising, newest = [], [], deque(maxlen=5)
    total, since, began = 0.0, 0, 0
    level = unit = allowance = threshold = 0.0

    def learn():
        nonlocal level, unit, allowance, threshold
        # from differences: a gradual rise hardly widens them; 0.954 = 0.6745 sqrt(2)
        sigma, middle = float(np.median(np.abs(np.diff(normal)))) / 0.954, np.median(normal)
        level = float(np.clip(normal, middle - 5 * sigma, middle + 5 * sigma).mean())
        # rises are relative to the time all phases share, or the level
        unit = level if name == COMMON else points[i]["perf/step_ms"]
        allowance = max(0.025, sigma / unit * (1 + 1 / len(normal) ** 0.5))  # sigma is rough if few
        threshold = max(0.1, 8 * sigma / unit)

    values = list(series.items())
    for n, (i, value) in enumerate(values):
        newest.append(value)
        if lower and statistics.median(newest) < lower[-1][1]:
            normal, _, rise = lower.pop()
            rise.until, rising, total, since, began = i, [], 0.0, n + 1, n + 1
            learn()
        elif len(normal) < BASELINE:
            normal.append(value)
            since = n + 1
            if len(normal) == BASELINE:
                learn()
                k, _ = change_point(np.array(normal))
                jump = np.median(normal[k:]) - np.median(normal[:k])
                early = not lower and 1 < k <= BASELINE // 2 and name != COMMON
                if early and jump > max(0.1, 0.6 * threshold) * unit:  # it began among them
                    normal, rising, since = normal[:k], normal[k:], since - BASELINE + k
                    learn()
                    total = threshold
        else:
            rising.append(value)
            total += min((value - level) / unit - allowance, threshold / 6)
            if total <= 0:
                if len(normal) < 50:  # with values that rose and fell, or the level would be low
                    normal += rising
                    learn()
                total, since, rising = 0.0, n + 1, []
        if rising and total >= threshold:
            after = float(np.median(rising[-10:]))
            rises.append(Rise(name, values[began][0], values[since][0], i, level, after))
            lower.append((normal, 0.7 * level + 0.3 * after, rises[-1]))
            normal, rising, total, began = [], [], 0.0, since
    return rises


def change_point(values: np.ndarray) -> tuple[int, bool]:
    """(first index after the most likely change, whether it is a gradual rise).

    Least squares of two models with as many parameters: a jump at k, and a line rising from k on.
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
    return int((line if creeps else jump).argmin()) + 1, creeps


# --- why -------------------------------------------------------------------------------------


class Left:
    """Time not explained yet, ms/step: {phase: ms}. parts: the causes that explained the rest."""

    def __init__(self, ms: dict[str, float]):
        self.ms, self.total, self.parts = dict(ms), sum(ms.values()), []

    def take(self, code: str, ms: float, names=None, line: str = "", **values):
        """Let a cause explain up to `ms` of these phases."""
        taken = 0.0
        for name in names or self.ms:
            part = min(ms - taken, self.ms.get(name, 0.0))
            if part > 0:
                self.ms[name] -= part
                taken += part
        if taken:
            self.parts.append(Finding(code, values=values, ms=float(taken), line=line))


def explain(rise: Rise, series: dict, points: list[dict], sources: dict[str, str]) -> Finding:
    """The finding of a rise: the phases that became longer, the causes with their ms, the side.

    series: from `split`. sources: "FILE:LINE" → source text.
    """
    before = range(max(0, min(rise.began, rise.since - BASELINE)), rise.since)
    end = len(points) if rise.until is None else rise.until - 3  # it ended once 3 of 5 are normal
    after = range(rise.since, max(end, rise.since + 1))
    old, new = (mean_row([points[i] for i in part]) for part in (before, after))
    facts = dict(creeps=rise.creeps, points=len(after), looks=new["looks"])
    since = points[rise.since]["first"]
    until = None if rise.until is None else points[rise.until - 2]["first"]
    if rise.series in OUTSIDE_PHASES:
        grows = rise.series == "checkpoint" and rise.creeps
        ms = rise.after - rise.before
        facts |= dict(percent=100 * ms / points[rise.since]["perf/step_ms"],
                      phases=[(rise.series, round(ms, 3))])
        part = Finding("checkpoint grows" if grows else rise.series)
        return Finding("slower", since, facts, until=until, phase=rise.series, ms=ms,
                       of=rise.before, parts=(part,))
    of = float(np.median([points[i]["perf/step_ms"] for i in before]))
    of_phases = rise.series in STEP_PHASES
    shared = max(0.0, grown(series[COMMON], before, after))
    names, slowed = (STEP_PHASES, 1 + shared / of) if of_phases else ([COMMON], 1.0)
    more = {name: slowed * grown(series[name], before, after) for name in names}  # as measured
    more = {name: ms for name, ms in more.items() if ms > LEAST * of * slowed}
    left, total = Left(more), sum(more.values())
    take_measured(left, old, new, [points[i] for i in after])
    half = [ms_of(new, name) >= (1 + 0.5 * total / of) * ms_of(old, name) for name in COMPUTE]
    single = all(half) and sum(ms_of(old, name) > 0 for name in COMPUTE) < 2  # none to compare
    ratios = [new[name] / old[name] for name in PROBES if new.get(name) and old.get(name)]
    measured = max(1 + sum(added(old, new, name) for name in WAITS.values()) / of, *ratios, 1.0)
    take_lines(left, old, new, measured if single else slowed, sources)
    take_waits(left, old, new, shared)
    left.take("data", total, ["data"])
    for ratio in ratios:
        left.take("probe", (ratio - 1) * of, None if single else [COMMON], ratio=ratio)
    left.take("network", total * ("perf/slowest_rank" in new), ["waiting"])
    machine = sum(part.ms for part in left.parts if part.code in OF_MACHINE)
    unclear = sum(part.ms for part in left.parts if part.code == "slow rank")
    if "perf/slowest_rank" in new and ms_of(new, "waiting") < LEAST * of:
        unclear = max(unclear, more.get("backward", 0.0))  # DDP may wait in it for another rank
    program = total - machine - unclear - (single or not of_phases) * sum(left.ms.values())
    left.parts.append(Finding("unexplained", ms=float(sum(left.ms.values()))))
    left.parts.sort(key=lambda part: -part.ms)
    shown = more if of_phases else {  # a phase's share of the common growth, or less
        name: min(ms_of(new, name) - ms_of(old, name), shared / of * ms_of(old, name))
        for name in STEP_PHASES}
    ranked = sorted(shown.items(), key=lambda item: -item[1])
    facts |= dict(percent=100 * total / of, shared=not of_phases and all(half),
                  phases=[(name, round(float(ms), 3)) for name, ms in ranked
                          if ms > 0.05 * ranked[0][1]])
    then, now = (row["work"] * row["perf/step_ms"] for row in (old, new))
    if now < then * (1 + LEAST if new["work"] < SAME_WORK[0] * old["work"] else SAME_WORK[0]):
        total = 0.0  # less work in the same time, or other phases faster: no step became slower
    side = "machine" if machine > 0.5 * total else "program" if program > 0.5 * total else "unclear"
    return Finding("slower", since, facts, until=until, ms=total, of=of, side=side,
                   parts=tuple(p for p in left.parts if p.ms > WORTH_NAMING * total))


def grown(series: dict[int, float], before: range, after: range) -> float:
    """Growth of the mean of a series from some points to others, without outliers."""
    found = [[series[i] for i in part if i in series] for part in (before, after)]
    if not all(found):
        return 0.0
    old, new = (np.clip(x, *np.quantile(x, (0.1, 0.9))).mean() for x in found)
    return float(new - old)


def take_measured(left: Left, old: dict, new: dict, after: list[dict]):
    """Take causes with a measurement of their own, in any phase."""
    left.take("gc", added(old, new, "perf/gc_ms"))
    # one that has always been busy has longer for it in a longer step
    longer = new["work"] * new["perf/step_ms"] / (old["work"] * old["perf/step_ms"])
    left.take("thread", added(old, new, "perf/thread_ms", longer), name=new.get("busiest_thread"))
    ratio, old_ratio = (row.get("perf/slowest_rank_ratio", 1.0) for row in (new, old))
    rank, phase, share = slowest_rank(after)
    if share and ratio > SLOWER_RANK * old_ratio:
        left.take("slow rank", (ratio / old_ratio - 1) * old["perf/step_ms"], rank=rank,
                  ratio=ratio, phase=phase)
    if goes_on(after, "machine/stops"):
        left.take("stopped", left.total)
    compute = [name for name in left.ms if name not in ("data", "waiting")]
    if goes_on(after, "perf/compilations"):
        left.take("compilations", left.total, compute)
    elif goes_on(after, "memory/alloc_retries"):
        left.take("allocator", left.total, compute)
    if new.get("perf/clock_mhz", 0.0) < LOWER_CLOCKS * old.get("perf/clock_mhz", 0.0):
        readings = [form.format(new[name]) for name, form in READINGS.items() if name in new]
        left.take("clocks", left.total, (COMMON, *COMPUTE), readings=", ".join(readings))


def slowest_rank(rows: list[dict]) -> tuple[int, str, float]:
    """(rank, phase, share of votes) of the rank named slowest most often; 0 if none is."""
    votes = [(int(row["perf/slowest_rank"]), OWN_PHASES[int(row["perf/slowest_rank_phase"])])
             for row in rows if "perf/slowest_rank" in row
             and row.get("perf/slowest_rank_phase", len(OWN_PHASES)) < len(OWN_PHASES)]
    rank, phase = statistics.mode(votes) if votes else (0, "")
    return rank, phase, sum(each == rank for each, _ in votes) / max(1, len(votes))


def take_lines(left: Left, old: dict, new: dict, factor: float, sources: dict[str, str]):
    """Take the growth of lines beyond that of a machine `factor` times slower."""
    for phase in left.ms.keys() & {*OWN_PHASES}:
        looks = [row["profile"].get(phase, {}) for row in (old, new)]
        for ms, error, place in longer_lines([ms_of(old, phase), ms_of(new, phase)], looks, factor):
            if ms > LINE_SURE * error and left.ms[phase] > LINE_LEFT * error * factor:
                left.take("line", ms, [phase], line=place, error=error, phase=phase,
                          source=sources.get(parts_of(place)[0], ""))


def take_waits(left: Left, old: dict, new: dict, shared: float):
    """Take the time threads were ready, or wanted to be, and did not run.

    shared: ms that all phases share; waits explain these first, then single phases.
    """
    for code, column in WAITS.items():
        ms = added(old, new, column)
        left.take(code, ms, [COMMON])
        for phase in STEP_PHASES:
            left.take(code, (ms - shared) * ms_of(new, phase) / new["perf/step_ms"], [phase])


def added(old: dict, new: dict, name: str, usual: float = 1.0) -> float:
    """Growth of a column beyond a factor; 0 if it is new, as after an update of this program."""
    return new.get(name, 0.0) - usual * old[name] if name in old else 0.0


def goes_on(rows: list[dict], name: str) -> bool:
    """Whether a count keeps rising; a single rise would not slow every step."""
    counts = [row.get(name, 0) for row in rows]
    return len(counts) > 1 and float(np.mean(np.diff(counts) > 0)) > 0.25
