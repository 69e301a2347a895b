"""Why a slow-down: what the rows of metrics.jsonl before and since it say of phases and causes.

One principle: what all phases share, in the same proportions, is the machine's; what one of them
has alone, as the rest is as fast as before, is the program's, and the lines of it that became
longer (profile.py) are named. What the kernel, the device and the probe say are names for the
machine's part, each for as many ms as it can account for. What is left is unexplained.
"""

from dataclasses import dataclass, field

import numpy as np

from steady.watch.profile import add_profiles, function_of, longer_lines
from steady.watch.sinks import OUTSIDE_PHASES, OWN_PHASES, STEP_PHASES
from steady.watch.words import CAUSES

COMMON = "all phases"  # what they share
COMPUTE = ("forward", "backward", "optimizer")
COUNTS = ("perf/compilations", "perf/slowest_rank", "perf/slowest_rank_phase", "machine/stops")
WAITS = {"quota": "machine/throttled_ms", "stolen": "machine/steal_ms",
         "contention": "perf/cpu_queue_ms", "disk": "machine/disk_ms"}
OF_MACHINE = {*WAITS, "clocks", "stopped", "network", "probe"}
READINGS = {"perf/clock_mhz": "{:.0f} MHz", "machine/gpu_celsius": "{:.0f} °C",
            "machine/gpu_watts": "{:.0f} W"}

# --- constants, each with what it was measured by (python -m tests.bench diagnosis) --------------

LEAST = 0.025  # of a step: less is within what two quiet halves of a run differ by
WORTH_NAMING = 0.05  # of what was added
LOWER_CLOCKS = 0.97  # of a GPU's clock before
SLOWER_RANK = 1.1  # times the work of the others
LOADER = "data.py", "loader"  # in which the loop waits for loader processes: the cause "data"
LINE_SURE = 1.5  # times half of its 95 % interval, as the surest of some ten lines is picked
LINE_LEFT = 0.7  # of that half interval: less than this left to explain is not worth a name


@dataclass(frozen=True)
class Cause:
    """A cause of a slow-down. ms: of what was added to a step, None if not measured."""

    code: str  # in words.CAUSES
    ms: float | None = None
    values: dict = field(default_factory=dict)  # what its words name

    def __str__(self) -> str:
        words = CAUSES[self.code].format(**self.values)
        return words if self.ms is None else f"{self.ms:+.3g} ms  {words}"


def mean_row(rows: list[dict]) -> dict[str, float]:
    """Means of measurements; of counts and sizes the newest, which not every row has.

    Of the probes the median: a row may have caught a bad moment.
    """
    if len(rows) == 1:  # as where a log is of 20 steps or more
        return {k: v for k, v in rows[0].items() if v is not None and k != "profile"}
    out = {}
    for name in {name: None for row in rows for name in row if name != "profile"}:
        values = [row[name] for row in rows if row.get(name) is not None]
        if not values:
            continue
        if name.endswith("_probe_us"):
            out[name] = float(np.median(values))
        elif name == "work" or name.startswith(("perf/", "machine/")) and name not in COUNTS:
            out[name] = sum(values) / len(values)
        else:
            out[name] = values[-1]
    return out


def explain(event, before: list[dict], after: list[dict]) -> dict:
    """Which phases became longer, the causes with their ms, and who is to blame.

    event: a SlowDown, of what all phases share or of what some have alone; before, after: points of
    SlowdownDetector. Returns fields of a SlowDown.
    """
    kind = event.kind
    if kind != "step":
        grows = kind == "checkpoint" and event.creeps
        ms = round(event.after - event.before, 3)
        return dict(phases=[(kind, ms)] if kind in OUTSIDE_PHASES else [],
                    causes=[Cause("checkpoint grows" if grows else kind)])
    old, new = mean_row([p["row"] for p in before]), mean_row([p["row"] for p in after])
    shared = grown(before, after, COMMON)
    more = {COMMON: shared}
    if event.series in STEP_PHASES:
        more = {name: grown(before, after, name) for name in STEP_PHASES}
    left = Left({name: ms for name, ms in more.items() if ms > LEAST * event.before})
    total = left.total
    if not total:
        return dict(phases=[], causes=[Cause("passed")], blames="unclear", percent=0.0,
                    after=event.before)
    alone = {name: ms for name, ms in left.ms.items() if name != COMMON}
    take_measured(left, old, new, after)
    take_lines(left, old, new, before, after, 1 + max(0.0, shared) / event.before)
    take_waits(left, old, new, max(0.0, shared))
    left.take("data", total, ["data"])
    for column in ("machine/cpu_probe_us", "machine/gpu_probe_us"):
        ratio = new[column] / old[column] if new.get(column) and old.get(column) else 1.0
        left.take("probe", (ratio - 1) * event.before, [COMMON], ratio=ratio)
    left.take("network", total, ["waiting"])
    of_machine = sum(ms for code, ms, _ in left.explained if code in OF_MACHINE)
    unclear = sum(ms for code, ms, _ in left.explained if code == "slow rank")
    of_program = total - of_machine - unclear - left.ms.get(COMMON, 0.0)
    parts = [*left.explained, ("unexplained", sum(left.ms.values()), {})]
    parts.sort(key=lambda part: -part[1])
    # where what they share is all there is, the phases are those that it lies in
    shown = alone or {name: ms_of(new, name) - ms_of(old, name) for name in STEP_PHASES}
    ranked = sorted(shown.items(), key=lambda item: -item[1])
    return dict(
        phases=[(name, round(float(ms), 3)) for name, ms in ranked if ms > 0.05 * ranked[0][1]],
        causes=[Cause(code, float(ms), values) for code, ms, values in parts
                if ms > WORTH_NAMING * total],
        blames="machine" if of_machine > 0.5 * total else "program" if of_program > 0.5 * total
        else "unclear",
        after=event.before + total, percent=100 * total / event.before)


