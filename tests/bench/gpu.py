"""On one GPU: a programme of four parts, each under 9 minutes.

    python -m tests.bench gpu --part 1    checks, numbers, MFU, profiles, memory: begin with this
    python -m tests.bench gpu --part 2    nanoGPT (STEADY_NANOGPT=DIR), transformers, determinism
    python -m tests.bench gpu --part 3    saves, kills, resume, memory that runs out
    python -m tests.bench gpu --part 4    the monitor's cost, planted slow-downs, other choices

Rewrites gpu-NAME-PART.json after each step. Each step runs in a process of its own, so that a fault
of the device, or memory that runs out, ends that step alone and becomes an entry of the file; steps
without time left are skipped. MFU is against the data sheet or, of an unknown card, against
products of 8192 x 8192. On a CPU, or with --quick, everything runs in a tiny size.

A step is a function of the device and `tiny` that yields figures, and texts for the file.
"""

import contextlib
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.utils.collect_env import get_pretty_env_info

import data
import train
from model import flops_per_token, generate
from steady.checkpoints.checkpoint import checkpoint_at
from steady.checkpoints.run_dir import provenance
from steady.checkpoints.writer import Writer
from steady.guard.process import exit_code
from steady.models.device import device_name, peak_flops, pick_device, pick_dtype
from steady.watch.report import report
from tests.bench import monitor_cost
from tests.bench.common import (
    Figure,
    compare,
    in_turns,
    make_run,
    repeat,
    seconds,
    take_turns,
    train_steps,
)
from tests.bench.training import nanogpt, qwen2, steady
from tools import estimate

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 500  # seconds of a part
MOST = {"checks": 150, "peers": 480, "deterministic": 300, "stopped": 240, "saves": 200,
        "monitor": 200}  # others: 120
GPT2 = ["--model", "gpt2-124m", "--vocab_size", "50257"]
LARGE = ["--model", "1b", "--vocab_size", "50257"]
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128",
        "--seq_len", "32", "--vocab_size", "512", "--batch_size", "2", "--no_compile"]
QUIET = ["--eval_interval", "0", "--sample_interval", "0", "--log_interval", "5",
         "--no_tensorboard"]
KERNELS = {  # by the names of kernels, the first that fits
    "attention": "flash|fmha|sdpa|attention", "GEMM": "gemm|cutlass|nvjet|cublas|_mm_",
    "Triton": "^triton", "optimizer": "multi_tensor|foreach|adam", "other": ""}

# --- runs ------------------------------------------------------------------------------------


def warm_run(flags: list[str], mode: str | None = None) -> train.Run:
    """A run that has made its first steps; mode: of torch.compile."""
    run = make_run(["--optimizer", "adamw", "--cache_clear_interval", "0", *flags])
    if mode:
        run.model.compile(mode=mode)
    train_steps(run, 5)
    return run


