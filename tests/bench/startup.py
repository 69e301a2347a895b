"""Seconds from the command to the first step's log line, against `import torch`, in turns.

python -m tests.bench startup
"""

import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.bench.common import Figure, compare, in_turns

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def seconds_until(command: list[str], words: str, folder: str, end=signal.SIGKILL) -> float:
    """Until a line with `words` is printed, or the command ends where words is empty.

    A process that is still running then is sent the signal `end`, and waited for.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            if words in line:
                break
        else:
            process.wait()
        found = time.perf_counter() - began
        process.send_signal(end)
    return found


def main(options) -> list[Figure]:
    run = [sys.executable, str(TRAIN), "--eval_interval", "0", "--save_interval", "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *run[1:]]
    with tempfile.TemporaryDirectory() as folder:
        first_step = partial(seconds_until, words="step    1/", folder=folder)
        found = in_turns({
            "one process": partial(first_step, run),
            # torchrun passes SIGTERM on; killed, it would leave its ranks running
            "torchrun, two": partial(first_step, torchrun, end=signal.SIGTERM),
            "import": lambda: seconds_until([sys.executable, "-c", "import torch"], "", folder),
        }, 2 if options.quick else 6)
    imports = found.pop("import")[1:]  # the first round makes the corpus and warms the disk
    return [compare(f"command to first step, {what}", "import torch", firsts[1:], imports,
                    "{:.2f} s", "<= 2") for what, firsts in found.items()]
