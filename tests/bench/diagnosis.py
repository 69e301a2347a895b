"""Why training became slower, on real runs in which something is planted: is it said, and rightly?

    python -m tests.bench diagnosis                         ten runs of each cause: an hour
    DIAGNOSIS_REPEAT=2 DIAGNOSIS_ONLY=data: python -m ...   two of those whose name has "data:"
    DIAGNOSIS_LOG=all.jsonl python -m ...                   also keep each run, in all.jsonl, all/
    DIAGNOSIS_LOG=all.jsonl DIAGNOSIS_AGAIN=1 python -m ... diagnose the runs kept there once more

A plant begins at a random step and costs 5 to 100 % of a step (one that grows: 15 to 100 % at the
end), small ones as often as large ones. Every other run has a neighbour whose load comes and goes;
a quiet one in which others took a tenth of a core is "disturbed". What the machine does must have
cost 5 % to count as something to find. A cause may be called what `right` says, or unexplained;
what a neighbour explains is wrong only in quiet runs or where it gets most of the blame.
"""

import contextlib
import gc
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import model
import train
from steady.report import report
from steady.telemetry import Sinks
from steady.tokens import write_tokens
from tests.bench.common import Figure, seconds
from tests.conftest import TINY, Process

STEPS, LOG, LAYERS = 800, 10, 2
FLAGS = [*TINY, "--n_layer", LAYERS, "--d_model", 64, "--d_ff", 192, "--seq_len", 48,
         "--num_workers", 0, "--eval_interval", 0, "--save_interval", 0, "--no_tensorboard",
         "--log_interval", LOG, "--max_steps", STEPS, "--out_dir", "r"]
CGROUP = Path(f"/sys/fs/cgroup/cpu/diagnosis{os.getpid()}")
plan = SimpleNamespace()  # of this run: cause, run, at, size, seed, clock, step, step_s

# --- what is planted in the program: each function is called in its process before it trains -----


def more() -> float:
    """Seconds to be added to this step, on average."""
    return plan.size * plan.step_s if plan.step >= plan.at else 0.0


def begin_step(seed: int, step: int, rank: int):
    plan.step, plan.clock[step] = step, time.perf_counter()
    if step == plan.at:
        plan.step_s = float(np.median(np.diff(plan.clock[step - 100 : step + 1])))


def before(owner, name: str, do, after: bool = False):
    """Call do(*arguments) before each call of a function; after: do(result, *arguments)."""
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        if not after:
            do(*args)
        result = plain(*args, **kwargs)
        if after:
            do(result, *args)
        return result

    setattr(owner, name, call)


def sleep(owner, name, share=1.0, every=1):
    return lambda: before(owner, name, lambda *_: time.sleep(
        share * every * more() * (plan.step % every == 0)))


def paced(unit, share=1.0):
    """do(*args): unit(*args), as often as takes as long as is to be added; timed at first."""
    cost = owed = 0.0

    def do(*args):
        nonlocal cost, owed
        owed += share * more()
        if owed and not cost:
            cost = sorted(seconds(unit, *args) for _ in range(20))[5]
        while owed > cost:
            unit(*args)
            owed -= cost

    return do


def work(owner, name, unit, share=1.0, after=False):
    return lambda: before(owner, name, paced(unit, share), after)


def in_backward(unit):
    def at_gradient(losses, *_):
        if losses.requires_grad:
            losses.register_hook(lambda grad: do())

    do = paced(unit)
    return lambda: before(*FORWARD, at_gradient, after=True)


def growing(owner, name, entry, traverse):
    """A list that has, at the end of the run, as many entries as take as long as is to be added."""
    def plant():
        sample, kept, owed = [entry(i) for i in range(20_000)], [], 0.0
        cost = min(seconds(traverse, sample) for _ in range(5)) / len(sample)

        def grow(*_):
            nonlocal owed
            owed += more() / (STEPS - plan.at) / cost
            kept.extend(entry(plan.step) for _ in range(int(owed)))
            owed %= 1
            traverse(kept)

        before(owner, name, grow)

    return plant


def busy_thread():
    def compute():  # in turns of up to 10 ms, in which the loop has to ask for Python's lock
        while True:
            until = time.perf_counter() + 0.02 * plan.size / (1 + plan.size) * (more() > 0)
            while time.perf_counter() < until:
                python_loop()
            time.sleep(0.02 / (1 + plan.size))

    threading.Thread(target=compute, daemon=True).start()


