"""Where metrics go: metrics.jsonl, TensorBoard. Also the slowest rank, and numbers as text."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from steady.watch import wandb_sink

STEP_PHASES = ("data", "forward", "backward", "waiting", "optimizer", "other")
OWN_PHASES = tuple(name for name in STEP_PHASES if name != "waiting")  # work of this rank itself
OUTSIDE_PHASES = ("logging", "evaluation", "checkpoint")  # between steps, not part of any
PHASES = STEP_PHASES + OUTSIDE_PHASES

SAY_SECONDS = 2.0  # that a message waits for whoever reads stderr


class Sinks:
    """metrics.jsonl, TensorBoard, Weights & Biases. A sink that fails is given up with one warning.

    out_dir: None on ranks that write nothing. kept, dropped: the newest rows of a metrics.jsonl
    that is continued after start_step, and the rows of later steps that were cut off.
    """

    def __init__(self, cfg, out_dir: Path | None, start_step: int):
        self.kept, self.dropped, self.open = [], [], {}
        self.evaluated = set()  # metrics of the start_step, where a killed process has left them
        if not out_dir:
            return
        file, self.kept, self.dropped = open_metrics(out_dir / "metrics.jsonl", start_step)
        self.open["metrics.jsonl"] = file
        for row in self.kept:
            if row["step"] == start_step:
                self.evaluated.update((start_step, name) for name in row if name[:4] == "val/")
        if cfg.tensorboard:
            folder = out_dir / "tensorboard"
            if cfg.tensorboard_dir:  # maybe of several runs
                name = f"{out_dir.resolve().name}-{wandb_sink.run_id(out_dir)[:6]}".rstrip("-")
                folder = Path(cfg.tensorboard_dir) / name
            self.open["TensorBoard"] = TensorBoard(folder, start_step + 1,
                                                   cfg.tensorboard_flush_secs)
        if cfg.wandb:
            self.open["W&B"] = wandb_sink.start(out_dir, dataclasses.asdict(cfg))

    def write(self, step: int, row: dict):
        step, row = plain(step), {str(name): plain(value) for name, value in row.items()}
        row = {name: value for name, value in row.items() if (step, name) not in self.evaluated}
        if not row:  # as of an evaluation without a target
            return
        # JSON has no NaN or infinity; they are written as null
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                  for k, v in row.items()}
        line = ENCODER.encode({"step": step, **finite}) + "\n"
        self.use("metrics.jsonl", lambda file: file.write(line))
        self.use("TensorBoard", lambda board: board.write(step, row))

    def close(self):
        """All but metrics.jsonl, to which the last sample is still to come."""
        self.use("TensorBoard", TensorBoard.close)
        self.use("W&B", wandb_sink.finish)
        for name in "TensorBoard", "W&B":
            self.open.pop(name, None)

    def use(self, name: str, do):
        """Call `do` with this sink, if it is open; gives it up where that fails."""
        try:
            if name in self.open:
                do(self.open[name])
        except Exception as e:  # any: TensorBoard's thread passes on whatever it met
            del self.open[name]
            print(f"warning: {name} disabled after a write error; training continues: {e}",
                  file=sys.stderr, flush=True)


TAIL_BYTES = 1 << 18  # read of an old metrics.jsonl on resume: some hundred rows


def open_metrics(path: Path, start_step: int) -> tuple:
    """(metrics.jsonl to append to, its newest rows, the rows that were cut off).

    Rows after start_step are cut off, since those steps are repeated, and so is a torn last row.
    """
    path.touch()
    size, length = path.stat().st_size, TAIL_BYTES
    while True:
        rows = list(read_rows(path, max(0, size - length)))
        if length >= size or rows and rows[0][1]["step"] <= start_step:
            break
        length *= 2
    kept = [(end, row) for end, row in rows if row["step"] <= start_step]
    os.truncate(path, kept[-1][0] if kept else 0)
    dropped = [row for _, row in rows if row["step"] > start_step]
    file = open(path, "a", buffering=1)  # each row is written as a whole
    for row in dropped:
        if "hang" in row:  # why there was a restart
            file.write(json.dumps(row | {"step": start_step}) + "\n")
    return file, [row for _, row in kept], dropped


def read_rows(path: Path, start: int = 0) -> Iterator[tuple[int, dict]]:
    """(byte at which it ends, row) of each row of a metrics.jsonl, from byte `start` on.

    Without the row that `start` falls into and without the torn last row of a killed process.
    """
    with open(path, "rb") as file:
        file.seek(start)
        end = start + (len(file.readline()) if start else 0)
        for line in file:
            end += len(line)
            with contextlib.suppress(ValueError, RecursionError):
                row = known_types(DECODER.decode(line.decode()))
                if line.endswith(b"\n") and row:
                    yield end, row


ENCODER = json.JSONEncoder(default=str)
DECODER = json.JSONDecoder(parse_constant=lambda name: None)  # NaN, inf
NESTED = dict(end=dict, order=dict, evaluated=dict, profile=dict, ranks_ms=list, anomaly=str,
              runs_out=str, hang=str, sample=str, busiest_thread=str, trace=str, positions=list,
              value=(int, float), median=(int, float))


def known_types(row) -> dict | None:
    """A row without the values that have another type than this program writes, since a fork may
    log what it likes. None for what is no row."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    if not 0 <= row["step"] < 1 << 53:  # what a float can count to
        return None
    if isinstance(row.get("end"), dict):
        row["end"] = {k: v for k, v in row["end"].items() if has_known_type(k, v)}
    return {k: v for k, v in row.items() if has_known_type(k, v)}


