"""The benchmarks. Every figure is a ratio against a reference measured in turns with it.

    python -m tests.bench                       all in the table of docs/benchmarks.md
    python -m tests.bench training documents    these two
    python -m tests.bench --quick               all in a tiny size, to see that they work
    python -m tests.bench --record --nanogpt DIR --text FILE

The last, on a quiet machine and with nothing uncommitted, updates results/cpu.json and the table of
docs/benchmarks.md; the rows in the README are corrected by hand.

Each is a module of this folder with `main(options) -> [Figure]`, and runs in a process of its own.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from steady.checkpoints.run_dir import provenance
from steady.models.device import device_name, pick_device, pick_dtype
from tests.bench.common import Figure, table

NAMES = ["training", "small", "shakespeare", "monitor_cost", "checkpoints", "parallel", "documents",
         "slowdowns", "startup"]
ON_REQUEST = ["diagnosis", "constant", "resume", "referee", "gpu", "busy"]
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "tests/bench/results/cpu.json", ROOT / "docs/benchmarks.md"


def machine() -> dict:
    device, notes = pick_device("auto", 0), provenance()
    return {
        "date": notes["started"],
        "commit": notes["commit"],
        "device": device_name(device),
        "precision": str(pick_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}}


def publish(name: str, record: dict):
    """Replace the record of a benchmark in RESULTS, and the table in PAGE."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = record
    records = {each: known[each] for each in NAMES if each in known}
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    rows = [Figure(**figure).row() for each in records.values() for figure in each["figures"]]
    old = re.compile(r"\| what \| against \| ratio \| spread \| ours .*?(?=\n\n)", re.DOTALL)
    PAGE.write_text(old.sub(lambda _: table(rows), PAGE.read_text(), count=1))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench",
                                     description=__doc__.split("\n")[0])
    known = f"of {', '.join(NAMES)}; and, on request, {', '.join(ON_REQUEST)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that they work")
    parser.add_argument("--record", action="store_true", help="update the table of "
                        "docs/benchmarks.md and results/cpu.json")
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to compare with")
    parser.add_argument("--nanochat", metavar="DIR", help="a checkout of nanochat, for "
                        "`training` and `small`")
    parser.add_argument("--peers", metavar="DIR", help="virtual environments of other programs, "
                        "for `resume`")
    parser.add_argument("--text", metavar="FILE", help="tiny Shakespeare, for `shakespeare`")
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), default=1, help="of gpu")
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in NAMES + ON_REQUEST:
            parser.error(f"{name}: expected one {known}")
    if options.quick and options.record:
        parser.error("--record: expected no --quick, which measures nothing")
    names = options.names or NAMES
    if len(names) > 1:
        flags = [word for word in argv if word not in names]
        failed = [name for name in names if subprocess.run(
            [sys.executable, "-m", "tests.bench", name, *flags], cwd=ROOT).returncode]
        print(f"failed: {', '.join(failed) or 'none'}")
        return int(bool(failed))

    if options.quick:
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        torch.set_num_threads(1)  # two threads that spin take ten times as long
    name, began = names[0], time.perf_counter()
    print(f"--- {name}", flush=True)
    figures = importlib.import_module(f"tests.bench.{name}").main(options)
    took = round(time.perf_counter() - began)
    print(table([figure.row() for figure in figures]))
    print(f"{took} s")
    if options.record and name in NAMES:
        publish(name, {**machine(), "seconds": took, "figures": [asdict(f) for f in figures]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
