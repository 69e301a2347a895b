"""--stage: from a share of the steps on, other data or other weights, in an order that is exact."""

import shutil
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import TINY, assert_same_end, column, tiny_config
from test_data import assert_epochs_are_whole, token_folder

import config
from data import load_data, load_mixture, what_is_evaluated
from steady.options import ConfigError
from steady.tokens.files import split_stages
from steady.tokens.order import Order, mixture_pattern
from tools import prepare
from tools.verify import COMPARED


@pytest.fixture
def sets(tmp_path):
    """{name: folder} of four sets of 99, 29, 19 and 9 samples of 10 tokens."""
    sizes = dict(web=1000, code=300, math=200, chat=100)
    return {name: str(token_folder(tmp_path, name, n, 257)) for name, n in sizes.items()}


def random_stages(rng) -> tuple[list[int], list[tuple[int, list[Fraction]]]]:
    """Sizes of one to four sets; (first position, weights) of one to four stages, one empty."""
    sizes = [int(n) for n in rng.integers(1, 120, rng.integers(1, 5))]
    begins = [0, *sorted(8 * rng.integers(0, 60, rng.integers(0, 4)))]
    stages = []
    for begin in begins:
        weights = [Fraction(int(w)) / 2 for w in rng.integers(0, 5, len(sizes))]
        weights[rng.integers(len(sizes))] += 1  # or there might be none
        stages.append((int(begin), weights))
    return sizes, stages


def drawn(stages, sizes, n: int) -> tuple[list, list]:
    """The dataset at each of n positions, and the count of earlier samples of that set.

    Position by position, from the definition.
    """
    source, number, counts = [], [], [0] * len(sizes)
    for g in range(n):
        begin, weights = [stage for stage in stages if stage[0] <= g][-1]
        present = [k for k, w in enumerate(weights) if w]
        pattern = mixture_pattern([weights[k] for k in present])
        k = present[pattern[(g - begin) % len(pattern)]]
        source.append(k)
        number.append(counts[k])
        counts[k] += 1
    return source, number


