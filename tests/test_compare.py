"""Whether B is better than A: the error over all looks, what it finds, and real pairs of runs."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY, column, environment, python, tidy, until
from test_readme import copy_files

import train
from steady.guard.process import exit_code
from steady.options import ConfigError
from steady.tokens.files import write_tokens
from tests.bench import referee
from tools import compare, report


def test_critical_values_are_those_of_tables():
    found = [compare.critical(n, level) for n, level in
             ((3, 0.01), (5, 0.01), (8, 0.01), (20, 0.01), (8, 1e-6), (20, 1e-6))]
    assert found == pytest.approx([9.925, 4.604, 3.499, 2.861, 15.767, 7.069], rel=1e-3)


def test_rows_end_as_comparisons_do():
    losses = np.random.default_rng(1).standard_normal((300, 13, 2)) + (0, 1.5)
    expected = referee.ends(losses, 0.05)
    for row, found, prefers_b in zip(losses.tolist(), *expected, strict=True):
        at = next((n for n in compare.LOOKS if compare.verdict(row[:n], 0.05)[1]), None)
        better = compare.verdict(row[: at or 13], 0.05)[1]
        assert (at is not None, better == "B") == (found, prefers_b)
    assert 0.3 < expected[0].mean() < 0.95


def test_the_errors_of_all_comparisons_sum_to_that_of_one():
    levels = [compare.level_of(k) for k in range(1, 10_000)]
    assert levels == sorted(levels, reverse=True) and 0.0999 < sum(levels) < compare.ERROR


REAL = json.loads(referee.RESULTS.read_text())["nulls"]


@pytest.mark.parametrize("kind", ["normal", "laplace", "t", *REAL])
def test_a_night_of_harmless_changes_keeps_none_in_19_of_20(kind):
    """1,000 nights of 100 comparisons each: drawn losses, and those of real pairs of runs."""
    random, nights, most = np.random.default_rng(2), 1000, 0.05
    draw = dict(normal=random.standard_normal, laplace=random.laplace,
                t=lambda size: random.standard_t(3, size))
    if kind in draw:
        losses = draw[kind](size=(nights, 100, 20, 2))
    else:
        losses = referee.nights(kind, REAL[kind], nights, random)
    kept = referee.ends(losses, compare.level_of(np.arange(1, 101)))[1].any(1)
    assert kept.mean() <= most + 2 * np.sqrt(most * (1 - most) / nights)


def test_rounding_is_no_difference():
    """In fp32: equal differences of its last bit have no spread at all."""
    bit = float(np.spacing(np.float32(2)))
    for n in compare.LOOKS:
        assert compare.verdict([(2, 2 - bit)] * n, 0.1)[1] is None
        assert compare.verdict([(2, 2 - bit), (2, 2 - 2 * bit)] * n, 0.1)[1] is None
        assert compare.verdict([(2, 1.9999)] * n, 0.1)[1] == "B"
    pairs = [(5.5 + 1e-6 * seed, 4.7 + 0.02 * (-1) ** seed) for seed in range(8)]  # A hardly learns
    assert compare.difference(pairs, compare.level_of(1)) == pytest.approx((-0.8, 0.033), abs=1e-3)


@pytest.fixture
def call(corpus, tmp_path, monkeypatch, capsys):
    """call(A, B, flags) → (exit code, standard output, standard error), in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # no handler outlives a test
    flags = [*TINY, "--data", str(corpus)]

    def call(a, b, *more, expect):
        arms = [arm if arm.endswith((".yaml", "--ledger")) else " ".join([*flags, arm])
                for arm in (a, b) if arm is not None]
        assert report.main(["compare", *arms, *more]) == expect, capsys.readouterr()
        return capsys.readouterr()

    return call


@pytest.fixture
def in_process(monkeypatch):
    """Real runs, in this process; the list of their flags."""
    flags = []

    def run(command, **_):
        flags.append(command[2:])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = exit_code(train.main, flags[-1])
        tidy()
        return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr="")

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    return flags


