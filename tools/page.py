"""python monitor.py RUN … --html FILE: runs as a page that opens from disk; --watch serves it.

The page is one file that loads nothing else. Its parts are in tools/page/: page.html, page.js,
and uPlot, which draws the charts (https://github.com/leeoniya/uPlot, version 1.6.32, MIT license),
as in its npm package. SHA-256 of uPlot.iife.min.js:
19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f
The package's integrity:
sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==
"""

import base64
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import numpy as np
import yaml

from steady.checkpoints.sealed import atomic_write
from steady.watch.clock import KINDS, seconds_so_far
from steady.watch.report import report
from steady.watch.sinks import PHASES
from steady.watch.slowdowns import worth_saying
from steady.watch.words import describe_anomaly, describe_event

PARTS = Path(__file__).parent / "page"
PORT = 8265  # where --watch serves, or the next free one
POINTS, CELLS = 2000, 300  # most points of a line and columns of a heat map, of all runs together
NUMBERS = 60_000  # most of them in a table: of many columns it has fewer rows
MOST_ANOMALIES, MOST_SAMPLES = 1000, 40
LINES = ("step", "train/tokens", "goodput/wall_s", "train/loss", "train/learning_rate",
         "train/grad_norm", "perf/step_ms", *(f"perf/{name}_ms" for name in PHASES),
         "perf/tokens_per_second", "perf/mfu", "memory/host_rss_gb", "memory/workers_rss_gb",
         "memory/allocated_gb", "memory/reserved_gb", "memory/peak_gb")
SPREAD = {"train/loss", "train/grad_norm"}  # shown with the least and the greatest of each point
GROWING = {"step", "train/tokens", "goodput/wall_s"}  # x axes: the newest of each point
HEAT = {"layers": "health/update_ratio/", "ranks": "rank "}  # heat map → prefix of its columns


# --- a run -----------------------------------------------------------------------------------