def kept_each(make, every=1):
    kept = []
    return lambda: before(*TIDY, lambda *_: plan.step % every or not more() or kept.append(make()))


def python_loop(*_):
    sum(i * i for i in range(300))


def log_norms(run):
    for i, p in enumerate(run.model.parameters()):
        run.monitor.log(f"norm/{i}", p.detach().norm().item())


def search_text(batch, mixture, *_):
    re.findall(r"(\d+) \+ (\d+) = (\d)", mixture.decode(batch.tokens[0].tolist()))


def thread_that_waits():
    threading.Thread(target=threading.Event().wait, daemon=True).start()


# --- what the machine does: a process of its own, that calls a function of the pid over and over --


def spin(pid=0):
    sum(range(10**5))


def copy_arrays(pid):
    a, b = np.ones(1 << 23), np.ones(1 << 23)  # 64 MB
    for _ in range(100):
        np.copyto(b, a)


def stop_and_go(pid):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.005 + 0.02 * plan.size)
    os.kill(pid, signal.SIGCONT)
    time.sleep(2 * (0.005 + 0.02 * plan.size))


def same_core(pid):
    for process in (0, pid):
        os.sched_setaffinity(process, {0})
    spin()


def limit_quota(pid):
    period = int((CGROUP / "cpu.cfs_period_us").read_text())
    (CGROUP / "cpu.cfs_quota_us").write_text(str(int(period / (1 + plan.size))))
    time.sleep(1)


def come_and_go(pid):  # its random numbers are those that `fork` seeds
    until = time.perf_counter() + random.uniform(0.5, 3)
    while time.perf_counter() < until:
        spin()
    time.sleep(random.uniform(0.5, 3))


def fork(turn, pid: int) -> int:
    parent = os.getpid()
    if helper := os.fork():
        return helper
    with contextlib.suppress(BaseException):
        os.setsid()
        random.seed(plan.seed)
        while os.getppid() == parent:
            turn(pid)
    os._exit(0)


# --- all of them: name → (where, phase, what causes may be called, what plants it) ---------------

MATRIX, DENORMAL = torch.randn(64, 64), torch.full((2048,), 1e-40)
UNSORTED = np.random.default_rng(0).random(1000)
PLAIN_FORWARD = train.Transformer.forward
FORWARD, LAYER = (train.Transformer, "forward"), (model.FeedForward, "forward")
BATCH, UPDATE, TIDY = (train.Mixture, "batch"), (train, "update"), (train, "tidy_memory")
DATA, NEIGHBOUR = "waits for data", "contention|probe|hypervisor"


def row_again(net, tokens, targets, *_):
    PLAIN_FORWARD(net, tokens[:1], targets[:1])


P, M, R = "program", "machine", "resource"
PLANTS = {
    "forward: sleep": (P, "forward", "", sleep(*LAYER, 1 / LAYERS)),
    "forward: Python loop": (P, "forward", "", work(*LAYER, python_loop, 1 / LAYERS)),
    "forward: matrix product": (P, "forward", "", work(*FORWARD, lambda *_: MATRIX @ MATRIX)),
    "forward: done again": (P, "forward", "", work(*FORWARD, row_again)),
    "forward: new buffers": (P, "forward", "", work(*FORWARD, lambda *_: torch.ones(1 << 17))),
    "forward: list grows": (P, "forward", "grows", growing(*FORWARD, lambda i: i, sum)),
    "backward: Python loop": (P, "backward", "", in_backward(python_loop)),
    "backward: denormals": (P, "backward", "", in_backward(lambda: DENORMAL * 0.5)),
    "optimizer: product": (P, "optimizer", "", work(*UPDATE, lambda run: MATRIX @ MATRIX)),
    "optimizer: clones": (P, "optimizer", "", work(
        *UPDATE, lambda run: [p.detach().clone() for p in run.model.parameters()])),
    "optimizer: item() of each": (P, "optimizer", "", work(*UPDATE, log_norms)),
    "optimizer: gc.collect": (P, "optimizer", "garbage", work(*UPDATE, lambda run: gc.collect())),
    "data: sort": (P, "data", DATA, work(*BATCH, lambda *_: np.sort(UNSORTED))),
    "data: stall every 5th": (P, "data", DATA, sleep(*BATCH, every=5)),
    "data: regular expression": (P, "data", DATA, work(*BATCH, search_text, after=True)),
    "data: reads a file": (P, "data", f"{DATA}|disk", work(
        *BATCH, lambda *_: Path(__file__).read_bytes())),
    "other: sleep": (P, "other", "", sleep(train, "check_finite")),
    "other: list grows": (P, "other", "grows", growing(*TIDY, lambda i: i, sum)),
    "other: json grows": (P, "other", "grows", growing(*TIDY, lambda i: {"loss": i}, json.dumps)),
    "logging: sink blocks": (P, "logging", "sink that blocks", sleep(Sinks, "write", LOG)),
    "any: thread that computes": (P, "", "another thread", busy_thread),
    "2 busy processes": (M, "", NEIGHBOUR, [spin] * 2),
    "4 busy processes": (M, "", NEIGHBOUR, [spin] * 4),
    "memory bandwidth": (M, "", NEIGHBOUR, [copy_arrays]),
    "SIGSTOP": (M, "", "by signals", [stop_and_go]),
    "same core": (M, "", NEIGHBOUR, [same_core]),
    "CPU quota": (M, "", "quota", [limit_quota]),
    "host memory": (R, "", "", kept_each(lambda: b"x" * (1 << 20))),
    "open files": (R, "", "", kept_each(lambda: open("/dev/null"))),
    "threads": (R, "", "", kept_each(thread_that_waits, 5)),
    "nothing": ("", "", "", []),
}
QUICK = ("forward: sleep", "data: sort", "other: list grows", "4 busy processes", "nothing")


