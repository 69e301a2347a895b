"""Seconds to a validation loss of 1.8857 on the characters of Shakespeare, whole commands.

    python -m tests.bench shakespeare --text tinyshakespeare.txt --nanogpt DIR

1.8857 nats/character is the figure of nanoGPT's README for its CPU recipe: 2,000 steps of 12 x 64.
Ours sees rows of 64 as well, from the same files, and is evaluated on all of val.bin.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.common import Figure, compare, in_turns, seconds
from tests.bench.small import nanogpt, some_text, write_characters
from tests.bench.startup import TRAIN

AIM = 1.8857  # nats/character


def main(options) -> list[Figure]:
    losses = {"ours": [], "nanogpt": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = folder / "data/shakespeare_char"
        vocab_size = write_characters(some_text(options), data)
        rows = (data / "val.bin").stat().st_size // 2 // 64
        flags = ["--n_layer", 1, "--batch_size", 16, "--max_steps", 5 if options.quick else 320,
                 "--data", data, "--vocab_size", vocab_size, "--eval_steps", rows // 16]
        commands = {"ours": [sys.executable, TRAIN, *map(str, flags)]}
        if options.nanogpt:
            commands["nanogpt"] = nanogpt(folder, options.nanogpt, 5 if options.quick else 2000,
                                          "--eval_iters=20")

        def run(name: str):
            done = subprocess.run(commands[name], cwd=folder, check=True, capture_output=True,
                                  text=True)
            found = re.findall(r"(?:validation|val) loss ([\d.]+)", done.stdout)
            losses[name].append(float(found[-1]))

        took = in_turns({name: partial(seconds, run, name) for name in commands},
                        1 if options.quick else 2)
    reached = {name: f"{statistics.median(took[name]):.1f} s to "
                     f"{statistics.median(losses[name]):.4f}" for name in took}
    figures = [Figure("characters of Shakespeare: validation loss", f"{AIM}",
                      [loss / AIM for loss in losses["ours"]], "<= 1", reached["ours"])]
    if options.nanogpt:
        figure = compare("characters of Shakespeare to 1.8857: whole command",
                         "nanoGPT's CPU recipe", took["ours"], took["nanogpt"], "", "<= 0.25")
        figure.ours, figure.theirs = reached["ours"], reached["nanogpt"]
        figures.append(figure)
    return figures
