"""What the monitor costs: its share of a step's time, by three methods, in one process.

    python -m tests.bench monitor_cost

"a step" compares blocks of steps with the monitor and without, side by side and in alternating
order: it sees everything, and the noise of the machine. "cost" is the time spent within the
monitor's calls in those same steps, "in an empty loop" the same with no training between the calls:
both see little noise, but not what the monitor's files cost other threads. Random tokens; real
metrics.jsonl and TensorBoard files in a temporary directory.
"""

import gc
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import train
from data import Size
from tests.bench.common import (
    Figure,
    compare,
    in_turns,
    make_run,
    seconds,
    silence,
    train_steps,
)

FLAGS = ["--vocab_size", "257"]
SETTINGS = {  # monitor, log_interval, the share of a step that it may cost
    "light, every 50": ("light", 50, "<= 0.002"),
    "light, every 1": ("light", 1, "<= 0.01"),
    "full, every 50": ("full", 50, "<= 0.005"),
}


def with_monitor(run: train.Run, folder: Path, **options) -> train.Run:
    """The run, with train.py's own monitor past its first log, whose files are in `folder`."""
    folder.mkdir(parents=True)
    batches, run = run.batches, replace(run, cfg=replace(run.cfg, **options))
    flops = train.flops_per_token(run.model, run.cfg, run.cfg.seq_len)
    run.batches = batches
    run.monitor = train.Monitor(run.cfg, run.ranks, run.progress, folder, flops)
    empty_steps(run, 1)  # opens TensorBoard
    return run


def time_calls(monitor):
    """From now on, keep in monitor.inside each step and the seconds that its calls take."""
    monitor.inside, spent = [], 0.0

    def timed(call):
        def wrapped(*args):
            nonlocal spent
            before, began = spent, time.perf_counter()
            result = call(*args)
            spent = before + time.perf_counter() - began  # calls inside this one count once
            return result

        return wrapped

    step = timed(monitor.step)

    def timed_step(number, *args):
        nonlocal spent
        anomalies = step(number, *args)
        monitor.inside.append((number, spent))
        spent = 0.0
        return anomalies

    for name in ("phase", "add_losses", "before_update", "after_update"):
        setattr(monitor, name, timed(getattr(monitor, name)))
    monitor.step = timed_step


def block(run: train.Run, steps: int) -> float:
    """Seconds a step of a block that ends at a multiple of 50, where both intervals log."""
    run.progress.step = -(-(run.progress.step + steps) // 50) * 50 - steps
    gc.collect()
    clock = getattr(run.monitor, "clock", None)
    if clock:
        clock.since = clock.step_began = time.perf_counter()  # before: not training
    return seconds(train_steps, run, steps) / steps


def empty_steps(run: train.Run, steps: int):
    """What the loop tells its monitor in so many steps, with no training between."""
    monitor, device, progress = run.monitor, run.ranks.device, run.progress
    batch = run.train_data.batch(0, run.ranks.micro_batch).to(device)
    losses, norm = torch.ones(1, 1, device=device), torch.ones((), device=device)
    size = Size(1000, 1000, 1000)
    for p in run.ranks.shards.parameters.values():
        p.grad = torch.zeros_like(p)
    for _ in range(steps):
        for name in ("data", "forward", "backward"):
            monitor.phase(name)
        monitor.add_losses(losses, batch, run.train_data)
        monitor.phase("optimizer")
        monitor.before_update(progress.step + 1)
        progress.step += 1
        monitor.phase("other")
        monitor.after_update(run.model, batch)
        monitor.step(progress.step, 0.0, norm, norm, size)
    run.model.zero_grad()


def cost_a_step(inside: list, interval: int) -> float:
    """Seconds a step in a run that logs every `interval` steps, from the two medians."""
    logs = [spent for step, spent in inside if step % interval == 0]
    others = [spent for step, spent in inside if step % interval] or [0.0]
    share = 1 / interval
    return share * statistics.median(logs) + (1 - share) * statistics.median(others)


def main(options) -> list[Figure]:
    steps, blocks, n_empty = (5, 2, 500) if options.quick else (50, 12, 2000)
    paired, inside, empty = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder, silence():
        off = make_run(FLAGS)
        train_steps(off, 3)
        for name, (mode, interval, _) in SETTINGS.items():
            run = with_monitor(off, Path(folder) / name, monitor=mode, log_interval=interval)
            time_calls(run.monitor)
            paired[name] = in_turns({"off": partial(block, off, steps),
                                     "on": partial(block, run, steps)}, blocks)
            inside[name], run.monitor.inside = run.monitor.inside, []
            empty_steps(run, n_empty)
            empty[name] = run.monitor.inside
            run.monitor.close()

    off_ms = [1e3 * seconds for found in paired.values() for seconds in found["off"]]
    step_ms = statistics.median(off_ms)
    print(f"default model, {off.cfg.batch_size} x {off.cfg.seq_len} tokens, "
          f"{off.ranks.device.type}, "
          f"{torch.get_num_threads()} threads: {step_ms:.4g} ms/step with no monitor "
          f"({min(off_ms):.4g} to {max(off_ms):.4g})")
    print(f"{blocks} pairs of blocks of {steps} steps for each setting")
    if steps < 50:
        print(f"The blocks end with a log: its share in the pairs is 50 / {steps} of a real one.")
    figures = []
    for name, (_, interval, aim) in SETTINGS.items():
        on, off = ([1e3 * seconds for seconds in paired[name][kind]] for kind in ("on", "off"))
        figures.append(compare(f"monitor, {name}: a step", "one without it", on, off, "{:.1f} ms"))
        logs = [spent for step, spent in empty[name] if step % interval == 0]
        for what, spent in (("cost", cost_a_step(inside[name], interval)),
                            ("cost in an empty loop", cost_a_step(empty[name], interval)),
                            ("one log", statistics.median(logs))):
            figures.append(Figure(f"monitor, {name}: {what}", "a default step without it",
                                  [spent * 1e3 / step_ms], aim if what == "cost" else "",
                                  f"{spent * 1e6:.0f} us", f"{step_ms:.1f} ms"))
    return figures
