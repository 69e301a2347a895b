"""What runs out: memory, open files, threads, disk space; how much is left, and until which step.

Each log's row goes through Resources, which says once for each resource that its growth would end
the run before its last step, and then looks for the line of Python that keeps allocating.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from steady.guard.deadline import UNKNOWN
from steady.ranks.ranks import rank_and_world
from steady.watch import proc
from steady.watch.profile import HERE, short, worth_naming
from steady.watch.sinks import si
from steady.watch.words import Finding

MOST, LEAST = 128, 20  # samples kept of a resource; samples that a trend needs
LEAST_KEPT = 8  # bytes a step, of a line that is named: a reference to an object
HORIZON = 5  # growth is believed to go on for so many times as long as it was seen
RESOURCES = {  # name → (what is used of it or free, its limit or None for 0, unit)
    # Of this process and its loader's, without mapped files, such as token files: the system takes
    # their pages back when it needs them.
    "host memory": ("memory/host_anonymous_gb", "limit/host_gb", "GB"),
    # what the allocator reserves and does not use comes back, too
    "device memory": ("memory/allocated_gb", "limit/device_gb", "GB"),
    "open files": ("memory/open_files", "limit/open_files", ""),
    "threads": ("memory/threads", "limit/threads", ""),
    "disk space": ("disk/free_gb", None, "GB"),
}


# --- how much there is ------------------------------------------------------------------------


def read_resources(device: torch.device, run_dir: Path | None) -> dict[str, float]:
    """GB and counts that are used or free now; what is unknown is left out."""
    row = {}
    if rss := proc.rss_bytes():
        row["memory/host_rss_gb"] = rss / 1e9
        pids = "self", *(worker.pid for worker in multiprocessing.active_children())
        own = sum(proc.rss_bytes(pid, shared=False) for pid in pids)
        row["memory/host_anonymous_gb"] = own / 1e9
        row["memory/open_files"] = len(proc.names("proc/self/fd"))
        row["memory/threads"] = len(proc.names("proc/self/task"))
    if device.type == "cuda":
        stats = torch.accelerator.memory_stats(device)
        row["memory/allocated_gb"] = stats["allocated_bytes.all.current"] / 1e9
        row["memory/reserved_gb"] = stats["reserved_bytes.all.current"] / 1e9
        row["memory/peak_gb"] = stats["allocated_bytes.all.peak"] / 1e9
        row["memory/alloc_retries"] = stats["num_alloc_retries"]
    with contextlib.suppress(OSError):  # the folder is gone
        disk = os.statvfs(run_dir) if run_dir else None
        if disk and disk.f_blocks:
            row["disk/free_gb"] = disk.f_bavail * disk.f_frsize / 1e9
    return row


def limits(row: dict, device: torch.device) -> dict[str, float]:
    """How far each resource of this process can grow, GB and counts; row: what it uses now.

    To be read once, when the loader's workers run. Processes of the run on this host get equal
    shares of what is available, since what one does the others do.
    """
    ranks, threads = rank_and_world()[3], row.get("memory/threads", 0)
    found = {
        "limit/host_gb": row.get("memory/host_anonymous_gb", 0.0)
        + proc.available_bytes() / ranks / 1e9,
        "limit/threads": threads + proc.available_threads(threads) / ranks,
        "limit/open_files": proc.soft_limit("RLIMIT_NOFILE"),
    }
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # without what others, and the driver, have on the device
        found["limit/device_gb"] = (free + torch.cuda.memory_reserved(device)) / 1e9
    return {name: limit for name, limit in found.items() if math.isfinite(limit)}


# --- when it runs out -------------------------------------------------------------------------


def mean(rows) -> tuple[float, float]:
    """Of pairs."""
    return tuple(sum(values) / len(rows) for values in zip(*rows, strict=True))


class Samples:
    """The course of one resource: at most MOST means, each of as many rows."""

    def __init__(self):
        self.means, self.rows, self.size = [], [], 1

    def add(self, step: int, used: float) -> bool:
        """Whether there is a new mean."""
        self.rows.append((step, used))
        if len(self.rows) < self.size:
            return False
        self.means.append(mean(self.rows))
        self.rows = []
        if len(self.means) == MOST:
            # to drop every second one would make a trend of a period close to two rows
            self.means = [*map(mean, zip(self.means[::2], self.means[1::2], strict=True))]
            self.size *= 2
        return True


class Resources:
    """What the monitor asks at its logs: what there is, what will not last, which line keeps it.

    settled_step: until here new checkpoints take disk space and none is deleted, which says
    nothing about later.
    """

    def __init__(self, cfg, run_dir: Path | None, device: torch.device):
        self.cfg, self.run_dir, self.device = cfg, run_dir, device
        self.settled_step = (cfg.keep_checkpoints + 2) * cfg.save_interval
        self.limits, self.samples, self.reported = {}, {}, set()
        self.allocations = None

    def read(self) -> dict[str, float]:
        """Columns of a row: what is used and what is left."""
        found = read_resources(self.device, self.run_dir)
        if not self.limits:  # now that the loader's processes run
            found |= limits(found, self.device)
        return found

    def warnings(self, row: dict) -> list[str]:
        """What will run out, as a sentence each; some logs later, which line allocates it."""
        found = []
        if self.allocations and (line := self.allocations.look(row["step"])):
            self.allocations, found = None, [line]
        for finding in self.find(row):
            found.append(str(finding))
            # which a fork may do by itself
            if finding.code != "disk space" and not tracemalloc.is_tracing():
                self.allocations = Allocations(row["step"])
        return found

    def find(self, row: dict) -> list[Finding]:
        """What is found with this row, each resource once in a process."""
        began = "perf/startup_s" in row
        if began:  # a new process: of the one before only the disk is left
            self.limits = {}
            self.samples = {k: v for k, v in self.samples.items() if k == "disk space"}
            self.reported &= {"disk space"}
        self.limits = self.limits | {k: row[k] for k in row if k.startswith("limit/")}
        found = []
        for name, (metric, limit, unit) in RESOURCES.items():
            skipped = began or limit not in self.limits if limit else (
                row["step"] <= self.settled_step)
            if skipped or name in self.reported or row.get(metric) is None:
                continue
            used = row[metric] if limit else -row[metric]
            samples = self.samples.setdefault(name, Samples())
            if not samples.add(row["step"], used):
                continue
            room = self.limits[limit] if limit else 0.0
            if name == "device memory":  # a step needs more than what stays between steps
                room -= max(0.0, (row.get("memory/peak_gb") or 0.0) - used)
            values = [value for _, value in samples.means]
            grown = max(values) - min(values)
            if len(values) < LEAST or room - values[0] > (HORIZON + 1) * grown:
                continue  # the usual case
            steps, values = np.array(samples.means).T
            growth = trend(steps, values - values[0], room - values[0])
            last_step = self.cfg.max_steps
            if growth and growth[2] < last_step != UNKNOWN:
                since, per_step, at_step = growth
                self.reported.add(name)
                rate = f"{si(1e9 * per_step)}B/step" if unit else f"{per_step:.3g}/step"
                found.append(Finding(name, since, dict(
                    per_step=per_step, at_step=max(at_step, row["step"]), last_step=last_step,
                    rate=rate)))
        return found

    def close(self):
        if self.allocations:  # or what follows, as after a rollback, would be as slow
            tracemalloc.stop()


def trend(steps: np.ndarray, values: np.ndarray, limit: float) -> tuple | None:
    """(step at which sustained growth began, slope, step at which it reaches the limit) or None.

    Of all samples, or of the newest half or quarter: what comes before may be warm-up. Growth
    counts if it goes on over five blocks without coming to rest and leaves what was seen before;
    it reaches the limit if it does so within HORIZON times as long as it has lasted, and if its
    slowing down, continued as that of 1 - exp(-t), does not end it earlier.
    """
    for start in (3 * len(values) // 4, len(values) // 2, 0):
        x, y = steps[start:], values[start:]
        if len(y) < LEAST:
            continue
        blocks = np.array([np.median(block) for block in np.array_split(y, 5)])
        rises, total = np.diff(blocks), blocks[-1] - blocks[0]
        if (rises.min() <= total / 16  # a quarter of the mean; a single step rises in one of them
                or blocks[-1] - values[: start + len(y) // 5].max() < 0.5 * total):
            continue  # a sawtooth: it has been there before
        slope, level = np.polyfit(x, y, 1)
        left = max(0.0, limit - slope * x[-1] - level)
        # what saturates grows in each half by the same ratio less than in the one before: with a
        # ratio as low as the noise of the medians of two blocks allows
        off = values - slope * steps - level
        noise = float(np.median(np.abs(off[start:])))
        doubt = 3 * noise * math.sqrt(3.1 * 5 / len(y))
        first, second = blocks[2] - blocks[0], blocks[4] - blocks[2]
        ratio = (second - doubt) / (first + doubt)
        if (left > HORIZON * slope * (x[-1] - x[0])
                or ratio < 1 and left > second * ratio / (1 - ratio)):
            continue
        while start and abs(off[start - 1]) < 4 * noise + 1e-6 * total:
            start -= 1  # it began before this half
        return round(steps[start]), float(slope), round(x[-1] + left / slope)
    return None


# --- which line it is -----------------------------------------------------------------------


class Allocations:
    """The line that allocates what is kept, found by tracemalloc while steps go on.

    It sees what Python allocates: also the objects around tensors, files and threads. While it
    runs, steps take up to three times as long.
    """

    STEPS, SECONDS = 20, 1.0  # of each of its two halves, at least

    def __init__(self, step: int):
        self.step, self.began, self.before = step, time.perf_counter(), None
        tracemalloc.start(6)  # frames, of which some are of libraries

    def look(self, step: int) -> str:
        """At a log: once enough has been seen, the line and what it keeps; or ""."""
        steps, seconds = step - self.step, time.perf_counter() - self.began
        if steps < self.STEPS or seconds < self.SECONDS:
            return ""
        if not tracemalloc.is_tracing():  # a fork has ended it
            return "no line of Python was seen to allocate it"
        gc.collect()
        kept = self.by_line()
        if self.before is None:  # what was allocated before is unknown, and caches have filled
            self.step, self.began, self.before = step, time.perf_counter(), kept
            return ""
        tracemalloc.stop()
        kept.subtract(self.before)
        (line, size), *_ = kept.most_common(1) or [("", 0)]
        if size < LEAST_KEPT * steps:
            return "no line of Python was seen to allocate it"
        return f"{line} keeps {si(size / steps)}B/step since step {self.step:,}"

    def by_line(self) -> Counter:
        """Bytes by "FILE:LINE", allocated since it began and not freed."""
        sizes = Counter()
        for trace in tracemalloc.take_snapshot().traces:
            frame = next((f for f in reversed(trace.traceback)
                          if worth_naming(f.filename) or f.filename.startswith(HERE)), None)
            if frame and not frame.filename.startswith(HERE):
                sizes[f"{short(frame.filename)}:{frame.lineno}"] += trace.size
        return sizes