def program(*flags: str, folder: str, command=(ROOT / "train.py",)) -> tuple[int, str, float]:
    """(exit code, output, seconds) of train.py with these flags."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command, *flags], cwd=folder, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return done.returncode, done.stdout.strip(), time.perf_counter() - began


def yes(what: str, holds: bool, seen: str) -> Figure:
    return Figure(what, "", [float(holds)], ">= 1", seen)


# --- part 1: numbers, and time by kind of kernel ----------------------------------------------


def default_run(device: torch.device, tiny: bool):
    with tempfile.TemporaryDirectory() as folder:
        code, text, took = program("--max_steps", "60", *(["--d_model", "32"] if tiny else []),
                                   folder=folder)
    yield text
    yield yes("python train.py --max_steps 60: exit code 0", code == 0, f"{took:.0f} s")


def checks(device: torch.device, tiny: bool):
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=-v", "-p",
               "no:cacheprovider", "--tb=short", "tests/test_train.py", "tests/test_gpu.py"]
    try:
        text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=MOST["checks"] - 10).stdout.decode()
    except subprocess.TimeoutExpired as e:
        text = (e.stdout or b"").decode()
    yield text[-20_000:]
    found = re.findall(r"^\S+\.py::\S+ (PASSED|SKIPPED)?", text, re.MULTILINE)  # "": failed
    yield yes("checks: pytest -m gpu", bool(found) and all(found),
              f"{found.count('PASSED')} passed, {found.count('SKIPPED')} skipped of {len(found)}")


def product_flops(device: torch.device, tiny: bool) -> float:
    """FLOP/s of products of matrices."""
    n, dtype = 128 if tiny else 8192, pick_dtype("auto", device)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    multiply = repeat(partial(torch.mm, a, b, out=torch.empty_like(a)), device)
    multiply(3)
    return 20 * 2 * n**3 / seconds(multiply, 20)


def peak(device: torch.device, tiny: bool) -> tuple[float, str]:
    """FLOP/s against which MFU is measured, and their source."""
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
    shares = dict.fromkeys(KERNELS, 0.0)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = next(kind for kind, name in KERNELS.items() if re.search(name, event.name))
            shares[kind] += event.time_range.elapsed_us() / 1e6 / took
    shares["idle"] = 1 - sum(shares.values())
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=120)
    return f"{table}\n{', '.join(f'{kind} {share:.3f}' for kind, share in shares.items())}"


def mfu(device: torch.device, tiny: bool, flags: list[str], aim: str = ""):
    run = warm_run(TINY if tiny else flags)
    cfg, (known, source) = run.cfg, peak(device, tiny)
    steps, tokens = 2 if tiny else 20, cfg.batch_size * cfg.seq_len
    took = statistics.median(seconds(train_steps, run, steps) for _ in range(3)) / steps
    flops = flops_per_token(run.model, cfg) * tokens
    allocated = torch.cuda.max_memory_allocated() / 1e9  # 0 on a CPU
    what = f"{flags[1]}, {cfg.optimizer}, {'compiled' if cfg.compile else 'eager'}"
    yield Figure(f"{what}: MFU", source, [flops / took / known], aim, f"{tokens / took:.0f} "
                 "tokens/s", f"micro-batches of {run.ranks.micro_batch}, {allocated:.1f} GB")
    need = estimate.simulate(cfg, run.ranks.dtype, run.ranks.micro_batch, run.accumulation,
                             train.make_optimizers)
    yield compare(f"{what}: memory", "--estimate", [allocated], [sum(need.values()) / 1e9],
                  "{:.2f} GB")
    yield f"{what}:\n{profile(run, 2 if tiny else 5)}"


def sampled(device: torch.device, tiny: bool):
    run, n = warm_run(TINY if tiny else [*GPT2, "--no_compile"]), 20 if tiny else 400
    prompt = torch.zeros(1, 1, dtype=torch.long, device=device)
    with run.ranks.autocast:
        took = seconds(generate, run.model, prompt, n)
    yield Figure(f"{n} sampled tokens: seconds", "", [took])


# --- part 2: peers ---------------------------------------------------------------------------


def peers(device: torch.device, tiny: bool):
    """steady, transformers' Qwen2, and nanoGPT where STEADY_NANOGPT is a checkout, in turns."""
    flags = TINY if tiny else [
        "--model", "gpt2-124m", "--vocab_size", "50304", "--seq_len", "1024", "--batch_size", "32",
        "--micro_batch_size", "32", "--optimizer", "adamw", "--compile"]
    makers = {"steady": (steady, flags), "Qwen2": (qwen2, flags)}
    if checkout := os.environ.get("STEADY_NANOGPT"):
        makers["nanoGPT"] = (nanogpt, flags, checkout)
    found = take_turns(makers, 2 if tiny else 5, 1 if tiny else 20, 1 if tiny else 5)
    for peer in list(makers)[1:]:
        yield compare("gpt2-124m: a step", peer, found["steady"], found[peer], "{:.4f} s")


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


def stopped(device: torch.device, tiny: bool):
    """Runs that are stopped in step 46 and resumed, against an undisturbed one."""
    def weights(folder: str) -> dict[str, torch.Tensor]:
        return checkpoint_at(Path(folder) / "r/checkpoints", 60).state()["model"]

    flags = [*(TINY if tiny else [*GPT2, "--no_compile", "--batch_size", "8"]), *QUIET,
             "--max_steps", "60", "--save_interval", "10", "--out_dir", "r", "--deterministic"]
    with tempfile.TemporaryDirectory() as folder:
        program(*flags, folder=folder)
        expected = weights(folder)
    for number, expected_code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        with tempfile.TemporaryDirectory() as folder:
            plant = ["-c", STOPPED.format(number=int(number))]
            code, *_ = program(*flags, folder=folder, command=plant)
            program(*flags, "--auto_resume", folder=folder)
            found = weights(folder)
        same = all(torch.equal(x, found[name]) for name, x in expected.items())
        yield yes(f"{number.name}, --auto_resume: same weights", same and code == expected_code,
                  f"exit code {code}")


