"""Whether B is better than A: the error over all looks, what it finds, and real pairs of runs."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY, column, environment, tidy, until

import train
from steady.guard.process import exit_code
from tools import compare, report

# --- the statistics --------------------------------------------------------------------------


def first_finds(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(number of pairs at which each row ends, or 0; which sign it found) as `interval` does."""
    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(1) / n
    squares = (differences**2).cumsum(1) - n * mean**2
    critical = np.array([compare.CRITICAL.get(k, np.inf) for k in n])
    half = critical[2:] * np.sqrt(squares[:, 2:] / (n - 1)[2:] / n[2:])
    found = np.abs(mean[:, 2:]) > half
    first = found.argmax(1)
    return np.where(found.any(1), first + 3, 0), np.sign(mean[np.arange(len(mean)), first + 2])


def test_rows_end_as_comparisons_do():
    differences = np.random.default_rng(1).standard_normal((300, 12)) + 1
    for row, end, sign in zip(differences.tolist(), *first_finds(differences), strict=True):
        looks = (n for n in range(1, 13) if compare.settled(row[:n]))
        assert next(looks, 0) == end
        code = compare.verdict(row[: end or 12])[1]
        expected = compare.A_IS_BETTER if sign > 0 else compare.B_IS_BETTER
        assert code == (expected if end else compare.NEITHER)


def test_error_over_all_looks_is_at_most_5_percent():
    """Also with heavier tails; and whatever number of pairs was planned."""
    random = np.random.default_rng(2)
    for draw in (random.standard_normal, random.laplace, lambda size: random.standard_t(4, size)):
        ends, _ = first_finds(draw(size=(100_000, 20)))
        for seeds, limit in ((5, 0.0333), (10, 0.0444), (20, 0.05)):
            share = ((ends > 0) & (ends <= seeds)).mean()
            assert share <= limit + 3 * np.sqrt(limit / 100_000), (draw, seeds)


# --- pairs -----------------------------------------------------------------------------------


@pytest.fixture
def call(corpus, tmp_path, monkeypatch, capsys):
    """call(A, B, flags) → (exit code, standard output, standard error), in this process."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    flags = [*TINY, "--data", str(corpus)]

    def call(a, b, *more, expect):
        arms = [arm if arm.endswith(".yaml") else " ".join([*flags, arm]) for arm in (a, b)]
        assert report.main(["compare", *arms, *more]) == expect, capsys.readouterr()
        return capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def in_process(monkeypatch):
    """Real runs, in this process; the list of their flags."""
    flags = []

    def run(command, **_):
        flags.append(command[2:])
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = exit_code(train.main, flags[-1])
        tidy()
        return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr="")

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    return flags


@pytest.fixture
def pretended(monkeypatch):
    """As `in_process`; each run ends with the next of the results: a loss, or an exit code."""
    flags, results = [], []

    def run(command, **_):
        flags.append(command[2:])
        result = results.pop(0)
        code = result if isinstance(result, int) else 0
        said = json.dumps(dict(val_loss=None if code else result, step_ms=2.0 + len(flags)))
        return SimpleNamespace(returncode=code, stdout=f"first\n{said}\n", stderr="the reason\n")

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    return flags, results


def test_pairs_see_the_same_samples_dropout_and_initial_weights(run, tmp_path):
    """At rates too small to change the weights, the losses of all steps are those of the pair."""
    flags = ["--log_interval", 1, "--dropout", 0.3, "--save_interval", 0, "--eval_interval", 0]
    losses = []
    for i, more in enumerate([("--seed", 1), ("--seed", 1), ("--seed", 2)]):
        run(*flags, "--learning_rate", 1e-9 * (i + 1), *more, "--out_dir", i)
        losses.append([*column(tmp_path / str(i), "train/loss").values()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] != pytest.approx(losses[2], abs=1e-3)


def test_same_arms_differ_by_nothing(call, in_process):
    """Of another log interval, too; in the order A B, B A, A B."""
    found = call("--dropout 0.1", "--dropout 0.1 --log_interval 3", "--json", "--seeds", "9",
                 expect=4)
    said = json.loads(found.out)
    assert said["interval"] == [0, 0] and said["better"] is None and "same" in said["verdict"]
    assert len({a for a, _ in said["losses"]}) == 3 and all(a == b for a, b in said["losses"])
    arms = ["--log_interval 3" in " ".join(flags) for flags in in_process]
    assert arms == [False, True, True, False, False, True]
    assert os.listdir(".") == []  # no runs


@pytest.mark.slow
def test_a_worse_learning_rate_is_found(call, in_process, corpus, tmp_path):
    slow = tmp_path / "slow.yaml"
    lines = [f"{name[2:]}: {value}" for name, value in zip(TINY[::2], TINY[1::2], strict=False)]
    slow.write_text("\n".join([*lines, "learning_rate: 1e-5", f"data: ['{corpus}']", "ema: 0.5"]))
    printed = call("", str(slow), "--steps", "8", expect=3).out
    assert printed.splitlines()[-1].startswith("verdict A is better by")
    said = json.loads(call(str(slow), "", "--steps", "8", "--json", expect=0).out)
    assert said["better"] == "B" and said["compared"] == ["val_loss_ema", "val_loss"]
    assert said["interval"][1] < 0 and len(said["losses"]) == 3 and len(in_process) == 12


def test_a_failed_run_ends_it(call, pretended):
    _, results = pretended
    for result in (7, None):  # an exit code; a loss that is not finite
        results[:] = [2.0, result]
        said = call("", "--beta1 0.8", expect=1).err
        assert "B with --seed 1" in said and "the reason" in said


def test_arms_that_cannot_be_compared_are_refused(call, pretended):
    for b, more in (("--seq_len 16", ()), ("--batch_size 4", ()), ("--resume x.pt", ()),
                    ("'", ()), ("--beta1 2", ()), ("", ("--seeds", "2")), ("", ("--steps", "0"))):
        said = call("", b, *more, expect=2).err
        assert said.count("\n") == 1, said
    _, results = pretended
    results += [2.0, 2.1, 2.11, 2.01, 2.02, 2.12]
    printed = call("", "--batch_size 4 --eval_steps 4", expect=3).out
    assert "A is better by 0.1 ±" in printed and "speed" in printed


@pytest.mark.slow
def test_sigterm_ends_the_run_that_it_began(corpus, tmp_path):
    """A real process."""
    arm = " ".join([*TINY, "--data", str(corpus), "--no_compile", "--max_steps=9999999"])
    process = subprocess.Popen([sys.executable, ROOT / "monitor.py", "compare", arm, arm],
                               cwd=tmp_path, env=environment())
    assert until(lambda: list(tmp_path.glob("compare-*/metrics.jsonl")))
    child = int(next(tmp_path.glob("compare-*/lock")).read_text().split()[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert not os.path.exists(f"/proc/{child}") and os.listdir(tmp_path) == []


def test_a_reader_that_leaves_early_does_not_change_the_verdict():
    """`monitor.py compare A B | head`: 0 would mean that B is better."""
    code = ("import sys; from steady.guard.process import run_command\n"
            "sys.exit(run_command('monitor.py', lambda argv: print('verdict') or 3, []))")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, cwd=ROOT,
                          env=environment() | {"PYTHONUNBUFFERED": ""})
    os.close(writer)
    assert done.returncode == 3
