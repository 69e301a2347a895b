"""What a checkpoint costs: how long training stands still, against torch.save with fsync.

    python -m tests.bench checkpoints                        gpt2-124m with its optimizer's state
    python -m tests.bench checkpoints --model default

"stall" is the copy to host memory, all that the loop waits for; "while training" is the same in
steps of the model, where the write before is still under way or has just ended. Also: seconds a GB
of writing and of checking, and how many of 1,000 flipped bits are found.
"""

import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import checkpoint
import config
import train
from model import Transformer
from tests.bench.common import Figure, ratios, wait


def seconds(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def flips_found(folder: Path, count: int) -> int:
    path = folder / "small.pt"
    torch.manual_seed(0)
    checkpoint.write_checkpoint(path, {"model": {"w": torch.randn(100_000)}, "step": 1})
    content, dice, found = path.read_bytes(), random.Random(0), 0
    for _ in range(count):
        flipped = bytearray(content)
        flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        found += checkpoint.problem(path) is not None
    return found


def main(options) -> list[Figure]:
    rounds, flips = (1, 20) if options.quick else (5, 1000)
    name = "default" if options.quick else options.model
    device = train.pick_device("auto", 0)
    flags = ["--model", name, "--vocab_size", "50257", "--optimizer", "adamw"]
    cfg = config.resolve(config.parse(flags))
    model = Transformer(cfg).to(device)
    optimizers = train.make_optimizers(model, cfg, device)
    tokens = torch.randint(cfg.vocab_size, (1, 64), device=device)

    def step():
        model(tokens, tokens)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wait(device)

    def state():
        return dict(model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers])

    step()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writer = checkpoint.Writer(folder, 1)
        writer.save(0, state())  # allocates
        writer.wait()
        size = (folder / "step_00000000.pt").stat().st_size / 1e9

        def synchronous():
            with open(folder / "plain.pt", "wb") as file:
                torch.save(state(), file)
                file.flush()
                os.fsync(file.fileno())

        found = {name: [] for name in ("plain", "stall", "write", "check", "beside", "alone")}
        for i in range(1, rounds + 1):
            found["plain"].append(seconds(synchronous))
            found["stall"].append(seconds(lambda i=i: writer.save(2 * i, state())))
            found["write"].append(seconds(writer.wait))
            path = folder / f"step_{2 * i:08d}.pt"
            found["check"].append(seconds(lambda path=path: checkpoint.problem(path)))
            found["alone"].append(seconds(step))
            writer.save(2 * i + 1, state())
            found["beside"].append(seconds(step))
            writer.wait()
        middle = {name: np.median(values) for name, values in found.items()}
        print(f"written and verified   {middle['write']:.2f} s, {middle['write'] / size:.2f} s/GB")
        print(f"checked, every byte    {middle['check']:.2f} s, {middle['check'] / size:.2f} s/GB")
        alone, beside = middle["alone"], middle["beside"]
        print(f"a step of 64 tokens    {alone:.3f} s, {beside:.3f} s during a write")
        bits = flips_found(folder, flips)
    what = f"checkpoint of {name}, {size:.2f} GB"
    return [
        Figure(f"{what}: training waits", "torch.save and fsync",
               ratios(found["stall"], found["plain"]), "<= 0.1", f"{middle['stall']:.3f} s",
               f"{middle['plain']:.2f} s"),
        Figure(f"flipped bits found, of {flips:,}", "all", [bits / flips], ">= 1"),
    ]  # fmt: skip
