"""ms/step of a small model, whole programs: 4 layers, width 128, 12 x 64 tokens.

    python -m tests.bench small --nanogpt DIR --nanochat DIR

nanoGPT's CPU recipe for characters and train.py, on the same token file, in turns: the median step
as each logs it, with its batches, its logging and its optimizer. The steps of transformers' Qwen2
and of nanochat as in `training`.
"""

import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from tests.bench.common import Figure, apart, compare, in_turns, logged_step_ms, take_turns
from tests.bench.training import nanochat, qwen2, steady

FLAGS = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "128", "--d_ff", "336",
         "--no_qk_norm", "--tie_embeddings", "--seq_len", "64", "--batch_size", "12",
         "--learning_rate", "1e-3"]
PEER = ["--device=cpu", "--compile=False", "--block_size=64", "--batch_size=12", "--n_layer=4",
        "--n_head=4", "--n_embd=128", "--dropout=0.0"]
KINDS = {  # our optimizer: (flags, aim)
    "adamw": (["--optimizer", "adamw", "--no_compile"], "<= 0.5"),
    "adamw, compiled": (["--optimizer", "adamw", "--compile"], "<= 0.4"),
    "muon": (["--optimizer", "muon", "--no_compile"], "")}


def write_characters(text: str, folder: Path) -> int:
    """Each character an id: nine tenths to train.bin, the rest to val.bin, as nanoGPT does."""
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    folder.mkdir(parents=True)
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
    text = "".join(file.read_text(errors="replace") for file in files[:60])
    return text[: 20_000 if options.quick else 1_100_000]


def nanogpt(folder: Path, checkout: str, steps: int, *more: str) -> list[str]:
    """The command, to be run in `folder`, which holds data/shakespeare_char."""
    at = Path(checkout).resolve()
    if not (folder / "configurator.py").exists():  # nanoGPT reads it from the working directory
        (folder / "configurator.py").symlink_to(at / "configurator.py")
    return [sys.executable, str(at / "train.py"), str(at / "config/train_shakespeare_char.py"),
            *PEER, f"--max_iters={steps}", f"--lr_decay_iters={steps}", *more]


def main(options) -> list[Figure]:
    rounds, steps, log = (1, 8, 2) if options.quick else (3, 150, 10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data/shakespeare_char"
        vocab_size = write_characters(some_text(options), data)
        flags = [*FLAGS, "--data", data, "--vocab_size", vocab_size, "--max_steps", steps,
                 "--log_interval", log]

        def ours(more: list[str]) -> float:
            return apart(logged_step_ms, [*flags, *more])[0]

        def theirs() -> float:
            command = nanogpt(folder, options.nanogpt, steps, "--eval_interval=100000",
                              "--eval_iters=1", "--log_interval=1")
            done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
            ms = [float(t) for t in re.findall(r"time ([\d.]+)ms", done.stdout)]
            return statistics.median(ms[5:])

        programs = {kind: partial(ours, more) for kind, (more, _) in KINDS.items()}
        if options.nanogpt:
            programs["nanogpt"] = theirs
        ms = in_turns(programs, rounds)
    shape = "4 layers, width 128, 12 x 64: ms/step"
    figures = [compare(f"{shape}, {kind}", "nanoGPT", ms[kind], ms["nanogpt"], "{:.1f} ms", aim)
               for kind, (_, aim) in KINDS.items() if options.nanogpt]
    peers = {"transformers' Qwen2": ("adamw", "<= 0.75", qwen2)}
    if options.nanochat:
        peers["nanochat"] = ("muon", "<= 0.87", nanochat, options.nanochat)
    hows = {} if options.quick else {"": "--no_compile", ", compiled": "--compile"}
    for (peer, (kind, aim, make, *more)), how in product(peers.items(), hows):
        flags = [*FLAGS, "--vocab_size", str(vocab_size), "--optimizer", kind, hows[how]]
        programs = {"ours": (steady, flags), peer: (make, flags, *more)}
        found = take_turns(programs, rounds, steps, warm_up=20)
        ms = {name: [1e3 * s for s in each] for name, each in found.items()}
        figures.append(compare(f"{shape}, {kind}{how}", peer, ms["ours"], ms[peer], "{:.1f} ms",
                               aim))
    return figures
