"""Seconds from the command to the first step, against `import torch`; and to continue a run.

    python -m tests.bench startup

A run that continues is started from a checkpoint, whose place in the order of the samples is
computed and not replayed: it takes as long after a million steps.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import Checkpoint, write_checkpoint
from tests.bench.common import Figure, compare, in_turns

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
FLAGS = [str(TRAIN), "--max_steps", "2000000", "--eval_interval", "0", "--log_interval", "1"]
ALONE = [sys.executable, *FLAGS]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *FLAGS]
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # few users set it


def seconds_until(command: list[str], words: str, folder: str, end=signal.SIGKILL) -> float:
    """Until a line with `words` is printed, or, with no words, the command ends.

    A process still running then gets the signal `end`.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, env=ENV) as process:
        for line in process.stdout:
            if words and words in line:
                break
        else:
            process.wait()
        found = time.perf_counter() - began
        process.send_signal(end)
    return found


def main(options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_until([*ALONE, "--save_interval", "3", "--out_dir", "early"], " 7/2000000", name)
        early = Checkpoint.named(folder / "early/checkpoints", 3).path
        late = Checkpoint.named(folder, 10**6).path
        state = torch.load(early, weights_only=True)
        state["step"], state["position"] = 10**6, state["position"] // 3 * 10**6
        write_checkpoint(late, state)

        def until(step: int, *more: str, command=ALONE, end=signal.SIGKILL) -> float:
            return seconds_until([*command, "--save_interval", "0", *more], f" {step}/2000000",
                                 name, end)

        found = in_turns({
            "import": partial(seconds_until, [sys.executable, "-c", "import torch"], "", name),
            "one process": partial(until, 1),
            # torchrun passes SIGTERM on; killed, it would leave its ranks running
            "torchrun, two": partial(until, 1, command=TORCHRUN, end=signal.SIGTERM),
            "resumed": partial(until, 10**6 + 1, "--resume", str(late)),
        }, 1 if options.quick else 5)
    figures = [compare(f"command to first step, {how}", "import torch", found[how],
                       found["import"], "{:.2f} s", aim)
               for how, aim in (("one process", "<= 2"), ("torchrun, two", "<= 2.2"))]
    return [*figures, compare("command to next step, continued at step 1,000,000", "started anew",
                              found["resumed"], found["one process"], "{:.2f} s")]
