"""On one GPU: a programme of four parts, each under 9 minutes.

    python -m tests.bench gpu --part 1    checks, numbers, MFU, profiles, memory: begin with this
    python -m tests.bench gpu --part 2    against nanoGPT (STEADY_NANOGPT=DIR) and transformers
    python -m tests.bench gpu --part 3    saves, kills, resume, memory that runs out
    python -m tests.bench gpu --part 4    the monitor's cost, planted slow-downs, other choices

Writes gpu-NAME-PART.json after each line, and three lines to say about it. Each step runs in a
process of its own, so that a fault of the device, or memory that runs out, ends that step alone and
becomes an entry in the file; one for which no time is left is skipped. MFU is against the data
sheet (989 TFLOP/s on an H100 or H200) or, of a card that is not known, against products of
8192 x 8192. On a CPU, or with --quick, all of it runs in a tiny size, so that it does not rot.

A step is a function that is given the device and whether to be tiny, and yields what it finds as
it becomes known: figures, dict(failure=…), and dict(note=…), which is kept as it is.
"""

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.collect_env import get_pretty_env_info

import data
import train
from model import flops_per_token, generate
from steady.checkpoints.checkpoint import checkpoint_at
from steady.checkpoints.run_dir import provenance
from steady.checkpoints.writer import Writer
from steady.guard import memory
from steady.guard.process import exit_code
from steady.models import layers
from steady.models.device import device_name, peak_flops, pick_device, pick_dtype
from steady.watch.report import report
from tests.bench import monitor_cost
from tests.bench.common import (
    Figure,
    compare,
    in_turns,
    make_run,
    matrix_products,
    repeat,
    seconds,
    take_turns,
    train_steps,
)
from tests.bench.training import nanogpt, qwen2, steady
from tools import estimate

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 500  # seconds for a part
LEAST = 20  # seconds that a step needs
MOST = {  # seconds, of another step 120
    "checks": 150, "peers": 480, "stopped": 240, "saves": 200, "monitor": 200,
}
SIZES = {  # micro-batch x sequence, and the MFU to reach
    "gpt2-124m": (64, 1024, 0.50), "350m": (32, 1024, 0.55), "1b": (8, 2048, 0.60),
}
GPT2 = ["--model", "gpt2-124m"]
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--seq_len", "256"]
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128",
        "--seq_len", "32", "--vocab_size", "512"]
ADAMW, MUON = ["--optimizer", "adamw"], ["--optimizer", "muon"]
QUIET = ["--eval_interval", "0", "--sample_interval", "0", "--log_interval", "5",
         "--no_tensorboard"]
KERNELS = {  # by the names of kernels, the first that fits
    "attention": "flash|fmha|sdpa|attention", "GEMM": "gemm|cutlass|nvjet|cublas|_mm_",
    "Triton": "^triton", "optimizer": "multi_tensor|foreach|adam",
}


def one_line(error) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# --- runs in this process --------------------------------------------------------------------


def warm_run(flags: list[str], batch: int, mode: str | None = None) -> train.Run:
    """A run of one micro-batch a step that has made its first steps; mode: of torch.compile."""
    gc.unfreeze()  # the run before, which training froze
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = make_run(["--no_compile", "--vocab_size", "50257", "--batch_size", str(batch),
                    "--micro_batch_size", str(batch), "--cache_clear_interval", "0", *flags])
    if mode:
        run.model.compile(mode=mode)
    train_steps(run, 5)
    return run


def largest_run(flags: list[str], batch: int) -> train.Run:
    """`warm_run` with the largest half, quarter, … of the micro-batch that fits into memory."""
    while True:
        try:
            return warm_run(flags, batch)
        except Exception as e:
            if not memory.out_of_memory(e) or batch == 1:
                raise
        batch //= 2  # here, where nothing refers to the run that failed


def step_seconds(run: train.Run, steps: int) -> float:
    """The median of three blocks."""
    return statistics.median(seconds(train_steps, run, steps) for _ in range(3)) / steps


# --- part 1: numbers and where the time goes --------------------------------------------------


