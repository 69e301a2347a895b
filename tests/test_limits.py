"""What runs out is said early, and what only looks like it is not. Rows are synthetic."""

import os
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest
import torch
from conftest import tiny_config, whole_crowded

from steady.checkpoints import opening
from steady.guard.deadline import UNKNOWN
from steady.watch import machine, proc
from steady.watch import trends as limits
from steady.watch.trends import MOST, Allocations, Resources, read_resources

CPU = torch.device("cpu")
LAST = 100_000
LIMITS = {"limit/host_gb": 8.0, "limit/device_gb": 80.0, "limit/open_files": 1024,
          "limit/threads": 1000}
HOST = "memory/host_anonymous_gb"
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def the_same_noise_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "rng", np.random.default_rng(0))


def noise(sd=0.02):
    return sd * rng.standard_normal()


def resources_of(last_step=LAST, **options) -> Resources:
    options = dict(save_interval=0) | options
    resources = Resources(tiny_config(max_steps=last_step, **options), None, CPU)
    resources.limits = LIMITS
    return resources


def watch(value, name=HOST, rows=1000, every=10, resources=None, first=0, also=None, **options):
    """The findings of a run whose row of step s has {name: value(s)}."""
    resources = resources or resources_of(**options)
    steps = range(first + every, first + rows * every + 1, every)
    return [finding for s in steps
            for finding in resources.find({"step": s, name: value(s)} | (also(s) if also else {}))]


