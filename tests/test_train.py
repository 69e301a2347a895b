"""The real program from end to end: it learns, resumes exactly, trains the same on any ranks."""

import copy
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    after,
    after_step,
    assert_same_end,
    before,
    change,
    column,
    events_of,
    raising,
    rows,
    tiny_config,
    wait_for,
    whole_sample,
)
from test_data import token_folder
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

import config
import data
import model
import train
from steady.checkpoints import writer
from steady.checkpoints.checkpoint import list_checkpoints
from steady.checkpoints.state import Progress
from steady.guard import memory
from steady.models import device as devices
from steady.models.ema import Ema
from steady.ranks import parallel
from steady.ranks.muon import POLAR, Muon
from steady.tokens.files import TokenWriter
from steady.watch import trends
from tools import prepare

load = partial(torch.load, weights_only=True)


def assert_same_run(a, b, step):
    """Two run directories ended in the same weights and optimizer, and logged the same losses."""
    assert_same_end(a, b, "best_loss", step=step)
    assert column(a, "val/loss") == column(b, "val/loss")


def test_a_run_learns_and_writes_what_is_promised(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "sample", whole_sample)
    output = run("--out_dir", "r", "--max_steps", 60, "--eval_interval", 20, "--save_interval", 20,
                 "--learning_rate", "0.02")
    loss, val = column(tmp_path / "r", "train/loss"), column(tmp_path / "r", "val/loss")
    assert loss[1] == pytest.approx(math.log(257), rel=0.05) and loss[60] < 3 < loss[1]
    assert list(loss) == [1, *range(4, 61, 4)]
    assert list(val) == [20, 40, 60] and val[60] < val[20]
    bpb = column(tmp_path / "r", "val/bits_per_byte")[60]
    assert bpb == pytest.approx(val[60] / math.log(2), rel=0.01)
    names = {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()}
    assert names == {"step_00000020.pt", "step_00000040.pt", "step_00000060.pt", "best.pt"}
    assert load(tmp_path / "r/checkpoints/best.pt")["best_loss"] == min(val.values())
    for word in ("device  1 x cpu", "flash attention", "compile off", "parameters", "run     r",
                 "step  1/60", "step 60/60", "ms |", "tok/s |", "lr ", "grad ", "left 0s",
                 "start-up", "goodput", "sample  of"):
        assert word in output, word
    assert len(re.findall(r"\d+ \+ \d+ = \d+", output)) > 10  # it writes arithmetic


def test_kill_and_auto_resume_match_the_undisturbed_run_bit_for_bit(run, start, tmp_path):
    """With dropout, in the middle of an epoch, killed at a moment that nothing prepared for."""
    flags = ["--max_steps", 30, "--save_interval", 5, "--eval_interval", 10, "--dropout", 0.1,
             "--keep_checkpoints", 9, "--micro_batch_size", 4, "--log_interval", 1, "--optimizer",
             "adamw", "--tensorboard", "--warmup_steps", 20]
    run(*flags, "--out_dir", "whole")
    (process,) = start(*flags, "--out_dir", "killed",
                       hook=lambda rank: after_step(17, lambda: time.sleep(99)))
    wait_for(tmp_path / "killed" / "checkpoints" / "step_00000015.pt")
    process.kill(signal.SIGKILL)
    process.code()
    resume = ["--auto_resume", "--out_dir", "killed"]  # its config.yaml has the rest
    told = run(*resume, bare=True)
    assert "at step 15" in told and "learning rate" not in told
    assert_same_run(tmp_path / "whole", tmp_path / "killed", step=30)
    for name in ("train/loss", "train/grad_norm"):
        assert column(tmp_path / "whole", name) == column(tmp_path / "killed", name)
    steps = [row["step"] for row in rows(tmp_path / "killed") if "train/loss" in row]
    events = events_of(tmp_path / "killed/tensorboard").Scalars("train/loss")
    assert steps == [event.step for event in events] == list(range(1, 31))
    assert "nothing to do" in run(*resume, bare=True)


@pytest.mark.parametrize("flags", [["--optimizer", "adamw", "--num_workers", "2"],
                                   ["--precision", "bf16"]])
