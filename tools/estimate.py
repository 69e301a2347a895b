"""What a run will need, before anything is rented: `python train.py --estimate [--world_size N]`.

Steps are made with fake tensors, which have shapes and types but no memory, on an imaginary CPU;
the bytes alive at each moment are added up. So the figures come from the operations that an eager
step really runs, with this model, loss and optimizer, also after you have changed them.
"""

import dataclasses
import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import Config, micro_batch_size
from model import LinearCrossEntropy, Transformer, flops_per_token
from steady.device import DTYPE_NAMES, PEAK_TFLOPS
from steady.telemetry import duration


class Live(TorchDispatchMode):
    """Adds up the bytes of all tensors that are alive, and the most there were at one time."""

    def __init__(self):
        super().__init__()
        self.known, self.bytes, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage._cdata not in self.known:  # else a view, or written in place
            self.known.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, key: int, n: int):
        self.known.remove(key)
        self.bytes -= n


def simulate(cfg: Config, dtype: torch.dtype, micro_batch: int, accumulation: int,
             make_optimizers) -> dict[str, int]:
    """Bytes of weights, gradients, the optimizer's state, and activations and temporaries."""
    chunk = LinearCrossEntropy.cpu_chunk
    if dtype != torch.float32:  # the run is meant for a GPU
        LinearCrossEntropy.cpu_chunk = LinearCrossEntropy.gpu_chunk
    try:
        with FakeTensorMode(), Live() as live:
            transformer = Transformer(cfg)
            weights = live.bytes
            optimizers = make_optimizers(transformer, cfg, torch.device("cpu"))
            autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
            tokens = torch.zeros(micro_batch, cfg.seq_len, dtype=torch.long)
            documents = torch.zeros_like(tokens) if cfg.packing else None
            before = live.bytes
            for p in transformer.parameters():
                p.grad = torch.empty_like(p)
            gradients = live.bytes - before
            for optimizer in optimizers:
                optimizer.step()  # makes its state
            state = live.bytes - before - gradients
            if accumulation == 1:
                transformer.zero_grad(set_to_none=True)
            live.peak = live.bytes
            with autocast:
                loss = transformer(tokens, tokens, documents).sum()
            loss.backward()
            del loss
            for optimizer in optimizers:
                optimizer.step()
            others = live.peak - weights - gradients - state
        return dict(weights=weights, gradients=gradients, optimizer=state, activations=others)
    finally:
        LinearCrossEntropy.cpu_chunk = chunk


def shares(need: dict, world_size: int, accumulation: int, way: str, blocks: nn.ModuleList,
           in_compute: int) -> dict[str, float]:
    """Bytes on one of world_size GPUs: `need` under one way of sharding.

    zero2 divides gradients and optimizer (arXiv:1910.02054), zero3 weights as well; those of two
    blocks, and of what is not in a block, are then gathered at a time, in `in_compute` bytes each.
    """
    part = dict(need)
    if way != "ddp":
        part["gradients"] /= world_size
        if accumulation == 1:  # the most was needed before there were gradients
            part["activations"] += need["gradients"] - part["gradients"]
        part["optimizer"] /= world_size
    if way == "zero3" and world_size > 1:
        block = sum(p.numel() for p in blocks[0].parameters())
        outside = need["weights"] // 4 - block * len(blocks)
        part["weights"] = need["weights"] / world_size + (2 * block + outside) * in_compute
    return part


def sent(weights: int, in_compute: int, world_size: int, accumulation: int, way: str) -> float:
    """Bytes that one GPU sends in a step, by rings: (n - 1) / n of what is gathered or reduced.

    ddp all-reduces the gradients once, which is a reduce-scatter and a gather. zero2 and zero3
    scatter them in each micro-batch, so that no GPU holds all; zero2 then gathers the weights once
    a step, zero3 in each forward and each backward pass.
    """
    gathered = weights // 4 * in_compute
    moved = {
        "ddp": 2 * weights,
        "zero2": accumulation * weights + weights,
        "zero3": accumulation * (weights + 2 * gathered),
    }
    return (world_size - 1) / world_size * moved[way]


