"""The benchmarks. Every figure is a ratio against a reference measured in turns with it.

    python -m tests.bench                       all that is in docs/benchmarks.md
    python -m tests.bench training documents    those
    python -m tests.bench --quick               all in a tiny size, two at once: that they work
    python -m tests.bench --record --nanogpt DIR --text FILE

The last one, on a quiet machine and with nothing uncommitted, puts what it finds into
results/cpu.json and the table of docs/benchmarks.md; the rows in the README are corrected by hand.

Each is a module of this folder with `main(options) -> [Figure]`, and runs in a process of its own.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from steady.checkpoints.run_dir import provenance
from steady.models.device import device_name, pick_device, pick_dtype
from tests.bench.common import Figure, apart, measure, table

NAMES = ["training", "small", "shakespeare", "monitor_cost", "checkpoints", "parallel", "documents",
         "slowdowns", "startup"]
ON_REQUEST = ["operations", "compiler", "diagnosis", "constant", "gpu"]
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "tests/bench/results/cpu.json", ROOT / "docs/benchmarks.md"


def layout() -> str:
    """A digest of the names of the modules and of the folders of steady/."""
    found = [*ROOT.glob("*.py"), *(ROOT / "steady").glob("*/__init__.py")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def machine() -> dict:
    device, notes = pick_device("auto", 0), provenance()
    return {
        "date": notes["started"],
        "commit": notes["commit"],
        "layout": layout(),
        "device": device_name(device),
        "precision": str(pick_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    }


def rows(records: dict) -> list[list[str]]:
    return [Figure(**f).row() for record in records.values() for f in record["figures"]]


def merge(file: Path, records: dict) -> dict:
    """Replace those records in the file, and keep the others; returns all, in their order."""
    found = {**(json.loads(file.read_text()) if file.exists() else {}), **records}
    found = {name: found[name] for name in NAMES + ON_REQUEST if name in found}
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def publish(records: dict):
    """Put them into RESULTS, and the table of all that are there into PAGE."""
    text = table(rows(merge(RESULTS, records)))
    old = re.compile(r"\| what \| against \| ratio \| spread \| ours .*?(?=\n\n)", re.DOTALL)
    PAGE.write_text(old.sub(lambda _: text, PAGE.read_text(), count=1))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench",
                                     description=__doc__.split("\n")[0])
    known = f"of {', '.join(NAMES)}; and, on request, {', '.join(ON_REQUEST)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that they work")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and "
                        "versions, to this file, in the place of those of the same benchmarks")
    parser.add_argument("--record", action="store_true", help="put the figures into results/"
                        "cpu.json, and the table of all into docs/benchmarks.md")
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to stand beside")
    parser.add_argument("--text", metavar="FILE", help="tiny Shakespeare, for `shakespeare`")
    parser.add_argument("--model", default="gpt2-124m", help="of checkpoints")
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), default=1, help="of gpu")
    options = parser.parse_args(argv)
    options.notes = {}  # a benchmark's own, for the file; the lines of "in_short" are shown last
    for name in options.names:
        if name not in NAMES + ON_REQUEST:
            parser.error(f"{name}: expected one {known}")
    names = options.names or NAMES
    if options.quick:
        if options.record:
            parser.error("--record: expected no --quick, which measures nothing")
        os.environ["OMP_NUM_THREADS"] = "1"  # two threads that spin take ten times as long
        torch.set_num_threads(1)
        if "compiler" not in names:  # whose kernels nothing else asks for
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
    began, about, records = time.perf_counter(), machine(), {}

    def attempt(name: str) -> dict | None:
        print(f"--- {name}", flush=True)
        try:
            return measure(name, options) if len(names) == 1 else apart(measure, name, options)[0]
        except Exception:
            traceback.print_exc()

    with ThreadPoolExecutor(2 if options.quick else 1) as pool:
        each = map if len(names) == 1 else pool.map
        for name, found in zip(names, each(attempt, names), strict=True):
            if found:
                records[name] = {**about, "quick": options.quick, **found}
                if options.json:
                    merge(Path(options.json), {name: records[name]})
                if options.record:  # at once, in case a later one is interrupted
                    publish({name: records[name]})
    failed = [name for name in names if name not in records]
    print(table(rows(records)))
    took = ", ".join(f"{name} {record['seconds']}" for name, record in records.items())
    print(f"{time.perf_counter() - began:.0f} s: {took}"
          + (f"; failed: {', '.join(failed)}" if failed else ""))
    print("\n".join(options.notes.get("in_short", [])))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
