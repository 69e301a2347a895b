"""Slow from the first step: the avoidable part of every step, the line or option, the gain.

No millisecond counts twice: a cause takes its time out of its phase, and the next one only gets the
rest. `python monitor.py try RUN` measures options that the rows cannot judge.
"""

import math
import re

import numpy as np

from steady.watch.findings import Finding
from steady.watch.history import COMPUTE, OUTSIDE_PHASES, STEP_PHASES, History
from steady.watch.lines import by_function, parts_of
from steady.watch.slower import MEASURED, WAITS, Left, goes_on, mean_row, ms_of, slowest_rank

LEAST_STEPS, LEAST_LOGS, MOST_LOGS = 90, 4, 128
LEAST_LOOKS = 40  # looks of the sampler, to name lines
WORTH_REPORTING = 0.1  # of a step, all causes together
WORTH_NAMING = 0.05  # of a step, one cause
STARVED = 0.15  # of a step, waiting for loader processes: less is the price of handing a batch over
ALWAYS = 0.25  # quantile over logs: a cause that comes and goes is not slow from the start
SLOW_RANK = 1.3  # times the work of the others: healthy ranks reach 1.1
BUSY_THREAD = 0.2  # of a step
PADDING = 0.2
TIMES_RARER = {"logging": 10, "evaluation": 2, "checkpoint": 2}  # the advice for outside phases
HOST_PHASES = ("data", "logging", "other")  # any line in them is avoidable
AVOIDABLE = (  # source text of lines avoidable in any phase → the remedy
    (r"\.item\(\)|\.tolist\(\)|\.cpu\(\)|\.numpy\(\)", "keep it on the device until a log"),
    (r"synchronize\(|empty_cache\(", "leave it out, or do it at a log"),
    (r"\bsleep\(", "leave it out"),
    (r"\b(print|open)\(|\blog(ger|ging)?\.\w+\(|\.write\(|json\.|pickle\.|add_scalar|torch\.save\(",
     "do it at a log, or in another thread"),
    (r"deepcopy\(|\bsorted\(", "do it once, or on the device"))
ADVICE = {"data": "--num_workers 2, or less work per sample", "other": "less of it in each step",
          "logging": "a larger --log_interval", "ranks": "it waits for the slowest rank"}
COLLECTIVE = re.compile(r"\b(all_gather|all_reduce|barrier|dist\.|accelerator\.gather)\w*\(")


