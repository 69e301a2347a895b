"""What --estimate says, against what a run really takes."""

import functools
import itertools
import re
import resource
import sys
from dataclasses import replace

import pytest
import torch
from conftest import tiny_config

import config
import train
from model import Transformer
from tools import estimate

CPU = torch.device("cpu")

SHAPE = ["--n_layer", "2", "--n_head", "12", "--n_kv_head", "4", "--d_model", "768", "--d_ff",
         "2048", "--vocab_size", "500", "--seq_len", "256"]


def peak_of_real_tensors(cfg, accumulation) -> int:
    """Bytes, as torch's allocator counts them, in a run of two steps."""
    tokens = torch.zeros(cfg.batch_size // accumulation, cfg.seq_len, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as profile:
        model = Transformer(cfg)
        optimizers = train.make_optimizers(model, cfg, CPU)
        for _ in range(2):
            for _ in range(accumulation):
                model(tokens, tokens).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("optimizer, accumulation, checkpointing", [
    ("adamw", 1, "none"), ("adamw", 2, "full"), ("muon", 1, "full"), ("muon", 2, "none"),
])
def test_memory_is_that_of_the_tensors_of_real_steps(optimizer, accumulation, checkpointing):
    cfg = config.resolve(config.parse([
        "--n_layer", "3", "--vocab_size", "1000", "--seq_len", "128", "--batch_size", "8",
        "--optimizer", optimizer, "--activation_checkpointing", checkpointing,
    ]))
    need, _ = estimate.simulate(cfg, torch.float32, 8 // accumulation, accumulation,
                                train.make_optimizers)
    assert sum(need.values()) == pytest.approx(peak_of_real_tensors(cfg, accumulation), rel=0.001)


@functools.cache
def on_two_gpus(accumulation: int) -> tuple:
    """(configuration, its estimate, number of parameters)."""
    cfg = config.resolve(config.parse([
        *SHAPE, "--batch_size", str(16 * accumulation), "--micro_batch_size", "8", "--optimizer",
        "adamw", "--peak_tflops", "100"]))
    found = estimate.estimate(cfg, 2, torch.float32, train.make_optimizers)
    return cfg, found, sum(p.numel() for p in Transformer(cfg).parameters())


def test_parts_are_exact():
    cfg, found, parameters = on_two_gpus(1)
    one = found["memory"]["ddp"]
    assert found["parameters"] == parameters
    assert one["gradients"] == 4 * parameters
    assert one["weights"] == pytest.approx(4 * parameters, rel=0.01)  # and the rotary table
    assert one["optimizer"] == pytest.approx(8 * parameters, rel=0.001)
    assert found["memory"]["zero3"]["optimizer"] == pytest.approx(one["optimizer"] / 2, rel=0.001)
    assert found["sent"]["ddp"] == pytest.approx(4 * parameters, rel=0.01)  # 2 (n - 1) / n, n = 2
    full, _ = estimate.simulate(
        replace(cfg, activation_checkpointing="full"), torch.float32, found["micro_batch"],
        found["accumulation"], train.make_optimizers, "ddp", 2)
    assert full["activations"] < 0.7 * one["activations"]


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_shared_by_two_gpus(accumulation):
    """As the ZeRO paper (arXiv:1910.02054) divides it, and sent by rings."""
    cfg, found, n = on_two_gpus(accumulation)
    ddp, zero2, zero3 = (found["memory"][way] for way in ("ddp", "zero2", "zero3"))
    for name in ("weights", "gradients", "optimizer"):
        twice = name == "gradients" and accumulation > 1  # summed up beside ddp's buckets
        assert zero2[name] == zero3[name] == pytest.approx(ddp[name] / (4 if twice else 2),
                                                           rel=0.02)
    whole = {way: sum(found["memory"][way].values()) for way in estimate.WAYS}
    assert whole["zero3"] < whole["zero2"] < whole["ddp"]
    # zero2 gathers each weight once a step; zero3 twice, but what is in no block once
    outside = n - sum(p.numel() for p in Transformer(cfg).blocks.parameters())
    embedding = outside // 2  # untied: a unit of its own
    sent = dict(ddp=2 * n, zero2=(accumulation + 1) * n,
                zero3=accumulation * (3 * n - (outside - embedding)))
    assert found["sent"] == pytest.approx({way: 4 * k / 2 for way, k in sent.items()}, rel=0.01)
    seconds = found["flops_per_token"] * 16 * accumulation * 256 / (100e12 * estimate.MFU * 2)
    assert found["step_seconds"] == pytest.approx(seconds)


def test_the_command_allocates_nothing(run, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = run("--estimate", "64", "--model", "7b", "--n_layer", 2, "--vocab_size", "32000",
               "--batch_size", "64", "--micro_batch_size", "1", bare=True)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert added * (1 if sys.platform == "darwin" else 1024) < 300e6  # of 2.7 GB and more
    assert "666.91 M parameters" in told and "zero3" in told and "days" in told
    assert not list(tmp_path.iterdir())


def test_the_number_of_devices_is_for_the_estimate_alone(run):
    told = run("--estimate", "5", "--vocab_size", "9", expect=2)
    assert "--batch_size 8: expected a multiple of 5" in told


def test_shard_sizes(run):
    """Copies of a model that one device holds are divided like nothing; odd sizes are refused."""
    flags = ["--estimate", 4, "--vocab_size", "257"]
    told = run(*flags, "--shard_size", 3, expect=2)
    assert "--shard_size 3: expected a divisor of the 4 processes" in told
    assert "zero2" not in run(*flags, "--shard_size", 1)


def test_packed_rows_without_a_mask_take_what_a_stream_takes():
    found = {}
    packed = ["--data_mode", "packed"]
    for flags in ([], packed, [*packed, "--attention", "efficient"]):
        cfg = config.resolve(config.parse(["--n_layer", "2", "--vocab_size", "257", "--seq_len",
                                           "512", "--batch_size", "2", *flags]))
        need, _ = estimate.simulate(cfg, torch.bfloat16, 2, 1, train.make_optimizers)
        found[" ".join(flags[-1:])] = need["activations"]
    stream, varlen, masked = found.values()
    assert varlen == pytest.approx(stream, rel=0.03) and masked > varlen + 2 * 512**2


def test_what_bounds_a_step_and_what_fits(monkeypatch):
    monkeypatch.setattr(estimate, "DEVICE_GB", 8)
    monkeypatch.setattr(estimate, "LINK_GBS", 1e-3)
    cfg = config.resolve(config.parse([
        *SHAPE, "--batch_size", "8", "--micro_batch_size", "2",
        "--optimizer", "adamw", "--shard_size", "1", "--parallel", "zero2"]))
    found = estimate.estimate(cfg, 2, torch.float32, train.make_optimizers)
    assert found["sent"].keys() == {"ddp"}  # every rank has a whole copy, whatever the way
    assert found["step_seconds"] == found["link_seconds"] == found["sent"]["ddp"] / 1e6
    # two micro-batches are summed up beside ddp's buckets
    n = sum(p.numel() for p in Transformer(cfg).parameters())
    assert found["memory"]["ddp"]["gradients"] == 2 * 4 * n
    monkeypatch.setattr(estimate, "LINK_GBS", 350)
    plain = estimate.estimate(replace(cfg, activation_checkpointing="full"), 2, torch.float32,
                              train.make_optimizers)
    assert plain["step_seconds"] == plain["compute_seconds"]
    assert plain["compute_seconds"] == pytest.approx(4 / 3 * found["compute_seconds"])
    most = replace(cfg, micro_batch_size=str(plain["fits"]), batch_size=2 * plain["fits"],
                   activation_checkpointing="full")
    need, _ = estimate.simulate(most, torch.float32, plain["fits"], 2, train.make_optimizers,
                                "ddp", 2)
    assert sum(need.values()) / 1e9 == pytest.approx(0.9 * 8, rel=0.02)


@pytest.mark.parametrize("gigabytes, way, less", [
    (8, "zero3", None), (1e-6, "zero3", "--activation_checkpointing full, more devices"),
    (1e-6, "ddp", "--parallel zero3, --activation_checkpointing full, more devices"),
])
def test_what_takes_less_where_nothing_fits(monkeypatch, gigabytes, way, less):
    monkeypatch.setattr(estimate, "DEVICE_GB", gigabytes)
    cfg = replace(tiny_config(), estimate=2, parallel=way)
    fits = re.search("^fits .*", estimate.estimate_run(cfg, train.make_optimizers), re.M)[0]
    assert (fits.partition("takes less: ")[2] or None) == less
