"""Time by phase, from one log to the next: by the host's clock, and on a GPU by CUDA events."""

import itertools
import time
from collections import defaultdict, deque

import torch

from steady.watch.history import OUTSIDE_PHASES, OWN_PHASES, PHASES, STEP_PHASES, quantile

WINDOW = 100  # newest steps, at most, for the median and the 95th percentile


class Clock:
    """Times phases and steps. current, since: the phase now, and the perf_counter at its start.

    name: the loop's, may be a part of "other". sampled: on a GPU also time some steps by events.
    """

    def __init__(self, device: torch.device, sampled: bool):
        self.device, self.is_cpu = device, device.type == "cpu"
        self.name, self.current, self.since = "other", "other", time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)  # by name, since the last log
        self.step_seconds, self.usual_ms = 0.0, float("inf")  # of this step; the last log's median
        self.window_ms = deque(maxlen=WINDOW)
        self.events = DeviceTimes() if device.type == "cuda" and sampled else None

    def phase(self, name: str) -> str:
        """Begin a phase, one of PHASES or a part of "other"; returns the phase that this ends."""
        if not self.is_cpu and name in OUTSIDE_PHASES and name != self.current:
            torch.accelerator.synchronize(self.device)  # queued work belongs to the steps
        now, ended = time.perf_counter(), self.name
        took = now - self.since
        self.seconds[ended] = self.seconds.get(ended, 0.0) + took
        if ended not in OUTSIDE_PHASES:
            self.step_seconds += took
        self.name, self.since = str(name), now
        self.current = name if name in PHASES else "other"
        if self.events:
            self.events.mark(self.name)
        return ended

    def end_step(self):
        self.phase(self.name)
        self.window_ms.append(self.step_seconds * 1e3)
        self.step_seconds = 0.0
        if self.events:
            self.events.end()

    def host_ms(self, steps: int) -> dict[str, float]:
        """ms per step by phase since `take`, by the host's clock."""
        self.phase(self.name)
        ms = {name: seconds / steps * 1e3 for name, seconds in self.seconds.items()}
        ms["other"] += sum(ms[name] for name in ms.keys() - {*PHASES})
        return ms

    def own_ms(self, steps: int) -> list[float]:
        """ms per step of this rank's own work by phase, without waiting for other ranks."""
        ms = self.events.means() if self.events else self.host_ms(steps)
        return [ms.get(name, 0.0) for name in OWN_PHASES]

    def take(self, steps: int) -> tuple[dict[str, float], list[float]]:
        """(ms per step by phase since the last call, ms of the newest steps)."""
        ms, window = self.host_ms(steps), [*self.window_ms]
        if window:
            window[-1] += self.step_seconds * 1e3  # it also waited for this log
            self.usual_ms = quantile(window, 0.5)
        self.seconds, self.step_seconds = dict.fromkeys(PHASES, 0.0), 0.0
        self.window_ms.clear()
        if self.events and (sampled := self.events.means()):
            ms = {name: ms[name] for name in OUTSIDE_PHASES} | sampled
            window = self.events.take()
        return ms, window


class DeviceTimes:
    """Time by phase on a GPU, from CUDA events on sampled steps, read once the GPU has passed them.

    Nothing waits for them. A step takes 3 events for each of its micro-batches.
    """

    def __init__(self):
        self.open = None  # [(phase, event at its start)] of the step being sampled
        self.done = deque()  # such lists, closed by a last event
        self.steps = []  # {phase: ms} of the steps read since take

    def begin(self, phase: str):
        self.open = []
        self.mark(phase)

    def mark(self, phase: str):
        if phase in OUTSIDE_PHASES:  # not a plain step: do not sample it
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
        """Mean ms by phase over the steps read since take; {} without any."""
        while self.done and self.done[0][-1][1].query():
            ms = defaultdict(float, dict.fromkeys(STEP_PHASES, 0.0))
            for (phase, event), (_, following) in itertools.pairwise(self.done.popleft()):
                ms[phase] += event.elapsed_time(following)
            ms["other"] += sum(ms[name] for name in ms.keys() - {*STEP_PHASES})
            self.steps.append(ms)
        names = dict.fromkeys(itertools.chain(*self.steps))
        return {name: sum(ms[name] for ms in self.steps) / len(self.steps) for name in names}

    def take(self) -> list[float]:
        """ms of each step read since the last call."""
        taken, self.steps = self.steps, []
        return [sum(ms[name] for name in STEP_PHASES) for ms in taken]
