"""The kernel's figures of a process, of this machine, and of the cgroups that limit them."""

import math
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # /proc and /sys are below it


def read(path: str) -> str:
    """The text of a file below ROOT; "" if it cannot be read."""
    with suppress(OSError), open(f"{ROOT}/{path}", "rb", 0) as file:  # 3 times as fast as text
        return file.read().decode(errors="replace")
    return ""


def number(path: str, after: str = "") -> float:
    """The first number in such a file, or after a text in it; infinity for "max" or without one."""
    text = read(path)
    words = (text.partition(after)[2] if after else text).split()[:1]
    return float(words[0]) if words and words[0].isdigit() else math.inf


def names(folder: str) -> list[str]:
    """Names of the files in a folder below ROOT; [] if there is no such folder."""
    with suppress(OSError):
        return os.listdir(ROOT / folder)
    return []


def usable_cores() -> int:
    """Cores that this process may run on (a container or a job may have fewer than the machine)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def stat_fields(pid: int | str) -> list[str]:
    """Fields of proc(5) of a process, from its state on; [] if it is gone."""
    return read(f"proc/{pid}/stat").rpartition(")")[2].split()  # the process's name may hold spaces


def rss_bytes(pid: int | str = "self", shared: bool = True) -> int:
    """Resident memory of a process, with or without mapped files (token files); 0 if unknown."""
    pages = read(f"proc/{pid}/statm").split() or (0, 0, 0)
    return (int(pages[1]) - int(pages[2]) * (not shared)) * os.sysconf("SC_PAGE_SIZE")


def process_age_seconds() -> float:
    """Seconds since this process was started; 0 if unknown, or in a notebook, as that idles."""
    if not hasattr(sys, "ps1") and (fields := stat_fields("self")):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def available_bytes() -> float:
    """Host memory that this process could still take: the system's, or less in a cgroup."""
    rooms = [number("proc/meminfo", "MemAvailable:") * 1024]
    for folder in cgroup_folders():
        limit, used = (number(f"{folder}/memory.{name}") for name in ("max", "current"))
        if math.isfinite(limit) and math.isfinite(used):
            files = (number(f"{folder}/memory.stat", f"\n{kind}_file ")
                     for kind in ("inactive", "active"))
            rooms.append(limit - used + sum(files))  # the kernel can drop cached files
    return max(0.0, min(rooms))


def available_threads(now: int) -> float:
    """Threads that could still be started, by the user's limit and by the cgroup's."""
    rooms = [soft_limit("RLIMIT_NPROC") - now]  # the user's other processes are not counted
    for folder in cgroup_folders():
        if (limit := number(f"{folder}/pids.max")) < math.inf:
            rooms.append(limit - number(f"{folder}/pids.current"))
    return max(0.0, min(rooms))


def cgroup_folders() -> list[str]:
    """The cgroups (version 2) that limit this process: its own and those above it."""
    path = read("proc/self/cgroup").partition("0::")[2].partition("\n")[0]
    names = [*filter(None, path.split("/"))]
    return ["/".join(("sys/fs/cgroup", *names[:n])) for n in range(len(names), -1, -1)]


def soft_limit(name: str) -> float:
    limit = resource.getrlimit(getattr(resource, name))[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit
