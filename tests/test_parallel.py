"""zero2 and zero3: what is sharded over the ranks trains as if it were whole."""

import math
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import after, after_updates, assert_same_end, before, column, poison, rows, saved
from test_huggingface import FINE, save_random, small
from torch import nn

import config
import model
import train
from model import Transformer
from steady.checkpoints import writer
from steady.checkpoints.checkpoint import Checkpoint, compare, list_checkpoints
from steady.options import ConfigError
from steady.ranks import muon, parallel
from steady.tokens.files import IGNORE, write_tokens

FLAGS = ["--precision", "fp32", "--max_steps", "6", "--warmup_steps", "2", "--log_interval", "2",
         "--eval_interval", "3"]
# With clipping, the divisor is a norm, whose sum has another order where weights are sharded.
EXACT = [*FLAGS, "--grad_clip", "0"]


def assert_equal_columns(one, other, names, rel):
    for name in names:
        assert column(other, name) == pytest.approx(column(one, name), rel=rel, abs=0), name


def assert_equal_runs(one, other, rel=0.0):
    assert_equal_columns(one, other, ("train/loss", "val/loss"), rel)
    if not rel:
        return assert_same_end(one, other, "tokens", "best_loss")
    weights = saved(other)["model"]
    for name, tensor in saved(one)["model"].items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=10 * rel), name


@pytest.mark.parametrize("way, flags", [
    ("zero3", ["--optimizer", "muon", "--dropout", "0.1", "--activation_checkpointing", "full"]),
    pytest.param("zero2", ["--optimizer", "muon", "--monitoring", "full", "--tie_embeddings"],
                 marks=pytest.mark.slow),
    ("zero2", ["--optimizer", "adamw", "--micro_batch_size", "1"]),
    *(pytest.param("zero3", ["--precision", precision, "--learning_rate", 1e-3, "--grad_clip", 1],
                   marks=pytest.mark.slow) for precision in ("bf16", "fp16")),
], ids=["zero3", "tied", "accumulation", "bf16", "fp16"])
def test_two_ranks_train_bit_for_bit_as_with_ddp(run, tmp_path, way, flags):
    """But for rounding in half precision, and for the sum over the micro-batches of a step, which
    ddp makes first, before that over the ranks."""
    run(*EXACT, *flags, "--out_dir", "ddp", ranks=2)
    run(*EXACT, *flags, "--out_dir", way, "--parallel", way, ranks=2)
    rel = 5e-3 if "--precision" in flags else 1e-5 if "--micro_batch_size" in flags else 0
    assert_equal_runs(tmp_path / "ddp", tmp_path / way, rel)
    names = ("train/grad_norm", "health/update_ratio")
    assert_equal_columns(tmp_path / "ddp", tmp_path / way, names, rel=rel or 1e-5)


def test_weights_filled_past_autograd_are_the_same_on_any_number_of_ranks(run, tmp_path):
    def hook(rank, change=""):
        def fill(model):
            model.blocks[0].mlp.down.weight.data[:, 3:].normal_(std=0.1)
            model.blocks[1].mlp.down.weight.data.copy_(model.blocks[0].mlp.down.weight.data)
            exec(change, {"w": model.head.weight.data, "torch": torch})

        after(Transformer, "init_weights", fill)

    run(*FLAGS, "--out_dir", "one", hook=hook)
    run(*FLAGS, "--out_dir", "two", "--parallel", "zero3", ranks=2, hook=hook)
    assert_equal_runs(tmp_path / "one", tmp_path / "two", rel=1e-5)
    scale = torch.nn.Parameter(torch.ones(()))
    with parallel.Initializer(parallel.Shards()):
        torch.nn.init.constant_(scale, 3.0)
    assert scale == 3
    for change, name in (("w[3:].zero_()", "zero_"), ("w[0] = w[1]", "__setitem__"),
                         ("w.add_(torch.randn_like(w))", "randn_like")):
        told = run("--parallel", "zero3", ranks=2, hook=partial(hook, change=change), expect=2)
        assert f"init_weights: {name} on some rows of a sharded weight would be lost" in told