def slow(history: History, ends: float = math.inf) -> list[Finding]:
    """At most one finding, its parts the gains in ms/step; [] below 10 %.

    ends: the first step of a later slow-down, a finding of its own.
    """
    rows = [row for row in history.rows if row["step"] < ends and row.get("perf/step_ms_median")
            and "perf/startup_s" not in row and "perf/disturbed" not in row][:MOST_LOGS]
    if len(rows) < LEAST_LOGS or rows[-1]["step"] - history.rows[0]["step"] < LEAST_STEPS:
        return []
    steps = np.diff([row["step"] for row in rows[-3:]])
    if 2 * steps[1] < steps[0]:  # the last row, of a few steps, would count as much as the others
        rows.pop()
    mean, early = mean_row(rows), mean_row(rows[: (len(rows) + 1) // 2])
    ms = {name: ms_of(mean, name) for name in (*STEP_PHASES, *OUTSIDE_PHASES)}
    step = sum(ms.values())
    # a cause that began in the later half of these rows is not slow from the start
    mean |= {name: min(x, early.get(name, 0.0)) for name, x in mean.items()
             if name.endswith(MEASURED)}
    left = Left(ms | {name: ms_of(mean, name) for name in STEP_PHASES})
    if step <= 0 or mean["looks"] < LEAST_LOOKS:
        return []
    # first: the sampler does not see a collection
    left.take("gc", ms_of(mean, "gc"), sorted(ms, key=lambda phase: -ms[phase]))
    # in a GPU's compute phases the host waits for kernels that have to run in any case
    phases = HOST_PHASES if "memory/allocated_gb" in mean else (*STEP_PHASES, "logging")
    # in a loop without phases, or with names of its own, "other" is the model's
    own_names = any(name.startswith("phase/") for name in mean)
    other_is_model = own_names or ms["other"] >= 2 * (ms["forward"] + ms["backward"])
    host = HOST_PHASES[:2] if other_is_model else HOST_PHASES
    for phase in mean["profile"].keys() & {*phases}:
        take_lines(left, phase, mean["profile"][phase], history.sources, phase in host)
    take_rank(left, mean, rows)
    if left.ms["data"] > STARVED * step:
        p95 = np.median([row.get("perf/step_ms_p95", math.inf) for row in rows])
        rare = p95 < mean["perf/step_ms"] - 0.5 * left.ms["data"]  # most steps do not wait
        left.take("rare data" if rare else "data", left.ms["data"], ["data"])
    for code, column in WAITS.items():
        waited = float(np.quantile([row.get(column, 0.0) for row in rows], ALWAYS))
        if waited > 2 * WORTH_NAMING * step:
            left.take(code, waited, STEP_PHASES)
    take_rare(left, mean, rows)
    if ms_of(mean, "thread") > BUSY_THREAD * mean["perf/step_ms"]:
        left.take("thread", ms_of(mean, "thread"), STEP_PHASES, name=mean.get("busiest_thread"))
    if (share := mean.get("perf/padding_fraction", 0.0)) > PADDING:
        left.take("padding", share * (left.ms["forward"] + left.ms["backward"]), share=share,
                  names=("forward", "backward"))
    for name, times in TIMES_RARER.items():
        left.take(name, left.ms[name] * (1 - 1 / times), [name])
    parts = sorted((part for part in left.parts if part.ms > WORTH_NAMING * step),
                   key=lambda part: -part.ms)
    if (gain := sum(part.ms for part in parts)) < WORTH_REPORTING * step:
        return []
    return [Finding("slow", rows[0]["step"], ms=gain, of=step, parts=tuple(parts))]


def eager(history: History) -> list[Finding]:
    """torch.compile has given up on functions that it compiled again and again."""
    rows = [row for row in history.rows if row.get("perf/eager_functions")]
    if not rows:
        return []
    return [Finding("eager", rows[0]["step"], dict(count=int(rows[-1]["perf/eager_functions"])))]


def take_lines(left: Left, phase: str, lines: dict[str, int], sources: dict[str, str], host: bool):
    """Take functions from a phase of host work, and from others lines known to be avoidable."""
    ms_of_a_look = left.ms[phase] / max(1, sum(lines.values()))
    for places in by_function(place for place in lines if host or advice_for(place, sources)):
        looks, place = sum(lines[place] for place in places), max(places, key=lines.get)
        if looks > 2:
            where, function, _ = parts_of(place)
            known = phase != "data" and advice_for(place, sources)
            kind = "ranks" if COLLECTIVE.search(sources.get(where, "")) else phase
            left.take("line", looks * ms_of_a_look, [phase], advice=known or ADVICE[kind],
                      phase=phase, line=f"{where} {function}", source=sources.get(where, ""))


def advice_for(place: str, sources: dict[str, str]) -> str:
    """The remedy for a line avoidable in any phase; "" for a line that may be the model's."""
    where, function, library = parts_of(place)
    text = sources.get(where, "")
    for pattern, advice in AVOIDABLE:
        if re.search(pattern, text):
            return advice
    if library:
        return f"{library} runs on the host: use torch, or do it once"
    loop = re.search("<(?!module>|lambda>)", function)  # <genexpr>, <listcomp>, …
    model = re.search(r"\b(torch|self|F|nn)\.", text)  # [expert(x) for expert in self.experts]
    return "a loop of Python: use tensors" if loop and not model else ""


def take_rank(left: Left, mean: dict, rows: list[dict]):
    """Take the wait for a rank that is slower than the others all the time."""
    ratio, waits = mean.get("perf/slowest_rank_ratio", 1.0), left.ms["waiting"]
    rank, phase, share = slowest_rank(rows)
    if ratio > SLOW_RANK and share > 0.7:
        gain = waits if rank else (mean["perf/step_ms"] - waits) * (1 - 1 / ratio)
        left.take("slow rank", gain, STEP_PHASES, rank=rank, ratio=ratio, phase=phase)


def take_rare(left: Left, mean: dict, rows: list[dict]):
    """Take the time of a few heavy steps, and of repeated compilation."""
    step, median = mean["perf/step_ms"], mean["perf/step_ms_median"]
    above = [row["perf/step_ms"] - row["perf/step_ms_median"] for row in rows]
    rare = float(np.quantile(above, ALWAYS)) - sum(part.ms for part in left.parts)
    if rare < WORTH_NAMING * step + 2 * ms_of(mean, "cpu_queue"):
        return
    if goes_on(rows, "perf/compilations"):
        left.take("compilations", rare, COMPUTE)
    else:
        late = mean["profile"]["heavy steps"]
        most = max(by_function(late), key=lambda places: sum(map(late.get, places)), default=())
        known = sum(map(late.get, most)) > max(2, 0.5 * late.total())
        line = "{} {}".format(*parts_of(max(most, key=late.get))) if known else ""
        left.take("rare", rare, STEP_PHASES, factor=step / median, line=line)
