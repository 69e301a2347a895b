"""A million steps of an empty loop: does the monitor keep its speed and its size?

    python -m tests.bench million

A real Monitor (light, a log every 50 steps, metrics.jsonl and TensorBoard in a temporary
directory) with constant numbers and nothing to train. Prints for each tenth of the steps how long
one takes (over chunks of 1,000 steps: the median, and the fastest tenth of them, which other
processes on the machine disturb less), and the memory, the descriptors and the threads at its
end; then what a step of this monitor takes against one of a new monitor, in turns for a tenth of
the steps, and what closing takes.
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

from config import Config
from monitor import PHASES, Monitor, count_files, rss_bytes
from tests.bench.common import Figure, ratios

CHUNK = 1000


def chunk(monitor, first: int, loss, grad_norm) -> float:
    """Microseconds a step of CHUNK steps."""
    began = time.perf_counter()
    for step in range(first, first + CHUNK):
        for name in PHASES:
            monitor.phase(name)
        monitor.phase("other")
        monitor.step(step, 1e-3, loss, grad_norm, tokens=1000)
    return (time.perf_counter() - began) / CHUNK * 1e6


def open_files() -> int:
    """Without the one that TensorBoard's thread opens for a moment for each event."""
    counts = []
    for _ in range(5):
        time.sleep(0.01)
        counts.append(count_files())
    return min(counts)


def main(options) -> list[Figure]:
    steps = 20_000 if options.quick else 1_000_000

    cfg = Config(monitor="light", log_interval=50, max_steps=2 * steps, batch_size=10, seq_len=100)
    loss, grad_norm = torch.tensor(1.0), torch.tensor(1.0)
    print(f"{steps} steps, a log every {cfg.log_interval}\n")
    print("tenth   us/step: median   fastest tenth    RSS MB  files  threads")
    rows = []

    def new_monitor(folder: Path) -> Monitor:
        folder.mkdir()
        return Monitor(
            cfg, start_step=0, flops_per_token=10**6, peak=None, device=torch.device("cpu"),
            out_dir=folder, tensorboard_dir=folder / "tensorboard",
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name) / "old"
        monitor = new_monitor(folder)
        gc.disable()  # as train.train does
        for tenth in range(10):
            times = []
            for first in range(tenth * steps // 10 + 1, (tenth + 1) * steps // 10, CHUNK):
                with contextlib.redirect_stdout(null):
                    times.append(chunk(monitor, first, loss, grad_norm))
                gc.collect()  # every 1,000 steps, not timed: it belongs to the loop
                if first == 1:
                    gc.freeze()
            rows.append((statistics.median(times), np.percentile(times, 10), rss_bytes() / 1e6,
                         open_files(), len(os.listdir("/proc/self/task"))))  # fmt: skip
            print("{:5d} {:17.1f} {:15.1f} {:9.2f} {:6d} {:8d}".format(tenth + 1, *rows[-1]),
                  flush=True)  # fmt: skip
        new = new_monitor(Path(name) / "new")
        pairs = []
        for first in range(1, steps // 10, CHUNK):
            with contextlib.redirect_stdout(null):
                pairs.append((chunk(monitor, steps + first, loss, grad_norm),
                              chunk(new, first, loss, grad_norm)))  # fmt: skip
            gc.collect()
        size = (folder / "metrics.jsonl").stat().st_size / 1e6
        began = time.perf_counter()
        monitor.close()
        closing = time.perf_counter() - began
        new.close()
    _, _, rss, files, threads = zip(*rows, strict=True)
    print(f"\nRSS from the second tenth to the last {rss[-1] - rss[1]:+.2f} MB, descriptors "
          f"{'constant' if len(set(files)) == 1 else 'CHANGE'}, threads "
          f"{'constant' if len(set(threads)) == 1 else 'CHANGE'}")  # fmt: skip
    print(f"close(): {closing:.2f} s, RSS {rss_bytes() / 1e6 - rss[-1]:+.1f} MB, "
          f"for {size:.1f} MB of metrics.jsonl")  # fmt: skip
    old, young = zip(*pairs, strict=True)
    return [
        Figure(f"the monitor after {steps:,} steps: time", "a new monitor", ratios(old, young),
               "<= 1.05", f"{statistics.median(old):.1f} us a step",
               f"{statistics.median(young):.1f} us a step"),
        Figure(f"the monitor after {steps:,} steps: memory", "after a fifth of them",
               [rss[-1] / rss[1]], "<= 1.005", f"{rss[-1]:.1f} MB", f"{rss[1]:.1f} MB"),
    ]  # fmt: skip
