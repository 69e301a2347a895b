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
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import model
import train
from steady.tokens.files import write_tokens
from steady.watch import trends as limits
from steady.watch.report import report, worth_saying
from steady.watch.sinks import Sinks
from tests.bench.common import Figure, seconds
from tests.conftest import TINY, Process

STEPS, LOG, LAYERS = 750, 10, 2
FLAGS = [*TINY, "--n_layer", LAYERS, "--d_model", 64, "--d_ff", 192, "--seq_len", 32,
         "--num_workers", 0, "--eval_interval", 0, "--save_interval", 0, "--no_tensorboard",
         "--log_interval", LOG, "--max_steps", STEPS, "--out_dir", "r"]
CGROUP = Path(f"/sys/fs/cgroup/cpu/diagnosis{os.getpid()}")
plan = SimpleNamespace()  # of this run: cause, run, at, size, seed, clock, step, step_s

# --- what is planted in the program: each function is called in its process before it trains -----


def more() -> float:
    """Seconds to be added to this step, on average."""
    return plan.size * plan.step_s if plan.step >= plan.at else 0.0


def begin_step(_, seed: int, step: int, rank: int):
    plan.step, plan.clock[min(step, STEPS)] = step, time.perf_counter()
    if step == STEPS:  # of a longer one
        os.kill(os.getpid(), signal.SIGTERM)
    if step == plan.at:
        plan.step_s = float(np.median(np.diff(plan.clock[step - 100 : step + 1])))


def after(owner, name: str, do):
    """Call do(result, *arguments) after each call of a function."""
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        result = plain(*args, **kwargs)
        do(result, *args)
        return result

    setattr(owner, name, call)


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


def work(owner, name, unit, share=1.0):
    return lambda: after(owner, name, paced(unit, share))


def in_backward(unit):
    do = paced(unit)
    return lambda: after(*FORWARD, lambda losses, *_: losses.register_hook(do) and None)


def growing(owner, name, entry, traverse):
    """A list that has, at the end of the run, as many entries as take as long as is to be added."""
    kept, owed = [], 0.0

    def grow(*_):
        nonlocal owed
        if plan.step == plan.at:
            sample = [entry] * 10_000
            plan.cost = min(seconds(traverse, sample) for _ in range(5)) / len(sample)
        if more():
            owed += more() / (STEPS - plan.at) / plan.cost
            kept.extend([entry] * (int(owed) - len(kept)))
            traverse(kept)

    return lambda: after(owner, name, grow)


def busy_thread():
    while True:  # in turns of up to 10 ms, in which the loop has to ask for Python's lock
        until = time.perf_counter() + 0.02 * plan.size / (1 + plan.size) * (more() > 0)
        while time.perf_counter() < until:
            python_loop()
        time.sleep(0.02 / (1 + plan.size))


def kept_each(make, every=1):
    kept = []
    return lambda: after(*TIDY, lambda *_: plan.step % every or not more() or kept.append(make()))


def python_loop(*_):
    sum(i * i for i in range(300))


# --- what the machine does -------------------------------------------------------------------


def fork(how: str, pid: int) -> int:
    """A process that disturbs the machine, or the process `pid`, until it is killed."""
    parent = os.getpid()
    if helper := os.fork():
        return helper
    with contextlib.suppress(BaseException):
        os.setsid()
        rng = random.Random(plan.seed)
        while os.getppid() == parent:
            if how == "stop":
                for number, pause in ((signal.SIGSTOP, 1), (signal.SIGCONT, 2)):
                    os.kill(pid, number)
                    time.sleep(pause * (0.005 + 0.02 * plan.size))
            elif how == "quota":
                period = int((CGROUP / "cpu.cfs_period_us").read_text())
                (CGROUP / "cpu.cfs_quota_us").write_text(str(int(period / (1 + plan.size))))
                time.sleep(1)
            elif how == "copy":
                np.copyto(*ARRAYS)
            elif how == "come and go" and rng.random() < 0.001:  # after 2 s on average
                time.sleep(rng.uniform(0.5, 3))
            else:
                for process in (0, pid) if how == "same core" else ():
                    os.sched_setaffinity(process, {0})
                for _ in range(100):  # 2 ms
                    python_loop()
    os._exit(0)


