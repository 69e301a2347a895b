"""What runs out is said early, and what only looks like it is not. Rows are synthetic."""

import os
import tracemalloc
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_config, whole_crowded

from steady.watch import machine, proc, screen
from steady.watch import trends as limits
from steady.watch.trends import (
    MOST,
    Allocations,
    ResourceTrends,
    RunsOut,
    read_resources,
)

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


def watch(value, name=HOST, rows=1000, every=10, trends=None, first=0, also=None, **settings):
    """The events of a run whose row of step s has {name: value(s)}."""
    trends = trends or ResourceTrends(LAST, LIMITS, **settings)
    steps = range(first + every, first + rows * every + 1, every)
    return [event for s in steps
            for event in trends.add({"step": s, name: value(s)} | (also(s) if also else {}))]


# --- an alarm ---


def leak(s):
    return 1 + 0.001 * max(0, s - 120) + noise()


def test_a_leak_is_said_early_with_its_rate_its_beginning_and_its_end():
    [event] = watch(leak)
    assert event.code == "host memory"
    assert abs(event.since - 120) <= 120
    assert event.per_step == pytest.approx(0.001, rel=0.03)
    assert event.at_step == pytest.approx(7120, rel=0.03)
    assert event.found < 7120 / 4
    assert event.limit == 8.0


@pytest.mark.parametrize("warmup", [
    lambda s: 1 - np.exp(-s / 100),
    lambda s: 0.5 * (s >= 100) + 0.5 * (s >= 500) + 0.5 * (s >= 1000),
], ids=["caches fill", "first evaluation and checkpoints"])
def test_a_leak_after_a_warm_up_is_found(warmup):
    [event] = watch(lambda s: 1 + warmup(s) + 0.0003 * max(0, s - 2000) + noise())
    assert abs(event.since - 2000) < 1000  # a quarter of what was seen since
    assert event.per_step == pytest.approx(0.0003, rel=0.1)
    seen, to_come = event.found - event.since, event.at_step - event.found
    assert to_come < 5.5 * seen  # not believed for longer


def test_a_leak_that_begins_late_is_found_and_does_not_count_what_was_before():
    [event] = watch(lambda s: 2 + 0.001 * max(0, s - 9000) + noise(), rows=2000)
    assert abs(event.since - 9000) < 300
    assert event.at_step == pytest.approx(15_000, rel=0.02)


def test_a_leak_under_a_sawtooth_is_found():
    [event] = watch(lambda s: 1 + 0.5 * (s % 350) / 350 + 0.0005 * s)
    assert event.per_step == pytest.approx(0.0005, rel=0.1)


