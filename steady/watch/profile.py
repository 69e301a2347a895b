"""Which lines the training thread spends its time in: a look at it ten times a second.

A daemon thread notes the phase, the innermost line of a file that is neither torch's nor the
standard library's, and the line that called it. So time in torch counts for the line that called
it, and a backward pass for the line that waits for it. The looks of a log interval go to
metrics.jsonl; those before and after a slow-down name the lines that became longer (causes.py).

A look takes 0.05 to 0.13 ms of a core, most of it to be woken up: 0.1 % of the time. It comes late
while a call into C keeps Python's lock, but still finds the line of that call.
"""

import contextlib
import gc
import math
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from steady import private

SWITCH_SECONDS = 0.0005  # of Python work that a look may miss; Python's own 5 ms hide far more
SECONDS = 0.1  # between two looks, in the mean
HURRY = 3  # times as often at first, and while a slow-down waits for its line to be known
LEAST = 20  # looks in a row of metrics.jsonl
MOST_LINES = 12  # of a phase in a row; the others are "…"
OTHERS = "…"
MIN_LOOKS = 8  # at a phase that became longer, to say anything of its lines
TRACED_STEPS, MOST_TRACES = 3, 5
HERE = str(Path(__file__).parent)  # what measures
FOREIGN = (*(str(Path(module.__file__).parent) for module in (torch, np)), HERE, "<",
           "/tmp/torchinductor")
LIBRARY = sysconfig.get_paths()["stdlib"]


class Sampler:
    """Looks at the thread that makes it until `close`; clock: says which phase it is in."""

    def __init__(self, clock):
        self.clock, self.thread_id = clock, threading.get_ident()
        self.counts = Counter()  # of (phase, code, line, code and line of its caller)
        self.ours = {}  # code → whether its file is worth naming
        self.hurry, self.ended = True, False
        self.before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        threading.Thread(target=self.run, name="sampler", daemon=True).start()

    def run(self):
        jitter = random.Random(0).random  # steps may last as long as a pause
        while not self.ended:
            # Only where collections are off, as while training: one that begins while CPython makes
            # frame objects for this thread may let the other one run on, and then it crashes.
            if not gc.isenabled():
                self.look(sys._current_frames().get(self.thread_id))
            time.sleep(SECONDS / (HURRY if self.hurry else 1) * (0.5 + jitter()))

    def look(self, frame):
        """Count where the thread is; keeps no frame, and so none of the tensors in it."""
        inner = self.innermost(frame)
        caller = self.innermost(inner.f_back) if inner else None
        place = tuple((f.f_code, f.f_lineno) if f else None for f in (inner, caller))
        self.counts[self.clock.current, place] += 1

    def innermost(self, frame):
        """The first frame from this one outwards that is worth naming."""
        while frame:
            code = frame.f_code
            if code not in self.ours:
                self.ours[code] = worth_naming(code.co_filename)
            if self.ours[code]:
                return frame
            frame = frame.f_back
        return None

    def take(self) -> dict[str, dict[str, int]]:
        """{phase: {"FILE:LINE FUNCTION < its caller": looks}} since the last call; {} if few."""
        if self.counts.total() < LEAST:
            return {}
        taken, self.counts = self.counts, Counter()
        found = {}
        for (phase, place), n in taken.most_common():
            lines = found.setdefault(phase, {})
            name = OTHERS
            if len(lines) < MOST_LINES and place[0]:
                name = " < ".join(f"{short(code.co_filename)}:{line} {function_name(code)}"
                                  for code, line in filter(None, place))
            lines[name] = lines.get(name, 0) + n
        return found

    def close(self):
        self.ended = True  # the thread sees it when it wakes up
        sys.setswitchinterval(self.before)


def worth_naming(file: str) -> bool:
    """Whether it is neither torch's nor the standard library's."""
    library = file.startswith(LIBRARY) and "-packages" not in file
    return not (library or file.startswith(FOREIGN))


ROOT = Path(__file__).parents[2]


def function_name(code) -> str:
    """With its class, which Python knows since 3.11."""
    return getattr(code, "co_qualname", code.co_name).replace("<locals>.", "").replace(" ", "")


def short(file: str) -> str:
    """A path as it is shown: from the repository, or its last two parts."""
    path = Path(file)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:]))


# --- tracing ---------------------------------------------------------------------------------


