"""Padding and real tokens a second of documents: all padded to seq_len, dynamic, grouped, packed.

    python -m tests.bench documents

The documents have log-normal lengths (a long tail: median 100 tokens, mean about 140, cut at
seq_len). Runs of a few steps alternate in one process; the ratio is of real
tokens, without padding, a second. Then what the loader alone hands out, the waste for other
windows, and what the loss of each dataset of a mixture costs.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import data
import train
from config import Config
from data import load_mixture
from prepare import TokenWriter
from tests.bench.common import Figure, ratios

SEQ_LEN, BATCH, MICRO, STEPS, ROUNDS = 512, 64, 16, 34, 3
KINDS = {  # flags, and the multiple that the length of rows is rounded up to
    "fixed": (["--group_window", "0"], SEQ_LEN),
    "dynamic": (["--group_window", "0"], 8),
    "grouped": ([], 8),
    "packed": (["--packing", "--batch_size", "20", "--micro_batch_size", "10"], 8),
}


def write_corpus(folder: Path, n: int):
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    writer = TokenWriter(folder / "train.bin", 257, tokenizer="bytes", end_of_text=256)
    for length in np.clip(rng.lognormal(4.6, 1.0, n), 4, 8000).astype(int):
        ids = np.append(rng.integers(97, 123, length), 256)
        writer.add(ids, np.array([len(ids)]), None, len(ids) - 1)
    writer.close()


def real_tokens_per_second(folder: Path, flags: list[str], steps: int) -> float:
    """Of a run of the program itself, without its first steps."""
    argv = ["--data", str(folder), "--data_mode", "documents", "--seq_len", str(SEQ_LEN),
            "--batch_size", str(BATCH), "--micro_batch_size", str(MICRO), "--max_steps", str(steps),
            "--log_interval", "1", "--save_interval", "0", "--eval_interval", "0",
            "--no_tensorboard", "--out_dir", str(folder / "run"), "--overwrite",
            *flags]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        assert train.command(argv) == 0
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row][2:]
    seconds = sum(row["perf/step_ms"] for row in rows) / 1e3
    return (rows[-1]["train/tokens"] - rows[0]["train/tokens"]) / seconds


def waste(found, steps: int, batch: int, micro: int) -> float:
    size = found.size(0, steps * batch, micro)
    return 1 - size.real_tokens / size.tokens


def dataset_loss_cost(folder: Path) -> list[float]:
    """Per cent of a step that the losses by dataset cost at log_interval 10, of pairs of runs."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        np.zeros(500_000, np.uint16).tofile(folder / name / "train.bin")
    sources = [str(folder / name / "train.bin") for name in ("a", "b")]
    costs = []
    for i in range(6):
        ms = {}
        for on in ((True, False), (False, True))[i % 2]:
            argv = ["--data", *sources, "--vocab_size", "257", "--max_steps", "60",
                    "--log_interval", "10", "--save_interval", "0", "--no_tensorboard",
                    "--out_dir", str(folder / "run"), "--overwrite",
                    f"--loss_by_dataset={on}"]  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                assert train.command(argv) == 0
            lines = (folder / "run/metrics.jsonl").read_text().splitlines()
            found = [json.loads(line).get("perf/step_ms_median") for line in lines]
            ms[on] = statistics.median(x for x in found if x)
        costs.append(100 * (ms[True] / ms[False] - 1))
    return costs


def dataset_loss_us() -> float:
    """us inside the addition of one micro-batch's losses by dataset."""
    totals, source = torch.zeros(2, 2), torch.arange(24) % 2
    batch = data.Batch(None, None, None, source)
    losses, counts = torch.rand(24, requires_grad=True) * 2, torch.full((24,), 64)
    began = time.perf_counter()
    for _ in range(2000):
        train.add_by_dataset(totals, batch, losses, counts)
    return (time.perf_counter() - began) / 2000 * 1e6


def main(options) -> list[Figure]:
    figures, rounds = [], 1 if options.quick else ROUNDS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "documents"
        write_corpus(folder, 20_000)
        rates, padded = {name: [] for name in KINDS}, {}
        for _ in range(rounds):
            for name, (more, multiple) in KINDS.items():
                data.Mixture.ROUND = multiple
                steps = 4 if options.quick else 10 if name == "fixed" else STEPS
                rates[name].append(real_tokens_per_second(folder, more, steps))
        print(f"{BATCH} documents a step in micro-batches of {MICRO}, seq_len {SEQ_LEN}; packed: "
              "20 rows in micro-batches of 10")  # fmt: skip
        for name, (_, multiple) in KINDS.items():
            data.Mixture.ROUND = multiple
            packing = name == "packed"
            found = load_mixture([str(folder)], "train", SEQ_LEN, 0, mode="documents",
                                 packing=packing)  # fmt: skip
            if name == "grouped":
                found.group_by_length(32, BATCH)
            padded[name] = waste(found, 192, *((20, 10) if packing else (BATCH, MICRO)))
            cfg = Config(batch_size=BATCH, seq_len=SEQ_LEN, max_steps=200)
            began, n = time.perf_counter(), 0
            for _ in data.loader(found, cfg, 0, MICRO, 0, 1, torch.device("cpu"), 0):
                n += 1
            seconds = time.perf_counter() - began
            loaded = found.size(0, 200 * BATCH, MICRO).real_tokens / seconds / 1e6
            shapes = {int(found.row_length(n)) for n in range(1, SEQ_LEN + 1)}
            print(f"{name:8s} padding {padded[name]:6.1%}, loader {loaded:.1f} M real tokens/s; "
                  f"at most {len(shapes)} lengths of rows")  # fmt: skip
            if name == "fixed":
                continue
            figures.append(Figure(
                f"documents, {name}: real tokens", "all padded to seq_len",
                ratios(rates[name], rates["fixed"]), "",
                f"{statistics.median(rates[name]):.0f}/s, {padded[name]:.1%} padding",
                f"{statistics.median(rates['fixed']):.0f}/s, {padded['fixed']:.1%} padding",
            ))  # fmt: skip
        print("grouped, padding by window in steps:", end="")
        for window in (0, 1, 4, 8, 16, 32, 64):
            found = load_mixture([str(folder)], "train", SEQ_LEN, 0, mode="documents")
            found.group_by_length(window, BATCH)
            print(f"  {window}: {waste(found, 192, BATCH, MICRO):.1%}", end="")
        print()
        costs = [0.0] if options.quick else dataset_loss_cost(Path(place))
        print(f"loss by dataset: {statistics.median(costs):+.2f} % of a step, paired "
              f"({min(costs):+.2f} to {max(costs):+.2f}); {dataset_loss_us():.0f} us inside "
              "for each micro-batch")  # fmt: skip
    return figures