def program(*flags: str, folder="", command=(ROOT / "train.py",)) -> tuple[int, str, float]:
    """(exit code, what it printed, seconds) of train.py with these flags."""
    with tempfile.TemporaryDirectory() as other:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *command, *flags], cwd=folder or other, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        return done.returncode, done.stdout.strip(), time.perf_counter() - began


def default_run(device: torch.device, tiny: bool):
    """The first thing that anybody does."""
    code, text, took = program("--max_steps", "60", *(["--d_model", "32"] if tiny else []))
    yield dict(note=text)
    yield Figure("python train.py --max_steps 60: exit code 0", "", [float(code == 0)], ">= 1",
                 f"{took:.0f} s")


def read_checks(text: str) -> list[tuple[str, str]]:
    """(test, result) of what pytest -v has printed so far; no result: it did not finish."""
    return re.findall(r"^\S*?(\w+\.py::\S+) (PASSED|SKIPPED|FAILED|ERROR)?", text, re.MULTILINE)


def checks(device: torch.device, tiny: bool):
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=-v", "-p",
               "no:cacheprovider", "--tb=short", "tests/test_train.py", "tests/test_gpu.py"]
    try:
        text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=MOST["checks"] - 10).stdout.decode()
    except subprocess.TimeoutExpired as e:
        text = (e.stdout or b"").decode()
    found = read_checks(text)
    count = Counter(result for _, result in found)
    counts = f"{count['PASSED']} passed, {count['SKIPPED']} skipped of {len(found)}"
    right = count["PASSED"] + count["SKIPPED"]
    yield Figure("checks: pytest -m gpu", "all", [right / max(1, len(found))], ">= 1", counts)
    for test, result in found:
        if result not in ("PASSED", "SKIPPED"):
            yield dict(failure=f"{test}: {result.lower() or 'did not finish'}")
    yield dict(note=text[-20_000:])


def results(call, given: list, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """call(*given) in this precision, and the gradients of its mean."""
    leaves = [x.to(device, dtype).requires_grad_() for x in given]
    value = call(*leaves)
    value.float().mean().backward()
    return [x.double().cpu() for x in (value.detach(), *(x.grad for x in leaves))]


def error(found: torch.Tensor, right: torch.Tensor) -> list[float]:
    return [float((found - right).norm() / right.norm())]


def losses(device: torch.device, tiny: bool):
    """The eager loss in bf16 at a vocabulary of 50,304: errors beside those of plain formulas."""
    V, C, T = (512, 64, 64) if tiny else (50_304, 768, 4096)
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(1, T, C, generator=random), 0.1 * torch.randn(V, C, generator=random)]
    targets = torch.randint(V, (1, T), generator=random).to(device)

    def plain(hidden, weight):
        return layers.cross_entropies((hidden @ weight.t()).float(), targets)

    def exact(hidden, weight):
        return layers.cross_entropies(hidden @ weight.t(), targets)

    def fused(hidden, weight):
        return layers.LinearCrossEntropy.apply(hidden, weight, targets, V)

    whats = ("losses", "gradient of hidden", "gradient of the head")
    found = (results(loss, given, device, dtype) for loss, dtype in (
        (fused, torch.bfloat16), (plain, torch.bfloat16), (exact, torch.float64)))
    for what, ours, theirs, right in zip(whats, *found, strict=True):
        yield compare(f"fused loss, {what}: error", "plain, bf16", error(ours, right),
                      error(theirs, right), "{:.2e}", "<= 1.5")


def attention_gradients(device: torch.device, tiny: bool):
    """Of each backend in bf16: errors beside those of plain formulas in bf16."""
    shape = (1, 2, 64, 32) if tiny else (4, 12, 1024, 64)
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=random) for _ in range(3)]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square()

    def gradients(backend: SDPBackend, dtype: torch.dtype) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.cat(results(attend, given, device, dtype)[1:])

    right = gradients(SDPBackend.MATH, torch.float64)
    plain = error(gradients(SDPBackend.MATH, torch.bfloat16), right)
    names = ["flash"] if device.type == "cpu" else ["flash", "cudnn", "efficient"]
    for name in names:
        try:
            found = gradients(getattr(SDPBackend, f"{name.upper()}_ATTENTION"), torch.bfloat16)
        except RuntimeError as e:  # a backend that this card or build lacks
            yield dict(failure=f"{name} attention: {one_line(e)}")
            continue
        yield compare(f"{name} attention, gradients: error", "math, bf16", error(found, right),
                      plain, "{:.2e}", "<= 2")


