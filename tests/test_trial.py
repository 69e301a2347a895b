"""`monitor.py try`: which options it tries, what it makes of their times, and what it leaves alone.

Its runs are driven: they take the times that a test gives them; one test really trains.
"""

import json

import pytest
import torch

from steady.models import device
from tools import report, trial


@pytest.fixture
def tried(run, tmp_path, monkeypatch):
    """tried(ms, *only) → the finding, of these options. ms(cfg, threads): of a run's steps."""
    run("--micro_batch_size", 2, "--activation_checkpointing", "full", "--out_dir", "run")
    monkeypatch.setattr(trial, "usable_cores", lambda: 1)
    options, measure = trial.options, trial.measure

    def tried(ms=lambda cfg, threads: 10.0, only=()):
        monkeypatch.setattr(trial, "measure", ms or measure)
        monkeypatch.setattr(trial, "options", lambda *of: {
            name: option for name, option in options(*of).items() if not only or name in only})
        return trial.tried(tmp_path / "run")

    yield tried
    device.set_attention_backend("auto")


def parts_of(found) -> dict:
    return {dict(part.values)["option"]: part for part in found.parts}


def test_each_option_alone_is_tried_against_the_run_as_it_is(tried, tmp_path):
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}

    def ms(cfg, threads):
        if cfg.activation_checkpointing == "none":
            return 25.0
        return 33.0 if cfg.micro_batch_size == 4 else 50.0 if cfg.compile else 35.0

    found = tried(ms)
    parts = parts_of(found)
    assert parts.keys() == {
        "--precision bf16", "--attention math", "--activation_checkpointing none",
        "--micro_batch_size 4", "--compile"}
    assert parts["--micro_batch_size 4"].ms == pytest.approx(35 - 33)
    assert parts["--activation_checkpointing none"].ms == pytest.approx(35 - 25)
    assert parts["--compile"].ms == pytest.approx(35 - 50)  # slower
    assert parts["--precision bf16"].code == "not clear"
    assert [part.ms for part in found.parts if part.ms] == pytest.approx([10, 2, -15])
    assert found.of == 35 and "-10 ms  --activation_checkpointing none\n" in str(found)
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


def test_what_is_not_clear_is_not_promised(tried):
    times = iter([10.0, 5.0, 10.0, 6.0, 10.0, 7.0, 10.0, 8.0, 10.0, 11.0])  # four of five gain
    (part,) = tried(lambda cfg, threads: next(times), only=["--precision bf16"]).parts
    assert part.code == "not clear" and part.ms is None
    low, high = (dict(part.values)[name] for name in ("low", "high"))
    assert (low, high) == (-1, 5) and f"gain not clear, {low:+.3g} to {high:+.3g} ms" in str(part)


def test_an_option_that_fails_spares_the_others(tried):
    def ms(cfg, threads):
        if cfg.compile:
            raise RuntimeError("no compiler")
        return 20.0 / cfg.micro_batch_size

    parts = parts_of(tried(ms, only=["--compile", "--micro_batch_size 4"]))
    assert parts["--compile"].code == "failed" and "no compiler" in str(parts["--compile"])
    assert parts["--micro_batch_size 4"].code == "option"


def test_threads_and_doubled_micro_batches_are_tried_where_they_fit(tried, tmp_path, monkeypatch):
    cfg, threads = trial.open_run(tmp_path / "run")
    assert (cfg.batch_size, cfg.micro_batch_size, threads) == (8, 2, torch.get_num_threads())
    monkeypatch.setattr(trial, "usable_cores", lambda: 5)
    assert {"OMP_NUM_THREADS=5", "--micro_batch_size 4"} <= trial.options(cfg, threads).keys()
    cfg.micro_batch_size = 8
    whole = trial.options(cfg, 5)
    assert whole["OMP_NUM_THREADS=1"] == (cfg, 1)
    assert not any(name.startswith("--micro_batch_size") for name in whole)


def test_real_runs(tried, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "ROUNDS", 2)
    threads, before = torch.get_num_threads(), sorted(tmp_path.iterdir())
    found = tried(ms=None, only=["--micro_batch_size 4"])
    assert found.of > 0 and parts_of(found)["--micro_batch_size 4"].code in ("option", "not clear")
    assert torch.get_num_threads() == threads and sorted(tmp_path.iterdir()) == before


def test_the_command(tried, tmp_path, monkeypatch, tool):
    found = tried(only=["--precision bf16"])
    monkeypatch.setattr(trial, "tried", lambda run_dir: found)
    assert json.loads(tool(report.main, "try", "run", "--json").out)["of"] == found.of
    monkeypatch.undo()
    assert report.main(["try", str(tmp_path / "none")]) == 2