class Table:
    """Columns of numbers by name, NaN where a row has none."""

    def __init__(self, drawn):
        self.drawn = drawn  # (name) → whether a column is kept
        self.columns, self.rows = {}, 0

    def add(self, row: dict):
        for name, value in row.items():
            if name not in self.columns:
                self.columns[name] = array("d") if self.drawn(name) else None
            column = self.columns[name]
            if column is not None and isinstance(value, (int, float)):
                column.extend([math.nan] * (self.rows - len(column)))
                column.append(value)
        self.rows += 1

    def thin(self, most: int, prefixes=("",)) -> dict:
        """{name: means of at most `most` groups of rows}, {name + " low" and " high"}: extremes.

        Of the columns whose names begin with one of these prefixes, and of the steps.
        """
        names = [name for name, column in self.columns.items()
                 if column and (name == "step" or name.startswith(prefixes))]
        if not names:
            return {}
        points = min(self.rows, most, max(1, NUMBERS // len(names)))
        starts = np.arange(points) * self.rows // points
        out = {}
        for name in names:
            values = np.full(self.rows, math.nan)
            values[: len(self.columns[name])] = self.columns[name]
            if name in GROWING:
                out[name] = np.fmax.reduceat(values, starts)
                continue
            with np.errstate(invalid="ignore"):  # NaN where a group has none
                out[name] = (np.add.reduceat(np.nan_to_num(values), starts)
                             / np.add.reduceat(np.isfinite(values), starts))
            if name in SPREAD and points < self.rows:
                out[f"{name} low"] = np.fmin.reduceat(values, starts)
                out[f"{name} high"] = np.fmax.reduceat(values, starts)
        return {name: [short(x) for x in values.tolist()] for name, values in out.items()}


def short(x: float) -> float | None:
    """In few characters: four digits, or all of an integer. None where not finite."""
    if not math.isfinite(x):
        return None
    return int(x) if x == int(x) and abs(x) < 1e15 else float(f"{x:.4g}")


class Charts:
    """What the page shows of a run besides its report, from its rows, one after another."""

    def __init__(self):
        self.logs = Table(lambda name: name in LINES or name.startswith(
            ("train/loss/", *HEAT.values())))
        self.evaluations = Table(lambda name: name == "step" or name.startswith("val/loss"))
        self.processes, self.samples = [], []  # processes: the seconds by kind up to their ends

    def add(self, row: dict):
        if "perf/step_ms" in row:
            row = row | {f"rank {i}": ms for i, ms in enumerate(row.get("ranks_ms", ()))}
            if "perf/startup_s" in row:  # the first step of a process, which takes long
                self.logs.add({k: v for k, v in row.items() if not k.startswith("perf/")})
            else:
                self.logs.add(row)
        if "val/loss" in row:
            self.evaluations.add(row)
        if "sample" in row:
            self.samples.append({"step": row["step"], "text": row["sample"][:2000]})
        if so_far := seconds_so_far([row]):
            if "perf/startup_s" in row or not self.processes:
                self.processes.append({"step": row["step"]})
            self.processes[-1] |= so_far

    def data(self, found: dict, runs: int, folder: Path | None) -> dict:
        """All of it, of one of so many runs; found: its report, folder: where the page will be."""
        run_dir, processes = Path(found["run"]), by_process(self.processes)
        config, notes = read_config(run_dir / "config.yaml")
        heat = {title: self.logs.thin(CELLS // runs, (prefix,)) for title, prefix in HEAT.items()}
        every = max(1, math.ceil(len(self.samples) / MOST_SAMPLES))
        return dict(
            name=found["run"],
            step=found["step"],
            max_steps=config.get("max_steps", ""),
            verdict=found["verdict"],
            traces=trace_links(run_dir, found["traces"], folder) if folder else {},
            figures=found["figures"],
            processes=processes,
            events=events_of(found, processes),
            logs=self.logs.thin(POINTS // runs, LINES),
            evaluations=self.evaluations.thin(POINTS // runs),
            heat={title: {name.removeprefix(HEAT[title]): values for name, values in table.items()}
                  for title, table in heat.items() if len(table) > 2},
            samples=self.samples[::-every][::-1],
            config=config,
            notes=notes,
        )


def by_process(so_far: list[dict]) -> list[dict]:
    """Seconds of each process by kind, from those since the run began up to the end of each.

    What a crash cost is known to the process that follows, and counted for the one that crashed.
    """
    out, before = [], dict.fromkeys(KINDS, 0.0)
    for now in so_far:
        spent = {kind: round(max(0.0, now[kind] - before[kind]), 3) for kind in KINDS}
        if out:
            out[-1]["lost"], spent["lost"] = spent["lost"], 0.0
        out.append({"step": now["step"]} | spent)
        before = now
    return out


def trace_links(run_dir: Path, rows: list[dict], folder: Path) -> dict[str, str]:
    """Path of a trace in the report → a link to it from a page in `folder`, where it is there."""
    files = {row["trace"]: run_dir / "traces" / Path(row["trace"]).name for row in rows}
    return {path: quote(os.path.relpath(file, folder)) for path, file in files.items()
            if file.is_file()}


def events_of(found: dict, processes: list[dict]) -> list[dict]:
    """[{kind, step, until, text}] of what happened, in order of steps."""
    out = [dict(kind="slow-down", step=event.since, until=event.ended,
                text=describe_event(event)) for event in found["slowdowns"] if worth_saying(event)]
    out += [dict(kind=finding.code, step=finding.since, text=str(finding))
            for finding in found["training"]]
    out += [dict(kind="anomaly", step=row["step"], text=describe_anomaly(row))
            for row in found["anomalies"][:MOST_ANOMALIES]]
    out += [dict(kind="no progress", step=row["step"], text=row["hang"]) for row in found["hangs"]]
    out += [dict(kind="runs out", step=row["step"], text=row["runs_out"])
            for row in found["runs_out"]]
    for before, process in itertools.pairwise(processes):
        text = (f"restart or rollback: {before['lost']:.3g} s of repeated steps lost, "
                f"{process['startup']:.3g} s to start up")
        out.append(dict(kind="restart", step=process["step"] - 1, text=text))
    return sorted(out, key=lambda event: event["step"])


def read_config(path: Path) -> tuple[dict, dict]:
    """(options as text, notes above them) of a config.yaml; both empty where it cannot be read."""
    try:
        text = path.read_text("utf-8", errors="replace")
        values = yaml.safe_load(text) or {}
    except (OSError, yaml.YAMLError):
        return {}, {}
    notes = [line[2:].partition(": ") for line in text.splitlines() if line.startswith("# ")]
    options = {name: " ".join(map(str, value)) if isinstance(value, list)
               else "" if value is None else str(value) for name, value in values.items()}
    return options, {name: value for name, _, value in notes}


# --- the page --------------------------------------------------------------------------------


def page_data(run_dirs: list[Path], folder: Path | None = None) -> dict:
    """What page.js draws; folder: where the page will be, None if it is served."""
    runs = []
    for run_dir in run_dirs:
        charts = Charts()
        found = report(run_dir, charts.add)
        runs.append(charts.data(found, len(run_dirs), folder))
    return {"runs": runs, "made": time.strftime("%Y-%m-%d %H:%M"), "phases": PHASES,
            "kinds": KINDS}


def as_json(data: dict) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def page(data: dict) -> str:
    """The page as HTML. It may run its own script only, and load nothing from elsewhere."""
    license, library, own = ((PARTS / name).read_text("utf-8") for name in (
        "uPlot.LICENSE", "uPlot.iife.min.js", "page.js"))
    script = f"/*! uPlot:\n{license}*/\n{library}\n{own}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    out = (PARTS / "page.html").read_text("utf-8")
    for mark, text in {
        "{{digest}}": digest,
        "{{style}}": (PARTS / "uPlot.min.css").read_text("utf-8"),
        "{{script}}": script,
        # ends no element and begins no comment; the last, since it may hold anything
        "{{data}}": as_json(data).replace("<", "\\u003c"),
    }.items():
        out = out.replace(mark, text)
    return out


def write_page(run_dirs: list[Path], file: Path) -> str:
    """What was written, as a line. Raises OSError, also if something that is no page is there."""
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file() or not is_page(file)):
        raise FileExistsError(errno.EEXIST, "exists and is not a page; choose another name")
    text = page(page_data(run_dirs, file.parent))
    with atomic_write(file) as draft:
        draft.write_text(text, "utf-8")
    return f"page    {file} ({len(text.encode()) / 1e3:.0f} kB)"


def is_page(file: Path) -> bool:
    with open(file, "rb") as f:
        return f.read(15) in (b"", b"<!doctype html>")


# --- a live page -----------------------------------------------------------------------------


def make_server(run_dirs: list[Path]) -> ThreadingHTTPServer:
    """Serves the page and its data on 127.0.0.1."""
    reading = threading.Lock()  # each request has a thread

    @functools.lru_cache(1)
    def data_of(*sizes: int) -> dict:
        began = time.monotonic()
        data = page_data(run_dirs)
        data["again_s"] = max(3.0, 20 * (time.monotonic() - began))  # at most 5 % of a core
        return data

    def newest_data() -> dict:
        """Read again once the metrics have grown, by one thread at a time."""
        with reading:
            return data_of(*[(path / "metrics.jsonl").stat().st_size for path in run_dirs])

    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):  # a tab was closed
                super().handle()

        def do_GET(self):
            # another site's name that leads to this address gets nothing
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                return self.send_error(403)
            if self.path not in ("/", "/data"):
                return self.send_error(404)
            try:
                data = newest_data()
            except OSError as e:
                return self.send_error(503, explain=str(e))
            text, kind = (page(data), "text/html") if self.path == "/" else (
                as_json(data), "application/json")
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    for port in (*range(PORT, PORT + 20), 0):
        with contextlib.suppress(OSError):
            return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    raise OSError("no free port on 127.0.0.1")


def watch(run_dirs: list[Path]):
    """Serve the page until Ctrl-C."""
    with make_server(run_dirs) as server:
        print(f"page    http://127.0.0.1:{server.server_port} until Ctrl-C", flush=True)
        server.serve_forever()
