"""A process of a long run on a CPU, which waits for it: what --compile would save.

    python -m tools.advice OPTIONS_AS_JSON MICRO_BATCH
"""

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from config import Config
from model import Transformer
from steady.models import device as devices


def measure(cfg: Config, micro_batch: int) -> list[float]:
    """Seconds saved without blocks, with two, and those that compiling took."""
    with contextlib.suppress(OSError):  # if memory runs out, this process ends, not the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    devices.configure(replace(cfg, compile=True), torch.device("cpu"))
    dtype, compiling = devices.pick_dtype(cfg.precision, torch.device("cpu")), 0.0
    tokens, found = torch.randint(cfg.vocab_size, (micro_batch, cfg.seq_len)), []

    def seconds(forward) -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = forward(tokens, tokens).sum()
        loss.backward()
        return time.perf_counter() - began

    for blocks in 0, 2:
        model = Transformer(replace(cfg, n_layer=blocks))
        model.compile()
        compiling += seconds(model)
        turns = [seconds(model.forward) - seconds(model) for _ in range(8)]
        found.append(statistics.median(turns[1:]))
    return [*found, compiling]


if __name__ == "__main__":
    # the training holds the other end of stdin: this ends with it
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints
        found = measure(Config(**json.loads(sys.argv[1])), int(sys.argv[2]))
    print(json.dumps(found))
