"""Seconds to continue a run, early and late in it, against starting it.

Starting is from the command to the first step; continuing, the same from a checkpoint, whose place
in the order of the samples is computed and not replayed: it takes as long after a million steps.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import torch

import checkpoint
from tests.bench.common import Figure, ratios
from tests.bench.startup import TRAIN, seconds_until


def main(options) -> list[Figure]:
    rounds = 1 if options.quick else 3
    flags = [sys.executable, str(TRAIN), "--max_steps", "2000000", "--eval_interval", "0"]
    found = {"start": [], "at step 3": [], "at step 1,000,000": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_until([*flags, "--save_interval", "3", "--log_interval", "1", "--out_dir", "early"],
                      " 7/2000000", name)  # fmt: skip
        early = folder / "early/checkpoints/step_00000003.pt"
        state = torch.load(early, weights_only=True)
        late = folder / "step_01000000.pt"
        state["step"], state["position"] = 10**6, state["position"] // 3 * 10**6
        checkpoint.write_checkpoint(late, state)
        flags += ["--save_interval", "0", "--log_interval", "1"]
        for _ in range(rounds):
            found["start"].append(seconds_until(flags, " 1/2000000", name))
            for at, path in (("at step 3", early), ("at step 1,000,000", late)):
                step = 4 if path is early else 10**6 + 1
                found[at].append(
                    seconds_until([*flags, "--resume", str(path)], f" {step}/2000000", name)
                )
    return [
        Figure(f"command to next step, continued {at}", "started anew",
               ratios(found[at], found["start"]), "", f"{statistics.median(found[at]):.2f} s",
               f"{statistics.median(found['start']):.2f} s")
        for at in list(found)[1:]
    ]  # fmt: skip