def test_resume_from_a_named_checkpoint(run, tmp_path, flags):
    run(*flags, "--save_interval", 5, "--dropout", 0.1, "--out_dir", "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    path = "again/checkpoints/step_00000005.pt"
    run(*flags, "--resume", path)  # continues the run that the file belongs to
    assert_same_run(tmp_path / "whole", tmp_path / "again", step=12)
    assert (tmp_path / "again/checkpoints/step_00000010.pt.set-aside").exists()
    run(*flags, "--resume", path, "--out_dir", "fork")  # or starts another one
    assert_same_run(tmp_path / "whole", tmp_path / "fork", step=12)
    run("--resume", "again/checkpoints/best.pt", "--max_steps", 14, bare=True)
    assert max(column(tmp_path / "again", "train/loss")) == 14
    run("--resume", "again/checkpoints/step_00000012.pt.set-aside", bare=True)  # another branch's
    assert len([*(tmp_path / "again/checkpoints").glob("step_00000012.pt.set-aside*")]) == 2


def test_optimizer_flags_and_precision_can_change_on_resume_and_no_shape(run, tmp_path):
    run("--out_dir", "r", "--optimizer", "adamw", "--precision", "fp16")
    told = run("--auto_resume", "--out_dir", "r", "--max_steps", 20, "--n_layer", 3,
               "--allow_change", "n_layer", bare=True, expect=2)
    assert "differs from it: n_layer 2 -> 3. Its weights fit no other model; use the" in told
    told = run("--auto_resume", "--out_dir", "r", "--max_steps", 1, bare=True, expect=2)
    assert "warmup_steps 2: expected at most max_steps 1; a resume keeps the run's" in told
    told = run("--auto_resume", "--out_dir", "r", "--max_steps", 14, "--precision", "fp32",
               "--eval_interval", 0, bare=True)
    before = column(tmp_path / "r", "train/learning_rate")[12]
    rate = train.learning_rate(12, config.parse([], saved=str(tmp_path / "r/config.yaml")))
    said = f"resume  learning rate {before:.2e} -> {rate:.2e}: its schedule changed\n"
    assert told.count(said) == 1
    assert "schedule" not in run("--auto_resume", "--out_dir", "r", "--max_steps", 13,
                                 "--eval_interval", 7, bare=True)  # only evaluates
    run("--auto_resume", "--out_dir", "r", "--max_steps", 16, "--precision", "fp16",
        "--weight_decay", 0.7, "--beta2", 0.99, bare=True)
    state = load(tmp_path / "r/checkpoints/step_00000016.pt")["optimizers"][0]
    assert {g["weight_decay"] for g in state["param_groups"]} == {0.0, 0.7}
    assert all(g["betas"] == (0.9, 0.99) for g in state["param_groups"])
    assert state["state"][0]["step"].item() == 16  # the moments were kept


class OwnState(torch.optim.SGD):
    """State in another dtype, under a name of its own, NumPy's in a group; clipped gradients."""

    @torch.no_grad()
    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        assert torch.nn.utils.get_total_norm(grads) < 1.001
        total = self.state.setdefault("total", torch.zeros(()))
        for group in self.param_groups:
            group["steps"] = np.int64(group.get("steps", 0) + 1)
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16))
                own = self.state[p].setdefault("own", {0: [p.double().t() / 3], "kind": "text"})
                assert own[0][0].t().is_contiguous()  # products differ in another layout
                total += m.lerp_(p.grad.to(m.dtype), 0.1).float().norm()
                p.sub_(m * (group["lr"] / group["steps"] / (1 + total)))


def test_what_forks_keep_in_optimizers_and_buffers_is_resumed(run, tmp_path, monkeypatch):
    def forward(self, x, where, cache=None):
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()  # another tensor each time
        return compute(self, x + self.mean, where, cache)

    compute = model.Block.compute
    monkeypatch.setattr(model.Block, "compute", forward)
    after(model.Block, "__init__", lambda block, cfg: block.register_buffer(
        "mean", torch.zeros(())), monkeypatch.setattr)
    monkeypatch.setattr(train, "make_optimizers", lambda net, cfg, *_: [
        OwnState(net.parameters(), lr=cfg.learning_rate, fused=True)])
    run("--out_dir", "whole", "--save_interval", 5, "--max_steps", 9)
    assert load(tmp_path / "whole/checkpoints/step_00000009.pt")["model"]["blocks.0.mean"] != 0
    run("--out_dir", "again", "--resume", "whole/checkpoints/step_00000005.pt", "--max_steps", 9)
    assert_same_run(tmp_path / "whole", tmp_path / "again", step=9)


