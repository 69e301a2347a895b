"""Documents: text to tokens with data.py; padding and real tokens per second in training.

    python -m tests.bench documents

Text to tokens: the reference has all texts in memory and lets `encode_batch_fast` of `tokenizers`
use all cores; data.py reads JSON lines, tokenizes in processes, and writes ids, offsets, checksums.

Training: documents have log-normal lengths (a long tail: median 100 tokens, mean about 140, cut at
seq_len). Runs of a few steps alternate; the ratio is of real tokens, without padding, per second.
"""

import contextlib
import io
import json
import os
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import data
from steady.tokens.files import TokenWriter
from steady.tokens.tokenizers import load_tokenizer
from tests.bench.common import Figure, compare, in_turns, seconds, train_log
from tools.prepare import Options, prepare

SEQ_LEN, BATCH = 512, 64
KINDS = {  # flags, sequences a step and a micro-batch, padded to multiples of, grouped steps
    "fixed": ([], BATCH, 16, SEQ_LEN, 0),
    "dynamic": ([], BATCH, 16, 8, 0),
    "grouped": ([], BATCH, 16, 8, 32),
    "packed": (["--data_mode", "packed"], 20, 10, 8, 32)}


def text_to_tokens(folder: Path, size: int, rounds: int) -> Figure:
    """Of about `size` bytes of the standard library's source files."""
    texts, source = [], folder / "a.jsonl"
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if size > 0 and "site-packages" not in file.parts:
            texts.append(file.read_text(errors="ignore"))
            size -= len(texts[-1])
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = str(folder / "made/tokenizer")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"

    def ours():
        prepare([str(source)], Options(str(folder / "out"), tokenizer))

    def alone():
        for i in range(0, len(texts), 100):
            fast.encode_batch_fast(texts[i : i + 100], add_special_tokens=False)

    with contextlib.redirect_stderr(io.StringIO()):
        prepare([str(source)], Options(str(folder / "made"), train_tokenizer=4096))
        fast = load_tokenizer(tokenizer).backend_tokenizer
        mb = sum(len(text.encode()) for text in texts) / 1e6
        rates = in_turns({"ours": lambda: mb / seconds(ours),
                          "alone": lambda: mb / seconds(alone)}, rounds)
    return compare(f"text to tokens, {mb:.0f} MB", "tokenizers alone, all cores", rates["ours"],
                   rates["alone"], "{:.1f} MB/s", ">= 0.9")


def write_corpus(folder: Path, n: int):
    rng = np.random.default_rng(0)
    folder.mkdir()
    writer = TokenWriter(folder / "train.bin", 257, tokenizer="bytes", end_of_text=256)
    for length in np.clip(rng.lognormal(4.6, 1.0, n), 4, 8000).astype(int):
        ids = np.append(rng.integers(97, 123, length), 256)
        writer.add(ids, np.array([len(ids)]), None, len(ids) - 1)
    writer.close()


def real_tokens_per_second(folder: Path, kind: str, quick: bool) -> float:
    """Of a run of the program itself, without its first steps."""
    flags, batch, micro, data.Mixture.ROUND, data.Mixture.GROUP_STEPS = KINDS[kind]
    steps = 4 if quick else 10 if kind in ("fixed", "dynamic") else 34
    small = ["--n_layer", 1, "--d_model", 16, "--d_ff", 16] if quick else []
    rows = train_log(["--data", folder, "--data_mode", "documents", "--seq_len", SEQ_LEN,
                      "--batch_size", batch, "--micro_batch_size", micro, "--max_steps", steps,
                      "--log_interval", 1, "--no_tensorboard", *small, *flags])
    rows = [row for row in rows if "train/loss" in row][2:]
    ms = sum(row["perf/step_ms"] for row in rows)
    return (rows[-1]["train/tokens"] - rows[0]["train/tokens"]) / ms * 1e3


def padding(folder: Path, kind: str) -> float:
    """Share of all tokens in 192 steps."""
    _, batch, micro, data.Mixture.ROUND, _ = KINDS[kind]
    mixture = data.load_mixture([str(folder)], "train", SEQ_LEN, 0,
                                mode="packed" if kind == "packed" else "documents")
    if kind == "grouped":
        mixture.group_by_length(32, batch)
    n = 192 * batch
    computed = sum(mixture.batch(i, i + micro).tokens.numel() for i in range(0, n, micro))
    return 1 - mixture.count_tokens(0, n) / computed


def main(options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as place:
        size, rounds = (10**5, 1) if options.quick else (12 * 10**6, 3)
        figures = [text_to_tokens(Path(place), size, rounds)]
        folder = Path(place) / "documents"
        write_corpus(folder, 20_000)
        rates = in_turns({kind: partial(real_tokens_per_second, folder, kind, options.quick)
                          for kind in KINDS}, rounds)
        padded = {kind: f", {padding(folder, kind):.1%} padding" for kind in KINDS}
    for kind in list(KINDS)[1:]:
        figure = compare(f"documents, {kind}: real tokens", "all padded to seq_len", rates[kind],
                         rates["fixed"], "{:.0f}/s")
        figure.ours += padded[kind]
        figure.theirs += padded["fixed"]
        figures.append(figure)
    return figures
