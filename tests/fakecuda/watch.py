"""What host and device exchange, by step and line, in a process that sees the fake device."""

import contextlib
import ctypes
import json
import sys
import threading
from collections import Counter
from pathlib import Path

import torch
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parent.parent.parent
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t)
OF_DEVICE = ("launches", "allocations", "frees", "flash_forward", "flash_backward")
COUNTERS = (*OF_DEVICE, "cudnn", "graphs", "graph breaks")


class Watch:
    """The steps of a run so far: step → {"kind line": times}, the device's and Dynamo's counters.

    Step 0 is what comes before the first one. What belongs to a step lasts until the next begins:
    its log, evaluation, sample and checkpoint. The end of the run belongs to the last step.
    """

    def __init__(self, memory: int = 80 * 10**9):
        self.device = ctypes.CDLL(None)  # the preloaded library
        self.device.fake_set_memory(ctypes.c_size_t(memory))
        self.listener = LISTENER(self.exchange)
        self.device.fake_listen(self.listener)
        self.steps, self.before, self.step = {}, Counter(), 0
        self.cudnn = stand_in_for_cudnn()

    def counters(self) -> Counter:
        found = {name: getattr(self.device, f"fake_{name}")() for name in OF_DEVICE}
        found["cudnn"] = stand_in_for_cudnn.calls
        found["graphs"] = counters["stats"]["unique_graphs"]
        found["graph breaks"] = sum(counters["graph_break"].values())
        return Counter(found)

    def begin(self, step: int):
        """What comes from now on belongs to `step`."""
        now = self.counters()
        self.steps.setdefault(self.step, Counter()).update(now - self.before)
        self.before, self.step = now, step

    def exchange(self, kind: bytes, size: int):
        if threading.current_thread() is not threading.main_thread() and beside_training():
            return
        self.steps.setdefault(self.step, Counter())[f"{kind.decode()} {caller()}"] += 1

    def write(self, path: Path):
        self.begin(self.step)
        path.write_text(json.dumps(self.steps))


def beside_training() -> bool:
    """Whether this is a thread of Python's, such as the writer of checkpoints; not autograd's."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


def caller() -> str:
    """The innermost line of the program that led here: "monitor.py:227 gather_values"."""
    frame = sys._getframe()
    while frame:
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "backward"


def stand_in_for_cudnn() -> torch.library.Library:
    """Of its attention, which torch prefers on an H100; cuDNN itself needs a driver.

    It is there for as long as somebody holds the result.
    """
    def forward(query, key, value, bias, *_, **__):
        stand_in_for_cudnn.calls += 1
        B, H, T, _ = query.shape
        seed = torch.empty((), dtype=torch.long, device=query.device)
        return (torch.empty_like(query), query.new_empty(B, H, T, 1, dtype=torch.float32), None,
                None, T, key.shape[2], seed, seed, None)

    def backward(grad, query, key, value, *_, **__):
        return tuple(torch.empty_like(x) for x in (query, key, value))

    stand_in_for_cudnn.calls = 0
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    return library


def leave_weights_unchecked():
    """What is set on this device stays unset, and its memory holds arbitrary values."""
    from steady.ranks import parallel

    parallel.all_set = lambda *_, **__: contextlib.nullcontext()


def watch(path: Path, memory: int = 80 * 10**9):
    """Watch the run that this process is about to make; writes JSON to `path` at its end."""
    import train

    leave_weights_unchecked()
    found, main, seed = Watch(memory), train.main, train.seed_everything

    def seed_everything(number, step, rank):  # with which each step begins
        found.begin(step + 1)
        seed(number, step, rank)

    def watched(argv):
        try:
            return main(argv)
        finally:
            found.write(path)

    train.seed_everything, train.main = seed_everything, watched
