"""What --compile would save of a long run on a CPU, which waits while tools.advice measures it."""

import contextlib
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from steady.watch import proc

LONG = 2 * 3600.0  # seconds that are left, of which measuring may take 1 %


def compile_saving(cfg, ranks, steps: int, left: float) -> float:
    """Seconds that --compile would save of those left for so many steps; 0 below 5 % or unknown."""
    on_cpu = ranks.device.type == "cpu" and cfg.compile is None and ranks.world_size == 1
    others = cfg.data_mode != "stream" or cfg.lora_rank or cfg.model == "transformers"
    if left < LONG or not on_cpu or others or cfg.max_minutes:
        return 0.0
    if proc.available_bytes() < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024:
        return 0.0  # a container may be killed as a whole
    options = json.dumps(asdict(replace(cfg, data=[], val_data=[])))  # the files may be many
    command = [sys.executable, "-m", "tools.advice", options, str(ranks.micro_batch)]
    ends = time.monotonic() + min(left / 100, 3 * (cfg.hang_seconds or 300))
    # no memory or no process left to start it, or a library printed something
    with (contextlib.suppress(OSError, ValueError),
          subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child):
        while child.poll() is None and time.monotonic() < ends and not any(ranks.stop.received):
            time.sleep(0.1)
        child.kill()
        if not child.wait():  # or as where there is no C++ compiler
            head, with_two, compiling = json.loads(child.stdout.readline())
            whole = head + cfg.n_layer / 2 * (with_two - head)  # of a micro-batch
            saved = steps * -(-cfg.batch_size // ranks.micro_batch) * whole - compiling
            return saved if saved > 0.05 * left else 0.0
    return 0.0