@pytest.mark.parametrize("ranks, flags", [
    (3, ["--parallel", "zero3", "--optimizer", "muon"]),  # no number of rows divides by 3
    pytest.param(4, ["--parallel", "zero3", "--optimizer", "muon", "--shard_size", "2"],
                 marks=pytest.mark.slow),
    pytest.param(4, ["--parallel", "zero2", "--shard_size", "2", "--micro_batch_size", "1",
                     "--tie_embeddings"], marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_as_one_process(run, tmp_path, ranks, flags):
    flags = [*FLAGS, "--batch_size", 12, *flags]
    run(*flags, "--out_dir", "one")
    run(*flags, "--out_dir", "many", ranks=ranks)
    assert_equal_runs(tmp_path / "one", tmp_path / "many", rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_sharded_otherwise(run, tmp_path):
    """One process, then 2 ranks, 4, 3 and one again: the same samples and losses throughout."""
    flags = [*FLAGS, "--batch_size", 12, "--eval_interval", 0, "--lr_schedule", "constant",
             "--log_interval", 1]
    run(*flags, "--max_steps", 10, "--out_dir", "whole")
    places = [(1, "ddp"), (2, "zero3"), (4, "zero2"), (3, "ddp"), (1, "zero3")]
    for i, (ranks, way) in enumerate(places):
        run(*flags, "--out_dir", "moved", "--max_steps", 2 * i + 2, "--parallel", way,
            *(["--auto_resume"] if i else []), ranks=ranks)
    names = [each.path.name for each in list_checkpoints(tmp_path / "moved" / "checkpoints")]
    assert names == ["step_00000006", "step_00000008.pt", "step_00000010.pt"]
    assert_equal_columns(tmp_path / "whole", tmp_path / "moved", ["train/loss"], rel=1e-5)
    one, other = saved(tmp_path / "whole"), saved(tmp_path / "moved")
    assert one["position"] == other["position"] and one["tokens"] == other["tokens"]


def documents(folder) -> Path:
    """Of 3 to 30 tokens."""
    texts = [[i % 256] * (2 + 7 * i % 28) for i in range(200)]
    folder.mkdir()
    for split in ("train", "val"):
        write_tokens(folder / f"{split}.bin", map(bytes, texts))
    return folder


UNEVEN = [
    (3, 8, ["--micro_batch_size", 1, "--monitoring", "full"]),  # a rank's last is a dummy
    (3, 8, ["--parallel", "zero3", "--micro_batch_size", 2]),
    (4, 6, ["--parallel", "zero2", "--shard_size", 2, "--micro_batch_size", 1]),
    (3, 8, ["--micro_batch_size", 1, "--data_mode", "packed"]),
    (3, 7, ["--activation_checkpointing", "full"])]


@pytest.mark.parametrize("ranks, batch, flags", [
    UNEVEN[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in UNEVEN[1:])])
def test_a_batch_that_ranks_do_not_divide_goes_on_as_one_process(run, corpus, tmp_path, ranks,
                                                                  batch, flags):
    """Of two datasets; after a restart, on any number of ranks."""
    sources = [f"{corpus}:0.75", f"{documents(tmp_path / 'other')}:0.25"]
    flags = [*FLAGS, "--data", *sources, "--batch_size", batch, "--lr_schedule", "constant",
             "--log_interval", 1, "--eval_interval", 6, *flags]
    for name in ("one", "many"):
        run(*flags, "--micro_batch_size", 1, "--max_steps", 2, "--out_dir", name)
    run(*flags, "--micro_batch_size", batch, "--parallel", "ddp", "--auto_resume", "--out_dir",
        "one")
    run(*flags, "--auto_resume", "--out_dir", "many", ranks=ranks)
    assert_equal_runs(tmp_path / "one", tmp_path / "many", rel=1e-5)
    names = "train/tokens", "train/grad_norm", f"train/loss/{corpus.name}", "train/loss/other"
    assert_equal_columns(tmp_path / "one", tmp_path / "many", names, rel=1e-5)
    assert column(tmp_path / "one", "train/loss/other")
    # of the last micro-batches alone, but without dummy rows
    assert_equal_columns(tmp_path / "one", tmp_path / "many", ["health/output_entropy"], rel=0.1)
    one, many = saved(tmp_path / "one"), saved(tmp_path / "many")
    assert one["position"] == many["position"] and one["tokens"] == many["tokens"]


@pytest.mark.slow
def test_what_else_a_run_does(run, tmp_path, monkeypatch):
    """Sampling, evaluation, best checkpoint, rotation; a resume where Muon has more groups."""
    monkeypatch.setattr(muon, "MOST", 1)
    flags = [*FLAGS, "--parallel", "zero3", "--sample_interval", 3, "--save_interval", 1,
             "--keep_checkpoints", 2, "--monitoring", "full", "--out_dir", "z"]
    told = run(*flags, ranks=2)
    assert told.count("sample  of what it writes") == 1 and "zero3 over 2" in told
    folder = tmp_path / "z" / "checkpoints"
    assert sorted(os.listdir(folder)) == ["best", "step_00000005", "step_00000006"]
    assert all(Checkpoint(path).find_damage() is None for path in folder.iterdir())
    assert column(tmp_path / "z", "health/output_entropy").keys() == {1, 2, 4, 6}
    evaluated = column(tmp_path / "z", "val/loss")[6]
    told = run("--resume", folder / "best", "--eval_only", "--out_dir", "z", bare=True)
    assert f"validation loss {min(column(tmp_path / 'z', 'val/loss').values()):.4f}" in told
    told = run("--resume", folder / "step_00000006", "--eval_only", "--parallel", "zero2",
               "--out_dir", "z", bare=True, ranks=2)
    assert f"validation loss {evaluated:.4f}" in told
    assert "schedule changed" not in run("--resume", folder / "step_00000005", bare=True)


def test_the_loss_is_divided_by_the_targets_counted(run, tmp_path, monkeypatch):
    """Also where a fork shortens and masks batches in the loop: on any ranks, and resumed."""
    def changed(*args):
        for batch in plain(*args):
            tokens, targets = batch.tokens[:, :16], batch.targets[:, :16]
            yield batch._replace(tokens=tokens, targets=targets.where(tokens % 3 > 0, IGNORE))

    plain = train.loader
    monkeypatch.setattr(train, "loader", changed)
    for name, flags in {"one": [], "ddp": [], "zero3": ["--parallel", "zero3"]}.items():
        run("--out_dir", name, "--micro_batch_size", 2, "--save_interval", 6, *flags,
            ranks=1 + (name != "one"))
    for name in ("ddp", "zero3"):
        assert_equal_columns(tmp_path / "one", tmp_path / name, ["train/loss", "train/grad_norm"],
                             rel=1e-5)
    assert column(tmp_path / "one", "train/loss")[1] == pytest.approx(math.log(257), abs=0.1)
    last, first = saved(tmp_path / "one"), tmp_path / "one/checkpoints/step_00000006.pt"
    run("--out_dir", "one", "--resume", first, bare=True)
    assert compare(last["model"], saved(tmp_path / "one")["model"])[1] == []
    row = [row for row in rows(tmp_path / "ddp") if "perf/step_ms" in row][-1]
    assert row["perf/tokens_per_second"] * row["perf/step_ms"] / 1e3 == pytest.approx(8 * 16)


@pytest.mark.parametrize("flags, rollbacks", [
    ([], []),
    (["--save_interval", 2, "--max_nonfinite", 1, "--on_nonfinite", "rollback"], [2]),
], ids=["skip", "rollback"])
def test_after_a_non_finite_step_all_ranks_do_the_same(run, tmp_path, flags, rollbacks):
    flags = [*EXACT, "--log_interval", 1, "--eval_interval", 0, *flags]
    for way in ("ddp", "zero3"):
        run(*flags, "--parallel", way, "--out_dir", way, ranks=2, hook=lambda rank: poison(16, 24))
        named = [] if rollbacks else [3]  # a rollback takes its rows back, too
        assert [row["step"] for row in rows(tmp_path / way) if "anomaly" in row] == named
    assert saved(tmp_path / "ddp")["rollbacks"] == rollbacks
    assert_same_end(tmp_path / "ddp", tmp_path / "zero3", "rollbacks")


def test_a_rollback_replaces_its_checkpoint_once_all_ranks_have_read_it(run, tmp_path):
    """Each took the weights from where they were in another file, and the ranks' own differed."""
    def hook(rank):
        def look(checkpoint):
            found = checkpoint.path.stat()
            time.sleep(0.5 * rank)
            print("replaced", checkpoint.path.stat() != found, flush=True)

        poison(16, 24)
        before(Checkpoint, "states", look)

    told = run(*FLAGS, "--log_interval", 1, "--save_interval", 2, "--max_nonfinite", 1,
               "--eval_interval", 0, "--on_nonfinite", "rollback", ranks=2, hook=hook)
    assert re.findall("replaced (.*)", told) == ["False"] * 2


def test_without_a_valid_checkpoint_to_go_back_to_all_ranks_end(start):
    def hook(rank):
        def cut(run, error):
            if rank == 0:
                run.dir.writer.wait()
                os.truncate(run.dir.path / "checkpoints/step_00000002.pt", 1000)

        poison(16, 24)
        before(train, "roll_back", cut)

    group = start("--log_interval", 1, "--save_interval", 2, "--eval_interval", 0,
                  "--max_nonfinite", 1, "--on_nonfinite", "rollback", ranks=2, hook=hook)
    assert [process.code() for process in group] == [1, 1]
    assert group[0].text().count("failed: 1 steps in a row, up to step 3, had a loss") == 1
    assert "no checkpoint is valid (step_00000002.pt: cut short" in group[0].text()
    assert not re.search("failed|Traceback", group[1].text()), group[1].text()


def test_the_scale_of_fp16_is_the_same_on_all_ranks(run):
    """Also where only the rows of one rank overflowed."""
    def hook(rank):
        def overflow(shards, model):
            if rank == 1 and next(steps) == 2:
                shards.pairs[0][1].grad.fill_(math.inf)

        steps = iter(range(99))
        after(parallel.Shards, "move_gradients", overflow)
        after_updates(lambda run: print("the scale is", run.ranks.scaler.get_scale(), flush=True))

    told = run(*FLAGS, "--precision", "fp16", "--parallel", "zero3", "--eval_interval", 0, ranks=2,
               hook=hook)
    one, other = torch.tensor([*map(float, re.findall("the scale is (.*)", told))]).view(2, 6)
    assert one.equal(other) and one[2] == one[1] / 2 == one[0] / 2


@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_a_step_in_which_ranks_use_different_experts_is_refused(run, tmp_path, way):
    """DDP has not reduced their gradients; zero3 has added those of one to those of another."""
    def hook(rank):
        class Experts(model.FeedForward):
            def __init__(self, cfg):
                super().__init__(cfg)
                self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in "ab")

            def forward(self, x):
                used = self.experts if step[0] < 3 else [self.experts[rank]]
                return super().forward(x) + sum(expert(x) for expert in used)

        step, model.FeedForward = [0], Experts
        before(train, "seed_everything", lambda seed, at, rank: step.append(at) or step.pop(0))

    told = run(*FLAGS, "--parallel", way, "--out_dir", "r", ranks=2, hook=hook, expect=1)
    assert ("experts.0.weight" in told and "experts.1.weight" in told) == (way == "zero3")
    newest = list_checkpoints(tmp_path / "r/checkpoints")[-1]
    assert Checkpoint(newest.path).state()["step"] == 3


def test_a_metric_is_the_mean_of_the_ranks_that_log_it(run, tmp_path):
    def hook(rank):
        def log(run):
            for name in ("acd", "ab")[rank] if run.progress.step == 4 else ():
                run.monitor.log(name, 1.0 + 2 * rank)

        after_updates(log)

    run(*FLAGS, "--out_dir", "r", ranks=2, hook=hook)
    assert [column(tmp_path / "r", name)[4] for name in "abcd"] == [2, 3, 1, 1]


@pytest.mark.parametrize("names, code, said", [
    (["x", "y"], 1, "KeyError: 'val/x'"),
    (["xy", "yx"], 0, "validation x 3.0000 | y 5.0000 | loss")])  # added in another order
def test_a_mean_of_an_evaluation_is_of_all_ranks(run, names, code, said):
    def hook(rank):
        def add(self, name, values, batch):
            for own in names[rank]:
                plain(self, f"val/{own}", torch.full_like(values, {"x": 3.0, "y": 5.0}[own]), batch)
            plain(self, name, values, batch)

        plain, train.Means.add = train.Means.add, add

    assert said in run(*FLAGS, ranks=2, hook=hook, expect=code)


def test_an_optimizer_that_may_need_whole_weights_is_refused_by_name():
    Mine = type("Mine", (torch.optim.Adafactor,), {})
    shards, kinds = parallel.Shards("zero3"), (torch.optim.SGD, torch.optim.NAdam, Mine)
    shards.parameters = {name: nn.Parameter(torch.ones(8, 6)) for name in "abc"}
    optimizers = [cls([p], lr=1) for cls, p in zip(kinds, shards.parameters.values(), strict=True)]
    assert shards.checked(optimizers, 1) == optimizers  # one rank has all rows
    shards.size = 2
    with pytest.raises(ConfigError, match="--parallel zero3: Mine may need whole weights"):
        shards.checked(optimizers, 1)
    Mine.by_rows = True
    assert shards.checked(optimizers, 1) == optimizers
    shards.pairs = [(nn.Parameter(torch.ones(16, 6), requires_grad=False), shards.parameters["b"])]
    with pytest.raises(ConfigError, match="have b; expected one, and no change of requires_grad"):
        shards.checked(optimizers, 1)  # each rank would still decay its rows of b


@pytest.mark.parametrize("state, refused", [
    (lambda rows, rank: torch.zeros(len(rows)), ""),
    (lambda rows, rank: torch.full([2 * rank + 1], rank), "mine"),
    (lambda rows, rank: [torch.tensor(rank), torch.full([1], rank)], "mine.1")])
def test_optimizer_state_without_rows_stays_on_as_many_ranks(run, state, refused):
    def hook(rank):
        class Mine(torch.optim.SGD):
            by_rows = True

            def step(self):
                super().step()
                for p in (p for group in self.param_groups for p in group["params"]):
                    mine = self.state[p].setdefault("mine", state(p, rank))
                    assert compare(mine, state(p, rank))[1] == []

        train.make_optimizers = lambda m, c, d, s: [Mine(s.parameters.values(), c.learning_rate)]
        before(parallel.Shards, "hold", lambda _, m: m.register_buffer("b", torch.tensor([rank])))

    flags = ["--parallel", "zero3", "--eval_interval", 0, "--out_dir", "r", "--auto_resume"]
    run(*flags, "--max_steps", 2, "--check_replicas_interval", 0, ranks=2, hook=hook)
    run(*flags, "--max_steps", 3, "--check_replicas_interval", 1, ranks=2, hook=hook)  # b: rank 0's
    told = run(*flags, "--max_steps", 4, hook=hook, expect=2 if refused else 0)
    assert (f"Mine's {refused} of embedding.weight cannot be resharded" in told) == bool(refused)


def test_sizes_that_do_not_divide_are_refused(run):
    told = run("--parallel", "zero3", "--shard_size", 2, "--batch_size", 6, ranks=3, expect=2)
    assert "--shard_size 2: expected a divisor of the 3 processes" in told
    told = run("--auto_resume", ranks=3, expect=2)
    assert told.count("\n") == 1
    assert "--batch_size 8: expected a multiple of 3 (3 processes); the nearest is 6 or 9" in told


@pytest.mark.parametrize("saving, unlucky", [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 0), (False, 1), (True, 1))),
    (True, 0)])
