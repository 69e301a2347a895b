"""What runs out: memory, open files, threads, disk space; how much is left, and until which step.

Rows of metrics.jsonl go into ResourceTrends, which says once for each resource that its growth
would end the run before its last step.
"""

import contextlib
import gc
import math
import multiprocessing
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steady.ranks.ranks import rank_and_world
from steady.watch import proc

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
    "host memory": "look for what the loop keeps, such as losses that are never detached: "
                   "--monitor full names the types that grow",
    WORKERS: "look for what the dataset keeps in each worker, or fewer --num_workers",
    "device memory": "look for tensors that the loop keeps, such as losses that are never "
                     "detached: --monitor full names the types that grow",
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
        "memory/open_files": proc.count("proc/self/fd"),
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
        row["memory/threads"] = proc.count("proc/self/task")
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
    """What the monitor asks at its logs: what there is, what will not last, what grows."""

    def __init__(self, cfg, run_dir: Path | None, device: torch.device, kept: list[dict]):
        self.cfg, self.run_dir, self.device = cfg, run_dir, device
        # checkpoints take more and more space until old ones are deleted
        settled = (cfg.keep_checkpoints + 2) * cfg.save_interval
        self.trends = ResourceTrends(cfg.max_steps, settled_step=settled)
        self.limits_known, self.types = False, None
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
        return [str(event) for event in self.trends.add(row)]

    def growing(self) -> str:
        """With --monitor full: which types of objects there are more of than at the last call."""
        if self.cfg.monitor != "full":
            return ""
        before, self.types = self.types, count_types()
        return growing_types(before, self.types) if before else ""


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

    Growth counts if it goes on over five blocks of samples without coming to rest, leaves what was
    seen before, and is significant; it reaches the limit if it does so within HORIZON times as long
    as it has lasted, and if its slowing down, continued, does not end it earlier.
    """
    start = 0
    while (bent := bend(steps[start:], values[start:])) is not None:
        start += bent  # warm-up, or a level, before it
        if len(steps) - start < LEAST:
            return None  # too new
    x, y = steps[start:], values[start:]
    blocks = np.array([np.median(block) for block in np.array_split(y, 5)])
    rises, total = np.diff(blocks), blocks[-1] - blocks[0]
    if rises.min() <= total / 16:  # a quarter of the mean; a single step rises in one of them
        return None
    if blocks[-1] - values[: start + len(y) // 5].max() < 0.5 * total:
        return None  # a sawtooth: it has been there before
    first, second = blocks[2] - blocks[0], blocks[4] - blocks[2]
    slope, least = theil_sen(x, y)
    if least <= 0:
        return None
    rest = y - slope * x
    level = float(np.median(rest)) + slope * x[-1]
    left = max(0.0, limit - level)
    # What saturates, as 1 - exp(-t), grows in each half by the same ratio less than in the one
    # before, so by second * (ratio + ratio² + …) more: with a ratio as low as the noise allows.
    noise = 1.5 * float(np.median(np.abs(rest - np.median(rest))))  # standard deviation
    doubt = 2 * noise * math.sqrt(3.1 * 5 / len(y))  # of the difference of two blocks' medians
    ratio = (second - doubt) / (first + doubt)
    if left > HORIZON * slope * (x[-1] - x[0]) or ratio < 1 and left > second * ratio / (1 - ratio):
        return None
    off = np.abs(values - slope * steps - np.median(rest))
    while start and off[start - 1] < 2 * noise + 1e-6 * total:
        start -= 1  # a bend is found roughly; the line may begin before it
    return start, slope, float(x[-1] + left / slope)


def bend(x: np.ndarray, y: np.ndarray) -> int | None:
    """The index at which two lines that meet there fit best, if they halve the squared error."""
    if len(x) < LEAST:
        return None
    t = (x - x[0]) / (x[-1] - x[0])
    line, _ = np.linalg.qr(np.stack([np.ones_like(t), t], axis=1))
    error = y - line @ (line.T @ y)  # of one line
    hinges = np.maximum(0, t - t[2:-2, None])  # [candidates, samples]
    hinges -= hinges @ line @ line.T
    gain = (hinges @ error) ** 2 / (hinges**2).sum(1)
    best = int(gain.argmax())
    if error @ error < 1e-6 * y.var() * len(y) or gain[best] < 0.5 * (error @ error):
        return None
    return best + 2


def theil_sen(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The median of the slopes of all pairs, and the lower end of its 99 % confidence interval.

    P. K. Sen, Journal of the American Statistical Association 63 (1968).
    """
    i, j = np.triu_indices(len(x), 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    n = len(x)
    width = 2.58 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return float(np.median(slopes)), float(slopes[int((len(slopes) - width) / 2)])


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


# --- what grows ------------------------------------------------------------------------------


def count_types() -> Counter:
    """{type: objects} that Python's collector knows, and {type + " bytes": bytes} of tensors.

    Storage that several tensors share counts once. What only C++ holds, such as what a graph keeps
    for the backward pass, is not seen; the tensor that keeps the graph is.
    """
    counts, seen = Counter(), set()
    for thing in gc.get_objects():
        try:  # objects may raise whatever they like when they are looked at
            kind = type(thing)
            if kind is torch.UntypedStorage:  # made by looking at tensors, below
                continue
            counts[kind.__name__] += 1
            if issubclass(kind, torch.Tensor):
                storage = thing.untyped_storage()
                key = str(storage.device), storage.data_ptr()
                if key not in seen:
                    seen.add(key)
                    counts[f"{kind.__name__} bytes"] += storage.nbytes()
        except Exception:  # noqa: S112
            continue
    return counts


def growing_types(before: Counter, after: Counter, most: int = 5) -> str:
    """The types that grew, those with most bytes first: "Tensor +1,200 (+4.9 MB), dict +300"."""
    grown = after - before  # without what shrank
    names = {name.removesuffix(" bytes") for name in grown}
    first = sorted(names, key=lambda n: (-grown[f"{n} bytes"], -grown[n], n))[:most]
    texts = []
    for name in first:
        size = grown[f"{name} bytes"] / 1e6
        texts.append(f"{name} {after[name] - before[name]:+,d}" + f" (+{size:.1f} MB)" * (size > 0))
    return ", ".join(texts)
