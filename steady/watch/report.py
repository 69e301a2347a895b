"""What a run did and where its time went, from its metrics.jsonl, as a dict and as text."""

from array import array
from pathlib import Path

import numpy as np
import yaml

from steady.checkpoints.checkpoint import best_checkpoint, list_checkpoints
from steady.watch.clock import KINDS, seconds_so_far
from steady.watch.learning import Learning
from steady.watch.sinks import OUTSIDE_PHASES, STEP_PHASES, duration, read_rows
from steady.watch.slowdowns import SlowdownDetector, worth_saying
from steady.watch.words import DATA_ADVICE, describe_event

FIGURES = ("train/loss", "val/loss", "val/loss_ema", "val/bits_per_byte", "perf/step_ms_p95",
           "perf/mfu", "perf/tokens_per_second", "memory/host_rss_gb", "memory/peak_gb")
ADVICE = {  # phase → (the share of the time that is worth a line, what to try)
    "data": (0.1, DATA_ADVICE),
    "waiting": (0.15, "look at the network, and for a rank that is slower than the others"),
    "other": (0.1, "look at what the loop does on the host besides training"),
    "logging": (0.02, "a larger --log_interval, or a faster disk"),
    "evaluation": (0.15, "a larger --eval_interval, or fewer --eval_steps"),
    "checkpoint": (0.05, "a larger --save_interval, or a faster disk"),
    "lost": (0.05, "a smaller --save_interval"),
}


