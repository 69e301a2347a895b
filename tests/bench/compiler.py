"""What torch.compile makes of a step on an H100, and how fast that could be at best. No GPU needed.

    STEADY_CUDA_PYTHON=.venv/cuda/bin/python python -m tests.bench compiler

An interpreter with a CUDA build of torch makes steps of the program on the fake device of
tests/fakecuda; Triton's kernels are really compiled. Each kernel has to move its operands and
results once, and to make its FLOPs: the larger of both times is a bound, and their sum is one of
the step, if nothing survives in a cache from one kernel to the next. No time is measured, nothing
is known of launches or of how far a kernel stays below its bound.

The kernels of a block are half of the difference between models of four layers and of two.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, namedtuple
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import train
from model import flops_per_token
from steady.ranks.muon import Muon
from tests.bench.common import Countdown, Figure, Off, make_run
from tests.bench.gpu import SIZES, TINY
from tests.fakecuda.build import build, cuda_python, variables

ROOT = Path(__file__).resolve().parent.parent.parent
BANDWIDTH, PEAKS = 3.35e12, {2: 989e12, 4: 67e12}  # bytes/s, FLOP/s by bytes of a number: H100 SXM
PARTS = ("forward", "backward", "optimizer")
KINDS = ("Triton", "matrix products", "attention", "other")

Kernel = namedtuple("Kernel", "kind name bytes seconds registers spilled")


def triton(run, found):
    """CachingAutotuner.run, which launches a kernel of Triton's, with a note of it."""
    def noting(self, *args, **options):
        result = run(self, *args, **options)
        moved = sum(size(x) * (1 + name.startswith("in_out_ptr"))
                    for name, x in zip(self.fn.arg_names, args, strict=False)
                    if isinstance(x, torch.Tensor))
        # the compiler knows where only a part is read, but counts what is read twice twice
        moved = min(moved, self.inductor_meta["kernel_num_gb"] * 1e9)
        launcher, = self.launchers
        found(Kernel("Triton", self.fn.__name__, moved, moved / BANDWIDTH, launcher.n_regs,
                     launcher.n_spills))
        return result
    return noting


class Calls(TorchDispatchMode):
    """Notes all other kernels: matrix products, attention, what is not compiled."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or what is compiled would not be used

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        kernel = noted(func, args, kwargs or {}, result)
        if kernel:
            self.found(kernel)
        return result


def noted(func, args, kwargs, result) -> Kernel | None:
    name, writes_only = func._schema.name.removeprefix("aten::"), 0
    taken = [(x, argument) for argument, value in zip_arguments(func, args, kwargs)
             for x in tensors(value)]
    new = [] if any(r.alias_info for r in func._schema.returns) else tensors(result)
    devices = {x.device.type for x, _ in taken} | {x.device.type for x in tensors(result)}
    written = [x for x, argument in taken if argument.alias_info and argument.alias_info.is_write]
    if devices != {"cuda"} or "empty" in name or name == "_unsafe_view" or not (written or new):
        return None
    if name in ("copy_", "fill_", "zero_", "_foreach_zero_") or func._overloadname == "out":
        writes_only = sum(map(size, written))  # they are among the arguments, and not read
    moved = sum(map(size, [x for x, _ in taken] + new + written)) - writes_only
    flops = 0
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        if any(a.name == "is_causal" and v for a, v in zip_arguments(func, args, kwargs)):
            flops /= 2  # kernels skip what the mask hides
    numbers = (taken or [(new[0], None)])[0][0].element_size()
    kind = "attention" if "attention" in name else "matrix products" if flops else "other"
    seconds = max(moved / BANDWIDTH, flops / PEAKS.get(numbers, PEAKS[4]))
    return Kernel(kind, name, moved, seconds, 0, 0)


def zip_arguments(func, args, kwargs):
    for i, argument in enumerate(func._schema.arguments):
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name)


def tensors(value) -> list[torch.Tensor]:
    return [x for x in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(x, torch.Tensor)]


def size(x: torch.Tensor) -> int:
    """Bytes, of what is expanded once."""
    n = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        n *= length if stride else 1
    return n


class Phases(Off):
    current = None

    def phase(self, name: str):
        self.current = name


def kernels(flags: list[str]) -> tuple[train.Run, dict[str, list[Kernel]]]:
    """Those of each part of the third step, when all is compiled and all state is there."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    torch._dynamo.reset()
    torch._inductor.config.benchmark_kernel = True  # then a kernel's description has its bytes
    run = make_run(["--device", "cuda", "--precision", "bf16", "--num_workers", "0",
                    "--cache_clear_interval", "0", *flags])
    for optimizer in run.optimizers:  # also where the model is not, which takes long
        if isinstance(optimizer, Muon):
            optimizer.compile()
    run.monitor, found = Phases(), {part: [] for part in PARTS}
    run.ranks.stop = Countdown()
    run.ranks.stop.left = 2
    train.train(run, run.batches)

    def note(kernel):
        if run.monitor.current in found:
            found[run.monitor.current].append(kernel)

    plain, run.ranks.stop.left = CachingAutotuner.run, 1
    CachingAutotuner.run = triton(plain, note)
    try:
        with Calls(note):
            train.train(run, run.batches)
    finally:
        CachingAutotuner.run = plain
    return run, found


