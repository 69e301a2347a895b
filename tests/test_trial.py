"""`monitor.py try`: which options it tries, what it makes of their times, and what it leaves alone.

Its clock is driven: the times are those that a test gives it.
"""

import json
from collections import Counter

import pytest
import torch

from steady.models import device
from tools import report, trial


@pytest.fixture
def tried(run, tmp_path, monkeypatch):
    """tried(ms, queued, *only) → the finding, of these options.

    ms(trial): of each forward and backward pass, and of the update. queued: ms in a turn.
    """
    monkeypatch.setattr(trial.machine, "busiest", lambda *_: {})  # or it depends on the load
    run("--micro_batch_size", 2, "--activation_checkpointing", "full", "--out_dir", "run")
    monkeypatch.setattr(trial, "compile_in_place", lambda *_: None)  # takes half a minute
    monkeypatch.setattr(trial, "usable_cores", lambda: 1)
    monkeypatch.setattr(trial, "WARM_UP", 1)
    seconds, options = [0.0], trial.options

    def tried(ms=lambda trial: 10.0, queued=0.0, only=()):
        def now(self):
            seconds[0] += ms(self) / 1e3
            return seconds[0]

        monkeypatch.setattr(trial.Trial, "now", now)
        monkeypatch.setattr(trial, "options", lambda *of: {
            name: option for name, option in options(*of).items() if not only or name in only})
        monkeypatch.setattr(trial.machine, "busiest", lambda *_: {"perf/cpu_queue_ms": queued})
        return trial.tried(tmp_path / "run")

    yield tried
    device.set_attention_backend("auto")


def parts_of(found) -> dict:
    return {dict(part.values)["option"]: part for part in found.parts}


def test_each_option_alone_is_tried_against_the_run_as_it_is(tried, tmp_path):
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}

    def ms(trial):
        return 11.0 if len(trial.tokens) == 4 else 7.0 if not trial.cfg.compile else 10.0

    found = tried(lambda t: ms(t) if t.cfg.activation_checkpointing == "full" else 5.0)
    parts = parts_of(found)
    assert parts.keys() == {
        "--precision bf16", "--attention math", "--activation_checkpointing none",
        "--micro_batch_size 4", "--compile"}
    # 4 passes and an update of 7 ms, or 2 passes and an update of 11 ms
    assert dict(found.values)["alone_ms"] == pytest.approx(5 * 7)
    assert parts["--micro_batch_size 4"].ms == pytest.approx(5 * 7 - 3 * 11)
    assert parts["--activation_checkpointing none"].ms == pytest.approx(5 * 7 - 5 * 5)
    assert parts["--compile"].ms == pytest.approx(5 * 7 - 5 * 10)  # slower
    assert parts["--precision bf16"].code == "not clear"
    assert [part.ms for part in found.parts if part.ms] == pytest.approx([10, 2, -15])
    assert "-10 ms  --activation_checkpointing none\n" in str(found)
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


def test_what_is_not_clear_is_not_promised(tried):
    calls = Counter()

    def ms(trial):  # the first one always takes 10, the others by turns 5 and 15
        calls[trial] += 1  # four in a turn
        return 10.0 if trial is next(iter(calls)) else 5.0 + calls[trial] // 4 % 2 * 10.0

    (part,) = tried(ms, only=["--precision bf16"]).parts
    assert part.code == "not clear" and part.ms is None
    low, high = (dict(part.values)[name] for name in ("low", "high"))
    assert low < 0 < high and f"not clear, {low:+.3g} to {high:+.3g} ms" in str(part)


def test_nothing_is_promised_while_threads_wait_for_cores(tried):
    found = tried(lambda trial: 20.0 / len(trial.tokens), queued=8.0,
                  only=["--micro_batch_size 4", "--precision bf16"])
    assert {part.code for part in found.parts} == {"queued"}
    assert dict(found.values)["added_ms"] is None


def test_the_run_takes_longer_than_its_model_alone(tried):
    found = tried(lambda trial: 1e-3, only=["--precision bf16"])
    values = dict(found.values)
    assert values["added_ms"] == pytest.approx(values["own_ms"] - values["alone_ms"])
    assert 0 < values["added_ms"] < values["own_ms"] <= found.of


def test_an_option_that_fails_spares_the_others(tried, monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(trial, "compile_in_place", no_compiler)
    def ms(trial):
        return 20.0 / len(trial.tokens)

    parts = parts_of(tried(ms, only=["--compile", "--micro_batch_size 4"]))
    assert parts["--compile"].code == "failed" and "no compiler" in str(parts["--compile"])
    assert parts["--micro_batch_size 4"].code == "option"


def test_threads_and_doubled_micro_batches_are_tried_where_they_fit(tried, tmp_path, monkeypatch):
    now, _ = trial.open_run(tmp_path / "run")
    base = trial.Trial(**now)
    monkeypatch.setattr(trial, "usable_cores", lambda: 5)
    assert {"OMP_NUM_THREADS=5", "--micro_batch_size 4"} <= trial.options(now, base).keys()
    whole = trial.options(now | dict(micro_batch=8, threads=5), base)
    assert whole["OMP_NUM_THREADS=1"]["threads"] == 1
    assert not any(name.startswith("--micro_batch_size") for name in whole)


def test_a_fused_optimizer_is_tried_where_a_fork_has_none(tried, monkeypatch):
    def make(model, cfg, device):
        return [torch.optim.AdamW(model.parameters(), fused=False)]

    monkeypatch.setattr(trial, "make_optimizers", make)
    option = "fused=True in make_optimizers"
    (part,) = tried(lambda t: 6.0 if t.optimizers[0].param_groups[0]["fused"] else 10.0,
                    only=[option]).parts
    assert dict(part.values)["option"] == option and part.ms == pytest.approx(5 * 4)


def test_the_command(tried, tmp_path, monkeypatch, capsys):
    found = tried(only=["--precision bf16"])
    monkeypatch.setattr(trial, "tried", lambda run_dir: found)
    assert report.main(["try", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["of"] == found.of
    monkeypatch.undo()
    assert report.main(["try", str(tmp_path / "none")]) == 2
