"""Why training became slower: what TraceML and steady say of the same runs, which both watch.

    pip install traceml-ai
    python -m tests.bench.peers.watched [PLANT ...]

From step 301 of 600 on, something is planted in train.py. TraceML says what takes the time of a
run, and compares runs: here with the first one, in which nothing is planted.
"""

import contextlib
import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import train
from model import FeedForward
from steady import faults
from steady.report import report
from steady.tokens import write_tokens
from tests.bench.diagnosis import BATCH, FLAGS, FORWARD, after
from tools import commands

AT, STEPS = 300, 600
step, kept = 0, []
PLANTS = {  # name → (what is called, what is done after each call of it)
    "nothing": (*BATCH, lambda: None),
    "30 ms in the data loader": (*BATCH, lambda: time.sleep(0.03)),
    "15 ms in each of two layers": (FeedForward, "forward", lambda: time.sleep(0.015)),
    "30 ms in AdamW's step": (torch.optim.AdamW, "step", lambda: time.sleep(0.03)),
    "gc.collect() among 20,000 lists": (
        *FORWARD, lambda: (kept or kept.extend([] for _ in range(20_000)), gc.collect())),
    "16 MB kept in each step": (*BATCH, lambda: kept.append(b"x" * 16_000_000)),
    "4 busy processes": (*BATCH, lambda: kept or kept.extend(
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4))),
}


def watched(name: str):
    """Train in this process, which `traceml run` has started, as TraceML's quickstart says."""
    import traceml_ai as traceml

    def begin(*_):
        global step
        step += 1
        if step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    traceml.init(mode="auto")
    owner, function, plant = PLANTS[name]
    traced = contextlib.ExitStack()
    after(owner, function, lambda *_: plant() if step > AT else None)
    after(train, "seed_everything", begin)
    after(train, "make_monitor", lambda monitor, run: after(
        monitor, "phase", lambda _, phase: phase == "forward" and traced.enter_context(
            traceml.trace_step(run.model))))
    after(train, "update", lambda *_: traced.close())
    flags = [*FLAGS, "--max_steps", 10**6, "--memory_interval", 10, "--data", "."]
    code = faults.exit_code(commands.main, list(map(str, flags)))
    for process in kept:
        if isinstance(process, subprocess.Popen):
            process.kill()
    assert code == 128 + signal.SIGTERM, code


def main(names: list[str]):
    if not importlib.util.find_spec("traceml_ai"):
        sys.exit("TraceML is missing: pip install traceml-ai")
    text = "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60))
    traceml = [sys.executable, "-m", "traceml_ai.launcher.cli"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            place = Path(folder, name)
            place.mkdir()
            write_tokens(place / "train.bin", [text.encode()])
            for command in (["run", __file__, "--run-name", "run", "--args", name],
                            ["compare", f"../{names[0]}/logs/run/final_summary.json",
                             "logs/run/final_summary.json", "--output", "compare"]):
                done = subprocess.run([*traceml, *command], cwd=place, capture_output=True,
                                      text=True)
                print(f"--- {name}: traceml {command[0]}", *re.findall(
                    r"^\| +(.*?\w.*?) *\|$", done.stdout, re.M), sep="\n")
                if done.returncode:
                    print(done.stdout, done.stderr)
            print(f"--- {name}: steady", *report(place / "r")["verdict"], sep="\n", flush=True)


if __name__ == "__main__":
    if "TRACEML_SCRIPT_PATH" in os.environ:
        watched(sys.argv[1])
    else:
        main(sys.argv[1:] or list(PLANTS))
