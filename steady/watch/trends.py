"""What runs out: memory, open files, threads, disk space; how much is left, and until which step.

Rows of metrics.jsonl go into ResourceTrends, which says once for each resource that its growth
would end the run before its last step.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steady.ranks.ranks import rank_and_world
from steady.watch import proc
from steady.watch.profile import HERE, short, worth_naming

MOST, LEAST = 128, 20  # samples kept of a resource; samples that a trend needs
LEAST_KEPT = 8  # bytes a step, of a line that is named: a reference to an object
HORIZON = 5  # growth is believed to go on for so many times as long as it was seen
RESOURCES = {  # name → (what is used of it or free, its limit or None for 0, unit, what to do)
    # Without mapped files, such as token files: the system takes their pages back when it needs
    # them. What the allocator of the device reserves and does not use comes back, too.
    "host memory": ("memory/host_anonymous_gb", "limit/host_gb", "GB",
                    "look for what the loop keeps, such as losses that are never detached"),
    "host memory of loader workers": (
        "memory/workers_rss_gb", "limit/host_gb", "GB",
        "look for what the dataset keeps in each worker, or fewer --num_workers"),
    "device memory": ("memory/allocated_gb", "limit/device_gb", "GB",
                      "look for tensors that the loop keeps, such as losses never detached"),
    "open files": ("memory/open_files", "limit/open_files", "",
                   "close what is opened, or raise ulimit -n"),
    "threads": ("memory/threads", "limit/threads", "",
                "look for what starts a thread or a pool of them again and again"),
    "free disk space": (
        "disk/free_gb", None, "GB",
        "fewer checkpoints (--keep_checkpoints, --keep_every), or another --out_dir"),
    "free inodes": ("disk/free_inodes", None, "",
                    "look for what writes many small files, or another --out_dir"),
}
HOST = [RESOURCES[name][0] for name in ("host memory", "host memory of loader workers")]
IN_PYTHON = ("host memory", "device memory", "open files", "threads")


# --- how much there is ------------------------------------------------------------------------


def memory_used(device: torch.device) -> dict[str, float]:
    """GB and counts of this process, of its loader's workers, and of the device."""
    workers = multiprocessing.active_children()
    out = {
        "memory/host_rss_gb": proc.rss_bytes() / 1e9,
        "memory/workers_rss_gb": sum(proc.rss_bytes(w.pid, shared=False) for w in workers) / 1e9,
        "memory/open_files": len(proc.names("proc/self/fd")),
    }
    if device.type == "cuda":
        stats = torch.accelerator.memory_stats(device)
        out["memory/allocated_gb"] = stats["allocated_bytes.all.current"] / 1e9
        out["memory/reserved_gb"] = stats["reserved_bytes.all.current"] / 1e9
        out["memory/peak_gb"] = stats["allocated_bytes.all.peak"] / 1e9
        out["memory/alloc_retries"] = stats["num_alloc_retries"]
    return out


def read_resources(run_dir: Path | None) -> dict[str, float]:
    """GB and counts that are cheap enough to read at each log; what is unknown is left out."""
    row = {}
    if proc.read("proc/self/statm"):
        row["memory/threads"] = len(proc.names("proc/self/task"))
        row["memory/host_anonymous_gb"] = proc.rss_bytes(shared=False) / 1e9
    disk = None
    with contextlib.suppress(OSError):  # the folder is gone
        disk = os.statvfs(run_dir) if run_dir else None
    if disk and disk.f_blocks:
        row["disk/free_gb"] = disk.f_bavail * disk.f_frsize / 1e9
    if disk and disk.f_files:  # btrfs, for one, has no fixed number of inodes
        row["disk/free_inodes"] = disk.f_favail
    return row


def limits(row: dict, device: torch.device) -> dict[str, float]:
    """How far each resource of this process can grow, GB and counts; row: what it uses now.

    To be read once, when the loader's workers run. Processes of the run on this host get equal
    shares of what is available, since what one does the others do.
    """
    ranks, threads = rank_and_world()[3], row.get("memory/threads", 0)
    used = sum(row.get(name, 0.0) for name in HOST)
    found = {
        "limit/host_gb": used + proc.available_bytes() / ranks / 1e9,
        "limit/threads": threads + proc.available_threads(threads) / ranks,
        "limit/open_files": proc.soft_limit("RLIMIT_NOFILE"),
    }
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # without what others, and the driver, have on the device
        found["limit/device_gb"] = (free + torch.cuda.memory_reserved(device)) / 1e9
    return {name: limit for name, limit in found.items() if math.isfinite(limit)}