def busy_seconds() -> np.ndarray:
    """Of all cores; and of them, of this process and those that it has waited for."""
    fields = Path("/proc/stat").read_text().split()
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return np.array([sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK"),
                     sum(u.ru_utime + u.ru_stime for u in used)])


def carry_out(cause: str, run: int, folder: Path) -> dict:
    """A run in the directory folder/r."""
    rng, (where, _, _, plant) = random.Random(f"{cause} {run}"), PLANTS[cause]
    at, least = rng.randrange(250, 501), 0.15 if cause.endswith("grows") else 0.05
    plan.__dict__.update(
        at=at if where else STEPS, size=least ** rng.random(), seed=rng.random(), step=0,
        step_s=0.0, clock=np.frombuffer(mmap.mmap(-1, 8 * (STEPS + 1))))
    turns, setting = [], "wobbling" if run % 2 else "quiet"

    def hook():
        before(train, "seed_everything", begin_step)
        if cause == "CPU quota":
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
            (CGROUP / "cpu.cfs_quota_us").write_text("-1")
        if callable(plant):
            plant()

    began, busy = time.perf_counter(), busy_seconds()
    process = Process(folder, [*FLAGS, "--data", folder.parent], hook)
    try:
        if setting == "wobbling":
            turns.append(fork(come_and_go, process.pid))
        while where == M and not plan.clock[plan.at] and not os.waitid(
                os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)
        turns += [fork(turn, process.pid) for turn in plant] if where == M else []
        code = process.code(300)
    finally:
        for helper in turns:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
    assert code == 0, process.text()
    took, (total, ours) = time.perf_counter() - began, busy_seconds() - busy
    if setting == "quiet" and total - ours > 0.1 * took:
        setting = "disturbed"
    ms = np.diff(plan.clock[:STEPS]) * 1e3
    old, new = ms[max(50, plan.at - 200) : plan.at], ms[plan.at :]
    return dict(cause=cause, run=run, at=plan.at, size=round(plan.size, 4), setting=setting,
                effect=float(new.mean() / old.mean()) - 1 if where else 0.0,
                step_ms=float(np.median(old)), took_s=took, others=(total - ours) / took)


def score(o: dict) -> dict:
    """What is judged, each with a truth value, and what is counted, each with an int."""
    where, phase, right, _ = PLANTS[o["cause"]]
    began, creeps, noisy = o["at"] + 1, o["cause"].endswith("grows"), o["setting"] != "quiet"

    def near(e) -> bool:
        low, high = e.get("since_range") or (e["since"], e["since"])
        low, high = min(low, e["since"]) - 3 * LOG, max(high, e["since"]) + 3 * LOG
        return low <= began <= high or creeps and e["since"] > began

    def wrong(e, cause) -> bool:
        share = re.search(r"(\d+)%\)$", cause)
        little = e is not event or where == M or share and int(share[1]) <= 50
        fits = event is e and right and re.search(right, cause)
        return not (fits or cause.startswith("unexplained")
                    or noisy and little and re.search(NEIGHBOUR, cause))

    slow = where == P or where == M and o["effect"] >= 0.05
    event = max(filter(near, o["events"]), key=lambda e: e["percent"], default=None)
    early = [e for e in o["events"] if e is not event and e["since"] < began - 5 * LOG]
    out = {"found": event is not None} if slow else {}
    if slow and event:
        far = abs(event["since"] - began) / LOG
        out |= {"creep since": far <= 10} if creeps else {"since": far <= 3}
        out |= {"shape": event["creeps"] == creeps, "blame": event.get("blames") == where}
        if phase:
            out["phase"] = [name for name, _ in event["phases"][:1]] == [phase]
    if where == R:
        out["trend"] = any(t["resource"] == o["cause"] for t in o["trends"])
    elif not creeps:
        out["false trends"] = len(o["trends"])
    out["wrong causes"] = sum(wrong(e, c) for e in o["events"] for c in e["causes"])
    out["false alarms"] = sum(not (noisy and e.get("blames") == M) for e in early)
    if where in (M, ""):
        out["machine on program"] = sum(e.get("blames") == P for e in o["events"])
    return out


