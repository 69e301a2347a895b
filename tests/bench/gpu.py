"""On one GPU: MFU by size, synchronizations, and what each choice of the defaults costs or saves.

    python -m tests.bench gpu --json tests/bench/results/gpu.json

Against the card's own peaks, measured first: bf16 products of 8192 x 8192 and a copy of 4 GB. MFU
itself is against the data sheet (989 TFLOP/s on an H100 or H200). Under 8 minutes. On a CPU, or
with --quick, all of it runs in a tiny size, so that it does not rot.
"""

import gc
import statistics
from functools import partial

import torch

import train
from model import flops_per_token
from steady.cli import ConfigError
from steady.device import peak_flops, pick_device
from tests.bench.common import (
    Figure,
    compare,
    make_run,
    matrix_products,
    repeat,
    seconds,
    train_steps,
)

SIZES = {  # micro-batch x sequence, and the MFU to reach
    "gpt2-124m": (64, 1024, 0.50), "350m": (32, 1024, 0.55), "1b": (8, 2048, 0.60),
}
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128",
        "--seq_len", "32"]
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--seq_len", "256"]


def warm_run(flags: list[str], batch: int, mode: str | None = None) -> train.Run:
    """A run of one micro-batch a step that has made its first steps; mode: of torch.compile."""
    gc.unfreeze()  # the run before, which training froze
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = make_run(["--no_compile", *flags, "--vocab_size", "50257", "--batch_size", str(batch),
                    "--micro_batch_size", str(batch), "--precision", "bf16",
                    "--cache_clear_interval", "0"])
    if mode:
        run.model.compile(mode=mode)
    train_steps(run, 5)
    return run


def step_seconds(run: train.Run, steps: int) -> float:
    """The median of three blocks."""
    return statistics.median(seconds(train_steps, run, steps) for _ in range(3)) / steps


def peaks(device: torch.device, n: int) -> tuple[float, float]:
    """FLOP/s of bf16 products, bytes a second of a copy (read and written)."""
    x = torch.empty(n * n * 16, device=device)
    copy = repeat(partial(torch.empty_like(x).copy_, x), device)
    took = []
    for call in (matrix_products(n, device, torch.bfloat16), copy):
        call(3)
        took.append(seconds(call, 20) / 20)
    return 2 * n**3 / took[0], 8 * x.numel() / took[1]


def peak_memory_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def synchronizations(run: train.Run) -> str:
    """none, or what the first one was; ordinary steps under torch's own check."""
    if run.device.type != "cuda":
        return "not a GPU"
    run.stop.left = 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        train.train(run)
        return "none"
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def flash_attention_3() -> bool:
    """Switch it on where torch knows it and it is installed."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl("FA3")
        return True
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return False


def mfu(name: str, optimizer: str, sheet: float, tiny: bool):
    """Yields figures. sheet: FLOP/s of the card."""
    batch, length, aim = SIZES[name]
    flags = TINY if tiny else ["--model", name, "--seq_len", str(length), "--compile"]
    run = warm_run([*flags, "--optimizer", optimizer], 2 if tiny else batch)
    took = step_seconds(run, 2 if tiny else 20)
    tokens = run.cfg.batch_size * run.cfg.seq_len
    flops = flops_per_token(run.model, run.cfg) * tokens
    yield Figure(f"{name}, {optimizer}, compiled: MFU", "data sheet", [flops / took / sheet],
                 f">= {aim}" if optimizer == "adamw" else "", f"{tokens / took:.0f} tokens/s",
                 f"{peak_memory_gb():.1f} GB at most")
    if (name, optimizer) == ("gpt2-124m", "adamw"):
        found = synchronizations(run)
        yield Figure("synchronizations of ordinary steps", "none allowed",
                     [float(found == "none")], "" if tiny else ">= 1", found)
        run.cfg.cache_clear_interval = 2 if tiny else 100
        cleared = step_seconds(run, run.cfg.cache_clear_interval)
        yield compare("a step with empty_cache every 100", "without", [cleared], [took], "{:.4f} s")


def choices(what: str, flags: list[str], batch: int, steps: int, kinds: dict):
    """Yields for each of the kinds the time of a step against the first; kinds: more arguments."""
    first, reference = None, next(iter(kinds))
    for kind, (more, *mode) in kinds.items():
        try:
            took = step_seconds(warm_run([*flags, "--optimizer", "adamw", *more], batch, *mode),
                                steps)
        except (ConfigError, RuntimeError) as e:  # a backend that this card or build lacks
            print(f"{kind}: {str(e).splitlines()[0]}", flush=True)
            continue
        first = first or took
        figure = compare(f"{what}, {kind}: time", reference, [took], [first], "{:.5f} s")
        figure.ours += f", {peak_memory_gb():.1f} GB"
        yield figure


def all_figures(device: torch.device, tiny: bool):
    product, copied = peaks(device, 128 if tiny else 8192)
    sheet = peak_flops(device, torch.bfloat16) or product
    yield compare("bf16 product", "data sheet", [product / 1e12], [sheet / 1e12], "{:.3g} TFLOP/s")
    yield compare("copy", "an H200", [copied / 1e12], [4.8], "{:.3g} TB/s")
    for name in ["gpt2-124m"] if tiny else SIZES:
        for optimizer in ("adamw", "muon"):
            yield from mfu(name, optimizer, sheet, tiny)
    kinds = {"eager": ([],), "activations recomputed": (["--activation_checkpointing", "full"],)}
    if tiny:
        yield from choices("gpt2-124m 2 x 32", TINY, 2, 2, kinds)
        return
    kinds |= {f"{name} attention": (["--attention", name],)
              for name in ("flash", "efficient", "cudnn", "math")}
    yield from choices("gpt2-124m 16 x 1024", ["--model", "gpt2-124m"], 16, 20, kinds)
    yield from choices("small model", SMALL, 16, 50, {
        "compiled": (["--compile"],), "compile mode reduce-overhead": ([], "reduce-overhead")})
    eager = warm_run(["--model", "gpt2-124m", "--optimizer", "adamw"], 16)
    before = step_seconds(eager, 20)
    if flash_attention_3():
        yield compare("gpt2-124m, FlashAttention 3: time", "eager", [step_seconds(eager, 20)],
                      [before], "{:.4f} s")


def main(options) -> list[Figure]:
    device, figures = pick_device("auto", 0), []
    for figure in all_figures(device, options.quick or device.type != "cuda"):
        figures.append(figure)
        print(" ".join(figure.row()), flush=True)
    return figures
