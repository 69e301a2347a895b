"""A trace of three steps, by torch.profiler: at the first slow-down that is said, and on SIGUSR2.

traces/step_N.json of the run directory; https://ui.perfetto.dev opens it.
"""

import contextlib
import os
import signal
import threading
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from steady import private

STEPS, MOST_FILES = 3, 5


class Tracer:
    """Records steps from the one after `wanted` is set; `step` is called after each while `busy`.

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
            few = len(list(self.folder.glob("step_*.json"))) < MOST_FILES
            if few and not private.is_profiling():  # a fork may profile by itself
                activities = [ProfilerActivity.CPU]
                activities += [ProfilerActivity.CUDA] * (self.monitor.device.type == "cuda")
                self.profiler, self.first = profile(activities=activities), step + 1
                self.profiler.start()
        elif step >= self.first + STEPS - 1:
            profiler, self.profiler = self.profiler, None
            profiler.stop()
            file = self.folder / f"step_{self.first}.json"
            with contextlib.suppress(OSError, RuntimeError):  # a full disk: training matters more
                self.folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(file))
                print(f"step {step}: a trace of {STEPS} steps is in {file}", flush=True)
                self.monitor.write(step, {"trace": str(file)})
        self.monitor.phase(previous)

    def close(self):
        if self.profiler:
            self.profiler.stop()
        if self.handler is not None:
            signal.signal(signal.SIGUSR2, self.handler)