class Resources:
    """What the monitor asks at its logs: what there is, what will not last, which line keeps it."""

    def __init__(self, cfg, run_dir: Path | None, device: torch.device, kept: list[dict]):
        self.cfg, self.run_dir, self.device = cfg, run_dir, device
        # checkpoints take more and more space until old ones are deleted
        settled = (cfg.keep_checkpoints + 2) * cfg.save_interval
        occasions = dict(saves=cfg.save_interval, evaluations=cfg.eval_interval,
                         samples=cfg.sample_interval)
        self.trends = ResourceTrends(cfg.max_steps, None, settled, occasions)
        self.limits_known, self.allocations = False, None
        for row in kept:
            self.trends.add(row)  # what it returns was said by the earlier process

    def read(self) -> dict[str, float]:
        """Columns of a row: what is used and what is left."""
        found = memory_used(self.device) | read_resources(self.run_dir)
        if not self.limits_known:  # now that the loader's workers run
            self.limits_known = True
            found |= limits(found, self.device)
        return found

    def warnings(self, row: dict) -> list[str]:
        """What will run out, as a sentence each; some logs later, which line allocates it."""
        found = []
        if self.allocations and (line := self.allocations.look(row["step"])):
            self.allocations, found = None, [line]
        for event in self.trends.add(row):
            found.append(str(event))
            # which a fork may do by itself
            if event.code in IN_PYTHON and not tracemalloc.is_tracing():
                self.allocations = Allocations(row["step"])
        return found

    def close(self):
        if self.allocations:  # or what follows, as after a rollback, would be as slow
            tracemalloc.stop()


# --- when it runs out -------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsOut:
    """A resource whose growth ends the run before its last step. In GB or counts."""

    code: str  # a name in RESOURCES
    since: int
    per_step: float
    limit: float  # 0 of what is free
    at_step: int
    found: int  # the step of the row with which it was found
    last_step: int
    occasion: str = ""  # at which nearly all of it comes: saves, evaluations, samples

    def __str__(self) -> str:
        _, limit, unit, advice = RESOURCES[self.code]
        verb = ("grow" if limit else "shrink") + ("s" if unit else "")
        amount = f"{self.limit:.1f} GB" if unit else f"{self.limit:,.0f}"
        end = f"at the limit of {amount}" if limit else "none left"
        at = float(f"{self.at_step:.3g}")
        when = f", nearly all of it at {self.occasion}," if self.occasion else ""
        return (f"{self.code} {verb} by {rate(self.per_step, unit)}{when} since about step "
                f"{self.since:,}: {end} at about step {at:,.0f} of {self.last_step:,}; {advice}")


class Samples:
    """The course of one resource: at most MOST means, each of as many rows."""

    def __init__(self):
        self.means, self.rows, self.size = [], [], 1

    def add(self, step: int, used: float) -> bool:
        """Whether there is a new mean."""
        self.rows.append((step, used))
        if len(self.rows) < self.size:
            return False
        self.means.append(np.mean(self.rows, 0))
        self.rows = []
        if len(self.means) == MOST:
            # to drop every second one would make a trend of a period close to two rows
            self.means = [*np.reshape(self.means, (-1, 2, 2)).mean(1)]
            self.size *= 2
        return True


