"""Slow from the first step: is it noticed, named, and is the promised gain there?

    python -m tests.bench constant                 some 60 pairs of runs: 25 minutes, quiet machine
    CONSTANT_RUNS=10:20 python -m ...              those with these numbers

Something avoidable is planted from the first step on: a line in a loop of somebody's own, or an
option of train.py. The advice is then applied: the real gain is the difference to a run without
the plant. Runs without any plant must get no advice. A run has one thread or two.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from steady.tokens.files import write_tokens
from steady.watch.history import History, read_rows
from steady.watch.slow import slow
from tests.bench.common import Figure
from tests.conftest import ROOT

STEPS, LOG = 300, 20
LOOP = '''import copy, gc, json, random, sys, time
import numpy as np
import torch
from torch import nn
from monitor import Monitor

torch.manual_seed(0)
width, rows = {width}, {rows}
model = nn.Sequential(nn.Embedding(256, width),
                      *[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                      nn.Linear(4 * width, width)) for _ in range(3)],
                      nn.Linear(width, 256))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens, notes = np.random.default_rng(0).integers(0, 256, 100_000), open("notes", "w")


def get_batch(planted):
    at = [random.randrange(len(tokens) - 65) for _ in range(rows)]
    x = torch.from_numpy(np.stack([tokens[i:i + 65] for i in at]))
    if planted:
        {data}
    return x[:, :-1], x[:, 1:]


def train(monitor, planted):
    for step in range(1, {steps} + 1):
        monitor.phase("data")
        x, y = get_batch(planted)
        monitor.phase("forward")
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        if planted:
            {forward}
        monitor.phase("backward")
        loss.backward()
        monitor.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        monitor.phase("other")
        if planted:
            {other}
        monitor.step(step, loss=loss, tokens=x.numel())
    monitor.close()


for i in range(3):  # in turns in one process: the machine changes from minute to minute
    train(Monitor(f"run{{i}}", log_interval={log}, last_step={steps}), planted=i != 1)
'''
LINES = [  # (where, what is planted; MS is its time)
    ("data", "time.sleep(MS / 1e3)"),
    ("data", "sorted(random.random() for _ in range(int(2000 * MS)))"),
    ("data", "json.loads(json.dumps(list(range(int(4000 * MS)))))"),
    ("data", "np.sort(np.random.random(int(12000 * MS)))"),
    ("data", "sum(i * i for i in range(int(14000 * MS)))"),
    ("forward", "time.sleep(MS / 1e3)"), ("forward", "gc.collect()"),
    ("forward", "copy.deepcopy(model.state_dict())"),
    ("forward", "np.sort(np.random.random(int(12000 * MS)))"),
    ("forward", "sum(i * i for i in range(int(14000 * MS)))"),
    ("other", "time.sleep(MS / 1e3)"), ("other", "gc.collect()"),
    ("other", "notes.write(json.dumps(model[-1].weight.tolist()))"),
    ("other", "torch.save(model.state_dict(), 'now.pt')"),
    ("other", "json.dumps(list(range(int(4000 * MS))))"),
    ("other", "sum(float(p.norm()) for p in model.parameters())")]
OPTIONS = [  # (flags of train.py, the same with the advice applied, the cause)
    ("--eval_interval 4 --eval_steps 2", "--eval_interval 8 --eval_steps 2", "evaluation"),
    ("--eval_interval 10 --eval_steps 4", "--eval_interval 20 --eval_steps 4", "evaluation"),
    ("--save_interval 1", "--save_interval 2", "checkpoint"),
    ("--save_interval 2", "--save_interval 4", "checkpoint")]
SHAPES = ((64, 8), (128, 8), (192, 16))  # (width, rows) of the loop: steps of 4 to 30 ms
TRAIN = ["--n_layer", "3", "--d_model", "128", "--d_ff", "384", "--n_head", "2", "--n_kv_head", "1",
         "--seq_len", "64", "--batch_size", "8", "--precision", "fp32", "--sample_interval", "0",
         "--no_tensorboard", "--warmup_steps", "2", "--max_steps", str(STEPS // 2),
         "--log_interval", str(LOG), "--out_dir", "run"]


def execute(folder: Path, command: list[str], threads: int):
    """Run a command in an empty folder."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, timeout=600)


def rows_in(run: Path) -> list[dict]:
    return [row for _, row in read_rows(run / "metrics.jsonl")]