def product_flops(device: torch.device, tiny: bool) -> float:
    """FLOP/s of products of matrices."""
    n = 128 if tiny else 8192
    multiply = matrix_products(n, device, pick_dtype("auto", device))
    multiply(3)
    return 20 * 2 * n**3 / seconds(multiply, 20)


def peak(device: torch.device, tiny: bool) -> tuple[float, str]:
    """FLOP/s against which MFU is measured, and where they are from."""
    known = peak_flops(device, torch.bfloat16)
    return (known, "data sheet") if known else (product_flops(device, tiny), "product")


def peaks(device: torch.device, tiny: bool):
    known, source = peak(device, tiny)
    yield compare("product of matrices", source, [product_flops(device, tiny) / 1e12],
                  [known / 1e12], "{:.3g} TFLOP/s")
    x = torch.ones(10**6 if tiny else 10**9, dtype=torch.uint8, device=device)
    copy = repeat(partial(torch.empty_like(x).copy_, x), device)
    copy(3)
    moved = 20 * 2 * len(x) / seconds(copy, 20)  # read and written
    yield compare("copies", "data sheet, H100", [moved / 1e12], [3.35], "{:.3g} TB/s")


def profile(run: train.Run, steps: int) -> str:
    """The share of the time of each kind of kernel, and those that take most of it."""
    with torch.profiler.profile() as profiler:
        took = seconds(train_steps, run, steps)
    shares = dict.fromkeys([*KERNELS, "other"], 0.0)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = next((kind for kind, pattern in KERNELS.items()
                         if re.search(pattern, event.name)), "other")
            shares[kind] += event.time_range.elapsed_us() / 1e6 / took
    shares["idle"] = 1 - sum(shares.values())
    told = ", ".join(f"{kind} {share:.3f}" for kind, share in shares.items())
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=120)
    return f"{table}\nshare of the time: {told}"


def mfu(device: torch.device, tiny: bool, name: str, more: list[str]):
    """The figures of a size. more: flags, of which the last word names the row."""
    kind = more[-1] + ", expandable segments" * ("PYTORCH_ALLOC_CONF" in os.environ)
    batch, length, aim = SIZES[name]
    flags = TINY if tiny else ["--model", name, "--seq_len", str(length), "--compile"]
    run = largest_run([*flags, *more], 2 if tiny else batch)
    took, (known, source) = step_seconds(run, 2 if tiny else 20), peak(device, tiny)
    tokens = run.cfg.batch_size * run.cfg.seq_len
    flops = flops_per_token(run.model, run.cfg) * tokens
    allocated = torch.cuda.max_memory_allocated() / 1e9  # 0 on a CPU
    reserved = torch.cuda.max_memory_reserved() / 1e9
    how = "eager" if "--no_compile" in more else "compiled"
    yield Figure(f"{name}, {kind}, {how}: MFU", source, [flops / took / known],
                 f">= {aim}" if more == ADAMW else "", f"{tokens / took:.0f} tokens/s",
                 f"{run.cfg.batch_size} x {run.cfg.seq_len}, {allocated:.1f} GB at most, "
                 f"{reserved:.1f} reserved")
    need = estimate.simulate(run.cfg, run.ranks.dtype, run.cfg.batch_size, 1,
                             train.make_optimizers)
    yield compare(f"{name}, {kind}, {how}: memory", "--estimate", [allocated],
                  [sum(need.values()) / 1e9], "{:.2f} GB")
    yield dict(note=f"{name}, {kind}, {how}:\n{profile(run, 2 if tiny else 5)}")


