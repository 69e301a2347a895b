"""Which optimizer a model that exists is fine-tuned with, and what an adapter loses.

    python -m tests.bench finetuning --text tinyshakespeare.txt

A model is pretrained on Python's own source with AdamW, as the models of others were, then tuned
on a text of another kind, each way at several learning rates. What counts is the lowest validation
loss on that text over the rates; the loss on Python's source afterwards shows what was forgotten.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.common import Figure
from tests.bench.small import some_text
from tests.bench.startup import TRAIN

RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2), "lora": (3e-3, 1e-2)}
FLAGS = {"adamw": ["--optimizer", "adamw"], "muon": ["--optimizer", "muon"],
         "lora": ["--lora_rank", "8"]}
SIZE = ["--seq_len", "64", "--batch_size", "24", "--learning_rate"]


def main(options) -> list[Figure]:
    steps, tuned = (5, 3) if options.quick else (600, 100)
    rounds, figures = 1 if options.quick else 2, []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def run(name: str, *flags) -> float:
            """The last validation loss."""
            command = [sys.executable, TRAIN, "--precision", "fp32", "--eval_steps", "16",
                       *flags]
            done = subprocess.run(list(map(str, command)), cwd=folder, check=True, text=True,
                                  capture_output=True)
            loss = float(re.findall(r"validation loss ([\d.]+)", done.stdout)[-1])
            print(f"{name}: {loss:.4f}", flush=True)
            return loss

        (folder / "text.txt").write_text(some_text(options))
        prepare = [sys.executable, TRAIN.with_name("data.py"), "text.txt", "--out", "text"]
        subprocess.run(prepare, cwd=folder, check=True, capture_output=True)
        base = run("pretrained", "--out_dir", "base", *SIZE, 3e-3, "--optimizer", "adamw",
                   "--max_steps", steps, "--eval_interval", steps)
        best = {way: [] for way in FLAGS}
        for seed in range(1, rounds + 1):
            for way, rates in RATES.items():
                found = {}
                for rate in rates:
                    name = f"{way} {rate:g}, seed {seed}"
                    loss = run(name, "--init_from", "base", "--data", "text", "--out_dir", name,
                               *SIZE, rate, *FLAGS[way], "--seed", seed, "--max_steps", tuned,
                               "--eval_interval", tuned)
                    found[rate] = loss, name
                loss, name = min(found.values())
                left = run(f"  {name}, on Python's source", "--eval_only", "--resume",
                           f"{name}/checkpoints/step_{tuned:08d}.pt", "--val_data", "stdlib")
                best[way].append((loss, left))
        for way in ("adamw", "lora"):
            shown = {}
            for key in (way, "muon"):
                loss, left = (statistics.mean(each) for each in zip(*best[key], strict=True))
                shown[key] = f"{loss:.4f}; source {base:.3f} -> {left:.3f}"
            ratios = [ours / muon for (ours, _), (muon, _) in
                      zip(best[way], best["muon"], strict=True)]
            figures.append(Figure(f"tuned with {way}: validation loss", "muon", ratios, "",
                                  shown[way], shown["muon"]))
    return figures
