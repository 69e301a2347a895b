"""Where time goes: that of steps by phase, and that of a run, over all processes that worked on it.

By the host's clock, which only sees when work was queued on a GPU, and on a GPU by events.
"""

import itertools
import time
from collections import deque

import torch

from steady.watch.proc import process_age_seconds
from steady.watch.sinks import OUTSIDE_PHASES, OWN_PHASES, PHASES, STEP_PHASES

WINDOW = 100  # newest steps, at most, that median and 95th percentile are of
KINDS = ("startup", "data", "training", *OUTSIDE_PHASES, "lost")
OUTSIDE = frozenset(OUTSIDE_PHASES)
COLUMNS = {f"goodput/{kind}" for kind in (*KINDS, "wall_s")}


class Clock:
    """Times phases and steps from one log to the next.

    current, since: the phase now, and the time.perf_counter() at which it began. by_phase: whether
    phases are to be reported, for which a GPU is sampled.
    """

    def __init__(self, device: torch.device, by_phase: bool):
        self.device, self.is_cpu = device, device.type == "cpu"
        self.current, self.since = "other", time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the last log
        self.step_began, self.outside_seconds = self.since, 0.0  # outside: since step_began
        self.window_ms = deque(maxlen=WINDOW)  # of the newest steps since the last log
        self.events = DeviceTimes() if device.type == "cuda" and by_phase else None

    def phase(self, name: str) -> str:
        """Begin the phase `name`; returns the phase that this ends."""
        if not self.is_cpu and name in OUTSIDE and name != self.current:
            torch.accelerator.synchronize(self.device)  # what is still queued belongs to the steps
        now, ended = time.perf_counter(), self.current
        took = now - self.since
        self.seconds[ended] += took
        if ended in OUTSIDE:
            self.outside_seconds += took
        self.current, self.since = name, now
        if self.events:
            self.events.mark(name)
        return ended

    def end_step(self):
        now = time.perf_counter()
        self.window_ms.append((now - self.step_began - self.outside_seconds) * 1e3)
        self.step_began, self.outside_seconds = now, 0.0
        if self.events:
            self.events.end()

    def own_ms(self, steps: int) -> list[float]:
        """ms per step of this rank's own work by phase, without waiting for other ranks."""
        self.phase(self.current)
        if self.events:
            mean = self.events.means()
            return [mean.get(name, 0.0) for name in OWN_PHASES]
        return [self.seconds[name] / steps * 1e3 for name in OWN_PHASES]

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call, on the host's clock."""
        self.phase(self.current)
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def take_steps(self, ms: dict[str, float]) -> tuple[dict[str, float], list[float]]:
        """(ms per step in each phase, ms of the newest steps); ms: what the host's clock says."""
        window = list(self.window_ms)
        self.window_ms.clear()
        if self.events:
            ms = ms | dict.fromkeys(STEP_PHASES, 0.0) | self.events.means()
            window = self.events.take_steps()
        return ms, window


class DeviceTimes:
    """Time by phase on a GPU, from CUDA events on sampled steps, read once the GPU has passed them.

    Nothing waits for them. A step takes 3 events for each of its micro-batches.
    """

    def __init__(self):
        self.open = None  # [(phase, event at its start)] of the step being sampled
        self.done = deque()  # such lists, closed by a last event
        self.steps = []  # {phase: ms} of the steps read since take_steps

    def begin(self, phase: str):
        self.open = []
        self.mark(phase)

    def mark(self, phase: str):
        if phase in OUTSIDE:  # not a plain step: do not sample it
            self.open = None
        if self.open is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.open.append((phase, event))

    def end(self):
        if self.open:
            self.mark("end")
            self.done.append(self.open)
        self.open = None

    def means(self) -> dict[str, float]:
        """Mean ms by phase over the steps read since take_steps."""
        while self.done and self.done[0][-1][1].query():
            marks, ms = self.done.popleft(), {}
            for (phase, event), (_, following) in itertools.pairwise(marks):
                ms[phase] = ms.get(phase, 0.0) + event.elapsed_time(following)
            self.steps.append(ms)
        names = {name for ms in self.steps for name in ms}
        return {name: sum(ms.get(name, 0.0) for ms in self.steps) / len(self.steps)
                for name in names}

    def take_steps(self) -> list[float]:
        """ms of each step read since the last call."""
        taken, self.steps = self.steps, []
        return [sum(ms.values()) for ms in taken]


class Goodput:
    """Seconds of wall time since the run began, by kind, continued from process to process.

    "startup" includes the first step of each process, "training" all other phases of a step but
    "data"; "lost" is the time of steps that had to be repeated. kept, dropped: rows as in Sinks.
    """

    accounted = 0.0  # age of this process when its previous Goodput ended, as before a rollback

    def __init__(self, kept: list[dict], dropped: list[dict]):
        self.seconds = dict.fromkeys(KINDS, 0.0) | seconds_so_far(kept)
        with_lost = seconds_so_far(dropped)
        if with_lost:
            self.seconds["lost"] += sum(with_lost.values()) - sum(self.seconds.values())
        self.startup = 0.0  # of this process
        self.add_startup(max(0.0, process_age_seconds() - Goodput.accounted))

    def add_startup(self, seconds: float):
        self.startup += seconds
        self.seconds["startup"] += seconds

    def add(self, seconds: dict[str, float]):
        """Seconds by phase since the last call."""
        for phase, s in seconds.items():
            self.seconds[phase if phase in KINDS else "training"] += s

    def row(self) -> dict[str, float]:
        wall = sum(self.seconds.values())
        shares = {f"goodput/{kind}": s / wall for kind, s in self.seconds.items()}
        return shares | {"goodput/wall_s": wall}

    def close(self):
        Goodput.accounted = process_age_seconds()


def seconds_so_far(rows: list[dict]) -> dict[str, float]:
    """Seconds by kind up to the newest of these rows that has them; {} if none has."""
    for row in reversed(rows):
        row = row.get("end", row)
        if row.keys() >= COLUMNS:
            return {kind: row[f"goodput/{kind}"] * row["goodput/wall_s"] for kind in KINDS}
    return {}