def test_an_error_on_one_rank_loses_no_step(run, tmp_path, saving, unlucky):
    """Each rank saves its part of the last completed step; together they are a checkpoint. Whoever
    completes it says so, and nobody else.

    Rank 0 cannot wait for the others, which are stuck until it is gone; or they are saving that
    step, and wait for all ranks.
    """
    def hook(rank):
        def fail(run):
            if run.progress.step == 4:
                raise ValueError("bad luck")

        if rank == unlucky and saving:
            before(train, "save_checkpoint", fail)
        elif rank == unlucky:
            after_updates(fail)

    flags = [*EXACT, "--eval_interval", 0, "--out_dir", "r", "--parallel", "zero3",
             *["--save_interval", 2] * saving]
    assert run(*flags, ranks=2, hook=hook, expect=1).count("saved the last completed step, 4") == 1
    assert "step_00000004 at step 4" in run(*flags, "--auto_resume", ranks=2)
    run(*flags, "--out_dir", "whole", ranks=2)
    assert compare(saved(tmp_path / "whole")["model"], saved(tmp_path / "r")["model"])[1] == []


def test_a_part_alone_is_not_called_saved(start):
    """Where another rank was killed, and its part is missing."""
    def hook(rank):
        writer.HURRY = 0.1
        after_updates(lambda run: (run.progress.step, rank) == (4, 1)
                      and signal.raise_signal(signal.SIGKILL))

    group = start("--parallel", "zero3", "--eval_interval", 0, ranks=2, hook=hook)
    assert [process.code() for process in group] == [1, -signal.SIGKILL]
    assert "rank_1_of_2.pt" in group[0].text()
    assert "saved the last completed step" not in group[0].text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_foreign_weights_are_sharded(run, corpus, tmp_path, kind):
    """Read in rows into our Transformer, or sharded after transformers has read them."""
    save_random(tmp_path / "theirs", small(kind))
    flags = ["--data", corpus, *FINE, *EXACT, "--batch_size", 6, "--init_from", "theirs"]
    for ranks, way in ((2, "ddp"), (2, "zero3"), (3, "zero2")):
        run(*flags, "--parallel", way, "--out_dir", f"{way}{ranks}", bare=True, ranks=ranks)
    assert_equal_runs(tmp_path / "ddp2", tmp_path / "zero32")
    assert_equal_runs(tmp_path / "ddp2", tmp_path / "zero23", rel=1e-5)


