"""The training thread's time by line: a look at its stack ten times a second.

A daemon thread notes the phase, the innermost line outside torch and the standard library, and its
caller. So time in torch counts for the line that called torch, and a backward pass for the line
waiting for it. A look costs 0.05 to 0.13 ms of a core, most of it to wake up.
"""

import functools
import gc
import linecache
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch

from steady.watch.history import COMPUTE, OWN_PHASES
from steady.watch.lines import OTHERS
from steady.watch.machine import give_back_signal, take_signal
from steady.watch.sinks import say

SECONDS = 0.1  # between two looks, in the mean
HURRY = 3  # times as often at first, and while a finding waits for its line
SWITCH_SECONDS = 5e-5  # how late a look may come while Python computes; else torch's calls hide it
MOMENT = 1e-2  # seconds that a punctual look waits at most, in the mean the usual 5 ms
LOOK = threading.Lock()  # or one sampler would restore another's interval, and a fork keep it
os.register_at_fork(before=LOOK.acquire, after_in_parent=LOOK.release, after_in_child=LOOK.release)
LEAST = 20  # looks in a row of metrics.jsonl
MOST_LINES = 12  # of a phase in one row; the rest become OTHERS
HERE, ROOT = str(Path(__file__).parent), Path(__file__).parents[2]
TORCH, NUMPY = (str(Path(module.__file__).parent) for module in (torch, np))
# code without a file of its own, and the compiler's, as in torch._inductor.runtime.cache_dir_utils
COMPILED = "<", os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor")
NAMELESS = (TORCH, HERE, str(ROOT / "monitor.py"), *COMPILED)
MODULE_CALL = torch.nn.Module.__call__.__code__  # before a program patches it
LIBRARY = sysconfig.get_paths()["stdlib"]


@contextmanager
def frame_of(thread_id: int):
    """The innermost frame of a thread, or None; before Python 3.12, with collections off.

    There a collection may begin while a frame object is made, here and in `f_back`. It lets the
    thread run on, and the object then describes a frame that has ended: a crash.
    """
    if collects := sys.version_info < (3, 12) and gc.isenabled():
        gc.disable()
    try:
        yield sys._current_frames().get(thread_id)
    finally:
        if collects:
            gc.enable()


class Sampler:
    """Looks at the thread that made it, or called `read`, until `close`. clock: knows the phase."""

    def __init__(self, clock):
        self.clock, self.thread_id = clock, threading.get_ident()
        self.counts = Counter()  # looks by (phase, ((code, line), the caller's), library)
        self.named = set()  # "FILE:LINE" of the sources already in the file
        self.hurry, self.ended = True, False
        self.has_model_phase = False  # whether the loop names the phase of its model
        threading.Thread(target=self.run, name="steady sampler", daemon=True).start()

    def run(self):
        jitter = random.Random(0).random  # steps may last as long as a pause
        while not self.ended:
            began, pause = time.perf_counter(), SECONDS * (0.5 + jitter())
            pause /= HURRY if self.hurry else 1
            time.sleep(pause)
            late = time.perf_counter() - began - pause
            # A thread keeps Python's lock for sys.getswitchinterval(), or until a function in C
            # returns. A look that late falls on the line that kept the lock. A punctual one would
            # fall on the line after it, so it waits a moment. Only then is the interval shorter.
            with LOOK:
                before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_SECONDS)
                try:
                    if late < before:
                        time.sleep(MOMENT * jitter())
                    with frame_of(self.thread_id) as frame:
                        self.look(frame)
                except Exception as e:
                    say(f"warning: slow lines will not be named, after {type(e).__name__}: {e}")
                    return
                finally:
                    frame = None  # or the tensors in it would outlive it
                    if abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:  # not changed since
                        sys.setswitchinterval(before)

    def look(self, frame):
        """Count the thread's place; keeps no frame, and so none of the tensors in it."""
        phase = self.clock.current
        self.has_model_phase |= phase == "forward"
        outer = frame if self.has_model_phase and phase not in COMPUTE else None
        while outer:  # beside the model's phases: the line that calls a model, not one within it
            frame, outer = outer.f_back if outer.f_code is MODULE_CALL else frame, outer.f_back
        inner = innermost(frame)
        caller = innermost(inner.f_back) if inner else None
        place = tuple((f.f_code, f.f_lineno) if f else None for f in (inner, caller))
        file = frame.f_code.co_filename if frame else ""
        at_log = phase == "logging" or file.startswith(HERE)  # the monitor calls json, not the loop
        library = "" if inner is frame or at_log else library_name(file)
        self.counts[phase, place, library] += 1
        spent = self.clock.step_seconds + time.perf_counter() - self.clock.since
        if phase in OWN_PHASES and not at_log and spent > 2e-3 * self.clock.usual_ms:
            self.counts["heavy steps", place, library] += 1

    def read(self, step: int) -> dict[str, dict]:
        """{"profile": {phase: {place: looks}}, "sources": {"FILE:LINE": text}} since the last call;
        {} after few looks. Place: see lines.parts_of. "heavy steps": past twice the usual time.
        """
        self.thread_id = threading.get_ident()  # the Monitor may be made in another thread
        if self.counts.total() < LEAST:
            return {}
        taken, self.counts = self.counts, Counter()
        profile, sources = defaultdict(Counter), {}
        for (phase, place, library), n in taken.most_common():
            name = OTHERS
            if len(profile[phase]) < MOST_LINES and place[0]:
                places = [self.name(code, line, sources) for code, line in filter(None, place)]
                name = " < ".join(places) + (f" | {library}" if library else "")
            profile[phase][name] += n
        return {"profile": profile, "sources": sources} if sources else {"profile": profile}

    def name(self, code, line: int, sources: dict) -> str:
        """The place of a line; adds its text to the sources if it is new."""
        line = line or code.co_firstlineno  # an instruction may have none
        where = f"{short(code.co_filename)}:{line}"
        if where not in self.named:
            self.named.add(where)
            sources[where] = linecache.getline(code.co_filename, line).strip()[:120]
        # the name with its class, since Python 3.11
        function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        return f"{where} {function.replace(' ', '')}"

    def close(self):
        self.ended = True


