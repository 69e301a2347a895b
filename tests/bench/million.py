"""A million steps of an empty loop: does the monitor keep its speed and its size?

    python tests/bench/million.py

A real Monitor (light, a log every 50 steps, metrics.jsonl and TensorBoard in a temporary
directory) with constant numbers and nothing to train. Prints for each tenth of the steps how long
one takes (over chunks of 1,000 steps: the median, and the fastest tenth of them, which other
processes on the machine disturb less), and the memory, the descriptors and the threads at its
end; then how the last tenth compares with the first, and what closing takes.
"""

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config import Config  # noqa: E402
from monitor import PHASES, Monitor, count_files, rss_bytes  # noqa: E402

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="a multiple of 10,000")
    parser.add_argument("--quick", action="store_true", help="50,000 steps")
    args = parser.parse_args()
    steps = 50_000 if args.quick else args.steps
    if steps % (10 * CHUNK):
        parser.error(f"--steps {steps}: expected a multiple of {10 * CHUNK}")

    cfg = Config(monitor="light", log_interval=50, max_steps=steps, batch_size=10, seq_len=100)
    loss, grad_norm = torch.tensor(1.0), torch.tensor(1.0)
    print(f"{steps} steps, a log every {cfg.log_interval}\n")
    print("tenth   us/step: median   fastest tenth    RSS MB  files  threads")
    rows = []
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as null:
        folder = Path(name)
        monitor = Monitor(
            cfg, start_step=0, flops_per_token=10**6, peak=None, device=torch.device("cpu"),
            out_dir=folder, tensorboard_dir=folder / "tensorboard",
        )  # fmt: skip
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
        size = (folder / "metrics.jsonl").stat().st_size / 1e6
        began = time.perf_counter()
        monitor.close()
        closing = time.perf_counter() - began
    us, fast, rss, files, threads = zip(*rows, strict=True)
    print(f"\nlast / first {us[-1] / us[0]:.3f}, of the fastest {fast[-1] / fast[0]:.3f} (aim: "
          f"within 5 %), RSS from the second tenth to "
          f"the last {rss[-1] - rss[1]:+.2f} MB (aim: 1 MB), descriptors "
          f"{'constant' if len(set(files)) == 1 else 'CHANGE'}, threads "
          f"{'constant' if len(set(threads)) == 1 else 'CHANGE'}")  # fmt: skip
    print(f"close(): {closing:.2f} s, RSS {rss_bytes() / 1e6 - rss[-1]:+.1f} MB, "
          f"for {size:.1f} MB of metrics.jsonl")  # fmt: skip


if __name__ == "__main__":
    main()
