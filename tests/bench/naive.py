"""The loop that people have today against this one, and what each of its habits costs.

    python -m tests.bench naive

Same model, random tokens and fused AdamW in one process; blocks of steps of each kind take turns.
"plain" watches nothing; each row adds one habit to it, then all of them, then the Monitor instead
(light, a log every 50 steps, metrics.jsonl and TensorBoard). "Time in its own lines" is what the
noise of the machine hardly touches; it lacks what a habit slows down elsewhere, as the profiler
does the step.
"""

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from tests.bench.common import Figure, Off, compare, in_turns, make_run, silence, train_steps
from tests.bench.monitor_cost import FLAGS, block, time_calls, with_monitor

TENSORBOARD = "TensorBoard: 10 add_scalar, every step"
LOSS = "loss.item()"
GRADIENTS = "gradient norm of each parameter, .item()"
WEIGHTS = "norm of each parameter, .item()"
SAMPLES = "loss by dataset, .item() a sample"
PROFILER = "torch.profiler, one step in 50"
HABITS = (TENSORBOARD, LOSS, GRADIENTS, WEIGHTS, SAMPLES, PROFILER)
DATASETS = ("web", "code", "books")


class Naive(Off):
    """In the place of a monitor: what loops do by habit in each step."""

    def __init__(self, run, habits, folder: Path):
        self.run, self.habits, self.writer = run, habits, SummaryWriter(folder)
        self.parameters = list(run.model.named_parameters())
        self.scalars = {"loss": 0.0, "lr": 0.0, **{f"scalar/{i}": float(i) for i in range(8)}}
        self.profile = None

    def phase(self, name):
        if name == "data" and PROFILER in self.habits and (self.run.progress.step + 1) % 50 == 0:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if name == "optimizer" and GRADIENTS in self.habits:
            self.norms = {name: p.grad.norm().item() for name, p in self.parameters}

    def add_losses(self, losses, *_):
        if SAMPLES in self.habits:
            by_dataset = {name: [] for name in DATASETS}
            for i, sample in enumerate(losses.mean(1)):
                by_dataset[DATASETS[i % len(DATASETS)]].append(sample.item())
        if LOSS in self.habits:
            self.scalars["loss"] = losses.mean().item()

    def step(self, step, learning_rate, *values):
        if WEIGHTS in self.habits:
            self.norms = {name: p.detach().norm().item() for name, p in self.parameters}
        if TENSORBOARD in self.habits:
            self.scalars["lr"] = learning_rate
            for name, value in self.scalars.items():
                self.writer.add_scalar(name, value, step)
        if self.profile:
            self.profile.stop()
            self.profile = None
        return ()

    def close(self):
        self.writer.close()


def with_habits(run, habits, folder: Path):
    batches, run = run.batches, replace(run)
    run.batches = batches
    run.progress.step = 49
    run.monitor = Naive(run, habits, folder)
    train_steps(run)  # the first profile of a process takes seconds
    return run


def main(options) -> list[Figure]:
    steps, blocks = (5, 1) if options.quick else (50, 15)
    with tempfile.TemporaryDirectory() as name, silence():
        folder = Path(name)
        runs = {"plain": make_run(["--optimizer", "adamw", *FLAGS])}
        for i, habits in enumerate([*((habit,) for habit in HABITS), HABITS]):
            kind = "naive" if habits == HABITS else habits[0]
            runs[kind] = with_habits(runs["plain"], habits, folder / str(i))
        runs["ours"] = with_monitor(runs["plain"], folder / "ours", log_interval=50)
        watched = {kind: run for kind, run in runs.items() if kind != "plain"}
        for run in watched.values():
            time_calls(run.monitor)
        found = in_turns({kind: partial(block, run, steps) for kind, run in runs.items()}, blocks)
        ms = {kind: [1e3 * seconds for seconds in values] for kind, values in found.items()}
        within = {}  # ms/step of each round
        for kind, run in watched.items():
            inside = torch.tensor([spent for _, spent in run.monitor.inside])
            within[kind] = (1e3 * inside.view(blocks, steps).mean(1)).tolist()
            run.monitor.close()

    cfg, plain = runs["plain"].cfg, statistics.median(ms["plain"])
    print(f"default model, {cfg.batch_size} x {cfg.seq_len} tokens, {torch.get_num_threads()} "
          f"threads, {blocks} rounds of {steps} steps: plain takes {plain:.4g} ms/step "
          f"({min(ms['plain']):.4g} to {max(ms['plain']):.4g})")
    if steps < 50:
        print(f"Short blocks: the profile, and the log of ours, is one step in {steps}.")
    names = {"naive": "all of these habits", "ours": "steady's monitor"}
    figures = []
    for kind, inner in within.items():
        what = f"a step with {names.get(kind, kind)}"
        figures += [
            compare(what, "a plain step", ms[kind], ms["plain"], "{:.1f} ms"),
            compare(f"{what}: time in its own lines", "a plain step",
                    [plain + own for own in inner], [plain] * blocks, "{:.2f} ms"),
        ]
    return [*figures, compare("a step with all of these habits", "a step with steady's monitor",
                              ms["naive"], ms["ours"], "{:.1f} ms")]
