"""python train.py --estimate DEVICES: the memory, communication and time of a run in advance.

Two steps run on fake tensors (shapes and types without memory), and the bytes alive at each moment
are added up. So the figures follow the operations of a real eager step, also after changes to the
model, the loss or the optimizer.
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
from steady.ranks.parallel import Shards, check_shard_size, local_part
from steady.tokens.packing import trial_documents
from steady.watch.findings import duration

MFU = 0.4  # assumed: usual for dense models of these sizes
LINK_GBS = 350  # between devices: NVLink of an H100
DEVICE_GB, FREE = 80, 0.9  # of an H100; the rest is for fragments, the context and libraries
WAYS = ("ddp", "zero2", "zero3")  # --parallel


class Live(TorchDispatchMode):
    """Counts bytes: of living tensors, of those at the peak, and those sent to other ranks."""

    def __init__(self):
        super().__init__()
        self.sizes, self.bytes, self.peak, self.sent = {}, 0, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.sent += bytes_sent(func.__name__.partition(".")[0], args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage, size: int | None = None):
        """Count a storage by its size now; views and writes in place change nothing."""
        key, size = storage._cdata, storage.nbytes() if size is None else size
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.bytes += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def forget(self, key: int):
        self.bytes -= self.sizes.pop(key)


def bytes_sent(collective: str, args) -> float:
    """By each rank of a ring."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    group = next(leaf for leaf in tree_leaves(args) if not isinstance(leaf, torch.Tensor))
    n = dist.ProcessGroup.unbox(group).size()
    rounds = 2 if collective == "allreduce_" else 1  # reduce-scatter, then all-gather
    return rounds * max(tensor.nbytes for tensor in tensors) * (n - 1) / n


@contextlib.contextmanager
def imagined(world_size: int, dtype: torch.dtype, live: Live):
    """A group of ranks with collectives that do nothing, and layers as on a GPU."""
    resize = torch.UntypedStorage.resize_

    def seen(storage, size: int):  # fully_shard frees whole weights like this
        live.see(storage, size)
        return resize(storage, size)

    if world_size > 1:
        use_fake_backend()
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    on_cpu = layers.on_cpu if dtype == torch.float32 else lambda x: False
    try:
        with (patch.object(torch.UntypedStorage, "resize_", seen),
              patch.object(layers, "on_cpu", on_cpu)):
            yield
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def simulate(cfg: Config, dtype: torch.dtype, micro_batch: int, accumulation: int,
             make_optimizers, way: str = "ddp", world_size: int = 1) -> tuple[dict, float]:
    """(bytes of weights, gradients, optimizer, activations on a rank; bytes it sends in a step).

    Everything temporary counts as activations, including parts gathered from other ranks.
    """
    live, n = Live(), world_size if way != "ddp" else 1
    with imagined(n, dtype, live):
        shards = Shards(way, n, cfg.shard_size)
        with FakeTensorMode():
            with torch.device("meta" if n > 1 else "cpu"):
                model = adapt(Transformer(cfg), cfg, dtype)
            shards.shard(model, dtype)
            if n > 1:
                model.to_empty(device="cpu")
            shards.hold(model)
            with live:
                need, sent = two_steps(cfg, model, shards, live, dtype, micro_batch,
                                       min(2, accumulation), make_optimizers)
    if world_size > n and accumulation > 1:  # ddp keeps the sum beside its buckets
        need["gradients"] *= 2
    # each further micro-batch sends as much as the second one
    return need, sent[0] + (accumulation - 1) * (sent[1] - sent[0])


def two_steps(cfg, model, shards, live, dtype, micro_batch, accumulation, make_optimizers):
    """(bytes by purpose, bytes sent in each of two steps), the first of one micro-batch."""
    held = list(shards.parameters.values())
    frozen = [local_part(p) for p in model.parameters() if not p.requires_grad]
    for tensor in [*held, *frozen, *model.buffers()]:
        live.see(tensor.untyped_storage())
    need, sent = dict(weights=live.bytes, gradients=sum(p.nbytes for p in held)), []
    optimizers = make_optimizers(model, cfg, torch.device("cpu"), shards.parameters, shards)
    tokens = torch.zeros(micro_batch, cfg.seq_len, dtype=torch.long)
    no_mask = takes_varlen(cfg, dtype)
    documents = trial_documents(tokens, no_mask) if cfg.data_mode == "packed" else None
    for micro_batches in (1, accumulation):
        live.sent, live.peak = 0.0, live.bytes
        for i in range(micro_batches):
            with (
                shards.micro_batch(model, last=i == micro_batches - 1),
                torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
            ):
                loss = model(tokens, tokens, documents).sum()
            loss.backward()
            del loss
        shards.move_gradients()
        shards.norms([p.grad for p in held])
        for optimizer in optimizers:
            optimizer.step()
        sent.append(live.sent)
        for p in held:
            p.grad = None
    need["optimizer"] = sum(t.nbytes for optimizer in optimizers for s in optimizer.state.values()
                            for t in s.values() if isinstance(t, torch.Tensor))
    need["activations"] = live.peak - sum(need.values())
    return need, sent


