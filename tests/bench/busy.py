"""A step beside busy processes, and of two trainings that share a machine.

    python -m tests.bench busy

OpenMP's threads spin while they wait for one another, which takes cores from the threads they wait
for. train.py as it is (steady/guard/neighbours.py) is compared with itself without that, and with
one thread, in turns; the neighbours are there before a training starts, or come once it runs. A
machine with more than two cores gets the same number of neighbours for each two.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from steady.watch.history import read_rows
from tests.bench.common import Figure, compare, in_turns
from tests.bench.startup import TRAIN

SPINNING = """
import runpy, sys
from steady.guard import process
process.make_room = lambda: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SETTINGS = {"steady": ([], {}), "spinning": (["-c", SPINNING], {}),
            "one thread": ([], {"OMP_NUM_THREADS": "1"})}
SIZES = {"default": [], "default, compiled": ["--compile"]}
NEIGHBOURS = ["none", "1 before", "4 before", "1 later", "4 later", "a training"]
FLAGS = ["--max_steps", "100000", "--warmup_steps", "1", "--eval_interval", "0", "--log_interval",
         "1", "--save_interval", "0", "--no_tensorboard", "--monitoring", "off"]


def start(folder: Path, setting: tuple[list[str], dict], flags: list[str]) -> subprocess.Popen:
    before, env = setting
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
    command = [sys.executable, *before, str(TRAIN), *FLAGS, *flags, "--out_dir", str(folder)]
    return subprocess.Popen(command, env=kept | env, stdout=subprocess.DEVNULL, cwd=TRAIN.parent)


def step_ms(setting: tuple, flags: list[str], seconds: int, neighbours: str) -> float:
    """The median time of a step, once the neighbours are there."""
    number = int(neighbours[0]) if neighbours[0].isdigit() else 0
    number *= max(1, (os.cpu_count() or 2) // 2)
    processes = []
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "a", "metrics.jsonl")

        def rows() -> list[dict]:
            found = read_rows(file) if file.exists() else []
            return [row for _, row in found if "perf/step_ms" in row]

        def join():
            processes.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"])
                             for _ in range(number))

        try:
            if neighbours.endswith("before"):
                join()
                time.sleep(0.5)
            processes.append(start(Path(name, "a"), setting, flags))
            if neighbours == "a training":
                processes.append(start(Path(name, "b"), setting, flags))
            while len(rows()) < 5:
                time.sleep(0.1)
            if neighbours.endswith("later"):
                join()
            time.sleep(1)
            before = len(rows())
            time.sleep(seconds)
            while len(found := rows()[before:]) < 2:
                time.sleep(0.1)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return statistics.median(row["perf/step_ms"] for row in found)


def main(options) -> list[Figure]:
    figures, seconds = [], 1 if options.quick else 6
    for size, flags in SIZES.items():
        alone = None
        rounds = 2 if size == "default" and not options.quick else 1
        for neighbours in NEIGHBOURS if size == "default" else ("none", "4 before", "a training"):
            found = in_turns({name: partial(step_ms, setting, flags, seconds, neighbours)
                              for name, setting in SETTINGS.items()}, rounds)
            alone = alone or found
            what = f"{size}, neighbours: {neighbours}"
            aim = "<= 1.01" if neighbours == "none" else ""
            against = [("spinning", found["spinning"], aim)]
            if neighbours == "a training":
                against.append(("alone", alone["steady"], "<= 2.5"))
            elif neighbours != "none":
                against.append(("one thread", found["one thread"], "<= 1.3"))
            for name, theirs, aim in against:
                figures.append(compare(what, name, found["steady"], theirs, "{:.1f} ms", aim))
                print(" | ".join(figures[-1].row()), flush=True)
        if options.quick:
            break
    return figures
