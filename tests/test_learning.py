"""Does a run learn: the verdict on its losses, and where it is said."""

import math

import numpy as np
import pytest

import train
from steady.watch.learning import Learning
from steady.watch.report import report
from steady.watch.sinks import in_form
from tools.report import main

VOCAB = 50_257  # a uniform guess has 10.82
FALLS = 2.5 + 8.3 * np.exp(-np.arange(2000) / 100)


def judge(losses, every: int, vocab=VOCAB) -> tuple[list, list]:
    """(findings as these steps are logged, those at the end)."""
    learning, told = Learning(vocab), []
    logs = [0, 1, *range(max(2, every), len(losses) + 1, every)]
    for before, step in zip(logs, logs[1:], strict=False):
        told.append(learning.add({"step": step, "train/loss": losses[before:step].mean()}))
    return [finding for finding in told if finding], learning.findings()


@pytest.mark.parametrize("every", [1, 5, 50])
@pytest.mark.parametrize("losses, since", [
    (np.r_[1.5, np.full(1999, 6.8)], 2),  # a learning rate that is too high to fine-tune
    (np.r_[10.8, np.full(1999, 60.0)], 2),
    (np.r_[FALLS[:1200], np.full(800, 7.5)], 1201),
    (np.r_[FALLS[:1200], FALLS[1199] + 0.004 * np.arange(800)], 1325),
], ids=["at once", "above a uniform guess", "jump", "creeps"])
def test_a_run_that_diverges(losses, since, every):
    told, found = judge(losses + np.random.default_rng(0).normal(0, 0.1, 2000), every)
    assert [f.code for f in told] == [f.code for f in found] == ["diverged"]
    assert abs(told[0].since - since) <= 100 and found[0].since == told[0].since


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("noise", [
    lambda rng: rng.normal(0, 0.3, 2000),
    lambda rng: rng.lognormal(0, 1, 2000) - 1.65,  # batches of one document
    lambda rng: np.where(rng.random(2000) < 0.3, 1.4, -0.6),  # of two datasets
    lambda rng: rng.choice([2.0, -2.0], 2000) + rng.normal(0, 0.1, 2000),
], ids=["normal", "skewed", "mixture", "halves"])
@pytest.mark.parametrize("losses", [
    FALLS, np.full(2000, 1.5), 1.5 * 0.5 ** (np.arange(2000) // 500),
], ids=["falls", "flat", "memorises"])
def test_noise_is_no_divergence(losses, noise, every):
    for seed in range(3):
        steps = np.maximum(1e-3, losses + noise(np.random.default_rng(seed)) * losses / 2.5)
        told, found = judge(steps, every)
        assert found == [] and (told == [] or losses is FALLS)


def test_a_rise_that_passes_is_said_once_and_not_in_the_end():
    losses = np.r_[FALLS, np.full(600, 5.0), FALLS[-2000:]]
    told, found = judge(losses, 50)
    assert len(told) == 1 and abs(told[0].since - 2001) <= 50 and found == []


def test_losses_and_steps_that_are_not_finite():
    def kinds(*logs, **more):
        learning = Learning(VOCAB)
        for i, (loss, bad) in enumerate(logs):
            learning.add({"step": i * 50 + 1, "train/loss": loss, "health/nonfinite_steps": bad})
        return [(f.code, f.since) for f in learning.findings()]

    assert kinds((3.0, 0), (3.0, 0), (None, 1), (3.0, 0)) == [("not finite", 52)]
    assert kinds(*[(3.0, 0)] * 9, (3.0, 1)) == []  # a gradient alone, as in fp16
    assert kinds(*[(3.0, 0)] * 9, (3.0, 8)) == [("not finite", 402)]
    assert kinds((None, None), (None, None)) == [("not finite", 1)]  # --monitoring off
    learning = Learning(VOCAB)
    learning.add({"step": 100, "train/loss": None, "val/loss": None})
    assert [f.code for f in learning.findings()] == ["validation", "not finite"]


def test_a_run_that_goes_on_in_another_directory():
    """Its first log is of one step, and the steps before it are another run's."""
    learning = Learning(VOCAB)
    for i in range(40):
        loss = 1.5 + 2 * (i >= 30) + 0.1 * (i % 2)
        learning.add({"step": 5001 + i, "train/loss": loss, "health/nonfinite_steps": i == 4})
    diverged, bad = learning.findings()
    assert diverged.since == 5031 and learning.interval == 1
    assert bad.since == 5005 and bad.values == dict(count=1, steps=40)


def test_a_model_that_has_collapsed_to_a_uniform_guess():
    (finding,) = judge(np.r_[10.9, 900.0, np.full(998, math.log(VOCAB))], 50)[1]
    assert finding.code == "nothing learned"


@pytest.mark.parametrize("values, since", [([2.0, 1.5, 1.7], None), ([2.0, 1.5, 1.9], 200),
                                           ([66.0], 100)])
def test_a_validation_loss_that_is_too_high(values, since):
    learning = Learning(VOCAB)
    learning.add({"step": 1, "train/loss": 2.0})
    for i, value in enumerate(values):
        learning.add({"step": 100 * (i + 1), "val/loss": value})
    assert [(f.code, f.since) for f in learning.findings()] == (
        [("validation", since)] if since else [])
    for data in ("a", "b", "b"):  # losses of other data are not compared
        learning.add({"step": 400, "evaluated": {"validation data": data}})
    assert [f.code for f in learning.findings()] == []


def test_the_verdict_begins_with_the_training(run, tmp_path, capsys, monkeypatch):
    run("--out_dir", "good", "--max_steps", 40)
    assert report(tmp_path / "good")["training"] == []
    plain, calls = train.Transformer.forward, iter(range(10**9))
    monkeypatch.setattr(train.Transformer, "forward",
                        lambda self, *batch: plain(self, *batch) + 5 * (next(calls) >= 20))
    printed = run("--out_dir", "bad", "--max_steps", 40)
    assert "warning: step 32: training diverged since about step 21" in printed
    assert "verdict training diverged since about step 21: " in printed
    found = report(tmp_path / "bad")
    assert [f.code for f in found["training"]] == ["diverged", "validation"]
    assert found["verdict"][:2] == [str(f) for f in found["training"]]
    assert main([str(tmp_path / "good"), str(tmp_path / "bad")]) == 0
    assert "training                                    ok              diverged\n" in (
        capsys.readouterr().out)


def test_numbers_of_the_log_line_are_short():
    for form in ("loss {:.4f}", "grad {:.2f}", "{si} tok/s"):
        for value in (0.0, 5.5, 1e30, -1e300, math.inf, math.nan):
            assert len(in_form(form, value)) < 20
    assert in_form("loss {:.4f}", 1.5e30) == "loss 1.5e+30"
    assert in_form("loss {:.4f}", 5.5) == "loss 5.5000"