def test_disk_space_that_goes_in_steps_runs_towards_zero():
    [event] = watch(lambda s: 100 - 2 * (s // 500), "disk/free_gb")
    assert event.code == "free disk space"
    assert event.at_step == pytest.approx(25_000, rel=0.05)
    assert event.limit == 0


@pytest.mark.parametrize("name, value, resource, at_step", [
    ("memory/open_files", lambda s: 20 + s // 25 + s % 3, "open files", 25_000),
    ("memory/threads", lambda s: 20 + s // 20, "threads", 19_600),
    ("disk/free_inodes", lambda s: 20_000 - s, "free inodes", 20_000),
    ("memory/allocated_gb", lambda s: 10 + 0.01 * s, "device memory", 7000),
])
def test_every_resource_is_watched(name, value, resource, at_step):
    [event] = watch(value, name)
    assert event.code == resource
    assert event.at_step == pytest.approx(at_step, rel=0.02)


def test_what_a_step_needs_of_the_device_counts():
    """Between steps 10 GB are allocated, but 40 GB in a step: 40 of 80 GB are left."""
    [event] = watch(lambda s: 10 + 0.01 * s, "memory/allocated_gb",
                    also=lambda s: {"memory/peak_gb": 40 + 0.01 * s})
    assert event.at_step == pytest.approx(4000, rel=0.02)


def test_memory_of_the_loader_counts_and_is_named():
    [event] = watch(lambda s: 1 + noise(), also=lambda s: {"memory/workers_rss_gb": 1 + 0.001 * s})
    assert event.code == "host memory of loader workers"
    assert event.at_step == pytest.approx(6000, rel=0.03)
    [event] = watch(lambda s: 1 + 0.001 * s, also=lambda s: {"memory/workers_rss_gb": 1 + noise()})
    assert event.code == "host memory"


def test_rows_that_lack_a_resource_are_passed_over():
    trends = ResourceTrends(LAST, LIMITS)
    events = []
    for s in range(1, 4000):
        row = {"step": s, "val/loss": 1.0, HOST: leak(s) if s % 10 == 0 else None}
        events += trends.add({"step": s, "anomaly": "loss"}) + trends.add(row)
    assert len(events) == 1


def test_the_rows_may_bring_the_limits():
    trends = ResourceTrends(LAST)
    assert watch(leak, trends=trends, rows=200) == []
    trends.add({"step": 2005, "perf/startup_s": 1.0} | LIMITS)
    assert watch(lambda s: leak(s - 2000), trends=trends, first=2010) != []
    trends.add({"step": 12_015, "perf/startup_s": 1.0})  # another machine, whose limits are unknown
    assert watch(lambda s: leak(s - 12_000), trends=trends, first=12_020) == []


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


def test_noise_and_single_steps_are_no_alarm_in_many_runs():
    for _ in range(8):
        level, step = rng.uniform(3, 6), rng.integers(200, 1600)
        assert watch(lambda s, at=level: at + noise(0.3), rows=200) == []
        assert watch(lambda s, at=step: 4 + 3 * (s > at) + noise(0.1), rows=200) == []


def test_growth_that_reaches_the_limit_only_after_the_last_step_is_no_alarm():
    assert watch(lambda s: 2 + 0.00005 * s + noise(), rows=3000, every=33) == []
    [event] = watch(lambda s: 2 + 0.000075 * s + noise(), rows=3000, every=33)
    assert event.at_step == pytest.approx(80_000, rel=0.05)


def test_growth_that_was_seen_for_a_short_time_is_not_continued_for_long():
    assert watch(lambda s: 1 + 0.001 * s, rows=100) == []  # it would take six times as long


def test_the_first_checkpoints_are_no_alarm():
    def kept(s):
        return 100 - 6 * min(10, s // 500)

    assert watch(kept, "disk/free_gb", settled_step=6000) == []
    assert watch(kept, "disk/free_gb") != []  # the test would see it


# --- once, and anew ---


def test_a_trend_is_reported_once():
    trends = ResourceTrends(LAST, LIMITS)
    assert len(watch(leak, trends=trends, rows=3000)) == 1


def test_a_restart_begins_anew_but_the_disk_goes_on():
    trends = ResourceTrends(LAST, LIMITS)
    disk = dict(trends=trends, also=lambda s: {"disk/free_gb": 10 - 0.0005 * s})
    assert len(watch(leak, rows=400, **disk)) == 2
    trends.add({"step": 4005, "perf/startup_s": 1.0, HOST: 0.1})  # before the first step's memory
    assert list(trends.samples) == ["free disk space"]
    assert [e.code for e in watch(leak, first=4010, rows=400, **disk)] == ["host memory"]


def test_a_process_is_not_compared_with_the_one_before_it():
    trends = ResourceTrends(LAST, LIMITS)
    for s in range(10, 10_000, 10):  # each process has a little more, which stays
        start = {"perf/startup_s": 1.0} if s % 500 == 0 else {}
        assert trends.add({"step": s, HOST: 1 + 0.5 * (s // 500)} | start) == []


def test_disk_growth_is_found_across_restarts():
    trends, events = ResourceTrends(LAST, LIMITS), []
    for s in range(10, 10_000, 10):
        start = {"perf/startup_s": 1.0} if s % 150 == 0 else {}
        events += trends.add({"step": s, "disk/free_gb": 50 - 0.002 * s} | start)
    assert [e.at_step for e in events] == [25_000]


OCCASIONS = dict(saves=100, evaluations=500, samples=0)


@pytest.mark.parametrize("value, occasions, found", [
    (lambda s: 1 + 0.001 * s, OCCASIONS, ""),
    (lambda s: 1 + 0.1 * ((s - 1) // 100), OCCASIONS, "saves"),
    (lambda s: 1 + 0.5 * ((s - 1) // 500), OCCASIONS, "evaluations"),
    (lambda s: 1 + 0.1 * ((s - 1) // 100) + 0.0002 * s, OCCASIONS, ""),
    (lambda s: 1 + 0.1 * ((s - 1) // 100), dict(saves=100, evaluations=100),
     "saves or evaluations"),
    (lambda s: 1 + 0.1 * ((s - 1) // 100), dict(saves=10), ""),  # at each log: who knows
])
def test_growth_at_saves_or_evaluations_is_told_from_that_of_every_step(value, occasions, found):
    """A log comes before what else is due at its step."""
    [event] = watch(lambda s: value(s) + noise(0.001), occasions=occasions)
    assert event.occasion == found


def test_memory_stays_flat():
    trends = ResourceTrends(10**9, LIMITS)
    watch(lambda s: 6 + s * 1e-9, trends=trends, rows=5000)
    [samples] = trends.samples.values()
    assert MOST / 2 <= len(samples.means) < MOST
    assert samples.size == 64 > len(samples.rows)


# --- the sentence ---


def test_the_sentence():
    event = RunsOut("host memory", 120, 0.001, 8.0, 23_004, 4000, LAST)
    assert str(event) == (
        "host memory grows by 1 MB/step since about step 120: at the limit of 8.0 GB at about "
        "step 23,000 of 100,000; look for what the loop keeps, such as losses that are never "
        "detached")
    assert "MB/step, nearly all of it at saves, since about" in str(
        replace(event, occasion="saves"))
    files = replace(event, code="open files", per_step=0.04, limit=1024)
    assert str(files).startswith("open files grow by 40 every 1,000 steps since about step 120: "
                                 "at the limit of 1,024 at")
    disk = replace(event, code="free disk space", limit=0.0)
    assert str(disk).startswith("free disk space shrinks by 1 MB/step since about step 120: "
                                "none left at about step 23,0")


@pytest.mark.parametrize("gb, text", [
    (2.0, "2 GB/step"), (0.0123, "12.3 MB/step"), (4e-6, "4 kB/step"), (5e-8, "50 bytes/step")])
def test_rates_have_units_that_a_person_reads(gb, text):
    assert limits.rate(gb, "GB") == text


# --- what is read ---

Disk = namedtuple("Disk", "f_blocks f_bavail f_frsize f_files f_favail")


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
        proc__self__cgroup="0::/job/task\n", proc__loadavg="0.1 0.2 0.3 3/90 8697\n")
    return tmp_path


def test_what_is_read_at_a_log(root, monkeypatch):
    put(root, proc__self__statm="5000 3000 1000 1 0 1 0\n", proc__self__task__11="",
        proc__self__task__12="")
    monkeypatch.setattr(proc.os, "sysconf", lambda name: 4096)
    monkeypatch.setattr(limits.os, "statvfs", lambda path: Disk(10**9, 10**6, 4096, 50, 20))
    assert read_resources(root) == {
        "memory/threads": 2, HOST: 2000 * 4096 / 1e9,  # without the pages of files
        "disk/free_gb": 4.096, "disk/free_inodes": 20}


def test_what_is_missing_is_left_out(root, monkeypatch):
    monkeypatch.setattr(limits.os, "statvfs", lambda path: Disk(10**9, 10**6, 4096, 0, 0))
    assert read_resources(root) == {"disk/free_gb": 4.096}  # btrfs, and no /proc
    assert read_resources(None) == {}
    (root / "proc/meminfo").unlink()
    (root / "proc/loadavg").unlink()
    assert limits.limits({}, CPU) == {"limit/open_files": 1024}
    monkeypatch.undo()
    assert "disk/free_gb" not in read_resources(root / "none")  # a folder that is gone


def test_memory_that_is_available_is_added_to_what_is_used(root, monkeypatch):
    row = {HOST: 2.0, "memory/workers_rss_gb": 1.0, "memory/host_rss_gb": 9.0}
    assert limits.limits(row, CPU)["limit/host_gb"] == pytest.approx(3 + 10.24)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert limits.limits(row, CPU)["limit/host_gb"] == pytest.approx(3 + 2.56)


def test_a_cgroup_of_version_2_limits_memory_also_from_above(root):
    group = {"max": "max\n", "current": "3000000000\n"}
    put(root, **{f"sys__fs__cgroup__job__task__memory.{k}": v for k, v in group.items()})
    group = {"max": "6000000000\n", "current": "5000000000\n",
             "stat": "anon 1\ninactive_file 200000000\nactive_file 300000000\n"}
    put(root, **{f"sys__fs__cgroup__job__memory.{k}": v for k, v in group.items()})
    assert proc.available_bytes() == 1.5e9


def test_a_cgroup_of_version_1_limits_memory(root):
    put(root, proc__self__cgroup="8:pids:/\n4:cpu,memory:/job\n")
    group = {"limit_in_bytes": "6000000000\n", "usage_in_bytes": "5000000000\n",
             "stat": "inactive_file 7\ntotal_inactive_file 100000000\ntotal_active_file 0\n"}
    put(root, **{f"sys__fs__cgroup__memory__job__memory.{k}": v for k, v in group.items()})
    assert proc.available_bytes() == 1.1e9


def test_threads_are_limited_by_the_system_the_user_and_the_cgroup(root, monkeypatch):
    now = {"memory/threads": 10}
    assert "limit/threads" not in limits.limits(now, CPU)
    put(root, **{"proc__sys__kernel__threads-max": "1000\n"})
    assert limits.limits(now, CPU)["limit/threads"] == 10 + 910
    monkeypatch.setattr(proc, "soft_limit", lambda name: 800)
    assert limits.limits(now, CPU)["limit/threads"] == 800
    put(root, **{"sys__fs__cgroup__job__pids.max": "200\n",
                 "sys__fs__cgroup__job__pids.current": "60\n"})
    assert limits.limits(now, CPU)["limit/threads"] == 10 + 140


@pytest.mark.parametrize("line", ["throttled_usec 7000", "throttled_time 7000000"])
def test_what_kept_a_process_from_running(root, line):
    """Also in a container, by either version of cgroups."""
    put(root, proc__stat=f"cpu  1 2 3 4 5 6 7 {80 * os.cpu_count()} 0 0\ncpu0 1\n",
        proc__self__stat=f"9 (a b) {'0 ' * 39}30 0\n",
        **{"sys__fs__cgroup__job__cpu.stat": f"nr_throttled 3\n{line}\n"})
    reader = machine.Machine(CPU)
    reader.close()
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    assert reader.counters() == {
        "steal_ms": 80 * tick, "disk_ms": 30 * tick, "throttled_ms": pytest.approx(7)}
    (root / "proc/stat").unlink()
    assert "steal_ms" not in reader.counters()


def test_the_limit_of_the_device_is_what_others_leave(root, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 * 10**9)
    assert limits.limits({}, torch.device("cuda"))["limit/device_gb"] == 70


def test_this_machine_can_be_read(tmp_path):
    row = read_resources(tmp_path)
    assert all(value >= 0 for value in row.values())
    found = limits.limits(row, CPU)
    assert found.get("limit/host_gb", 1e9) > row.get(HOST, 0)


# --- which line it is ---

KEPT = []


def keep_some(size):
    KEPT.append(bytes(size))
    return bytes(size)  # and what is not kept


@pytest.fixture
def allocations(monkeypatch):
    monkeypatch.setattr(Allocations, "SECONDS", 0.0)
    yield Allocations(100)
    tracemalloc.stop()
    KEPT.clear()


def test_the_line_that_keeps_memory_is_named(allocations):
    for _ in range(20):
        keep_some(100_000)
    assert allocations.look(110) == ""  # too early
    assert allocations.look(120) == ""  # from here on
    for _ in range(20):
        keep_some(50_000)
    text = allocations.look(140)
    line = keep_some.__code__.co_firstlineno + 1
    assert text.startswith(f"tests/test_limits.py:{line} keeps 50 kB/step since step 120")
    assert not tracemalloc.is_tracing()


def test_no_line_is_named_where_python_allocates_nothing(allocations):
    assert allocations.look(120) == ""
    assert "no line" in allocations.look(140)


@pytest.mark.parametrize("whose", ["ours", "a fork's"])
def test_what_traces_memory_ends_with_the_monitor(tmp_path, whose):
    """As before a rollback, which makes another; a fork's own goes on."""
    resources = limits.Resources(tiny_config(max_steps=LAST), tmp_path, CPU, [])
    resources.trends.given = resources.trends.limits = LIMITS
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


def test_after_a_warning_the_line_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(Allocations, "SECONDS", 0.0)
    resources = limits.Resources(tiny_config(max_steps=LAST), tmp_path, CPU, [])
    resources.trends.given = resources.trends.limits = LIMITS
    told = []
    try:
        for s in range(10, 9001, 10):
            told += resources.warnings({"step": s, HOST: leak(s)})
            for _ in range(3 if resources.allocations else 0):
                keep_some(1000)
    finally:
        tracemalloc.stop()
        KEPT.clear()
    warning, line = told
    assert "host memory grows" in warning and "tests/test_limits.py:" in line
    assert resources.allocations is None


# --- at the start ---


@pytest.mark.parametrize("running, said", [
    ([12, 12, 12, 12, 12], "11 other threads are running or ready to on 2 cores"),
    ([3, 3, 1, 3, 1], "2 other threads"),
    ([2, 9, 2, 9, 2], None),  # for a moment
    ([1, 1, 1, 1, 1], None),
    ([], None),  # no /proc
])
def test_a_machine_whose_cores_others_want_is_told_at_the_start(run, monkeypatch, running, said):
    def read(path):
        if path != "proc/loadavg":
            return plain(path)
        return f"9.1 9.2 9.3 {running.pop()}/90 8697\n" if running else ""

    plain = proc.read
    monkeypatch.setattr(screen, "crowded", whole_crowded)
    monkeypatch.setattr(screen.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(screen.proc, "read", read)
    told = run("--max_steps", 1, "--warmup_steps", 1)
    assert said in told if said else "other threads" not in told
