"""Time by phase on a GPU: a host clock only sees when work was queued, not when it ran."""

import itertools
from collections import deque

import torch

from steady.telemetry import OUTSIDE_PHASES


class DeviceTimes:
    """Time by phase on a GPU, from CUDA events on sampled steps, read once the GPU has passed them.

    Nothing waits for them. The pool of events has a fixed size; a step that finds it empty is not
    sampled.
    """

    def __init__(self, make_event=lambda: torch.cuda.Event(enable_timing=True), size: int = 2048):
        self.make_event, self.size, self.free, self.made = make_event, size, [], 0
        self.open = None  # [(phase, event at its start)] of the step being sampled
        self.done = deque()  # such lists, closed by a last event
        self.steps = []  # {phase: ms} of the steps read since take_steps

    def event(self):
        if not self.free and self.made < self.size:
            self.free, self.made = [self.make_event() for _ in range(64)], self.made + 64
        if not self.free:
            return None
        event = self.free.pop()
        event.record()
        return event

    def begin(self, phase: str):
        event = self.event()
        self.open = [(phase, event)] if event else None

    def mark(self, phase: str):
        if self.open is None:
            return
        event = self.event()
        if phase in OUTSIDE_PHASES or event is None:  # not a plain step: do not sample it
            self.free += [e for _, e in self.open] + [event] * (event is not None)
            self.open = None
        else:
            self.open.append((phase, event))

    def end(self):
        if self.open:
            self.mark("end")
        if self.open:
            self.done.append(self.open)
        self.open = None

    def means(self) -> dict[str, float]:
        """Mean ms by phase over the steps read since take_steps."""
        while self.done and self.done[0][-1][1].query():
            marks, ms = self.done.popleft(), {}
            for (phase, event), (_, following) in itertools.pairwise(marks):
                ms[phase] = ms.get(phase, 0.0) + event.elapsed_time(following)
            self.free += [event for _, event in marks]
            self.steps.append(ms)
        names = {name for ms in self.steps for name in ms}
        return {name: sum(ms.get(name, 0.0) for ms in self.steps) / len(self.steps)
                for name in names}

    def take_steps(self) -> list[float]:
        """ms of each step read since the last call."""
        taken, self.steps = self.steps, []
        return [sum(ms.values()) for ms in taken]
