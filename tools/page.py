"""python monitor.py RUN … --html FILE: runs as a page that opens from disk.

The page is one file that loads nothing else. Its parts are in tools/page/: page.html, page.js,
and uPlot, which draws the charts (https://github.com/leeoniya/uPlot, version 1.6.32, MIT license),
as in its npm package. SHA-256 of uPlot.iife.min.js:
19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f
"""

import base64
import contextlib
import errno
import hashlib
import json
import math
import os
import re
import time
from array import array
from pathlib import Path

import numpy as np

from steady.checkpoints.disk import atomic_write
from steady.options import ConfigError, read_yaml
from steady.watch.findings import describe_anomaly
from steady.watch.history import STEP_PHASES
from steady.watch.report import report

PARTS = Path(__file__).parent / "page"
POINTS = 1000  # most of a line, of all runs together
MOST_ANOMALIES, MOST_SAMPLES = 1000, 40
DRAWN = re.compile(r"train/(loss|grad_norm|learning_rate)$|(train|val)/loss(_ema)?(/|$)|memory/|"
                   rf"perf/(tokens_per_second|step_ms|({'|'.join(STEP_PHASES)})_ms)$")


def run_data(run_dir: Path, points: int) -> dict:
    """A run for page.js, its lines of at most so many points; keeps no rows."""
    columns, samples, starts = {}, [], []  # name → (steps, values); first steps of processes

    def add(row: dict):
        first = "perf/startup_s" in row  # the first step of a process, too slow to draw
        for name, value in row.items():
            drawn = DRAWN.match(name) and not (first and name.startswith("perf/"))
            if drawn and isinstance(value, (int, float)):
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(row["step"])
                values.append(value)
        if "sample" in row:
            samples.append({"step": row["step"], "text": row["sample"][:2000]})
        if first:
            starts.append(row["step"])

    found, config = report(run_dir, add), {}
    with contextlib.suppress(ConfigError):  # it cannot be read
        config = {name: str(value) for name, value in read_yaml(run_dir / "config.yaml").items()}
    return {name: found[name] for name in ("step", "verdict", "figures", "seconds")} | dict(
        name=found["run"], events=events_of(found, starts), config=config,
        lines={name: thin(*column, points) for name, column in columns.items()},
        samples=samples[-MOST_SAMPLES:])


def thin(steps: array, values: array, points: int) -> list[list]:
    """[steps, values] of at most so many groups: the last step, the mean of finite values."""
    starts = np.arange(min(len(steps), points)) * len(steps) // min(len(steps), points)
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN for a group without
        means = (np.add.reduceat(np.where(finite, values, 0.0), starts)
                 / np.add.reduceat(finite.astype(int), starts))
    return [np.maximum.reduceat(steps, starts).astype(int).tolist(),
            [float(f"{x:.4g}") if math.isfinite(x) else None for x in means]]


def events_of(found: dict, starts: list[int]) -> list[dict]:
    """[{kind, step, until, text}], in order of steps."""
    kinds = {"slower": "slow-down", "slow": "slow from the start"}
    out = [dict(kind=kinds.get(each.code, each.code), step=each.since, until=each.until,
                text=str(each)) for each in found["findings"]]
    out += [dict(kind="anomaly", step=row["step"], text=describe_anomaly(row))
            for row in found["anomalies"][:MOST_ANOMALIES]]
    out += [dict(kind="no progress", step=row["step"], text=row["hang"]) for row in found["hangs"]]
    out += [dict(kind="restart", step=step - 1, text="continued from here, or rolled back to here")
            for step in starts[1:]]
    return sorted(out, key=lambda event: event["step"])


def write_page(run_dirs: list[Path], file: Path) -> str:
    """Returns a line for the screen; the page runs its own script only. Raises OSError."""
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file() or not is_page(file)):
        raise FileExistsError(errno.EEXIST, "exists and is not a page; choose another name")
    runs = [run_data(run_dir, POINTS // len(run_dirs)) for run_dir in run_dirs]
    data = dict(runs=runs, made=time.strftime("%Y-%m-%d %H:%M"), phases=STEP_PHASES)
    license, library, own = ((PARTS / name).read_text("utf-8") for name in (
        "uPlot.LICENSE", "uPlot.iife.min.js", "page.js"))
    script = f"/*! uPlot:\n{license}*/\n{library}\n{own}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (PARTS / "page.html").read_text("utf-8")
    for mark, text in {
        "{{digest}}": digest,
        "{{style}}": (PARTS / "uPlot.min.css").read_text("utf-8"),
        "{{script}}": script,
        # ends no element and begins no comment; last, since it may contain any text
        "{{data}}": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    }.items():
        page = page.replace(mark, text)
    with atomic_write(file) as draft:
        draft.write_text(page, "utf-8")
    return f"page    {file} ({len(page.encode()) / 1e3:.0f} kB)"


def is_page(file: Path) -> bool:
    with open(file, "rb") as f:
        return f.read(15) in (b"", b"<!doctype html>")
