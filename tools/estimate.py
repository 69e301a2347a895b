"""python train.py --estimate DEVICES: parameters, FLOPs, memory and time of a run in advance.

Two steps run on fake tensors (shapes and types without memory), and the bytes alive are added up:
as in a real eager step, even after changes to the model, the loss or the optimizer.
"""

import contextlib
import math
import weakref
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import Config, resolve
from data import load_data
from model import Transformer, flops_per_token
from steady.guard.memory import micro_batch_size, usual_micro_batch
from steady.models import layers
from steady.models.device import DTYPE_NAMES, PEAK_TFLOPS, pick_dtype, takes_varlen
from steady.models.huggingface import adapt, config_from_hf
from steady.options import ConfigError
from steady.private import use_fake_backend
from steady.ranks.parallel import Shards
from steady.tokens.packing import trial_documents
from steady.watch.findings import duration

MFU = 0.4  # assumed: usual for dense models of these sizes
DEVICE_GB, FREE = 80, 0.9  # of an H100; the rest is for fragments, the context and libraries


class Live(TorchDispatchMode):
    """Counts the bytes of living tensors, now and at the peak."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result

    def add(self, tensors):
        found = {x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)}
        if not found <= self.storages:  # views, and writes in place, change nothing
            self.storages |= found
            self.peak = max(self.peak, self.bytes())

    def bytes(self) -> int:
        """Bytes of all storages at their current sizes: fully_shard resizes whole weights."""
        return sum(storage.nbytes() for storage in self.storages)


@contextlib.contextmanager
def imagined(cfg: Config, world_size: int, dtype: torch.dtype):
    """Fake tensors, shards for ranks whose collectives do nothing, and layers as on a GPU."""
    on_cpu = layers.on_cpu if dtype == torch.float32 else lambda x: False
    use_fake_backend()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        shards = Shards(cfg.parallel, world_size, cfg.shard_size)
        with patch.object(layers, "on_cpu", on_cpu), FakeTensorMode():
            yield shards
    finally:
        dist.destroy_process_group()


def simulate(cfg: Config, dtype: torch.dtype, micro_batch: int, accumulation: int,
             make_optimizers, world_size: int = 1) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer and activations on each of world_size ranks.

    Everything temporary counts as activations, including parts gathered from other ranks.
    """
    live = Live()
    with imagined(cfg, world_size, dtype) as shards:
        ddp = world_size > 1 and shards.size == 1  # it holds gradients from step to step
        model = adapt(Transformer(cfg), cfg, dtype)
        shards.shard(model, dtype)
        shards.hold(model)
        held = list(shards.parameters.values())
        averages = [p.detach().clone() for p in held if cfg.ema]
        live.add([*shards.tensors_of(model).values(), *model.buffers(), *averages])
        need = dict(weights=live.bytes(), gradients=sum(p.nbytes for p in held))
        with live:
            optimizers = make_optimizers(model, cfg, torch.device("cpu"), shards)
            tokens = torch.zeros(micro_batch, cfg.seq_len, dtype=torch.long)
            packed = cfg.data_mode == "packed"
            documents = trial_documents(tokens, takes_varlen(cfg, dtype)) if packed else None
            for micro_batches in (1, min(2, accumulation + ddp)):  # the first makes their states
                live.peak = live.bytes()
                for i in range(micro_batches):
                    with (shards.micro_batch(model, last=i == micro_batches - 1),
                          torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
                        loss = model(tokens, tokens, documents).sum()
                    loss.backward()
                shards.move_gradients(model)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        states = tree_leaves([optimizer.state for optimizer in optimizers])
        need["optimizer"] = sum(t.nbytes for t in states if isinstance(t, torch.Tensor))
        need["activations"] = live.peak - sum(need.values())
    if ddp and accumulation > 1:  # the sum beside the buckets
        need["gradients"] *= 2
    return need


def estimate(cfg: Config, world_size: int, dtype: torch.dtype, make_optimizers) -> dict:
    """The figures of a run on world_size GPUs, in bytes, FLOPs and seconds. Raises ConfigError."""
    micro_batch = micro_batch_size(cfg, world_size, usual_micro_batch(cfg, DEVICE_GB * 10**9))
    accumulation = cfg.batch_size // (micro_batch * world_size)
    n = max(1, 2**15 // cfg.seq_len)  # large enough for memory to be linear in it
    memory, some, twice = (simulate(cfg, dtype, size, accumulation, make_optimizers, world_size)
                           for size in (micro_batch, n, 2 * n))
    some, twice = sum(some.values()), sum(twice.values())
    with torch.device("meta"):
        model = adapt(Transformer(cfg), cfg, dtype)
    flops = flops_per_token(model, cfg)
    peak = cfg.peak_tflops or PEAK_TFLOPS["NVIDIA H100 80GB HBM3"][dtype == torch.float32]
    again = 4 / 3 if cfg.activation_checkpointing == "full" else 1  # the forward pass runs twice
    seconds = again * flops * cfg.batch_size * cfg.seq_len / (peak * 1e12 * MFU * world_size)
    return dict(
        parameters=sum(p.numel() for p in model.parameters()), flops_per_token=flops,
        micro_batch=micro_batch, accumulation=accumulation, memory=memory,
        fits=max(0, n + math.floor((DEVICE_GB * 1e9 * FREE - some) / (twice - some) * n)),
        peak_tflops=peak, step_seconds=seconds)


def estimate_run(cfg: Config, make_optimizers) -> str:
    """The needs of a run as text. Reads the data only for vocabulary and epochs."""
    cfg = resolve(config_from_hf(cfg) if cfg.init_from else cfg)
    if cfg.model == "transformers" or cfg.max_minutes:
        raise ConfigError("--estimate: not with --model transformers or --max_minutes")
    if cfg.vocab_size is None or cfg.epochs:
        load_data(cfg)
    # auto is bf16, even if the CPU at hand is slow at it: the run is for another machine
    dtype = pick_dtype(cfg.precision.replace("auto", "bf16"), torch.device("cpu"))
    found = estimate(cfg, cfg.estimate, dtype, make_optimizers)
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in found["memory"].items())
    fits = f"micro-batches of up to {found['fits']}" if found["fits"] else "no micro-batch"
    seconds = found["step_seconds"] * cfg.max_steps
    return "\n".join((
        f"model   {cfg.model}: {found['parameters'] / 1e6:.2f} M parameters, "
        f"{found['flops_per_token'] / 1e9:.3g} GFLOP a token",
        f"step    {cfg.estimate} x {found['accumulation']} micro-batches of "
        f"{found['micro_batch']} x {cfg.seq_len}, {DTYPE_NAMES[dtype]}, {cfg.optimizer}, "
        f"{cfg.batch_size * cfg.seq_len:,} tokens",
        f"memory  {sum(found['memory'].values()) / 1e9:.3g} GB on each device: {parts}",
        f"fits    {fits} on {DEVICE_GB} GB, with {1 - FREE:.0%} kept for fragments and libraries: "
        f"--parallel {cfg.parallel}, --activation_checkpointing {cfg.activation_checkpointing}",
        f"time    {seconds / 86400:.3g} days ({duration(seconds)}): {cfg.max_steps:,} steps at "
        f"{MFU:.0%} (assumed) of {cfg.estimate} x {found['peak_tflops']:g} TFLOP/s "
        f"(--peak_tflops), without the time to communicate"))