def loop(shape: tuple, threads: int, where: str, line: str) -> list[list[dict]]:
    """Rows of a loop with this line at one place, without it, and with it again."""
    places = dict.fromkeys(("data", "forward", "other"), "pass") | {where: line}
    with tempfile.TemporaryDirectory() as folder:
        steps = STEPS // 3 if line == "gc.collect()" else STEPS  # it takes 0.2 s
        text = LOOP.format(width=shape[0], rows=shape[1], steps=steps, log=LOG, **places)
        (Path(folder) / "loop.py").write_text(text)
        execute(Path(folder), [sys.executable, "loop.py"], threads)
        return [rows_in(Path(folder) / f"run{i}") for i in range(3)]


def train(flags: str, better: str, threads: int) -> list[list[dict]]:
    """Rows of train.py with these flags, with the better ones, and with the first again."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write_tokens(data / "train.bin", [bytes(range(256)) * 400])
        write_tokens(data / "val.bin", [bytes(range(256)) * 40])
        command = [sys.executable, str(ROOT / "train.py"), *TRAIN, "--data", str(data),
                   "--save_interval", "0", "--eval_interval", "0", "--overwrite"]
        found = []
        for given in (flags, better, flags):
            execute(Path(folder), [*command, *given.split()], threads)
            found.append(rows_in(Path(folder) / "run"))
        return found


def step_ms(rows: list[dict]) -> float:
    """Wall time of a step, with all that is done between steps."""
    logs = [row for row in rows if row.get("perf/step_ms_median") and "perf/startup_s" not in row]
    outside = ("perf/logging_ms", "perf/evaluation_ms", "perf/checkpoint_ms")
    return statistics.median(row["perf/step_ms"] for row in logs) + statistics.mean(
        sum(row[name] for name in outside) for row in logs)


def cases() -> list[dict]:
    """All of them. runs: a function that makes the three runs of `loop` or `train`."""
    out = []
    for i in range(48):
        where, line = LINES[i % len(LINES)]
        shape, threads = SHAPES[i // len(LINES)], 1 + i % 2
        line = line.replace("MS", str((3, 6, 12)[i % 3]))
        cause = "gc" if line == "gc.collect()" else "line"
        out.append(dict(name=f"{where}: {line}", cause=cause, text=line, threads=threads,
                        runs=partial(loop, shape, threads, where, line)))
    for flags, better, cause in OPTIONS:
        for threads in (1, 2):
            out.append(dict(name=flags, cause=cause, text="", threads=threads,
                            runs=partial(train, flags, better, threads)))
    return out


def judge(case: dict, found, before: float, after: float) -> dict[str, bool]:
    """Between no gain worth a word, 10 %, and 15 %, both answers are right."""
    real = before - after
    if real < 0.1 * before:
        return {}
    out = {"noticed": bool(found)} if found or real > 0.15 * before else {}
    if found:
        first = found[0].parts[0]
        text = dict(first.values).get("source", "")
        same = re.sub(r"\s", "", text) == re.sub(r"\s", "", case["text"])[:120]
        out["named first"] = first.code == case["cause"] and (case["cause"] != "line" or same)
        out["gain within 1.5"] = real / 1.5 <= found[0].ms <= 1.5 * real
    return out


def main(options) -> list[Figure]:
    first, _, end = os.environ.get("CONSTANT_RUNS", "0:56").partition(":")
    numbers = range(int(first), min(56, int(end) if not options.quick else int(first) + 2))
    scores, healthy = [], []
    for number in numbers:
        case = cases()[number]
        rows, better, again = case["runs"]()
        found = slow(History(rows))
        before, after = (step_ms(rows) + step_ms(again)) / 2, step_ms(better)
        scores.append(judge(case, found, before, after))
        if number < 48:  # the last ones are still slow, only less so
            healthy.append(not slow(History(better)))
        print(f"{number} {case['name']} ({case['threads']} threads): {before:.1f} -> {after:.1f} "
              f"ms/step: {scores[-1]} {'' if healthy[-1:] != [False] else 'FALSE ADVICE'}",
              *found, sep="\n    ", flush=True)
    figures = [Figure("slow from the start: no advice without a plant", f"{len(healthy)} runs",
                      [sum(healthy) / max(1, len(healthy))], ">= 0.99")]
    for name, aim in (("noticed", 0.95), ("named first", 0.9), ("gain within 1.5", 0.8)):
        values = [score[name] for score in scores if name in score]
        if values:
            figures.append(Figure(f"slow from the start: {name}", f"{len(values)} runs",
                                  [sum(values) / len(values)], f">= {aim}"))
    return figures
