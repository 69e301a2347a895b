"""What runs out is said early, and what only looks like it is not. Rows are synthetic."""

import os
from collections import namedtuple

import numpy as np
import pytest
import torch

from steady.watch import machine, proc
from steady.watch.history import History
from steady.watch.machine import limits, read_resources
from steady.watch.report import news

CPU = torch.device("cpu")
LIMITS = {"limit/host_gb": 8.0, "limit/device_gb": 80.0, "limit/open_files": 1024,
          "limit/threads": 1000}
HOST = "memory/host_anonymous_gb"
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def the_same_noise_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "rng", np.random.default_rng(0))


def noise(sd=0.02):
    return sd * rng.standard_normal()


def watch(value, name=HOST, rows=1000, every=10, first=0, also=None, last_step=100_000,
          settled_step=0) -> list:
    """The findings reported in a run whose row of step s has {name: value(s)}, as (step, finding).
    """
    history = History([{"step": 0, "about": {"last_step": last_step,
                                             "settled_step": settled_step}}])
    reported = []
    for i, s in enumerate(range(first + every, first + rows * every + 1, every)):
        row = {"step": s, "perf/step_ms": 1.0, name: value(s)} | ({} if i else {"about": LIMITS})
        history.append(row | (also(s) if also else {}))
        if i % 10 == 9:  # as often as the monitor looks
            for found in news(history):
                reported.append((s, found))
                history.append({"step": s, "finding": found.row()})
    return reported


# --- an alarm ---


def leak(s):
    return 1 + 0.001 * max(0, s - 120) + noise()


def test_a_leak_is_reported_early_with_its_rate_its_beginning_and_its_end():
    [(step, found)] = watch(leak, rows=700)  # once
    facts = dict(found.values)
    assert found.code == "host memory" and abs(found.since - 120) <= 120
    assert facts["per_step"] == pytest.approx(0.001, rel=0.03)
    assert facts["at_step"] == pytest.approx(7120, rel=0.03) and step < 7120 / 4
    assert str(found).startswith("host memory runs out at about step 7,")
    assert "B/step since about step 1" in str(found)