def outcomes(causes: list[str], repeat: int, log: Path | None, folder: Path):
    text = "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60))
    write_tokens(folder / "train.bin", [text.encode()])
    if os.environ.get("DIAGNOSIS_AGAIN"):
        runs = filter(lambda o: o["cause"] in causes, map(json.loads, log.read_text().splitlines()))
    else:
        runs = (dict(cause=cause, run=run) for run in range(repeat) for cause in causes)
    for o in runs:
        name = f"{o['cause']} {o['run']}"
        kept = (log.with_suffix("") if log else folder) / name
        if "at" not in o:
            (folder / name).mkdir()
            o = carry_out(o["cause"], o["run"], folder / name)
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / name / "r/metrics.jsonl", kept / "metrics.jsonl")
        told = report(kept)
        o |= {"events": told["slowdowns"], "trends": told.get("trends", [])}
        if log and not os.environ.get("DIAGNOSIS_AGAIN"):
            with open(log, "a") as file:
                file.write(json.dumps(o, default=float) + "\n")
        yield o


JUDGED = ("found", "phase", "since", "creep since", "shape", "blame", "trend")
COUNTED = ("wrong causes", "false alarms", "machine on program", "false trends")


def main(options) -> list[Figure]:
    log = os.environ.get("DIAGNOSIS_LOG") or options.json and f"{options.json}.runs.jsonl"
    repeat = int(os.environ.get("DIAGNOSIS_REPEAT", 1 if options.quick else 10))
    only = os.environ.get("DIAGNOSIS_ONLY", "")
    causes = [name for name in (QUICK if options.quick and not only else PLANTS) if only in name]
    groups = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            CGROUP.mkdir()
            stack.callback(CGROUP.rmdir)
        except OSError as e:
            print(f"no runs under a CPU quota: {e}")
            causes = [name for name in causes if name != "CPU quota"]
        for o in outcomes(causes, repeat, log and Path(log), Path(folder)):
            s = score(o)
            low = max(x for x in (5, 10, 25, 50) if x <= max(5, 100 * o["size"]))
            size = [f"from {low} % of a step"] if PLANTS[o["cause"]][0] == P else []
            for group in (o["cause"], o["setting"], *size, "all"):
                groups[group].append(s)
            bad = [k for k in JUDGED if s.get(k) is False] + [k for k in COUNTED if s.get(k)]
            print(f"{o['cause']} {o['run']} ({o['setting']}, {o['took_s']:.0f} s): {o['size']:.0%} "
                  f"of {o['step_ms']:.1f} ms from step {o['at'] + 1}, really {o['effect']:+.0%}: "
                  f"{', '.join(bad) or 'right'}", flush=True)
    print(f"{'':26s}runs" + "".join(f"{name[:12]:>13s}" for name in JUDGED + COUNTED))
    figures, lines = [], {name: i for i, name in enumerate(PLANTS)}
    for group, scores in sorted(groups.items(), key=lambda x: (lines.get(x[0], 99), x[0])):
        line = f"{group:26s}{len(scores):4d}"
        for name in JUDGED + COUNTED:
            values = [s[name] for s in scores if name in s]
            of = f"/{len(values)}" if name in JUDGED else ""
            line += f"{f'{sum(values)}{of}' if values else '':>13s}"
            if group == "all" and values:
                value = sum(values) / len(values) if of else sum(values)
                aim = "" if name == "creep since" else ">= 0.95" if of else "<= 0"
                figures.append(Figure(f"planted slow-downs: {name}", f"{len(values)} real runs",
                                      [value], aim))
        print(line)
    return figures