class ResourceTrends:
    """Finds resources whose growth would end the run before its last step.

    limits: {"limit/host_gb": GB, …}, which rows may bring, too. settled_step: until here new
    checkpoints take disk space and none is deleted, which says nothing about later. occasions:
    name → steps between them.
    """

    def __init__(self, last_step: int, limits: dict | None = None, settled_step: int = 0,
                 occasions: dict[str, int] | None = None):
        self.last_step, self.settled_step = last_step, settled_step
        self.occasions = occasions or {}
        self.given = self.limits = limits or {}
        self.samples, self.reported = {}, set()

    def add(self, row: dict) -> list[RunsOut]:
        """What is found with this row, each resource once in a process."""
        began = "perf/startup_s" in row
        if began:  # a new process: of the old one only the disk is left
            of_disk = {name for name, (_, limit, *_) in RESOURCES.items() if not limit}
            self.samples = {name: self.samples[name] for name in of_disk & self.samples.keys()}
            self.reported &= of_disk
            self.limits = self.given
        self.limits = self.limits | {k: row[k] for k in row if k.startswith("limit/")}
        events = []
        for name, (metric, limit, *_) in RESOURCES.items():
            skipped = began or limit not in self.limits if limit else (
                row["step"] <= self.settled_step)
            if skipped or name in self.reported or row.get(metric) is None:
                continue
            used = row[metric] if limit else -row[metric]
            if self.samples.setdefault(name, Samples()).add(row["step"], used):
                found = self.find(name, row, self.limits[limit] if limit else 0.0)
                events += found
                self.reported |= {event.code for event in found}
        return events

    def find(self, name: str, row: dict, limit: float) -> list[RunsOut]:
        """limit: of what is used; what is free is used up at 0."""
        metric = RESOURCES[name][0]
        if metric in HOST:  # which share it
            room = limit - sum(row.get(other) or 0.0 for other in HOST if other != metric)
        elif name == "device memory":  # a step needs more than what stays between steps
            room = limit - max(0.0, (row.get("memory/peak_gb") or 0.0) - row[metric])
        else:
            room = limit
        steps, used = np.array(self.samples[name].means).T
        found = trend(steps, used - used[0], room - used[0])
        if not found or found[2] >= self.last_step:
            return []
        k, slope, at = found
        return [RunsOut(name, round(float(steps[k])), slope, limit, max(round(at), row["step"]),
                        row["step"], self.last_step,
                        occasion(steps[k:], used[k:], self.occasions))]


def occasion(steps: np.ndarray, used: np.ndarray, occasions: dict[str, int]) -> str:
    """The rarest of occasions at which nearly all of the growth comes; "" if it is at any step.

    Samples are taken before what else is due at their step; means of several rows reach half way
    to the next.
    """
    rises, half, found = np.diff(used), np.diff(steps) / 2, {}
    for name, every in occasions.items():
        if not every:
            continue
        came = (steps[1:] + half - 1) // every > (steps[:-1] - half - 1) // every
        if 2 <= came.sum() <= len(came) / 2 and rises[came].sum() > 0.9 * rises.sum():
            found[name] = every
    rarest = max(found.values(), default=0)
    return " or ".join(name for name, every in found.items() if every == rarest)


def trend(steps: np.ndarray, values: np.ndarray, limit: float) -> tuple | None:
    """(index at which sustained growth began, slope, step at which it reaches the limit) or None.

    Of all samples, or of the newest half or quarter: what comes before may be warm-up. Growth
    counts if it goes on over five blocks without coming to rest and leaves what was seen before;
    it reaches the limit if it does so within HORIZON times as long as it has lasted, and if its
    slowing down, continued as that of 1 - exp(-t), does not end it earlier.
    """
    if len(values) < LEAST or limit > (HORIZON + 1) * np.ptp(values):
        return None  # the usual case, without any work
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
        return start, float(slope), float(x[-1] + left / slope)
    return None


def rate(per_step: float, unit: str) -> str:
    """0.001, "GB" → 1 MB/step"""
    if not unit:
        return f"{1000 * per_step:,.3g} every 1,000 steps"
    for small, size in (("GB", 1), ("MB", 1e-3), ("kB", 1e-6)):
        if per_step >= size:
            return f"{per_step / size:.3g} {small}/step"
    return f"{per_step * 1e9:.0f} bytes/step"


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
        if not tracemalloc.is_tracing() or steps < self.STEPS or seconds < self.SECONDS:
            return ""
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
        return (f"{line} keeps {rate(size / steps / 1e9, 'GB')} since step {self.step:,} "
                f"(found by tracemalloc, in {2 * seconds:.0f} s)")

    def by_line(self) -> Counter:
        """Bytes by "FILE:LINE", allocated since it began and not freed."""
        sizes = Counter()
        for trace in tracemalloc.take_snapshot().traces:
            frame = next((f for f in reversed(trace.traceback)
                          if worth_naming(f.filename) or f.filename.startswith(HERE)), None)
            if frame and not frame.filename.startswith(HERE):
                sizes[f"{short(frame.filename)}:{frame.lineno}"] += trace.size
        return sizes