def innermost(frame):
    """The first frame from this one outwards that is worth naming."""
    while frame and not worth_naming(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def worth_naming(file: str) -> bool:
    """Whether a file is not part of torch, NumPy, the standard library or the monitor."""
    library = file.startswith(LIBRARY) and "-packages" not in file
    return file.startswith("<ipython") or not (library or file.startswith((NUMPY, *NAMELESS)))


def library_name(file: str) -> str:
    """json, numpy, …; "" for torch, compiled code, and the monitor itself."""
    if file.startswith(NAMELESS):
        return ""
    inside = file.rpartition("-packages/")[2].removeprefix(LIBRARY)
    return Path(inside.lstrip("/").partition("/")[0]).stem


@functools.cache
def short(file: str) -> str:
    """A path as it is shown: from the repository, or its last two parts."""
    path = Path(file)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:]))


# --- traces, on request ----------------------------------------------------------------------

TRACED_STEPS = 3


class Tracer:
    """Writes a trace of three steps by torch.profiler to out_dir/traces at a SIGUSR2.

    https://ui.perfetto.dev opens it. On CUDA, Python warns of each line that waits for the device.
    at: a step to begin at without a signal; 0: none.
    """

    def __init__(self, out_dir: Path, device: torch.device, at: int = 0):
        self.folder, self.device, self.at = out_dir / "traces", device, at
        self.profiler, self.row = None, {}
        self.before = take_signal(signal.SIGUSR2, self.want)

    def want(self, *_):
        self.at = 1  # from the next step on

    def step(self, step: int):
        """Begin or end a trace."""
        if self.profiler:
            self.row["perf/disturbed"] = 1
            if step == self.first + TRACED_STEPS - 1:
                self.end(step)
        # a fork may be profiling; torch does not promise this name
        elif 0 < self.at <= step + 1 and not getattr(torch.autograd, "_profiler_enabled", bool)():
            from torch.profiler import ProfilerActivity, profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                self.sync_mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("warn")
            self.profiler, self.first = profile(activities=activities), step + 1
            self.profiler.start()
            self.at, self.row["perf/disturbed"] = 0, 1  # also of a log at the first traced step

    def stop(self):
        self.profiler.stop()
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(self.sync_mode)

    def end(self, step: int):
        self.stop()
        profiler, self.profiler = self.profiler, None
        file = self.folder / f"step_{self.first}.json"
        with suppress(OSError, RuntimeError):  # a full disk: training matters more
            self.folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
            self.row["trace"] = os.path.relpath(file)
            say(f"step {step}: a trace of {TRACED_STEPS} steps is in {self.row['trace']}")

    def read(self, step: int) -> dict:
        """Columns of a row with traced steps."""
        taken, self.row = self.row, {}
        return taken

    def close(self):
        if self.profiler:
            self.stop()
        give_back_signal(signal.SIGUSR2, self.want, self.before)
