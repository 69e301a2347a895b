"""Seconds from the command to the first step's log line, against `import torch`, alternating.

python -m tests.bench startup
"""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.common import Figure, ratios

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def seconds_until(command: list[str], words: str, folder: str, end=signal.SIGKILL) -> float:
    """Until a line with `words` is printed, or the command ends where words is empty.

    What is still running then is sent the signal `end`, and waited for.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as process:  # fmt: skip
        for line in process.stdout:
            if words in line:
                break
        else:
            process.wait()
        found = time.perf_counter() - began
        process.send_signal(end)
    return found


def main(options) -> list[Figure]:
    first, ranks, imports = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(TRAIN), "--eval_interval", "0", "--save_interval", "0"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *run[1:]]
        for _ in range(2 if options.quick else 6):
            first.append(seconds_until(run, "step    1/", folder))
            # torchrun passes SIGTERM on; killed, it would leave the ranks to disturb what is next
            ranks.append(seconds_until(torchrun, "step    1/", folder, signal.SIGTERM))
            imports.append(seconds_until([sys.executable, "-c", "import torch"], "", folder))
    for found in (first, ranks, imports):
        del found[0]  # it makes the corpus and warms the disk
    return [
        Figure(f"command to first step, {what}", "import torch", ratios(found, imports), "<= 2",
               f"{statistics.median(found):.2f} s", f"{statistics.median(imports):.2f} s")
        for what, found in (("one process", first), ("torchrun, two", ranks))
    ]  # fmt: skip
