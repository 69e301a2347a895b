"""What `python -m tests.bench gpu` measures beside MFU: numbers, profiles, peers, faults, plants.

Each function is a part of its programme, in a process of its own: it is given the device and
whether to be tiny, and yields figures, failures and notes as they become known.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from model import generate
from monitor import Monitor
from steady.checkpoints.writer import Writer
from steady.models import layers
from tests.bench.common import Figure, compare, in_turns, seconds, train_steps

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128",
        "--seq_len", "32", "--vocab_size", "512"]
KERNELS = {  # by the names of kernels, the first that fits
    "attention": "flash|fmha|sdpa|attention", "products": "gemm|cutlass|nvjet|cublas|_mm_",
    "compiled": "^triton", "optimizer": "multi_tensor|foreach|adam",
}


class Failure(str):
    """What could not be measured, and why."""


class Note(str):
    """What a program printed, to be kept as it is."""


def one_line(error) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# --- part 1: numbers and where the time goes --------------------------------------------------


def default_run(device: torch.device, tiny: bool):
    """The first thing that anybody does."""
    code, text, took = program("--max_steps", "60", *(["--d_model", "32"] if tiny else []))
    yield Note(text)
    yield Figure("python train.py --max_steps 60: exit code 0", "", [float(code == 0)], ">= 1",
                 f"{took:.0f} s")


def losses(device: torch.device, tiny: bool):
    """The eager loss in bf16 at a vocabulary of 50,304: errors beside those of plain formulas."""
    V, C, T = (512, 64, 64) if tiny else (50_304, 768, 4096)
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, T, C, generator=random), torch.randn(V, C, generator=random)
    targets = torch.randint(V, (1, T), generator=random)

    def gradients(loss, dtype) -> list[torch.Tensor]:
        given = [x.to(device, dtype).requires_grad_() for x in (hidden, weight * 0.1)]
        value = loss(*given, targets.to(device))
        value.float().mean().backward()
        return [x.double().cpu() for x in (value.detach(), *(g.grad for g in given))]

    def plain(h, w, t):
        return layers.cross_entropies((h @ w.t()).float(), t)

    def fused(h, w, t):
        return layers.LinearCrossEntropy.apply(h, w, t, V)

    exact = gradients(lambda h, w, t: layers.cross_entropies(h @ w.t(), t), torch.float64)
    errors = {name: [float((x - e).norm() / e.norm()) for x, e in
                     zip(gradients(loss, torch.bfloat16), exact, strict=True)]
              for name, loss in (("fused", fused), ("plain", plain))}
    for i, what in enumerate(("losses", "gradient of hidden", "gradient of the head")):
        yield compare(f"fused loss, {what}: error", "plain, bf16", [errors["fused"][i]],
                      [errors["plain"][i]], "{:.2e}", "<= 1.5")


def attention_gradients(device: torch.device, tiny: bool):
    """Each backend's gradients in bf16 against formulas in fp64."""
    shape = (1, 2, 64, 32) if tiny else (4, 12, 1024, 64)
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(shape, generator=random) for _ in range(3)]

    def gradients(backend, dtype):
        given = [x.to(device, dtype).requires_grad_() for x in qkv]
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*given, is_causal=True).square().sum().backward()
        return torch.cat([x.grad.double().flatten().cpu() for x in given])

    exact = gradients(SDPBackend.MATH, torch.float64)
    error = {}
    names = ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]
    for name in names[:2] if device.type == "cpu" else names:
        try:
            found = gradients(getattr(SDPBackend, name), torch.bfloat16)
        except RuntimeError as e:
            yield Failure(f"{name}: {one_line(e)}")
            continue
        error[name] = float((found - exact).norm() / exact.norm())
        yield compare(f"attention, {name}: error of gradients", "math, bf16", [error[name]],
                      [error["MATH"]], "{:.2e}", "<= 2")