def test_a_run_of_a_depth_goes_on_with_and_without_the_flag(run, tmp_path, corpus):
    depth, recipe = ["--depth", 1], config.of_depth(1)
    only = ["--out_dir", "r", "--auto_resume"]
    printed = run(*depth, *only, "--data", corpus, "--max_steps", 4, "--eval_steps", 2, bare=True)
    assert "model   --depth 1 (" in printed
    assert f"rate {recipe['learning_rate']:.3g}, decay {recipe['weight_decay']:.2g}" in printed
    run(*depth, *only, "--max_steps", 6, bare=True)
    run(*only, "--max_steps", 8, bare=True)
    state = load(tmp_path / "r/checkpoints/step_00000008.pt")
    groups = [group for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
    assert {group["weight_decay"] for group in groups} == {0.0, recipe["weight_decay"]}
    assert state["config"]["depth"] == 1 and state["position"] == 8 * recipe["batch_size"]
    assert "n_layer 1 -> 2" in run(*only, "--depth", 2, "--max_steps", 9, bare=True, expect=2)


@pytest.mark.parametrize("how, found", [
    (lambda muon, adamw: [muon], "0 optimizers have embedding.weight"),
    (lambda muon, adamw: [muon, adamw, muon], "2 optimizers have blocks.0.attention.qkv.weight"),
    (lambda muon, adamw: [muon, adamw, torch.optim.SGD([torch.ones(1, requires_grad=True)])],
     "an optimizer has parameters that the model lacks"),
    (lambda *two: two[1].param_groups[0].update(lr=2) or two, "a group has a learning rate of")])
def test_a_weight_that_not_exactly_one_optimizer_has_is_refused(run, monkeypatch, how, found):
    """Its gradients would add up; a weight not in the model, or a rate, would have no effect."""
    change(train, "make_optimizers", lambda found, *_: how(*found), monkeypatch.setattr)
    assert f"error: make_optimizers: {found}" in run(expect=2)


def test_means_instead_of_values_of_each_token_are_refused(run, monkeypatch):
    """They would be divided once more by the number of targets."""
    add = train.Means.add
    with monkeypatch.context() as patch:
        patch.setattr(train.Means, "add", lambda self, _, losses, batch: add(
            self, "val/mine", losses.mean(), batch))
        assert "val/mine []: not [B, T]" in run(expect=1)
    change(train.Transformer, "forward", lambda losses, *_: losses.mean(), monkeypatch.setattr)
    assert "losses []: not [B, T]" in run("--eval_interval", 0, expect=1)


def test_an_id_added_to_those_of_the_data_before_is_refused(run, monkeypatch):
    """A fork's mask would be another id in validation, and one more after each resume."""
    def add_mask(mixture, *_):
        mixture.vocab_size += 1

    after(data.Mixture, "__init__", add_mask, monkeypatch.setattr)
    assert "--data: has ids below 259, --data only below 258" in run(expect=2)


def test_random_numbers_are_a_function_of_seed_step_and_rank(run):
    """So ranks drop different units, and a step that is made again drops the same ones.

    And gradients are reduced once a step, whatever the number of micro-batches.
    """
    def drawn(*of):
        train.seed_everything(*of)
        return [torch.rand(1).item(), np.random.rand(), random.random()]

    def hook(rank):
        def reduce(state, bucket):
            print("reduced", flush=True)
            return allreduce_hook(state, bucket)

        def distribute_and_count(*args):
            ddp = distribute(*args)
            ddp.register_comm_hook(None, reduce)
            return ddp

        def learning_rate(step, *how):
            numbers = torch.rand(1).item(), np.random.rand(), random.random()
            print("drawn", json.dumps([step, rank, *numbers]), flush=True)
            return rate(step, *how)

        distribute, rate = parallel.distribute, train.learning_rate
        parallel.distribute, train.learning_rate = distribute_and_count, learning_rate

    told = run("--micro_batch_size", 1, "--max_steps", 3, "--eval_interval", 0, ranks=2, hook=hook)
    assert told.count("reduced\n") == 2 * 3
    found = [json.loads(line) for line in re.findall("drawn (.*)", told)]
    assert sorted(where for *where, _, _, _ in found) == [[s, r] for s in range(3) for r in (0, 1)]
    for step, rank, *numbers in found:
        assert numbers == drawn(1337, step, rank)
    for numbers in zip(*(each[2:] for each in found), drawn(1338, 0, 0), strict=True):
        assert len({*numbers}) == 2 * 3 + 1


def test_memory_is_tidied_at_its_intervals(monkeypatch):
    """The cache of a GPU is cleared, and start-up frozen once."""
    assert config.Config().cache_clear_interval == 100
    calls = []
    for owner, name in ((gc, "collect"), (gc, "freeze"), (torch.cuda, "empty_cache")):
        monkeypatch.setattr(owner, name, lambda name=name: calls.append((step, name)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for step in (5, 6, 99, 100, 101, 200, 1000 - 1, 1000, 2000):
        memory.collect_garbage(step, 5)
        for kind, interval in (("cuda", 100 if step < 999 else 0), ("cpu", 100)):
            memory.clear_cache(torch.device(kind), step, interval)
    assert calls == [(5, "collect"), (5, "freeze"), (100, "empty_cache"), (200, "empty_cache"),
                     (1000, "collect"), (2000, "collect")]


def test_an_evaluation_without_a_target_has_no_loss_and_is_never_best(run, tmp_path, monkeypatch):
    def batches(found, data, *how):
        evaluations.append(data)
        for batch in found:
            nothing = torch.full_like(batch.targets, -100)
            yield batch._replace(targets=nothing) if len(evaluations) == 1 else batch

    evaluations = []
    change(train, "eval_batches", batches, monkeypatch.setattr)
    told = run("--eval_interval", 4, "--out_dir", "r", ranks=2)
    assert told.count("validation without a target") == 1
    assert list(column(tmp_path / "r", "val/loss")) == [8, 12]
    best = load(tmp_path / "r/checkpoints/best.pt")
    assert best["best_step"] in (8, 12) and best["best_loss"] > 1


def test_bits_per_byte_of_a_mixture_are_of_the_bytes_that_were_evaluated(run, tmp_path):
    """Of one dataset a token is a byte, of the other three, which has most of the weight."""
    rng, n_tokens = np.random.default_rng(0), 4000
    for name, size in (("short", 1), ("long", 3)):
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            writer = TokenWriter(tmp_path / name / f"{split}.bin", 257, tokenizer="bytes")
            writer.add(rng.integers(0, 250, n_tokens), np.array([n_tokens]), None, size * n_tokens)
            writer.close()
    sources = ["short:0.1", "long:0.9"]
    run("--data", *sources, "--eval_steps", 2, "--out_dir", "r")
    loss, found = (column(tmp_path / "r", f"val/{name}")[12] for name in ("loss", "bits_per_byte"))
    share = data.load_mixture(sources, "val", 32, 0).order(0, 16)[0].mean()
    assert 0.8 < share < 1
    assert found == pytest.approx(loss / math.log(2) / (3 * share + 1 - share))


def test_epochs_are_turned_into_steps_that_a_resume_keeps(run, tmp_path):
    """A sample is 32 tokens; of a mixture, one epoch is as many samples as all of it has."""
    for name, n in (("a", 20), ("b", 5)):
        token_folder(tmp_path, name, 32 * n + 1, 1000)
    flags = ["--data", *"ab", "--vocab_size", 1000, *TINY[: TINY.index("--max_steps")],
             "--precision", "fp32", "--epochs", 2, "--out_dir", "r"]
    run(*flags, bare=True)
    saved = config.parse([], saved=str(tmp_path / "r/config.yaml"))
    assert (saved.max_steps, saved.epochs) == (7, None)  # of 8 samples each
    assert saved.warmup_steps == 0  # 2 % of them
    assert list_checkpoints(tmp_path / "r/checkpoints")[-1].path.name == "step_00000007.pt"
    assert "already finished (7 steps)" in run(*flags, "--auto_resume", bare=True)
    run("--out_dir", "r", "--auto_resume", "--epochs", 3, bare=True)
    assert config.parse([], saved=str(tmp_path / "r/config.yaml")).max_steps == 10
    assert max(column(tmp_path / "r", "train/loss")) == 10
    told = run(*flags, "--verify_resume", 2, bare=True, expect=2)
    assert "--epochs: not with --verify_resume" in told
    assert ": 7 steps at " in run(*flags, "--estimate", 1, bare=True)


def test_patience_ends_a_run_with_its_best_weights(run, tmp_path, monkeypatch):
    def evaluate(run):
        run.progress.evaluated_step = run.progress.step
        return losses[run.progress.step]

    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 2.0, 10: 2.5, 12: math.nan, 14: 2.2, 16: 1, 18: 1, 20: 1}
    monkeypatch.setattr(train, "evaluate", evaluate)
    flags = ["--max_steps", 20, "--eval_interval", 2, "--save_interval", 5, "--out_dir", "r"]
    told = run(*flags, "--patience", 3, ranks=2)
    assert told.count("stopped at step 14: ") == 1 and "--patience 3" in told
    folder = tmp_path / "r/checkpoints"
    best, last = load(folder / "best.pt"), load(folder / "step_00000014.pt")
    assert (best["step"], best["best_loss"], last["best_step"]) == (8, 2.0, 8)
    told = run("--out_dir", "r", "--auto_resume", bare=True)
    assert told.count("nothing to do") == 1 and not (folder / "step_00000015.pt").exists()
    told = run("--out_dir", "r", "--auto_resume", "--patience", 4, bare=True, ranks=2)
    assert "stopped at" not in told and (folder / "step_00000020.pt").exists()
    assert load(folder / "best.pt")["step"] == 16


def test_what_a_checkpoint_copies_is_there_until_the_next_update(run, monkeypatch):
    """On CUDA the copy may still be under way when the save has returned: nothing is temporary, no
    memory is freed, and averages wait for it before they are the weights, here for a sample."""
    runs, saved, calls, set_up = [], [], [], train.set_up

    def pointers(value) -> set[int]:
        if isinstance(value, torch.Tensor):
            return {value.untyped_storage().data_ptr()}
        each = value.values() if isinstance(value, dict) else value
        return set().union(*map(pointers, each)) if isinstance(value, (dict, list)) else set()

    def save(self, step, state, *how):
        r = runs[-1]
        kept = [r.model.state_dict(), [dict(each.state) for each in r.optimizers], r.ema.tensors,
                [r.guard.nonfinite, r.guard.spikes.window]]
        saved.append(pointers(state) - pointers(kept))
        calls.append("save")

    monkeypatch.setattr(train, "set_up", lambda *a: runs.append(set_up(*a)) or runs[-1])
    before(writer.Writer, "save", save, monkeypatch.setattr)
    for owner, name in ((writer.Writer, "finish_copy"), (Ema, "exchange"), (memory, "clear_cache")):
        before(owner, name, lambda *_, name=name: calls.append(name), monkeypatch.setattr)
    run("--save_interval", 4, "--sample_interval", 4, "--skip_spikes", 6, "--ema", 0.9,
        "--eval_interval", 6)
    assert len(saved) > 3 and not set().union(*saved)
    assert all(calls[i + 1] == "finish_copy" for i, name in enumerate(calls) if name == "save")


class Syncs(TorchDispatchMode):
    """Counts what makes the host wait for a value on the device."""

    NAMES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func.name() == "aten::index.Tensor" and any(
            index is not None and index.dtype == torch.bool for index in args[1])
        if masks or func.name() in self.NAMES:
            self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flags", [[], ["--optimizer", "adamw", "--dropout", "0.1",
                                        "--micro_batch_size", "2", "--skip_spikes", "6"],
                                   ["--monitoring", "full"], pytest.param((), id="fused SGD")])
