"""python monitor.py RUN … --html FILE: runs as a page that opens from the disk; --watch serves it.

The page is one file that loads nothing. tools/page/ holds what it is made of: page.html, page.js,
and uPlot, which draws (https://github.com/leeoniya/uPlot, version 1.6.32, MIT license), as its npm
package has it. SHA-256 of uPlot.iife.min.js:
19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f
The package's integrity:
sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==
"""

import base64
import contextlib
import errno
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

import numpy as np
import yaml

from steady.checkpoints.sealed import atomic_write
from steady.watch.goodput import KINDS, seconds_so_far
from steady.watch.report import describe_event, report
from steady.watch.sinks import MOST_RANKS, PHASES
from steady.watch.slowdowns import worth_saying

PARTS = Path(__file__).parent / "page"
PORT = 8265  # where --watch serves, or the next free one
POINTS, CELLS = 2000, 300  # most points of a line and columns of a heat map, of all runs together
MOST_ROWS = 1 << 15  # of a table in memory, and as many that are not grouped yet
NUMBERS = 60_000  # most of them in a table: of many columns it has fewer rows
MOST_EVENTS, MOST_SAMPLES, MOST_TEXT = 1000, 40, 500
LINES = ("step", "train/tokens", "goodput/wall_s", "train/loss", "train/learning_rate",
         "train/grad_norm", "perf/step_ms", *(f"perf/{name}_ms" for name in PHASES),
         "perf/tokens_per_second", "perf/mfu", "memory/host_rss_gb", "memory/workers_rss_gb",
         "memory/allocated_gb", "memory/reserved_gb", "memory/peak_gb")
SPREAD = {"train/loss", "train/grad_norm"}  # shown with the least and the greatest of each point
EXTREMES = dict.fromkeys(("step", "train/tokens", "goodput/wall_s"), np.fmax)  # not the means
EXTREMES |= {f"{name} low": np.fmin for name in SPREAD}
EXTREMES |= {f"{name} high": np.fmax for name in SPREAD}
HEAT = {"layers": "health/update_ratio/", "ranks": "rank "}  # heat map → prefix of its columns


# --- a run -----------------------------------------------------------------------------------