def shares(run: train.Run, steps: int) -> dict[str, float]:
    """Share of the time in which the device runs kernels of each kind, and in which none."""
    with torch.profiler.profile() as profiler:
        took = seconds(train_steps, run, steps)
    found = dict.fromkeys([*KERNELS, "other"], 0.0)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for kind, pattern in KERNELS.items()
                         if re.search(pattern, event.name)), "other")
            found[kind] += event.time_range.elapsed_us() / 1e6 / took
    return found | {"idle": 1 - sum(found.values())}


def curves(device: torch.device, tiny: bool):
    """60 steps, compiled and eager."""
    flags = TINY if tiny else ["--model", "gpt2-124m", "--batch_size", "16"]
    ends = []
    for how in ("--compile", "--no_compile"):
        rows = logged([*flags, how, "--max_steps", "60", "--log_interval", "5"])
        if not rows:
            yield Failure(f"{how}: no log")
            return
        ends.append([row["train/loss"] for row in rows if "train/loss" in row])
    largest = max(abs(a - b) / b for a, b in zip(*ends, strict=True))
    yield Figure("compiled against eager: largest difference of 12 losses", "eager", [largest],
                 "<= 0.02", f"{ends[0][-1]:.4f}", f"{ends[1][-1]:.4f}")


def sampled(device: torch.device, tiny: bool, warm_run):
    """Tokens one at a time, without cuDNN's attention and with it, which plans each length."""
    run = warm_run(TINY if tiny else ["--model", "gpt2-124m"], 1)
    prompt, n = torch.zeros(1, 1, dtype=torch.long, device=device), 20 if tiny else 400
    plain = generate.__wrapped__.__wrapped__  # without `no_grad` and `sdpa_kernel`

    def write(call):
        with torch.no_grad(), run.ranks.autocast:
            torch.cuda.empty_cache() if device.type == "cuda" else None
            call(run.model, prompt, n)

    found = [seconds(write, call) for call in (generate, plain)]
    yield compare(f"{n} sampled tokens", "with cuDNN's attention", found[:1], found[1:], "{:.2f} s")


# --- part 2: peers ---------------------------------------------------------------------------


def peers(device: torch.device, tiny: bool):
    """steady and transformers' Qwen2, and nanoGPT where STEADY_NANOGPT is a checkout, in turns."""
    from tests.bench.common import take_turns
    from tests.bench.training import qwen2, steady

    for name, batch in (("gpt2-124m", 32), ("350m", 16)):
        flags = ["--model", name, "--seq_len", "1024", "--vocab_size", "50304", "--compile"]
        flags = [*TINY, "--no_compile"] if tiny else flags
        flags += ["--optimizer", "adamw", "--batch_size", "2" if tiny else str(batch),
                  "--micro_batch_size", "2" if tiny else str(batch)]
        makers = {"steady": (steady, flags), "Qwen2": (qwen2, flags)}
        if checkout := os.environ.get("STEADY_NANOGPT"):
            makers["nanoGPT"] = (nanogpt, checkout, name, 2 if tiny else batch, tiny)
        found = take_turns(makers, 2 if tiny else 5, 1 if tiny else 20, 1 if tiny else 5)
        for peer in list(makers)[1:]:
            yield compare(f"{name}: a step of {peer}", "steady", found[peer], found["steady"],
                          "{:.4f} s", ">= 1.3" if peer == "Qwen2" else ">= 1.15")


