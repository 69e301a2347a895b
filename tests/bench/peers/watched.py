"""Why training became slower: what TraceML and steady say of the same runs, which both watch.

    pip install traceml-ai
    python -m tests.bench.peers.watched [PLANT ...]

From step 301 of 600 on, something is planted in train.py. Each run is compared with the first.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import train
from model import FeedForward
from steady.guard.process import exit_code
from steady.tokens.files import write_tokens
from steady.watch.report import report
from tests.conftest import TINY

AT, STEPS = 300, 600
FLAGS = [*TINY, "--n_layer", 2, "--d_model", 64, "--d_ff", 192, "--seq_len", 32, "--num_workers", 0,
         "--eval_interval", 0, "--save_interval", 0, "--no_tensorboard", "--log_interval", 10,
         "--out_dir", "r"]
PLANTS = {  # name → (a function, the seconds that each call of it takes longer)
    "nothing": (train.Mixture, "batch", 0.0),
    "30 ms in the data loader": (train.Mixture, "batch", 0.03),
    "15 ms in each of two layers": (FeedForward, "forward", 0.015),
    "30 ms in AdamW's step": (torch.optim.AdamW, "step", 0.03),
}


def after(owner, name: str, do):
    """Call do(result, *arguments) after each call of a function."""
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        result = plain(*args, **kwargs)
        do(result, *args)
        return result

    setattr(owner, name, call)


def watched(name: str):
    """Train in this process, which `traceml run` has started, as TraceML's quickstart says."""
    import traceml_ai as traceml

    traceml.init(mode="auto")
    owner, function, seconds = PLANTS[name]
    traced, steps = contextlib.ExitStack(), []
    after(train, "seed_everything", lambda *_: steps.append(None))
    if seconds:  # even sleep(0) may give the core to a neighbour
        after(owner, function, lambda *_: time.sleep(seconds) if len(steps) > AT else None)
    plain = train.train

    def trace(run, batches):
        after(run.monitor, "phase", lambda _, phase: phase == "forward" and traced.enter_context(
            traceml.trace_step(run.model)))
        plain(run, batches)

    train.train = trace
    after(train, "update", lambda *_: traced.close())
    flags = [*FLAGS, "--max_steps", STEPS, "--data", "."]
    assert exit_code(train.main, list(map(str, flags))) == 0


def main(names: list[str]):
    if not importlib.util.find_spec("traceml_ai"):
        sys.exit("TraceML is missing: pip install traceml-ai")
    text = "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60))
    summary = "logs/run/final_summary.json"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (place := Path(folder, name)).mkdir()
            write_tokens(place / "train.bin", [text.encode()])
            for command in (["run", __file__, "--run-name", "run", "--args", name],
                            ["compare", f"../{names[0]}/{summary}", summary]):
                argv = [sys.executable, "-m", "traceml_ai.launcher.cli", *command]
                done = subprocess.run(argv, cwd=place, stdout=subprocess.PIPE, text=True)
                print(f"--- {name}: traceml {command[0]}", *re.findall(
                    r"^\| +(.*?\w.*?) *\|$", done.stdout, re.M), sep="\n")
            print(f"--- {name}: steady", *report(place / "r")["verdict"], sep="\n", flush=True)


if __name__ == "__main__":
    if "TRACEML_SCRIPT_PATH" in os.environ:
        watched(sys.argv[1])
    else:
        main(sys.argv[1:] or list(PLANTS))
