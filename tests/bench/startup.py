"""Seconds from the command to the first step's log line, against `import torch`, alternating.

python -m tests.bench startup
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.common import Figure, ratios

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def seconds_until(command: list[str], words: str, folder: str) -> float:
    """Until a line with `words` is printed, or the command ends where words is empty."""
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as process:  # fmt: skip
        for line in process.stdout:
            if words in line:
                break
        else:
            process.wait()
        found = time.perf_counter() - began
        process.kill()
    return found


def main(options) -> list[Figure]:
    first, ranks, imports = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(TRAIN), "--eval_interval", "0", "--save_interval", "0"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *run[1:]]
        for _ in range(2 if options.quick else 6):
            first.append(seconds_until(run, "step    1/", folder))
            ranks.append(seconds_until(torchrun, "step    1/", folder))
            imports.append(seconds_until([sys.executable, "-c", "import torch"], "", folder))
    first, ranks, imports = (
        first[1:],
        ranks[1:],
        imports[1:],
    )  # the first makes the corpus and warms the disk
    return [
        Figure(f"command to first step, {what}", "import torch", ratios(found, imports), "<= 2",
               f"{statistics.median(found):.2f} s", f"{statistics.median(imports):.2f} s")
        for what, found in (("one process", first), ("torchrun, two", ranks))
    ]  # fmt: skip