def estimate(cfg: Config, world_size: int, dtype: torch.dtype, make_optimizers) -> dict:
    """All figures of a run on world_size GPUs, in bytes, FLOPs and seconds. Raises ConfigError."""
    check_shard_size(cfg.shard_size, world_size)
    micro_batch = micro_batch_size(cfg, world_size, usual_micro_batch(cfg, DEVICE_GB * 10**9))
    accumulation = cfg.batch_size // (micro_batch * world_size)
    with torch.device("meta"):
        shape = adapt(Transformer(cfg), cfg, dtype)
    flops = flops_per_token(shape, cfg)

    def memory_and_sent(way: str, size: int) -> tuple[dict, float]:
        return simulate(cfg, dtype, size, accumulation, make_optimizers, way, world_size)

    ways = WAYS if (cfg.shard_size or world_size) > 1 else WAYS[:1]
    way = cfg.parallel if cfg.parallel in ways else "ddp"
    memory, sent = {}, {}
    for each in ways:
        memory[each], sent[each] = memory_and_sent(each, micro_batch)
    trained = sum(p.nbytes for p in shape.parameters() if p.requires_grad)
    sent["ddp"] = 2 * trained * (world_size - 1) / world_size  # gradients, once a step
    peak = cfg.peak_tflops or PEAK_TFLOPS["NVIDIA H100 80GB HBM3"][dtype == torch.float32]
    again = 4 / 3 if cfg.activation_checkpointing == "full" else 1  # the forward pass, twice
    flops_per_step = flops * cfg.batch_size * cfg.seq_len
    compute_seconds = again * flops_per_step / (peak * 1e12 * MFU * world_size)
    link_seconds = sent[way] / (LINK_GBS * 1e9)
    n = max(1, 2**15 // cfg.seq_len)  # so large that memory is linear in the sequences
    one, two = (sum(memory_and_sent(way, size)[0].values()) for size in (n, 2 * n))
    free = DEVICE_GB * 1e9 * FREE - one
    return dict(
        parameters=sum(p.numel() for p in shape.parameters()), micro_batch=micro_batch,
        accumulation=accumulation, flops_per_token=flops, memory=memory, sent=sent,
        peak_tflops=peak, compute_seconds=compute_seconds, link_seconds=link_seconds,
        step_seconds=max(compute_seconds, link_seconds),
        fits=max(0, n + math.floor(free / (two - one) * n)),
    )


def estimate_run(cfg: Config, make_optimizers) -> str:
    """The needs of a run as text. Reads the data only for vocabulary and epochs."""
    if cfg.init_from:
        cfg = config_from_hf(cfg)
    cfg = resolve(cfg)
    if cfg.model == "transformers":
        raise ConfigError(f"--estimate: {cfg.init_from} is trained through transformers' own "
                          "module; only steady's Transformer can be estimated")
    if cfg.max_minutes:
        raise ConfigError("--estimate: expected --max_steps, not --max_minutes")
    if cfg.vocab_size is None or cfg.epochs:
        load_data(cfg)
    # auto is bf16, even if the CPU at hand is slow at it: the run is for another machine
    precision = "bf16" if cfg.precision == "auto" else cfg.precision
    dtype = pick_dtype(precision, torch.device("cpu"))
    found = estimate(cfg, cfg.estimate, dtype, make_optimizers)
    memory = found["memory"]
    rows = {name: [need[name] for need in memory.values()] for name in memory["ddp"]}
    rows["together"] = [sum(need.values()) for need in memory.values()]
    rows["sent in a step"] = found["sent"].values()
    ways = f"--parallel {cfg.parallel}, --activation_checkpointing {cfg.activation_checkpointing}"
    largest, less = f"micro-batches of up to {found['fits']}", ""
    if not found["fits"]:
        others = "--parallel zero3", "--activation_checkpointing full", "more devices"
        largest, less = "no micro-batch", ", ".join(each for each in others if each not in ways)
        less = f"; what takes less: {less}"
    seconds, tokens = found["step_seconds"] * cfg.max_steps, cfg.batch_size * cfg.seq_len
    return "\n".join((
        f"model   {cfg.model}: {found['parameters'] / 1e6:.2f} M parameters, "
        f"{found['flops_per_token'] / 1e9:.3g} GFLOP a token",
        f"step    {cfg.estimate} x {found['accumulation']} micro-batches of "
        f"{found['micro_batch']} x {cfg.seq_len}, {DTYPE_NAMES[dtype]}, {cfg.optimizer}, "
        f"{tokens:,} tokens",
        f"{'GB on each device':20s}" + "".join(f"{way:>10s}" for way in memory),
        *(f"  {name:18s}" + "".join(f"{value / 1e9:10.3g}" for value in values)
          for name, values in rows.items()),
        f"fits    {largest} on {DEVICE_GB} GB, with {1 - FREE:.0%} "
        f"kept for fragments and libraries: {ways}{less}",
        f"time    {seconds / 86400:.3g} days ({duration(seconds)}): {cfg.max_steps:,} steps at "
        f"{MFU:.0%} (assumed) of {cfg.estimate} x {found['peak_tflops']:g} TFLOP/s "
        f"(--peak_tflops); a step computes for {found['compute_seconds'] * 1e3:.0f} ms and, at "
        f"the same time, sends for {found['link_seconds'] * 1e3:.0f} ms at {LINK_GBS} GB/s",
    ))
