"""The same faults in other programs: what they say, how soon, and whether they come back.

    pip install accelerate
    python -m tests.bench.peers [--times 3] [--program plain_ddp] [--rows FILE]

Under torchrun --max_restarts=2, two ranks, a checkpoint every 20 steps, and a process group that
times out after 60 s (defaults: 30 minutes for gloo, 10 for NCCL).
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
KINDS = ["sleep", "SIGSTOP", "SIGKILL", "data worker hangs", "skip"]
LIMIT = 240  # seconds after which it counts as hanging
BAD = re.compile(r"Error|error|failed|Timed out|timed out|timeout|closed by peer|exitcode|Signal")


def steps_of(folder: Path) -> list[list]:
    path = folder / "steps"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def run(program: str, kind: str, seed: int, folder: Path) -> dict:
    rng = random.Random(f"{kind} {seed}")
    plan = dict(kind=kind, rank=rng.randrange(2), step=rng.randrange(25, 110))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max_restarts=2", "--monitor_interval=0.1", HERE / f"{program}.py", folder,
               json.dumps(plan)]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    printed = []

    def read():
        for line in process.stdout:
            printed.append((time.time(), line.rstrip()))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    if kind in ("SIGSTOP", "SIGKILL"):
        while not (made := steps_of(folder)) or int(made[-1][2]) < plan["step"]:
            time.sleep(0.01)
        (folder / "injected").write_text(f"{time.time():.3f}")
        os.kill(int((folder / f"pid.{plan['rank']}").read_text()), getattr(signal, kind))
    try:
        code = process.wait(LIMIT + (60 if kind != "undisturbed" else 0))
    except subprocess.TimeoutExpired:
        code = "hangs"
        for each in [process.pid, *pids_of(folder)]:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                pass
    reader.join(5)
    row = dict(program=program, **plan, seed=seed, code=code)
    if kind == "undisturbed":
        return row
    injected = float((folder / "injected").read_text())
    said = [(t - injected, line) for t, line in printed if t > injected and BAD.search(line)]
    made = steps_of(folder)
    first = made[0][1]
    after = [each for each in made if each[1] != first]
    row |= dict(said=[f"{t:.1f} s: {line[:400]}" for t, line in said][:12],
                notice=round(said[0][0], 1) if said else None, back=bool(after))
    if after:
        row |= dict(until_next_step=round(float(after[0][0]) - injected, 1),
                    lost=max(int(s) for _, a, s in made if a == first) - int(after[0][2]) + 1)
    names = [folder.parent / f"{program} undisturbed" / "end.pt", folder / "end.pt"]
    if all(path.exists() for path in names):
        one, other = map(torch.load, names)
        row["largest"] = max((one[n].float() - other[n].float()).abs().max().item() for n in one)
        row["equal"] = row["largest"] == 0
    return row


def pids_of(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid.*")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--at_once", type=int, default=4)
    parser.add_argument("--program", choices=["hf_trainer", "plain_ddp"])
    parser.add_argument("--rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers") as name:
        folder = Path(name)

        def call(program, kind, seed):
            place = folder / (f"{program} {kind}" + f" {seed}" * (kind != "undisturbed"))
            place.mkdir()
            try:
                row = run(program, kind, seed, place)
            except Exception as e:
                row = dict(program=program, kind=kind, seed=seed, said=repr(e))
            print(json.dumps(row), flush=True)
            if options.rows:
                with open(options.rows, "a") as file:
                    file.write(json.dumps(row) + "\n")

        programs = [options.program] if options.program else ["hf_trainer", "plain_ddp"]
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(lambda p: call(p, "undisturbed", 0), programs))
            jobs = [(p, kind, n) for n in range(options.times) for kind in KINDS for p in programs]
            list(pool.map(lambda job: call(*job), jobs))


if __name__ == "__main__":
    main()
