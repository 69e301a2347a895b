"""Seconds to continue a run, early and late in it, against starting it.

Starting is from the command to the first step; continuing, the same from a checkpoint, whose place
in the order of the samples is computed and not replayed: it takes as long after a million steps.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import Checkpoint
from steady.checkpoints.sealed import write_checkpoint
from tests.bench.common import Figure, compare, in_turns
from tests.bench.startup import TRAIN, seconds_until


def main(options) -> list[Figure]:
    flags = [sys.executable, str(TRAIN), "--max_steps", "2000000", "--eval_interval", "0",
             "--log_interval", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_until([*flags, "--save_interval", "3", "--out_dir", "early"], " 7/2000000", name)
        early = Checkpoint.named(folder / "early/checkpoints", 3).path
        state = torch.load(early, weights_only=True)
        late = Checkpoint.named(folder, 10**6).path
        state["step"], state["position"] = 10**6, state["position"] // 3 * 10**6
        write_checkpoint(late, state)

        def until_step(step: int, *more: str) -> float:
            return seconds_until([*flags, "--save_interval", "0", *more], f" {step}/2000000", name)

        found = in_turns({
            "start": partial(until_step, 1),
            "at step 3": partial(until_step, 4, "--resume", str(early)),
            "at step 1,000,000": partial(until_step, 10**6 + 1, "--resume", str(late)),
        }, 1 if options.quick else 3)
    start = found.pop("start")
    return [compare(f"command to next step, continued {at}", "started anew", continued, start,
                    "{:.2f} s") for at, continued in found.items()]