@pytest.fixture
def pretended(monkeypatch):
    """As `in_process`; each run ends with the next of the results: a loss, a code, or a text."""
    flags, results = [], []

    def run(command, **options):
        if command[0] == "git":
            return subprocess.run(command, **options)
        flags.append(command[2:])
        result = results.pop(0)
        code = result if isinstance(result, int) else 0
        said = json.dumps(dict(val_loss=None if code else result, step_ms=2.0 + len(flags),
                               peak_gb=None, rss_gb=1.0)) if result != str(result) else result
        return SimpleNamespace(returncode=code, stdout=f"1\n{said}\nbye", stderr="the reason\n")

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
    said = json.loads(call("--dropout 0.1", "--dropout 0.1 --log_interval 3", "--json", "--seeds",
                           "9", "--seed", "5", expect=4).out)
    assert said["difference_interval"] == [0, 0] and said["better"] is None
    assert "same" in said["verdict"] and len({pair["A"]["loss"] for pair in said["pairs"]}) == 3
    assert all(pair["A"]["loss"] == pair["B"]["loss"] for pair in said["pairs"])
    arms = [flags[-2][-1] + "AB"["--log_interval 3" in " ".join(flags)] for flags in in_process]
    assert arms == "5A 5B 6B 6A 7A 7B".split()
    assert os.listdir(".") == ["experiments.jsonl"]  # no runs


@pytest.mark.slow
def test_a_worse_learning_rate_is_found(call, in_process, corpus, tmp_path):
    slow = tmp_path / "slow.yaml"
    lines = [f"{name[2:]}: {value}" for name, value in zip(TINY[::2], TINY[1::2], strict=False)]
    slow.write_text("\n".join([*lines, "learning_rate: 1e-5", f"data: ['{corpus}']", "ema: 0.5"]))
    printed = call("", str(slow), "--steps", "8", expect=3).out
    assert printed.splitlines()[-1].split()[:5] == "verdict A is better by".split()
    said = json.loads(call(f"--config {slow}", "", "--steps", "8", "--json", expect=0).out)
    assert said["better"] == "B" and said["compared"] == ["val_loss_ema", "val_loss"]
    assert said["difference_interval"][1] < 0
    assert len(said["pairs"]) == 3 and len(in_process) == 12
    assert call("--ledger", None, expect=0).out.count("is better by") == 2


