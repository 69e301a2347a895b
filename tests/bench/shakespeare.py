"""Seconds to a validation loss of 1.8857 on the characters of Shakespeare, whole commands.

    python -m tests.bench shakespeare --text tinyshakespeare.txt --nanogpt DIR

1.8857 nats a character is what nanoGPT's README gives for its CPU recipe: 2,000 steps of 12 x 64.
Ours sees rows of 64 as well, from the same files, and is evaluated on all of val.bin.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.common import Figure, ratios
from tests.bench.small import nanogpt, some_text, write_characters
from tests.bench.startup import TRAIN

AIM = 1.8857  # nats a character
OURS = ["--n_layer", "1", "--batch_size", "16", "--max_steps", "360"]


def main(options) -> list[Figure]:
    rounds = 1 if options.quick else 2
    found, loss = {"ours": [], "nanogpt": []}, {"ours": [], "nanogpt": []}

    def run(name: str, command: list, pattern: str, folder: Path):
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        found[name].append(time.perf_counter() - began)
        loss[name].append(float(re.findall(pattern, done.stdout)[-1]))

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = folder / "data/shakespeare_char"
        vocab_size = write_characters(some_text(options), data)
        rows = (data / "val.bin").stat().st_size // 2 // 64
        for _ in range(rounds):
            quick = ["--max_steps", "5"] if options.quick else []
            run("ours", [sys.executable, TRAIN, *OURS, "--data", data, "--vocab_size",
                         str(vocab_size), "--eval_steps", str(rows // 16), *quick],
                r"validation loss ([\d.]+)", folder)  # fmt: skip
            if options.nanogpt:
                steps = 5 if options.quick else 2000
                run("nanogpt", nanogpt(folder, options.nanogpt, steps, "--eval_iters=20"),
                    r"val loss ([\d.]+)", folder)  # fmt: skip
    reached = f"{statistics.median(found['ours']):.1f} s to {statistics.median(loss['ours']):.4f}"
    figures = [Figure("characters of Shakespeare: validation loss", f"{AIM}",
                      [x / AIM for x in loss["ours"]], "<= 1", reached)]  # fmt: skip
    if options.nanogpt:
        theirs = f"{statistics.median(found['nanogpt']):.1f} s to "
        theirs += f"{statistics.median(loss['nanogpt']):.4f}"
        figures.append(Figure("characters of Shakespeare to 1.8857: whole command",
                              "nanoGPT's CPU recipe",
                              ratios(found["ours"], found["nanogpt"]), "<= 0.25", reached,
                              theirs))  # fmt: skip
    return figures
