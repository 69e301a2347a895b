"""How time, memory and communication grow with model, batch and world size.

Measured: runs of train.py, and rank 0 of 1 to 1,024 in a fake process group, which answers at once:
what grows there is what this loop itself does more of when there are more ranks. Computed: what
`train.py --estimate` says. Prints the table of the README.
"""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import config
import estimate
import train
from tests.bench.common import Figure, ratios

BASE = ["--n_layer", "4", "--n_head", "8", "--n_kv_head", "8", "--seq_len", "128", "--vocab_size",
        "8000", "--eval_interval", "0", "--save_interval", "0", "--no_tensorboard", "--optimizer",
        "adamw", "--log_interval", "5"]  # fmt: skip
WORLDS = (1, 8, 64, 1024)


def pretend(world_size: int):
    """Be rank 0 of so many, the others of which agree with it at once."""
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

    def distribute(*args):
        ddp = wrap(*args)
        ddp.register_comm_hook(None, reduce)
        return ddp

    wrap, train.distribute = train.distribute, distribute
    dist.all_gather = all_gather
    dist.new_group = lambda backend=None: dist.group.WORLD
    dist.broadcast_object_list = lambda box, src=0, group=None: None


def trial(flags: list[str], steps: int, world_size: int = 1) -> tuple[float, float]:
    """(median ms a step, MB that the process has at most) of a run of train.py in it."""
    if world_size > 1:
        pretend(world_size)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        np.random.default_rng(0).integers(0, 257, 10**6, dtype=np.uint16).tofile(
            Path(folder) / "train.bin"
        )
        train.sample = lambda run: ""
        code = train.command([*flags, "--data", f"{folder}/train.bin", "--max_steps", str(steps),
                              "--out_dir", f"{folder}/run"])  # fmt: skip
        assert code == 0
        rows = map(json.loads, Path(f"{folder}/run/metrics.jsonl").read_text().splitlines())
        ms = [row["perf/step_ms_median"] for row in rows if "perf/step_ms_median" in row]
    return statistics.median(ms[1:] or ms), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def apart(*args) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(trial, args)


def need(flags: list[str], world_size: int, dtype: torch.dtype) -> dict:
    cfg = config.resolve(config.parse(flags))
    return estimate.estimate(cfg, world_size, dtype, train.make_optimizers)


def three(number: float) -> str:
    """With three digits that count."""
    return f"{number:.3g}" if number < 100 else f"{float(f'{number:.3g}'):,.0f}"


def main(options) -> list[Figure]:
    steps, rounds, figures = (10, 1, []) if options.quick else (30, 3, [])
    lines = ["| | devices | sequences a step | ms a step | GB a device | GB sent a step | |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip

    def line(what, devices, batch, ms, gb, sent, how):
        lines.append(
            f"| {what} | {devices:,} | {batch:,} | {three(ms)} | {three(gb)} | {sent} | {how} |"
        )
        print(lines[-1], flush=True)

    shapes = [(width, 8) for width in (128, 256, 512, 1024)] + [(256, 16), (256, 32)]
    shapes, worlds = ([(64, 8)], (1, 1024)) if options.quick else (shapes, WORLDS)

    def exact(flags: list[str], steps: int) -> float:
        """MB where each large tensor is mapped by itself and given back when it is freed."""
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
        mb = apart(flags, steps)[1]
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        return mb

    before = exact([*BASE, "--d_model", "64", "--d_ff", "64", "--batch_size", "1"], 5)
    for width, batch in shapes:
        flags = [*BASE, "--d_model", str(width), "--d_ff", str(width * 8 // 3 // 32 * 32),
                 "--batch_size", str(batch)]  # fmt: skip
        ms, mb = apart(flags, steps // 2)[0], exact(flags, 5)
        found = need(flags, 1, torch.float32)
        computed = sum(found["none"]["ddp"].values()) / 1e6
        what = f"4 layers of width {width}, 128 tokens, {found['parameters'] / 1e6:.1f} M"
        line(what, 1, batch, ms, (mb - before) / 1e3, "", "measured")
        if width in (64, 1024) or batch == 32:
            figures.append(Figure(f"--estimate of memory, width {width}, batch {batch}",
                                  "peak of a run", [computed / (mb - before)], "",
                                  f"{computed:.0f} MB", f"{mb - before:.0f} MB"))  # fmt: skip

    flags = ["--eval_interval", "0", "--save_interval", "0", "--no_tensorboard", "--vocab_size",
             "257", "--log_interval", "10"]  # fmt: skip
    found = {world: [] for world in worlds}
    for _ in range(rounds):
        for world in worlds:
            found[world].append(apart([*flags, "--batch_size", str(24 * world)], steps, world))
    for world, values in found.items():
        ms, mb = (statistics.median(v) for v in zip(*values, strict=True))
        line("the default model, rank 0 of a fake group", world, 24 * world, ms, mb / 1e3, "",
             "measured")  # fmt: skip
    one, most = ([ms for ms, _ in found[world]] for world in (worlds[0], worlds[-1]))
    figures.append(Figure(f"a step of rank 0 of {worlds[-1]:,} (fake group)", "of one alone",
                          ratios(most, one), "<= 1.1", f"{statistics.median(most):.1f} ms",
                          f"{statistics.median(one):.1f} ms"))  # fmt: skip

    for model, vocab, micro, way in (("gpt2-124m", "50257", "16", "ddp"), ("7b", "32000", "1",
                                                                          "zero3")):  # fmt: skip
        for world in WORLDS[: 1 if options.quick else None]:
            if options.quick and model == "7b":
                continue
            batch = 16384 if model == "gpt2-124m" else 1024
            got = need(["--model", model, "--vocab_size", vocab, "--micro_batch_size", micro,
                        "--batch_size", str(batch), "--optimizer", "adamw"],
                       world, torch.bfloat16)  # fmt: skip
            line(f"{model}, bf16, {way}, micro-batch {micro}, 40 % of an H100", world, batch,
                 got["step_seconds"] * 1e3, sum(got["none"][way].values()) / 1e9,
                 three(got["sent"][way] / 1e9), "computed")  # fmt: skip
    return figures
