"""On one GPU: a programme of four parts, each under 9 minutes.

    python -m tests.bench gpu --part 1    checks, numbers, MFU, profiles, memory: begin with this
    python -m tests.bench gpu --part 2    against nanoGPT (STEADY_NANOGPT=DIR) and transformers
    python -m tests.bench gpu --part 3    saves, resume, signals, memory that runs out
    python -m tests.bench gpu --part 4    the monitor's cost, planted slow-downs, other choices

Writes gpu-NAME-PART.json after each step, and three lines to say about it. Each step runs in a
process of its own, so that a fault of the device, or memory that runs out, ends that step alone and
becomes an entry in the file; one for which no time is left is skipped, as are the checks without
pytest. MFU is against the data sheet (989 TFLOP/s on an H100 or H200) or, of a card that is not
known, against products of 8192 x 8192. On a CPU, or with --quick, all of it runs in a tiny size, so
that it does not rot.
"""

import contextlib
import dataclasses
import gc
import importlib.util
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
from functools import partial
from pathlib import Path

import torch

import train
from model import flops_per_token
from steady.checkpoints.run_dir import provenance
from steady.guard import faults
from steady.models.device import device_name, multiplies_bf16, peak_flops, pick_device
from tests.bench import card
from tests.bench.card import TINY, Failure, Note, one_line
from tests.bench.common import (
    Figure,
    compare,
    make_run,
    matrix_products,
    repeat,
    seconds,
    train_steps,
)
from tools import estimate

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 500  # seconds for a part
LEAST = 20  # seconds that a step needs
MOST = {"checks": 150, "peers": 480}  # seconds, of another step 120
SIZES = {  # micro-batch x sequence, and the MFU to reach
    "gpt2-124m": (64, 1024, 0.50), "350m": (32, 1024, 0.55), "1b": (8, 2048, 0.60),
}
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--seq_len", "256"]


# --- the parts, each in a process of its own -------------------------------------------------


def half(device: torch.device) -> str:
    """The half precision that this device multiplies: an older card has no bf16."""
    return "bf16" if device.type != "cuda" or multiplies_bf16(device) else "fp16"


def warm_run(flags: list[str], batch: int, mode: str | None = None) -> train.Run:
    """A run of one micro-batch a step that has made its first steps; mode: of torch.compile."""
    gc.unfreeze()  # the run before, which training froze
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = make_run(["--no_compile", "--vocab_size", "50257", "--batch_size", str(batch),
                    "--micro_batch_size", str(batch), *flags, "--precision",
                    half(pick_device("auto", 0)), "--cache_clear_interval", "0"])
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
            if not faults.out_of_memory(e) or batch == 1:
                raise
        batch //= 2  # here, where nothing refers to the run that failed


def step_seconds(run: train.Run, steps: int) -> float:
    """The median of three blocks."""
    return statistics.median(seconds(train_steps, run, steps) for _ in range(3)) / steps


def time_of(call) -> float:
    call(3)
    return seconds(call, 20) / 20


def product_seconds(device: torch.device, n: int) -> float:
    return time_of(matrix_products(n, device, torch.bfloat16 if half(device) == "bf16"
                                   else torch.float16))


def peak(device: torch.device, tiny: bool) -> tuple[float, str]:
    """FLOP/s against which MFU is measured, and where they are from."""
    known = peak_flops(device, torch.bfloat16)
    n = 128 if tiny else 8192
    return (known, "data sheet") if known else (2 * n**3 / product_seconds(device, n), "product")


def peaks(device: torch.device, tiny: bool):
    n = 128 if tiny else 8192
    took, (known, source) = product_seconds(device, n), peak(device, tiny)
    yield compare(f"{half(device)} product", source, [2 * n**3 / took / 1e12], [known / 1e12],
                  "{:.3g} TFLOP/s")
    x = torch.empty(n * n * 4, device=device)  # 1 GB
    copied = 8 * x.numel() / time_of(repeat(partial(torch.empty_like(x).copy_, x), device))
    yield compare("copy", "an H200", [copied / 1e12], [4.8], "{:.3g} TB/s")