def test_an_ordinary_step_never_syncs_with_the_device(run, monkeypatch, flags):
    syncs, per_step, plain_check, patch = Syncs(), [], train.Guard.check, monkeypatch.setattr
    for name in ("tolist", "numpy", "cpu", "item", "__float__", "__bool__", "__int__"):
        before(torch.Tensor, name, lambda *_, name=name: syncs.count.update([name]), patch)

    def check(self, step, ended=False):
        plain_check(self, step, ended)
        if not ended:
            per_step.append(dict(syncs.count))
        syncs.count.clear()

    patch(train.Guard, "check", check)
    if flags == ():  # without momentum it has no state
        patch(train, "make_optimizers", lambda m, *_: [torch.optim.SGD(m.parameters(), fused=True)])
    with syncs:
        run("--out_dir", "r", "--log_interval", 6, "--learning_rate", 1e-3, *flags)  # SGD's default
    assert len(per_step) == 12
    # a log reads all its numbers at once, and those of the spikes; the counter counts
    assert per_step[5]["tolist"] == 1 + ("--skip_spikes" in flags)
    ordinary = [count for step, count in enumerate(per_step, start=1) if step not in (1, 6, 12)]
    assert ordinary == [{}] * 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_ordinary_step_never_syncs_with_the_device_on_a_gpu(run, monkeypatch):
    mode, patch = torch.cuda.set_sync_debug_mode, monkeypatch.setattr
    after(train.Guard, "check", lambda _, step: mode(
        "error" if 3 <= step < 11 else "default"), patch)
    before(train.Monitor, "gather_values", lambda *_: mode("default"), patch)  # until that check
    run("--out_dir", "r", "--device", "cuda", "--log_interval", 6)


