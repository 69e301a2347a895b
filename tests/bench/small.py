"""Milliseconds a step of a small model, whole programs: 4 layers, width 128, 12 x 64 tokens.

    python -m tests.bench small --nanogpt DIR

nanoGPT's CPU recipe for characters (from a checkout of yours) and train.py, on the same token file,
in turns: the median step as each logs it, with its batches, its logging and its optimizer. Then
train.py's loop against transformers' Qwen2 of that shape in a plain one, and Muon's share of a step
of the default model.
"""

import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.common import (
    Figure,
    apart,
    compare,
    in_turns,
    logged_step_ms,
    make_run,
    seconds,
    take_turns,
    train_steps,
)
from tests.bench.training import qwen2, steady

FLAGS = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "128", "--d_ff", "336",
         "--no_qk_norm", "--tie_embeddings", "--seq_len", "64", "--batch_size", "12",
         "--learning_rate", "1e-3"]
PEER = ["--device=cpu", "--compile=False", "--block_size=64", "--batch_size=12", "--n_layer=4",
        "--n_head=4", "--n_embd=128", "--dropout=0.0"]


def write_characters(text: str, folder: Path):
    """Each character an id: nine tenths to train.bin, the rest to val.bin, as nanoGPT does."""
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    folder.mkdir(parents=True, exist_ok=True)
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    meta = dict(vocab_size=len(characters), stoi={c: i for i, c in enumerate(characters)},
                itos=dict(enumerate(characters)))
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return len(characters)


def some_text(options) -> str:
    """The file of --text, or Python's own source."""
    if options.text:
        return Path(options.text).read_text()
    files = sorted(Path(tempfile.__file__).parent.glob("*.py"))
    return "".join(file.read_text(errors="replace") for file in files[:60])[:1_100_000]


def nanogpt(folder: Path, checkout: str, steps: int, *more: str) -> list[str]:
    """The command, to be run in folder, which holds data/shakespeare_char."""
    at = Path(checkout).resolve()
    if not (folder / "configurator.py").exists():  # read from where it is run
        (folder / "configurator.py").symlink_to(at / "configurator.py")
    return [sys.executable, str(at / "train.py"), str(at / "config/train_shakespeare_char.py"),
            *PEER, f"--max_iters={steps}", f"--lr_decay_iters={steps}", *more]


def muon_share(rounds: int, steps: int) -> Figure:
    run, spent, whole = make_run(["--vocab_size", "257"]), [], []
    plain = run.optimizers[0].step
    run.optimizers[0].step = lambda: spent.append(1e3 * seconds(plain))
    train_steps(run, 10)
    for _ in range(rounds):
        whole.append(1e3 * seconds(train_steps, run, steps) / steps)
    of_muon = [sum(spent[i : i + steps]) / steps for i in range(10, len(spent), steps)]
    return compare("the default model: Muon's step", "a whole step", of_muon, whole, "{:.2f} ms",
                   "<= 0.1")


def main(options) -> list[Figure]:
    rounds, steps, log = (1, 8, 2) if options.quick else (3, 150, 10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data/shakespeare_char"
        vocab_size = write_characters(some_text(options), data)
        flags = [*FLAGS, "--data", data, "--vocab_size", vocab_size, "--max_steps", steps,
                 "--log_interval", log]

        def ours(*more: str) -> float:
            return apart(logged_step_ms, [*flags, *more])[0]

        def theirs() -> float:
            done = subprocess.run(
                nanogpt(folder, options.nanogpt, steps, "--eval_interval=100000",
                        "--eval_iters=1", "--log_interval=1"),
                cwd=folder, check=True, capture_output=True, text=True)
            ms = [float(t) for t in re.findall(r"time ([\d.]+)ms", done.stdout)]
            return statistics.median(ms[5:])

        programs = {
            "adamw": partial(ours, "--optimizer", "adamw", "--no_compile"),
            "adamw, compiled": partial(ours, "--optimizer", "adamw", "--compile"),
            "muon": partial(ours, "--optimizer", "muon", "--no_compile"),
        }
        found = in_turns(programs | ({"nanogpt": theirs} if options.nanogpt else {}), rounds)
    what, reference = "4 layers, width 128, 12 x 64: ms/step, ", found.pop("nanogpt", None)
    aims = {"adamw": "<= 0.5", "adamw, compiled": "<= 0.4", "muon": ""}
    figures = [compare(what + kind, "nanoGPT", ms, reference, "{:.1f} ms", aims[kind])
               for kind, ms in found.items() if reference]
    flags = [*FLAGS, "--vocab_size", str(vocab_size), "--optimizer", "adamw", "--device", "cpu",
             "--precision", "fp32", "--no_compile"]
    loops = take_turns({"qwen2": (qwen2, flags), "ours": (steady, flags)}, rounds, steps, 5)
    ms = {name: [1e3 * s for s in values] for name, values in loops.items()}
    return [*figures, compare(what + "adamw", "transformers' Qwen2, plain loop", ms["ours"],
                              ms["qwen2"], "{:.1f} ms", "<= 0.75"),
            muon_share(rounds, steps)]
