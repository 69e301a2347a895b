"""The machine beside the program: its speed now, and the time threads spent waiting for it.

A slower machine and a slower program look alike in the times of steps. So a fixed piece of work is
timed at the logs, and the kernel is asked for its waits; slower.py and slow.py compare them.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from steady.watch import proc

SECONDS_BETWEEN = 0.5  # between slower readings: so they take 0.1 % of the time
MOST_THREADS = 16  # only the oldest are read, Python's before those of libraries
TICKS = os.sysconf("SC_CLK_TCK")  # a second


class Probe:
    """Fixed work: a running sum on one core (others might be busy), a matrix product on a GPU."""

    def __init__(self, device: torch.device):
        self.ones, self.sums = np.ones((2, 10_000), np.float32)  # 0.04 ms
        self.large, self.events = None, None
        if device.type == "cuda":
            # 58 GFLOP, about 0.1 ms of an H100: long enough for the events' half microsecond
            self.large = torch.full((3072, 3072), 0.01, dtype=torch.float16, device=device)
            self.result = torch.empty_like(self.large)

    def read(self) -> dict[str, float]:
        """Microseconds, the best of 3; the GPU's is of the product started at an earlier call."""
        times = [time.perf_counter()]
        for _ in range(3):  # an interrupted try says nothing about the cores
            np.add.accumulate(self.ones, out=self.sums)  # a profiler left on slows torch's
            times.append(time.perf_counter())
        row = {"machine/cpu_sum_us": 1e6 * min(np.diff(times))}  # cpu_probe_us: torch's, before
        if self.events and self.events[1].query():  # never waits
            row["machine/gpu_probe_us"] = self.events[0].elapsed_time(self.events[1]) * 1e3
            self.events = None
        if self.large is not None and not self.events:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for event in self.events:  # the first keeps the GPU busy until the second is queued
                torch.mm(self.large, self.large, out=self.result)
                event.record()
        return row


class Machine:
    """Reads possible causes of slow steps outside the training loop, on the training thread."""

    def __init__(self, device: torch.device, step: int, out_dir: Path):
        """Counts from now on; step: the last one before."""
        self.device, self.out_dir, self.probe = device, out_dir, Probe(device)
        self.read_step, self.slow_read = step, (-math.inf, step, counters(), threads())
        self.gc_seconds, self.gc_began, self.stops = 0.0, 0.0, 0
        gc.callbacks.append(self.on_gc)
        self.cont = take_signal(signal.SIGCONT, self.on_continue)

    def on_gc(self, when: str, info: dict):
        if when == "start":
            self.gc_began = time.perf_counter()
        else:
            self.gc_seconds += time.perf_counter() - self.gc_began

    def on_continue(self, *_):
        self.stops += 1

    def read(self, step: int) -> dict[str, float]:
        """ms/step since the last call; counts since the process began.

        Slower readings come at most every SECONDS_BETWEEN, for the steps since then.
        """
        row = {"perf/gc_ms": self.gc_seconds / max(1, step - self.read_step) * 1e3}
        self.gc_seconds, self.read_step = 0.0, step
        row |= compiler() | ({"machine/stops": self.stops} if self.stops else {})
        then, before, old, ran = self.slow_read
        if time.perf_counter() - then < SECONDS_BETWEEN or step == before:
            return row
        new, now = counters(), threads()
        moved = {name: new[name] - old[name] for name in new.keys() & old.keys()}
        row |= {f"machine/{name}": ms / (step - before) for name, ms in own_stalls(moved).items()}
        row |= busiest(ran, now, step - before)
        row |= self.probe.read() | read_resources(self.device, self.out_dir)
        if then == -math.inf:  # the first, now that the loader's processes run
            row["about"] = limits(row, self.device)
        self.slow_read = time.perf_counter(), step, new, now
        return row

    def close(self):
        if self.on_gc in gc.callbacks:
            gc.callbacks.remove(self.on_gc)
        give_back_signal(signal.SIGCONT, self.on_continue, self.cont)


def take_signal(number: int, handler):
    """Handle a signal if the program does not, in its main thread; returns the old handler."""
    before = signal.getsignal(number)
    free = before in (signal.SIG_DFL, signal.SIG_IGN) or (  # or is an unclosed Monitor's
        getattr(before, "__module__", None) == handler.__module__)
    with contextlib.suppress(ValueError):  # in another thread
        return signal.signal(number, handler) if free else None


def give_back_signal(number: int, handler, before):
    """Restore the old handler, unless the program has set another one since."""
    if before is not None and signal.getsignal(number) == handler:
        with contextlib.suppress(ValueError):
            signal.signal(number, before)


def compiler() -> dict[str, int]:
    """Graphs made by torch.compile, functions left eager at its limit of recompilations; or {}."""
    row, dynamo = {}, sys.modules.get("torch._dynamo.utils")
    with contextlib.suppress(AttributeError, KeyError):
        row["perf/compilations"] = dynamo.counters["stats"]["unique_graphs"]
        reasons = dynamo.counters["unimplemented"].items()
        row["perf/eager_functions"] = sum(n for why, n in reasons if "recompile limit" in why)
    return row


