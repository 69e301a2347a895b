"""Where a step of gpt2-124m goes: the time of each kind of operation, as a share of the step.

    python -m tests.bench operations

Forward, backward and AdamW's update in train.py's loop, eager, on a CPU, where an operation has
ended when its call returns. The bytes are what its tensors hold, read and written once; FLOP/s of
products stand beside those of a product of two square matrices. Needs Python 3.11.
"""

import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.bench.common import Figure, apart, make_run, matrix_products, seconds, train_steps

ROOT = Path(__file__).resolve().parents[2]
STEP = "a step of gpt2-124m 4 x 512, eager"
PRODUCTS = {"aten::mm", "aten::addmm"}
# what a function of ours does, and the gradients of plain operations, by autograd's name of them
KINDS = {
    "NormOnCPU": "norms, with their casts", "Rotation": "rotary embedding; heads put together",
    "Attention": "rotary embedding; heads put together",
    "TransposeBackward": "rotary embedding; heads put together",
    "SplitWithSizesBackward": "rotary embedding; heads put together",
    "FeedForward": "SwiGLU", "MulBackward": "SwiGLU", "SiluBackward": "SwiGLU",
    "SplitBackward": "SwiGLU",
    "LinearCrossEntropy": "the loss, without its products", "Block": "the residual stream",
    "AddBackward": "the residual stream", "ToCopyBackward": "weights to bf16, gradients to fp32",
    "update": "AdamW and the norm of the gradients",
    "Shards": "AdamW and the norm of the gradients",
}


def kind(name: str, args, tokens: int) -> str:
    """Of the operation being called: by its name, the function of ours that calls it, its node."""
    if name in PRODUCTS:
        of_weights = args[0].shape[-1] == tokens
        return f"products: {'gradients of weights' if of_weights else 'forward, of inputs'}"
    if "scaled_dot_product" in name:
        return f"attention, {'backward' if 'backward' in name else 'forward'}"
    node = torch._C._current_autograd_node()
    caller = node.name().rstrip("0123456789") if node else ""
    if node is None and name == "aten::_to_copy" and args[0].ndim == 2:
        return KINDS["ToCopyBackward"]
    frame = sys._getframe(2)
    while frame and not caller:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            caller = frame.f_code.co_qualname.split(".")[0]
        frame = frame.f_back
    return KINDS.get(caller.removesuffix("Backward"), KINDS.get(caller, "embedding; all else"))


class Timed(TorchDispatchMode):
    """Adds up seconds, bytes and FLOPs of each kind of operation."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.found = tokens, defaultdict(lambda: [0.0, 0, 0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        took = time.perf_counter() - began
        name = func._schema.name
        if not func.is_view and name != "aten::_unsafe_view":
            each = self.found[kind(name, args, self.tokens)]
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            each[0] += took
            each[1] += sum(x.nbytes for x in tensors)
            if name in PRODUCTS:
                each[2] += 2 * args[-2].numel() * args[-1].shape[1]
        return result


def steps(flags: list[str], tokens: int, rounds: int, n: int) -> tuple[list, list, float]:
    """Seconds of whole steps; of each round {kind: [seconds, bytes, FLOPs]}; FLOP/s of products."""
    run = make_run(flags)
    train_steps(run, 2)
    whole, parts = [], []
    for _ in range(rounds):
        whole.append(seconds(train_steps, run))
        with Timed(tokens) as timed:
            train_steps(run)
        parts.append(dict(timed.found))
    product = matrix_products(n, run.ranks.device, run.ranks.dtype)
    product(1)
    return whole, parts, 2 * n**3 / min(seconds(product, 1) for _ in range(rounds))


def main(options) -> list[Figure]:
    batch, seq_len, rounds, n = (1, 64, 1, 128) if options.quick else (4, 512, 5, 2048)
    flags = ["--model", "gpt2-124m", "--vocab_size", "50257", "--seq_len", str(seq_len), "--device",
             "cpu", "--batch_size", str(batch), "--optimizer", "adamw", "--no_compile"]
    if options.quick:
        flags += ["--n_layer", "2", "--d_model", "96", "--d_ff", "192", "--vocab_size", "512"]
    (whole, parts, peak), _ = apart(steps, flags, batch * seq_len, rounds, n)
    figures = []
    for what in sorted(parts[0], key=lambda what: -parts[0][what][0]):
        took, moved, flops = zip(*(part[what] for part in parts), strict=True)
        ours = f"{sorted(took)[rounds // 2] * 1e3:.0f} ms, {moved[0] / 1e9:.1f} GB"
        if flops[0]:
            ours += f", {flops[0] / sorted(took)[rounds // 2] / peak:.2f} of the peak"
        totals = [sum(each[0] for each in part.values()) for part in parts]
        shares = [t / total for t, total in zip(took, totals, strict=True)]
        figures.append(Figure(what, STEP, shares, ours=ours,
                              theirs=f"{sorted(whole)[rounds // 2] * 1e3:.0f} ms"))
    return figures