@pytest.mark.parametrize("seed", range(12))
def test_the_order_is_that_of_its_definition(seed):
    """Each set goes on where it was, as if it were alone, in any split into calls."""
    rng = np.random.default_rng(seed)
    sizes, stages = random_stages(rng)
    order = Order(sizes, stages[0][1], seed, stages[1:])
    order.WINDOW = order.window = int(rng.choice([7, 64, 4096]))
    source, number = drawn(stages, sizes, 600)
    alone = [Order(sizes, [Fraction(i == k) for i in range(len(sizes))], seed)(0, 600)[1]
             for k in range(len(sizes))]
    expected = [alone[k][i] for k, i in zip(source, number, strict=True)]
    assert order(0, 600).tolist() == [source, expected]
    cuts = [0, *sorted(rng.integers(0, 600, 40)), 600]
    for start, stop in rng.permutation(list(zip(cuts, cuts[1:], strict=False))):
        if start < stop:
            assert order(start, stop).tolist() == [source[start:stop], expected[start:stop]]
    for position in cuts:
        counts = np.bincount(source[:position], minlength=len(sizes))
        assert order.epochs(position) == [n / size for n, size in zip(counts, sizes, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_grouping_by_length_keeps_stages_and_epochs_apart(seed):
    """Of each stage the same samples as without it, and each set's epochs remain whole."""
    rng = np.random.default_rng(seed)
    sizes, stages = random_stages(rng)
    plain, order = (Order(sizes, stages[0][1], seed, stages[1:]) for _ in range(2))
    lengths = rng.integers(1, 30, (len(sizes), max(sizes)))
    order.group_by_length(int(rng.choice([1, 4, 32])), 8, lambda k, sample: lengths[k, sample])
    assert_epochs_are_whole(order, sizes, 800)
    begins = [begin for begin, _ in stages]
    for begin, end in zip(begins, begins[1:], strict=False):  # the last may reach beyond 800
        found, same = (each(0, 800)[:, begin:end].T.tolist() for each in (order, plain))
        assert sorted(found) == sorted(same)


def test_a_stage_by_size_and_a_folder_spelled_otherwise(sets):
    later = {160: [f"{sets['web']}/", sets["code"]]}
    mixture = load_mixture([sets["web"]], "train", 10, 1, later=later)
    assert [d.name for d in mixture.datasets] == ["web", "code"]
    assert np.bincount(mixture.order(160, 160 + 1280)[0]).tolist() == [990, 290]


@pytest.mark.parametrize("words, max_steps, expected", [
    (".8 a", 100, {640: ["a"]}),
    ("0.25 a:1 b:2 0.5 ./1 0.99 b", 25, {48: ["a:1", "b:2"], 96: ["./1"], 200: ["b"]}),
    ("0.5 a 0.51 b", 12, {48: ["b"]}),  # of two at one step the later
    ("0.01 a", 12, {0: ["a"]}),
    ("", None, {})])  # --epochs
def test_a_stage_begins_at_the_nearest_step(words, max_steps, expected):
    assert split_stages(words.split(), max_steps, 8) == expected


NO_STAGES = ["a", "0.8", "0.8 a 0.9", "0 a", "1 a", "1.5 a", "-0.1 a", "0.8 a 0.7 b", "0.8 a 0.8 b",
             "a 0.8 b", "2024", "0.5"]


@pytest.mark.parametrize("words, said", [
    *((words, f"--stage {words}: expected rising shares of max_steps") for words in NO_STAGES),
    ("0.5 none", "--stage none: no such file"),
    ("0.5 code:1 math", "--stage code:1 math: give every source a weight"),
    ("0.5 code code/", "--stage code code/: names a source twice"),
    ("0.5 code:1 code/:2", "--stage code:1 code/:2: names a source twice"),
    ("0.5 code:0", "--stage code:0: expected a weight above 0")])
def test_what_is_refused(run, sets, words, said):
    told = run("--data", sets["web"], "--stage", *words.split(), expect=2)
    assert said in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("flags", ["--epochs 2", "--max_minutes 1",
                                   "--max_steps 12 --allow_change batch_size"])
def test_steps_and_batches_must_be_known(flags):
    with pytest.raises(ConfigError, match="--stage: expected --max_steps and the same"):
        config.resolve(config.parse(["--stage", "0.5", "code", *flags.split()]))


def test_validation_takes_all_sets_by_size(sets):
    cfg = tiny_config(data=[f"{sets['web']}:1", f"{sets['code']}:1"], seq_len=10, max_steps=20,
                      stage=["0.5", f"{sets['math']}:5", f"{sets['web']}:1"])
    train, val = load_data(cfg)
    assert [d.name for d in val.datasets] == [d.name for d in train.datasets]
    assert np.bincount(val.order(0, val.n_samples)[0]).tolist() == [99, 29, 19]
    assert train.n_tokens == 1500 and len(train.fingerprint) == 3
    train, val = load_data(replace(cfg, val_data=[sets["chat"]]))
    assert [d.name for d in val.datasets] == ["chat"] and len(train.datasets) == 3
    part, whole = (load_data(replace(cfg, stage=[], eval_steps=n))[1].order(0, 128) for n in (1, 0))
    assert np.bincount(part[0]).tolist() == [64, 64] and np.bincount(whole[0]).tolist() == [99, 29]
    other = [f"{sets['web']}:3", f"{sets['code']}:1"]
    for n, same in ((1, False), (0, True)):  # of all, whatever the weights
        pair = [replace(cfg, stage=[], eval_steps=n, data=each) for each in (cfg.data, other)]
        before, after = (what_is_evaluated(each, load_data(each)[1]) for each in pair)
        assert (before == after) is same
    only = load_data(replace(cfg, eval_only=True))
    assert only[0] is only[1] and len(only[0].datasets) == 3


# --- runs ------------------------------------------------------------------------------------

STAGE = ["--stage", "0.5", "math:1", "web:1", "0.75", "code"]
FLAGS = ["--data", "web:3", "code:1", "--vocab_size", 257, "--seq_len", 10, "--log_interval", 1]


def test_stages_are_the_same_after_a_resume_from_a_file_and_on_two_ranks(run, sets, tmp_path):
    run(*FLAGS, *STAGE, "--out_dir", "r", "--save_interval", 1, "--keep_checkpoints", 99)
    for step in (6, 8, 10):  # where a stage begins, within it, within the last
        path = tmp_path / f"r/checkpoints/step_{step:08d}.pt"
        told = run("--resume", path, "--out_dir", f"from_{step}", bare=True)
        assert "learning rate" not in told  # at its peak, and as it decays
        assert_same_end(tmp_path / "r", tmp_path / f"from_{step}", *COMPARED)
    math, code = (column(tmp_path / "r", f"train/loss/{name}") for name in ("math", "code"))
    assert list(math) == [7, 8, 9] and list(code) == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert column(tmp_path / "r", "train/epochs/math")[12] == 12 / 19
    assert list(column(tmp_path / "r", "val/loss/math")) == [12]
    (tmp_path / "c.yaml").write_text(
        "data: [web:3, code:1]\nstage: [0.5, 'math:1', web:1, .75, code]\n")
    assert config.parse(["--config", "c.yaml"]).stage == ["0.5", "math:1", "web:1", ".75", "code"]
    told = run(*TINY, "--config", "c.yaml", *FLAGS[3:], "--out_dir", "file", bare=True)
    assert "web 75.0% → 50.0% → 0.0% (" in told and "math 0.0% → 50.0% → 0.0% (0.63 epochs)" in told
    assert_same_end(tmp_path / "r", tmp_path / "file", *COMPARED)
    run(*FLAGS, *STAGE, "--out_dir", "two", ranks=2)
    for name in ("", "/web", "/code", "/math"):
        one, two = (column(tmp_path / r, f"train/loss{name}") for r in ("r", "two"))
        assert list(one) == list(two) and two == pytest.approx(one, rel=1e-3)


def test_the_stages_of_a_run_are_fixed(run, sets, tmp_path, tool):
    """But not where their data lie."""
    more = ["--auto_resume", "--out_dir", "r"]
    run(*FLAGS, *STAGE, "--out_dir", "r", "--patience", 1, "--eval_interval", 4)
    for stage in ("0.5 math:1 web:2 0.75 code", "0.6 math:1 web:1 0.75 code", "0.5 math:1 web:1"):
        told = run(*more, "--stage", *stage.split(), bare=True, expect=2)
        assert f"stage 0.5 math:1 web:1 0.75 code of 12 steps -> {stage} of 12 steps." in told
        assert "--allow_change stage" in told
    told = run(*more, "--max_steps", 24, bare=True, expect=2)  # which would move them
    assert "0.75 code of 12 steps -> 0.5 math:1 web:1 0.75 code of 24 steps" in told
    shutil.move(sets["math"], tmp_path / "sums")
    shutil.move(sets["web"], tmp_path / "pages")
    moved = ["--data", "pages:3", "code:1", "--stage", "0.5", "sums:1", "pages:1", "0.75", "code"]
    assert "nothing to do" in run(*more, *moved, bare=True)
    told = run(*more, *moved, "--max_steps", 24, "--allow_change", "stage", bare=True)
    assert "at step 12" in told and max(column(tmp_path / "r", "train/loss")) == 24
    tool(prepare.main, "show", "r", 13)
    told = tool(prepare.main, "show", "r", 12, expect=2).err
    assert "step 12: trained with another --stage" in told


def test_a_checkpoint_that_knows_of_no_stages_goes_on(run, tmp_path):
    run("--out_dir", "r")
    path = tmp_path / "r/checkpoints/step_00000012.pt"
    old = torch.load(path, weights_only=True)
    assert old.pop("stages") == [] and old["config"].pop("stage") == []
    del old["config"]["norm_eps"]  # as if a fork had added it since
    torch.save(old, path)
    assert "at step 12" in run("--out_dir", "r", "--auto_resume", "--max_steps", 14)
    told = run("--resume", path, *"--out_dir s --stage 0.5 stdlib --norm_eps .1".split(), expect=2)
    assert "norm_eps 1e-06 -> 0.1, stage none of 12 steps -> 0.5 stdlib of 12 steps" in told
