"""A run in retrospect, from its metrics.jsonl: time by phase, figures, findings, a verdict."""

import itertools
import math
from collections import Counter, deque
from pathlib import Path
from statistics import median

from steady.watch.findings import Finding, duration
from steady.watch.history import LOGS, OUTSIDE_PHASES, PHASES, History, read_rows, seconds_of
from steady.watch.slow import eager, slow
from steady.watch.slower import BASELINE, is_certain, merge, slowdown
from steady.watch.trends import RESOURCES, diverged, runs_out

FIGURES = ("train/loss", "val/loss", "val/loss_ema", "val/bits_per_byte", "perf/step_ms_p95",
           "perf/mfu", "perf/tokens_per_second", "memory/host_rss_gb", "memory/peak_gb")
NO_TRAINING = ("data", "start-up", *OUTSIDE_PHASES, "lost")
LASTING = ("slow", "eager", *RESOURCES)  # reported once a process, as their estimated start moves
UNKNOWN_CAUSES = ("", "unexplained")


def findings(history: History) -> list[Finding]:
    """Everything to report on a run: a pure function of its history."""
    slower = slowdown(history)
    ends = min((found.since for found in slower), default=math.inf)
    return [*diverged(history), *slower, *slow(history, ends), *eager(history), *runs_out(history)]


def news(history: History) -> list[Finding]:
    """Findings to report now: new ones, those whose cause is now known, and those that ended."""
    out, now = [], findings(history)
    for found, earlier in zip(now, reported_before(now, history), strict=True):
        if found.code == "slower" and found.until is not None:
            if earlier and earlier[-1].get("until") is None:
                out.append(Finding("slower", found.since, until=found.until, phase=found.phase))
        elif not earlier:
            out += [found] if found.code != "slower" or is_certain(found) else []
        elif found.code == "slower" and len(earlier) == 1 and is_certain(found):
            cause = earlier[0]["parts"][0]["code"] if earlier[0].get("parts") else ""
            if cause in UNKNOWN_CAUSES and found.cause not in UNKNOWN_CAUSES:
                out.append(found)
    return out


def reported_before(now: list[Finding], history: History) -> list[list[dict]]:
    """For each finding, the earlier reports on the same: of its kind, and begun nearest to it."""
    out, since = [[] for _ in now], {"disk space": 0}  # a disk outlives the process
    for old in history.reported:
        same = [(abs(found.since - old["since"]), i) for i, found in enumerate(now)
                if (found.code, found.phase) == (old["code"], old.get("phase", "step"))
                and (found.since <= old["reported_at"] or found.code in LASTING
                     and old["reported_at"] >= since.get(found.code, history.process_began))]
        if same:
            out[min(same)[1]].append(old)
    return out


def waits_for_lines(history: History) -> bool:
    """Whether more looks of the sampler are worth their cost: at first, and to name a line."""
    return len(history.rows) < 2 * BASELINE or any(
        found.until is None and not is_certain(found) for found in slowdown(history))