def estimate(cfg: Config, world_size: int, dtype: torch.dtype, make_optimizers) -> dict:
    """All figures of a run on world_size GPUs, in bytes, FLOPs and seconds. Raises ConfigError."""
    micro_batch = micro_batch_size(cfg, world_size)
    accumulation = cfg.batch_size // (micro_batch * world_size)
    with torch.device("meta"):
        shape = Transformer(cfg)
    flops = flops_per_token(shape, cfg)
    in_compute = torch.empty((), dtype=dtype).element_size()
    found = dict(
        parameters=sum(p.numel() for p in shape.parameters()), micro_batch=micro_batch,
        accumulation=accumulation, flops_per_token=flops,
        flops_per_step=flops * cfg.batch_size * cfg.seq_len,
    )
    for checkpointing in ("none", "full"):
        each = dataclasses.replace(cfg, activation_checkpointing=checkpointing)
        need = simulate(each, dtype, micro_batch, accumulation, make_optimizers)
        found[checkpointing] = {
            way: shares(need, world_size, accumulation, way, shape.blocks, in_compute)
            for way in ("ddp", "zero2", "zero3")
        }
    found["sent"] = {way: sent(need["weights"], in_compute, world_size, accumulation, way)
                     for way in found["none"]}
    # of an H100 in the type of the run
    peak = cfg.peak_tflops or PEAK_TFLOPS["NVIDIA H100 80GB HBM3"][dtype == torch.float32]
    found["peak_tflops"] = peak
    found["step_seconds"] = found["flops_per_step"] / (peak * 1e12 * cfg.mfu * world_size)
    return found


def report(cfg: Config, world_size: int, dtype: torch.dtype, make_optimizers) -> str:
    """The estimate as text."""
    found = estimate(cfg, world_size, dtype, make_optimizers)
    ways = list(found["sent"])

    def line(name: str, values) -> str:
        cells = (f"{value:10.3g}" if value < 1000 else f"{value:10.0f}" for value in values)
        return f"  {name:34s}" + "".join(cells)

    def memory(name: str, key: str, checkpointing: str) -> str:
        return line(name, (found[checkpointing][way][key] / 1e9 for way in ways))

    def total(name: str, checkpointing: str) -> str:
        mark = "*" if cfg.activation_checkpointing == checkpointing else ""
        sums = (sum(found[checkpointing][way].values()) / 1e9 for way in ways)
        return line(f"together{name}{mark}", sums)

    seconds = found["step_seconds"] * cfg.max_steps
    tokens = cfg.batch_size * cfg.seq_len
    return "\n".join((
        f"model   {cfg.model}: {found['parameters'] / 1e6:.2f} M parameters, "
        f"{found['flops_per_token'] / 1e9:.3g} GFLOP a token, "
        f"{found['flops_per_step'] / 1e12:.4g} TFLOP a step of {tokens:,} tokens",
        f"step    {world_size} x {found['accumulation']} micro-batches of {found['micro_batch']} x "
        f"{cfg.seq_len}, {DTYPE_NAMES[dtype]}, {cfg.optimizer}",
        f"memory of each device, GB           {''.join(f'{way:>10s}' for way in ways)}",
        memory("weights", "weights", "none"),
        memory("gradients", "gradients", "none"),
        memory("optimizer", "optimizer", "none"),
        memory("activations and temporaries", "activations", "none"),
        memory("  with blocks recomputed", "activations", "full"),
        total("", "none"),
        total(" recomputed", "full"),
        line("sent by each device a step, GB", (found["sent"][way] / 1e9 for way in ways)),
        f"time    {seconds / 86400:.3g} days ({duration(seconds)}): {cfg.max_steps:,} steps, "
        f"{cfg.max_steps * tokens:.3g} tokens, "
        f"at {cfg.mfu:.0%} (--mfu) of {world_size} x {found['peak_tflops']:g} TFLOP/s "
        f"(--peak_tflops{'' if cfg.peak_tflops else ', an H100'})",
        "* as asked for (--activation_checkpointing). Memory is that of the tensors of an eager "
        "step; holes in what\nan allocator keeps, and on a GPU its libraries, come on top; "
        "--compile takes less.\nTraining itself is ddp; zero2 and zero3 are computed only.",
    ))
