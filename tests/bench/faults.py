"""Faults at random moments of runs with several ranks: what is reported, how soon, how it ends.

    python -m tests.bench faults                            20 of each fault: several hours
    python -m tests.bench faults --times 5 --only sleep     five of those whose name has "sleep"

Ranks are started, and restarted, by torchrun. Each fault happens once in a run. --rows FILE keeps a
row for each run. Faults of whole hosts are in tests/test_hosts.py.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.distributed as dist

import data
import train
from monitor import Monitor
from steady.checkpoints.checkpoint import compare, list_checkpoints
from steady.checkpoints.writer import Writer
from steady.guard.process import stop_with_torchrun
from steady.ranks import hangs
from steady.tokens.files import write_tokens
from tests import conftest
from tests.bench.common import Figure
from tests.conftest import TINY, after_updates, column

STEPS, LOG, SAVE, EVAL = 120, 10, 20, 30
FLAGS = [*TINY, "--batch_size", 12, "--max_steps", STEPS, "--log_interval", LOG, "--save_interval",
         SAVE, "--eval_interval", EVAL, "--no_tensorboard", "--auto_resume", "--out_dir", "run"]

# --- in the ranks ----------------------------------------------------------------------------


class Stamped:
    """A stream that begins each line with the time."""

    def __init__(self, stream):
        self.stream, self.begins = stream, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.stream.write(f"{time.time():.3f} {line}" if self.begins else line)
            self.begins = line.endswith("\n")
        self.stream.flush()
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def worker(plan: dict, flags: list[str]):
    """A rank: train.py with a fault planted."""
    rank = int(os.environ["RANK"])
    stop_with_torchrun()
    output = open(f"log.{rank}", "a", buffering=1)
    sys.stdout = sys.stderr = Stamped(output)
    os.dup2(output.fileno(), 2)
    Path(f"pid.{rank}").write_text(str(os.getpid()))
    if rank == 0:
        steps = open("steps", "a", buffering=1)
        after_updates(lambda run: steps.write(f"{time.time():.3f} {run.progress.step}\n"))
    if rank == plan.get("rank") and plan["kind"] in WORKS:
        plant(plan)
    conftest.main(flags)


PLACES = {  # in which a rank can get stuck → what is called there
    "data": (data.Mixture, "batch"), "forward": (train.Transformer, "forward"),
    "backward": (torch.Tensor, "backward"), "optimizer": (torch.optim.AdamW, "step"),
    "logging": (Monitor, "write_row"), "evaluation": (train.Transformer, "forward"),
    "checkpoint": (Writer, "save"),
}
BETWEEN = {"logging": LOG, "evaluation": EVAL, "checkpoint": SAVE}  # steps
SKIPS = {  # collectives that one rank leaves out, or adds
    "a log's": (dist, "all_gather"), "one more": (dist, "all_reduce"),
    "of gradients": (train.parallel.Shards, "micro_batch"),
}


def plant(plan: dict):
    """Have plan["kind"] happen once, in that place of that step."""
    place, runs = plan.get("place"), []
    owner, name = {**PLACES, **SKIPS, None: (train.Run, "advance")}[place]
    plain, work = getattr(owner, name), WORKS[plan["kind"]]
    updates = plan["step"] - (place in PLACES and place not in BETWEEN)  # made until then

    def is_time() -> bool:
        if not runs or runs[0].progress.step < updates:
            return False
        if place in PLACES and runs[0].monitor.clock.current != place:
            return False
        with contextlib.suppress(FileExistsError), open("injected", "x") as file:
            file.write(f"{time.time():.3f}")
            return True
        return False

    def call(*args, **kwargs):
        return work(plain, *args, **kwargs) if is_time() else plain(*args, **kwargs)

    setattr(owner, name, call)
    after_updates(lambda run: runs.append(run))


def sleep(*args, **kwargs):
    time.sleep(10000)


def loop(*args, **kwargs):
    while True:
        pass


def wait_for_file(*args, **kwargs):
    os.mkfifo("fifo")
    open("fifo").read()


def keep_pythons_lock(*args, **kwargs):
    re.match("(a+)+$", "a" * 70 + "b")  # the regular expression engine keeps it


def skip(plain, *args, **kwargs):
    if plain.__name__ == "all_reduce":
        plain(torch.zeros(3))
        return plain(*args, **kwargs)
    if plain.__name__ == "micro_batch":
        shards, model, _ = args
        return plain(shards, model, False)


def flip_bit(plain, run, size):
    plain(run, size)
    generator = random.Random(run.progress.step)
    name, weight = generator.choice(list(run.ranks.shards.parameters.items()))
    bits = weight.data.view(torch.int32).view(-1)
    bits[generator.randrange(len(bits))] ^= 1 << generator.randrange(31)
    Path("flipped").write_text(name)


WORKS = {"sleep": sleep, "loop": loop, "file": wait_for_file,
         "python's lock": keep_pythons_lock, "skip": skip, "bit": flip_bit}

# --- plans -----------------------------------------------------------------------------------

KINDS = [*WORKS, "SIGSTOP", "SIGKILL", "worker killed", "worker stopped", "torchrun killed"]
BAD = re.compile("failed:|is dead|is stopped|by SIGTERM")


def make_plan(kind: str, seed: int) -> dict:
    """What happens, in a run of so many ranks."""
    rng = random.Random(f"{kind} {seed}")
    way, step = rng.choice(["ddp", "zero3"]), rng.randrange(5, STEPS - 15)
    if kind == "bit":
        way = "ddp"
    ranks = rng.choice([3, 4] if kind == "bit" else [2, 3, 4])
    plan = dict(kind=kind, seed=seed, way=way, ranks=ranks, rank=rng.randrange(ranks), step=step,
                hang_seconds=3)
    if kind == "skip":
        plan["place"] = rng.choice([*SKIPS][: 3 if way == "ddp" else 2])
    elif kind in WORKS and kind != "bit":
        plan["place"] = rng.choice([*PLACES])
        every = BETWEEN.get(plan["place"], 1)
        plan["step"] = rng.randrange(max(5, every) // every * every, STEPS - 5, every)
        if plan["place"] == "checkpoint" and way == "ddp":
            plan["rank"] = 0  # the others save nothing
    return plan


def expected_line(plan: dict) -> str:
    """What a line must report, as a regular expression."""
    kind, place = plan["kind"], plan.get("place")
    rank = rf"rank {plan['rank']} \(host .*"
    return {
        "python's lock": rank + "holding the GIL",
        # gloo ends a process where sizes do not fit
        "skip": rf"{rank}or called an extra one|rank {plan['rank']} is dead",
        "SIGSTOP": rank + "is stopped",
        "SIGKILL": rf"rank {plan['rank']} (\(host .*\) )?is dead",
        "worker killed": r"worker.* (killed|exited|dead)",
        "worker stopped": rank + "in data",
        "torchrun killed": "stopped at step .* by SIGTERM",
        "bit": rf"rank {plan['rank']} holds other weights than .* in ",
    }.get(kind, rf"{rank}is stuck in {place} (of|after) step {plan['step']}\b")


# --- a run -----------------------------------------------------------------------------------


def launch(folder: Path, plan: dict, flags: list) -> subprocess.Popen:
    script = [Path(__file__).resolve(), json.dumps(plan), *flags]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max_restarts=3",
               f"--nproc_per_node={plan['ranks']}", "--monitor_interval=0.1", "--"]
    with open(folder / "torchrun", "a") as log:
        return subprocess.Popen([*command, *map(str, script)], cwd=folder, stdout=log,
                                stderr=log, env=conftest.environment(), start_new_session=True)


def code_of(launched: subprocess.Popen) -> int | None:
    """The exit code of torchrun; None if it does not end, and then it is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return launched.wait(240)
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait()


