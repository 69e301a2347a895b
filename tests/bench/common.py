"""The harness of the benchmarks: figures, measuring in turns, train.py's own loop in pieces."""

import contextlib
import gc
import io
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import config
import train
from data import loader
from steady.guard.process import exit_code

SPAWN = multiprocessing.get_context("spawn")

# --- figures ---------------------------------------------------------------------------------


@dataclass
class Figure:
    """A row of the table: ours against a reference measured in turns with it."""

    what: str
    reference: str
    ratios: list[float]  # one a round
    aim: str = ""  # as ">= 1.15"
    ours: str = ""  # as "143 tokens/s"
    theirs: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def row(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{short(low)} to {short(high)}" if len(self.ratios) > 1 else ""
        verdict = ""
        if self.aim:
            sign, limit = self.aim.split()
            met = self.ratio >= float(limit) if sign == ">=" else self.ratio <= float(limit)
            verdict = f"{'≥' if sign == '>=' else '≤'} {limit}: {'met' if met else 'missed'}"
        return [self.what, self.reference, short(self.ratio), spread, self.ours, self.theirs,
                verdict]


def short(ratio: float) -> str:
    return f"{ratio:.4g}" if 0.95 < ratio < 1.05 else f"{ratio:.3g}"


def compare(what: str, reference: str, ours: list[float], theirs: list[float], unit: str,
            aim: str = "") -> Figure:
    """The figure of two series of measurements; unit formats a median, as "{:.1f} ms"."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Figure(what, reference, ratios, aim, unit.format(statistics.median(ours)),
                  unit.format(statistics.median(theirs)))


COLUMNS = ["what", "against", "ratio", "spread", "ours", "theirs", "aim"]


def table(rows: list[list[str]]) -> str:
    """As Markdown, under COLUMNS."""
    lines = [f"| {' | '.join(row)} |" for row in [COLUMNS, *rows]]
    return "\n".join([lines[0], "|---" * len(COLUMNS) + "|", *lines[1:]])


# --- measuring in turns ----------------------------------------------------------------------


def seconds(call, *args) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


def in_turns(measures: dict, rounds: int) -> dict:
    """{name: measure} → {name: [measure() of each round]}, in alternating order.

    So whatever else the machine does affects all of them.
    """
    found = {name: [] for name in measures}
    for i in range(rounds):
        for name in list(measures)[:: -1 if i % 2 else 1]:
            found[name].append(measures[name]())
    return found


def take_turns(makers: dict, rounds: int, steps: int = 1, warm_up: int = 1) -> dict:
    """{name: (make, *args)} → {name: [seconds/step of each round]}.

    make(*args) returns a function that makes n steps. Each has a process of its own, so that
    neither its memory nor its settings affect another.
    """
    with contextlib.ExitStack() as stack:
        measures = {}
        for name, maker in makers.items():
            process = stack.enter_context(ProcessPoolExecutor(1, mp_context=SPAWN))
            stack.callback(end_at_once, process)
            process.submit(start, *maker).result()
            process.submit(step_seconds, warm_up).result()
            measures[name] = lambda p=process: p.submit(step_seconds, steps).result()
        return in_turns(measures, rounds)


def end_at_once(process: ProcessPoolExecutor):
    """Without what its libraries do at an exit: that has hung on CUDA."""
    with contextlib.suppress(BrokenExecutor):
        process.submit(os._exit, 0).result()


def start(make, *args):
    global make_steps  # in a process of take_turns
    make_steps = make(*args)


def step_seconds(n: int) -> float:
    return seconds(make_steps, n) / n


def apart(call, *args) -> tuple:
    """The result of call(*args) in a process of its own, and its peak memory in MB."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as process:
        return process.submit(with_peak_mb, call, *args).result()


def with_peak_mb(call, *args) -> tuple:
    return call(*args), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def repeat(step, device: torch.device):
    """A function that makes n steps and waits for the last."""

    def make_steps(n: int):
        for _ in range(n):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return make_steps


# --- train.py, in pieces ---------------------------------------------------------------------


class Countdown:
    """A `Stop` that ends training after `left` steps."""

    signal, save, left = 0, False, 0

    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def random_tokens(path: Path, n: int, vocab_size: int):
    np.random.default_rng(0).integers(0, vocab_size, n, dtype=np.uint16).tofile(path)


def make_run(flags: list[str]) -> train.Run:
    """A run as train.py sets it up, without monitor, evaluation or checkpoints.

    Its tokens are random: nothing can be learned from them, so gradients stay as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**6, config.parse(flags).vocab_size)
        if "packed" in flags:  # documents of 125 tokens
            np.arange(0, 10**6 + 1, 125, dtype=np.uint64).tofile(f"{folder}/train.bin.docs")
        cfg, _ = train.choose_run([*flags, "--data", folder, "--max_steps", str(10**9),
                                   "--warmup_steps", "0", "--eval_interval", "0",
                                   "--save_interval", "0"])
        run = train.set_up(cfg)
    run.batches = loader(run.train_data, run.cfg, 0, 10**9, run.ranks)
    calls = "phase", "add_losses", "log_all", "step"
    run.monitor = SimpleNamespace(**dict.fromkeys(calls, lambda *args, **how: None))
    run.ranks.stop = Countdown()
    return run


def train_steps(run: train.Run, steps: int = 1):
    """Make so many more updates in train.py's own loop."""
    run.ranks.stop.left = steps
    train.train(run, run.batches)
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize()


def train_log(flags: list) -> list[dict]:
    """The rows that train.py logs with these flags, in this process; it writes no sample."""
    train.sample = lambda run: ""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        argv = [*map(str, flags), "--eval_interval", "0", "--save_interval", "0", "--out_dir",
                folder]
        assert exit_code(train.main, argv) == 0
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    gc.enable()  # training switches it off
    return [json.loads(line) for line in lines]


def logged_step_ms(flags: list) -> float:
    """The median of the step times that train.py logs with these flags, without the first."""
    ms = [row["perf/step_ms_median"] for row in train_log(flags) if "perf/step_ms_median" in row]
    return statistics.median(ms[1:])
