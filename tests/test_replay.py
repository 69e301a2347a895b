"""A device that miscalculates: bits flipped in activations and gradients while training."""

import random

import pytest
import torch
from conftest import TINY, column, processes

from steady.checkpoints.checkpoint import compare, list_checkpoints
from steady.guard import replay


def flip(tensor: torch.Tensor, draw: random.Random):
    """A random bit of a random number of a tensor of fp32, in place."""
    numbers = tensor.detach().view(torch.int32).view(-1)
    numbers[draw.randrange(len(numbers))] ^= torch.tensor(1 << draw.randrange(31)).int()


@pytest.mark.parametrize("flags, ranks", [
    (["--dropout", 0.1], 1), (["--tie_embeddings"], 1),
    (["--dropout", 0.1, "--micro_batch_size", 2], 2), (["--parallel", "zero3"], 2)])
def test_a_sound_machine_is_not_accused_and_nothing_changes(run, tmp_path, flags, ranks):
    flags = [*flags, "--max_steps", 6]
    run(*flags, "--out_dir", "plain", ranks=ranks)
    run(*flags, "--out_dir", "replayed", "--replay_interval", 3, ranks=ranks)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(tmp_path / "plain", name) == column(tmp_path / "replayed", name)
    one, two = (list_checkpoints(tmp_path / name / "checkpoints")[-1].state()
                for name in ("plain", "replayed"))
    for part in ("model", "optimizers"):
        assert compare(one[part], two[part])[1] == []


def test_flipped_bits_of_activations_and_gradients_are_found(run, monkeypatch):
    """Each in the second of the two passes; a bit of what nothing depends on would be none."""
    draw, passes = random.Random(0), [0]
    plain = replay.measure

    def measure(run, *how):
        passes[0] += 1
        flips = passes[0] % 2 == 0
        hooks = []
        if flips and draw.random() < 0.5:
            module = draw.choice([m for name, m in run.model.named_modules() if "mlp" in name])
            hooks = [module.register_forward_hook(lambda m, i, output: flip(output, draw))]
        elif flips:
            p = draw.choice([p for p in run.model.parameters() if p.ndim == 2])
            hooks = [p.register_post_accumulate_grad_hook(lambda p: flip(p.grad, draw))]
        found = plain(run, *how)
        for hook in hooks:
            hook.remove()
        return found

    monkeypatch.setattr(replay, "measure", measure)
    found = 0
    for _ in range(12):
        passes[0] = 0
        told = run("--replay_interval", 2, "--max_steps", 3, "--eval_interval", 0,
                   "--save_interval", 0, expect=1)
        found += "failed: step 2: the same micro-batch" in told
    assert found == 12


def test_the_rank_is_named_and_nothing_is_saved(tmp_path, corpus):
    def hook(rank):
        plain = replay.measure
        calls = []

        def measure(run, *how):
            found = plain(run, *how)
            calls.append(found)
            if rank == 1 and len(calls) == 4:
                found[5] += 1
            return found

        replay.measure = measure

    flags = [*TINY, "--data", corpus, "--out_dir", "r", "--micro_batch_size", 2,
             "--replay_interval", 2]
    first, second = processes(tmp_path, 2, flags, hook)
    assert (first.code(), second.code()) == (1, 1)
    assert "rank 1 (cpu): blocks.0.attention.q_norm.weight;" in first.text()
    assert "rank 0" not in first.text() and "failed" not in second.text()
    assert list_checkpoints(tmp_path / "r/checkpoints") == []


def test_without_determinism_rounding_is_none():
    first = torch.tensor([5.0, 1.0, 2.0])
    for second, found in (([5.0001, 1.005, 2.0], None), ([5.01, 1.0, 2.0], 0),
                          ([5.0, 1.0, 2.1], 2), ([5.0, float("nan"), 2.0], 1)):
        assert replay.difference(first, torch.tensor(second), exact=False) == found
    nan = torch.tensor([float("nan"), 1.0, 2.0])  # as of a step that is skipped
    assert replay.difference(nan, nan.clone(), exact=False) is None
