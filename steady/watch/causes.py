"""Why a slow-down: what the rows of metrics.jsonl before and since it say of phases and causes.

To tell a slower machine from a slower program, what all phases share is separated from what one
phase has in addition (SlowdownDetector.split). The known causes of the program explain what they
can, then the lines in which a phase has become longer (profile.py). Time that the kernel says the
main thread could not run, and the slow-down of the probes, explain what is shared, and of the rest
what they exceed that by. What is left is unexplained.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from steady.watch.profile import Lines, add_profiles, longer_lines
from steady.watch.sinks import OUTSIDE_PHASES, OWN_PHASES, STEP_PHASES

COMPUTE = ("forward", "backward", "optimizer")
COUNTS = ("perf/compilations", "perf/slowest_rank", "perf/slowest_rank_phase", "machine/stops")
DATA_ADVICE = "more --num_workers, a faster disk, or less work for each sample"
SLOW_RANK = ("rank {rank} is slow and the others wait for it: its own work takes {ratio:.2f} times "
             "as long as theirs, mostly because of {phase}")
CAUSES = {  # code → words
    "work": "longer sequences or a larger batch: more work, not slower",
    "logging": "a sink that blocks: try another --tensorboard_dir or a larger --log_interval",
    "evaluation": "evaluation, slower or more frequent: see --eval_steps and --eval_interval",
    "checkpoint": "checkpoints, slower or more frequent: a faster disk, a larger --save_interval",
    "checkpoint grows": "something saved each time grows, such as a list that is rewritten",
    "data": f"the loop waits for data: {DATA_ADVICE}",
    "loader memory": "a loader whose memory grows, from {old:.2f} to {new:.2f} GB: look for what "
                     "it keeps",
    "gc": "Python's garbage collector: call gc.freeze() after start-up or make fewer objects",
    "compilations": "recompilation: shapes or flags change; TORCH_LOGS=recompiles names them",
    "allocator": "the CUDA allocator runs out of memory and retries: try a smaller "
                 "--micro_batch_size, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    "lines": "{found}",
    "loop": "something in the loop grows, such as a list that is traversed each time",
    "slow rank": SLOW_RANK,
    "slow rank, work": f"{SLOW_RANK}; its machine is as fast as theirs, so it is its share of the "
                       "work",
    "unexplained": "unexplained",
    "passed": "it has passed, or too little is left of it to tell why",
}
OF_MACHINE = {
    "slow rank, machine": f"{SLOW_RANK}; its machine is the slower one, its probe takes "
                          "{probe:.2f} times as long",
    "clocks": "lower GPU clocks: its temperature or its power limit",
    "heat": "lower GPU clocks: it is too hot{reading}, look at its cooling",
    "power": "lower GPU clocks: its power limit holds it back{reading}, see nvidia-smi -pl",
    "stopped": "the process is stopped and continued by signals: find out what sends SIGSTOP",
    "quota": "a CPU quota holds the container back: raise it, or start fewer threads and loaders",
    "stolen": "the hypervisor gives this machine's cores to others: ask for a machine of your own",
    "contention": "CPU contention: other processes run on these cores; the fewer threads, the less "
                  "it costs (OMP_NUM_THREADS=1)",
    "network": "collectives take longer, and no rank is slower on average: the "
               "network or the links between them",
    "disk": "the process waits for a disk: page faults, as memory is short, or slow files",
    "probe": "the machine is {ratio:.2f} times slower, its own probe too: a neighbour on this "
             "host, or lower clocks",
}
READINGS = {"heat": ("machine/gpu_celsius", " ({:.0f} °C)"),
            "power": ("machine/gpu_watts", " at {:.0f} W")}
WAITS = {"quota": "machine/throttled_ms", "stolen": "machine/steal_ms",
         "contention": "perf/cpu_queue_ms", "disk": "machine/disk_ms"}
PROBES = ("machine/cpu_probe_us", "machine/gpu_probe_us")


def mean_row(rows: list[dict]) -> dict[str, float]:
    """Means of measurements; of counts and sizes the newest, which not every row has.

    Of the probes the median: a row may have caught a bad moment.
    """
    if len(rows) == 1:  # as of every log of 20 steps or more: a third of the time of a report
        return {name: value for name, value in rows[0].items()
                if value is not None and name != "profile"}
    out = {}
    for name in {name: None for row in rows for name in row if name != "profile"}:
        values = [row[name] for row in rows if row.get(name) is not None]
        measured = name == "work" or name.startswith(("perf/", "machine/")) and name not in COUNTS
        if values:
            out[name] = sum(values) / len(values) if measured else values[-1]
        if values and name.endswith("_probe_us"):
            out[name] = float(np.median(values))
    return out


def explain(event, before: list[dict], after: list[dict], others=frozenset()) -> dict:
    """Which phases became longer, the causes with their shares, and who is to blame.

    event: a SlowDown; before, after: points of SlowdownDetector; others: series that another event
    is about. Returns phases [(name, ms/step more)], intervals {name: half of the 95 % interval of
    that}, causes, blames ("machine", "program", or "unclear"), after (ms/step), percent.
    """
    kind = event.kind
    if kind != "step":
        grows = kind == "checkpoint" and event.creeps
        ms = round(event.after - event.before, 3)
        return dict(phases=[(kind, ms)] if kind in OUTSIDE_PHASES else [],
                    causes=[Cause("checkpoint grows" if grows else kind)], blames="unclear")
    old, new = mean_row([p["row"] for p in before]), mean_row([p["row"] for p in after])
    names = {name for p in before for name in p["values"]}
    more = {name: grown(before, after, name) for name in names}
    least, series = 0.025 * event.before, "mean" if event.series == "mean" else "median"
    common_ms, error = more[series]
    shared = max(0.0, more["median"][0], more["mean"][0])
    # no more than steps have become longer: a phase with fewer rare slow steps raises the rest
    longer = max(new[f"perf/step_{name}"] / new["work"] - old[f"perf/step_{name}"] / old["work"]
                 for name in ("ms", "ms_median"))
    common_ms = min(common_ms, float(longer))
    if common_ms < max(error, least) or event.series in STEP_PHASES:
        common_ms = 0.0
    # a machine that is much slower is not so by exactly the same factor in all phases
    alone = {}
    for name in STEP_PHASES:
        ms, error = more.get(name, (0.0, 0.0))
        enough = max(error, 0.02 * event.before, 0.1 * shared)
        if ms > enough and name not in others - {event.series}:
            alone[name] = ms
    # where the common part is all there is, the phases are those that it lies in
    shown = dict(alone)
    if not alone or common_ms > 2 * sum(alone.values()):
        shown = {name: new.get(f"perf/{name}_ms", 0.0) / new["work"]
                 - old.get(f"perf/{name}_ms", 0.0) / old["work"] for name in STEP_PHASES}
        shown = {name: max(ms, alone.get(name, 0.0)) for name, ms in shown.items()}
    total = sum(alone.values()) + common_ms or 1e-9
    left = Left(alone | {"common": common_ms})
    take_program(left, old, new, after)
    factor = 1 + common_ms / max(event.before, 1e-9)
    take_lines(left, old, new, before, after, factor)
    left.take("data", left.total, ["data"])
    if event.creeps and left.ms.get("other", 0.0) > 0.5 * left.total:
        left.take("loop", left.total, ["other"])
    take_machine(left, old, new, before, after, series, least, shared)
    of_machine = sum(ms for code, ms in left.explained.items() if code in OF_MACHINE)
    parts = sorted(left.explained.items(), key=lambda item: -item[1])
    parts.append(("unexplained", sum(left.ms.values())))
    causes = [Cause(code, ms / total, left.values.get(code, {})) for code, ms in parts
              if ms > 0.05 * total]
    measured = all("machine/cpu_probe_us" in row for row in (old, new))
    blames = "program" if measured or left.explained else "unclear"
    if of_machine > 0.5 * total:
        blames = "machine"
    elif not left.explained and not alone and total < 0.25 * event.before:
        blames = "unclear"  # a neighbour can take that much without the probe's knowing
    if total < least:
        blames, causes = "unclear", [Cause("passed")]
    ranked = sorted(shown.items(), key=lambda item: -item[1])
    largest = max(shown.values(), default=0.0)
    return dict(
        phases=[(name, round(float(ms), 3)) for name, ms in ranked if ms > 0.05 * largest],
        intervals={name: round(more[name][1], 3) for name in shown if name in more},
        causes=causes, blames=blames, after=event.before + total,
        percent=100 * total / event.before,
    )


def grown(before: list[dict], after: list[dict], name: str, probe: str = "") -> tuple:
    """(how much larger a value of the points is in the mean, half the 95 % interval of that).

    probe: what of it is more than a machine that is as much slower as this probe.
    """
    pairs = []
    for points in (before, after):
        points = [p for p in points if name in p["values"] and (not probe or p["row"].get(probe))]
        values = np.array([p["values"][name] for p in points])
        if probe:
            values /= np.array([p["row"][probe] for p in points])
        pairs.append(values)
    old, new = pairs
    if len(old) < 3 or len(new) < (3 if probe else 1):
        return (math.inf if probe else 0.0), 0.0
    if probe:
        old, new = (x * np.median([p["row"][probe] for p in before if p["row"].get(probe)])
                    for x in (old, new))
    old, new = (np.clip(x, *np.quantile(x, (0.1, 0.9))) for x in (old, new))  # not the outliers
    # neighbours are alike: as many independent values as there are groups of four
    groups = [[x[i : i + 4].mean() for i in range(0, len(x), 4)] for x in (old, new)]
    error = 2 * math.sqrt(sum(np.var(g) / len(g) for g in groups))
    return float(new.mean() - old.mean()), error


@dataclass(frozen=True)
class Cause:
    """A cause of a slow-down. share: of what was added, None if not measured."""

    code: str  # in CAUSES or OF_MACHINE
    share: float | None = None
    values: dict = field(default_factory=dict)  # numbers that its words name

    def __str__(self) -> str:
        words = (CAUSES | OF_MACHINE)[self.code].format(**self.values)
        return words if self.share is None else f"{words} ({self.share:.0%})"


class Left:
    """What is not explained yet: ms/step by phase, and what is common to all phases."""

    def __init__(self, ms: dict[str, float]):
        self.ms, self.total = ms, sum(ms.values()) or 1e-9
        self.explained, self.values = {}, {}  # by code: ms, numbers

    def take(self, code: str, ms: float, names=None, **values):
        """Let a cause explain up to so many ms of these phases, the common part first."""
        self.values[code] = values
        for name in sorted(names or self.ms, key=lambda name: name != "common"):
            part = min(ms, self.ms.get(name, 0.0))
            if part > 0:
                self.ms[name] -= part
                ms -= part
                self.explained[code] = self.explained.get(code, 0.0) + part


def added(old: dict, new: dict, name: str) -> float:
    """How much larger a column is; 0 if it is new, as after an update of this program."""
    return new.get(name, 0.0) - old[name] if name in old else 0.0


def of_all_phases(row: dict) -> float:
    """ms of a step; never 0, to be divided by."""
    return max(1e-9, sum(row.get(f"perf/{name}_ms", 0.0) for name in STEP_PHASES))


def goes_on(points: list[dict], name: str) -> bool:
    """Whether a count rises again and again, not once: that would not make all steps slower."""
    counts = [p["row"].get(name, 0) for p in points]
    return len(counts) > 1 and float(np.mean(np.diff(counts) > 0)) > 0.25


def take_machine(left: Left, old: dict, new: dict, before: list[dict], after: list[dict],
                 series: str, least: float, shared: float):
    """Take what the machine is to blame for.

    series: of what is common to the phases; least: ms that count; shared: how much longer all
    phases take alike, sure or not, which a queue explains before what one has alone.
    """
    if goes_on(after, "machine/stops"):
        left.take("stopped", left.total)
    if 0 < new.get("perf/clock_mhz", 0.0) < 0.97 * old.get("perf/clock_mhz", 0.0):
        code, reading = lower_clocks(old, new)
        left.take(code, left.total, ("common", *COMPUTE), reading=reading)
    waits = {name: added(old, new, column) for name, column in WAITS.items()}
    waits = {name: ms for name, ms in waits.items() if ms > 0.1 * left.total}
    for name, ms in sorted(waits.items(), key=lambda item: -item[1]):
        # the other threads of an operation wait for the one that did not run: it counts for more
        left.take(name, left.ms["common"], ["common"])
        if ms - shared > 0.3 * left.total:
            for phase in STEP_PHASES:  # which meets its share of it
                share = new.get(f"perf/{phase}_ms", 0.0) / of_all_phases(new)
                left.take(name, share * (ms - shared), [phase])
    # of what all phases share, all but what is more than the probe is slower
    best = 0.0, 1.0
    for column in PROBES:
        beside, error = grown(before, after, series, column)
        beside = beside if beside > max(error, least) else 0.0
        best = max(best, (left.ms["common"] - beside, probe_ratio(before, after, column)))
    ms, ratio = best
    if ms > 0 and ratio > 1.04:
        left.take("probe", ms, ["common"], ratio=ratio)
    left.take("network", left.total, ["waiting"])


def lower_clocks(old: dict, new: dict) -> tuple[str, str]:
    """(cause, reading) of lower clocks of a GPU, where it says so at half of the readings."""
    for name in ("heat", "power"):
        column = f"machine/gpu_throttled_by_{name}"
        if new.get(column, 0.0) >= 0.5 and added(old, new, column) > 0.25:
            reading, form = READINGS[name]
            return name, form.format(new[reading]) if reading in new else ""
    return "clocks", ""


def probe_ratio(before: list[dict], after: list[dict], name: str) -> float:
    """How much slower a probe has become; 1 if it was not read often enough."""
    old, new = (np.array([p["row"][name] for p in points if p["row"].get(name)])
                for points in (before, after))
    if len(old) < 3 or not len(new):
        return 1.0
    return float(np.median(new) / np.median(old))


def take_lines(left: Left, old: dict, new: dict, before: list[dict], after: list[dict],
               factor: float):
    """Take what lines of the program take longer by than a machine that is `factor` slower."""
    found = []
    for phase in OWN_PHASES:
        ms = [row.get(f"perf/{phase}_ms", 0.0) / row["work"] for row in (old, new)]
        looks = [add_profiles(points).get(phase, {}) for points in (before, after)]
        most = left.ms.get(phase, 0.0)  # what is certain, since phases are timed
        found += [line for line in longer_lines(phase, ms, looks, factor)
                  if most and line.ms > max(line.error, 0.3 * most)]
    found = Lines(sorted(found, key=lambda line: -line.ms)[:3])
    for line in found:
        left.take("lines", line.ms, [line.phase], found=found)


def take_program(left: Left, old: dict, new: dict, after: list[dict]):
    """Take what the program is to blame for, as far as known."""
    gc_ms = added(old, new, "perf/gc_ms")
    if gc_ms > 0.05 * left.total:
        left.take("gc", gc_ms)
    ratio, old_ratio = (row.get("perf/slowest_rank_ratio", 1.0) for row in (new, old))
    if ratio > 1.1 and ratio > 1.05 * old_ratio:
        rows = [p["row"] for p in after if "perf/slowest_rank" in p["row"]]
        votes = [(row["perf/slowest_rank"], row["perf/slowest_rank_phase"]) for row in rows]
        rank, phase = max(set(votes), key=votes.count)
        probe, code = new.get("perf/slowest_rank_probe"), "slow rank"
        if probe:
            slower = probe > 1 + 0.3 * (ratio - 1)
            code += ", machine" if slower else ", work"
        most = (ratio / old_ratio - 1) * of_all_phases(old)
        left.take(code, 1.2 * most, rank=int(rank), ratio=ratio, phase=OWN_PHASES[int(phase)],
                  probe=probe)
    rss = "memory/workers_rss_gb"
    most = max(p["row"].get(rss, 0.0) for p in after)  # at the end of a run they are gone
    # in GB, not in percent: workers begin as copies of a process of any size, and keep that
    grows = rss in old and most > old[rss] + 0.1
    if grows:
        left.take("loader memory", left.total, ["data"], old=old[rss], new=most)
    compute = [name for name in left.ms if name not in ("data", "waiting")]
    if goes_on(after, "perf/compilations"):
        left.take("compilations", left.total, compute)
    elif goes_on(after, "memory/alloc_retries"):
        left.take("allocator", left.total, compute)