def test_stacks_of_muon_have_matrices_for_every_rank():
    """Else one rank orthogonalizes while the others wait: 7b on 8 ranks took five times as long."""
    cfg = config.resolve(config.parse(["--model", "7b", "--vocab_size", "50304"]))
    with torch.device("meta"):
        matrices = [p for p in Transformer(cfg).blocks.parameters() if p.ndim == 2]
    for p in matrices:
        p.whole_rows = len(p)
    groups = muon.Muon(matrices, 1e-3, 0.0, shards=SimpleNamespace(size=8, helpers=1)).param_groups
    assert all(len(group["params"]) % 8 == 0 for group in groups) and len(groups) > 4


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_with_the_same_weights_share_muons_work(run, tmp_path, ranks):
    """5 layers: not every rank has as many matrices of a stack. The update stays the same bits."""
    flags = ["--n_layer", 5, "--batch_size", 6, "--max_steps", 4, "--micro_batch_size", 1]
    done = {}
    for least in (0, 2**22):
        def hook(rank, least=least):
            def note(_, stacks):
                with open(f"done-{least}", "a") as file:
                    file.writelines(f"{len(g)}\n" for g in stacks)

            muon.LARGE = least
            before(muon.Muon, "orthogonalize", note)

        run(*flags, "--out_dir", f"r{least}", ranks=ranks, hook=hook)
        done[least] = sum(map(int, (tmp_path / f"done-{least}").read_text().split()))
    assert_same_end(tmp_path / "r0", tmp_path / f"r{2**22}", step=4)
    assert done[2**22] == ranks * done[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_compiled_blocks_that_compute_again(run, tmp_path, way):
    flags = ["--log_interval", 1, "--parallel", way, "--max_steps", 4, "--out_dir"]
    run(*flags, "plain", ranks=2)
    run(*flags, "other", "--compile", "--activation_checkpointing", "full", ranks=2)
    assert_equal_columns(tmp_path / "plain", tmp_path / "other", ["train/loss"], rel=1e-3)
