"""Tokens per second of the data path against nanoGPT's way of making a batch, in one process.

    python -m tests.bench loading

Both read batches of 64 x 1,024 tokens from one file of 100 M tokens in the page cache and hand out
int64 inputs and targets. nanoGPT's way: a new memory map a batch, and 128 slices that are each
converted and stacked. Also prints loader processes against none.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import data
from config import Config
from tests.bench.common import Figure, ratios

B, T, BATCHES = 64, 1024, 100


def stacked_slices(path):
    """What nanoGPT's get_batch does."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(tokens) - T, (B,))
    x = torch.stack([torch.from_numpy((tokens[i : i + T]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((tokens[i + 1 : i + 1 + T]).astype(np.int64)) for i in ix])
    return x, y


def tokens_per_second(next_batch) -> float:
    began = time.perf_counter()
    for _ in range(BATCHES):
        next_batch()
    return B * T * BATCHES / (time.perf_counter() - began)


def main(options) -> list[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, 50257, 10**8, dtype=np.uint16).tofile(path)
        mixture = data.load_mixture([folder], "train", T, seed=0)
        cfg = Config(batch_size=B, seq_len=T, max_steps=10**9)
        kinds = {"nanoGPT's way": lambda: stacked_slices(path)}
        for workers in (0, 1, 2):
            batches = data.loader(mixture, cfg, 0, B, 0, 1, torch.device("cpu"), workers)
            next(batches)
            kinds[f"{workers} loader processes"] = lambda batches=batches: next(batches)
        rates = {name: [] for name in kinds}
        for _ in range(1 if options.quick else 7):
            for name, next_batch in kinds.items():
                rates[name].append(tokens_per_second(next_batch) / 1e6)
    reference = rates["nanoGPT's way"]
    return [
        Figure(f"batches of {B} x {T}, {name}", "nanoGPT's way", ratios(found, reference), "",
               f"{statistics.median(found):.0f} M tokens/s",
               f"{statistics.median(reference):.0f} M tokens/s")
        for name, found in rates.items() if found is not reference
    ]  # fmt: skip
