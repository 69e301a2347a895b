"""Faults at random moments of runs with several ranks: what is said, how soon, and how it ends.

    python -m tests.bench faults                            20 of each fault on one host: an hour
    python -m tests.bench faults --times 5 --only sleep     five of those whose name has "sleep"
    python -m tests.bench faults --times 5 --only host:     several hosts, as root
    python -m tests.bench faults --only quiet --minutes 20  runs without a fault

Ranks are started, and restarted, by torchrun's own agent. On one host they are forks of it, which
have torch imported already. Each fault happens once in a run. --rows FILE keeps a row for each run;
with --times 0, the table is made of those.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import data
import train
from monitor import Monitor
from steady.checkpoints.checkpoint import compare, list_checkpoints
from steady.checkpoints.writer import Writer
from steady.guard.process import exit_code
from steady.tokens.files import write_tokens
from tests import hosts
from tests.bench.common import Figure
from tests.conftest import TINY, after_updates, column, free_port

HANG, STEPS, LOG, SAVE, EVAL = 3, 120, 10, 20, 30
FLAGS = [*TINY, "--batch_size", 12, "--max_steps", STEPS, "--log_interval", LOG, "--save_interval",
         SAVE, "--eval_interval", EVAL, "--no_tensorboard", "--auto_resume", "--out_dir", "run"]
CGROUP = Path(f"/sys/fs/cgroup/memory/faults{os.getpid()}")
PLACES = ["data", "forward", "backward", "optimizer", "logging", "evaluation", "checkpoint"]
BETWEEN = {"logging": LOG, "evaluation": EVAL, "checkpoint": SAVE}  # steps

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


def worker(folder: str, plan: dict, flags: list):
    """A rank: train.py with a fault planted."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                      else signal.SIG_DFL)  # not those of the agent, of which this is a fork
    ctypes.CDLL(None).prctl(1, 0)  # and no signal at its death, which torchrun does not send
    rank = int(os.environ["RANK"])
    os.chdir(folder)
    torch.set_num_threads(1)
    output = open(f"log.{rank}", "a", buffering=1)
    sys.stdout, sys.stderr = Stamped(output), Stamped(output)
    os.dup2(output.fileno(), 2)
    Path(f"pid.{rank}").write_text(str(os.getpid()))
    note_steps(rank)
    if plan.get("rank") == rank and plan.get("work"):
        plant(plan)
    code = exit_code(train.main, [*map(str, flags)])
    sys.stdout.flush()
    if code or plan.get("leave"):
        os._exit(code)