def sampled(device: torch.device, tiny: bool):
    """Tokens one at a time, without cuDNN's attention and with it, which plans each length."""
    run = warm_run(TINY if tiny else GPT2, 1)
    prompt, n = torch.zeros(1, 1, dtype=torch.long, device=device), 20 if tiny else 400
    plain = generate.__wrapped__.__wrapped__  # without `no_grad` and `without_cudnn`

    def write(call):
        with torch.no_grad(), run.ranks.autocast:
            torch.cuda.empty_cache() if device.type == "cuda" else None
            call(run.model, prompt, n)

    found = [seconds(write, call) for call in (generate, plain)]
    yield compare(f"{n} sampled tokens", "with cuDNN's attention", found[:1], found[1:], "{:.2f} s")


# --- part 2: peers ---------------------------------------------------------------------------


def peers(device: torch.device, tiny: bool):
    """steady and transformers' Qwen2, and nanoGPT where STEADY_NANOGPT is a checkout, in turns."""
    for name, batch in (("gpt2-124m", 32), ("350m", 16)):
        flags = ["--model", name, "--seq_len", "1024", "--vocab_size", "50304", "--compile"]
        flags, batch = ([*TINY, "--no_compile"], 2) if tiny else (flags, batch)
        flags += ["--optimizer", "adamw", "--batch_size", str(batch), "--micro_batch_size",
                  str(batch)]
        makers = {"steady": (steady, flags), "Qwen2": (qwen2, flags)}
        if checkout := os.environ.get("STEADY_NANOGPT"):
            makers["nanoGPT"] = (nanogpt, flags, checkout)
        found = take_turns(makers, 2 if tiny else 5, 1 if tiny else 20, 1 if tiny else 5)
        for peer in list(makers)[1:]:
            yield compare(f"{name}: a step of {peer}", "steady", found[peer], found["steady"],
                          "{:.4f} s", ">= 1.3" if peer == "Qwen2" else ">= 1.15")


# --- part 3: nothing is lost -----------------------------------------------------------------


STOPPED = """
import os, train
plain = train.seed_everything
def planted(seed, step, rank):
    plain(seed, step, rank)
    if step == 45:
        os.kill(os.getpid(), {number})
train.seed_everything = planted
train.process.run(train.main)
"""


def weights(folder: str) -> dict[str, torch.Tensor]:
    return checkpoint_at(Path(folder) / "r/checkpoints", 60).state()["model"]


def stopped(device: torch.device, tiny: bool):
    """Runs that are stopped in step 46 and resumed, beside one that is not."""
    flags = [*(TINY if tiny else GPT2), *QUIET, "--no_compile", "--batch_size", "8", "--max_steps",
             "60", "--save_interval", "10", "--out_dir", "r"]
    plans = [(["--deterministic"], [signal.SIGKILL, signal.SIGTERM]), ([], [signal.SIGKILL])]
    for more, signals in plans:
        with tempfile.TemporaryDirectory() as folder:
            program(*flags, *more, folder=folder)
            expected = weights(folder)
        for number in signals:
            with tempfile.TemporaryDirectory() as folder:
                plant = ["-c", STOPPED.format(number=int(number))]
                code, *_ = program(*flags, *more, folder=folder, command=plant)
                _, text, _ = program(*flags, *more, "--auto_resume", folder=folder)
                found = weights(folder)
            what = " ".join([number.name, *more])
            right = code == (143 if number == signal.SIGTERM else -number)
            yield Figure(f"{what}: exit code", "", [float(right)], ">= 1", str(code))
            largest = max(float((x - found[name]).norm() / x.norm().clamp(min=1e-12))
                          for name, x in expected.items())
            yield Figure(f"{what}, --auto_resume: largest difference of a weight", "not stopped",
                         [largest], "<= 0" if more else "",
                         " ".join(re.findall(r"step_\d+", text)[:1]))