def test_a_newer_torch_is_mentioned(monkeypatch):
    assert not opening.untested()
    for version, newer in (("2.11.0", False), ("2.15.1+cu132", False), ("2.16.0a0+git12", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (version in opening.untested()) == newer


# --- an alarm ---


def leak(s):
    return 1 + 0.001 * max(0, s - 120) + noise()


def test_a_leak_is_said_early_with_its_rate_its_beginning_and_its_end():
    resources, said = resources_of(), []
    for s in range(10, 7000, 10):
        said += [(s, finding) for finding in resources.find({"step": s, HOST: leak(s)})]
    [(step, finding)] = said  # once
    assert finding.code == "host memory" and abs(finding.since - 120) <= 120
    assert finding.values["per_step"] == pytest.approx(0.001, rel=0.03)
    assert finding.values["at_step"] == pytest.approx(7120, rel=0.03)
    assert step < 7120 / 4
    assert str(finding).startswith("host memory runs out at about step 7,")
    assert "B/step since about step 1" in str(finding)


def test_nothing_runs_out_while_the_steps_are_unknown():
    assert not watch(leak, last_step=UNKNOWN)


@pytest.mark.parametrize("name, value, resource, at_step", [
    # what began late does not count what was before; nor a sawtooth on top
    (HOST, lambda s: 2 + 0.001 * max(0, s - 9000) + noise(), "host memory", 15_000),
    (HOST, lambda s: 1 + 0.5 * (s % 350) / 350 + 0.0005 * s, "host memory", 14_000),
    ("memory/open_files", lambda s: 20 + s // 25 + s % 3, "open files", 25_000),
    ("memory/threads", lambda s: 20 + s // 20, "threads", 19_600),
    ("memory/allocated_gb", lambda s: 10 + 0.01 * s, "device memory", 7000),
    ("disk/free_gb", lambda s: 100 - 2 * (s // 500), "disk space", 25_000),
])
def test_every_resource_is_watched(name, value, resource, at_step):
    [finding] = watch(value, name, rows=2000)
    assert finding.code == resource and "runs out at about step" in str(finding)
    assert finding.values["at_step"] == pytest.approx(at_step, rel=0.05)


def test_what_a_step_needs_of_the_device_counts():
    """Between steps 10 GB are allocated, but 40 GB in a step: 40 of 80 GB are left."""
    [finding] = watch(lambda s: 10 + 0.01 * s, "memory/allocated_gb",
                      also=lambda s: {"memory/peak_gb": 40 + 0.01 * s})
    assert finding.values["at_step"] == pytest.approx(4000, rel=0.02)


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


def test_no_period_of_a_sawtooth_is_taken_for_growth():
    """Also of those close to the steps between two samples that are kept."""
    for period in (39, 41, 79, 81, 161):
        assert watch(lambda s, p=period: 3 + 4.5 * (s % p) / p, rows=2500) == [], period


def test_growth_that_reaches_the_limit_only_after_the_last_step_is_no_alarm():
    assert watch(lambda s: 2 + 0.00005 * s + noise(), rows=3000, every=33) == []
    [finding] = watch(lambda s: 2 + 0.000075 * s + noise(), rows=3000, every=33)
    assert finding.values["at_step"] == pytest.approx(80_000, rel=0.05)


def test_the_first_checkpoints_are_no_alarm():
    def kept(s):
        return 100 - 6 * min(10, s // 500)

    assert watch(kept, "disk/free_gb", save_interval=500, keep_checkpoints=10) == []
    assert watch(kept, "disk/free_gb") != []  # the test would see it


# --- restarts ---


def test_a_restart_begins_anew_but_the_disk_goes_on():
    resources = resources_of()
    disk = dict(resources=resources, also=lambda s: {"disk/free_gb": 10 - 0.0005 * s})
    assert len(watch(leak, rows=400, **disk)) == 2
    # another machine, before the memory of the first step
    resources.find({"step": 4005, "perf/startup_s": 1.0, HOST: 0.1} | LIMITS)
    assert list(resources.samples) == ["disk space"]
    assert [f.code for f in watch(leak, first=4010, rows=400, **disk)] == ["host memory"]
    resources.find({"step": 8015, "perf/startup_s": 1.0})  # whose limits are unknown
    assert watch(leak, first=8020, **disk) == []


def test_disk_growth_is_found_across_restarts():
    resources, found = resources_of(), []
    for s in range(10, 10_000, 10):
        start = {"perf/startup_s": 1.0} if s % 150 == 0 else {}
        found += resources.find({"step": s, "disk/free_gb": 50 - 0.002 * s} | start)
    assert [f.values["at_step"] for f in found] == [25_000]


def test_what_is_kept_stays_little():
    resources = resources_of(10**9)
    watch(lambda s: 6 + s * 1e-9, resources=resources, rows=5000)
    [samples] = resources.samples.values()
    assert MOST / 2 <= len(samples.means) < MOST and len(samples.rows) < samples.size == 64


# --- what is read ---

Disk = namedtuple("Disk", "f_blocks f_bavail f_frsize")


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
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    put(tmp_path, proc__meminfo="MemTotal: 20000000 kB\nMemAvailable: 10000000 kB\nCached: 1 kB\n",
        proc__self__cgroup="0::/job/task\n")
    return tmp_path


def test_what_is_read_at_a_log(root, monkeypatch):
    put(root, proc__self__statm="5000 3000 1000 1 0 1 0\n", proc__self__task__11="",
        proc__self__task__12="", proc__self__fd__0="", proc__7__statm="9 900 100 1 0 1 0\n")
    worker = namedtuple("Worker", "pid")(7)
    monkeypatch.setattr(limits.multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(proc.os, "sysconf", lambda name: 4096)
    monkeypatch.setattr(limits.os, "statvfs", lambda path: Disk(10**9, 10**6, 4096))
    assert read_resources(CPU, root) == {
        "memory/threads": 2, "memory/open_files": 1, "memory/host_rss_gb": 3000 * 4096 / 1e9,
        HOST: (2000 + 800) * 4096 / 1e9,  # with the loader's, without the pages of files
        "disk/free_gb": 4.096}


def test_what_is_missing_is_left_out(root):
    assert read_resources(CPU, None) == read_resources(CPU, root / "none") == {}
    (root / "proc/meminfo").unlink()
    assert limits.limits({}, CPU) == {"limit/open_files": 1024}


def test_memory_that_is_available_is_added_to_what_is_used(root, monkeypatch):
    row = {HOST: 2.0, "memory/host_rss_gb": 9.0}
    assert limits.limits(row, CPU)["limit/host_gb"] == pytest.approx(2 + 10.24)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert limits.limits(row, CPU)["limit/host_gb"] == pytest.approx(2 + 2.56)


@pytest.mark.parametrize("files, left", [
    ({"proc__self__cgroup": "0::/job/task\n",  # version 2, also from above
      "sys__fs__cgroup__job__task__memory.max": "max\n",
      "sys__fs__cgroup__job__task__memory.current": "3000000000\n",
      "sys__fs__cgroup__job__memory.max": "6000000000\n",
      "sys__fs__cgroup__job__memory.current": "5000000000\n",
      "sys__fs__cgroup__job__memory.stat":
          "anon 1\ninactive_file 200000000\nactive_file 300000000\n"}, 1.5e9),
    ({"proc__self__cgroup": "8:pids:/\n4:cpu,memory:/job\n",  # version 1
      "sys__fs__cgroup__memory__job__memory.limit_in_bytes": "6000000000\n",
      "sys__fs__cgroup__memory__job__memory.usage_in_bytes": "5000000000\n",
      "sys__fs__cgroup__memory__job__memory.stat":
          "inactive_file 7\ntotal_inactive_file 100000000\ntotal_active_file 0\n"}, 1.1e9),
])
def test_a_cgroup_limits_memory(root, files, left):
    put(root, **files)
    assert proc.available_bytes() == left


def test_threads_are_limited_by_the_user_and_the_cgroup(root, monkeypatch):
    now = {"memory/threads": 10}
    assert "limit/threads" not in limits.limits(now, CPU)
    monkeypatch.setattr(proc, "soft_limit", lambda name: 800)
    assert limits.limits(now, CPU)["limit/threads"] == 800
    put(root, **{"sys__fs__cgroup__job__pids.max": "200\n",
                 "sys__fs__cgroup__job__pids.current": "60\n"})
    assert limits.limits(now, CPU)["limit/threads"] == 10 + 140


@pytest.mark.parametrize("line", ["throttled_usec 7000", "throttled_time 7000000"])
def test_what_kept_a_process_from_running(root, line):
    """Also in a container, by either version of cgroups."""
    put(root, proc__stat=f"cpu  1 2 3 4 5 6 7 {80 * os.cpu_count()} 0 0\ncpu0 1\n",
        **{"sys__fs__cgroup__job__cpu.stat": f"nr_throttled 3\n{line}\n"})
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    assert machine.counters() == {"steal_ms": 80 * tick, "throttled_ms": pytest.approx(7)}
    (root / "proc/stat").unlink()
    assert "steal_ms" not in machine.counters()


# --- which line it is ---

KEPT = []


def keep_some(size):
    KEPT.append(bytes(size))
    return bytes(size)  # and what is not kept


def test_after_a_warning_the_line_that_keeps_memory_is_named(monkeypatch):
    monkeypatch.setattr(Allocations, "SECONDS", 0.0)
    resources, told = resources_of(), []
    try:
        for s in range(10, 9001, 10):
            told += resources.warnings({"step": s, HOST: leak(s)})
            if resources.allocations:
                keep_some(50_000)
    finally:
        tracemalloc.stop()
        KEPT.clear()
    warning, line = told
    number = keep_some.__code__.co_firstlineno + 1
    assert "host memory runs out" in warning
    assert line.startswith(f"tests/test_limits.py:{number} keeps 5k")  # per step
    assert resources.allocations is None and not tracemalloc.is_tracing()


@pytest.mark.parametrize("whose", ["ours", "a fork's"])
def test_what_traces_memory_ends_with_the_monitor(whose):
    """As before a rollback, which makes another; a fork's own goes on."""
    resources = resources_of()
    if whose != "ours":
        tracemalloc.start()
    try:
        for s in range(10, 9001, 10):
            if resources.warnings({"step": s, HOST: leak(s)}):
                break
        assert tracemalloc.is_tracing()
        resources.close()
        assert tracemalloc.is_tracing() == (whose != "ours")
    finally:
        tracemalloc.stop()


# --- at the start ---


@pytest.mark.parametrize("at_start, running, said", [
    (0, [12, 12, 12, 12, 12], "11 other threads compete for 2 cores"),
    (0, [2, 9, 2, 9, 2], None),  # for a moment
    (0, [], None),  # no /proc
    (1, [2, 2, 2, 2, 2], "1 other thread competed for 2 cores"),  # and ours sleep for that
])
def test_a_machine_whose_cores_others_want_is_told_at_the_start(
        run, monkeypatch, at_start, running, said):
    def read(path):
        if path != "proc/loadavg":
            return plain(path)
        return f"9.1 9.2 9.3 {running.pop()}/90 8697\n" if running else ""

    plain = proc.read
    monkeypatch.setattr(opening, "crowded", whole_crowded)
    monkeypatch.setattr(opening.process, "competitors", [at_start])
    monkeypatch.setattr(opening.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(opening.proc, "read", read)
    told = run("--max_steps", 1, "--warmup_steps", 1)
    assert said in told if said else "other threads" not in told
