"""Why training became slower, on real runs in which something is planted: is it said, and rightly?

    python -m tests.bench diagnosis                  100 fresh runs: 40 minutes
    DIAGNOSIS_RUNS=30:60 python -m ...               those with these numbers
    DIAGNOSIS_LOG=all.jsonl.gz python -m ...         also keep their rows there

A plant begins at a random step of a run, before a random statement of train.py, model.py, data.py
or of a forked dataset, and adds 10 to 100 % to a step. A run has one thread,
two, or all; every other one a neighbour whose load comes and goes. What the machine does must have
cost 5 % to count as something to find. results/diagnosis.jsonl.gz has such rows, for the tests; of
an earlier program, which also planted in transformers' Qwen2, sorted, waited for a lock, and set a
CPU quota.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from steady.tokens.files import write_tokens
from steady.watch.history import History
from steady.watch.lines import parts_of
from steady.watch.slower import slowdown
from tests.bench.common import Figure
from tests.conftest import ROOT

LOG = 20
NEEDED = 8 * LOG  # steps after the plant: of runs that became so slow that they had fewer, the
# rest is judged, but not whether it is found
RESULTS = Path(__file__).parent / "results/diagnosis.jsonl.gz"
SCALES = {  # name → (steps, flags)
    "short": (900, ["--n_layer", 2, "--d_model", 64, "--d_ff", 192, "--seq_len", 32]),
    "medium": (400, ["--n_layer", 3, "--d_model", 128, "--d_ff", 384, "--seq_len", 64]),
    "long": (360, ["--n_layer", 4, "--d_model", 192, "--d_ff", 512, "--seq_len", 256])}
PLACES = ("train:train", "train:train", "train:update", "model:Attention.forward",
          "model:FeedForward.forward", "model:Block.forward", "model:Transformer.hidden",
          "steady.models.layers:LinearCrossEntropy.forward",
          "steady.models.layers:LinearCrossEntropy.backward",
          "data:Mixture.batch", "data:Samples.rows", "my_dataset:Mine.augment")
UNITS = ("sleep", "python", "product", "block", "grows", "gc")
MACHINE = {"2 busy processes": ["spin"] * 2, "4 busy processes": ["spin"] * 4,
           "memory bandwidth": ["copy"], "stops": ["stop"]}
MY_DATASET = '''from data import Batch, Mixture


class Mine(Mixture):
    def augment(self, tokens):
        copied = tokens.clone()
        again = copied.clone()
        return again

    def batch(self, start: int, stop: int) -> Batch:
        batch = super().batch(start, stop)
        return batch._replace(tokens=self.augment(batch.tokens))
'''


def draw(number: int) -> dict:
    """What run `number` is: always the same."""
    rng = random.Random(number)
    group = ("program", "program", "machine", "nothing", "program", "program", "nothing",
             "machine", "program", "other")[number % 10]
    scale = rng.choices(("short", "medium", "long"), (60, 38, 2))[0]
    steps, flags = SCALES[scale]
    spec = dict(number=number, group=group, kind="", place="", line=rng.random(), scale=scale,
                steps=steps, at=rng.randrange(steps // 2, steps * 2 // 3),
                size=0.1 ** rng.random(), threads=rng.choice((1, 2, 0)), workers=0, ranks=1,
                flags=[*map(str, flags)], wobbles=number % 2 == 1, seed=rng.random())
    if group == "program":
        spec |= dict(kind=rng.choice(UNITS), place=rng.choice(PLACES))
        if rng.random() < 0.1:
            spec |= dict(kind="backward", place="")
        elif spec["place"].startswith(("train", "data")) and rng.random() < 0.2:
            spec |= dict(workers=2, kind="sleep")
        elif spec["place"].startswith("train:") and rng.random() < 0.15:
            spec["flags"] += ["--compile"]
        if spec["kind"] == "grows":
            spec["size"] = 0.15 ** rng.random()
    elif group == "machine":
        spec["kind"] = rng.choice([*MACHINE])
    elif group == "other":
        spec["kind"] = rng.choice(("thread", "numpy thread", "slow rank"))
    if spec["kind"] == "slow rank":
        spec |= dict(ranks=2, place="model:FeedForward.forward", slow_rank=True, threads=1)
        spec["size"] = max(0.3, spec["size"])
    return spec


def neighbour(how: str, spec: dict, pids: list[int]) -> int:
    """A process that disturbs the machine, or the processes `pids`, until it is killed."""
    parent = os.getpid()
    if helper := os.fork():
        return helper
    with contextlib.suppress(BaseException):
        os.setsid()
        rng, arrays = random.Random(spec["seed"]), np.ones((2, 1 << 22))
        while os.getppid() == parent:
            if how == "stop":
                for number, pause in ((signal.SIGSTOP, 1), (signal.SIGCONT, 2)):
                    for pid in pids:
                        os.kill(pid, number)
                    time.sleep(pause * (0.005 + 0.02 * spec["size"]))
            elif how == "copy":
                np.copyto(*arrays)
            elif how == "come and go" and rng.random() < 0.001:  # after 2 s on average
                time.sleep(rng.uniform(0.5, 3))
            else:
                for _ in range(100):  # 2 ms
                    sum(i * i for i in range(300))
    os._exit(0)


def carry_out(spec: dict, folder: Path, data: Path) -> dict:
    """Make this run in an empty folder; returns spec with what it really was."""
    flags = ["--n_head", 2, "--n_kv_head", 1, "--batch_size", 8, "--warmup_steps", 2,
             "--precision", "fp32", *spec["flags"], "--num_workers", spec["workers"],
             "--eval_interval", 0, "--save_interval", 0, "--sample_interval", 0, "--log_interval",
             LOG, "--no_tensorboard", "--out_dir", "r", "--data", data, "--max_steps",
             spec["steps"]]
    (folder / "my_dataset.py").write_text(MY_DATASET)
    clock = np.memmap(folder / "clock", np.float64, "w+", shape=(spec["steps"] + 2,))
    program = str(ROOT / "tests/bench/planted.py")
    command = [sys.executable, "-c", f"exec(compile(open({program!r}).read(), '<plant>', 'exec'))"]
    if spec["ranks"] > 1:
        command = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node",
                   str(spec["ranks"]), "--no-python", *command]
    told = spec | dict(root=str(ROOT), flags=[*map(str, flags)])
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if spec["threads"]:
        env["OMP_NUM_THREADS"] = str(spec["threads"])
    helpers = []
    with open(folder / "log", "w") as log:
        run = subprocess.Popen([*command, json.dumps(told)], cwd=folder, env=env, stdout=log,
                               stderr=log)
    try:
        if spec["wobbles"]:
            helpers.append(neighbour("come and go", spec, []))
        while spec["group"] == "machine" and not clock[spec["at"]] and run.poll() is None:
            time.sleep(0.005)
        if spec["group"] == "machine":
            helpers += [neighbour(how, spec, [run.pid]) for how in MACHINE[spec["kind"]]]
        code = run.wait(1200)
    finally:
        run.kill()
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
    assert code in (0, 128 + signal.SIGTERM), (spec, (folder / "log").read_text()[-3000:])
    ms = np.diff(clock[1 : spec["steps"]][clock[1 : spec["steps"]] > 0]) * 1e3
    old, new = ms[max(50, spec["at"] - 200) : spec["at"] - 1], ms[spec["at"] :]
    line = folder / "line.json"
    return spec | dict(
        effect=float(np.median(new) / np.median(old)) - 1, made=len(new),
        effect_mean=float(new.mean() / old.mean()) - 1, step_ms=float(np.median(old)),
        line=json.loads(line.read_text()) if line.exists() else None)


def score(o: dict, events) -> dict:
    """What is judged of a run, by name: whether it is right."""
    began, group = o["at"] + 1, o["group"]
    creeps = o["kind"] == "grows"
    slow = group == "program" or o["kind"] not in ("", "backward") and o["effect_mean"] >= 0.05
    out, lines = {}, [part for e in events for part in e.parts if part.code == "line"]

    def near(e):
        return abs(e.since - began) <= 5 * LOG

    def is_planted(line) -> bool:
        if not o["line"]:
            return o["kind"] == "backward" and dict(line.values)["phase"] == "backward"
        file, first, last, function = o["line"]
        place, of, _ = parts_of(line.line)
        name, _, number = place.rpartition(":")
        same = (file.endswith(name) or name.endswith(file)) and of.endswith(function)
        return same and first <= int(number) <= last + 1

    found = [e for e in events if near(e) or creeps and e.since > began - LOG]
    # a neighbour may come at the same time, and be named as well
    event = max(found, key=lambda e: (e.side == group, e.ms / e.of), default=None)
    if slow and o["made"] >= NEEDED:
        out["found"] = bool(found)
        if not creeps and events:
            out["since"] = event is not None and abs(event.since - began) <= 3 * LOG
    in_data = o["place"].startswith(("data", "my_"))
    waits = o["workers"] and in_data
    if event and group == "program":
        first, code = [part for part in event.parts[:1] if part.code == "line"], event.cause
        out["named"] = (bool(first) and is_planted(first[0]) or waits and code == "data"
                        or o["kind"] == "gc" and code == "gc")
        out["blame"] = event.side == "program"
    if event and group == "machine":
        out["blame"] = event.side == "machine"
    if event and group == "other":
        out["named"] = event.cause.startswith("slow rank" if o["kind"] == "slow rank" else "thread")
    if group in ("machine", "nothing"):
        out["not the program"] = all(e.side != "program" for e in events)
    if group == "nothing" and not o["wobbles"]:
        out["quiet"] = not events
    out["no wrong line"] = all(map(is_planted, lines))
    known = {"gc": {"gc"}, "slow rank": {"slow rank", "network"}, "thread": {"thread"},
             "numpy thread": {"thread", "contention"}, "stops": {"stopped"}, "quota": {"quota"}}
    fits = {"line", "unexplained", *known.get(o["kind"], ()), *["data"] * in_data}
    if o["group"] == "machine" or o["wobbles"]:
        fits |= {"probe", "contention", "stolen"}
    out["no wrong cause"] = {e.cause for e in events if e.cause} <= fits
    return out


JUDGED = ("found", "since", "named", "blame", "not the program", "quiet", "no wrong line",
          "no wrong cause")


def diagnosed(rows: list[dict]) -> list:
    """The slow-downs of steps that a report would name."""
    return [found for found in slowdown(History(rows)) if found.phase == "step"]


NOT_NEEDED = ("perf/tokens_per_second", "perf/data_fraction", "perf/compute_fraction",
              "perf/step_ms_p95", "perf/mfu")


def compact(rows: list[dict]) -> list[dict]:
    """What a diagnosis needs of the rows of metrics.jsonl, to four digits."""
    return [{k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()
             if k in ("step", "profile", "busiest_thread")
             or k.startswith(("perf/", "machine/")) and k not in NOT_NEEDED}
            for row in rows if "perf/step_ms" in row]


def kept(log: Path) -> list[dict]:
    """The runs in a log, each with its rows."""
    with gzip.open(log, "rt") as file:
        return [json.loads(line) for line in file]


def outcomes(numbers, log: Path | None, folder: Path):
    """Make these runs; yields each, with its rows, which the log keeps, too."""
    data = folder / "data"
    data.mkdir()
    text = "".join(f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100))
    write_tokens(data / "train.bin", [text.encode()])
    for number in numbers:
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            o = carry_out(draw(number), Path(empty), data)
            lines = (Path(empty) / "r/metrics.jsonl").read_text().splitlines()
        o["rows"] = compact([json.loads(line) for line in lines])
        if log:
            with gzip.open(log, "at") as file:
                file.write(json.dumps(o) + "\n")
        yield o


def main(options) -> list[Figure]:
    first, _, end = os.environ.get("DIAGNOSIS_RUNS", "0:100").partition(":")
    numbers = range(int(first), int(end) if not options.quick else int(first) + 10)
    groups = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        log = os.environ.get("DIAGNOSIS_LOG")
        for o in outcomes(numbers, log and Path(log), Path(folder)):
            events = diagnosed(o["rows"])
            judged = score(o, events)
            threads = {0: "all threads", 1: "1 thread"}.get(o["threads"], "2 threads")
            for group in (o["kind"] or "nothing", o["group"], threads, o["scale"],
                          "wobbling" if o["wobbles"] else "quiet", "all"):
                groups[group].append(judged)
            bad = [name for name in JUDGED if judged.get(name) is False]
            print(f"{o['number']} {o['kind'] or 'nothing'} {o['line'] or ''} ({threads}, "
                  f"{o['scale']}): {o['size']:.0%} of {o['step_ms']:.1f} ms from step "
                  f"{o['at'] + 1}, really {o['effect_mean']:+.0%}: {', '.join(bad) or 'right'}",
                  flush=True)
            for event in events if bad else ():
                print(f"    {event}")
    print(f"{'':26s}runs" + "".join(f"{name:>16s}" for name in JUDGED))
    figures = []
    for group, scores in groups.items():
        line = f"{group:26s}{len(scores):4d}"
        for name in JUDGED:
            values = [s[name] for s in scores if name in s]
            line += f"{f'{sum(values)}/{len(values)}' if values else '':>16s}"
            if group == "all" and values:
                aim = 0.99 if name.startswith("no wrong") else 0.95
                figures.append(Figure(f"planted slow-downs: {name}", f"{len(values)} real runs",
                                      [sum(values) / len(values)], f">= {aim}"))
        print(line)
    return figures
