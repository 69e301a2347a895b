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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steady.ranks.ranks import rank_and_world
from steady.watch import proc
from steady.watch.profile import HERE, short, worth_naming

MOST, LEAST = 128, 20  # samples kept of a resource; samples that a trend needs
HORIZON = 5  # growth is believed to go on for so many times as long as it was seen
RESOURCES = {  # name → (metrics that are summed, its limit or None for 0, unit, verb)
    # Without mapped files, such as token files: the system takes their pages back when it needs
    # them. What the allocator of the device reserves and does not use comes back, too.
    "host memory": (("memory/host_anonymous_gb", "memory/workers_rss_gb"), "limit/host_gb",
                    "GB", "grows"),
    "device memory": (("memory/allocated_gb",), "limit/device_gb", "GB", "grows"),
    "open files": (("memory/open_files",), "limit/open_files", "", "grow"),
    "threads": (("memory/threads",), "limit/threads", "", "grow"),
    "free disk space": (("disk/free_gb",), None, "GB", "shrinks"),
    "free inodes": (("disk/free_inodes",), None, "", "shrink"),
}
WORKERS = "host memory of loader workers"  # most of what host memory grows by
ADVICE = {
    "host memory": "look for what the loop keeps, such as losses that are never detached",
    WORKERS: "look for what the dataset keeps in each worker, or fewer --num_workers",
    "device memory": "look for tensors that the loop keeps, such as losses never detached",
    "open files": "close what is opened, or raise ulimit -n",
    "threads": "look for what starts a thread or a pool of them again and again",
    "free disk space": "fewer checkpoints (--keep_checkpoints, --keep_every), or another --out_dir",
    "free inodes": "look for what writes many small files, or another --out_dir",
}


# --- how much there is ------------------------------------------------------------------------


def memory_used(device: torch.device) -> dict[str, float]:
    """GB and counts of this process, of its loader's workers, and of the device."""
    workers = multiprocessing.active_children()
    out = {
        "memory/host_rss_gb": proc.rss_bytes() / 1e9,
        "memory/workers_rss_gb": sum(proc.rss_bytes(w.pid, shared=False) for w in workers) / 1e9,
        "memory/open_files": len(proc.names("proc/self/fd")),
    }
    if device.type in ("cuda", "xpu"):
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
    used = sum(row.get(name, 0.0) for name in RESOURCES["host memory"][0])
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
        self.trends = ResourceTrends(cfg.max_steps, settled_step=settled)
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
            in_python = event.code not in (WORKERS, "free disk space", "free inodes")
            if in_python and not tracemalloc.is_tracing():  # nor by a fork of its own
                self.allocations = Allocations(row["step"])
        return found

    def close(self):
        if self.allocations:  # or what follows, as after a rollback, would be as slow
            tracemalloc.stop()


# --- when it runs out -------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsOut:
    """A resource whose growth ends the run before its last step. In GB or counts."""

    code: str  # a name in RESOURCES, or WORKERS
    of: str  # the name in RESOURCES, to which the limit belongs
    since: int
    per_step: float
    now: float
    limit: float
    at_step: int
    found: int  # the step of the row with which it was found
    last_step: int

    def __str__(self) -> str:
        _, limit, unit, verb = RESOURCES[self.of]
        its = "their" if verb == "grow" else "its"
        end = f"at {its} limit of {amount(self.limit, unit)}" if limit else "none left"
        at = float(f"{self.at_step:.3g}")
        return (f"{self.code} {verb} {rate(self.per_step, unit)} since about step "
                f"{self.since:,}: {end} at about step {at:,.0f} of {self.last_step:,}; "
                f"{ADVICE[self.code]}")