def memory_gb() -> list[float]:
    """At most: allocated, reserved."""
    if not torch.cuda.is_available():
        return [0.0, 0.0]
    return [torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9]


def synchronizations(run: train.Run) -> str:
    """none, or what the first one was; ordinary steps under torch's own check."""
    if run.ranks.device.type != "cuda":
        return "not a GPU"
    run.ranks.stop.left = 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        train.train(run, run.batches)
        return "none"
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mfu(name: str, more: list[str], device: torch.device, tiny: bool):
    """Yields figures of a size. more: flags, of which the last word names the row."""
    kind = more[-1].lstrip("-") + ", expandable segments" * ("PYTORCH_ALLOC_CONF" in os.environ)
    batch, length, aim = SIZES[name]
    flags = TINY if tiny else ["--model", name, "--seq_len", str(length), "--compile"]
    run = largest_run([*flags, *more], 2 if tiny else batch)
    took, (known, source) = step_seconds(run, 2 if tiny else 20), peak(device, tiny)
    tokens = run.cfg.batch_size * run.cfg.seq_len
    flops = flops_per_token(run.model, run.cfg) * tokens
    allocated, reserved = memory_gb()
    yield Figure(f"{name}, {kind}, compiled: MFU", source, [flops / took / known],
                 f">= {aim}" if more[-1] == "adamw" else "", f"{tokens / took:.0f} tokens/s",
                 f"{run.cfg.batch_size} x {run.cfg.seq_len}, {allocated:.1f} GB at most, "
                 f"{reserved:.1f} reserved")
    kinds = card.shares(run, 2 if tiny else 5)
    yield Note(f"{name}, {kind}: share of the time: "
               + ", ".join(f"{what} {share:.3f}" for what, share in kinds.items()))
    need, _ = estimate.simulate(run.cfg, run.ranks.dtype, run.cfg.batch_size, 1,
                                train.make_optimizers)
    yield compare(f"{name}, {kind}: memory", "--estimate", [allocated],
                  [sum(need.values()) / 1e9], "{:.2f} GB")
    if (name, more[-1]) == ("gpt2-124m", "adamw"):
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
        except Exception as e:  # a backend that this card or build lacks, or too little memory
            yield Failure(f"{what}, {kind}: {one_line(e)}")
            continue
        first = first or took
        figure = compare(f"{what}, {kind}: time", reference, [took], [first], "{:.5f} s")
        figure.ours += f", {memory_gb()[0]:.1f} GB"
        yield figure


def attention(device: torch.device, tiny: bool):
    flags, kinds, packed = TINY, {}, {"varlen flash, or a mask": ([],)}
    batch = steps = 2
    if not tiny:
        flags, steps = ["--model", "gpt2-124m"], 20
        batch = largest_run(flags, 16).cfg.batch_size
        kinds = {f"{name} attention": (["--attention", name],)
                 for name in ("flash", "efficient", "cudnn", "math")}
        packed["efficient"] = (["--attention", "efficient"],)
    yield from choices(f"gpt2-124m, batch of {batch}", flags, batch, steps, {
        "eager": ([],), "activations recomputed": (["--activation_checkpointing", "full"],),
        **kinds})
    flags += ["--data_mode", "packed"]
    yield from choices("gpt2-124m, packed rows", flags, batch, steps, packed)
    if tiny:
        return
    eager = warm_run([*flags, "--optimizer", "adamw"], batch)
    before = step_seconds(eager, 20)
    torch.nn.attention.activate_flash_attention_impl("FA3")
    yield compare("gpt2-124m, FlashAttention 3: time", "eager", [step_seconds(eager, 20)],
                  [before], "{:.4f} s")


def graphs(device: torch.device, tiny: bool):
    size = (TINY, 2, 2) if tiny else (SMALL, 16, 50)
    yield from choices("small model", *size, {
        "eager": ([],), "compiled": (["--compile"],),
        "compile mode reduce-overhead": ([], "reduce-overhead")})