# --- all of them: name → (where, phase, what causes may be called, what plants it) ---------------

MATRIX, DENORMAL = torch.randn(64, 64), torch.full((2048,), 1e-40)
UNSORTED, ARRAYS = np.random.default_rng(0).random(1000), np.ones((2, 1 << 22))
PLAIN_FORWARD, NAP = train.Transformer.forward, lambda *_: time.sleep(1e-4)
FORWARD, LAYER = (train.Transformer, "forward"), (model.FeedForward, "forward")
BATCH, UPDATE, TIDY = (train.Mixture, "batch"), (train, "update"), (train, "tidy_memory")
DATA, NEIGHBOUR = "waits for data", "contention|probe|hypervisor"
P, M, R, THREAD = "program", "machine", "resource", partial(threading.Thread, daemon=True)
PLANTS = {
    "forward: sleep": (P, "forward", "", work(*LAYER, NAP, 1 / LAYERS)),
    "forward: Python loop": (P, "forward", "", work(*LAYER, python_loop, 1 / LAYERS)),
    "forward: matrix product": (P, "forward", "", work(*FORWARD, lambda *_: MATRIX @ MATRIX)),
    "forward: done again": (P, "forward", "", work(
        *FORWARD, lambda _, net, x, y, *__: PLAIN_FORWARD(net, x[:1], y[:1]))),
    "forward: new buffers": (P, "forward", "", work(*FORWARD, lambda *_: torch.ones(1 << 17))),
    "forward: list grows": (P, "forward", "grows", growing(*FORWARD, 1, sum)),
    "backward: Python loop": (P, "backward", "", in_backward(python_loop)),
    "backward: denormals": (P, "backward", "", in_backward(lambda _: DENORMAL * 0.5)),
    "optimizer: product": (P, "optimizer", "", work(*UPDATE, lambda *_: MATRIX @ MATRIX)),
    "optimizer: clones": (P, "optimizer", "", work(
        *UPDATE, lambda _, run, *__: [p.detach().clone() for p in run.model.parameters()])),
    "optimizer: item() of each": (P, "optimizer", "", work(
        *UPDATE, lambda _, run, *__: [run.monitor.log(f"norm/{name}", p.detach().norm().item())
                                 for name, p in run.model.named_parameters()])),
    "optimizer: gc.collect": (P, "optimizer", "garbage", work(*UPDATE, lambda *_: gc.collect())),
    "data: sort": (P, "data", DATA, work(*BATCH, lambda *_: np.sort(UNSORTED))),
    "data: stall every 5th": (P, "data", DATA, lambda: after(
        *BATCH, lambda *_: plan.step % 5 or time.sleep(5 * more()))),
    "data: regular expression": (P, "data", DATA, work(
        *BATCH, lambda batch, mixture, *_: re.findall(
            r"(\d+) \+ (\d+) = (\d)", mixture.decode(batch.tokens[0].tolist())))),
    "data: reads a file": (P, "data", f"{DATA}|disk", work(
        *BATCH, lambda *_: Path(__file__).read_bytes())),
    "other: sleep": (P, "other", "", work(train.Guard, "check", NAP)),
    "other: list grows": (P, "other", "grows", growing(*TIDY, 1, sum)),
    "other: json grows": (P, "other", "grows", growing(*TIDY, {"loss": 1 / 7}, json.dumps)),
    "logging: sink blocks": (P, "logging", "sink that blocks", work(Sinks, "write", NAP, LOG)),
    "any: thread that computes": (
        P, "", "", lambda: THREAD(target=busy_thread).start()),
    "2 busy processes": (M, "", NEIGHBOUR, ["spin"] * 2),
    "4 busy processes": (M, "", NEIGHBOUR, ["spin"] * 4),
    "memory bandwidth": (M, "", NEIGHBOUR, ["copy"]),
    "SIGSTOP": (M, "", "by signals", ["stop"]),
    "same core": (M, "", NEIGHBOUR, ["same core"]),
    "CPU quota": (M, "", "quota", ["quota"]),
    "host memory": (R, "", "", kept_each(lambda: b"x" * (1 << 20))),
    "open files": (R, "", "", kept_each(lambda: open("/dev/null"))),
    "threads": (R, "", "", kept_each(lambda: THREAD(target=threading.Event().wait).start(), 5)),
    "nothing": ("", "", "", []),
}
QUICK = ("forward: sleep", "data: sort", "other: list grows", "4 busy processes", "nothing")