def too_little_memory(device: torch.device, tiny: bool):
    """Advice where a micro-batch does not fit."""
    flags = ["--model", "350m", "--no_compile", *QUIET, "--batch_size", "4096", "--max_steps", "1"]
    with tempfile.TemporaryDirectory() as folder:
        if not tiny:
            code, text, _ = program(*flags, "--micro_batch_size", "4096", folder=folder)
            yield yes("out of memory: exit code 1 and advice",
                      code == 1 and "try --micro_batch_size" in text, text[-100:])


def saves(device: torch.device, tiny: bool):
    """Steps with a checkpoint among them against steps without."""
    run = warm_run(TINY if tiny else ["--model", "350m", "--no_compile", "--batch_size", "4"])
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
        found = in_turns({save: partial(block, save) for save in (False, True)}, 1 if tiny else 3)
    yield compare(f"{steps} steps with a save", "without", found[True], found[False], "{:.2f} s",
                  "" if tiny else "<= 1.05")


# --- part 4: the monitor, and other choices --------------------------------------------------


def monitors(device: torch.device, tiny: bool):
    run = warm_run(TINY if tiny else [*GPT2, "--no_compile", "--batch_size", "4"])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        yield from monitor_cost.costs(run, Path(folder), tiny)


def more_kernels(device: torch.device):
    n = 2048 if device.type == "cuda" else 128
    x = torch.ones(n, n, device=device)
    for _ in range(20):
        x @ x


BATCH, BACKWARD = (data.Mixture, "batch"), (train.Monitor, "add_losses")
PLANTS = {  # name: (function followed by it from step 200 on, what is done, word of the warning)
    "nothing": (BACKWARD, lambda device: None, ""),
    "slow data": (BATCH, lambda device: time.sleep(0.02), "data"),
    "kernels in backward": (BACKWARD, more_kernels, "backward")}


def plant(device: torch.device, tiny: bool, name: str):
    """A run that becomes slower, and its warnings and report."""
    (owner, function), do, word = PLANTS[name]
    steps, after = (30, 15) if tiny else (500, 200)
    plain, calls = getattr(owner, function), itertools.count(1)

    def planted(*args, **kwargs):
        found = plain(*args, **kwargs)
        if next(calls) > after:
            do(device)
        return found

    setattr(owner, function, planted)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        exit_code(train.main, [*TINY, *QUIET, "--seq_len", "32" if tiny else "1024",
                               "--num_workers", "0", "--max_steps", str(steps), "--save_interval",
                               "0", "--out_dir", f"{folder}/r"])
        verdict = "\n".join(report(Path(folder) / "r")["verdict"])
    text = out.getvalue()
    yield f"{text[-3000:]}\n{verdict}"
    warned = bool(re.search(f"slower since.*{word}", text))
    yield Figure(f"planted: {name}", f"warned of {word or 'it'}",
                 [float(warned == (name != "nothing"))], "" if tiny else ">= 1")


SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--seq_len", "256", "--no_compile"]
EAGER = [*GPT2, "--seq_len", "1024", "--batch_size", "64", "--no_compile"]
COMPILED = [*GPT2, "--seq_len", "1024", "--batch_size", "64", "--compile"]
CHOICES = {  # name: {kind: (flags, mode of torch.compile)}; all against the first
    "CUDA graphs": {"eager": (SMALL, None), "compiled": ([*SMALL, "--compile"], None),
                    "compile mode reduce-overhead": (SMALL, "reduce-overhead")},
    "deterministic": {"eager": (EAGER, None),
                      "deterministic": ([*EAGER, "--deterministic"], None),
                      "compiled": (COMPILED, None),
                      "compiled, deterministic": ([*COMPILED, "--deterministic"], None)},
    "attention": {name: ([*EAGER, "--attention", name], None)
                  for name in ("auto", "flash", "efficient", "cudnn", "math")}}