def grown(before: list[dict], after: list[dict], name: str) -> float:
    """How much larger a value of the points is in the mean, without outliers."""
    found = [np.array([p["values"][name] for p in points if name in p["values"]])
             for points in (before, after)]
    if not all(map(len, found)):
        return 0.0
    old, new = (np.clip(x, *np.quantile(x, (0.1, 0.9))).mean() for x in found)
    return float(new - old)


def ms_of(row: dict, phase: str) -> float:
    """ms per step of equal work."""
    return row.get(f"perf/{phase}_ms", 0.0) / row["work"]


class Left:
    """What is not explained yet: ms/step by phase, and what is common to all phases."""

    def __init__(self, ms: dict[str, float]):
        self.ms, self.total, self.explained = ms, sum(ms.values()), []

    def take(self, code: str, ms: float, names=None, **values):
        """Let a cause explain up to so many ms of these phases."""
        taken = 0.0
        for name in names or self.ms:
            part = min(ms - taken, self.ms.get(name, 0.0))
            if part > 0:
                self.ms[name] -= part
                taken += part
        if taken:
            self.explained.append((code, taken, values))


def take_measured(left: Left, old: dict, new: dict, after: list[dict]):
    """Take what is measured by itself, whatever phase it lies in."""
    left.take("gc", added(old, new, "perf/gc_ms"))
    left.take("thread", added(old, new, "perf/thread_ms"), name=new.get("busiest_thread"))
    ratio, old_ratio = (row.get("perf/slowest_rank_ratio", 1.0) for row in (new, old))
    if ratio > SLOWER_RANK * old_ratio:
        rows = [p["row"] for p in after if "perf/slowest_rank" in p["row"]]
        votes = [(row["perf/slowest_rank"], row["perf/slowest_rank_phase"]) for row in rows]
        rank, phase = max(set(votes), key=votes.count)
        left.take("slow rank", (ratio / old_ratio - 1) * old["perf/step_ms"], rank=int(rank),
                  ratio=ratio, phase=OWN_PHASES[int(phase)])
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


def take_lines(left: Left, old: dict, new: dict, before: list[dict], after: list[dict],
               factor: float):
    """Take what lines take longer by than on a machine that is `factor` slower."""
    for phase in left.ms.keys() & {*OWN_PHASES}:
        looks = [add_profiles(points).get(phase, {}) for points in (before, after)]
        for line in longer_lines(phase, [ms_of(old, phase), ms_of(new, phase)], looks, factor):
            sure = line.ms > LINE_SURE * line.error and left.ms[phase] > LINE_LEFT * line.error
            if sure and function_of(line.place) != LOADER:
                left.take("line", line.ms, [phase], line=line)


def take_waits(left: Left, old: dict, new: dict, shared: float):
    """Take what the kernel says: the time that threads were ready, or wanted to be, and not run.

    shared: ms that all phases share, which it explains before what one has alone.
    """
    for code, column in WAITS.items():
        ms = added(old, new, column)
        left.take(code, ms, [COMMON])
        for phase in STEP_PHASES:
            share = new.get(f"perf/{phase}_ms", 0.0) / new["perf/step_ms"]  # of it that it meets
            left.take(code, share * (ms - shared), [phase])


def added(old: dict, new: dict, name: str) -> float:
    """How much larger a column is; 0 if it is new, as after an update of this program."""
    return new.get(name, 0.0) - old[name] if name in old else 0.0


def goes_on(points: list[dict], name: str) -> bool:
    """Whether a count rises again and again, not once: that would not make all steps slower."""
    counts = [p["row"].get(name, 0) for p in points]
    return len(counts) > 1 and float(np.mean(np.diff(counts) > 0)) > 0.25