def splits(device: torch.device, tiny: bool):
    flags = [*(TINY if tiny else ["--model", "gpt2-124m"]), "--compile"]
    batch = 4 if tiny else largest_run(flags, 64).cfg.batch_size
    yield from choices(f"gpt2-124m, compiled, batch of {batch}", flags, batch, 2 if tiny else 20, {
        "one micro-batch": ([],), "four": (["--micro_batch_size", str(batch // 4)],)})


ADAMW, MUON = ["--optimizer", "adamw"], ["--optimizer", "muon"]
PROGRAMME = {  # in each part the most important ones first, in case the time runs out
    1: {
        "train.py": card.default_run,
        "checks": None,  # pytest -m gpu
        "losses": card.losses,
        "gradients of attention": card.attention_gradients,
        "peaks": peaks,
        "gpt2-124m": partial(mfu, "gpt2-124m", ADAMW),
        "gpt2-124m, muon": partial(mfu, "gpt2-124m", MUON),
        "gpt2-124m, eager": partial(mfu, "gpt2-124m", ["--no_compile", *ADAMW]),
        "1b": partial(mfu, "1b", ADAMW),
        "1b, muon": partial(mfu, "1b", MUON),
        "curves": card.curves,
        "sample": partial(card.sampled, warm_run=warm_run),
    },
    2: {"peers": card.peers},
    3: {
        "resume": card.exact_resume,
        "signals": card.signals,
        "memory runs out": card.too_little_memory,
        "saves": partial(card.saves, warm_run=warm_run),
    },
    4: {
        "monitor": partial(card.monitors, warm_run=warm_run),
        **{f"plant: {name}": partial(card.plant, name) for name in card.PLANTS},
        "small model": graphs,
        "micro-batches": splits,
        "attention": attention,
        "gpt2-124m, expandable segments": partial(mfu, "gpt2-124m", MUON),
        "350m": partial(mfu, "350m", ADAMW),
    },
}
PARTS = {name: step for part in PROGRAMME.values() for name, step in part.items()}
VARIABLES = {"gpt2-124m, expandable segments": {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


def part(name: str, file: str, size: str):
    """Run a part; writes each figure and failure as a line of JSON to `file` when it is known.

    Then the process ends at once, loaders or a confused device notwithstanding.
    """
    device = pick_device("auto", 0)
    with open(file, "a") as out:
        def write(found):
            print(found if isinstance(found, str) else " ".join(found.row()), flush=True)
            record = {"note" if isinstance(found, Note) else "failure": found}
            if isinstance(found, Figure):
                record = dataclasses.asdict(found)
            print(json.dumps(record), file=out, flush=True)

        try:
            for found in PARTS[name](device, size == "tiny"):
                write(found)
        except Exception as e:
            write(Failure(f"{name}: {one_line(e)}"))
    sys.stdout.flush()
    os._exit(0)


# --- running them ----------------------------------------------------------------------------


def attempt(command: list[str], limit: float, log: Path, **variables: str) -> str:
    """Run a command, its output into `log`; why it failed, or nothing if it did not."""
    environment = {**os.environ, "COLUMNS": "300", **variables}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished after {limit:.0f} s"
        finally:  # with what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not code:
        return ""
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"exit code {code}: {last[0][:300] if last else 'no output'}"


def read_checks(text: str) -> dict:
    """What pytest -v has printed so far → {"passed": [names], "skipped", "failed": {name: why}}."""
    found = {"passed": [], "skipped": [], "failed": {}}
    for name, result in re.findall(r"^\S*?(\w+\.py::\S+) (PASSED|SKIPPED|FAILED|ERROR)?", text,
                                   re.MULTILINE):
        if result in ("PASSED", "SKIPPED"):
            found[result.lower()].append(name)
        else:  # without a result it was running when the process ended
            found["failed"].setdefault(name, "failed" if result else "did not finish")
    for name, why in re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+) - (.*)", text,
                                re.MULTILINE):
        found["failed"][name] = why[:300]
    return found


def driver() -> str:
    """The version of the driver, the limit of power, the highest clock; empty if unknown."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv"],
            capture_output=True, text=True, timeout=20)
        return "; ".join(asked.stdout.split("\n")[:2]) if asked.returncode == 0 else ""
    return ""


def about(device: torch.device) -> dict:
    found = {"driver": driver(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    with contextlib.suppress(Exception):
        import triton

        found["triton"] = triton.__version__
    with contextlib.suppress(Exception):
        found["cudnn"] = torch.backends.cudnn.version()
        memory = torch.cuda.get_device_properties(device).total_memory
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found |= {"memory_gb": memory / 1e9, "capability": capability}
    return found


def measure(device: torch.device, tiny: bool, names: list[str], limit: float,
            keep=lambda *found: None) -> tuple:
    """(figures, notes): everything that could be found within `limit` seconds.

    keep is given them after each step.
    """
    figures, notes, end = [], {**about(device), "parts": {}, "failures": [], "printed": {}}, (
        time.time() + limit)
    checks = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=-v", "-p",
              "no:cacheprovider", "--tb=short", "tests/test_train.py", "tests/test_bench.py",
              "tests/test_gpu.py"]
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "log.txt", Path(folder) / "found.jsonl"
        for name in names:
            keep(figures, notes)
            began = time.time()
            if end - began < LEAST:
                notes["parts"][name] = "skipped: the time is used up"
                continue
            if name == "checks" and not importlib.util.find_spec("pytest"):
                notes["parts"][name] = "skipped: no pytest"
                continue
            print(f"--- {name}", flush=True)
            command = checks if name == "checks" else [
                sys.executable, "-m", "tests.bench.gpu", name, str(file),
                "tiny" if tiny else "full"]
            try:
                why = attempt(command, min(end - began, MOST.get(name, 120)), log,
                              **VARIABLES.get(name, {}))
            except KeyboardInterrupt:
                why, end = "interrupted", 0
            notes["parts"][name] = why or f"{time.time() - began:.0f} s"
            if name == "checks":
                text = log.read_text(errors="replace")
                notes["checks"] = read_checks(text)
                notes["failures"] += [f"{test}: {w}" for test, w in
                                      notes["checks"]["failed"].items()]
                if why:
                    notes["checks"]["output"] = text[-20_000:]
                print("\n".join(text.splitlines()[-1:]), flush=True)
                continue
            lines = file.read_text().splitlines() if file.exists() else []
            file.unlink(missing_ok=True)
            found = [json.loads(line) for line in lines]
            notes["failures"] += [f["failure"] for f in found if "failure" in f]
            notes["failures"] += [f"{name}: {why}"] * bool(why)
            notes["printed"][name] = [f["note"] for f in found if "note" in f]
            figures += [Figure(**f) for f in found if "what" in f]
            for f in found:
                print(f.get("failure") or f.get("note", "")[-1500:] or
                      " ".join(Figure(**f).row()), flush=True)
            if why:
                print(f"{name}: {why}", flush=True)
    return figures, notes


def in_short(figures: list[Figure], notes: dict, name: str, file: str) -> list[str]:
    """Three lines for an issue."""
    checks = notes.get("checks", {"passed": [], "skipped": [], "failed": {}})
    counts = ", ".join(f"{len(checks[k])} {k}" for k in ("passed", "failed", "skipped"))
    mfus = [f"{f.what.split(',')[0]} {f.ratio:.3g}" for f in figures
            if f.what.endswith("adamw, compiled: MFU") and math.isfinite(f.ratio)]
    synchronized = [f.ours for f in figures if f.what.startswith("synchronizations")]
    skipped = sum(outcome.startswith("skipped") for outcome in notes["parts"].values())
    card = ", ".join(filter(None, (name, notes.get("capability"), notes["driver"])))
    return [
        f"{card}; torch {torch.__version__}, commit {provenance()['commit']}; checks: {counts}",
        f"MFU {', '.join(mfus) or 'none'}; synchronizations: {', '.join(synchronized) or '?'}",
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
        found = dict(notes, figures=[dataclasses.asdict(f) for f in figures])
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")

    figures, notes = measure(device, tiny, list(PROGRAMME[options.part]), LIMIT, keep)
    notes["in_short"] = in_short(figures, notes, name, options.json)
    options.notes = notes
    return figures


if __name__ == "__main__":
    part(*sys.argv[1:])