def update(optimizers, parameters, clip, weight):
    """The norm that `train.update` returns for these, and for targets of this weight."""
    cfg, shards = tiny_config(grad_clip=clip), parallel.Shards()
    shards.parameters = {str(i): p for i, p in enumerate(parameters)}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ranks = SimpleNamespace(shards=shards, device=torch.device("cpu"), scaler=scaler, world_size=1)
    run = SimpleNamespace(
        cfg=cfg, optimizers=optimizers, ranks=ranks, progress=Progress(),
        dir=SimpleNamespace(writer=None), monitor=SimpleNamespace(log_all=lambda metrics: None),
        guard=train.Guard(cfg, ranks), measures=lambda step: False, ddp=None)
    return train.update(run, torch.tensor([1.0, weight * cfg.batch_size * cfg.seq_len]))[1]


class MuonAndSgd(Muon):
    def step(self):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muon and sgd", "fp64 beside fp32",
                                       "without found_inf", "fused sgd"])
def test_update_clips_and_skips_non_finite_gradients(monkeypatch, optimizer):
    """Momentum and weight decay would move weights without a gradient."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda device: False)  # else Muon does, too
    cfg = tiny_config(optimizer="muon" if "muon" in optimizer else "adamw", weight_decay=0.1)

    def after(*scales, clip, weight=1.0):
        """Weights, the optimizers' state and the norm after gradients of these scales."""
        torch.manual_seed(0)
        model, norm = train.Transformer(cfg), None
        if optimizer == "fp64 beside fp32":
            model.norm.double()
        optimizers = train.make_optimizers(model, cfg, torch.device("cpu"),
                                           parallel.Shards().hold(model))
        if optimizer == "muon and sgd":
            optimizers[0].__class__ = MuonAndSgd
        first, *others = model.parameters()  # the first gets no gradient
        if optimizer in ("without found_inf", "fused sgd"):
            how = dict(lr=1.0, momentum=0.9, weight_decay=0.1, fused=optimizer == "fused sgd")
            optimizers = [torch.optim.SGD(some, **how) for some in ([first], others)]
        for scale in scales:
            for i, p in enumerate(others):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * scale
                p.grad = (grad * weight).to(p.dtype)
            norm = update(optimizers, model.parameters(), clip, weight)
            assert optimizer != "muon" or all(o.found_inf != norm.isfinite() for o in optimizers)
        state = [each for o in optimizers for each in o.state_dict()["state"].values()]
        return [p.detach() for p in model.parameters()], state, norm

    weights, state, norm = after(1.0, clip=0.5)
    moved = [not torch.equal(*pair) for pair in zip(after(clip=0.5)[0], weights, strict=True)]
    assert norm > 0.5 and any(moved) and not moved[0]
    small, small_state, small_norm = after(0.5 / norm.item(), clip=0.0, weight=1e-6)
    assert small_norm == pytest.approx(0.5)
    torch.testing.assert_close(weights, small, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, small_state, rtol=1e-4, atol=1e-9)
    for scales in ((1.0, math.nan), (1.0, math.inf), (math.nan, 1.0)):
        *found, norm = after(*scales, clip=0.5)
        assert norm.isfinite() == math.isfinite(scales[-1])
        torch.testing.assert_close(found, [weights, state], rtol=0, atol=0)


