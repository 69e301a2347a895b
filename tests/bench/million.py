"""A million steps of an empty loop: does the monitor keep its speed and its size?

    python -m tests.bench million

A real monitor (light, a log every 50 steps, metrics.jsonl and TensorBoard in a temporary
directory) with constant numbers and nothing to train. Prints for each tenth of the steps how long
one takes (over chunks of 1,000 steps: the median, and the fastest tenth of them, which other
processes on the machine disturb less), and the memory, the descriptors and the threads at its
end; then what a step of this monitor takes against one of a new monitor, in turns for a tenth of
the steps, and what closing takes.
"""

import gc
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from steady.watch.proc import names, rss_bytes
from tests.bench.common import Figure, compare, in_turns, make_run, seconds, silence
from tests.bench.monitor_cost import FLAGS, empty_steps, with_monitor

CHUNK = 1000


def step_us(run) -> float:
    """Microseconds a step of CHUNK steps. Garbage is collected after them: the loop's work."""
    with silence():
        found = seconds(empty_steps, run, CHUNK) / CHUNK * 1e6
    gc.collect()
    return found


def open_files() -> int:
    """Without the one that TensorBoard's thread opens for a moment for each event."""
    counts = []
    for _ in range(5):
        time.sleep(0.01)
        counts.append(len(names("proc/self/fd")))
    return min(counts)


def main(options) -> list[Figure]:
    steps = 20_000 if options.quick else 1_000_000
    print(f"{steps} steps, a log every 50\n")
    print("tenth   us/step: median   fastest tenth    RSS MB  files  threads")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        off = make_run(FLAGS)
        with silence():
            run = with_monitor(off, folder / "old", log_interval=50)
        gc.collect()
        gc.freeze()
        gc.disable()  # as in training
        for tenth in range(10):
            times = [step_us(run) for _ in range(steps // 10 // CHUNK)]
            rows.append((statistics.median(times), np.percentile(times, 10), rss_bytes() / 1e6,
                         open_files(), len(os.listdir("/proc/self/task"))))
            print("{:5d} {:17.1f} {:15.1f} {:9.2f} {:6d} {:8d}".format(tenth + 1, *rows[-1]),
                  flush=True)
        with silence():
            new = with_monitor(off, folder / "new", log_interval=50)
        found = in_turns({"old": partial(step_us, run), "new": partial(step_us, new)},
                         steps // 10 // CHUNK)
        size = (folder / "old/metrics.jsonl").stat().st_size / 1e6
        closing = seconds(run.monitor.close)
        new.monitor.close()
    _, _, rss, files, threads = zip(*rows, strict=True)
    print(f"\nRSS from the second tenth to the last {rss[-1] - rss[1]:+.2f} MB, descriptors "
          f"{'constant' if len(set(files)) == 1 else 'CHANGE'}, threads "
          f"{'constant' if len(set(threads)) == 1 else 'CHANGE'}")
    print(f"close(): {closing:.2f} s, RSS {rss_bytes() / 1e6 - rss[-1]:+.1f} MB, "
          f"for {size:.1f} MB of metrics.jsonl")
    return [
        compare(f"the monitor after {steps:,} steps: time", "a new monitor", found["old"],
                found["new"], "{:.1f} us/step", "<= 1.05"),
        Figure(f"the monitor after {steps:,} steps: memory", "after a fifth of them",
               [rss[-1] / rss[1]], "<= 1.005", f"{rss[-1]:.1f} MB", f"{rss[1]:.1f} MB"),
    ]