def report(run_dir: Path) -> dict:
    """Findings, anomalies, seconds by phase, figures, a verdict: in one pass over the rows.

    Raises OSError if there is no metrics.jsonl.
    """
    history, figures, seconds = History(), {}, Counter(dict.fromkeys(("start-up", *PHASES), 0.0))
    happened = {kind: [] for kind in ("hang", "trace", "anomaly")}
    newest, logs, every, logged = 0, 0, 1, math.inf
    for _, row in read_rows(run_dir / "metrics.jsonl"):
        history.append(row)
        newest = max(newest, row["step"])
        figures |= {name: row[name] for name in FIGURES if name in row and not (
            name == "memory/peak_gb" and row[name] < figures.get(name, 0))}  # reset with the cache
        for kind in happened.keys() & row.keys():
            happened[kind].append(row)
        seconds.update(seconds_of(row, logged))
        if not row.get("perf/step_ms"):
            continue
        logged, history.rows[-1]["spent"] = row["step"], {**seconds}
        if logs % every:
            history.rows.pop()
        elif len(history.rows) == LOGS:  # a whole long run, at a coarser grain
            history.rows = deque([*history.rows][::2], LOGS)
            every *= 2
        logs += 1
    for old, row in itertools.pairwise(history.rows) if every > 1 else ():
        # over all steps since the row before: a few logs may have all the evaluations
        row |= {f"perf/{name}_ms": 1e3 * (row["spent"][name] - old["spent"][name])
                / max(1, row["step"] - old["step"]) for name in OUTSIDE_PHASES}
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    usual = [row for row in history.rows if "perf/startup_s" not in row]
    if medians := [row.get("perf/step_ms_median") or row["perf/step_ms"] for row in usual]:
        tenth = max(1, len(medians) // 10)
        figures |= dict(step_ms_median=median(medians), first_tenth_ms=median(medians[:tenth]),
                        last_tenth_ms=median(medians[-tenth:]))
    for name in ("perf/tokens_per_second", "perf/padding_fraction"):
        if values := [row[name] for row in usual if name in row]:
            figures[name] = median(values)  # the newest may be of a single step
    out = dict(run=str(run_dir), step=newest, findings=findings(history),
               judged=len(merge(history.rows)) >= 2 * BASELINE, hangs=happened["hang"],
               reported=list(history.reported), anomalies=happened["anomaly"], figures=figures,
               traces=happened["trace"], seconds=seconds, wall_s=sum(seconds.values()))
    return out | {"verdict": verdict(out)}


def verdict(out: dict) -> list[str]:
    """Whether the run learns, whether and why it is slow or became slower; as lines."""
    lines = [str(each) for each in out["findings"]]
    codes = {each.code for each in out["findings"]}
    began = [each.since for each in out["findings"] if each.code == "slower"]
    lines += [f"reported at step {old['reported_at']}: {old['text']}" for old in out["reported"]
              if old["code"] not in codes and isinstance(old.get("text"), str)
              and (old["code"] != "slow" or old["reported_at"] < min(began, default=math.inf))]
    codes |= {old["code"] for old in out["reported"]}
    if not codes & {"slower", "slow"}:
        lines.append("steady: never slower" if out["judged"] else "too few logs for a verdict")
    lines += [f"no progress: {row['hang']}" for row in out["hangs"]]
    lines += [f"trace of three steps, for ui.perfetto.dev: {row['trace']}" for row in out["traces"]]
    return lines


def report_text(out: dict) -> str:
    seconds, figures, wall = out["seconds"], out["figures"], out["wall_s"] or 1.0
    lines = [f"time    {duration(out['wall_s'])} in all processes of the run"]
    for name, s in seconds.items():
        if s >= 0.001 * wall:
            bar = "█" * round(40 * s / wall)
            lines.append(f"        {name:10s} {s / wall:6.1%} {duration(s):>7s}  {bar}".rstrip())
    if "step_ms_median" in figures:
        lines.append("steps   {step_ms_median:.4g} ms (median), first tenth {first_tenth_ms:.4g} "
                     "ms, last tenth {last_tenth_ms:.4g} ms".format(**figures))
    trained = out["wall_s"] - sum(seconds[name] for name in NO_TRAINING)
    lines.append(f"goodput {trained / wall:.1%} of the time was training, "
                 f"{seconds['lost'] / wall:.1%} was lost to restarts")
    for kind in sorted({row["anomaly"] for row in out["anomalies"]}):
        steps = [str(row["step"]) for row in out["anomalies"] if row["anomaly"] == kind]
        lines.append(f"anomaly {kind} at step {', '.join(steps[:8])}{' …' * (len(steps) > 8)}")
    verdict_lines = "\n".join(out["verdict"]).splitlines()
    lines += [f"{'' if i else 'verdict':7s} {line}" for i, line in enumerate(verdict_lines)]
    return "\n".join(lines)