def too_little_memory(device: torch.device, tiny: bool):
    """Advice where a micro-batch does not fit, and steps with the one that auto finds."""
    flags = TINY if tiny else ["--model", "350m", "--no_compile"]
    if not tiny:
        code, text, _ = program(*flags, "--batch_size", "4096", "--micro_batch_size", "4096",
                                "--max_steps", "1")
        advised = "try --micro_batch_size" in text
        yield Figure("out of memory: exit code 1 and advice", "", [float(code == 1 and advised)],
                     ">= 1", text[-100:])
    code, text, took = program(*flags, "--batch_size", "8" if tiny else "256",
                               "--micro_batch_size", "auto", "--max_steps", "20")
    size = re.search(r"micro-batches of (\d+)", text)
    yield Figure("--micro_batch_size auto, then 20 steps", "", [float(code == 0)], ">= 1",
                 size[0] if size else text[-100:], f"{took:.0f} s")


def saves(device: torch.device, tiny: bool):
    """Steps with a checkpoint among them against steps without."""
    run = warm_run([*(TINY if tiny else ["--model", "350m"]), *ADAMW], 2 if tiny else 4)
    steps = 4 if tiny else 30
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), 1)

        def block(save: bool) -> float:
            run.cfg.save_interval = run.progress.step + 2 if save else 0
            run.dir.writer = writer if save else None
            took = seconds(train_steps, run, steps)
            writer.wait()
            return took

        block(True)  # allocates the host memory
        found = in_turns({save: partial(block, save) for save in (False, True)}, 1 if tiny else 2)
    yield compare(f"{steps} steps with a save", "without", found[True], found[False], "{:.2f} s",
                  "" if tiny else "<= 1.05")


# --- part 4: the monitor, and other choices --------------------------------------------------


def monitors(device: torch.device, tiny: bool):
    run = warm_run(TINY, 2) if tiny else warm_run(GPT2, 4)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        yield from monitor_cost.costs(run, Path(folder), tiny)


ON_CARD, started = torch.cuda.is_available(), []  # processes that disturb


def kernels():
    n = 2048 if ON_CARD else 256
    x = torch.ones(n, n, device="cuda" if ON_CARD else "cpu")
    for _ in range(20):
        x @ x


