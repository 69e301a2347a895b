"""How time, memory and communication grow with model, batch and world size.

Measured: runs of train.py, and rank 0 of 1 to 1,024 in a fake process group, which answers at once:
growth there is what this loop itself does more of when there are more ranks. Computed: what
`train.py --estimate` says. Prints the table of the README.
"""

import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import config
import train
from steady.ranks import parallel
from tests.bench.common import Figure, apart, compare, in_turns, logged_step_ms, random_tokens
from tools.estimate import estimate

BASE = ["--n_layer", "4", "--n_head", "8", "--n_kv_head", "8", "--seq_len", "128", "--vocab_size",
        "8000", "--optimizer", "adamw", "--log_interval", "5"]
WORLDS = (1, 8, 64, 1024)


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


def exact_mb(flags: list[str]) -> float:
    """Peak memory where each large tensor is mapped by itself and given back when it is freed."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    _, mb = apart(step_ms, flags, 5)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return mb


def need(flags: list[str], world_size: int, dtype: torch.dtype) -> dict:
    cfg = config.resolve(config.parse(flags))
    return estimate(cfg, world_size, dtype, train.make_optimizers)


def three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{float(f'{number:.3g}'):,.0f}"


def print_row(what, devices, batch, ms, gb, how, sent=""):
    print(f"| {what} | {devices:,} | {batch:,} | {three_digits(ms)} | {three_digits(gb)} | {sent} "
          f"| {how} |", flush=True)


def by_shape(quick: bool, steps: int) -> list[Figure]:
    figures, before = [], exact_mb([*BASE, "--d_model", "64", "--d_ff", "64", "--batch_size", "1"])
    shapes = [(width, 8) for width in (128, 256, 512, 1024)] + [(256, 16), (256, 32)]
    for width, batch in [(64, 8)] if quick else shapes:
        flags = [*BASE, "--d_model", str(width), "--d_ff", str(width * 8 // 3 // 32 * 32),
                 "--batch_size", str(batch)]
        ms, mb = apart(step_ms, flags, steps // 2)[0], exact_mb(flags) - before
        found = need(flags, 1, torch.float32)
        computed = sum(found["none"]["ddp"].values()) / 1e6
        what = f"4 layers of width {width}, 128 tokens, {found['parameters'] / 1e6:.1f} M"
        print_row(what, 1, batch, ms, mb / 1e3, "measured")
        if width in (64, 1024) or batch == 32:
            figures.append(compare(f"--estimate of memory, width {width}, batch {batch}",
                                   "peak of a run", [computed], [mb], "{:.0f} MB"))
    return figures


def by_world(quick: bool, steps: int) -> Figure:
    flags, worlds = ["--vocab_size", "257", "--log_interval", "10"], (1, 1024) if quick else WORLDS
    flags += ["--hang_seconds", "0"]  # a fake group has no store for notes
    found = in_turns({
        world: partial(apart, step_ms, [*flags, "--batch_size", str(24 * world)], steps, world)
        for world in worlds
    }, 1 if quick else 3)
    ms = {}
    for world, values in found.items():
        ms[world], mb = zip(*values, strict=True)
        print_row("the default model, rank 0 of a fake group", world, 24 * world,
                  statistics.median(ms[world]), statistics.median(mb) / 1e3, "measured")
    return compare("a step of rank 0 of 1,024 (fake group)", "of one alone", ms[1024], ms[1],
                   "{:.1f} ms", "<= 1.1")


def computed(quick: bool):
    models = [("gpt2-124m", "50257", "16", 16384, "ddp"), ("7b", "32000", "1", 1024, "zero3")]
    for model, vocab, micro, batch, way in models[: 1 if quick else None]:
        for world in WORLDS[: 1 if quick else None]:
            found = need(["--model", model, "--vocab_size", vocab, "--micro_batch_size", micro,
                          "--batch_size", str(batch), "--optimizer", "adamw"],
                         world, torch.bfloat16)
            print_row(f"{model}, bf16, {way}, micro-batch {micro}, 40 % of an H100", world, batch,
                      found["step_seconds"] * 1e3, sum(found["none"][way].values()) / 1e9,
                      "computed", three_digits(found["sent"][way] / 1e9))


def main(options) -> list[Figure]:
    steps = 10 if options.quick else 30
    print("| | devices | sequences a step | ms/step | GB a device | GB sent a step | |\n"
          "|---|---|---|---|---|---|---|")
    figures = by_shape(options.quick, steps)
    figures.append(by_world(options.quick, steps))
    computed(options.quick)
    return figures
