"""--skip_spikes: which steps are skipped, on all ranks alike, also after a resume or a rollback."""

import math
import os
from itertools import pairwise

import pytest
import torch
from conftest import assert_same_end, before, change, column, saved, tiny_config

import train
from steady.checkpoints.checkpoint import checkpoint_at, compare
from steady.guard import guard as spikes

FLAGS = ["--skip_spikes", 6, "--max_steps", 30, "--save_interval", 0, "--eval_interval", 0,
         "--keep_checkpoints", 30, "--max_nonfinite", 1, "--on_nonfinite", "abort",
         "--log_interval", 5]


def higher_loss(losses):
    return losses + 100  # with the same gradient


@pytest.fixture
def plant(monkeypatch):
    """plant(step, …, how=…) changes the losses of these steps, on one rank; eight steps suffice."""
    planted, now = {}, [0]

    def begin_step(seed, step, rank):
        now[0] = step + 1

    def forward(losses, self, *batch):
        how = planted.get(now[0])
        mine = os.environ.get("RANK", "1") == "1"
        return how(losses) if self.training and how and mine else losses

    def plant(*steps, how):
        planted.update(dict.fromkeys(steps, how))

    before(train, "seed_everything", begin_step, monkeypatch.setattr)
    change(train.Transformer, "forward", forward, monkeypatch.setattr)
    monkeypatch.setattr(spikes, "NEEDED", 8)
    return plant


def skipped(run_dir, last: int) -> list[int]:
    """The steps that changed neither weights nor optimizer state, on any rank."""
    states = [saved(run_dir, step) for step in range(1, last + 1)]
    held = [[each["model"], [o["state"] for o in each["optimizers"]]] for each in states]
    return [step for step, (a, b) in enumerate(pairwise(held), 2) if not compare(a, b)[1]]


@pytest.mark.parametrize("how, flags", [
    (lambda losses: losses + 50 * (losses - losses.detach()),  # steeper, of the same value
     ["--optimizer", "adamw", "--grad_clip", 0, "--micro_batch_size", 2]),
    *(pytest.param(higher_loss, flags, marks=pytest.mark.slow) for flags in (
        [], ["--precision", "fp16", "--grad_clip", 0], ["an optimizer without found_inf"],
        ["--parallel", "zero3"]))])
def test_a_spike_is_skipped_and_reported(run, tmp_path, monkeypatch, plant, how, flags):
    """On all ranks, where the loss of one is bad."""
    if "an optimizer without found_inf" in flags:
        monkeypatch.setattr(train, "make_optimizers", lambda m, cfg, *_: [torch.optim.SGD(
            m.parameters(), cfg.learning_rate, momentum=0.9, weight_decay=0.1)])
        flags = []
    plant(25, how=how)
    ranks = 2 if "zero3" in flags else 1
    output = run("--out_dir", "r", *FLAGS, *flags, "--save_interval", 1, ranks=ranks)
    assert skipped(tmp_path / "r", 30) == [25]
    scales = {saved(tmp_path / "r", step)["scaler"].get("scale") for step in (1, 30)}
    assert len(scales) == 1  # fp16's
    counts = column(tmp_path / "r", "health/skipped_spikes")
    assert counts == {1: 0, 5: 0, 10: 0, 15: 0, 20: 0, 25: 1, 30: 0}
    assert set(column(tmp_path / "r", "health/nonfinite_steps").values()) == {0}
    assert output.count("the updates were skipped") == 1
    assert "warning: step 25: spikes, the updates were skipped: step 25 (loss " in output


def test_a_resume_amid_spikes_is_exact(run, tmp_path, monkeypatch, plant):
    """Also a rollback: steps 25 and 26 are not finite at first."""
    left = iter((math.nan, math.nan))
    plant(21, 22, 23, how=higher_loss)
    run("--out_dir", "whole", *FLAGS, "--save_interval", 11)
    assert column(tmp_path / "whole", "health/skipped_spikes")[25] == 3
    middle = checkpoint_at(tmp_path / "whole/checkpoints", 22)
    once = iter([None])
    with monkeypatch.context() as patch:  # an error as the update of step 25 is measured
        patch.setattr(train, "copy_of_weights", lambda shards: next(once))
        run("--resume", middle, "--out_dir", "resumed", *FLAGS, "--monitoring", "full", expect=1)
    run("--auto_resume", "--out_dir", "resumed", *FLAGS, "--save_interval", 30)
    assert_same_end(tmp_path / "whole", tmp_path / "resumed", "spikes", step=30)
    plant(25, 26, how=lambda losses: losses * next(left, 1.0))
    output = run("--out_dir", "back", *FLAGS, "--on_nonfinite", "rollback", "--max_nonfinite", 2,
                 "--save_interval", 10, "--log_interval", 2)
    assert output.count("; rolled back to ") == 1
    assert int(saved(tmp_path / "back", 30)["spikes"].isfinite().all(1).sum()) == 30


def feed(watch: spikes.Spikes, values) -> list[bool]:
    """Whether each loss is a spike, with gradient norms of 1."""
    return [bool(watch.find(value, torch.tensor(1.0))) for value in values]


def noise(n: int) -> torch.Tensor:
    """Uniform, of standard deviation 1: never more than 1.8 from its mean."""
    return torch.rand(n, generator=torch.Generator().manual_seed(0)) * 12**0.5


@pytest.mark.parametrize("sigmas, most", [(3, 40), (6, 8)])
def test_a_lasting_rise_is_accepted(sigmas, most):
    ranks = torch.empty(0)  # it has a device; no more is needed
    watch = spikes.Guard(tiny_config(skip_spikes=sigmas, log_interval=2000), ranks).spikes
    assert not any(feed(watch, noise(128)))
    found = feed(watch, noise(1200) + 10)
    assert found[0] and sum(found) <= most and not any(found[most:])
    assert watch.take(1328, warns=False) == {"health/skipped_spikes": sum(found)}  # of all


def test_a_spike_does_not_hide_the_next_one():
    watch = spikes.Spikes(6, torch.device("cpu"))
    values = noise(140)
    values[100], values[110], values[130], values[135] = 1e6, 20, torch.nan, torch.inf
    assert [i for i, spike in enumerate(feed(watch, values)) if spike] == [100, 110]
    losses = watch.window[:, 0]  # the newest 128 of 138
    assert losses.isfinite().all() and losses[-1] == values[-1] and losses.max() < 20


def test_nothing_is_a_spike_before_enough_is_known():
    watch = spikes.Spikes(6, torch.device("cpu"))
    values = torch.cat((noise(63), torch.full((2,), 1e3)))
    assert not any(feed(watch, values[:64]))
    watch = spikes.Spikes(6, torch.device("cpu"))
    assert [any(feed(watch, part)) for part in (values[:63], values[62:63], values[64:])] == [
        False, False, True]


@pytest.mark.parametrize("sigmas", [3, 1e39])
def test_values_that_never_changed_forbid_no_change(sigmas):
    watch = spikes.Spikes(sigmas, torch.device("cpu"))
    assert not any(feed(watch, torch.full((200,), 2.0)))
    assert sum(feed(watch, 5 + torch.rand(100))) < 60 and not watch.window.isnan().any()
    assert all(row.isfinite().all() for row in watch.seen)
