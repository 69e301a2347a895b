"""python monitor.py RUN …: print the reports of runs.

    python monitor.py runs/001                        where its time went, whether and why it slowed
    python monitor.py runs/001 --html run.html        also as a page to look at, or to send
    python monitor.py old new --html two.html         on one page, one on top of the other
"""

import base64
import contextlib
import errno
import hashlib
import json
import os
import pkgutil
import re
import sys
import time
from array import array
from pathlib import Path

import numpy as np

from steady.checkpoints.disk import atomic_write
from steady.guard.process import run_command
from steady.options import ConfigError, Parser, read_flags, read_yaml, reading_paths
from steady.watch.findings import Finding, describe_anomaly
from steady.watch.history import STEP_PHASES, read_rows
from steady.watch.report import report, report_text

OTHERS = {"compare": "tools.compare:compare", "try": "tools.trial:main"}  # import all of training
PARTS = Path(__file__).parent / "page"
POINTS = 1000  # most of a line, of all runs together
MOST_ANOMALIES, MOST_SAMPLES = 1000, 40
DRAWN = re.compile(r"train/(loss|grad_norm|learning_rate)$|(train|val)/loss(_ema)?(/|$)|memory/|"
                   rf"perf/(tokens_per_second|step_ms|({'|'.join(STEP_PHASES)})_ms)$")


def main(argv: list[str]) -> int:
    """Exit code 0; 2 if a run cannot be read."""
    if argv and argv[0] in OTHERS:
        return run_command(f"monitor.py {argv[0]}", pkgutil.resolve_name(OTHERS[argv[0]]), argv[1:])
    return run_command("monitor.py", print_reports, argv)


def print_reports(argv: list[str]):
    parser = Parser("monitor.py", allow_abbrev=False, description="Where the "
                    "time of a run went, and whether, when and why it slowed down.",
                    epilog="`monitor.py compare A B` trains two variants: is B better than A? "
                    "`monitor.py try RUN` measures what other options would gain.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="such as runs/001")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page with charts, "
                        "one file that opens without a network; runs lie on top of one another")
    args = read_flags(parser, argv)
    for path in args.run_dir:
        if not (path / "metrics.jsonl").is_file():  # a FIFO would block
            raise ConfigError(f"{path}: no such run, there is no metrics.jsonl in it")
    with reading_paths():
        reports = [report(path) for path in args.run_dir]
    if args.html:  # first: `| head` may close the output
        try:
            print(write_page(reports, args.html), file=sys.stderr, flush=True)
        except OSError as e:
            raise ConfigError(f"--html {args.html}: {e.strerror}") from e
    if args.json:
        text = json.dumps(reports, default=Finding.row)
        print(json.dumps(json.loads(text, parse_constant=lambda name: None), indent=1))  # no NaN
    else:
        for r in reports:
            print(f"run     {r['run']}: step {r['step']}\n{report_text(r)}\n")


def run_data(found: dict, points: int) -> dict:
    """A run for page.js, from its report, with lines of at most `points` points; keeps no rows."""
    run_dir, config = Path(found["run"]), {}
    columns, samples, starts = {}, [], []  # name → (steps, values); first steps of processes
    for _, row in read_rows(run_dir / "metrics.jsonl"):
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
    with contextlib.suppress(ConfigError):  # config.yaml cannot be read
        config = {name: str(value) for name, value in read_yaml(run_dir / "config.yaml").items()
                  if name != "backup_to"}  # the address may hold a password
    return {name: found[name] for name in ("step", "verdict", "figures", "seconds")} | dict(
        name=found["run"], events=events_of(found, starts), config=config,
        lines={name: thin(*column, points) for name, column in columns.items()},
        samples=samples[-MOST_SAMPLES:])


def thin(steps: array, values: array, points: int) -> list[list]:
    """[steps, values] of at most `points` groups: their last steps, means of finite values."""
    n = min(len(steps), points)
    groups = [group[np.isfinite(group)] for group in np.array_split(np.array(values), n)]
    return [[int(group[-1]) for group in np.array_split(np.array(steps), n)],
            [float(f"{group.mean():.4g}") if len(group) else None for group in groups]]


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


def write_page(reports: list[dict], file: Path) -> str:
    """Returns a line for the screen; the page runs its own script only. Raises OSError."""
    if os.path.lexists(file):
        is_file = file.is_file() and not file.is_symlink()
        if not is_file or file.open("rb").read(15) not in (b"", b"<!doctype html>"):
            raise FileExistsError(errno.EEXIST, "exists and is not a page; choose another name")
    runs = [run_data(found, POINTS // len(reports)) for found in reports]
    data = dict(runs=runs, made=time.strftime("%Y-%m-%d %H:%M"), phases=STEP_PHASES)
    license, library, own, style, page = ((PARTS / name).read_text("utf-8") for name in (
        "uPlot.LICENSE", "uPlot.iife.min.js", "page.js", "uPlot.min.css", "page.html"))
    script = f"/*! uPlot:\n{license}*/\n{library}\n{own}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("{{digest}}", digest).replace("{{style}}", style)
    # ends no element and begins no comment; last, since it may contain any text
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("{{script}}", script).replace("{{data}}", text)
    with atomic_write(file) as draft:
        draft.write_text(page, "utf-8")
    return f"page    {file} ({len(page.encode()) / 1e3:.0f} kB)"