def note_steps(rank: int):
    """Note when rank 0 has made which step, in a file."""
    plain, attempt = Monitor.step, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    out = os.open("steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, number, *args, **kwargs):
        plain(self, number, *args, **kwargs)
        os.write(out, f"{time.time():.3f} {attempt} {number}\n".encode())

    if rank == 0:
        Monitor.step = step


def once() -> bool:
    """Whether it has not happened yet; notes the time."""
    try:
        with open("injected", "x") as file:
            file.write(f"{time.time():.3f}")
        return True
    except FileExistsError:
        return False


def plant(plan: dict):
    """Have plan["work"] happen in that place of that step."""
    runs, place, step = [], plan["place"], plan["step"]
    work = WORKS[plan["work"]]

    def phase() -> str:
        return runs[0].monitor.clock.current if runs and runs[0].monitor else ""

    def now(*phases) -> bool:
        number = step if place in BETWEEN or place == "after" else step - 1  # updates made
        return bool(runs) and runs[0].step == number and phase() in phases and once()

    def noted(run, batches, plain=train.train):
        runs[:] = [run]
        plain(run, batches)

    def before(owner, name, *phases):
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            if now(*phases):
                work()
            return plain(*args, **kwargs)

        setattr(owner, name, call)

    def forward(self, *args, plain=train.Transformer.forward, **kwargs):
        losses = plain(self, *args, **kwargs)
        if losses.requires_grad:
            losses.register_hook(lambda g: work() if now("backward", "waiting") else None)
        return losses

    def all_gather(*args, plain=dist.all_gather, **kwargs):
        if not (runs and runs[0].step >= step and once()):
            plain(*args, **kwargs)

    def all_reduce(*args, plain=dist.all_reduce, **kwargs):
        if runs and runs[0].step >= step and once():
            plain(torch.zeros(3))
        return plain(*args, **kwargs)

    def backward_alone(self, model, last, plain=train.parallel.Shards.micro_batch):
        skip = runs and runs[0].step >= step and hasattr(model, "no_sync") and once()
        return plain(self, model, last and not skip)

    def after_update(run):
        if run.progress.step == step and once():
            runs[:] = [run]
            flip(run, plan["dice"])

    train.train = noted
    if place == "data":
        before(data.Mixture, "batch", "data")
    elif place in ("forward", "evaluation"):
        before(train.Transformer, "forward", place)
    elif place == "backward":
        train.Transformer.forward = forward
    elif place == "optimizer":
        before(torch.optim.AdamW, "step", "optimizer")
    elif place == "logging":
        before(Monitor, "write_row", "logging")
    elif place == "checkpoint":
        before(Writer, "save", "checkpoint")
    elif place == "log's exchange":
        dist.all_gather = all_gather
    elif place == "gradients' exchange":
        train.parallel.Shards.micro_batch = backward_alone
    elif place == "one exchange more":
        dist.all_reduce = all_reduce
    elif place == "after":
        after_updates(after_update)


def block_in_file():
    os.mkfifo("fifo")
    open("fifo").read()


def block_in_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loop():
    while True:
        pass


def keep_lock():
    re.match("(a+)+$", "a" * 70 + "b")  # the regular expression engine keeps Python's lock


def take_memory():
    """More than the cgroup has that it moves itself to."""
    cgroup = Path(f"/sys/fs/cgroup/memory/faults{os.getpid()}")
    cgroup.mkdir()
    (cgroup / "memory.limit_in_bytes").write_text("50000000")
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    Path("cgroup").write_text(str(cgroup))
    taken = bytearray(1)
    while True:
        taken += b"x" * 10**7


def flip(run, dice: float):
    """One bit of one weight."""
    names = list(run.ranks.shards.parameters)
    name = names[int(dice * len(names))]
    bits = run.ranks.shards.parameters[name].data.view(torch.int32).view(-1)
    generator = random.Random(dice)
    bits[generator.randrange(len(bits))] ^= 1 << generator.randrange(31)
    Path("flipped").write_text(name)


WORKS = {"sleep": partial(time.sleep, 10000), "loop": loop, "file": block_in_file,
         "lock": block_in_lock, "python's lock": keep_lock, "memory": take_memory,
         "die": lambda: os._exit(3), "skip": None, "bit": None}

# --- one host --------------------------------------------------------------------------------


def agent(folder: Path, ranks: int, plan: dict, flags: list, restarts: int):
    """What torchrun does, but that its processes are forks of this one."""
    os.setsid()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error")
    log = os.open(folder / "agent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = LaunchConfig(
        1, 1, ranks, run_id="faults", rdzv_backend="c10d", max_restarts=restarts,
        rdzv_endpoint=f"127.0.0.1:{free_port()}", monitor_interval=0.1, start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")), local_addr="127.0.0.1")
    elastic_launch(config, worker)(str(folder), plan, flags)


def launch(folder: Path, ranks: int, plan: dict, flags: list, restarts: int = 3) -> int:
    """The process id of an agent."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            agent(folder, ranks, plan, flags, restarts)
            code = 0
        except BaseException as e:
            print(repr(e), file=sys.stderr)
        finally:
            os._exit(code)
    return pid


def ended(pid: int, seconds: float) -> int | None:
    """The exit code of a child; None if it runs for longer, and then it is killed."""
    limit = time.time() + seconds
    while time.time() < limit:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def lines(folder: Path) -> list[tuple[float, int, str]]:
    """(time, rank, text) of all lines that ranks printed."""
    found = []
    for path in folder.glob("log.*"):
        for line in path.read_text(errors="replace").splitlines():
            stamp, _, text = line.partition(" ")
            if re.fullmatch(r"\d+\.\d{3}", stamp):
                found.append((float(stamp), int(path.suffix[1:]), text))
    return sorted(found)


def steps_of(folder: Path) -> list[tuple[float, int, int]]:
    """(time, attempt, step) of all steps that rank 0 made."""
    path = folder / "steps"
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().splitlines())
    return [(float(t), int(a), int(s)) for t, a, s in rows]


def wait_until(condition, seconds: float):
    limit = time.time() + seconds
    while not (found := condition()):
        if time.time() > limit:
            raise TimeoutError(condition)
        time.sleep(0.005)
    return found


def final_state(folder: Path) -> dict:
    state = list_checkpoints(folder / "run/checkpoints")[-1].state()
    return {name: state[name] for name in ("step", "model", "optimizers", "position")}


def ends_equal(expected: Path, folder: Path, bits: bool = True) -> bool:
    """The same final weights and optimizers, bit by bit; else all validation losses to 1e-5."""
    if bits:
        return not compare(final_state(expected), final_state(folder))[1]
    one, other = column(expected / "run", "val/loss"), column(folder / "run", "val/loss")
    return one.keys() == other.keys() and all(
        abs(one[step] - loss) <= 1e-5 * loss for step, loss in other.items())


def largest_difference(expected: Path, folder: Path) -> float:
    """Of the final weights."""
    one, other = (final_state(each)["model"] for each in (expected, folder))
    return max((one[name] - other[name]).abs().max().item() for name in one)


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return found


def say(kind: str, plan: dict) -> str:
    """What the line must say, as a regular expression."""
    rank, place = plan["rank"], plan.get("place")
    where = rf".*{place} (of|after) step {plan['step']}\b" if place in PLACES else ""
    return {
        "python's lock": rf"rank {rank} \(host .*holding the GIL",
        # gloo ends a process where sizes do not fit
        "skip": rf"rank {rank} \(host .*or called an extra one|rank {rank} is dead",
        "SIGSTOP": rf"rank {rank} \(host .*is stopped",
        "SIGKILL": rf"rank {rank} (\(host .*\) )?is dead",
        "memory": "lack of memory",
        "worker killed": r"worker.* (killed|exited|dead)",
        "worker stopped": rf"rank {rank} \(host .*in data.*loader process \d+ is stopped",
        "torchrun killed": "stopped at step .* by SIGTERM",
        "bit": rf"rank {rank} holds other weights than .* in ",
    }.get(kind, rf"rank {rank} \(host .*has been in{where}")


KINDS = ["sleep", "loop", "file", "lock", "python's lock", "skip", "SIGSTOP", "SIGKILL",
         "worker killed", "worker stopped", "torchrun killed", "memory", "bit"]
BAD = re.compile("failed:|is dead|is stopped|lack of memory|by SIGTERM")


def make_plan(kind: str, rng: random.Random) -> tuple[dict, int, str]:
    """(what happens, ranks, --parallel)."""
    ranks, way = rng.choice([2, 3, 4]), rng.choice(["ddp", "zero3"])
    plan = dict(kind=kind, rank=rng.randrange(ranks), step=rng.randrange(5, STEPS - 5))
    if kind in ("sleep", "loop", "file", "lock", "python's lock", "memory"):
        plan |= dict(work=kind, place=rng.choice(PLACES))
        every = BETWEEN.get(plan["place"])
        if every:
            plan["step"] = rng.randrange(every, STEPS - 5, every)
        if plan["place"] == "checkpoint" and way == "ddp":
            plan["rank"] = 0  # the others save nothing
    if kind == "skip":
        places = ["log's exchange", "one exchange more", "gradients' exchange"]
        plan |= dict(work=kind, place=rng.choice(places[: 3 if way == "ddp" else 2]))
    if kind == "bit":
        ranks, way = rng.choice([3, 4]), "ddp"
        plan |= dict(work=kind, place="after", rank=rng.randrange(ranks), dice=rng.random())
    return plan, ranks, way


def strike(plan: dict, folder: Path, pid: int):
    """What happens to a process from outside, at a random moment of a step or so."""
    wait_until(lambda: steps_of(folder)[-1:] and steps_of(folder)[-1][2] >= plan["step"], 120)
    time.sleep(random.Random(plan["step"]).uniform(0, 0.03))
    rank = int((folder / f"pid.{plan['rank']}").read_text())
    number = signal.SIGSTOP if plan["kind"] in ("SIGSTOP", "worker stopped") else signal.SIGKILL
    target = pid if plan["kind"] == "torchrun killed" else rank
    if plan["kind"].startswith("worker"):
        target = children(rank)[0]
    (folder / "injected").write_text(f"{time.time():.3f}")
    os.kill(target, number)


def run_one(kind: str, seed: int, references: Path, folder: Path) -> dict:
    """A run with a fault; what came of it, as a row."""
    plan, ranks, way = make_plan(kind, random.Random(f"{kind} {seed}"))
    flags = [*FLAGS, "--data", references / "corpus", "--parallel", way, "--hang_seconds", HANG]
    flags += ["--num_workers", 1] * kind.startswith("worker")
    flags += ["--check_replicas_interval", 10] * (kind == "bit")
    began = time.time()
    pid, relaunched = launch(folder, ranks, plan, flags), False
    if not plan.get("work"):
        strike(plan, folder, pid)
    code = ended(pid, 240)
    if kind == "torchrun killed":
        pids = [int((folder / f"pid.{rank}").read_text()) for rank in range(ranks)]
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not any(Path(f"/proc/{p}/stat").exists() and
                                       Path(f"/proc/{p}/stat").read_text().split()[2] != "Z"
                                       for p in pids), 60)
        gone = time.time()
        relaunched, before = True, len(steps_of(folder))
        code = ended(launch(folder, ranks, {}, flags), 240)
    row = dict(**plan, seed=seed, ranks=ranks, way=way, code=code,
               seconds=round(time.time() - began, 1), hang_seconds=HANG)
    if not (folder / "injected").exists():
        return row | dict(right=False, said="it was never planted", equal=False)
    injected = float((folder / "injected").read_text())
    said = [(t, text) for t, _, text in lines(folder) if t > injected and BAD.search(text)]
    first = said[0][0] if said else None
    soon = [text for t, text in said if t < first + 15] if said else []
    expected = say(kind, plan)
    if kind == "bit" and (folder / "flipped").exists():
        expected += re.escape((folder / "flipped").read_text())
    right = next((text for text in soon if re.search(expected, text)), None)
    if right and (last := re.search(r", last in (\w+) ", right)):  # of its last note: may be older
        row["last_place_right"] = last[1] == plan.get("place")
    row |= dict(right=bool(right), said=right or (soon or ["nothing"])[0][:400],
                notice=round(first - injected, 2) if said else None)
    made = steps_of(folder)
    if relaunched:
        after, row["end"] = made[before:], round(gone - injected, 2)
        until = made[:before]
    else:
        attempt = max((a for t, a, _ in made if t <= (first or injected)), default=0)
        after = [each for each in made if each[1] > attempt]
        until = [each for each in made if each[1] <= attempt]
    if after and until:
        row |= dict(lost=max(s for _, _, s in until) - after[0][2] + 1,
                    back=round(after[0][0] - (first or injected), 2))
    with contextlib.suppress(Exception):
        expected = references / f"{way}{ranks}"
        row |= dict(equal=ends_equal(expected, folder), close=ends_equal(expected, folder, False),
                    largest=largest_difference(expected, folder))
    if kind == "memory":
        with contextlib.suppress(OSError):
            Path((folder / "cgroup").read_text()).rmdir()
    return row


def make_references(folder: Path, names: list[tuple[str, int]]):
    """Undisturbed runs, and the data."""
    text = ["".join(f"{a} + {b} = {a + b}\n" for b in range(60)).encode() for a in range(60)]
    (folder / "corpus").mkdir()
    write_tokens(folder / "corpus/train.bin", text[:54])
    write_tokens(folder / "corpus/val.bin", text[54:])
    for way, ranks in names:
        place = folder / f"{way}{ranks}"
        place.mkdir()
        flags = [*FLAGS, "--data", folder / "corpus", "--parallel", way]
        assert ended(launch(place, ranks, {}, flags), 200) == 0, (place / "agent").read_text()


def at_once(jobs: list, most: int, done):
    """Calls of functions that return a row, each in a process of its own."""
    running = {}

    def collect():
        pid, status = os.wait()
        if pid in running:
            path, job = running.pop(pid)
            done(json.loads(path.read_text()) if path.exists() else
                 dict(kind=job[1], seed=job[2], right=False, said=f"the bench: exit {status}"))

    with tempfile.TemporaryDirectory(prefix="faults") as rows:
        for number, job in enumerate(jobs):
            while len(running) >= most:
                collect()
            path = Path(rows, str(number))
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    row = job[0](*job[1:])
                    path.write_text(json.dumps(row))
                    code = 0
                except BaseException as e:
                    path.write_text(json.dumps(dict(kind=job[1], seed=job[2], right=False,
                                                    said=f"the bench: {e!r}")))
                finally:
                    os._exit(code)
            running[pid] = path, job
        while running:
            collect()


# --- several hosts ---------------------------------------------------------------------------

HOST_KINDS = ["host: power cut", "host: killed", "host: link cut for good",
              "host: link cut for 3 s", "host: 30 % loss for 20 s", "host: 10 Mbit/s",
              "host: power cut where they meet"]
HOST_SAYS = {
    "host: killed": "another rank is gone|out of reach|network",
    "host: power cut": "out of reach|network",
    "host: power cut where they meet": "out of reach|network",
    "host: link cut for good": "out of reach|network",
    "host: 10 Mbit/s": "collectives between the ranks take longer.*network",
}
LARGER = ["--d_model", 64, "--d_ff", 128, "--max_steps", 330, "--save_interval", 100,
          "--eval_interval", 0]


def make_host_plan(kind: str, rng: random.Random) -> tuple[dict, int, str]:
    count, each = rng.choice([(2, 1), (2, 2), (3, 1)])
    way = rng.choice(["ddp", "zero3"])
    if kind == "host: 10 Mbit/s":
        count, each, way = 2, 1, "ddp"
    victim = 0 if kind.endswith("meet") else rng.randrange(1, count)
    plan = dict(kind=kind, hosts=count, victim=victim,
                step=200 if kind == "host: 10 Mbit/s" else rng.randrange(5, STEPS - 15))
    return plan, count * each, way


def end_all(made: list, launched: list, victim=None) -> tuple[float, bool]:
    """Give torchrun 30 s to end by itself; when it had, or not. Then start the hosts anew."""
    limit = time.time() + 30
    for process in launched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, limit - time.time()))
    gone, codes = time.time(), [process.poll() for process in launched]
    for host in made:
        if host is not victim:
            host.kill()
        host.boot()
    return gone, None not in codes


def run_hosts(kind: str, seed: int, references: Path, folder: Path) -> dict:
    """A run on several hosts with a fault; what came of it, as a row."""
    plan, ranks, way = make_host_plan(kind, random.Random(f"{kind} {seed}"))
    count, each, gone = plan["hosts"], ranks // plan["hosts"], None
    hang = 10 if kind.endswith(" s") else 5
    flags = [*FLAGS, "--data", references / "corpus", "--parallel", way, "--hang_seconds", hang]
    flags += LARGER if kind == "host: 10 Mbit/s" else []
    script = [Path(__file__).resolve(), folder, "{}", *flags]
    began = time.time()
    with hosts.hosts(count) as made, contextlib.ExitStack() as stack:
        victim = made[plan["victim"]]

        def start(host):
            log = stack.enter_context(open(folder / f"{host.name}.txt", "a"))
            command = hosts.torchrun(made[0], host, each, script, nnodes=count, max_restarts=5,
                                     conf=dict(join_timeout=30))
            return host.popen(command, cwd=folder, stdout=log, stderr=log)

        def has_said(seconds):
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: any(t > injected and BAD.search(text)
                                       for t, _, text in lines(folder)), seconds)

        launched = [start(host) for host in made]
        wait_until(lambda: steps_of(folder)[-1:] and steps_of(folder)[-1][2] >= plan["step"], 200)
        (folder / "injected").write_text(f"{time.time():.3f}")
        injected = time.time()
        if "power cut" in kind or "killed" in kind:
            victim.kill() if "killed" in kind else victim.cut_power()
            has_said(60)
            if kind.endswith("meet"):
                gone, by_itself = end_all(made, launched, victim)
            else:
                victim.boot()
            launched = [start(host) if host is victim or gone else p
                        for host, p in zip(made, launched, strict=True)]
        elif "for good" in kind:
            victim.link(up=False)
            has_said(60)
            gone, by_itself = end_all(made, launched)
            launched = [start(host) for host in made]
        elif "3 s" in kind:
            victim.link(up=False)
            time.sleep(3)
            victim.link(up=True)
        elif "loss" in kind:
            victim.lose(1 - 0.7 ** 0.5)  # at both ends of the link
            time.sleep(20)
            victim.call("iptables-legacy -F")
        else:
            victim.shape("tbf rate 10mbit burst 32kb latency 400ms")
        codes = [process.wait(300) for process in launched]
    row = dict(**plan, seed=seed, ranks=ranks, way=way, code=max(codes), hang_seconds=hang,
               seconds=round(time.time() - began, 1))
    printed = [(t, text) for t, _, text in lines(folder) if t > injected]
    said = [(t, text) for t, text in printed if BAD.search(text)]
    if kind == "host: 10 Mbit/s":
        said = [(t, text) for t, text in printed if BAD.search(text) or "slower" in text
                or "network" in text]
    first = said[0][0] if said else None
    texts = [text for _, text in said]
    expected = HOST_SAYS.get(kind)
    right = next((text for text in texts if expected and re.search(expected, text)), None)
    blamed = any(re.search("no progress: rank .* has been in", text) and not
                 re.search("network|out of reach", text) for text in texts)
    row |= dict(right=bool(right) and not blamed if expected else not texts or not blamed,
                said=right or (texts or ["nothing"])[0][:500], all=[t[:300] for t in texts][:6],
                notice=round(first - injected, 2) if said else None,
                pause=round(max((b[0] - a[0] for a, b in zip(steps_of(folder), steps_of(folder)[1:],
                                                             strict=False)), default=0), 2))
    if gone:
        row |= dict(end=round(gone - injected, 2), torchrun_ends=by_itself)
    steps = steps_of(folder)
    after = [each for each in steps if first and each[0] > (gone or first)]
    if after:
        row |= dict(lost=max(s for t, _, s in steps if t <= (gone or first)) - after[0][2] + 1,
                    back=round(after[0][0] - (gone or first), 2))
    with contextlib.suppress(Exception):
        expected = references / f"{way}{ranks}"
        if kind != "host: 10 Mbit/s":
            row |= dict(equal=ends_equal(expected, folder),
                        close=ends_equal(expected, folder, False),
                        largest=largest_difference(expected, folder))
    return row


# --- no fault --------------------------------------------------------------------------------

QUIET = [*TINY, "--n_layer", 1, "--d_model", 16, "--d_ff", 16, "--seq_len", 16, "--batch_size", 4,
         "--max_steps", 10**7, "--log_interval", 100, "--eval_interval", 5000, "--save_interval",
         2000, "--no_tensorboard", "--auto_resume", "--out_dir", "run", "--hang_seconds", 5]


def quiet(ranks: int, seconds: float, references: Path, folder: Path) -> dict:
    """How many steps are made without a fault, and what is said."""
    pid = launch(folder, ranks, {}, [*QUIET, "--data", references / "corpus"])
    time.sleep(seconds)
    os.kill(pid, signal.SIGTERM)
    code = ended(pid, 60)
    printed = [text for _, _, text in lines(folder)]
    found = column(folder / "run", "train/loss")
    return dict(kind="quiet", ranks=ranks, code=code, steps=max(found, default=0),
                load=os.getloadavg(), alarms=[t for t in printed if "no progress" in t],
                failed=[t for t in printed if "failed:" in t][:3])


# --- the table -------------------------------------------------------------------------------


def middle(rows: list[dict], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return ""
    value = statistics.median(values)
    return f"{value:g} ({min(values):g} to {max(values):g})"


def table(rows: list[dict]) -> str:
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    text = ["| fault | named rightly | seconds until the line | from there to the next step "
            "| steps lost | same bits, 2 ranks or zero3 | same losses |",
            "|---|---|---|---|---|---|---|"]
    for kind, each in kinds.items():
        exact = [row for row in each if row.get("ranks") == 2 or row.get("way") == "zero3"]
        cells = [kind, count(each, "right"), middle(each, "notice"), middle(each, "back"),
                 middle(each, "lost"), count(exact, "equal"), count(each, "close")]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def count(rows: list[dict], name: str) -> str:
    """Of those that were looked at, or did not end well."""
    known = [bool(row.get(name)) for row in rows if row.get(name) is not None or row.get("code")]
    return f"{sum(known)} of {len(known)}" if known else ""


def main(options) -> list[Figure]:
    times = 1 if options.quick else options.times
    known = KINDS + HOST_KINDS * hosts.available()
    kinds = [kind for kind in known if re.search(options.only, kind)]
    if options.quick:
        kinds = kinds[:1]
    rows = []
    if not times:
        rows = [json.loads(line) for line in open(options.rows)]
        print(table(rows))
        return []

    def done(row: dict):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.rows:
            with open(options.rows, "a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        make = {kind: make_host_plan if kind in HOST_KINDS else make_plan for kind in kinds}
        plans = {(kind, n): make[kind](kind, random.Random(f"{kind} {n}")) for kind in kinds
                 for n in range(options.first, options.first + times)}
        make_references(folder, sorted({(way, ranks) for _, ranks, way in plans.values()}))
        if options.only == "quiet":
            for ranks in (1, 2, 4):
                (folder / str(ranks)).mkdir()
            at_once([(quiet, ranks, 60 * options.minutes, folder, folder / str(ranks))
                     for ranks in (1, 2, 4)], 3, done)
            alarms = sum(len(row["alarms"]) for row in rows)
            steps = sum(row["steps"] for row in rows)
            return [Figure("false alarms", f"{steps:,} steps", [alarms], "<= 0")]
        jobs = []
        for kind, n in sorted(plans, key=lambda each: each[1]):
            place = folder / f"{kinds.index(kind)}.{n}"
            place.mkdir()
            call = run_hosts if kind in HOST_KINDS else run_one
            jobs.append((call, kind, n, folder, place))
        alone = [job for job in jobs if job[1] == "memory"]  # the kernel counts these for all
        at_once([job for job in jobs if job not in alone], options.at_once, done)
        at_once(alone, 1, done)
    print(table(rows))
    right = [row["right"] for row in rows]
    return [Figure(f"{len(rows)} faults: named rightly", "all", [sum(right) / len(right)],
                   ">= 0.99", str(sum(right)), str(len(right)))]


if __name__ == "__main__":  # on hosts: torchrun starts this file
    worker(sys.argv[1], {**json.loads(sys.argv[2]), "leave": True}, sys.argv[3:])
