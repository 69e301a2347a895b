"""What a run will need, before anything is rented: `python train.py --estimate DEVICES`.

Steps are made with fake tensors, which have shapes and types but no memory, on an imaginary CPU;
the bytes alive at each moment are added up. So the figures come from the operations that an eager
step really runs, with this model, loss and optimizer, also after you have changed them.
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
from steady.ranks.parallel import Shards, local_part
from steady.ranks.ranks import check_shard_size
from steady.tokens.packing import trial_documents
from steady.watch.findings import duration

MFU = 0.4  # assumed: what dense models of these sizes reach on such GPUs
LINK_GBS = 350  # between devices: NVLink of an H100
DEVICE_GB, FREE = 80, 0.9  # of an H100; the rest is for fragments, the context and libraries
WAYS = ("ddp", "zero2", "zero3")  # --parallel


class Live(TorchDispatchMode):
    """Adds up the bytes of tensors alive, the most at one time, and those sent to other ranks."""

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
        """A storage that is new, has a new size, or neither (a view, or written in place)."""
        key, size = storage._cdata, storage.nbytes() if size is None else size
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.bytes += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def forget(self, key: int):
        self.bytes -= self.sizes.pop(key)


def bytes_sent(collective: str, args) -> float:
    """By a rank, in rings."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    group = next(leaf for leaf in tree_leaves(args) if not isinstance(leaf, torch.Tensor))
    n = dist.ProcessGroup.unbox(group).size()
    rounds = 2 if collective == "allreduce_" else 1  # a reduction that is scattered, then gathered
    return rounds * max(tensor.nbytes for tensor in tensors) * (n - 1) / n


@contextlib.contextmanager
def imagined(world_size: int, dtype: torch.dtype, live: Live):
    """A group of so many ranks whose collectives do nothing, and layers as on a GPU."""
    resize = torch.UntypedStorage.resize_

    def seen(storage, size: int):  # how fully_shard frees whole weights
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
    """(bytes of weights, gradients, optimizer, activations on a rank; those it sends in a step).

    What is temporary counts as activations, also what is gathered from other ranks.
    """
    live, divided = Live(), world_size if way != "ddp" else 1
    with imagined(divided, dtype, live):
        shards = Shards(way, divided, cfg.shard_size)
        with FakeTensorMode():
            with torch.device("meta" if divided > 1 else "cpu"):
                transformer = adapt(Transformer(cfg), cfg, dtype)
            shards.shard(transformer, dtype)
            if divided > 1:
                transformer.to_empty(device="cpu")
            shards.hold(transformer)
            with live:
                need, sent = steps(cfg, transformer, shards, live, dtype, micro_batch,
                                   accumulation, make_optimizers)
    if world_size > divided and accumulation > 1:  # summed up beside the buckets of ddp
        need["gradients"] *= 2
    return need, sent


def steps(cfg, transformer, shards, live, dtype, micro_batch, accumulation,
          make_optimizers) -> tuple[dict, float]:
    """Two steps of `simulate`, the second with a second micro-batch if there is one."""
    held = list(shards.parameters.values())
    frozen = [local_part(p) for p in transformer.parameters() if not p.requires_grad]
    for tensor in [*held, *frozen, *transformer.buffers()]:
        live.see(tensor.untyped_storage())
    weights, gradients = live.bytes, sum(p.nbytes for p in held)
    optimizers = make_optimizers(transformer, cfg, torch.device("cpu"), shards.parameters, shards)
    tokens = torch.zeros(micro_batch, cfg.seq_len, dtype=torch.long)
    no_mask = takes_varlen(cfg, dtype)
    documents = trial_documents(tokens, no_mask) if cfg.data_mode == "packed" else None
    sent = []
    for micro_batches in (1, min(2, accumulation)):
        live.sent, live.peak = 0.0, live.bytes
        for i in range(micro_batches):
            with (
                shards.micro_batch(transformer, last=i == micro_batches - 1),
                torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
            ):
                loss = transformer(tokens, tokens, documents).sum()
            loss.backward()
            del loss
        shards.move_gradients()
        shards.norms([p.grad for p in held])
        for optimizer in optimizers:
            optimizer.step()
        sent.append(live.sent)
        state = sum(t.nbytes for o in optimizers for s in o.state.values()
                    for t in s.values() if isinstance(t, torch.Tensor))
        for p in held:
            p.grad = None
    # each further micro-batch adds what the second one did
    total = sent[0] + (accumulation - 1) * (sent[1] - sent[0])
    need = dict(weights=weights, gradients=gradients, optimizer=state)
    return need | dict(activations=live.peak - sum(need.values())), total


def estimate(cfg: Config, world_size: int, dtype: torch.dtype, make_optimizers) -> dict:
    """All figures of a run on world_size GPUs, in bytes, FLOPs and seconds. Raises ConfigError."""
    check_shard_size(cfg.shard_size, world_size)
    together = cfg.shard_size or world_size  # devices that hold one copy of the model
    micro_batch = micro_batch_size(cfg, world_size, usual_micro_batch(cfg, DEVICE_GB * 10**9))
    accumulation = cfg.batch_size // (micro_batch * world_size)
    with torch.device("meta"):
        shape = adapt(Transformer(cfg), cfg, dtype)
    flops = flops_per_token(shape, cfg)
    found = dict(
        parameters=sum(p.numel() for p in shape.parameters()), micro_batch=micro_batch,
        accumulation=accumulation, flops_per_token=flops,
        flops_per_step=flops * cfg.batch_size * cfg.seq_len, memory={}, sent={},
    )
    for way in WAYS if together > 1 else WAYS[:1]:
        found["memory"][way], found["sent"][way] = simulate(
            cfg, dtype, micro_batch, accumulation, make_optimizers, way, world_size)
    trained = sum(p.nbytes for p in shape.parameters() if p.requires_grad)
    found["sent"]["ddp"] = 2 * trained * (world_size - 1) / world_size  # of gradients, once
    way = cfg.parallel if together > 1 else "ddp"
    # of an H100 in the type of the run
    peak = cfg.peak_tflops or PEAK_TFLOPS["NVIDIA H100 80GB HBM3"][dtype == torch.float32]
    found["peak_tflops"] = peak
    again = 4 / 3 if cfg.activation_checkpointing == "full" else 1  # the forward pass, twice
    found["compute_seconds"] = again * found["flops_per_step"] / (peak * 1e12 * MFU * world_size)
    found["link_seconds"] = found["sent"][way] / (LINK_GBS * 1e9)
    found["step_seconds"] = max(found["compute_seconds"], found["link_seconds"])
    n = max(1, 2**15 // cfg.seq_len)  # large enough for memory to grow by as much a sequence
    one, two = (sum(simulate(cfg, dtype, size, accumulation, make_optimizers, way,
                             world_size)[0].values()) for size in (n, 2 * n))
    free = DEVICE_GB * 1e9 * FREE - one
    found["fits"] = max(0, n + math.floor(free / (two - one) * n))
    return found


def estimate_run(cfg: Config, make_optimizers) -> str:
    """What the run will need, as text. Reads the data only for vocabulary and epochs."""
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
    # auto is bf16, also where the CPU at hand is slow at it: the run is for another machine
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