def has_known_type(name: str, value) -> bool:
    if "/" not in name:
        return isinstance(value, NESTED.get(name, object))
    if value is None:
        return not name.startswith(("perf/", "goodput/"))
    return type(value) in (int, float, bool) and abs(value) < 1e100


class TensorBoard:
    """A SummaryWriter that continues an earlier process's.

    Opened at the first row: importing it costs 0.2 s, and its thread must not be there when loader
    processes fork.
    """

    def __init__(self, folder: Path, first_step: int, flush_secs: int):
        self.folder, self.first_step, self.flush_secs = folder, first_step, flush_secs
        self.writer = None

    def open(self):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = print_thread_error
        put_event_files_in_order(self.folder)
        # With the default queue of 10 a slow disk blocks training. purge_step hides what an
        # interrupted run wrote after the checkpoint that this one started from.
        self.writer = SummaryWriter(self.folder, purge_step=self.first_step, max_queue=10_000,
                                    flush_secs=self.flush_secs)

    def write(self, step: int, row: dict):
        if numbers := wandb_sink.scalars(row):
            if not self.writer:
                self.open()
            from tensorboard.compat.proto.summary_pb2 import Summary

            # all of them in one event: add_scalar for each takes three times as long
            values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
            self.writer.file_writer.add_summary(Summary(value=values), step)
        if "sample" in row and self.writer:
            self.writer.add_text("samples", textwrap.indent(str(row["sample"]), "    "), step)

    def close(self):
        if self.writer:
            self.writer.close()


def print_thread_error(error, plain=threading.excepthook):
    """Unless it is of a thread of TensorBoard, which passes it on to Sinks, too."""
    if not type(error.thread).__module__.startswith("tensorboard."):
        plain(error)


def put_event_files_in_order(folder: Path):
    """Make event files sort before one created now: TensorBoard reads them by the Unix time in
    their names, which is no later after a quick restart or when the clock was set back."""
    now = int(time.time())
    for old in folder.glob("events.out.tfevents.*.*"):
        second, rest = old.name.split(".", 4)[3:]
        if second.isdecimal() and int(second) >= now:
            old.rename(folder / f"events.out.tfevents.{now - 1:010d}.{second}.{rest}")


def slowest_rank(own_ms) -> dict[str, float]:
    """Which rank has the most work of its own, how much more than the others, in which phase.

    own_ms: [OWN_PHASES, ranks]. {} for a single rank, and where the GPU of one has not got to the
    end of a step that is timed, as with a log at each step.
    """
    if len(own_ms[0]) == 1 or not np.any(own_ms, 0).all():
        return {}
    own_ms = np.transpose(own_ms)
    busy = own_ms.sum(1)
    slow = int(busy.argmax())
    typical = np.median(np.delete(own_ms, slow, 0), axis=0)
    return {
        "perf/slowest_rank": slow,
        "perf/slowest_rank_ratio": busy[slow] / max(1e-9, typical.sum()),
        "perf/slowest_rank_phase": int((own_ms[slow] - typical).argmax()),
        "ranks_ms": [round(float(ms), 3) for ms in busy],
    }


def plain(value):
    """A number instead of a NumPy or torch scalar, nested lists instead of an array."""
    if not hasattr(value, "tolist"):
        return value
    value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def quantile(values, share: float) -> float:
    """The value that this share of them lies below; for short lists 10 times as fast as NumPy's."""
    return sorted(values)[int(share * len(values))]


def in_form(form: str, x: float) -> str:
    """"loss {:.4f}", 5.5 → loss 5.5000; what is too large for it in few digits: loss 1.5e+30."""
    text = form.format(x, si=si(x))
    return text if len(text) < 20 else f"{form[: form.index('{')]}{x:.4g}"


def si(x: float) -> str:
    """1234567 → 1.23M"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def duration(seconds: float) -> str:
    """3700 → 1h01m"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def say(text: str):
    """Print on stderr, from a thread that may never come back: perhaps nobody reads it."""
    thread = threading.Thread(target=lambda: print(text, file=sys.stderr, flush=True), daemon=True)
    thread.start()
    thread.join(SAY_SECONDS)