def lines(folder: Path) -> list[tuple[float, str]]:
    """(time, text) of all lines that ranks printed."""
    found = []
    for path in folder.glob("log.*"):
        for line in path.read_text(errors="replace").splitlines():
            stamp, _, text = line.partition(" ")
            if re.fullmatch(r"\d+\.\d{3}", stamp):
                found.append((float(stamp), text))
    return sorted(found)


def steps_of(folder: Path) -> list[tuple[float, int]]:
    """(time, step) of all steps that rank 0 made."""
    path = folder / "steps"
    pairs = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return [(float(at), int(step)) for at, step in pairs]


def wait_until(condition, seconds: float):
    limit = time.time() + seconds
    while not condition():
        if time.time() > limit:
            raise TimeoutError(condition)
        time.sleep(0.005)


def strike_at(folder: Path, plan: dict) -> float:
    """Wait for a random moment of the step, or soon after it; the time, which is also kept."""
    wait_until(lambda: any(step >= plan["step"] for _, step in steps_of(folder)), 200)
    time.sleep(random.Random(plan["seed"]).uniform(0, 0.03))
    (folder / "injected").write_text(f"{time.time():.3f}")
    return time.time()


def carry_out(folder: Path, plan: dict, flags: list) -> tuple[int | None, float | None]:
    """(exit code, when torchrun had to be started anew)."""
    kind, launched = plan["kind"], launch(folder, plan, flags)
    if kind not in WORKS:
        strike_at(folder, plan)
        target = int((folder / f"pid.{plan['rank']}").read_text())
        if kind.startswith("worker"):
            children = Path(f"/proc/{target}/task").glob("*/children")
            target = int(" ".join(path.read_text() for path in children).split()[0])
        if kind == "torchrun killed":
            target = launched.pid
        os.kill(target, signal.SIGSTOP if kind in ("SIGSTOP", "worker stopped") else signal.SIGKILL)
    code = code_of(launched)
    if kind != "torchrun killed":
        return code, None
    pids = [path.read_text() for path in folder.glob("pid.*")]
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: all(hangs.state_of(pid) in ("", "Z") for pid in pids), 60)
    gone = time.time()
    return code_of(launch(folder, plan, flags)), gone


