"""The benchmarks. Every figure is a ratio against a reference measured in turns with it.

    python -m tests.bench                       all of them: an hour of a quiet machine
    python -m tests.bench training loading      those
    python -m tests.bench --quick               all in a tiny size: that they work, not how fast

Each is a module of this folder with `main(options) -> [Figure]`, and runs in a process of its own.
"""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import torch
import transformers

import train
from tests.bench.common import Figure, picture, table

NAMES = ["training", "small", "shakespeare", "naive", "monitor_cost", "checkpoints", "loading",
         "resume", "preparation", "documents", "million", "slowdowns", "startup",
         "scaling"]  # fmt: skip
ON_REQUEST = ["crash", "gpu"]


def machine() -> dict:
    device = train.pick_device("auto", 0)
    about = train.provenance()
    return {
        "date": about["started"],
        "commit": about["commit"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else train.cpu_name(),
        "precision": str(train.pick_dtype("auto", device)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": about["python"],
        "torch": about["torch"],
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench",
                                     description=__doc__.split("\n")[0])  # fmt: skip
    known = f"of {', '.join(NAMES)}; and, on request, {', '.join(ON_REQUEST)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that they work")
    parser.add_argument(
        "--json",
        help="write the figures, with machine and versions, to this file, "
        "and a picture of them beside it",
    )
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to stand beside")
    parser.add_argument("--text", metavar="FILE", help="tiny Shakespeare, for `shakespeare`")
    parser.add_argument("--model", default="gpt2-124m", help="of checkpoints")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES + ON_REQUEST:
            parser.error(f"{name}: expected one {known}")
    began, about, figures, failed = time.perf_counter(), machine(), [], []
    names = options.names or NAMES
    if len(names) == 1:
        figures = importlib.import_module(f"tests.bench.{names[0]}").main(options)
    else:
        given = {"nanogpt": options.nanogpt, "text": options.text, "model": options.model}
        flags = [f"--{name}={value}" for name, value in given.items() if value]
        flags += ["--quick"] * options.quick
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            for name in names:
                print(f"--- {name}", flush=True)
                argv = [sys.executable, "-m", "tests.bench", name, *flags, "--json", str(file)]
                if subprocess.run(argv).returncode:
                    failed.append(name)
                else:
                    figures += [Figure(**f) for f in json.loads(file.read_text())["figures"]]
    if options.json:
        record = {**about, "quick": options.quick,
                  "figures": [dataclasses.asdict(f) for f in figures]}  # fmt: skip
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
        Path(options.json).with_suffix(".svg").write_text(picture(record))
    print(table([figure.row() for figure in figures]))
    print(f"{time.perf_counter() - began:.0f} s"
          + (f"; failed: {', '.join(failed)}" if failed else ""))  # fmt: skip
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