def timed_run(flags: list[str], mode: str | None):
    return partial(train_steps, warm_run(flags, mode))


def choices(device: torch.device, tiny: bool, name: str):
    """Seconds/step of each kind, in a process of its own, against the first."""
    first = None
    for kind, (flags, mode) in CHOICES[name].items():
        maker = (timed_run, [*flags, *TINY], None) if tiny else (timed_run, flags, mode)
        try:
            found = take_turns({kind: maker}, 3, 2 if tiny else 20)[kind]
        except Exception as e:  # a backend that this card or build lacks, or too little memory
            yield f"{name}, {kind}: {e}"
            continue
        first = first or found
        yield compare(f"{name}, {kind}: a step", next(iter(CHOICES[name])), found, first,
                      "{:.5f} s")


# --- the programme ---------------------------------------------------------------------------

PROGRAMME = {  # in each part the most important first, in case the time runs out
    1: {
        "train.py": default_run,
        "checks": checks,
        "peaks": peaks,
        "gpt2-124m": partial(mfu, flags=COMPILED, aim=">= 0.5"),
        "gpt2-124m, eager": partial(mfu, flags=EAGER),
        "1b": partial(mfu, flags=[*LARGE, "--batch_size", "8", "--seq_len", "2048", "--compile"],
                      aim=">= 0.6"),
        "gpt2-124m, muon": partial(mfu, flags=[*COMPILED, "--optimizer", "muon"]),
        "sample": sampled},
    2: {"peers": peers, "deterministic": partial(choices, name="deterministic")},
    3: {"stopped": stopped, "memory runs out": too_little_memory, "saves": saves},
    4: {
        "monitor": monitors,
        **{f"plant: {name}": partial(plant, name=name) for name in PLANTS},
        **{name: partial(choices, name=name) for name in ("CUDA graphs", "attention")}}}
STEPS = {name: step for part in PROGRAMME.values() for name, step in part.items()}


def attempt(command: list[str], limit: float, log: Path) -> str:
    """Run a command, its output into `log`; returns the reason of a failure, or nothing."""
    with log.open("w") as out:
        env = {**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1"}  # the error comes last
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=env,
                                   start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"exit code {code}: {last[0][:300] if last else 'no output'}" if code else ""


def main(options) -> list[Figure]:
    device = pick_device("auto", 0)
    tiny, end = options.quick or device.type != "cuda", time.monotonic() + LIMIT
    name = re.sub("[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    result = Path(f"gpu-{name}-{options.part}.json")
    figures, notes, outcomes = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for step in PROGRAMME[options.part]:
            file, began = Path(folder) / "found.jsonl", time.monotonic()
            file.write_text("")
            print(f"--- {step}", flush=True)
            limit = min(end - began, MOST.get(step, 120))
            command = [sys.executable, "-m", "tests.bench.gpu", step, str(file),
                       *(["tiny"] if tiny else [])]
            failure = "skipped: no time left" if limit < 20 else attempt(
                command, limit, Path(folder) / "log.txt")
            found = [json.loads(line) for line in file.read_text().splitlines()]
            notes[step] = [each for each in found if isinstance(each, str)]
            figures += [Figure(**each) for each in found if isinstance(each, dict)]
            outcomes[step] = failure or f"{time.monotonic() - began:.0f} s"
            print(*notes[step], outcomes[step], sep="\n", flush=True)
            result.write_text(json.dumps(dict(
                commit=provenance()["commit"], environment=get_pretty_env_info(), notes=notes,
                outcomes=outcomes, figures=[asdict(figure) for figure in figures]), indent=1))
    print(f"for an issue: {result}")
    return figures


if __name__ == "__main__":
    step, file, *tiny = sys.argv[1:]
    with open(file, "a", buffering=1) as out:
        for found in STEPS[step](pick_device("auto", 0), bool(tiny)):
            print(json.dumps(found if isinstance(found, str) else asdict(found)), file=out)
    sys.stdout.flush()
    os._exit(0)  # loaders or a confused device notwithstanding