@pytest.mark.parametrize("most", [2**24, 50])
def test_muon_is_its_formula(monkeypatch, most):
    """Momentum, the polar factor from an SVD, rows of equal size, of each matrix of a stack.

    Also a few of them at a time, after a restart, after a step that is taken back, as a rollback
    does, and without a gradient in between.
    """
    monkeypatch.setattr("steady.ranks.muon.MOST", most)
    torch.manual_seed(0)
    shapes = (24, 16), (24, 16), (16, 40), (5, 6, 4)
    weights = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    expected, momenta = [w.detach().clone() for w in weights], [0.0] * 4
    squares = [1 / max(s[-2:]) for s in shapes]  # as of equal rows
    exact = POLAR + ((1.875, -1.25, 0.375),) * 4  # which converges from where POLAR ends
    muon = Muon(weights, lr=0.1, weight_decay=0.1, polynomials=exact)
    for step in range(4):
        for i, w in enumerate(weights):
            grad = torch.randn_like(w) * torch.linspace(0.1, 3, w.shape[-2])[:, None] * (step != 2)
            w.grad = None if step == 2 else grad
            momenta[i] = 0.9 * momenta[i] + 0.1 * grad
            u, _, vt = torch.linalg.svd(0.1 * grad + 0.9 * momenta[i], full_matrices=False)
            squares[i] = 0.95 * squares[i] + 0.05 * (u @ vt).square().mean(-1, keepdim=True)
            expected[i] = expected[i] * (1 - 0.1 * 0.1) - 0.1 * 0.2 * u @ vt / squares[i].sqrt()
        muon.step()
        saved, before = copy.deepcopy(muon.state_dict()), [w.detach().clone() for w in weights]
        muon.state.clear()  # as a fork may: the next step begins anew, and a checkpoint has that
        muon.step()
        assert len(muon.state) == 4
        muon = Muon(weights, lr=0.1, weight_decay=0.1, polynomials=exact) if step else muon
        muon.load_state_dict(saved)
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
    torch.testing.assert_close([w.detach() for w in weights], expected, rtol=1e-4, atol=1e-5)
    plain = Muon(weights, lr=0.1)
    values, = plain.orthogonalize([torch.diag(torch.logspace(-1.6, 0, 8))[None]])
    assert 0.906 < values.diagonal(dim1=1, dim2=2).min() < values.max() < 1.094
    # a dominant direction, whose singular value is all of the norm: bf16 rounds it beyond 1
    rank_1 = torch.randn(40, 128, 1) @ torch.randn(40, 1, 128)
    for dtype in (torch.bfloat16, torch.float32):
        found = plain.orthogonalize([rank_1.to(dtype)])[0].float()
        assert torch.linalg.matrix_norm(found, 2).max() < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_muon_compiled_is_the_same_and_compiles_once(monkeypatch, backend):
    """At any learning rate, in a step that is skipped too, and with more sizes than the limit."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    shapes = [(24, 16)] * 3 + [(16, 40)] + [(12, 12)] * 10  # stacks of more than 8 are made apart
    counts, found = [], []
    with torch._dynamo.config.patch(recompile_limit=2):
        for compiled in (False, True):
            generator = torch.Generator().manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
            muon = Muon(weights, lr=0.1, weight_decay=0.1)
            if compiled:
                muon.compile()
            for step in range(1, 5):
                muon.param_groups[0]["lr"] = muon.param_groups[1]["lr"] = 0.1 / step
                for w in weights:
                    w.grad = torch.randn(w.shape, generator=generator)
                weights[0].grad[0, 0] = math.nan if step == 3 else 1.0
                muon.grad_scale, muon.found_inf = torch.tensor(1.5), torch.tensor(float(step == 3))
                muon.step()
                counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            found.append([*weights, *(muon.state[w]["momentum"] for w in weights)])
    assert counts == [counts[0]] * 4 + [counts[0] + 2 * 3] * 4
    for eager, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer, tied, scale", [
    ("adamw", False, 1.0), ("muon", False, 3.0), ("muon", True, 1.0)])
def test_matrices_of_blocks_alone_decay(optimizer, tied, scale):
    """Beside Muon, an embedding of its own has a higher rate."""
    cfg = tiny_config(optimizer=optimizer, tie_embeddings=tied, qkv_bias=True, qk_norm=True)
    model = train.Transformer(cfg)
    shards = parallel.Shards().hold(model)
    optimizers = train.make_optimizers(model, cfg, torch.device("cpu"), shards)
    groups = [g for o in optimizers for g in o.param_groups]
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(p) for p in model.blocks.parameters() if p.ndim == 2}
    assert all(g["fused"] for g in groups if "fused" in g)
    scales = {id(p): g.get("lr_scale", 1.0) for g in groups for p in g["params"]}
    assert scales.pop(id(model.embedding.weight)) == scale and set(scales.values()) == {1.0}


def test_learning_rate_schedules():
    def rates(schedule):
        cfg = tiny_config(lr_schedule=schedule, max_steps=100, warmup_steps=10, learning_rate=1.0,
                          min_learning_rate=0.1, decay_fraction=0.3)
        return [train.learning_rate(step, cfg) for step in range(100)]

    for schedule in ("cosine", "wsd", "constant"):
        assert rates(schedule)[:11] == pytest.approx([*(i / 10 for i in range(1, 11)), 1.0])
    assert rates("cosine")[96] == 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * (86 / 90)))  # exactly
    assert rates("cosine")[55] == pytest.approx(0.55)
    assert rates("cosine")[99] == pytest.approx(0.1, abs=1e-3)
    assert rates("wsd")[70] == 1.0 and rates("wsd")[85] == pytest.approx(0.55)
    assert rates("constant")[99] == 1.0


@pytest.mark.parametrize("flags", [
    pytest.param(["--compile", "--micro_batch_size", "8"], marks=pytest.mark.slow),
    ["--preset", "debug"], ["--preset", "low_memory", "--seq_len", "16"],
    ["--monitoring", "off", "--eval_interval", "0", "--attention", "math",
     "--lr_schedule", "cosine", "--grad_clip", "0", "--tie_embeddings"]])
def test_other_configurations_train(run, tmp_path, flags):
    output = run(*flags, "--out_dir", "r")
    loss = [row["train/loss"] for row in rows(tmp_path / "r") if "train/loss" in row]
    assert all(map(math.isfinite, loss)) and loss[-1] < loss[0]
    assert ("compile on" in output) == ("--compile" in flags)
    assert ("math attention" in output) == ("--attention" in flags)
    assert all(name.split(".")[0] in ("embedding", "blocks", "norm", "head")
               for name in load(sorted((tmp_path / "r/checkpoints").glob("step_*"))[-1])["model"])


@pytest.mark.parametrize("able", [False, True])
def test_auto_precision_is_bf16_where_the_hardware_multiplies_it(run, monkeypatch, able):
    monkeypatch.setattr(devices, "multiplies_bf16", lambda device: able)
    assert f"), {'bf16' if able else 'fp32'}, " in run("--precision", "auto", "--max_steps", 2)


def test_run_directories(run, tmp_path):
    run("--max_steps", 2)
    assert "resume " not in run("--auto_resume", "--max_steps", 2, "--out_dir", "runs/002")
    for path in (tmp_path / "runs/002/checkpoints").iterdir():
        path.unlink()
    assert ", a new run\n" in run("--auto_resume", "--out_dir", "runs/002", bare=True)  # left none
    assert [row["step"] for row in rows(tmp_path / "runs/002") if "train/loss" in row] == [1, 2]
    run("--max_steps", 2)
    assert sorted(os.listdir(tmp_path / "runs")) == ["001", "002", "003"]
    before = (tmp_path / "runs/003/config.yaml").read_text()
    message = run("--out_dir", "runs/003", expect=2)
    assert all(way in message for way in ("--auto_resume", "--resume", "--overwrite"))
    assert (tmp_path / "runs/003/config.yaml").read_text() == before
    run("--out_dir", "runs/003", "--overwrite", "--max_steps", 3)
    assert [row["step"] for row in rows(tmp_path / "runs/003") if "train/loss" in row] == [1, 3]
    (tmp_path / "runs/20250101").mkdir()  # no run
    (tmp_path / "runs/20250101/photo.jpg").touch()
    assert "runs/003" in run("--auto-resume")  # the newest
    assert os.listdir(tmp_path / "runs/20250101") == ["photo.jpg"]
    text = (tmp_path / "runs/001/config.yaml").read_text()
    assert "command:" in text and "torch:" in text and "commit:" in text
    run("--config", "runs/001/config.yaml", "--out_dir", "copy", bare=True)
    assert column(tmp_path / "copy", "train/loss") == column(tmp_path / "runs/001", "train/loss")


def test_full_measures_norms_updates_and_entropy(run, tmp_path):
    run("--out_dir", "r", "--monitoring", "full", "--optimizer", "adamw", "--weight_decay", 0,
        "--warmup_steps", 0)
    found = {row["step"]: row for row in rows(tmp_path / "r") if "perf/step_ms" in row}
    assert all("health/param_norm" in row for row in found.values())
    assert 0 < found[8]["health/output_entropy"] <= math.log(257)
    # the first update of Adam moves each weight that has a gradient by the learning rate: those of
    # the head, of the matrices that begin at zero, and of the embedding's rows that occur
    moved = found[1]["health/update_ratio"] * found[1]["health/param_norm"]
    head = 1.5e-2 * math.sqrt(257 * 32)
    assert head < moved < 3 * head
    plain = tmp_path / "plain"
    run("--out_dir", plain, "--optimizer", "adamw", "--weight_decay", 0, "--warmup_steps", 0)
    # measuring changes nothing
    assert column(plain, "train/loss") == column(tmp_path / "r", "train/loss")


def test_a_non_finite_loss_on_one_rank_is_skipped_and_reported(run, tmp_path, monkeypatch):
    def forward(losses, self, *batch):
        bad = self.training and next(calls) in (5, 6) and os.environ["RANK"] == "1"
        return losses * math.nan if bad else losses

    calls = iter(range(10**9))
    change(train.Transformer, "forward", forward, monkeypatch.setattr)
    output = run("--out_dir", "r", "--log_interval", 4, "--micro_batch_size", 4, ranks=2)
    (row,) = [row for row in rows(tmp_path / "r") if "anomaly" in row]
    assert row["step"] == 6 and row["anomaly"] == "not finite" and row["rank"] == 1
    assert row["value"] is None
    assert row["positions"] == [5 * 8 + 4, 6 * 8] and row["datasets"] == ["corpus0"]
    assert column(tmp_path / "r", "health/nonfinite_steps") == {1: 0, 4: 0, 8: 2, 12: 0}
    assert "warning: step 6: not finite" in output
    assert column(tmp_path / "r", "val/loss")[12] < 6


def test_spikes_are_reported_with_their_samples(run, tmp_path, monkeypatch, tool):
    change(data.Mixture, "batch", lambda found, _, start, stop: data.Batch(torch.randint_like(
        found[0].int(), 257)) if start == 8 * 60 else found, monkeypatch.setattr)
    monkeypatch.setattr(trends, "WINDOW", 30)
    output = run("--max_steps", 80, "--log_interval", 20, "--out_dir", "r", "--optimizer", "adamw",
                 "--learning_rate", 3e-3)
    spikes = [row for row in rows(tmp_path / "r") if "anomaly" in row]
    assert {row["anomaly"] for row in spikes} >= {"loss spike"}
    assert all(row["step"] == 61 and row["positions"] == [480, 488] for row in spikes)
    assert "warning: step 61: loss spike" in output and "data.py show r 61" in output
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    shown = tool(prepare.main, "show", "r", 61).out
    assert shown.count("--- sample") == 8 and "--- sample 480: corpus0" in shown and "+" in shown
    assert "show RUN_DIR STEP, from 1" in tool(prepare.main, "show", "r", 0, expect=2).err


def test_weights_that_are_unfrozen_later_end_the_run(run, monkeypatch):
    after(model.layers.Head, "__init__", lambda m, *_: m.requires_grad_(False), monkeypatch.setattr)
    after(train.Run, "advance", lambda run: run.model.requires_grad_(), monkeypatch.setattr)
    assert "a frozen weight requires a gradient now" in run(expect=1)


def test_a_sample_is_no_training(run, monkeypatch):
    """A buffer that a fork updates in training, such as a router's bias, is left alone."""
    modes = []
    before(train.Transformer, "forward",
           lambda model, *args: modes.append((len(args), model.training)), monkeypatch.setattr)
    run("--max_steps", 3, "--sample_interval", 1, "--eval_interval", 0)
    assert modes == 3 * [(3, True), (1, False)]


def test_samples_are_printed_and_kept_when_they_are_due_and_at_the_end(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "sample", lambda run: f"written at {run.progress.step}")
    printed = run("--sample_interval", 4, "--max_steps", 10, "--out_dir", "r")
    assert re.findall(r"written at (\d+)\n", printed) == ["4", "8", "10"]
    assert column(tmp_path / "r", "sample") == {n: f"written at {n}" for n in (4, 8, 10)}
    assert "written" not in run("--max_steps", 2, "--sample_interval", 0, "--out_dir", "t")
    monkeypatch.setattr(train, "sample", raising(RuntimeError("of a fork")))
    output = run("--max_steps", 2, "--out_dir", "u")  # a warning, and the run has ended well
    assert "RuntimeError: of a fork" in output and "in fail\n" in output
    assert list_checkpoints(tmp_path / "u/checkpoints")[-1].path.name == "step_00000002.pt"