class Table:
    """Columns of numbers by name, NaN where a row has none. Of many rows, groups become one row."""

    def __init__(self, drawn):
        self.drawn = drawn  # (name) → whether a column is kept
        self.columns, self.rows, self.new = {"step": array("d")}, 0, []  # new: not in columns yet
        self.group, self.grouped = 1, 0  # rows that become one; how many rows are such groups

    def add(self, row: dict):
        self.new.append(row)
        if len(self.new) == 64:
            self.flush()

    def flush(self):
        """New rows into columns, many at once: a tenth of the time of one after another."""
        names = [name for name in dict.fromkeys(itertools.chain(*self.new)) if self.drawn(name)]
        found = {name: numbers([row.get(name) for row in self.new]) for name in names}
        for name in SPREAD & found.keys():
            found |= {f"{name} low": found[name], f"{name} high": found[name]}
        for name in found.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * self.rows
        nothing = np.full(len(self.new), math.nan)
        for name, column in self.columns.items():
            column.frombytes(found.get(name, nothing).tobytes())
        self.rows += len(self.new)
        self.new = []
        if self.rows >= 2 * MOST_ROWS:
            self.shrink()

    def shrink(self):
        """Group the newest rows as the older ones, and all of them by twos if they are too many."""
        starts = np.r_[: self.grouped, self.grouped : self.rows : self.group]
        if len(starts) > MOST_ROWS:
            starts, self.group = starts[::2], 2 * self.group
        self.columns = {name: array("d", values.tobytes())
                        for name, values in by_group(self.columns, starts).items()}
        self.rows = self.grouped = len(starts)

    def thin(self, most: int, prefixes=("",)) -> dict:
        """{name: means of at most `most` groups of rows}, {name + " low" and " high"}: extremes.

        Of the columns whose names begin with one of these prefixes, and of the steps.
        """
        self.flush()
        if not self.rows:
            return {}
        if self.grouped:
            self.shrink()
        names = [name for name in self.columns if name == "step" or name.startswith(prefixes)]
        most = max(1, min(most, NUMBERS // len(names)))
        starts = np.unique(np.linspace(0, self.rows, most, endpoint=False).astype(int))
        if not self.grouped and len(starts) == self.rows:
            names = [name for name in names if not name.endswith((" low", " high"))]
        out = by_group({name: self.columns[name] for name in names}, starts)
        return {name: [short(x) for x in values.tolist()] for name, values in out.items()
                if name == "step" or np.isfinite(values).any()}


def by_group(columns: dict[str, array], starts: np.ndarray) -> dict[str, np.ndarray]:
    """Means of the rows from each start to the next; of steps the newest, of extremes those."""
    out = {}
    for name, column in columns.items():
        values = np.array(column)
        if name in EXTREMES:
            out[name] = EXTREMES[name].reduceat(values, starts)
            continue
        known = np.add.reduceat(np.isfinite(values), starts)
        with np.errstate(invalid="ignore"):
            out[name] = np.add.reduceat(np.nan_to_num(values), starts) / known
    return out


def numbers(values: list) -> np.ndarray:
    """NaN where it is none, or too large to draw."""
    try:
        out = np.array(values, dtype=float)  # None is NaN
    except (TypeError, ValueError, OverflowError):  # text, a list, an integer of 400 digits
        out = np.array([number(value) for value in values])
    return np.where(np.abs(out) < 1e300, out, math.nan)


def number(value) -> float:
    is_number = isinstance(value, (int, float)) and abs(value) < 1e300
    return float(value) if is_number else math.nan


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
        self.processes, self.samples, self.told_at = [], [], []

    def add(self, row: dict):
        if "perf/step_ms" in row:
            self.logs.add(log_columns(row))
        if "val/loss" in row:
            self.evaluations.add(row)
        if "sample" in row:
            self.samples.append({"step": row["step"], "text": row["sample"][:2000]})
        if "hang" in row or "runs_out" in row:
            self.told_at.append(row)
        add_seconds(self.processes, row)

    def data(self, told: dict, runs: int = 1) -> dict:
        """All of it, of one of so many runs; told: its report."""
        config, notes = read_config(Path(told["run"]) / "config.yaml")
        logs, evaluations, processes = self.logs, self.evaluations, self.processes
        heat = {title: logs.thin(CELLS // runs, (prefix,)) for title, prefix in HEAT.items()}
        every = max(1, math.ceil(len(self.samples) / MOST_SAMPLES))
        return dict(
            name=told["run"],
            step=told["step"],
            max_steps=config.get("max_steps", ""),
            verdict=[cut(line) for line in told["verdict"][:MOST_EVENTS]],
            figures=told["figures"],
            processes=[{k: round(v, 3) for k, v in p.items() if k != "so far"} for p in processes],
            events=events_of(told, processes, self.told_at),
            logs=logs.thin(POINTS // runs, LINES),
            evaluations=evaluations.thin(POINTS // runs),
            heat={title: {name.removeprefix(HEAT[title]): values for name, values in table.items()}
                  for title, table in heat.items() if len(table) > 2},
            samples=self.samples[::-1][::every][::-1],
            config=config,
            notes=notes,
        )


def log_columns(row: dict) -> dict:
    """A row with a column for each rank; no times of the first step, which starts a process."""
    if "perf/startup_s" in row:
        return {k: v for k, v in row.items() if not k.startswith("perf/")}
    ranks = row.get("ranks_ms", ())[:MOST_RANKS]
    return row | {f"rank {i}": ms for i, ms in enumerate(ranks)} if ranks else row


def add_seconds(processes: list[dict], row: dict):
    """Add the seconds by kind since the row before to the newest process, or begin another.

    What a crash cost is known to the process that follows, and counted for the one that crashed.
    """
    now = seconds_so_far([row])
    if not now:
        return
    nothing = dict.fromkeys(KINDS, 0.0)
    before = processes[-1]["so far"] if processes else nothing
    spent = {kind: max(0.0, now[kind] - before[kind]) for kind in KINDS}
    if not processes and spent["lost"]:  # of a process that crashed before its first checkpoint
        processes.append(nothing | {"step": 0})
    if not processes or "perf/startup_s" in row:
        if processes:
            processes[-1]["lost"] += spent["lost"]
            spent["lost"] = 0.0
        processes.append(nothing | {"step": row["step"]})
    for kind, seconds in spent.items():
        processes[-1][kind] += seconds
    processes[-1]["so far"] = now


def events_of(told: dict, processes: list[dict], told_at: list[dict]) -> list[dict]:
    """[{kind, step, until, text}] of what happened, in order of steps.

    told_at: rows about a rank that hung, or a resource that runs out.
    """
    out = [dict(kind="slow-down", step=event.since, until=event.ended,
                text=describe_event(event)) for event in told["slowdowns"] if worth_saying(event)]
    out += [dict(kind=found.code, step=found.since, text=str(found)) for found in told["training"]]
    for row in told["anomalies"]:
        text = f"{row['anomaly']} on rank {row.get('rank', 0)}"
        value, median = (number(row.get(name)) for name in ("value", "median"))
        if median > 0:
            text += f": {value:.4g}, the median is {median:.4g}"
        if row.get("first_bad_layer"):
            text += f"; first layer whose output is not finite: {row['first_bad_layer']}"
        out.append(dict(kind="anomaly", step=row["step"], text=text))
    for before, process in itertools.pairwise(processes):
        text = (f"restart or rollback: {before['lost']:.3g} s of repeated steps lost, "
                f"{process['startup']:.3g} s to start up")
        out.append(dict(kind="restart", step=process["step"] - 1, text=text))
    for row in told_at:
        kind = "no progress" if "hang" in row else "runs out"
        out.append(dict(kind=kind, step=row["step"], text=row.get("hang") or row["runs_out"]))
    out = [event | {"text": cut(event["text"])} for event in out]
    left_out = len(out) - MOST_EVENTS
    out = sorted(out, key=lambda e: (e["kind"] == "anomaly", e["step"]))[:MOST_EVENTS]
    if left_out > 0:
        text = f"and {left_out} more anomalies, which the page leaves out"
        out.append(dict(kind="anomaly", step=told["step"], text=text))
    return sorted(out, key=lambda e: e["step"])


def read_config(path: Path) -> tuple[dict, dict]:
    """(options as text, notes above them) of a config.yaml; both empty where it cannot be read."""
    try:
        text = path.read_text("utf-8", errors="replace")
        values = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, RecursionError, ValueError):
        return {}, {}
    notes = [line[2:].partition(": ") for line in text.splitlines() if line.startswith("# ")]
    options = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        items = value if isinstance(value, list) else [value]
        if not any(isinstance(item, (dict, list)) for item in items):  # links could make it huge
            options[cut(name)] = cut(" ".join("" if i is None else cut(i) for i in items))
    return options, {cut(name): cut(value) for name, _, value in notes}


def cut(value) -> str:
    """As text, which a long one loses the end of."""
    text = hex(value) if isinstance(value, int) and abs(value) > 1 << 64 else str(value)
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + "…"


# --- the page --------------------------------------------------------------------------------


def page_data(reports: list[dict], charts: list[Charts]) -> dict:
    runs = [each.data(told, len(reports)) for told, each in zip(reports, charts, strict=True)]
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
    parts = {
        "{{digest}}": digest,
        "{{style}}": (PARTS / "uPlot.min.css").read_text("utf-8"),
        "{{script}}": script,
        "{{data}}": as_json(data).replace("<", "\\u003c"),  # ends no element, begins no comment
    }
    out = (PARTS / "page.html").read_text("utf-8")
    for mark, text in parts.items():
        before, after = out.split(mark)
        out = before + text + after
    return out


def write_page(reports: list[dict], charts: list[Charts], file: Path) -> str:
    """What was written, as a line. Raises OSError, also if something that is no page is there."""
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file() or not is_page(file)):
        raise FileExistsError(errno.EEXIST, "exists and is not a page; choose another name")
    text = page(page_data(reports, charts))
    with atomic_write(file) as draft:
        draft.write_text(text, "utf-8")
    return f"page    {file} ({len(text.encode()) / 1e3:.0f} kB)"


def is_page(file: Path) -> bool:
    with open(file, "rb") as f:
        return f.read(15) in (b"", b"<!doctype html>")


# --- a run that goes on ----------------------------------------------------------------------


class Watched:
    """The newest data of runs, read again once they have changed."""

    def __init__(self, run_dirs: list[Path]):
        self.run_dirs, self.seen, self.data = run_dirs, None, {}
        self.lock = threading.Lock()  # each request has a thread: one of them reads the files

    def renew(self) -> dict:
        with self.lock:
            return self.renewed()

    def renewed(self) -> dict:
        began = time.monotonic()
        now = [(path / "metrics.jsonl").stat().st_size for path in self.run_dirs]
        if now != self.seen:
            charts = [Charts() for _ in self.run_dirs]
            reports = [report(path, each.add)
                       for path, each in zip(self.run_dirs, charts, strict=True)]
            self.data, self.seen = page_data(reports, charts), now
            self.data["again_s"] = max(3.0, 20 * (time.monotonic() - began))  # 5 % of a core
        return self.data


def make_server(run_dirs: list[Path]) -> ThreadingHTTPServer:
    """Serves the page and its data on 127.0.0.1."""
    watched = Watched(run_dirs)
    watched.renew()

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
                data = watched.renew()
            except (OSError, KeyError, TypeError, ValueError) as e:
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