def shorter(batch, call: int):
    length = batch.tokens.shape[1]
    return batch._replace(tokens=batch.tokens[:, : length - call % (length // 2)].contiguous())


def disturb(count: int, code: str):
    if not started:
        started.extend(subprocess.Popen([sys.executable, "-c", code]) for _ in range(count))


RIVAL = "import torch; x = torch.ones(4096, 4096, device='cuda')\nwhile 1: x @ x"
HOGS = 64 if ON_CARD else 2
BATCH, BACKWARD = (data.Mixture, "batch"), (train.Monitor, "add_losses")
PLANTS = {  # from step 200 on: after which function; what, and its result unless that is None; what
    # must be named, None where a card may not become slower
    "nothing": (BACKWARD, lambda found, call: None, ""),
    "slow data": (BATCH, lambda found, call: time.sleep(0.02), "data"),
    "kernels in backward": (BACKWARD, lambda found, call: kernels(), "backward"),
    "new shapes": (BATCH, shorter, None),
    "another process on the card": (BACKWARD, lambda found, call: disturb(1, RIVAL), ""),
    "busy cores": (BACKWARD, lambda found, call: disturb(HOGS, "while 1: pass"), None),
}


def plant(device: torch.device, tiny: bool, name: str):
    """A run of which something becomes slower, and what the report says of it."""
    (owner, function), more, expected = PLANTS[name]
    steps, after, length = (30, 15, 32) if tiny else (500, 200, 1024)
    plain, calls = getattr(owner, function), itertools.count(1)

    def planted(*args, **kwargs):
        found, call = plain(*args, **kwargs), next(calls)
        return (more(found, call) if call > after else None) or found

    setattr(owner, function, planted)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        run = f"{folder}/r"
        exit_code(train.main, [*TINY, *QUIET, "--no_compile", "--num_workers", "0", "--seq_len",
                               str(length), "--max_steps", str(steps), "--out_dir", run,
                               "--save_interval", "0"])
        for process in started:
            process.kill()
        verdict = "\n".join(report(Path(run))["verdict"])
    yield dict(note=f"{out.getvalue()[-3000:]}\n{verdict}")
    found = re.search(f"slower since.*{expected or ''}", out.getvalue())
    right = bool(found) == (name != "nothing")
    yield Figure(f"planted: {name}", "found, and named" if expected else "", [float(right)],
                 "" if tiny or expected is None else ">= 1")


CHOICES = {  # name: (flags, largest batch, kinds)
    "small model": (SMALL, 16, {
        "eager": ([],), "compiled": (["--compile"],),
        "compile mode reduce-overhead": ([], "reduce-overhead")}),
    "micro-batches": ([*GPT2, "--compile"], 64, {
        "one micro-batch": ([],), "four": ([],)}),
    "attention": (GPT2, 16, {
        "eager": ([],), "activations recomputed": (["--activation_checkpointing", "full"],),
        **{f"{name} attention": (["--attention", name],)
           for name in ("flash", "efficient", "cudnn", "math")}}),
    "packed rows": ([*GPT2, "--data_mode", "packed"], 16, {
        "varlen flash, or a mask": ([],), "efficient": (["--attention", "efficient"],)}),
}


def choices(device: torch.device, tiny: bool, name: str):
    """The time of a step of each kind against the first."""
    flags, batch, kinds = CHOICES[name]
    steps = 20
    if tiny:
        flags, batch, steps, kinds = [*flags, *TINY], 4, 2, dict(list(kinds.items())[:2])
    batch = largest_run(flags, batch).cfg.batch_size
    first, reference = None, next(iter(kinds))
    for kind, (more, *mode) in kinds.items():
        if kind == "four":
            more = ["--micro_batch_size", str(batch // 4)]
        try:
            took = step_seconds(warm_run([*flags, *ADAMW, *more], batch, *mode), steps)
        except Exception as e:  # a backend that this card or build lacks, or too little memory
            yield dict(failure=f"{name}, {kind}: {one_line(e)}")
            continue
        first = first or took
        figure = compare(f"{name}, batch of {batch}, {kind}: time", reference, [took], [first],
                         "{:.5f} s")
        figure.ours += f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        yield figure


# --- the programme ---------------------------------------------------------------------------


PROGRAMME = {  # in each part the most important ones first, in case the time runs out
    1: {
        "train.py": default_run,
        "checks": checks,
        "losses": losses,
        "attention gradients": attention_gradients,
        "peaks": peaks,
        "gpt2-124m": partial(mfu, name="gpt2-124m", more=ADAMW),
        "gpt2-124m, muon": partial(mfu, name="gpt2-124m", more=MUON),
        "gpt2-124m, eager": partial(mfu, name="gpt2-124m", more=["--no_compile", *ADAMW]),
        "1b": partial(mfu, name="1b", more=ADAMW),
        "sample": sampled,
        "1b, muon": partial(mfu, name="1b", more=MUON),
    },
    2: {"peers": peers},
    3: {
        "stopped": stopped,
        "memory runs out": too_little_memory,
        "saves": saves,
    },
    4: {
        "monitor": monitors,
        **{f"plant: {name}": partial(plant, name=name) for name in PLANTS},
        **{f"plant: nothing, {n}": partial(plant, name="nothing") for n in (2, 3)},
        **{name: partial(choices, name=name) for name in CHOICES},
        "gpt2-124m, expandable segments": partial(mfu, name="gpt2-124m", more=MUON),
        "350m": partial(mfu, name="350m", more=ADAMW),
    },
}
STEPS = {name: step for part in PROGRAMME.values() for name, step in part.items()}
VARIABLES = {"gpt2-124m, expandable segments": {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


def step_alone(name: str, file: str, size: str):
    """Run a step; writes each figure and failure as a line of JSON to `file` when it is known.

    Then the process ends at once, loaders or a confused device notwithstanding.
    """
    with open(file, "ab", buffering=0) as out:  # so that a line is there as a whole
        def write(record: dict):
            out.write(f"{json.dumps(record)}\n".encode())

        try:
            for found in STEPS[name](pick_device("auto", 0), size == "tiny"):
                write(dataclasses.asdict(found) if isinstance(found, Figure) else found)
        except Exception as e:
            write(dict(failure=f"{name}: {one_line(e)}"))
    sys.stdout.flush()
    os._exit(0)


# --- running it ------------------------------------------------------------------------------


def attempt(command: list[str], limit: float, log: Path, look=lambda: None,
            **variables: str) -> str:
    """Run a command, its output into `log`, and `look` meanwhile; why it failed, or nothing."""
    environment = {**os.environ, "COLUMNS": "300", **variables}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        end = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
                look()
            code = process.poll()
        finally:  # with what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code is None:
        return f"not finished after {limit:.0f} s"
    if not code:
        return ""
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"exit code {code}: {last[0][:300] if last else 'no output'}"


def about(device: torch.device) -> dict:
    found = {"environment": get_pretty_env_info()}
    with contextlib.suppress(Exception):
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return found


def measure(device: torch.device, tiny: bool, names: list[str], limit: float,
            keep=lambda *found: None) -> tuple:
    """(figures, notes): all that was found in `limit` seconds; keep is given them at each line."""
    figures, end = [], time.time() + limit
    notes = {**about(device), "parts": {}, "failures": [], "printed": {}}
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "log.txt", Path(folder) / "found.jsonl"
        for name in names:
            keep(figures, notes)
            began = time.time()
            if end - began < LEAST:
                notes["parts"][name] = "skipped: the time is used up"
                continue
            print(f"--- {name}", flush=True)
            notes["printed"][name] = []
            command = [sys.executable, "-m", "tests.bench.gpu", name, str(file),
                       "tiny" if tiny else "full"]
            with file.open("w+") as lines:
                look = partial(take, lines, name, figures, notes, keep)
                try:
                    why = attempt(command, min(end - began, MOST.get(name, 120)), log, look,
                                  **VARIABLES.get(name, {}))
                except KeyboardInterrupt:
                    why, end = "interrupted", 0
                look()
            notes["parts"][name] = why or f"{time.time() - began:.0f} s"
            if why:
                notes["failures"].append(f"{name}: {why}")
                print(notes["failures"][-1], flush=True)
    return figures, notes


def take(lines, name: str, figures: list[Figure], notes: dict, keep):
    """Read, print and keep the lines that a step has written since the last call."""
    for line in lines:
        found = json.loads(line)
        if "failure" in found:
            notes["failures"].append(found["failure"])
            print(found["failure"], flush=True)
        elif "note" in found:
            notes["printed"][name].append(found["note"])
            print(found["note"][-1500:], flush=True)
        else:
            figures.append(Figure(**found))
            print(" ".join(figures[-1].row()), flush=True)
        keep(figures, notes)


def in_short(figures: list[Figure], notes: dict, name: str, file: str) -> list[str]:
    """Three lines for an issue."""
    def told(what: str) -> str:
        return next((f.ours for f in figures if f.what.startswith(what)), "?")

    mfus = [f"{f.what.split(',')[0]} {f.ratio:.3g}" for f in figures
            if f.what.endswith("adamw, compiled: MFU") and math.isfinite(f.ratio)]
    skipped = sum(outcome.startswith("skipped") for outcome in notes["parts"].values())
    card = ", ".join(filter(None, (name, notes.get("capability"))))
    return [
        f"{card}; torch {torch.__version__}, commit {provenance()['commit']}; checks: "
        + told("checks"),
        f"MFU {', '.join(mfus) or 'none'}",
        f"failures: {len(notes['failures'])}, parts skipped: {skipped}; attached: {file}",
    ]


def main(options) -> list[Figure]:
    """Also sets options.json, unless it is given, and adds to options.notes."""
    device = pick_device("auto", 0)
    tiny, name = options.quick or device.type != "cuda", device_name(device)
    if not options.json:
        short = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
        options.json = f"gpu-{short}-{options.part}.json"

    def keep(figures, notes):  # for a machine that is taken away
        found = {"gpu": dict(notes, figures=[dataclasses.asdict(f) for f in figures])}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")

    figures, notes = measure(device, tiny, list(PROGRAMME[options.part]), LIMIT, keep)
    notes["in_short"] = in_short(figures, notes, name, options.json)
    options.notes = notes
    return figures


if __name__ == "__main__":
    step_alone(*sys.argv[1:])
