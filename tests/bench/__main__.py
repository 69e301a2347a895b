"""The benchmarks. Every figure is a ratio against a reference measured in turns with it.

    python -m tests.bench                       all of them: most of an hour of a quiet machine
    python -m tests.bench training documents    those
    python -m tests.bench --quick               all in a tiny size: that they work, not how fast

Each is a module of this folder with `main(options) -> [Figure]`, and runs in a process of its own.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from steady.checkpoints.run_dir import provenance
from steady.models.device import device_name, pick_device, pick_dtype
from tests.bench.common import Figure, table

NAMES = ["training", "small", "shakespeare", "monitor_cost", "checkpoints", "parallel", "documents",
         "slowdowns", "startup"]
ON_REQUEST = ["compiler", "diagnosis", "faults", "gpu"]


def machine() -> dict:
    device, notes = pick_device("auto", 0), provenance()
    return {
        "date": notes["started"],
        "commit": notes["commit"],
        "device": device_name(device),
        "precision": str(pick_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    }


def run_apart(names: list[str], flags: list[str]) -> tuple[list[Figure], list[str]]:
    """(figures, benchmarks that failed), each benchmark in a process of its own."""
    figures, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        for name in names:
            print(f"--- {name}", flush=True)
            argv = [sys.executable, "-m", "tests.bench", name, *flags, "--json", str(file)]
            if subprocess.run(argv).returncode:
                failed.append(name)
            else:
                figures += [Figure(**f) for f in json.loads(file.read_text())["figures"]]
    return figures, failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench",
                                     description=__doc__.split("\n")[0])
    known = f"of {', '.join(NAMES)}; and, on request, {', '.join(ON_REQUEST)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that they work")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and "
                        "versions, to this file")
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to stand beside")
    parser.add_argument("--text", metavar="FILE", help="tiny Shakespeare, for `shakespeare`")
    parser.add_argument("--model", default="gpt2-124m", help="of checkpoints")
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), default=1, help="of gpu")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--times", type=int, default=20, help="of each fault")
    faults.add_argument("--only", metavar="NAME", default="", help="a part of faults' names, as a "
                        "regular expression")
    faults.add_argument("--first", type=int, default=0, help="seed of the first")
    faults.add_argument("--at_once", type=int, default=3, help="runs")
    faults.add_argument("--rows", metavar="FILE", help="append a row for each run")
    options = parser.parse_args(argv)
    options.notes = {}  # a benchmark's own, for the file; the lines of "in_short" are shown last
    for name in options.names:
        if name not in NAMES + ON_REQUEST:
            parser.error(f"{name}: expected one {known}")
    if options.quick:  # beside other work, two threads that spin take ten times as long
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    began, about, failed = time.perf_counter(), machine(), []
    names = options.names or NAMES
    if len(names) == 1:
        figures = importlib.import_module(f"tests.bench.{names[0]}").main(options)
    else:
        passed_on = {"nanogpt": options.nanogpt, "text": options.text, "model": options.model}
        flags = [f"--{name}={value}" for name, value in passed_on.items() if value]
        figures, failed = run_apart(names, flags + ["--quick"] * options.quick)
    if options.json:
        record = {**about, **options.notes, "quick": options.quick,
                  "figures": [dataclasses.asdict(f) for f in figures]}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    print(table([figure.row() for figure in figures]))
    print(f"{time.perf_counter() - began:.0f} s"
          + (f"; failed: {', '.join(failed)}" if failed else ""))
    print("\n".join(options.notes.get("in_short", [])))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
