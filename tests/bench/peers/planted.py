"""Plants a fault, once, in a program that trains; see tests/bench/peers/__main__.py."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT")
workers = int(plan["kind"] == "data worker hangs")
steps, read = [0], [0]


def begin():
    torch.set_num_threads(1)
    (folder / f"pid.{rank}").write_text(str(os.getpid()))


def once() -> bool:
    with contextlib.suppress(FileExistsError):
        with open(folder / "injected", "x") as file:
            file.write(f"{time.time():.3f}")
        return True
    return False


def now() -> bool:
    return rank == plan["rank"] and steps[0] == plan["step"] - 1


def around(model: torch.nn.Module):
    """Plant a sleep in its forward pass, or a skipped exchange."""
    def sleep(*args):
        if plan["kind"] == "sleep" and now() and once():
            time.sleep(10000)

    model.register_forward_pre_hook(sleep)
    ddp = torch.nn.parallel.DistributedDataParallel
    plain = ddp.forward

    def forward(self, *args, **kwargs):
        if plan["kind"] == "skip" and now() and once():
            with self.no_sync():
                return plain(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    ddp.forward = forward


def in_worker():
    read[0] += 1
    if workers and rank == plan["rank"] and read[0] == 4 * plan["step"] and once():
        time.sleep(10000)


def made(step: int):
    steps[0] = step
    if rank == 0:
        with open(folder / "steps", "a") as file:
            file.write(f"{time.time():.3f} {attempt} {step}\n")


def end(weights: dict):
    torch.save(weights, folder / "end.pt")