def test_arms_that_cannot_be_compared_are_refused(call, pretended, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").touch()
    for b, more in (("--seq_len 16", ()), ("--batch_size 4", ()), ("--resume x.pt", ()),
                    ("'", ()), ("--beta1 2", ()), ("", ("--seeds", "2")), ("", ("--steps", "0")),
                    ("--patience 3", ()), ("--estimate 1", ()), ("--verify_resume 2", ()),
                    ("--seed 3", ()), ("", ("--learning_rat", "1")),
                    ("--config a.yaml --beta1 0.8", ("--config=a.yaml",))):
        assert call("", b, *more, expect=2).err.count("\n") == 1, (b, more)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git: No such file"):
        compare.git("log")
    assert not os.path.exists("experiments.jsonl")
    pretended[1].extend([2.0, 2.1, 2.1001, 2.0001, 2.0, 2.1])
    printed = call("", "--batch_size 4 --eval_steps 4", "--beta2", "0.9", expect=3).out
    assert "A is better by 0.1 ±" in printed and "step_ms_ratio" in printed
    assert all("--beta2" in run for run in pretended[0][-6:])


def test_each_comparison_of_a_ledger_is_stricter(call, pretended):
    """Also after one that failed."""
    flags, results = pretended
    pairs = [2.0, 1.8, 1.87, 2.06, 1.96, 1.81, 1.79, 2.04, 2.01, 1.8]
    for k, others, expect in ((1, 0, 0), (30, 28, 4)):
        with open("experiments.jsonl", "a") as file:
            file.write('{"begun": 0}\n' * others + '{"step_ms_ratio": 1, "verdict": ""}\n'
                       '[]\n{"a": {"b": 1}\n{"begun": 1')  # cut off
        results[:] = pairs
        said = json.loads(call("", "", "--json", "--seeds", "5", expect=expect).out)
        assert said["comparison"] == k and len(said["pairs"]) == 5
        assert said["level"] == compare.level_of(k)
    for result, why in ((7, "exit code 7, no val_loss"), (None, "exit code 0, no val_loss"),
                        ("nothing", "exit code 0, no"), ('{"val_loss": NaN}', "exit code 0, no"),
                        ('{"val_loss":2,"evaluated":{"ema":true}}', "exit code 0, no val_loss_ema"),
                        ('{"val_loss": 2, "evaluated": {"seq_len": 9}}', "evaluates")):
        results[:] = [2.0, result]
        said = call("", "--beta1 0.8", expect=1).err
        assert f"B with --seed 1: {why}" in said and "the reason" in said
    results[:] = pairs
    said = json.loads(call("", "--beta1 0.8", "--json", "--seeds", "5", expect=4).out)
    assert said["comparison"] == 37 and "0.8" in said["flags"][1] and "0.8" not in said["flags"][0]
    first, *others = call("--ledger", None, expect=0).out.splitlines()
    assert "B is better" in first and len(others) == 2


def test_comparisons_that_begin_at_once_have_different_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    together, read = threading.Barrier(2), compare.objects
    monkeypatch.setattr(compare, "objects", lambda path: (together.wait(60), read(path))[1])
    monkeypatch.setattr(compare, "result_of", lambda *a: dict(loss=1, step_ms=1, memory=1, name=""))
    arms = {name: compare.Arm(name, ROOT, [], False, {}, None) for name in "AB"}
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(compare.decide, arms, range(3), io.StringIO()) for _ in range(2)]
    assert sorted(each.result()["comparison"] for each in found) == [1, 2]


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def test_known_results_are_reused_until_code_options_or_data_change(call, pretended, tmp_path,
                                                                    monkeypatch):
    flags, results = pretended
    (code := tmp_path / "code").mkdir()
    monkeypatch.setattr(compare, "ROOT", code)
    write_tokens(tmp_path / "train.bin", [bytes(range(256)) * 4])
    write_tokens(tmp_path / "val.bin", [bytes(range(256)) * 4])

    def runs(*more: str) -> int:
        """How many a comparison trains; its result is that of three pairs."""
        flags[:], results[:] = [], [2.0, 2.1, 2.1001, 2.0001, 2.0, 2.1]
        said = json.loads(call("", "--beta1 0.8", "--json", "--data=.", *more, expect=3).out)
        assert said["difference"] == pytest.approx(0.1) and said["memory_ratio"] == 1
        assert (said["step_ms_ratio"] is None) == (len(flags) < 6)
        return len(flags)

    assert [runs("--reuse") for _ in range(2)] == [6, 0]
    (code / "new.py").write_text("changed = 1")
    assert [runs("--reuse") for _ in range(2)] == [6, 0]
    assert runs() == 6
    assert runs("--reuse", "--beta2", "0.9") == 6
    write_tokens(tmp_path / "train.bin", [bytes(range(256)) * 5])
    assert runs("--reuse") == 6
    (code / "möre.py").write_text("")
    (code / ".#möre.py").symlink_to("nobody@nowhere")  # an editor's lock
    assert runs("--reuse") == 6
    monkeypatch.setattr(compare, "fingerprint", str)
    key = partial(compare.key_of, code, SimpleNamespace(init_from=str(tmp_path), device="cpu"), {})
    assert key() != ((tmp_path / "config.json").write_text("{}") and key())
    results[:], flags[:] = [2.1, 2.1001], []
    arm = compare.open_arm("", ["--data", str(tmp_path), "--max_minutes", "1"], code, reuse=True)
    for _ in range(2):  # the machine decides how many steps it has
        compare.result_of("A", arm, 1)
    assert len(flags) == 2


@pytest.fixture
def repository(tmp_path):
    """A repository with this code in its first commit; commit(change, message) adds another."""
    work = copy_files(tmp_path / "work")
    shutil.copy(ROOT / ".gitignore", work)

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=work, check=True, capture_output=True,
                              text=True).stdout

    def commit(change: str, message: str):
        plain = (ROOT / "train.py").read_text("utf-8")
        assert "= lr * group" in plain
        (work / "train.py").write_text(plain.replace("= lr * group", change), "utf-8")
        git("add", "-A")
        git("commit", "-qm", message)

    git("init", "-q")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b.c")
    return work, git, commit, partial(python, folder=work)


@pytest.mark.slow
@needs_git
def test_revisions_and_the_working_tree(corpus, repository):
    """A commit that never updates is worse, and mending it is better."""
    work, _, commit, python = repository
    commit("= lr * group", "good")
    commit("= 0 * group", "bad")

    def call(a: str, b: str, code: int) -> dict | str:
        out, err = python("monitor.py", "compare", a, b, *TINY, "--data", corpus, "--steps", 8,
                          "--json", expect=code)
        return json.loads(out.splitlines()[-1]) if out else err

    found = call("HEAD~1", "HEAD", 3)
    assert found["better"] == "A" and found["A"].endswith(" good") and found["B"].endswith(" bad")
    shutil.copy(ROOT / "train.py", work)
    assert call("HEAD", ".", 0)["B"].startswith("the files after")
    assert "git log" in call("HEAD", "nothing", 2)
    assert "git log" in call("train.py", ".", 2)  # no revision
    half = (ROOT / "data.py").read_text("utf-8").replace("cfg.eval_steps * cfg", "1 * cfg")
    (work / "data.py").write_text(half, "utf-8")
    assert "'eval_steps': 16" in call("HEAD", ".", 1)  # evaluates more than the files do


