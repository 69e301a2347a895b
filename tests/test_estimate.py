"""What --estimate says, against what a run really takes."""

import itertools
import resource
from dataclasses import replace

import pytest
import torch
from conftest import tiny_config
from test_config import parsed

from model import Transformer
from steady.models.ema import Ema
from tools import estimate
from train import make_optimizers

SHAPE = ["--n_layer", "2", "--n_head", "12", "--n_kv_head", "4", "--d_model", "768", "--d_ff",
         "2048", "--vocab_size", "500", "--seq_len", "256", "--optimizer", "adamw"]


def peak_of_real_tensors(cfg, accumulation) -> int:
    """Bytes, as torch's allocator counts them, in a run of two steps."""
    tokens = torch.zeros(cfg.batch_size // accumulation, cfg.seq_len, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as profile:
        model, shards = Transformer(cfg), estimate.Shards()
        optimizers = make_optimizers(model, cfg, torch.device("cpu"), shards.hold(model))
        kept = cfg.ema and Ema(model, shards, cfg.ema)  # noqa: F841
        for _ in range(2):
            for _ in range(accumulation):
                model(tokens, tokens).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("flags, accumulation", [
    ("muon --ema 0.9", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("adamw", 1), ("adamw --activation_checkpointing full", 2)))])
def test_memory_is_that_of_the_tensors_of_real_steps(flags, accumulation):
    cfg = parsed("--n_layer", 3, "--vocab_size", 1000, "--seq_len", 128, "--batch_size", 8,
                 "--optimizer", *flags.split())
    need = estimate.simulate(cfg, torch.float32, 8 // accumulation, accumulation, make_optimizers)
    assert sum(need.values()) == pytest.approx(peak_of_real_tensors(cfg, accumulation), rel=0.001)


def test_ddp_holds_gradients_from_step_to_step():
    """In its buckets, so in the next forward pass, and beside the sum over several passes."""
    cfg, n = tiny_config(), sum(p.numel() for p in Transformer(tiny_config()).parameters())
    one, once, thrice = (
        sum(estimate.simulate(cfg, torch.float32, 2, passes, make_optimizers, ranks).values())
        for passes, ranks in ((2, 1), (1, 2), (3, 2)))
    assert once == one and thrice == one + 4 * n


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_parts_are_exact_and_sharded_by_two_ranks(accumulation):
    """As in the ZeRO paper (arXiv:1910.02054)."""
    cfg = parsed(*SHAPE, "--batch_size", 16 * accumulation, "--micro_batch_size", 8,
                 "--peak_tflops", 100)
    found = estimate.estimate(cfg, 2, torch.float32, make_optimizers)
    n = sum(p.numel() for p in Transformer(cfg).parameters())
    ddp, zero2, zero3 = (estimate.simulate(
        replace(cfg, parallel=way), torch.float32, 8, accumulation, make_optimizers, 2)
        for way in ("ddp", "zero2", "zero3"))
    assert found["parameters"] == n and found["memory"] == ddp
    buckets = 1 + (accumulation > 1)  # gradients are summed up beside ddp's
    assert ddp["gradients"] == 4 * n * buckets
    assert ddp["weights"] == pytest.approx(4 * n, rel=0.01)  # and the rotary table
    assert ddp["optimizer"] == pytest.approx(8 * n, rel=0.001)
    for name in ("weights", "gradients", "optimizer"):
        whole = ddp[name] / (buckets if name == "gradients" else 1)
        assert zero2[name] == zero3[name] == pytest.approx(whole / 2, rel=0.02)
    assert sum(zero3.values()) < sum(zero2.values()) < sum(ddp.values())
    seconds = found["flops_per_token"] * 16 * accumulation * 256 / (100e12 * estimate.MFU * 2)
    assert found["step_seconds"] == pytest.approx(seconds)


@pytest.mark.slow
def test_the_command_allocates_nothing(run, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = run("--estimate", "64", "--model", "7b", "--n_layer", 2, "--vocab_size", "32000",
               "--batch_size", "64", "--micro_batch_size", "1", "--parallel", "zero3", bare=True)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert added * 1024 < 300e6  # of 2.7 GB and more
    assert "666.91 M parameters" in told and "zero3" in told and "days" in told
    assert not list(tmp_path.iterdir())


def test_packed_rows_need_no_mask_and_recomputed_blocks_no_casts_of_weights():
    packed, found = ["--data_mode", "packed"], []
    for flags in ([], packed, [*packed, "--attention", "efficient"]):
        cfg = parsed("--vocab_size", 257, "--seq_len", 512, "--batch_size", 2, *flags)
        need = estimate.simulate(cfg, torch.bfloat16, 2, 1, make_optimizers)
        found.append(need["activations"])
    stream, varlen, masked = found
    assert varlen == pytest.approx(stream, rel=0.03) and masked > varlen + 2 * 512**2
    cfg = parsed(*SHAPE, "--n_layer", 6, "--batch_size", 2, "--activation_checkpointing", "full")
    need = estimate.simulate(cfg, torch.bfloat16, 1, 2, make_optimizers)
    assert need["activations"] < need["weights"] / 4


@pytest.mark.slow
def test_what_fits(monkeypatch):
    monkeypatch.setattr(estimate, "DEVICE_GB", 8)
    cfg = parsed(*SHAPE, "--batch_size", 8, "--micro_batch_size", 2, "--shard_size", 1,
                 "--parallel", "zero2")
    plain, again = (estimate.estimate(replace(cfg, activation_checkpointing=how), 2, torch.float32,
                                      make_optimizers) for how in ("none", "full"))
    assert again["step_seconds"] == pytest.approx(4 / 3 * plain["step_seconds"])
    assert again["memory"]["activations"] < 0.7 * plain["memory"]["activations"]
    need = estimate.simulate(replace(cfg, activation_checkpointing="full"), torch.float32,
                             again["fits"], 2, make_optimizers, 2)
    assert sum(need.values()) / 1e9 == pytest.approx(0.9 * 8, rel=0.02)
    monkeypatch.setattr(estimate, "DEVICE_GB", 1e-6)
    tiny = replace(tiny_config(), estimate=2)
    assert "fits    no micro-batch on" in estimate.estimate_run(tiny, make_optimizers)
