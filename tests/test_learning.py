"""Does a run learn: the verdict on its losses, and where it is said."""

import math

import numpy as np
import pytest
from test_page import write_rows

import train
from steady.watch.findings import log_line
from steady.watch.history import History
from steady.watch.report import report
from steady.watch.trends import diverged
from tools.report import main

VOCAB = 50_257  # a uniform guess has 10.82
FALLS = 2.5 + 8.3 * np.exp(-np.arange(2000) / 100)


def judge(losses, every: int, vocab=VOCAB) -> list:
    """Findings at the end of a run with these losses of steps."""
    history = History([{"step": 0, "about": {"vocab_size": vocab}}])
    logs = [0, 1, *range(max(2, every), len(losses) + 1, every)]
    for before, step in zip(logs, logs[1:], strict=False):
        history.append(log(step, losses[before:step].mean()))
    return diverged(history)


def log(step: int, loss, **more) -> dict:
    return {"step": step, "train/loss": loss, "perf/step_ms": 1.0, **more}


@pytest.mark.parametrize("every", [1, 5, 50])
@pytest.mark.parametrize("losses, since", [
    (np.r_[1.5, np.full(1999, 6.8)], 2),  # a learning rate that is too high to fine-tune
    (np.r_[10.8, np.full(1999, 60.0)], 2),
    (np.r_[FALLS[:1200], np.full(800, 7.5)], 1201),
    (np.r_[FALLS[:1200], FALLS[1199] + 0.004 * np.arange(800)], 1325),
], ids=["at once", "above a uniform guess", "jump", "creeps"])
def test_a_run_that_diverges(losses, since, every):
    losses = losses + np.random.default_rng(0).normal(0, 0.1, 2000)
    (found,) = judge(losses[: since + 350], every)
    assert found.code == "diverged" and abs(found.since - since) <= 100


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("noise", [
    lambda rng: rng.normal(0, 0.3, 2000),
    lambda rng: rng.lognormal(0, 1, 2000) - 1.65,  # batches of one document
    lambda rng: np.where(rng.random(2000) < 0.3, 1.4, -0.6),  # of two datasets
    lambda rng: rng.choice([2.0, -2.0], 2000) + rng.normal(0, 0.1, 2000),
], ids=["normal", "skewed", "mixture", "halves"])
@pytest.mark.parametrize("losses", ids=["falls", "flat", "memorises"], argvalues=[
    FALLS, np.full(2000, 1.5), 1.5 * 0.5 ** (np.arange(2000) // 500)])
def test_noise_is_no_divergence(losses, noise, every):
    for seed in range(3):
        steps = np.maximum(1e-3, losses + noise(np.random.default_rng(seed)) * losses / 2.5)
        for end in (300, 1000, 2000):
            assert judge(steps[:end], every) == [], (seed, end)


def test_a_rise_that_passes_is_none_in_the_end():
    losses = np.r_[FALLS, np.full(600, 5.0), FALLS[-2000:]]
    (found,) = judge(losses[:2600], 50)
    assert abs(found.since - 2001) <= 50 and judge(losses, 50) == []


def test_losses_and_steps_that_are_not_finite():
    def kinds(*logs):
        rows = [log(i * 50 + 1, loss) | ({} if bad is None else {"health/nonfinite_steps": bad})
                for i, (loss, bad) in enumerate(logs)]
        return [(f.code, f.since) for f in diverged(History(rows))]

    assert kinds((3.0, 0), (3.0, 0), (None, 1), (3.0, 0)) == [("not finite", 52)]
    assert kinds(*[(3.0, 0)] * 9, (3.0, 1)) == []  # a gradient alone, as in fp16
    assert kinds(*[(3.0, 0)] * 9, (3.0, 8)) == [("not finite", 402)]
    assert kinds((None, None), (None, None)) == [("not finite", 1)]  # --monitoring off


def test_the_report_of_a_long_run_counts_all_its_bad_steps(tmp_path):
    write_rows(tmp_path, [log(50 * i, loss) | {"health/nonfinite_steps": 1}
                          for i, loss in enumerate([8.0, *[3.0] * 4999, *[12.0] * 1000])])
    found = {each.code: each.values for each in report(tmp_path)["findings"]}
    assert found["not finite"]["count"] == 6000 and found["diverged"]["first"] == 8


def test_a_model_that_has_collapsed_to_a_uniform_guess():
    (finding,) = judge(np.r_[10.9, 900.0, np.full(998, math.log(VOCAB))], 50)
    assert finding.code == "nothing learned"


@pytest.mark.parametrize("values, found", [
    ([2.0, 1.5, 1.7], {}), ([2.0, 1.5, 1.9], {"validation": 240}), ([-9.0, -8.0], {}),
    ([1.0, *[1.15] * 600, 1.25], {"validation": 140}), ([math.nan, 1.0], {})])
def test_a_validation_loss_that_is_too_high(values, found):
    history = History([log(1, 2.0)])
    for i, value in enumerate(values):
        history.append({"step": 100 * (i + 1) + 40, "val/loss": value})
        history.append(log(100 * (i + 1) + 40, 2.0))  # the loop evaluates before it calls `step`
    assert {f.code: f.since for f in diverged(history)} == found
    history.append({"step": 400, "evaluated": {"validation data": "other"}, "val/loss": 99.0})
    assert diverged(history) == []  # losses of other data are not compared


def test_the_verdict_begins_with_the_training(run, tmp_path, tool, monkeypatch):
    run("--out_dir", "good", "--max_steps", 40)
    assert [f for f in report(tmp_path / "good")["findings"] if f.code == "diverged"] == []
    plain, calls = train.Transformer.forward, iter(range(10**9))
    monkeypatch.setattr(train.Transformer, "forward",
                        lambda self, *batch: plain(self, *batch) + 5 * (next(calls) >= 20))
    printed = run("--out_dir", "bad", "--max_steps", 40)
    assert "training has diverged since about step 21" in printed
    assert "verdict training has diverged since about step 21: " in printed
    found = report(tmp_path / "bad")
    assert found["findings"][0].code == "diverged"
    assert found["verdict"][0] == str(found["findings"][0])
    good, bad = tool(main, "good", "bad").out.split("verdict ")[1:]
    assert "diverged" not in good and bad.startswith("training has diverged")


def test_numbers_of_the_log_line_are_short():
    for x in (0.0, 5.5, 1e30, -1e300, math.inf, math.nan):
        row = {"train/loss": x, "train/grad_norm": x, "perf/step_ms": 1.0}
        assert len(log_line(1, None, row)) < 60
    assert log_line(1, None, {"train/loss": 1.5e30}) == "step 1/? | loss 1.5000e+30"
    row = {"train/loss": 5.5, "perf/tokens_per_second": 999_700}
    assert log_line(1, None, row) == "step 1/? | loss 5.5000 | 1M tok/s"