def summed(some: list[Kernel]) -> dict[str, float]:
    kinds = Counter(kernel.kind for kernel in some)
    return {"kernels": len(some), **{kind: kinds[kind] for kind in KINDS},
            "GB": sum(k.bytes for k in some) / 1e9, "ms": 1e3 * sum(k.seconds for k in some)}


def measure(name: str, tiny: bool) -> dict:
    """The parts of a step of one micro-batch, and its bound, for a model of that size."""
    batch, length, _ = SIZES[name]
    if tiny:
        batch, torch._inductor.config.triton.autotune_pointwise = 2, False  # each kernel once
    flags = [*(TINY if tiny else ["--model", name, "--seq_len", str(length)]), "--vocab_size",
             "50257", "--batch_size", str(batch), "--micro_batch_size", str(batch)]
    few, more = (kernels([*flags, "--compile", "--optimizer", "adamw", "--n_layer", n])[1]
                 for n in "24")
    rows, all_found = {}, [more]
    for optimizer in ("muon", "adamw"):
        run, found = kernels([*flags, "--no_compile", "--optimizer", optimizer])
        rows[optimizer] = summed(found["optimizer"])
        all_found.append(found)
    passes = Counter()
    for part in PARTS[:2]:
        two, four = summed(few[part]), summed(more[part])
        block = rows[f"a block, {part}"] = {key: (four[key] - two[key]) / 2 for key in two}
        rest = rows[f"the rest, {part}"] = {key: two[key] - 2 * block[key] for key in two}
        passes.update({key: rest[key] + run.cfg.n_layer * block[key] for key in rest})
    flops, bounds = flops_per_token(run.model, run.cfg) * batch * run.cfg.seq_len, {}
    for optimizer in ("adamw", "muon"):
        ms = passes["ms"] + rows[optimizer]["ms"]
        bounds[optimizer] = dict(ms=ms, mfu=flops / ms * 1e3 / PEAKS[2])
    triton = [kernel for found in all_found for part in PARTS for kernel in found[part]
              if kernel.kind == "Triton"]
    return dict(rows=rows, bounds=bounds, tokens=batch * run.cfg.seq_len,
                registers=max(k.registers for k in triton),
                spilled=sum(k.spilled for k in triton))


def main(options) -> list[Figure]:
    python = cuda_python()
    if not python:
        raise SystemExit("no CUDA build of torch: STEADY_CUDA_PYTHON may name an interpreter "
                         "with one")
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder) / "device"
        device.mkdir()
        build(python, device)
        for name in ["gpt2-124m"] if options.quick else SIZES:
            file = Path(folder) / "found.json"
            argv = [python, "-m", "tests.bench.compiler", name, str(file), str(options.quick)]
            subprocess.run(argv, check=True, cwd=ROOT, env={**os.environ, **variables(device)})
            found = json.loads(file.read_text())
            for what, row in found["rows"].items():
                kinds = ", ".join(f"{row[kind]:g} {kind}" for kind in KINDS if row[kind])
                figures.append(Figure(f"{name}, {what}: GB", "kernels", [row["GB"]], "",
                                      f"{row['kernels']:g}: {kinds}", f">= {row['ms']:.3g} ms"))
            for optimizer, bound in found["bounds"].items():
                figures.append(Figure(
                    f"{name}, {optimizer}, {found['tokens']:,} tokens: highest MFU",
                    "bound of an H100", [bound["mfu"]], "", f">= {bound['ms']:.1f} ms/step",
                    f"{found['registers']} registers at most, {found['spilled']} spilled"))
    return figures


if __name__ == "__main__":
    from tests.fakecuda.watch import leave_weights_unchecked, stand_in_for_cudnn

    leave_weights_unchecked()
    library = stand_in_for_cudnn()
    size_name, path, quick = sys.argv[1:]
    Path(path).write_text(json.dumps(measure(size_name, quick == "True")))
