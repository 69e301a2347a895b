"""Milliseconds a step of a small model, whole programs: 4 layers, width 128, 12 x 64 tokens.

    python -m tests.bench small --nanogpt DIR

nanoGPT's CPU recipe for characters (from a checkout of yours) and train.py, on the same token file,
in turns: the median step as each logs it, with its batches, its logging and its optimizer. With
transformers' Qwen2 of that shape in a plain loop where there is no nanoGPT.
"""

import json
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import train
from tests.bench.common import Figure, make_run, ratios, take_turns, train_step
from tests.bench.startup import TRAIN

FLAGS = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "128", "--d_ff", "336",
         "--qk_norm", "false", "--seq_len", "64", "--batch_size", "12"]  # fmt: skip
PEER = ["--device=cpu", "--compile=False", "--block_size=64", "--batch_size=12", "--n_layer=4",
        "--n_head=4", "--n_embd=128", "--dropout=0.0"]  # fmt: skip


def write_characters(text: str, folder: Path):
    """Each character an id: nine tenths to train.bin, the rest to val.bin, as nanoGPT does."""
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    folder.mkdir(parents=True, exist_ok=True)
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    meta = dict(vocab_size=len(characters), stoi={c: i for i, c in enumerate(characters)},
                itos=dict(enumerate(characters)))  # fmt: skip
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
            *PEER, f"--max_iters={steps}", f"--lr_decay_iters={steps}", *more]  # fmt: skip


def plain_qwen2(vocab_size: int):
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = Qwen2Config(vocab_size=vocab_size, hidden_size=128, intermediate_size=336,
                        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
                        tie_word_embeddings=True)  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step():
        tokens = torch.randint(vocab_size, (12, 64))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(options) -> list[Figure]:
    rounds, steps = (1, 20) if options.quick else (5, 150)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data/shakespeare_char"
        vocab_size = write_characters(some_text(options), data)
        kinds = {"adamw": "--compile=false", "adamw, compiled": "--compile=true",
                 "muon": "--compile=false"}  # fmt: skip
        found = {name: [] for name in (*kinds, "nanogpt")}
        for _ in range(rounds):
            for kind, compiled in kinds.items():
                subprocess.run(
                    [sys.executable, TRAIN, *FLAGS, "--data", data, "--vocab_size", str(vocab_size),
                     "--optimizer", kind.split(",")[0], compiled, "--learning_rate", "1e-3",
                     "--max_steps", str(steps),
                     "--eval_interval", "0", "--save_interval", "0", "--out_dir", folder / "run",
                     "--overwrite", "--tie_embeddings", "true", "--log_interval", "10"],
                    check=True, stdout=subprocess.DEVNULL,
                )  # fmt: skip
                rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
                ms = [row["perf/step_ms_median"] for row in rows if "perf/step_ms_median" in row]
                found[kind].append(statistics.median(ms))
            if options.nanogpt:
                done = subprocess.run(
                    nanogpt(folder, options.nanogpt, steps, "--eval_interval=100000",
                            "--eval_iters=1", "--log_interval=1"),
                    cwd=folder, check=True, capture_output=True, text=True,
                )  # fmt: skip
                ms = [float(t) for t in re.findall(r"time ([\d.]+)ms", done.stdout)]
                found["nanogpt"].append(statistics.median(ms[5:]))
    what, figures = "4 layers, width 128, 12 x 64: ms a step, ", []
    for kind in kinds:
        ours = found[kind]
        if options.nanogpt:
            theirs = found["nanogpt"]
            figures.append(Figure(what + kind, "nanoGPT", ratios(ours, theirs),
                                  "<= 0.8" if kind == "adamw" else "",
                                  f"{statistics.median(ours):.1f} ms",
                                  f"{statistics.median(theirs):.1f} ms"))  # fmt: skip
    qwen2 = take_turns({"qwen2": (plain_qwen2, vocab_size), "ours": (steady, vocab_size)}, rounds,
                       10 if options.quick else 100, 5)  # fmt: skip
    figures.append(Figure(what + "adamw", "transformers' Qwen2, plain loop",
                          ratios(qwen2["ours"], qwen2["qwen2"]), "<= 1",
                          f"{statistics.median(qwen2['ours']) * 1e3:.1f} ms",
                          f"{statistics.median(qwen2['qwen2']) * 1e3:.1f} ms"))  # fmt: skip
    return figures


def steady(vocab_size: int):
    run = make_run([*FLAGS, "--vocab_size", str(vocab_size), "--optimizer", "adamw",
                    "--learning_rate", "1e-3", "--tie_embeddings", "true", "--device", "cpu",
                    "--precision", "fp32"])  # fmt: skip
    train.keep_freed_memory(run.device)
    return lambda: train_step(run, torch.randint(vocab_size, (12, 64)))
