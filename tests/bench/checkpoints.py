"""The cost of a checkpoint of gpt2-124m with its optimizer's state, against torch.save and fsync.

    python -m tests.bench checkpoints

"training waits" is the copy to host memory, all that the loop waits for. Then the time until the
file is written and verified, and that of the steps made until then.
"""

import os
import statistics
import tempfile
import threading
from pathlib import Path

import torch

from steady.checkpoints.state import save_checkpoint
from steady.checkpoints.writer import Writer
from steady.guard.neighbours import make_room
from tests.bench.common import Figure, compare, make_run, seconds, train_steps


def plain_save(run, path: Path):
    state = dict(model=run.model.state_dict(), optimizers=[o.state_dict() for o in run.optimizers])
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def main(options) -> list[Figure]:
    name, vocab_size, rounds = ("default", "512", 1) if options.quick else ("gpt2-124m", "50257", 5)
    run = make_run(["--model", name, "--vocab_size", vocab_size, "--optimizer", "adamw",
                    "--seq_len", "64", "--batch_size", "1"])
    threading.Thread(target=make_room, daemon=True).start()  # as in every command
    plain, stall, write, beside, alone = [], [], [], [], []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "plain.pt"
        run.dir.writer = Writer(Path(place), 1)
        train_steps(run)
        save_checkpoint(run)  # allocates the host memory
        run.dir.writer.wait()
        for _ in range(rounds):
            alone.append(seconds(train_steps, run))
            plain.append(seconds(plain_save, run, file))
            stall.append(seconds(save_checkpoint, run))
            write.append(seconds(run.dir.writer.wait))
            run.dir.saved = ()  # write it again
            save_checkpoint(run)
            steps = [seconds(train_steps, run)]
            while not run.dir.writer.writing.done():
                steps.append(seconds(train_steps, run))
            beside.append(statistics.mean(steps))
        what = f"checkpoint of {name}, {file.stat().st_size / 1e9:.2f} GB"
    return [
        compare(f"{what}: training waits", "torch.save and fsync", stall, plain, "{:.3f} s",
                "<= 0.1"),
        compare(f"{what}: written and verified", "torch.save and fsync", write, plain, "{:.2f} s"),
        compare("a step of 64 tokens during a write", "a step alone", beside, alone, "{:.3f} s")]
