"""On one GPU: MFU by size, synchronizations, and what each choice of the defaults costs or saves.

    python -m tests.bench gpu --json tests/bench/results/gpu.json

Against the card's own peaks, measured first: bf16 products of 8192 x 8192 and a copy of 4 GB. MFU
itself is against the data sheet (989 TFLOP/s on an H100 or H200). Under 8 minutes. On a CPU, or
with --quick, all of it runs in a tiny size, so that it does not rot.
"""

import gc
import statistics
import time

import torch

import train
from model import flops_per_token, set_attention_backend
from monitor import peak_flops
from tests.bench.common import Figure, make_run, train_step, wait

SIZES = {  # micro-batch x sequence, and the MFU to reach
    "gpt2-124m": (64, 1024, 0.50), "350m": (32, 1024, 0.55), "1b": (8, 2048, 0.60),
}  # fmt: skip
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128"]


class Trial:
    """A model with its optimizer, and steps of it, as train.train makes them."""

    def __init__(self, device, flags: list[str], compiled: bool, batch: int, mode=None):
        self.device = device
        self.run = make_run([*flags, "--vocab_size", "50257", "--batch_size", str(batch),
                             "--device", device.type, "--precision", "bf16"])  # fmt: skip
        set_attention_backend(self.run.cfg.attention)
        if compiled:
            self.run.model.compile(mode=mode)
        self.tokens = torch.randint(50257, (batch, self.run.cfg.seq_len), device=device)

    def step(self):
        train_step(self.run, self.tokens)

    def seconds(self, steps: int, empty_cache: bool = False) -> float:
        """A step's, the median of three blocks."""
        found = []
        for _ in range(3):
            wait(self.device)
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            if empty_cache:
                torch.cuda.empty_cache()
            wait(self.device)
            found.append((time.perf_counter() - began) / steps)
        return statistics.median(found)


def timed(device, call, repeats: int) -> float:
    for _ in range(3):
        call()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - began) / repeats


def peaks(device, n: int) -> tuple[float, float]:
    """FLOP/s of bf16 products, bytes a second of a copy (read and written)."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * n**3 / timed(device, lambda: a @ b, 20)
    x = torch.empty(n * n * 16, device=device)
    y = torch.empty_like(x)
    copied = 2 * x.numel() * 4 / timed(device, lambda: y.copy_(x), 10)
    return product, copied


def peak_memory(device) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0


def fresh(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronizations(trial: Trial) -> str:
    """none, or what the first one was; ordinary steps under torch's own check."""
    if trial.device.type != "cuda":
        return "not a GPU"
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trial.step()
        return "none"
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(options) -> list[Figure]:
    device = train.pick_device("auto", 0)
    tiny = options.quick or device.type != "cuda"
    steps = 2 if tiny else 20
    product, copied = peaks(device, 128 if tiny else 8192)
    sheet = peak_flops(device, torch.bfloat16) or product
    figures = [Figure("bf16 product", "data sheet", [product / sheet], "",
                      f"{product / 1e12:.3g} TFLOP/s", f"{sheet / 1e12:.3g} TFLOP/s"),
               Figure("copy", "4.8 TB/s of an H200", [copied / 4.8e12], "",
                      f"{copied / 1e12:.3g} TB/s", "")]  # fmt: skip

    def add(what, reference, ratio, aim="", ours="", theirs=""):
        figures.append(Figure(what, reference, [ratio], aim, ours, theirs))
        print(f"{what}: {ratio:.3g} of {reference} {ours} {theirs}", flush=True)

    for name, (batch, length, aim) in SIZES.items():
        if tiny and name != "gpt2-124m":
            continue
        flags = [*TINY, "--seq_len", "32"] if tiny else ["--model", name, "--seq_len", str(length)]
        for optimizer in ("adamw", "muon"):
            fresh(device)
            trial = Trial(
                device, [*flags, "--optimizer", optimizer], not tiny, 2 if tiny else batch
            )
            for _ in range(3):
                trial.step()
            seconds = trial.seconds(steps)
            flops = flops_per_token(trial.run.model, trial.run.cfg) * trial.tokens.numel()
            add(f"{name}, {optimizer}, compiled: MFU", "data sheet", flops / seconds / sheet,
                f">= {aim}" if optimizer == "adamw" else "",
                f"{trial.tokens.numel() / seconds:.0f} tokens/s",
                f"{peak_memory(device):.1f} GB at most")  # fmt: skip
            if optimizer == "adamw" and name == "gpt2-124m":
                found = synchronizations(trial)
                add("synchronizations of ordinary steps", "none allowed", float(found == "none"),
                    "" if tiny else ">= 1", found)  # fmt: skip
                if device.type == "cuda":
                    cleared = trial.seconds(100, empty_cache=True)
                    add("a step with empty_cache every 100", "without", cleared / seconds)
            del trial

    batch, length = (2, 32) if tiny else (16, 1024)
    flags = [*TINY, "--optimizer", "adamw", "--seq_len", "32"] if tiny else [
        "--model", "gpt2-124m", "--optimizer", "adamw"]  # fmt: skip
    found = {}
    kinds = {"eager": [], "activations recomputed": ["--activation_checkpointing", "full"]}
    kinds |= {f"{name} attention": ["--attention", name]
              for name in ("flash", "efficient", "cudnn", "math")}  # fmt: skip
    for name, more in kinds.items():
        if tiny and device.type == "cpu" and name.endswith("attention"):
            continue
        fresh(device)
        try:
            trial = Trial(device, [*flags, *more], False, batch)
            for _ in range(3):
                trial.step()
            found[name] = trial.seconds(steps), peak_memory(device)
        except RuntimeError as e:  # a backend that this card or build lacks
            print(f"{name}: {str(e).splitlines()[0]}", flush=True)
            continue
        seconds, memory = found[name]
        add(f"gpt2-124m {batch} x {length}, {name}: time", "eager", seconds / found["eager"][0], "",
            f"{seconds * 1e3:.1f} ms, {memory:.1f} GB", f"{found['eager'][1]:.1f} GB")  # fmt: skip
        del trial
    set_attention_backend("auto")
    newest = flash_attention_3()
    if newest and not tiny:
        fresh(device)
        trial = Trial(device, flags, False, batch)
        trial.step()
        add("gpt2-124m, FlashAttention 3: time", "eager", trial.seconds(steps) / found["eager"][0])
        del trial
    if not tiny:
        small = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256",
                 "--d_ff", "704", "--seq_len", "256", "--optimizer", "adamw"]  # fmt: skip
        plain = None
        for mode in (None, "reduce-overhead"):
            fresh(device)
            trial = Trial(device, small, True, 16, mode)
            for _ in range(5):
                trial.step()
            seconds = trial.seconds(50)
            plain = plain or seconds
            add(f"small model, compile mode {mode}", "compile mode None", seconds / plain, "",
                f"{seconds * 1e3:.2f} ms")  # fmt: skip
    return figures


def flash_attention_3() -> bool:
    """Switch it on where torch knows it and it is installed."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl("FA3")
        return True
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return False
