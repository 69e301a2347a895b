"""What the monitor costs: its share of a step's time, and whether that stays the same.

    python -m tests.bench monitor_cost

The time spent within the monitor's calls, in blocks of steps, against steps without it, in turns:
not what the monitor's files cost other threads. On a GPU, where those calls wait for kernels, how
much longer the blocks take. Random tokens; real metrics.jsonl and TensorBoard files.

Then a million steps with nothing to train (light, a log every 50 steps): what a step of this
monitor takes against one of a new monitor, in turns, and memory.
"""

import contextlib
import gc
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import train
from steady.models.evaluation import copy_of_weights, measure_output, update_metrics
from steady.watch.proc import rss_bytes
from tests.bench.common import Figure, compare, in_turns, make_run, seconds, train_steps

CHUNK = 1000  # empty steps between two readings
SETTINGS = {  # monitor, log_interval, the share of a step that it may cost
    "light, every 50": ("light", 50, "<= 0.003"),
    "light, every 1": ("light", 1, "<= 0.025"),
    "full, every 50": ("full", 50, "<= 0.005")}


def with_monitor(run: train.Run, folder: Path, **options) -> train.Run:
    """The run, with train.py's own monitor past its first log, whose files are in `folder`."""
    folder.mkdir(parents=True)
    batches, run = run.batches, replace(run, cfg=replace(run.cfg, **options))
    flops = train.flops_per_token(run.model, run.cfg, run.cfg.seq_len)
    run.batches, run.dir = batches, replace(run.dir, path=folder)
    run.monitor = train.Monitor(**train.monitor_options(run, flops))
    empty_steps(run, 1)  # opens TensorBoard
    return run


def time_calls(monitor):
    """From now on, keep in monitor.inside each step and the seconds that its calls take."""
    monitor.inside, spent = [], 0.0

    def timed(call):
        def wrapped(*args, **how):
            nonlocal spent
            before, began = spent, time.perf_counter()
            result = call(*args, **how)
            spent = before + time.perf_counter() - began  # calls inside this one count once
            return result

        return wrapped

    step = timed(monitor.step)

    def timed_step(number, **how):
        nonlocal spent
        step(number, **how)
        monitor.inside.append((number, spent))
        spent = 0.0

    for name in ("phase", "add_losses", "log_all"):
        setattr(monitor, name, timed(getattr(monitor, name)))
    monitor.step = timed_step


def block_ms(run: train.Run, steps: int) -> float:
    """ms/step of a block that ends at a multiple of 50, where both intervals log."""
    run.progress.step = -(-(run.progress.step + steps) // 50) * 50 - steps
    gc.collect()
    clock = getattr(run.monitor, "clock", None)
    if clock:
        clock.since, clock.step_seconds = time.perf_counter(), 0.0  # before: not training
    return 1e3 * seconds(train_steps, run, steps) / steps


def empty_steps(run: train.Run, steps: int):
    """What the loop tells its monitor in so many steps, with no training between."""
    monitor, device, progress = run.monitor, run.ranks.device, run.progress
    batch = run.train_data.batch(0, run.ranks.micro_batch).to(device)
    losses, norm = torch.ones(batch.targets.shape, device=device), torch.ones((), device=device)
    for p in run.ranks.shards.parameters.values():
        p.grad = torch.zeros_like(p)
    for _ in range(steps):
        for name in ("data", "forward", "backward"):
            monitor.phase(name)
        monitor.add_losses(losses, batch)
        monitor.phase("optimizer")
        shards = run.ranks.shards
        before = copy_of_weights(shards) if run.measures(progress.step + 1) else None
        monitor.log_all(update_metrics(shards, before) if before else {})
        progress.step += 1
        monitor.phase("other")
        measure_output(run, batch)
        monitor.step(progress.step, lr=0.0, loss=norm, grad_norm=norm)
    run.model.zero_grad()


def cost_a_step(inside: list, interval: int) -> float:
    """Seconds a step in a run that logs every `interval` steps, from the two medians."""
    logs = [spent for step, spent in inside if step % interval == 0]
    others = [spent for step, spent in inside if step % interval] or [0.0]
    share = 1 / interval
    return share * statistics.median(logs) + (1 - share) * statistics.median(others)


def costs(off: train.Run, folder: Path, quick: bool) -> list[Figure]:
    steps, blocks = (5, 2) if quick else (50, 6)
    figures = []
    train_steps(off, 3)
    for name, (mode, interval, aim) in SETTINGS.items():
        run = with_monitor(off, folder / name, monitor=mode, log_interval=interval)
        time_calls(run.monitor)
        found = in_turns({"off": partial(block_ms, off, steps),
                          "on": partial(block_ms, run, steps)}, blocks)
        run.monitor.close()
        ms, with_it = (statistics.median(found[kind]) for kind in ("off", "on"))
        spent = cost_a_step(run.monitor.inside, interval)
        if off.ranks.device.type == "cuda":
            spent = (with_it - ms) / 1e3
        figures.append(Figure(f"monitor, {name}: cost", "a default step without it",
                              [spent * 1e3 / ms], aim, f"{spent * 1e6:.0f} us", f"{ms:.1f} ms"))
    return figures


def step_us(run: train.Run) -> float:
    """Microseconds of an empty step. Garbage is collected after them: the loop's work."""
    found = seconds(empty_steps, run, CHUNK) / CHUNK * 1e6
    gc.collect()
    return found


def long_run(off: train.Run, folder: Path, steps: int) -> list[Figure]:
    run = with_monitor(off, folder / "old", log_interval=50)
    gc.collect()
    gc.freeze()
    gc.disable()  # as in training
    for i in range(steps // CHUNK):
        step_us(run)
        if i == steps // CHUNK // 5:
            early = rss_bytes() / 1e6
    late = rss_bytes() / 1e6
    new = with_monitor(off, folder / "new", log_interval=50)
    found = in_turns({"old": partial(step_us, run), "new": partial(step_us, new)},
                     steps // 10 // CHUNK)
    for each in (run, new):
        each.monitor.close()
    what = f"the monitor after {steps:,} steps: "
    return [
        compare(what + "time", "a new monitor", found["old"], found["new"], "{:.1f} us/step",
                "<= 1.05"),
        compare(what + "memory", "after a fifth of them", [late], [early], "{:.1f} MB", "<= 1.005")]


def main(options) -> list[Figure]:
    with (tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere,
          contextlib.redirect_stdout(nowhere)):  # a StringIO would keep every line of the log
        off = make_run(["--vocab_size", "257", "--no_compile"])
        return [*costs(off, Path(name), options.quick),
                *long_run(off, Path(name), 20_000 if options.quick else 1_000_000)]