class ResourceTrends:
    """Finds resources whose growth would end the run before its last step.

    limits: {"limit/host_gb": GB, …}, which rows may bring, too. settled_step: until here new
    checkpoints take disk space and none is deleted, which says nothing about later.
    """

    def __init__(self, last_step: int, limits: dict | None = None, settled_step: int = 0):
        self.last_step, self.settled_step = last_step, settled_step
        self.given = self.limits = limits or {}
        self.step, self.reported = 0, set()
        self.samples = {}  # resource → [(step, value, share of the last metric)], at most MOST
        self.merging = {}  # resource → (rows that make a sample, those so far)

    def add(self, row: dict) -> list[RunsOut]:
        """What is found with this row, each resource once in a process."""
        of_process = [name for name, (_, limit, *_) in RESOURCES.items() if limit]
        began = "perf/startup_s" in row
        if began:  # a new process: of the old one only the disk is left
            for name in of_process:
                self.samples.pop(name, None)
                self.merging.pop(name, None)
                self.reported.discard(name)
            self.limits = self.given
        self.limits = self.limits | {k: row[k] for k in row if k.startswith("limit/")}
        held = any(row.get(metrics[0]) is not None for metrics, *_ in RESOURCES.values())
        if not held or row["step"] <= self.step:
            return []
        self.step, events = row["step"], []
        for name, (metrics, limit, *_) in RESOURCES.items():
            skipped = began or limit not in self.limits if limit else self.step <= self.settled_step
            if skipped or name in self.reported or row.get(metrics[0]) is None:
                continue
            parts = [row.get(metric) or 0.0 for metric in metrics]
            now, limit = sum(parts), self.limits[limit] if limit else 0.0
            if name == "device memory":  # a step needs more than what stays between steps
                limit -= max(0.0, (row.get("memory/peak_gb") or 0.0) - now)
            if self.sample(name, now, parts[-1]):
                event = self.find(name, now, limit)
                if event:
                    self.reported.add(name)
                    events.append(event)
        return events

    def sample(self, name: str, value: float, part: float) -> bool:
        """Add what a row says; whether that completes a sample, the mean of as many rows as keeps
        the number of samples bounded."""
        samples = self.samples.setdefault(name, [])
        size, rows = self.merging.setdefault(name, (1, []))
        total = np.array([self.step, value, part])
        count, total = (rows[0] + 1, rows[1] + total) if rows else (1, total)
        if count < size:
            self.merging[name] = size, [count, total]
            return False
        samples.append(total / count)
        if len(samples) == MOST:
            # means, for to drop every second one would make a trend of a period close to two rows
            samples[:] = [(a + b) / 2 for a, b in zip(samples[::2], samples[1::2], strict=True)]
            size *= 2
        self.merging[name] = size, []
        return True

    def find(self, name: str, now: float, limit: float) -> RunsOut | None:
        samples = self.samples[name]
        if len(samples) < LEAST:
            return None
        steps, values, parts = np.array(samples).T
        sign = 1 if RESOURCES[name][1] else -1  # what is free runs towards zero: as growth
        growth = sign * values - sign * values[0]
        room = sign * (limit - values[0])
        if growth.max() <= 0 or room > (HORIZON + 1) * (growth.max() - growth.min()):
            return None  # the usual case, without any work
        found = trend(steps, growth, room)
        if not found or found[2] >= self.last_step:
            return None
        k, slope, at = found
        grown = median_rise(sign * values[k:])
        workers = name == "host memory" and median_rise(parts[k:]) > 0.5 * grown
        return RunsOut(WORKERS if workers else name, name, round(float(steps[k])), slope,
                       float(now), limit, max(round(at), self.step), self.step, self.last_step)


