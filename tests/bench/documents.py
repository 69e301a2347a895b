"""Padding and real tokens per second of documents: all padded to seq_len, dynamic, grouped, packed.

    python -m tests.bench documents

Documents have log-normal lengths (a long tail: median 100 tokens, mean about 140, cut at seq_len).
Runs of a few steps alternate; the ratio is of real tokens, without padding, per second.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import data
from steady.tokens.files import TokenWriter
from tests.bench.common import Figure, compare, in_turns, train_log

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


def padding(folder: Path, kind: str) -> float:
    """Share of all tokens in 192 steps."""
    data.Mixture.ROUND = KINDS[kind][1]
    mixture = data.load_mixture([str(folder)], "train", SEQ_LEN, 0,
                                mode="packed" if kind == "packed" else "documents")
    if kind == "grouped":
        mixture.group_by_length(32, BATCH)
    batch, micro = (20, 10) if kind == "packed" else (BATCH, MICRO)
    size = mixture.size(0, 192 * batch, micro)
    return 1 - size.real_tokens / size.tokens


def main(options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "documents"
        write_corpus(folder, 20_000)
        rates = in_turns({kind: partial(real_tokens_per_second, folder, kind, options.quick)
                          for kind in KINDS}, 1 if options.quick else 3)
        padded = {kind: padding(folder, kind) for kind in KINDS}
    reference, figures = rates.pop("fixed"), []
    for kind, rate in rates.items():
        figure = compare(f"documents, {kind}: real tokens", "all padded to seq_len", rate,
                         reference, "{:.0f}/s")
        figure.ours += f", {padded[kind]:.1%} padding"
        figure.theirs += f", {padded['fixed']:.1%} padding"
        figures.append(figure)
    return figures
