"""The loop that people have today against this one, and what each of its habits costs.

    python -m tests.bench naive

Same model, random tokens and fused AdamW in one process; blocks of steps of each kind are
interleaved. "plain" watches nothing; each row below adds one habit to it; "naive" has them all;
"ours" has the Monitor (light, a log every 50 steps, metrics.jsonl and TensorBoard). Prints the
milliseconds a step that each adds to the plain block of its round, and the factor: the median
over rounds, and the quartiles. "inside" is the time spent in the habit's own lines, which the
noise of the machine hardly touches, and the factor that it makes; it lacks what the habit slows
down elsewhere (the step under the profiler, a loss without reduction).
"""

import contextlib
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train
from tests.bench import monitor_cost
from tests.bench.common import Figure, make_run, ratios, wait

TENSORBOARD = "TensorBoard: 10 add_scalar, every step"
LOSS = "loss.item()"
GRADIENTS = "gradient norm of each parameter, .item()"
WEIGHTS = "norm of each parameter, .item()"
SAMPLES = "loss by dataset, .item() a sample"
PROFILER = "torch.profiler, one step in 50"
HABITS = (TENSORBOARD, LOSS, GRADIENTS, WEIGHTS, SAMPLES, PROFILER)
DATASETS = ("web", "code", "books")


@contextlib.contextmanager
def inside(run):
    began = time.perf_counter()
    yield
    run.inside += time.perf_counter() - began


def step_of(run, habits, step: int, writer):
    """Step number `step`; with `habits` empty, as train.train makes it with no monitor."""
    monitor = run.monitor
    train.seed_everything(run.cfg.seed, step, 0)
    lr = train.set_learning_rate(run.optimizers, train.learning_rate(step, run.cfg))
    monitor.phase("data")
    tokens, targets = monitor_cost.random_batch(run)
    monitor.phase("forward")
    with run.autocast:
        if SAMPLES in habits:
            logits = run.model.logits(run.model.hidden(tokens)).flatten(0, 1)
            each = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(tokens)
            loss = each.sum() / tokens.numel()
        else:
            loss = run.model(tokens, targets)[0] / tokens.numel()
    monitor.phase("backward")
    loss.backward()
    scalars = {"loss": 0.0, "lr": lr, **{f"scalar/{i}": float(i) for i in range(8)}}
    if SAMPLES in habits:
        with inside(run):
            by_dataset = {name: [] for name in DATASETS}
            for i, sample in enumerate(each.detach().mean(1)):
                by_dataset[DATASETS[i % len(DATASETS)]].append(sample.item())
    if LOSS in habits:
        with inside(run):
            scalars["loss"] = loss.item()
    if GRADIENTS in habits:
        with inside(run):
            run.norms = {name: p.grad.norm().item() for name, p in run.named}
    monitor.phase("optimizer")
    grad_norm = train.update(run, run.named, step)
    monitor.phase("other")
    if WEIGHTS in habits:
        with inside(run):
            run.norms = {name: p.detach().norm().item() for name, p in run.named}
    if TENSORBOARD in habits:
        with inside(run):
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
    monitor.step(step, lr, loss.detach(), grad_norm, tokens=tokens.numel())


def block(run, habits, first: int, steps: int, writer) -> tuple[float, float]:
    """Milliseconds a step, and how many of them inside the habits or the monitor."""
    run.inside = run.monitor.seconds = 0.0
    began = time.perf_counter()
    for step in range(first, first + steps):
        if PROFILER in habits and step % 50 == 0:
            with inside(run):
                profile = torch.profiler.profile()
                profile.start()
            step_of(run, habits, step, writer)
            with inside(run):
                profile.stop()
        else:
            step_of(run, habits, step, writer)
    wait(run.device)
    seconds = time.perf_counter() - began
    return seconds / steps * 1e3, (run.inside + run.monitor.seconds) / steps * 1e3


def main(options) -> list[Figure]:
    steps, blocks = (5, 1) if options.quick else (50, 15)
    from torch.utils.tensorboard import SummaryWriter

    kinds = {"plain": (), **{habit: (habit,) for habit in HABITS}, "naive": HABITS, "ours": ()}
    ms, within = ({kind: [] for kind in kinds} for _ in range(2))
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        run = make_run(["--optimizer", "adamw", *monitor_cost.FLAGS])
        off = run.monitor
        with contextlib.redirect_stdout(null):
            monitor = monitor_cost.make_monitor(run, "light", 50, folder / "ours")
        timed = monitor_cost.Timed(monitor)
        writers = {kind: SummaryWriter(folder / str(i)) for i, kind in enumerate(kinds)}
        for kind in kinds:  # the first profile of a process takes seconds
            block(run, kinds[kind], 50, 1, writers[kind])
        gc.collect()
        gc.freeze()
        gc.disable()  # in all of them, as train.train does
        for i in range(blocks):
            order = list(kinds)[:: 1 if i % 2 else -1]
            for kind in order:
                run.monitor = timed if kind == "ours" else off
                monitor.since = monitor.step_began = time.perf_counter()
                with contextlib.redirect_stdout(null):
                    first = -(-steps // 50) * 50 * (i + 2) - steps + 1
                    found, inner = block(run, kinds[kind], first, steps, writers[kind])
                ms[kind].append(found)
                within[kind].append(inner)
                gc.collect()
        monitor.close()
        for writer in writers.values():
            writer.close()

    print(f"default model, {run.cfg.batch_size} x {run.cfg.seq_len} tokens, {run.device.type}, "
          f"{torch.get_num_threads()} threads, {len(ms['plain'])} rounds of {steps} steps: "
          f"plain takes {statistics.median(ms['plain']):.4g} ms a step ({min(ms['plain']):.4g} to "
          f"{max(ms['plain']):.4g})\n")  # fmt: skip

    def spread(values, form) -> str:
        low, middle, high = np.percentile(values, (25, 50, 75))
        return f"{middle:{form}} ({low:{form}} to {high:{form}})"

    if steps < 50:
        print(f"Short blocks: the profile, and the log of ours, is one step in {steps}.\n")
    plain = statistics.median(ms["plain"])
    print(f"{'cause':42s} {'ms a step added':26s} {'factor':24s} inside, ms; factor")
    for kind in list(kinds)[1:]:
        pairs = list(zip(ms[kind], ms["plain"], strict=True))
        added, factor = [m - p for m, p in pairs], [m / p for m, p in pairs]
        inner = statistics.median(within[kind])
        print(f"{kind:42s} {spread(added, '+.2f'):26s} {spread(factor, '.3f'):24s} {inner:.3f}; "
              f"{1 + inner / plain:.4f}")  # fmt: skip
    names = {"naive": "all of these habits", "ours": "steady's monitor"}
    figures = [
        Figure(f"a step with {names.get(kind, kind)}: time in its own lines", "a plain step",
               [1 + inner / plain for inner in within[kind]], "",
               f"{plain + statistics.median(within[kind]):.1f} ms", f"{plain:.1f} ms")
        for kind in list(kinds)[1:]
    ]  # fmt: skip
    figures.append(Figure("a step with all of these habits", "a step with steady's monitor",
                          ratios(ms["naive"], ms["ours"]), "",
                          f"{statistics.median(ms['naive']):.1f} ms",
                          f"{statistics.median(ms['ours']):.1f} ms"))  # fmt: skip
    return figures