def trend(steps: np.ndarray, values: np.ndarray, limit: float) -> tuple | None:
    """(index at which sustained growth began, slope, step at which it reaches the limit) or None.

    Of all samples, or of the newest half or quarter: what comes before may be warm-up. Growth
    counts if it goes on over five blocks without coming to rest and leaves what was seen before;
    it reaches the limit if it does so within HORIZON times as long as it has lasted, and if its
    slowing down, continued as that of 1 - exp(-t), does not end it earlier.
    """
    best = None
    for start in (0, len(values) // 2, 3 * len(values) // 4):
        x, y = steps[start:], values[start:]
        if len(y) < LEAST:
            break
        blocks = np.array([np.median(block) for block in np.array_split(y, 5)])
        rises, total = np.diff(blocks), blocks[-1] - blocks[0]
        first, second = blocks[2] - blocks[0], blocks[4] - blocks[2]
        if (rises.min() <= total / 16  # a quarter of the mean; a single step rises in one of them
                or blocks[-1] - values[: start + len(y) // 5].max() < 0.5 * total):
            continue  # a sawtooth: it has been there before
        slope = float(np.polyfit(x - x[0], y, 1)[0])
        off = values - slope * steps
        off -= np.median(off[start:])
        noise = float(np.median(np.abs(off[start:])))
        left = max(0.0, limit - slope * x[-1] - np.median(y - slope * x))
        # what saturates grows in each half by the same ratio less than in the one before: with a
        # ratio as low as the noise of the medians of two blocks allows
        doubt = 3 * noise * math.sqrt(3.1 * 5 / len(y))
        ratio = (second - doubt) / (first + doubt)
        if (slope <= 0 or left > HORIZON * slope * (x[-1] - x[0])
                or ratio < 1 and left > second * ratio / (1 - ratio)):
            continue
        while start and abs(off[start - 1]) < 4 * noise + 1e-6 * total:
            start -= 1  # it began before this half
        if not best or noise / total < best[0]:  # the straightest
            best = noise / total, start, slope, float(x[-1] + left / slope)
    return best and best[1:]


def median_rise(values: np.ndarray) -> float:
    fifth = len(values) // 5
    return float(np.median(values[-fifth:]) - np.median(values[:fifth]))


def amount(value: float, unit: str) -> str:
    return f"{value:.1f} GB" if unit else f"{value:,.0f}"


def rate(per_step: float, unit: str) -> str:
    """0.001, "GB" → 1.0 MB a step"""
    if not unit:
        often = "1,000 steps" if per_step < 1 else "step"
        return f"by {per_step * (1000 if per_step < 1 else 1):,.3g} every {often}"
    for small, size in (("GB", 1), ("MB", 1e-3), ("kB", 1e-6)):
        if per_step > 0.95 * size:
            return f"{per_step / size:.{int(per_step < 9.5 * size)}f} {small} a step"
    return f"{per_step * 1e9:.0f} bytes a step"


# --- which line it is -----------------------------------------------------------------------


class Allocations:
    """The line that allocates what is kept, found by tracemalloc while steps go on.

    It sees what Python allocates: also the objects around tensors, files and threads. While it
    runs, steps take up to three times as long.
    """

    STEPS, SECONDS = 20, 1.0  # of each of its two halves, at least

    def __init__(self, step: int):
        self.since, self.before = (step, time.perf_counter()), None
        tracemalloc.start(6)  # frames, of which some are of libraries

    def look(self, step: int) -> str:
        """At a log: once enough has been seen, the line and what it keeps; or ""."""
        steps, seconds = step - self.since[0], time.perf_counter() - self.since[1]
        if not tracemalloc.is_tracing() or steps < self.STEPS or seconds < self.SECONDS:
            return ""
        gc.collect()
        now = self.by_line()
        if self.before is None:  # what was allocated before is unknown, and caches have filled
            self.since, self.before = (step, time.perf_counter()), now
            return ""
        tracemalloc.stop()
        kept = {line: (number - self.before.get(line, (0, 0))[0],
                       size - self.before.get(line, (0, 0))[1])
                for line, (number, size) in now.items()}
        line, (number, size) = max(kept.items(), key=lambda item: item[1][1], default=("", (0, 0)))
        if number < 3:
            return "no line of Python was seen to allocate it"
        return (f"{line} keeps {rate(size / steps / 1e9, 'GB')}, in {number:,} objects since step "
                f"{self.since[0]:,} (found by tracemalloc, in {2 * seconds:.0f} s)")

    def by_line(self) -> dict[str, tuple[int, int]]:
        """{"FILE:LINE": (blocks, bytes)} allocated since it began and not freed."""
        out = {}
        for trace in tracemalloc.take_snapshot().traces:
            frame = next((f for f in reversed(trace.traceback)
                          if worth_naming(f.filename) or f.filename.startswith(HERE)), None)
            if frame and not frame.filename.startswith(HERE):
                line = f"{short(frame.filename)}:{frame.lineno}"
                number, size = out.get(line, (0, 0))
                out[line] = number + 1, size + trace.size
        return out
