"""The newest logs of a run, from metrics.jsonl. Everything reported is computed from them.

The file is the only memory of the monitor: after a restart, and in `python monitor.py RUN_DIR`, its
tail gives the same history and so the same findings.
"""

import contextlib
import json
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LOGS = 512
TAIL_BYTES = 1 << 20  # of a metrics.jsonl read on a resume: 512 logs of 1 to 2 kB
STEP_PHASES = ("data", "forward", "backward", "waiting", "optimizer", "other")
OWN_PHASES = tuple(name for name in STEP_PHASES if name != "waiting")  # a rank's own work
OUTSIDE_PHASES = ("logging", "evaluation", "checkpoint")  # between steps
PHASES = STEP_PHASES + OUTSIDE_PHASES
COMPUTE = ("forward", "backward", "optimizer")
LOSSES = ("train/loss", "val/loss", "val/loss_ema")  # null in the file if not finite


class History:
    """At most 512 logs, in rows. evaluations: step → validation loss, those that can be compared.
    nonfinite: the "step" where a log interval with non-finite steps begins, its "count" of them.
    about: facts on the run from its newest process (last_step, vocab_size, …). reported: findings
    in the file. sources: "FILE:LINE" → source text. process_began: the newest process's first step.
    """

    def __init__(self, rows=()):
        self.rows, self.reported, self.evaluations = deque(maxlen=LOGS), deque(maxlen=LOGS), {}
        self.nonfinite, self.logged = deque(maxlen=100 * LOGS), math.inf  # a report thins rows only
        self.about, self.sources, self.process_began, self.evaluated = {}, {}, 0, None
        for row in rows:
            self.append(row)

    def append(self, row: dict):
        """Add a row of metrics.jsonl. Values of unexpected types are left out."""
        if not (row := checked(row)):
            return
        if "finding" in row:
            self.reported.append(row["finding"] | {"reported_at": row["step"]})
        self.about |= row.get("about", {})
        self.sources |= row.get("sources", {})
        if row.get("evaluated", self.evaluated) != self.evaluated:
            self.evaluated = row["evaluated"]
            self.evaluations.clear()  # losses of other data are not compared
        if "perf/startup_s" in row:
            self.process_began = row["step"]
        if row.get("perf/step_ms"):
            for past in self.rows, self.nonfinite:
                while past and past[-1]["step"] >= row["step"]:
                    past.pop()  # repeated after a rollback
            if row["step"] <= self.logged:  # one of this step may come before its log
                self.evaluations = {k: v for k, v in self.evaluations.items() if k <= row["step"]}
            self.rows.append(row)
            since, self.logged = min(self.logged + 1, row["step"]), row["step"]
            finite = math.isfinite(row.get("train/loss", 0.0))
            if count := max(row.get("health/nonfinite_steps", 0), not finite):
                self.nonfinite.append(dict(step=since, count=count, finite=finite))
        if "val/loss" in row:
            self.evaluations[row["step"]] = row["val/loss"]

    def last(self, name: str) -> float:
        """The value of a column in the last log; 0 if there is none."""
        return self.rows[-1].get(name, 0) if self.rows else 0

    def column(self, name: str) -> np.ndarray:
        """The values of a column, [logs]; NaN for a log without it."""
        return np.array([row.get(name, math.nan) for row in self.rows], dtype=float)


TYPES = {  # types of all values that are not numbers
    **dict.fromkeys(("busiest_thread", "anomaly", "hang", "trace", "sample", "see"), str),
    **dict.fromkeys(("positions", "datasets"), list),
    **dict.fromkeys(("about", "seconds", "order", "evaluated", "finding", "profile", "sources"),
                    dict)}


def checked(row) -> dict | None:
    """A row without a fork's values of other types; None if it is not a row."""
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < 1 << 53:
        return None
    out = {}
    for name, value in row.items():
        number = isinstance(value, (int, float)) and type(value) is not bool and abs(value) < 1e100
        if isinstance(value, TYPES[name]) if name in TYPES else number:
            out[name] = value
        elif name in LOSSES:
            out[name] = math.nan  # the loss was not finite
    return out


def seconds_of(row: dict, logged: float) -> dict[str, float]:
    """Seconds by phase that a row stands for; logged: the step of the log before it."""
    out = {"lost": row.get("lost_s", 0.0)} | row.get("seconds", {})
    if "perf/startup_s" in row:
        out["start-up"] = row["perf/startup_s"]
    elif row.get("perf/step_ms"):
        ms = {name: row[f"perf/{name}_ms"] for name in PHASES if f"perf/{name}_ms" in row}
        ms = ms or {"other": row["perf/step_ms"]}  # --monitoring off
        own = {name[6:-3]: x for name, x in row.items() if name.startswith("phase/")}
        ms["other"] = max(0.0, ms.get("other", 0.0) - sum(own.values()))
        out |= {name: max(0, row["step"] - logged) * x / 1e3 for name, x in (ms | own).items()}
    return out


def read_rows(path: Path, start: int = 0) -> Iterator[tuple[int, dict]]:
    """(byte offset of its end, row) of each row of a metrics.jsonl, from byte `start` on.

    Skips a row cut in two by `start`, and the torn last row of a killed process.
    """
    with open(path, "rb") as file:
        file.seek(start)
        end = start + (len(file.readline()) if start else 0)
        for line in file:
            end += len(line)
            with contextlib.suppress(ValueError, RecursionError):
                row = checked(json.loads(line, parse_constant=lambda name: None))  # NaN, Infinity
                if line.endswith(b"\n") and row:
                    yield end, row


def quantile(values, share: float) -> float:
    """The quantile `share`, not interpolated; for short lists 10 times NumPy's speed."""
    return sorted(values)[int(share * len(values))]