def run_one(plan: dict, references: Path) -> dict:
    """A run with a fault; what came of it, as a row."""
    kind, folder = plan["kind"], references / f"{plan['kind']}.{plan['seed']}"
    folder.mkdir()
    flags = [*FLAGS, "--data", references / "corpus", "--parallel", plan["way"], "--hang_seconds",
             plan["hang_seconds"], *["--num_workers", 1] * kind.startswith("worker"),
             *["--check_replicas_interval", 10] * (kind == "bit")]
    began = time.time()
    code, gone = carry_out(folder, plan, flags)
    row = dict(**plan, code=code, seconds=round(time.time() - began, 1))
    if not (folder / "injected").exists():
        return row | dict(right=False, said="it was never planted", equal=False)
    injected = float((folder / "injected").read_text())
    said = [(at, text) for at, text in lines(folder) if at > injected and BAD.search(text)]
    texts = [text for _, text in said]
    expected = expected_line(plan)
    if kind == "bit":
        expected += re.escape((folder / "flipped").read_text())
    right = next((text for text in texts if re.search(expected, text)), None)
    row |= dict(right=bool(right), said=(right or [*texts, "nothing"][0])[:400])
    if said:
        ended, made = gone or said[0][0], steps_of(folder)
        row["notice"] = round(said[0][0] - injected, 2)
        if made[-1][0] > ended:
            before = max((step for at, step in made if at <= ended), default=0)
            back, first = next((at, step) for at, step in made if at > ended)
            row |= dict(lost=before - first + 1, back=round(back - ended, 2))
    with contextlib.suppress(Exception):
        row |= ends_equal(references / f"{plan['way']}{plan['ranks']}", folder)
    return row


def ends_equal(expected: Path, folder: Path) -> dict:
    """equal: the same final weights and optimizers; close: validation losses, to 1e-5."""
    one, other = (list_checkpoints(each / "run/checkpoints")[-1].state()
                  for each in (expected, folder))
    names = "step", "model", "optimizers", "position"
    equal = not any(compare(one[name], other[name])[1] for name in names)
    one, other = (column(each / "run", "val/loss") for each in (expected, folder))
    return dict(equal=equal, close=one.keys() == other.keys() and all(
        abs(one[step] - loss) <= 1e-5 * loss for step, loss in other.items()))


def make_references(folder: Path, names: set[tuple[str, int]]):
    """The data, and undisturbed runs."""
    text = ["".join(f"{a} + {b} = {a + b}\n" for b in range(60)).encode() for a in range(60)]
    (folder / "corpus").mkdir()
    write_tokens(folder / "corpus/train.bin", text[:54])
    write_tokens(folder / "corpus/val.bin", text[54:])
    for way, ranks in sorted(names):
        place = folder / f"{way}{ranks}"
        place.mkdir()
        launched = launch(place, dict(kind="none", ranks=ranks),
                          [*FLAGS, "--data", folder / "corpus", "--parallel", way])
        assert code_of(launched) == 0, (place / "torchrun").read_text()


# --- all of them ---------------------------------------------------------------------------


def main(options) -> list[Figure]:
    kinds = [kind for kind in KINDS if re.search(options.only, kind)]
    seeds = range(options.first, options.first + options.times)
    if options.quick:
        kinds, seeds = kinds[:1], seeds[:1]
    plans, rows = [make_plan(kind, seed) for seed in seeds for kind in kinds], []
    with tempfile.TemporaryDirectory(prefix="faults") as name, \
            ProcessPoolExecutor(options.at_once, multiprocessing.get_context("fork")) as pool:
        make_references(Path(name), {(plan["way"], plan["ranks"]) for plan in plans})
        started = {pool.submit(run_one, plan, Path(name)): plan for plan in plans}
        for done in as_completed(started):
            error = done.exception()
            rows.append(started[done] | dict(right=False, said=f"the bench: {error!r}")
                        if error else done.result())
            print(json.dumps(rows[-1]), flush=True)
            if options.rows:
                with open(options.rows, "a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
    figures = []
    for kind in kinds:
        of_kind = [row for row in rows if row["kind"] == kind]
        exact = [row for row in of_kind if row["ranks"] == 2 or row["way"] == "zero3"]
        for what, each, name in (("named correctly", of_kind, "right"),
                                 ("same bits, 2 ranks or zero3", exact, "equal"),
                                 ("same losses", of_kind, "close")):
            good = sum(bool(row.get(name)) for row in each)
            if each:
                figures.append(Figure(f"{kind}: {what}", "all", [good / len(each)], ">= 0.99",
                                      str(good), str(len(each))))
        for what, name in (("seconds until the line", "notice"), ("from there to the next step",
                           "back"), ("steps lost", "lost")):
            values = [row[name] for row in of_kind if name in row]
            if values:
                figures.append(Figure(f"{kind}: {what}", "", values))
    return figures


if __name__ == "__main__":  # torchrun starts this file
    worker(json.loads(sys.argv[1]), sys.argv[2:])
