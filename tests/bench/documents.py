"""Padding and real tokens per second of documents: all padded to seq_len, dynamic, grouped, packed.

    python -m tests.bench documents

The documents have log-normal lengths (a long tail: median 100 tokens, mean about 140, cut at
seq_len). Runs of a few steps alternate in one process; the ratio is of real tokens, without
padding, per second. Then what the loader alone hands out.
"""

import tempfile
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
from config import Config
from steady.tokens.files import TokenWriter
from tests.bench.common import Figure, compare, in_turns, seconds, train_log

SEQ_LEN, BATCH, MICRO = 512, 64, 16
KINDS = {  # flags, and the multiple that the length of rows is rounded up to
    "fixed": (["--group_window", "0"], SEQ_LEN),
    "dynamic": (["--group_window", "0"], 8),
    "grouped": ([], 8),
    "packed": (["--data_mode", "packed", "--batch_size", "20", "--micro_batch_size", "10"], 8),
}


def write_corpus(folder: Path, n: int):
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    writer = TokenWriter(folder / "train.bin", 257, tokenizer="bytes", end_of_text=256)
    for length in np.clip(rng.lognormal(4.6, 1.0, n), 4, 8000).astype(int):
        ids = np.append(rng.integers(97, 123, length), 256)
        writer.add(ids, np.array([len(ids)]), None, len(ids) - 1)
    writer.close()


def real_tokens_per_second(folder: Path, kind: str, quick: bool) -> float:
    """Of a run of the program itself, without its first steps."""
    flags, data.Mixture.ROUND = KINDS[kind]
    steps = 4 if quick else 10 if kind == "fixed" else 34
    rows = train_log(["--data", folder, "--data_mode", "documents", "--seq_len", SEQ_LEN,
                      "--batch_size", BATCH, "--micro_batch_size", MICRO, "--max_steps", steps,
                      "--log_interval", 1, "--no_tensorboard", *flags])
    rows = [row for row in rows if "train/loss" in row][2:]
    ms = sum(row["perf/step_ms"] for row in rows)
    return (rows[-1]["train/tokens"] - rows[0]["train/tokens"]) / ms * 1e3


def padding(mixture: data.Mixture, batch: int = BATCH, micro: int = MICRO) -> float:
    size = mixture.size(0, 192 * batch, micro)
    return 1 - size.real_tokens / size.tokens


def load_alone(folder: Path, kind: str) -> float:
    """Share of padding; prints what the loader hands out with no model behind it."""
    data.Mixture.ROUND = KINDS[kind][1]
    mixture = data.load_mixture([str(folder)], "train", SEQ_LEN, 0,
                                mode="packed" if kind == "packed" else "documents")
    if kind == "grouped":
        mixture.group_by_length(32, BATCH)
    found = padding(mixture, 20, 10) if kind == "packed" else padding(mixture)
    cfg = Config(batch_size=BATCH)
    batches = data.loader(mixture, cfg, 0, 200, MICRO, 0, 1, torch.device("cpu"), 0)
    took = seconds(deque, batches, 0)  # keeps none
    rate = mixture.size(0, 200 * BATCH, MICRO).real_tokens / took / 1e6
    lengths = {int(mixture.row_length(n)) for n in range(1, SEQ_LEN + 1)}
    print(f"{kind:8s} padding {found:6.1%}, loader {rate:.1f} M real tokens/s; at most "
          f"{len(lengths)} lengths of rows")
    return found


def main(options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "documents"
        write_corpus(folder, 20_000)
        rates = in_turns({kind: partial(real_tokens_per_second, folder, kind, options.quick)
                          for kind in KINDS}, 1 if options.quick else 3)
        print(f"{BATCH} documents a step in micro-batches of {MICRO}, seq_len {SEQ_LEN}; packed: "
              "20 rows in micro-batches of 10")
        padded = {kind: load_alone(folder, kind) for kind in KINDS}
    figures, reference = [], rates.pop("fixed")
    for kind, rate in rates.items():
        figure = compare(f"documents, {kind}: real tokens", "all padded to seq_len", rate,
                         reference, "{:.0f}/s")
        figure.ours += f", {padded[kind]:.1%} padding"
        figure.theirs += f", {padded['fixed']:.1%} padding"
        figures.append(figure)
    return figures
