"""What --estimate says, against what a run really takes."""

import gc
import itertools
import resource
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_config
from test_config import parsed

from model import Transformer
from steady.models.ema import Ema
from steady.ranks.parallel import distribute
from tools import estimate
from train import make_optimizers

SHAPE = ["--n_layer", "2", "--n_head", "12", "--n_kv_head", "4", "--d_model", "768", "--d_ff",
         "2048", "--vocab_size", "500", "--seq_len", "256", "--optimizer", "adamw"]


def peak_of_real_tensors(cfg, accumulation, ranks) -> int:
    """Bytes, as torch's allocator counts them, in a run of two steps, on one of the ranks."""
    tokens = torch.zeros(cfg.batch_size // accumulation, cfg.seq_len, dtype=torch.long)
    gc.collect()  # or what an earlier test left would be freed meanwhile
    with torch.profiler.profile(profile_memory=True) as profile:
        model, device = Transformer(cfg), torch.device("cpu")
        shards = estimate.Shards().hold(model)
        optimizers = make_optimizers(model, cfg, device, shards)
        kept = [distribute(model, device, ranks, False), cfg.ema and Ema(model, shards, cfg.ema)]
        for i in range(2 * accumulation):
            with shards.micro_batch(kept[0], last=i % accumulation == accumulation - 1):
                kept[0](tokens, tokens).sum().backward()
            for optimizer in optimizers if i % accumulation == accumulation - 1 else ():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("flags, passes, ranks", [
    ("muon --ema 0.9", 2, 1), ("adamw", 1, 2), ("adamw", 2, 2),
    pytest.param("adamw --activation_checkpointing full", 2, 1, marks=pytest.mark.slow)])
def test_memory_is_that_of_the_tensors_of_real_steps(request, flags, passes, ranks):
    cfg = parsed("--n_layer", 3, "--vocab_size", 1000, "--seq_len", 128, "--batch_size", 8,
                 "--optimizer", *flags.split())
    need = estimate.simulate(cfg, torch.float32, 8 // passes, passes, make_optimizers, ranks)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)  # of one rank: it has the same buckets
    assert sum(need.values()) == pytest.approx(peak_of_real_tensors(cfg, passes, ranks), rel=0.001)


@pytest.mark.slow
def test_parts_are_exact_and_sharded_by_two_ranks():
    """As in the ZeRO paper (arXiv:1910.02054)."""
    cfg = parsed(*SHAPE, "--batch_size", 16, "--micro_batch_size", 8,
                 "--peak_tflops", 100)
    found = estimate.estimate(cfg, 2, torch.float32, make_optimizers)
    n = sum(p.numel() for p in Transformer(cfg).parameters())
    ddp, zero2, zero3 = (estimate.simulate(
        replace(cfg, parallel=way), torch.float32, 8, 1, make_optimizers, 2)
        for way in ("ddp", "zero2", "zero3"))
    assert found["parameters"] == n and found["memory"] == ddp
    assert ddp["gradients"] == 4 * n
    assert ddp["weights"] == pytest.approx(4 * n, rel=0.01)  # and the rotary table
    assert ddp["optimizer"] == pytest.approx(8 * n, rel=0.001)
    for name in ("weights", "gradients", "optimizer"):
        assert zero2[name] == zero3[name] == pytest.approx(ddp[name] / 2, rel=0.02)
    assert sum(zero3.values()) < sum(zero2.values()) < sum(ddp.values())
    seconds = found["flops_per_token"] * 16 * 256 / (100e12 * estimate.MFU * 2)
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