# --- runs ------------------------------------------------------------------------------------


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
    helpers, setting = [], "wobbling" if run % 2 else "quiet"

    def hook():
        after(train, "seed_everything", begin_step)
        if cause == "CPU quota":
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
            (CGROUP / "cpu.cfs_quota_us").write_text("-1")
        if where == R:  # a machine that is full after a thousand steps more, in a long run
            limits.limits = lambda row, _: {
                "limit/host_gb": row["memory/host_anonymous_gb"] + 1.5, "limit/threads": 300,
                "limit/open_files": row["memory/open_files"] + 1500}
        if callable(plant):
            plant()

    began, busy = time.perf_counter(), busy_seconds()
    long = ["--max_steps", 10**6] if where == R else []
    process = Process(folder, [*FLAGS, *long, "--data", folder.parent], hook)
    try:
        if setting == "wobbling":
            helpers.append(fork("come and go", process.pid))
        while where == M and not plan.clock[plan.at] and not os.waitid(
                os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)
        helpers += [fork(how, process.pid) for how in plant] if where == M else []
        code = process.code(300)
    finally:
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
    assert code == (128 + signal.SIGTERM if long else 0), process.text()
    took, (total, ours) = time.perf_counter() - began, busy_seconds() - busy
    if setting == "quiet" and total - ours > 0.1 * took:
        setting = "disturbed"
    ms = np.diff(plan.clock[:STEPS]) * 1e3
    old, new = ms[max(50, plan.at - 200) : plan.at], ms[plan.at :]
    return dict(cause=cause, run=run, at=plan.at, size=round(plan.size, 4), setting=setting,
                effect=float(new.mean() / old.mean()) - 1 if where else 0.0,
                step_ms=float(np.median(old)), took_s=took, others=(total - ours) / took,
                metrics=folder / "r/metrics.jsonl")


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

    slow = phase or where in (P, M) and o["effect"] >= 0.05  # no phase: what it costs is not sure
    event = max(filter(near, o["events"]), key=lambda e: e["percent"], default=None)
    early = [e for e in o["events"] if e is not event and e["since"] < began - 5 * LOG]
    out = {"found": event is not None} if slow else {}
    if slow and event:
        far = abs(event["since"] - began) / LOG
        out |= {"creep since": far <= 10} if creeps else {"since": far <= 3}
        out |= {"shape": event["creeps"] == creeps}
        if event["kind"] == "step":  # a sink may be slow for a reason of the machine or not
            out["blame"] = event["blames"] == where
        if phase:
            out["phase"] = [name for name, _ in event["phases"][:1]] == [phase]
    if where == R:
        out["trend"] = any(text.startswith(o["cause"]) for text in o["trends"])
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
        name, new = f"{o['cause']} {o['run']}", "at" not in o
        kept = (log.with_suffix("") if log else folder / "kept") / name
        if new:
            o = carry_out(o["cause"], o["run"], Path(tempfile.mkdtemp(dir=folder)))
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(o.pop("metrics"), kept / "metrics.jsonl")
        told = report(kept)
        events = [vars(event) | {"causes": [str(cause) for cause in event.causes]}
                  for event in told["slowdowns"] if worth_saying(event)]
        o |= {"events": events, "trends": told["runs_out"]}
        if log and new:
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