@pytest.mark.parametrize("name, value, resource, at_step", [
    # what began late does not count what was before; nor a sawtooth on top
    (HOST, lambda s: 2 + 0.001 * max(0, s - 9000) + noise(), "host memory", 15_000),
    (HOST, lambda s: 1 + 0.5 * (s % 350) / 350 + 0.0005 * s, "host memory", 14_000),
    ("memory/open_files", lambda s: 20 + s // 25 + s % 3, "open files", 25_000),
    ("memory/threads", lambda s: 20 + s // 20, "threads", 19_600),
    ("memory/allocated_gb", lambda s: 10 + 0.01 * s, "device memory", 7000),
    ("disk/free_gb", lambda s: 100 - 2 * (s // 500), "disk space", 25_000)])
def test_every_resource_is_watched(name, value, resource, at_step):
    (_, found), *_ = watch(value, name, rows=2000)
    assert found.code == resource and "runs out at about step" in str(found)
    assert dict(found.values)["at_step"] == pytest.approx(at_step, rel=0.06)


def test_what_a_step_needs_of_the_device_counts():
    """Between steps 10 GB are allocated, but 40 GB in a step: 40 of 80 GB are left."""
    [(_, found)] = watch(lambda s: 10 + 0.01 * s, "memory/allocated_gb", rows=300,
                         also=lambda s: {"memory/peak_gb": 40 + 0.01 * s})
    assert dict(found.values)["at_step"] == pytest.approx(4000, rel=0.02)


# --- no alarm ---


@pytest.mark.parametrize("value", [
    lambda s: 6 + noise(0.3),
    lambda s: 2 + 4 * (1 - np.exp(-s / 1000)) + noise(),
    lambda s: 1 + 5 * (1 - np.exp(-s / 1000)),
    lambda s: 4 + 3 * (s > 3000) + noise(0.1),
    lambda s: 2 + 0.8 * (s % 330) / 330,
    lambda s: 6.5 + (s + 300) % 330 / 330,  # close to the limit, but it has been there before
    lambda s: 6 + 0.3 * (s % 1700) / 1700 + noise(0.01),
    lambda s: 6.0,
], ids=["noise", "saturation", "saturation without noise", "one step up", "sawtooth",
        "high sawtooth", "long sawtooth", "constant"])
def test_no_alarm_without_sustained_growth(value):
    assert watch(value, rows=2000) == []


def test_a_sawtooth_and_growth_that_reaches_the_limit_after_the_last_step_are_no_alarm():
    # also periods close to the steps between two samples that are kept
    for period in (39, 41, 79, 81, 161):
        assert watch(lambda s, p=period: 3 + 4.5 * (s % p) / p, rows=2500) == [], period
    assert watch(lambda s: 2 + 0.00005 * s + noise(), rows=3000, every=33) == []
    (_, found), *_ = watch(lambda s: 2 + 0.000075 * s + noise(), rows=3000, every=33)
    assert dict(found.values)["at_step"] == pytest.approx(80_000, rel=0.15)
    assert watch(leak, last_step=0) == []  # nor if the last step is unknown


def test_the_first_checkpoints_are_no_alarm():
    def kept(s):
        return 100 - 6 * min(10, s // 500)

    assert watch(kept, "disk/free_gb", settled_step=12 * 500) == []
    assert watch(kept, "disk/free_gb") != []  # the test would see it


# --- restarts ---


def test_a_restart_begins_anew_but_the_disk_goes_on():
    def leaks(s):  # two processes, the second one on a machine of other limits
        return 1 + 0.001 * (s % 4000)

    def also(s):
        start = {"perf/startup_s": 1.0, "about": LIMITS} if s == 4000 else {}
        return {"disk/free_gb": 10 - 0.0005 * s} | start

    reported = watch(leaks, rows=700, also=also)
    assert sorted(found.code for _, found in reported) == [
        "disk space", "host memory", "host memory"]
    assert [step > 4200 for step, found in reported if found.code == "host memory"] == [False, True]
    (_, found), = watch(lambda s: 50 - 0.002 * s, "disk/free_gb", also=lambda s: (
        {"perf/startup_s": 1.0} if s % 150 == 0 else {}))  # many restarts
    assert dict(found.values)["at_step"] == 25_000


# --- what is read ---

Disk = namedtuple("Disk", "f_blocks f_bfree f_bavail f_frsize")


def put(root, **files):
    """Files below a root that stands in for the system's; __ in a name is /."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with 10 GB available, without limits."""
    monkeypatch.setattr(proc, "ROOT", tmp_path)
    monkeypatch.setattr(proc, "soft_limit",
                        lambda name: 1024 if name == "RLIMIT_NOFILE" else float("inf"))
    put(tmp_path, proc__meminfo="MemTotal: 20000000 kB\nMemAvailable: 10000000 kB\nCached: 1 kB\n",
        proc__self__cgroup="0::/job/task\n")
    return tmp_path


def test_what_is_read_at_a_log(root, monkeypatch):
    put(root, proc__self__statm="5000 3000 1000 1 0 1 0\n", proc__self__task__11="",
        proc__self__task__12="", proc__self__fd__0="", proc__7__statm="9 900 100 1 0 1 0\n")
    worker = namedtuple("Worker", "pid")(7)
    monkeypatch.setattr(machine.multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(proc.os, "sysconf", lambda name: 4096)
    monkeypatch.setattr(machine.os, "statvfs", lambda path: Disk(10**9, 10**7, 10**6, 4096))
    assert read_resources(CPU, root) == {
        "memory/threads": 2, "memory/open_files": 1, "memory/host_rss_gb": 3000 * 4096 / 1e9,
        HOST: (2000 + 800) * 4096 / 1e9,  # with the loader's, without the pages of files
        "disk/free_gb": 4.096}


def test_what_is_missing_is_left_out(root):
    assert read_resources(CPU, root / "none") == {}
    (root / "proc/meminfo").unlink()
    assert limits({}, CPU) == {"limit/open_files": 1024}


def test_what_limits_memory_and_threads(root, monkeypatch):
    """What a process uses and what is left to it, also by a cgroup above it."""
    row = {HOST: 2.0, "memory/host_rss_gb": 9.0, "memory/threads": 10}
    found = limits(row, CPU)
    assert found["limit/host_gb"] == pytest.approx(2 + 10.24) and "limit/threads" not in found
    monkeypatch.setattr(proc, "soft_limit", lambda name: 800)
    assert limits(row, CPU)["limit/threads"] == 800
    put(root, proc__self__cgroup="0::/job/task\n", **{
        "sys__fs__cgroup__job__task__memory.max": "max\n",
        "sys__fs__cgroup__job__task__memory.current": "3000000000\n",
        "sys__fs__cgroup__job__memory.max": "6000000000\n",
        "sys__fs__cgroup__job__memory.current": "5000000000\n",
        "sys__fs__cgroup__job__memory.stat":
            "anon 1\ninactive_file 200000000\nactive_file 300000000\n",
        "sys__fs__cgroup__job__pids.max": "200\n", "sys__fs__cgroup__job__pids.current": "60\n"})
    found = limits(row, CPU)
    assert found["limit/host_gb"] == 2 + 1.5 and found["limit/threads"] == 10 + 140
    monkeypatch.setattr(machine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(machine.dist, "get_world_size", lambda: 4)
    assert limits(row, CPU)["limit/host_gb"] == 2 + 1.5 / 4


def test_what_kept_a_process_from_running(root):
    """Also in a container."""
    put(root, proc__stat=f"cpu  1 2 3 4 5 6 7 {80 * os.cpu_count()} 0 0\ncpu0 1\n",
        proc__pressure__io="some avg10=0.00 avg60=0.00 avg300=0.29 total=5000\nfull total=1\n",
        **{"sys__fs__cgroup__job__cpu.stat": "nr_throttled 3\nthrottled_usec 7000\n"})
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    assert machine.counters() == {"steal_ms": 80 * tick, "throttled_ms": pytest.approx(7),
                                  "disk_ms": 5.0}
    (root / "proc/stat").unlink()
    assert "steal_ms" not in machine.counters()


def test_pressure_of_others_is_not_this_process_s():
    """The kernel counts stalls of all processes; this thread must have read from the disk."""
    stalled = {"disk_ms": 8.0, "memory_ms": 4.0, "steal_ms": 1.0}
    assert machine.own_stalls(stalled) == {"disk_ms": 0.0, "memory_ms": 0.0, "steal_ms": 1.0}
    assert machine.own_stalls(stalled | {"read_bytes": 4096}) == stalled | {"memory_ms": 0.0}
    assert machine.own_stalls(stalled | {"faults": 3}) == stalled
