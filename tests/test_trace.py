"""Three steps are traced on request, and the files stay few."""

import json
import os
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, after_updates, processes, rows

from steady.watch.sampler import Tracer


@pytest.fixture
def signalled(monkeypatch):
    """Send this process SIGUSR2 after these steps."""
    def at(steps):
        after_updates(lambda run: run.progress.step in steps
                      and os.kill(os.getpid(), signal.SIGUSR2), monkeypatch.setattr)

    return at


def test_a_signal_writes_a_trace_of_three_steps(run, tmp_path, signalled):
    signalled([4])
    handler = signal.getsignal(signal.SIGUSR2)
    told = run("--out_dir", "r", "--log_interval", 2)
    assert signal.getsignal(signal.SIGUSR2) == handler
    (file,) = (tmp_path / "r/traces").iterdir()
    assert file.name == "step_5.json" and f"r/traces/{file.name}" in told
    events = json.loads(file.read_text())["traceEvents"]
    assert sum("AdamW" in event["name"] or "Muon" in event["name"]
               for event in events if event.get("cat") == "user_annotation") >= 3
    written = rows(tmp_path / "r")
    assert [row["trace"] for row in written if "trace" in row] == ["r/traces/step_5.json"]
    # their steps say nothing of the speed
    assert [row["step"] for row in written if "perf/disturbed" in row] == [6, 8]
    assert "trace of three steps" in told


def test_three_steps_from_one_that_is_asked_for_are_traced(run, tmp_path):
    run("--out_dir", "r", "--trace", 6)
    assert [path.name for path in (tmp_path / "r/traces").iterdir()] == ["step_6.json"]
    assert "\ntrace:" not in (tmp_path / "r/config.yaml").read_text()


def test_a_full_disk_stops_no_training(run, tmp_path, signalled, monkeypatch):
    signalled([2])
    (tmp_path / "r").mkdir()
    (tmp_path / "r/traces").write_text("a file of the user's")
    assert "step 12/12" in run("--out_dir", "r")


def test_a_fork_that_profiles_by_itself_goes_on(run, tmp_path, signalled):
    signalled([2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert "step 12/12" in run("--out_dir", "r")
    assert not list((tmp_path / "r/traces").glob("*"))


@pytest.mark.slow
def test_a_trace_of_one_of_several_ranks(corpus, tmp_path):
    def hook(rank):
        import train

        plain = train.update

        def update(run, *args):
            if rank == 0 and run.progress.step == 4:
                os.kill(os.getpid(), signal.SIGUSR2)
            return plain(run, *args)

        train.update = update

    group = processes(tmp_path, 2, [*TINY, "--data", corpus, "--out_dir", "r", "--batch_size", "8",
                                    "--log_interval", "2"], hook)
    assert [process.code() for process in group] == [0, 0], group[0].text()
    assert [path.name for path in (tmp_path / "r/traces").iterdir()] == ["step_6.json"]


@pytest.mark.parametrize("last", [3, 4])
def test_the_warnings_of_waits_end_with_the_trace(tmp_path, monkeypatch, last):
    """Also where the run ends in the middle of it."""
    modes = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Mock())
    tracer = Tracer(tmp_path, SimpleNamespace(type="cuda"), at=2)
    for step in range(1, last + 1):
        tracer.step(step)
    assert modes == ([2, "warn"] if last == 3 else [2, "warn", 2])
    tracer.close()
    assert modes == [2, "warn", 2]