def nanogpt(checkout: str, name: str, batch: int, tiny: bool):
    """nanoGPT's model and optimizer as its train.py drives them, on random tokens."""
    sys.path.insert(0, checkout)
    model_py = __import__("model")
    layer, head, width = (2, 2, 64) if tiny else {"gpt2-124m": (12, 12, 768),
                                                  "350m": (24, 16, 1024)}[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    T, V = (32, 512) if tiny else (1024, 50_304)
    model = model_py.GPT(model_py.GPTConfig(block_size=T, vocab_size=V, n_layer=layer, n_head=head,
                                            n_embd=width, dropout=0.0, bias=False)).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    model = model if tiny else torch.compile(model)

    def steps(n: int):
        for _ in range(n):
            x = torch.randint(V, (batch, T + 1), device=device)
            with torch.autocast(device, torch.bfloat16):
                _, loss = model(x[:, :-1].contiguous(), x[:, 1:].contiguous())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return steps


# --- part 3: nothing is lost -----------------------------------------------------------------


def saves(device: torch.device, tiny: bool, warm_run):
    """Steps with a checkpoint among them against steps without."""
    run = warm_run(TINY if tiny else ["--model", "1b"], 2 if tiny else 4)
    steps = 4 if tiny else 30
    with tempfile.TemporaryDirectory() as folder:
        run.dir.path = Path(folder)
        writer = Writer(Path(folder), 1)

        def block(every: int) -> float:
            run.cfg.save_interval, run.dir.writer = every, writer if every else None
            return seconds(train_steps, run, steps)

        block(steps)  # allocates the host memory
        found = in_turns({0: partial(block, 0), steps: partial(block, steps)}, 1 if tiny else 3)
        writer.wait()
    yield compare(f"{steps} steps with a save", "without", found[steps], found[0], "{:.2f} s",
                  "<= 1.05")


def exact_resume(device: torch.device, tiny: bool):
    flags = [*(TINY if tiny else ["--model", "gpt2-124m"]), "--batch_size", "8"]
    code, text, took = program(*flags, "--verify_resume", "5")
    yield Note(text)
    yield Figure("--verify_resume 5, deterministic", "", [float(code == 0)], ">= 1",
                 text.strip().splitlines()[-1][:100], f"{took:.0f} s")
    ends = [logged([*flags, "--max_steps", "30", "--log_interval", "5"]) for _ in range(2)]
    a, b = ([row["train/loss"] for row in rows if "train/loss" in row] for rows in ends)
    yield Figure("two runs without --deterministic: largest difference of losses", "",
                 [max((abs(x - y) / y for x, y in zip(a, b, strict=True)), default=math.nan)])


def signals(device: torch.device, tiny: bool):
    """SIGTERM, then --auto_resume."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*TINY, "--max_steps", "2000", "--log_interval", "5", "--out_dir", "r"]
        process = start(flags, folder)
        metrics = Path(folder) / "r/metrics.jsonl"
        until = time.monotonic() + 100
        while time.monotonic() < until and not (metrics.exists() and '"step": 20' in
                                                metrics.read_text()):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        text, code = process.communicate(timeout=60)[0], process.returncode
        yield Figure("SIGTERM: exit code 143", "", [float(code == 143)], ">= 1",
                     text.strip().splitlines()[-1][:100])
        step = json.loads(metrics.read_text().splitlines()[-1])["step"]
        code, text, _ = program("--auto_resume", "--out_dir", "r", "--max_steps", str(step + 20),
                                folder=folder)
        yield Figure("--auto_resume after it", "", [float(code == 0 and "resume" in text)], ">= 1")


def too_little_memory(device: torch.device, tiny: bool):
    """Advice where a micro-batch does not fit, and steps with the one that auto finds."""
    flags = TINY if tiny else ["--model", "350m", "--no_compile"]
    if not tiny:
        code, text, _ = program(*flags, "--batch_size", "4096", "--micro_batch_size", "4096",
                                "--max_steps", "1")
        advised = "try --micro_batch_size" in text
        yield Figure("out of memory: exit code 1 and advice", "", [float(code == 1 and advised)],
                     ">= 1", text.strip().splitlines()[-1][:100])
    code, text, took = program(*flags, "--batch_size", "8" if tiny else "256",
                               "--micro_batch_size", "auto", "--max_steps", "20")
    size = re.search(r"micro-batches of (\d+)", text)
    yield Figure("--micro_batch_size auto, then 20 steps", "", [float(code == 0)], ">= 1",
                 size[0] if size else text[-100:], f"{took:.0f} s")


# --- part 4: the monitor ---------------------------------------------------------------------


def monitors(device: torch.device, tiny: bool, warm_run):
    """Steps with --monitor light and full against off, in turns."""
    run = warm_run(TINY if tiny else ["--model", "gpt2-124m"], 2 if tiny else 16)
    steps, off = 4 if tiny else 100, run.monitor
    run.cfg.log_interval = 2 if tiny else 50
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        made = {"off": off}
        for how in ("light", "full"):
            run.cfg.monitor = how
            made[how] = Monitor(run.cfg, run.ranks, run.progress, Path(folder), 10**9)
            stack.callback(made[how].close)

        def block(how: str) -> float:
            run.monitor = made[how]
            return seconds(train_steps, run, steps)

        found = in_turns({how: partial(block, how) for how in made}, 1 if tiny else 7)
    for how in ("light", "full"):
        yield compare(f"--monitor {how}: {steps} steps", "off", found[how], found["off"],
                      "{:.3f} s", "<= 1.002" if how == "light" else "")


PLANTS = {  # from step 200 on; what is expected in the report
    "nothing": ("pass", ""),
    "slow data": ("data.Mixture.batch = after(data.Mixture.batch, time.sleep, 0.02)", "data"),
    "kernels in backward": ("train.finish_copy = after(train.finish_copy, work)", "backward"),
    "new shapes": ("data.Mixture.row_length = lambda self, n: 8 * made() % 64 + 64", ""),
    "another process on the card": ("train.finish_copy = after(train.finish_copy, rival)", "GPU"),
    "busy cores": ("train.finish_copy = after(train.finish_copy, hogs)", ""),
}
PLANTED = """
import subprocess, sys, time
import torch, data, train
from steady.guard.process import run
calls, started = [0], []
def made():
    return calls[0]
def after(plain, more, *args):
    def planted(*a, **k):
        calls[0] += 1
        if calls[0] > {after}:
            more(*args)
        return plain(*a, **k)
    return planted
def work():
    on_gpu = torch.cuda.is_available()
    x = torch.ones((2048, 2048) if on_gpu else (128, 128), device="cuda" if on_gpu else "cpu")
    for _ in range(20):
        x @ x
def begin(n, code):
    if not started:
        started.extend(subprocess.Popen([sys.executable, "-c", code]) for _ in range(n))
def rival():
    begin(1, "import torch; x = torch.ones(4096, 4096, device='cuda')\\nwhile 1: x @ x")
def hogs():
    begin({hogs}, "while 1: pass")
{plant}
def main(argv):
    try:
        return train.main(argv)
    finally:
        [process.kill() for process in started]
run(main)
"""


def plant(name: str, device: torch.device, tiny: bool):
    """A run of which something becomes slower, and what the report says of it."""
    code, expected = PLANTS[name]
    steps, after = (30, 15) if tiny else (500, 200)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*TINY, "--max_steps", str(steps), "--log_interval", "5", "--out_dir", "r",
                 "--eval_interval", "0", "--sample_interval", "0"]
        source = PLANTED.format(after=after, plant=code, hogs=2 if tiny else 64)
        process = start(flags, folder, [sys.executable, "-c", source])
        text = process.communicate(timeout=110)[0]
        done = subprocess.run([sys.executable, ROOT / "monitor.py", "r"], cwd=folder,
                              capture_output=True, text=True)
        yield Note(f"{text[-3000:]}\n{done.stdout}")
    found = "slower since" in text
    named = found and expected in text
    yield Figure(f"planted: {name}", "found, and named" if expected else "", [float(
        named if expected else found == (name != "nothing"))], "" if tiny else ">= 1")


# --- running train.py ------------------------------------------------------------------------


def start(flags: list[str], folder: str, command=(sys.executable, str(ROOT / "train.py"))):
    return subprocess.Popen(
        [*map(str, command), *flags, "--no_tensorboard"], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)})


def program(*flags: str, folder: str | None = None) -> tuple[int, str, float]:
    """(exit code, what it printed, seconds) of train.py with these flags."""
    with tempfile.TemporaryDirectory() as temporary:
        began = time.perf_counter()
        process = start(list(flags), folder or temporary)
        text = process.communicate()[0]
        return process.returncode, text, time.perf_counter() - began


def logged(flags: list[str]) -> list[dict]:
    """The rows of metrics.jsonl of a run."""
    with tempfile.TemporaryDirectory() as folder:
        program(*flags, "--out_dir", "r", "--eval_interval", "0", "--save_interval", "0",
                folder=folder)
        path = Path(folder) / "r/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
