"""A run of train.py in which something is planted at a random line; started by diagnosis.py.

The line is that of a statement, before which a call is inserted as the module is compiled. Run as
text with the file name "<plant>", so that the sampler books the time to the line that calls.
"""

import ast
import builtins
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

spec = json.loads(sys.argv[1])
clock = np.memmap("clock", np.float64, "r+", shape=(spec["steps"] + 2,))
AT, MATRIX = spec["at"], torch.randn(192, 192)
READ, WRITE = os.pipe()
rank = int(os.environ.get("RANK", 0))
mine = not spec.get("slow_rank") or rank == 1
state = dict(calls=0, per_step=1.0, step_s=0.0, owed=0.0)


def late() -> bool:
    return clock[AT] > 0 and mine


def begin_step(seed, step, rank_):
    if rank == 0:
        clock[min(step, spec["steps"] + 1)] = now = time.perf_counter()
        if clock[AT] and now - clock[AT] > 25 and spec["ranks"] == 1:  # many times as slow
            os.kill(os.getpid(), signal.SIGTERM)
    if step == AT - 1:
        state["per_step"] = max(1.0, state["calls"] / max(1, AT - 1))
    plain_seed(seed, step, rank_)


def more() -> float:
    """Seconds to be added by each call, in the mean."""
    if not state["step_s"]:
        state["step_s"] = float(np.median(np.diff(clock[AT - 100 : AT + 1])))
    return spec["size"] * state["step_s"] / state["per_step"]


def plant():
    state["calls"] += 1
    if not late():
        return
    state["owed"] += more()
    if spec["kind"] == "grows":
        return grow()
    if spec["kind"] == "gc":
        while state["owed"] > state.get("cost", 0.0):
            began = time.perf_counter()
            gc.collect()
            state["cost"] = time.perf_counter() - began
            state["owed"] -= state["cost"]
    elif state["owed"] > 2e-4:
        UNITS[spec["kind"]](state["owed"])
        state["owed"] = 0.0


def plant_in_worker():
    if late():
        more()
        time.sleep(spec["workers"] * (1 + spec["size"]) * state["step_s"])


def until(seconds, do):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        do()


def python(seconds):
    until(seconds, lambda: sum(i * i for i in range(50)))


def product(seconds):
    until(seconds, lambda: MATRIX @ MATRIX)


def block(seconds):
    threading.Timer(seconds, os.write, (WRITE, b"x")).start()
    os.read(READ, 1)


def grow():
    kept = state.setdefault("kept", [])
    if "cost" not in state:
        sample = [1] * 100_000
        began = time.perf_counter()
        sum(sample)
        state["cost"] = (time.perf_counter() - began) / len(sample)
    share = (int((clock > 0).sum()) - AT) / (spec["steps"] - AT)
    kept.extend([1] * (int(share * more() / state["cost"]) - len(kept)))
    sum(kept)


UNITS = {"slow rank": time.sleep, "sleep": time.sleep, "python": python, "product": product,
         "block": block}


def compute(do):
    while not late():
        time.sleep(0.005)
    while True:
        do()


# --- the line ---------------------------------------------------------------------------------


def statements(body, inside_loop: bool):
    """Statements that run whenever the function does, or each time around its outer loop."""
    for node in body:
        if inside_loop and not isinstance(node, (ast.Expr, ast.Return)):
            yield body, node
        if isinstance(node, ast.While):
            yield from statements(node.body, True)
        elif isinstance(node, (ast.For, ast.With)):
            yield from statements(node.body, inside_loop)


class Planter(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.module, self.function = spec["place"].split(":")

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        loader = importlib.machinery.SourceFileLoader(name, found.origin)
        loader.get_code = lambda _: self.compiled(found.origin)
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)

    def compiled(self, file):
        tree = ast.parse(Path(file).read_text())
        body = tree.body
        for part in self.function.split("."):
            (found,) = (n for n in body if getattr(n, "name", "") == part)
            body = found.body
        places = list(statements(body, not any(isinstance(n, ast.While) for n in body)))
        owner, node = places[int(spec["line"] * len(places))]
        call = ast.parse("__import__('builtins').__plant__()").body[0]
        for each in ast.walk(call):
            ast.copy_location(each, node)
            if hasattr(each, "end_lineno"):
                each.end_lineno = node.lineno
        owner.insert(owner.index(node), call)
        if rank == 0:
            last = max(getattr(n, "end_lineno", 0) or 0 for n in ast.walk(node))
            short = str(Path(*Path(file).parts[-2:]))
            Path("line.json").write_text(json.dumps([short, node.lineno, last, part]))
        return compile(tree, file, "exec")


sys.path.insert(0, spec["root"])
in_worker = spec["workers"] and spec["place"].startswith(("data:", "my_dataset:"))
builtins.__plant__ = plant_in_worker if in_worker else plant
if spec["place"] and spec["kind"] not in ("thread", "numpy thread"):
    sys.meta_path.insert(0, Planter())
if spec["place"].startswith("my_dataset"):
    import data

    sys.path.insert(0, os.getcwd())
    data.Mixture = importlib.import_module("my_dataset").Mine
import train  # noqa: E402

plain_seed, train.seed_everything = train.seed_everything, begin_step
if spec["kind"] == "backward":
    plain_forward = train.Transformer.forward

    def hooked(self, *args, **kwargs):
        losses = plain_forward(self, *args, **kwargs)
        if losses.requires_grad:
            losses.register_hook(lambda grad: plant_backward())
        return losses

    def plant_backward():
        state["calls"] += 1
        if late():
            python(more())

    train.Transformer.forward = hooked
if spec["kind"] == "thread":
    threading.Thread(target=compute, args=(lambda: sum(range(200)),), daemon=True).start()
if spec["kind"] == "numpy thread":
    big = np.random.default_rng(0).random((300, 300))
    threading.Thread(target=compute, args=(lambda: np.sort(big, axis=0),), daemon=True).start()
sys.argv = ["train.py", *spec["flags"]]
train.process.run(train.main)
