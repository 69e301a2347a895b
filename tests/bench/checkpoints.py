"""What a checkpoint costs: how long training stands still, against torch.save with fsync.

    python -m tests.bench checkpoints                        gpt2-124m with its optimizer's state
    python -m tests.bench checkpoints --model default

"training waits" is the copy to host memory, all that the loop waits for. Then the time until the
file is written and verified, and a step that is made during a write.
"""

import os
import tempfile
from pathlib import Path

import torch

from steady.checkpoints.state import save_checkpoint
from steady.checkpoints.writer import Writer
from tests.bench.common import Figure, compare, make_run, seconds, train_steps


def main(options) -> list[Figure]:
    rounds = 1 if options.quick else 5
    name = "default" if options.quick else options.model
    vocab_size = "512" if options.quick else "50257"
    run = make_run(["--model", name, "--vocab_size", vocab_size, "--optimizer", "adamw",
                    "--seq_len", "64", "--batch_size", "1"])
    found = {name: [] for name in ("plain", "stall", "write", "beside", "alone")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run.dir.writer = Writer(folder, 1)

        def plain_save():
            state = dict(model=run.model.state_dict(),
                         optimizers=[o.state_dict() for o in run.optimizers])
            with open(folder / "plain.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        train_steps(run)
        save_checkpoint(run)  # allocates the host memory
        run.dir.writer.wait()
        for _ in range(rounds):
            found["alone"].append(seconds(train_steps, run))
            found["plain"].append(seconds(plain_save))
            found["stall"].append(seconds(save_checkpoint, run))
            found["write"].append(seconds(run.dir.writer.wait))
            run.dir.saved = ()  # so that it is written again
            save_checkpoint(run)
            found["beside"].append(seconds(train_steps, run))
            run.dir.writer.wait()
        size = (folder / "plain.pt").stat().st_size / 1e9
    what, plain = f"checkpoint of {name}, {size:.2f} GB", found["plain"]
    return [
        compare(f"{what}: training waits", "torch.save and fsync", found["stall"], plain,
                "{:.3f} s", "<= 0.1"),
        compare(f"{what}: written and verified", "torch.save and fsync", found["write"], plain,
                "{:.2f} s"),
        compare("a step of 64 tokens during a write", "a step alone", found["beside"],
                found["alone"], "{:.3f} s"),
    ]