def report(run_dir: Path, also=None) -> dict:
    """Training, slow-downs, anomalies, seconds by phase, figures, a verdict: in one pass over rows.

    also: called with each row. Raises OSError if there is no metrics.jsonl.
    """
    size = read_config(run_dir).get("vocab_size", "")
    learning = Learning(int(size) if size.isdecimal() and len(size) < 10 else None)
    detector = SlowdownDetector()
    figures, so_far = {}, {}
    # of the rows no more is kept: there may be millions
    medians, rates, padding = array("d"), array("d"), array("d")
    happened = {kind: [] for kind in ("hang", "runs_out", "trace", "anomaly")}
    last_log = None
    newest, ms = 0, dict.fromkeys(STEP_PHASES[1:], 0.0)  # without data: `so_far` has it
    for _, row in read_rows(run_dir / "metrics.jsonl"):
        if also:
            also(row)
        learning.add(row)
        newest = max(newest, row["step"])
        detector.add(row)
        figures |= {name: row[name] for name in FIGURES if name in row}
        so_far = seconds_so_far([row]) or so_far
        for kind in happened.keys() & row.keys():
            happened[kind].append(row)
        if "perf/padding_fraction" in row:
            padding.append(row["perf/padding_fraction"])
        if not row.get("perf/step_ms"):
            continue
        if "perf/startup_s" not in row:
            medians.append(row.get("perf/step_ms_median") or row["perf/step_ms"])
            if row.get("perf/tokens_per_second"):
                rates.append(row["perf/tokens_per_second"])
            for name in ms if last_log is not None else ():
                ms[name] += (row["step"] - last_log) * row.get(f"perf/{name}_ms", 0.0)
        last_log = row["step"]
    figures = {name: value for name, value in figures.items() if value is not None}  # not finite
    if medians:
        tenth = max(1, len(medians) // 10)
        figures["step_ms_median"] = float(np.median(medians))
        figures["first_tenth_ms"] = float(np.median(medians[:tenth]))
        figures["last_tenth_ms"] = float(np.median(medians[-tenth:]))
    if rates:  # the newest may be of a single step
        figures["perf/tokens_per_second"] = float(np.median(rates))
    if padding:
        figures["padding_fraction"] = sum(padding) / len(padding)
    seconds = seconds_by_phase(dict.fromkeys(KINDS, 0.0) | so_far, ms)
    out = dict(
        run=str(run_dir),
        step=newest,
        training=learning.findings(),
        slowdowns=detector.finish(),
        judged=bool(detector.normal),
        hangs=happened["hang"],
        runs_out=happened["runs_out"],
        anomalies=happened["anomaly"],
        traces=happened["trace"],
        figures=figures,
        seconds=seconds,
        wall_s=sum(seconds.values()),
    )
    return out | {"verdict": verdict(out)}


def read_config(run_dir: Path) -> dict[str, str]:
    """The options of config.yaml as text; none where it cannot be read."""
    try:
        text = (run_dir / "config.yaml").read_text("utf-8", errors="replace")
        return {name: str(value) for name, value in (yaml.safe_load(text) or {}).items()}
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return {}


def seconds_by_phase(seconds: dict[str, float], ms: dict[str, float]) -> dict[str, float]:
    """Wall time since the run began, by kind; training split over phases in proportion to ms."""
    measured = sum(ms.values())
    training = seconds["training"]
    return {
        "start-up": seconds["startup"],
        "data": seconds["data"],
        **{name: training * ms[name] / (measured or 1.0) for name in ms},
        "training": 0.0 if measured else training,  # --monitoring off has no phases
        **{name: seconds[name] for name in (*OUTSIDE_PHASES, "lost")},
    }


def verdict(out: dict) -> list[str]:
    """Whether the run learns, whether it slowed down, what takes too much time; as lines."""
    lines = [str(finding) for finding in out["training"]]
    shown = [event for event in out["slowdowns"] if worth_saying(event)]
    if not shown:
        lines.append("steady: no slow-down found" if out["judged"] else
                     "too few logs to judge the speed")
    for event in shown:
        ended = f"\n    It ended at step {event.ended}." if event.ended is not None else ""
        lines.append(describe_event(event) + ended)
    lines += [f"no progress: {row['hang']}" for row in out["hangs"]]
    lines += [row["runs_out"] for row in out["runs_out"]]
    lines += [f"trace of three steps, for ui.perfetto.dev: {row['trace']}" for row in out["traces"]]
    for name, (limit, advice) in ADVICE.items():
        share = out["seconds"][name] / (out["wall_s"] or 1.0)
        if share > limit and not (name == "logging" and out["wall_s"] < 60):
            lines.append(f"{name} takes {share:.0%} of the time: {advice}")
    padding = out["figures"].get("padding_fraction", 0.0)
    if padding > 0.2:
        lines.append(f"padding is {padding:.0%} of the tokens computed: --data_mode packed, or a "
                     "larger --group_window")
    return lines


def report_text(out: dict) -> str:
    seconds, figures, wall = out["seconds"], out["figures"], out["wall_s"] or 1.0
    lines = [f"time    {duration(out['wall_s'])} since the run began"]
    for name, s in seconds.items():
        if s >= 0.001 * wall:
            bar = "█" * round(40 * s / wall)
            lines.append(f"        {name:10s} {s / wall:6.1%} {duration(s):>7s}  {bar}".rstrip())
    if "step_ms_median" in figures:
        lines.append("steps   {step_ms_median:.4g} ms (median), first tenth {first_tenth_ms:.4g} "
                     "ms, last tenth {last_tenth_ms:.4g} ms".format(**figures))
    trained = sum(seconds[name] for name in (*STEP_PHASES[1:], "training"))
    lines.append(f"goodput {trained / wall:.1%} of the time was training, "
                 f"{seconds['lost'] / wall:.1%} was lost to crashes")
    for kind in sorted({row["anomaly"] for row in out["anomalies"]}):
        steps = [str(row["step"]) for row in out["anomalies"] if row["anomaly"] == kind]
        lines.append(f"anomaly {kind} at step {', '.join(steps[:8])}{' …' * (len(steps) > 8)}")
    verdict_lines = "\n".join(out["verdict"]).splitlines()
    lines += [f"{'' if i else 'verdict':7s} {line}" for i, line in enumerate(verdict_lines)]
    return "\n".join(lines)


def summary(run_dir: Path) -> dict:
    """What a program asks of a run that has ended; null for what is not known."""
    logged = (run_dir / "metrics.jsonl").exists()  # a fork may log nothing
    out = report(run_dir) if logged else dict(step=None, figures={}, wall_s=None, verdict=[])
    figures, folder = out["figures"], run_dir / "checkpoints"
    found, best = list_checkpoints(folder), best_checkpoint(folder)
    names = {"train_loss": "train/loss", "val_loss": "val/loss", "val_loss_ema": "val/loss_ema",
             "bits_per_byte": "val/bits_per_byte", "step_ms": "step_ms_median",
             "tokens_per_second": "perf/tokens_per_second", "rss_gb": "memory/host_rss_gb",
             "peak_gb": "memory/peak_gb"}
    return dict(step=out["step"], **{name: figures.get(key) for name, key in names.items()},
                seconds=out["wall_s"], verdict=out["verdict"], run=str(run_dir),
                checkpoint=str(found[-1]) if found else None, best=str(best) if best else None)
