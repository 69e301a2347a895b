"""What the monitor costs: per cent of a step's time, by two methods, in one process.

    python -m tests.bench monitor_cost

"paired" is the difference between blocks of steps with the monitor and without, side by side and
in alternating order: it sees everything, and the noise of the machine. "inside" is the time spent
within the monitor's calls in those same steps, and "empty loop" that of the same calls with no
training between them: both see little noise, but not what the monitor's files cost other threads.
Random tokens; real metrics.jsonl and TensorBoard files in a temporary directory.
"""

import contextlib
import gc
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import config
import train
from model import output_health
from tests.bench.common import Figure, Off, make_run, wait

SETTINGS = {"light, every 50": ("light", 50), "light, every 1": ("light", 1),
            "full, every 50": ("full", 50)}  # fmt: skip

FLAGS = ["--vocab_size", "257", "--max_steps", str(10**9), "--warmup_steps", "0"]
AIMS = {"light, every 50": "<= 0.002", "light, every 1": "<= 0.01", "full, every 50": "<= 0.005"}


class Timed:
    """A monitor, and the seconds that its calls took in the current step."""

    def __init__(self, monitor):
        self.monitor, self.seconds = monitor, 0.0
        for name in ("phase", "due", "log", "log_all", "step"):
            setattr(self, name, self.timed(getattr(monitor, name)))

    def timed(self, call):
        def wrapped(*args, **kwargs):
            began = time.perf_counter()
            out = call(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            return out

        return wrapped

    @contextlib.contextmanager
    def health(self, step, named_parameters):
        enter, leave = (self.timed(f) for f in self.context(step, named_parameters))
        enter()
        yield
        leave()

    def context(self, step, named_parameters):
        context = self.monitor.health(step, named_parameters)
        return context.__enter__, lambda: context.__exit__(None, None, None)


def make_monitor(run, mode: str, log_interval: int, folder: Path):
    """A real Monitor, past its first row, whose files are in `folder`."""
    folder.mkdir(parents=True)
    changes = dict(monitor=mode, log_interval=log_interval)
    cfg = config.dataclasses.replace(run.cfg, **changes)
    data = SimpleNamespace(typical_length=lambda: cfg.seq_len)
    more = dict(cfg=cfg, out_dir=folder, rank=0, world_size=1, step=0, tokens=0, train_data=data)
    monitor = train.make_monitor(SimpleNamespace(**vars(run) | more))
    monitor.autopsy = lambda step, rank: {}
    monitor.step(1, 0.0, torch.zeros(()), torch.zeros(()), tokens=1)  # opens TensorBoard
    return monitor


def random_batch(run):
    """Tokens and targets that nothing can be learned from, so that gradients stay as they are."""
    shape = 2, run.cfg.batch_size, run.cfg.seq_len
    return torch.randint(run.cfg.vocab_size, shape, device=run.device)


def step_of(run, monitor, step: int, work: bool):
    """Step number `step` as train.train makes it; without `work`, only what the monitor does."""
    if work:
        train.seed_everything(run.cfg.seed, step, 0)
        lr = train.set_learning_rate(run.optimizers, train.learning_rate(step, run.cfg))
    else:
        lr, loss, grad_norm, (tokens, targets) = 0.0, run.one, run.one, run.batch
    monitor.phase("data")
    if work:
        tokens, targets = random_batch(run)
    monitor.phase("forward")
    if work:
        with run.autocast:
            loss = run.model(tokens, targets)[0] / tokens.numel()
    monitor.phase("backward")
    if work:
        loss.backward()
        loss = loss.detach()
    monitor.phase("optimizer")
    if work:
        run.monitor = monitor
        grad_norm = train.update(run, run.named, step)
    else:
        with monitor.health(step, run.named):
            pass
    monitor.phase("other")
    if isinstance(monitor, Timed) and monitor.monitor.cfg.monitor == "full" and monitor.due(step):
        with run.autocast:
            monitor.log_all(monitor.timed(output_health)(run.model, tokens, targets))
    monitor.step(step, lr, loss, grad_norm, tokens=tokens.numel())


def block(run, monitor, first: int, steps: int, work: bool) -> tuple[float, list]:
    """(mean seconds a step, [(whether it logs, seconds inside the monitor) of each step])."""
    inside = []
    if isinstance(monitor, Timed):  # time passed since its last block: that was not training
        monitor.monitor.since = monitor.monitor.step_began = time.perf_counter()
    began = time.perf_counter()
    for step in range(first, first + steps):
        monitor.seconds = 0.0
        step_of(run, monitor, step, work)
        inside.append((monitor.due(step), monitor.seconds))
    wait(run.device)
    return (time.perf_counter() - began) / steps, inside


def cost_a_step(inside: list, interval: int) -> float:
    """Seconds a step in a run that logs every `interval` steps, from the two medians."""
    logs, others = ([s for due, s in inside if due is kind] for kind in (True, False))
    share = 1 / interval
    return share * np.median(logs) + (1 - share) * (np.median(others) if others else 0.0)


def bootstrap(values: list[float]) -> tuple[float, float, float]:
    """Median, and a 95 % interval of it."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return np.median(values), *np.percentile(np.median(draws, axis=1), (2.5, 97.5))


def main(options) -> list[Figure]:
    steps, blocks, empty_steps = (5, 2, 500) if options.quick else (50, 12, 2000)

    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        run = make_run(FLAGS)
        run.batch, run.one = random_batch(run), torch.ones((), device=run.device)
        off, stride = Off(), -(-steps // 50) * 50  # a block ends with a log
        pairs, inside, empty = ({name: [] for name in SETTINGS} for _ in range(3))
        off_seconds = []
        with contextlib.redirect_stdout(null):
            monitors = {name: Timed(make_monitor(run, *setting, folder / str(i)))
                        for i, (name, setting) in enumerate(SETTINGS.items())}  # fmt: skip
            block(run, off, 1, 3, True)
            gc.collect()
            gc.freeze()
            gc.disable()  # as train.train does
            for i in range(blocks):
                for name, monitor in monitors.items():
                    seconds = {}
                    for kind in (off, monitor) if i % 2 else (monitor, off):
                        first = stride * (i + 2) - steps + 1
                        seconds[kind], found = block(run, kind, first, steps, True)
                        inside[name] += found if kind is monitor else []
                    pairs[name].append(100 * (seconds[monitor] / seconds[off] - 1))
                    off_seconds.append(seconds[off])
                gc.collect()
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p)
            for name, monitor in monitors.items():
                for i in range(empty_steps // 50):
                    first = stride * (blocks + 2) + 50 * i + 1
                    empty[name] += block(run, monitor, first, 50, False)[1]
                monitor.monitor.close()

    step_ms = np.median(off_seconds) * 1e3
    print(f"default model, {run.cfg.batch_size} x {run.cfg.seq_len} tokens, {run.device.type}, "
          f"{torch.get_num_threads()} threads: {step_ms:.4g} ms a step with no monitor "
          f"({min(off_seconds) * 1e3:.4g} to {max(off_seconds) * 1e3:.4g})")  # fmt: skip
    print(f"{blocks} pairs of blocks of {steps} steps for each setting\n")
    print(f"{'':16s} {'paired, % (95 % interval)':27s} {'inside, us and %':>20s} "
          f"{'empty loop, us and %':>22s}   one log, ms")  # fmt: skip
    figures = []
    for name, (_, interval) in SETTINGS.items():
        middle, low, high = bootstrap(pairs[name])
        cells = []
        for found in (inside[name], empty[name]):
            us = cost_a_step(found, interval) * 1e6
            cells.append(f"{us:9.1f} {us / step_ms / 10:7.3f} %")
        log_ms = np.median([s for due, s in empty[name] if due]) * 1e3
        print(f"{name:16s} {f'{middle:+.2f} ({low:+.2f} to {high:+.2f})':27s} {cells[0]:>20s} "
              f"{cells[1]:>22s}   {log_ms:.3g}")  # fmt: skip
        share = cost_a_step(inside[name], interval) * 1e3 / step_ms
        figures.append(Figure(f"monitor, {name}: cost", "a default step without it", [share],
                              AIMS[name], f"{share * step_ms * 1e3:.0f} us",
                              f"{step_ms:.1f} ms"))  # fmt: skip
    print("\npaired: the whole difference, with the noise of the machine. inside, empty loop: "
          "time within the monitor's calls,\nin training steps and with none between them, over "
          "the median step.")  # fmt: skip
    if steps < 50:
        print(f"A block of {steps} steps ends with a log: paired has 50 / {steps} times as many "
              "as it should; inside is scaled\nto one in 50, but that of fewer steps than a real "
              "one.")  # fmt: skip
    return figures
