"""Outputs of metrics: metrics.jsonl, TensorBoard, a tracker. Training needs none of them."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from pathlib import Path

from steady.watch import wandb_sink
from steady.watch.history import TAIL_BYTES, History, read_rows, seconds_of

SAY_SECONDS = 2.0  # a message waits at most this long for stderr


class Sinks:
    """A sink that fails is given up with one warning.

    history: the rows of an earlier process, up to start_step; tensorboard, tracker: see Monitor.
    """

    def __init__(self, out_dir: Path, start_step: int, tensorboard: Path | bool | None,
                 flush_secs: int = 60, tracker: tuple[str, dict] | None = None):
        self.open, self.history, self.written = {}, History(), set()
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            file, self.history, self.written = open_metrics(out_dir / "metrics.jsonl", start_step)
            self.open["metrics.jsonl"] = file
        except OSError as e:
            alert(f"warning: no metrics.jsonl, training continues: {e}")
        if tensorboard:
            folder = out_dir / "tensorboard" if tensorboard is True else tensorboard
            self.open["TensorBoard"] = TensorBoard(folder, start_step + 1, flush_secs)
        if tracker and "metrics.jsonl" in self.open:  # the tracker's process reads it
            self.open["tracker"] = wandb_sink.start(out_dir, *tracker)

    def write(self, step: int, row: dict) -> dict:
        step, row = plain(step), {str(name): plain(value) for name, value in row.items()}
        if self.history.evaluated not in (None, row.get("evaluated", self.history.evaluated)):
            self.written = set()  # the earlier process evaluated other data
        row = {name: value for name, value in row.items() if (step, name) not in self.written}
        if not row:  # for example, an evaluation without a target
            return row
        text = json.dumps({"step": step} | row | {"step": step}, default=str)
        if "NaN" in text or "Infinity" in text:  # JSON has neither: null, also within a finding
            text = json.dumps(json.loads(text, parse_constant=lambda name: None))
        self.use("metrics.jsonl", lambda file: file.write(text + "\n"))
        self.use("TensorBoard", lambda board: board.write(step, row))
        return row | {"step": step}

    def close(self):
        """Close all but metrics.jsonl: the last sample still needs it."""
        for name, close in (("TensorBoard", TensorBoard.close), ("tracker", wandb_sink.finish)):
            self.use(name, close)
            self.open.pop(name, None)

    def use(self, name: str, do):
        """Call `do` with this sink if it is open; give it up if that fails."""
        try:
            if name in self.open:
                do(self.open[name])
        except Exception as e:  # any: TensorBoard's thread passes on whatever it met
            del self.open[name]
            alert(f"warning: {name} disabled after a write error; training continues: {e}")


def say(text: str):
    """Print a line. A screen that is gone, full or of another encoding is no reason to stop."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(Exception):  # any: sys.stdout may be the program's own
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def open_metrics(path: Path, start_step: int) -> tuple:
    """(metrics.jsonl to append to, the history in it up to start_step, the evaluation there).

    Rows after start_step are cut off, since those steps are repeated, and so is a torn last row.
    """
    path.touch()
    if path.stat().st_nlink > 1:  # shared by cp -al: do not cut the other run's rows
        os.replace(shutil.copy(path, f"{path}~"), path)
    size, length = path.stat().st_size, TAIL_BYTES
    while True:
        rows = list(read_rows(path, max(0, size - length)))
        if length >= size or rows and rows[0][1]["step"] <= start_step:
            break
        length *= 2
    if 0 < size <= length and not any("about" in row or "perf/step_ms" in row for _, row in rows):
        other = path.rename(f"{path}.{time.time_ns()}")
        alert(f"warning: {path} is damaged or another program's; renamed to {other}")
        rows = []
    kept = [row for _, row in rows if row["step"] <= start_step]
    first = next((i for i, (_, row) in enumerate(rows) if row["step"] > start_step), len(rows))
    file = open(path, "a+", 1, "utf-8")  # each row is written as a whole
    kept_later = []  # rows after `first` but of earlier steps: a spike is written at its log
    for (begin, _), (end, row) in itertools.pairwise(rows[first:]):
        if row["step"] <= start_step:
            kept_later.append(os.pread(file.fileno(), end - begin, begin).decode(errors="replace"))
    os.truncate(path, rows[first - 1][0] if first else 0)
    file.writelines(kept_later)
    lost, newest, step = 0.0, start_step, max(0, start_step)  # some loops count from 0
    for row in (row for _, row in rows if row["step"] > start_step):
        lost += sum(seconds_of(row, newest).values())
        newest = row["step"] if row.get("perf/step_ms") else newest
        if "hang" in row:  # the reason for a restart
            file.write(json.dumps({"step": step, "hang": row["hang"]}) + "\n")
    if lost:
        file.write(json.dumps({"step": step, "lost_s": lost}) + "\n")
    written = {(start_step, name) for row in kept if row["step"] == start_step
               for name in row if name.startswith("val/")}  # left by a killed process
    return file, History(kept), written


class TensorBoard:
    """A SummaryWriter, opened at the first log: loaders must fork before its thread starts."""

    def __init__(self, folder: Path, first_step: int, flush_secs: int):
        self.folder, self.first_step, self.flush_secs = folder, first_step, flush_secs
        self.writer = None

    def open(self):
        from torch.utils.tensorboard import SummaryWriter

        self.excepthook, threading.excepthook = threading.excepthook, self.print_error
        put_event_files_in_order(self.folder)
        # With the default queue of 10 a slow disk blocks training. purge_step hides the steps of an
        # interrupted run after its last checkpoint.
        self.writer = SummaryWriter(self.folder, purge_step=self.first_step, max_queue=10_000,
                                    flush_secs=self.flush_secs)

    def write(self, step: int, row: dict):
        if numbers := wandb_sink.scalars(row):
            if not self.writer:
                self.open()
            from tensorboard.compat.proto.summary_pb2 import Summary

            # all values in one event: add_scalar for each takes three times as long
            values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
            self.writer.file_writer.add_summary(Summary(value=values), step)
        if "sample" in row and self.writer:
            self.writer.add_text("samples", textwrap.indent(str(row["sample"]), "    "), step)

    def print_error(self, error):
        """Print a thread's error, unless it is one of TensorBoard's: Sinks gets these as well."""
        if not type(error.thread).__module__.startswith("tensorboard."):
            self.excepthook(error)

    def close(self):
        if self.writer:
            self.writer.close()
            if threading.excepthook == self.print_error:  # unless the program has set another
                threading.excepthook = self.excepthook


def put_event_files_in_order(folder: Path):
    """Make event files sort before one created now. TensorBoard reads them by the Unix time in
    their names, equal after a quick restart, wrong if the clock changed. "~" sorts after hosts."""
    now = int(time.time())
    for old in folder.glob("events.out.tfevents.*.*"):
        second, rest = old.name.split(".", 4)[3:]
        if second.isdecimal() and int(second) >= now:
            old.rename(folder / f"events.out.tfevents.{now - 1:010d}.~{second}.{rest}")


def plain(value):
    """A number instead of a NumPy or torch scalar, nested lists instead of an array."""
    if not hasattr(value, "tolist"):
        return value
    value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def alert(text: str):
    """Print on stderr, from a thread: a full pipe may block it forever."""
    thread = threading.Thread(target=lambda: print(text, file=sys.stderr, flush=True), daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no thread left
        thread.start()
        thread.join(SAY_SECONDS)