@pytest.mark.slow
@needs_git
def test_a_night_of_patches_keeps_the_gain(corpus, repository, tmp_path):
    """docs/agents_loop.py with a harmless patch, a loss, a gain, one that touches its judge."""
    work, git, commit, python = repository
    commit("= 0.02 * lr * group", "slow")
    patches = dict(harmless="= lr * 0.02 * group", loss="= 0 * lr * group", gain="= lr * group",
                   judge="= 0.02 * lr * group")
    for name, change in patches.items():
        if name == "judge":
            (work / "tools/compare.py").write_text("")
        commit(change, name)
        (tmp_path / name).write_text(git("diff", "HEAD~1"))
        git("reset", "-q", "--hard", "HEAD~1")
    printed, _ = python(ROOT / "docs/agents_loop.py", *(tmp_path / name for name in patches),
                        "--", *TINY, "--data", corpus, "--steps", 8, "--seeds", 5, "--reuse")
    verdicts = dict(line.removeprefix(f"{tmp_path}/").split(": ", 1)
                    for line in printed.splitlines())
    assert [name for name, said in verdicts.items() if said[:4] == "kept"] == ["gain"], verdicts
    assert "no difference" in verdicts["harmless"] and "A is better" in verdicts["loss"]
    assert "tools/compare.py" in verdicts["judge"] and git("log", "--format=%f").count("\n") == 2


@needs_git
def test_the_loop_of_patches_loses_no_work(repository, tmp_path):
    """Nor an older commit: where there are changes, also of meanwhile, and where a patch fails."""
    work, git, commit, python = repository
    commit("= lr * group", "mine")

    def call(code: int = 0, *flags) -> str:
        printed = "".join(python(ROOT / "docs/agents_loop.py", *flags, tmp_path / "p", expect=code))
        assert git("log", "--format=%s") == "mine\n"
        return printed

    (work / "train.py").write_text("unsaved\n")
    (tmp_path / "p").write_text(git("diff"))
    assert "train.py" in call(1) and (work / "train.py").read_text() == "unsaved\n"
    git("checkout", "train.py")
    assert git("check-ignore", "compare-abcd_123/metrics.jsonl")  # of a killed comparison
    git("mv", "steady/models/evaluation.py", "other.py")
    (tmp_path / "p").write_text(git("diff", "HEAD", "-M"))
    git("reset", "-q", "--hard")
    assert "left out: it touches other.py, steady/models/evaluation.py" in call()
    (tmp_path / "p").write_text("no patch")
    assert "left out: error" in call()
    (work / "train.py").write_text("import signal\nsignal.pause()\n")
    (tmp_path / "p").write_text(git("diff"))
    git("checkout", "train.py")
    assert "left out: exit code 124" in call(0, "--each", 0.01)
    assert "commit: " not in git("reflog", "-4", "--format=%gs")  # a kill keeps no patch
    (work / "monitor.py").write_text("""open('train.py', 'a').write('unsaved')
print('{"better": "B", "verdict": "B is better"}')""")
    git("commit", "-qa", "--amend", "--no-edit")
    said = call(1, tmp_path / "p")  # twice
    assert "left out: error: Your local changes" in said and "commit or" in said
    assert (work / "train.py").read_text().endswith("unsaved")
    git("checkout", "train.py")
    (work / "monitor.py").write_text("""import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {2})
open('begun', 'w'), signal.sigtimedwait({2}, 99) and open('ended', 'w')""")  # timeout sends another
    git("commit", "-qa", "--amend", "--no-edit")
    loop = subprocess.Popen([sys.executable, ROOT / "docs/agents_loop.py", tmp_path / "p"],
                            cwd=work, env=environment(), start_new_session=True)
    assert until((work / "begun").exists)
    os.killpg(loop.pid, signal.SIGINT)
    assert loop.wait(30) and until((work / "ended").exists)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_that_it_began(corpus, tmp_path, number):
    arm = " ".join([*TINY, "--data", str(corpus), "--no_compile", "--max_steps=9999999"])
    command = ["env", "--default-signal", sys.executable, ROOT / "monitor.py", "compare", arm, arm]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment())  # also under nohup
    assert until(lambda: list(tmp_path.glob("compare-*/metrics.jsonl")))
    child = int(next(tmp_path.glob("compare-*/lock")).read_text().split()[1])
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not os.path.exists(f"/proc/{child}")
    assert os.listdir(tmp_path) == ["experiments.jsonl"]