def threads() -> dict[int, tuple[float, float]]:
    """{thread: (ms of running, ms of being ready while others had the core)}."""
    out, python = {}, {str(thread.native_id) for thread in threading.enumerate()}
    tasks = sorted(proc.names("proc/self/task"), key=lambda name: (name not in python, int(name)))
    for name in tasks[:MOST_THREADS]:
        if text := proc.read(f"proc/self/task/{name}/schedstat").split():
            out[int(name)] = int(text[0]) / 1e6, int(text[1]) / 1e6
    return out


def counters() -> dict[str, float]:
    """ms since the process or the machine began: cores stolen by the hypervisor (mean over cores),
    throttled by a CPU quota, any process stalled on disks or memory. For this thread: pages read
    back from a disk (faults), bytes read from one. Unreadable values are omitted.
    """
    fields, cpus = proc.stat_fields("thread-self"), proc.read("proc/stat").split()
    throttled = [proc.number(f"{folder}/cpu.stat", "throttled_usec ")
                 for folder in proc.cgroup_folders()]
    out = {"faults": int(fields[9]) if fields else math.inf,
           "read_bytes": proc.number("proc/thread-self/io", "\nread_bytes: "),
           "steal_ms": int(cpus[8]) * 1e3 / TICKS / os.cpu_count() if cpus else math.inf,
           "disk_ms": proc.number("proc/pressure/io", "total=") / 1e3,
           "memory_ms": proc.number("proc/pressure/memory", "total=") / 1e3,
           "throttled_ms": max(filter(math.isfinite, throttled), default=math.inf) / 1e3}
    return {name: x for name, x in out.items() if math.isfinite(x)}


def own_stalls(moved: dict[str, float]) -> dict[str, float]:
    """Stalls of any process count only if this thread has read from a disk meanwhile."""
    faults, read_bytes = moved.get("faults", 0), moved.get("read_bytes", 0)
    own = {"memory_ms": faults > 0, "disk_ms": faults + read_bytes > 0}
    return {name: ms * own.get(name, 1) for name, ms in moved.items() if name.endswith("_ms")}


def busiest(before: dict, now: dict, steps: int) -> dict[str, float | str]:
    """ms/step that the longest waiting thread had no core (the others in an operation wait for it),
    and ms/step that the busiest other Python thread computed."""
    more = {tid: [(new - old) / steps for new, old in zip(now[tid], before[tid], strict=True)]
            for tid in now.keys() & before.keys()}
    if not more:
        return {}
    row = {"perf/cpu_queue_ms": max(queued for _, queued in more.values()), "perf/thread_ms": 0.0}
    others = [(more[thread.native_id][0], thread.name) for thread in threading.enumerate()
              if thread not in (threading.main_thread(), threading.current_thread())
              and thread.native_id in more and thread.name != "steady sampler"]
    if others:
        row["perf/thread_ms"], row["busiest_thread"] = max(others)
    return row


def read_resources(device: torch.device, out_dir: Path) -> dict[str, float]:
    """GB and counts used or free now, a GPU's clock and power; unknown values are left out."""
    row = {}
    if rss := proc.rss_bytes():
        row["memory/host_rss_gb"] = rss / 1e9
        pids = "self", *(worker.pid for worker in multiprocessing.active_children())
        row["memory/host_anonymous_gb"] = sum(proc.rss_bytes(p, shared=False) for p in pids) / 1e9
        row["memory/open_files"] = len(proc.names("proc/self/fd"))
        row["memory/threads"] = len(proc.names("proc/self/task"))
    if device.type == "cuda":
        stats = torch.accelerator.memory_stats(device)
        row["memory/allocated_gb"] = stats["allocated_bytes.all.current"] / 1e9
        row["memory/reserved_gb"] = stats["reserved_bytes.all.current"] / 1e9
        row["memory/peak_gb"] = stats["allocated_bytes.all.peak"] / 1e9
        row["memory/alloc_retries"] = stats["num_alloc_retries"]
        with contextlib.suppress(Exception):  # without the package nvidia-ml-py
            row["perf/clock_mhz"] = torch.cuda.clock_rate(device)
            row["machine/gpu_celsius"] = torch.cuda.temperature(device)
            row["machine/gpu_watts"] = torch.cuda.power_draw(device) / 1e3  # from mW
    with contextlib.suppress(OSError):  # the folder is gone
        disk = shutil.disk_usage(out_dir)
        row |= {"disk/free_gb": disk.free / 1e9} if disk.total else {}  # some have no size
    return row


def limits(row: dict, device: torch.device) -> dict[str, float]:
    """How far each resource of this process can grow, GB and counts; row: its use now.

    Ranks, as if all were on this host, share equally the memory and threads still free.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    threads, host_gb = row.get("memory/threads", 0), row.get("memory/host_anonymous_gb", 0.0)
    found = {"limit/host_gb": host_gb + proc.available_bytes() / ranks / 1e9,
             "limit/threads": threads + proc.available_threads(threads) / ranks,
             "limit/open_files": proc.soft_limit("RLIMIT_NOFILE")}
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)  # without other processes' and the driver's
        found["limit/device_gb"] = (free + torch.cuda.memory_reserved(device)) / 1e9
    return {name: limit for name, limit in found.items() if math.isfinite(limit)}
