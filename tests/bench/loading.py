"""Tokens per second of the data path against nanoGPT's way of making a batch, in one process.

    python -m tests.bench loading

Both read batches of 64 x 1,024 tokens from one file of 100 M tokens in the page cache and hand out
int64 inputs and targets. nanoGPT's way: a new memory map a batch, and 128 slices that are each
converted and stacked. Loader processes are compared with none as well.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
from config import Config
from tests.bench.common import CPU, Figure, compare, in_turns, random_tokens, repeat, seconds

B, T, BATCHES = 64, 1024, 100


def stacked_slices(path):
    """As nanoGPT's get_batch."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(tokens) - T, (B,))
    x = torch.stack([torch.from_numpy((tokens[i : i + T]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((tokens[i + 1 : i + 1 + T]).astype(np.int64)) for i in ix])
    return x, y


def million_tokens_per_second(next_batch) -> float:
    return B * T * BATCHES / seconds(repeat(next_batch), BATCHES) / 1e6


def main(options) -> list[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        random_tokens(path, 10**8, 50257)
        mixture = data.load_mixture([folder], "train", T, seed=0)
        cfg = Config(batch_size=B, seq_len=T)
        ways = {"nanoGPT's way": partial(stacked_slices, path)}
        for workers in (0, 1, 2):
            batches = data.loader(mixture, cfg, 0, 10**9, B, 0, 1, CPU, workers)
            next(batches)
            ways[f"{workers} loader processes"] = partial(next, batches)
        rates = in_turns({name: partial(million_tokens_per_second, next_batch)
                          for name, next_batch in ways.items()}, 1 if options.quick else 7)
    reference = rates.pop("nanoGPT's way")
    return [compare(f"batches of {B} x {T}, {name}", "nanoGPT's way", rate, reference,
                    "{:.0f} M tokens/s") for name, rate in rates.items()]