class Tracer:
    """A trace of three steps, by torch.profiler: at the first slow-down that is said, and on
    SIGUSR2. traces/step_N.json of the run directory; https://ui.perfetto.dev opens it.

    Records steps from the one after `wanted` is set; `step` is called after each while `busy`.
    monitor: gives the phase, and writes where the trace is.
    """

    def __init__(self, monitor, out_dir: Path):
        self.monitor, self.folder = monitor, out_dir / "traces"
        self.wanted = self.warned = False
        self.profiler, self.first, self.handler = None, 0, None
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to stderr
        if threading.current_thread() is threading.main_thread():
            self.handler = signal.signal(signal.SIGUSR2, self.want)

    def want(self, *_):
        self.wanted = True

    def on_slowdown(self):
        """The first of a process is traced."""
        self.wanted, self.warned = self.wanted or not self.warned, True

    @property
    def busy(self) -> bool:
        return self.wanted or self.profiler is not None

    def step(self, step: int):
        """Begin or end a trace."""
        previous = self.monitor.phase("logging")
        if self.profiler is None:
            self.wanted = False
            few = len(list(self.folder.glob("step_*.json"))) < MOST_TRACES
            if few and not private.is_profiling():  # a fork may profile by itself
                activities = [ProfilerActivity.CPU]
                activities += [ProfilerActivity.CUDA] * (self.monitor.device.type == "cuda")
                self.profiler, self.first = profile(activities=activities), step + 1
                self.profiler.start()
        elif step >= self.first + TRACED_STEPS - 1:
            profiler, self.profiler = self.profiler, None
            profiler.stop()
            file = self.folder / f"step_{self.first}.json"
            with contextlib.suppress(OSError, RuntimeError):  # a full disk: training matters more
                self.folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(file))
                print(f"step {step}: a trace of {TRACED_STEPS} steps is in {file}", flush=True)
                self.monitor.write(step, {"trace": str(file)})
        self.monitor.phase(previous)

    def close(self):
        if self.profiler:
            self.profiler.stop()
        if self.handler is not None:
            signal.signal(signal.SIGUSR2, self.handler)


# --- comparing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line that takes longer than before. ms, error: per step, and half the 95 % interval."""

    phase: str
    place: str  # "FILE:LINE FUNCTION", and "< FILE:LINE FUNCTION" of its caller
    ms: float
    error: float


def add_profiles(rows) -> dict[str, dict[str, int]]:
    """The looks of several rows, or points, together; without what `take` has not written."""
    out = {}
    for row in rows:
        for phase, lines in row.get("profile", {}).items():
            sums = out.setdefault(phase, {})
            for name, n in lines.items() if isinstance(lines, dict) else ():
                if type(n) is int and 0 < n < 1 << 53:
                    sums[name] = sums.get(name, 0) + n
    return out


def longer_lines(phase: str, ms: list[float], looks: list[dict[str, int]],
                 factor: float) -> list[Line]:
    """The functions that take longer than `factor` times what they took, the largest first.

    ms, looks: of the phase in a step, before and after. Of each function the line that has grown
    most. A look is a draw: the interval is that of a binomial share; that of a phase which was too
    short to be met often is all of it.
    """
    totals = [sum(lines.values()) for lines in looks]
    if totals[1] < MIN_LOOKS:
        return []
    functions = {}  # function → lines in it
    for name in {**looks[0], **looks[1]}:
        if name != OTHERS:
            functions.setdefault(function_of(name), []).append(name)
    found = []
    for names in functions.values():
        shares = [[lines.get(name, 0) / max(1, total) for name in names]
                  for lines, total in zip(looks, totals, strict=True)]
        old, new = (t * sum(each) for t, each in zip(ms, shares, strict=True))
        errors = [2 * t * math.sqrt((sum(each) * (1 - sum(each)) + 1 / n) / n) if n else t
                  for t, each, n in zip(ms, shares, totals, strict=True)]
        growth = [ms[1] * b - ms[0] * a for a, b in zip(*shares, strict=True)]
        place = names[growth.index(max(growth))]
        error = math.hypot(errors[1], factor * min(ms[0], errors[0]))
        found.append(Line(phase, place, new - factor * old, error))
    return sorted(found, key=lambda line: -line.ms)


def function_of(name: str) -> tuple[str, str]:
    """(file, function) of a line as `Sampler.take` writes it."""
    place, _, function = name.partition(" < ")[0].rpartition(" ")
    return place.rpartition(":")[0], function
