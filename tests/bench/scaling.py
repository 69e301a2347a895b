"""What the loop itself does more of when there are more ranks: rank 0 of up to 1,024.

    python -m tests.bench scaling

In a fake process group, which answers at once. How a real run grows is what `train.py --estimate`
computes.
"""

import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from steady.ranks import parallel
from tests.bench.common import Figure, apart, compare, in_turns, logged_step_ms, random_tokens


def pretend(world_size: int):
    """Be rank 0 of so many, all of which agree with it at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="1")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    def all_gather(table, value, group=None):
        for row in table:
            row.copy_(value)

    def reduce(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def distribute(*args, wrap=parallel.distribute):
        ddp = wrap(*args)
        ddp.register_comm_hook(None, reduce)
        return ddp

    parallel.distribute = distribute
    dist.all_gather = all_gather
    dist.new_group = lambda **options: dist.group.WORLD
    dist.broadcast_object_list = lambda box, src=0, group=None: None


def step_ms(flags: list[str], steps: int, world_size: int = 1) -> float:
    """What a run of train.py in this process logs."""
    if world_size > 1:
        pretend(world_size)
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**6, 257)
        return logged_step_ms([*flags, "--data", folder, "--max_steps", steps, "--no_tensorboard"])


def main(options) -> list[Figure]:
    flags, worlds = ["--vocab_size", "257", "--log_interval", "10"], (1, 8, 64, 1024)
    flags += ["--hang_seconds", "0"]  # a fake group has no store for notes
    worlds, rounds, steps = ((1, 1024), 1, 10) if options.quick else (worlds, 3, 30)
    found = in_turns({
        world: partial(apart, step_ms, [*flags, "--batch_size", str(24 * world)], steps, world)
        for world in worlds}, rounds)
    ms = {world: [each for each, _ in values] for world, values in found.items()}
    return [compare(f"a step of rank 0 of {world:,} (fake group)", "of one alone", ms[world], ms[1],
                    "{:.1f} ms", "<= 1.1") for world in worlds[1:]]
