"""What --parallel takes and saves, on real ranks of gloo: memory and time.

    python -m tests.bench parallel

Four ranks on two cores: their times say how much more work a step is, not how fast a cluster is.
Memory is the growth of a rank's resident set from before the run to its peak, with each large
tensor mapped by itself.
"""

import contextlib
import ctypes
import io
import json
import os
import socket
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import config
import train
from steady.guard.process import exit_code, leave
from tests.bench.common import Figure, compare, fresh, in_turns, random_tokens
from tools import estimate

WAYS = "ddp", "zero2", "zero3"
LARGE = ["--n_layer", "10", "--n_head", "8", "--n_kv_head", "8", "--d_model", "1024", "--d_ff",
         "2816", "--vocab_size", "8000"]
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--vocab_size", "2000"]
TINY = ["--n_layer", "1", "--d_model", "64", "--d_ff", "64", "--vocab_size", "2000"]
COMMON = ["--seq_len", "64", "--batch_size", "4", "--optimizer", "adamw", "--precision", "fp32",
          "--eval_interval", "0", "--no_tensorboard", "--log_interval", "2", "--monitor", "light"]


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024


def rank_main(rank: int, world_size: int, port: int, folder: str, flags: list, answers):
    """One rank of two runs, of which the first loads libraries; rank 0 answers for the second."""
    os.chdir(folder)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                       LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port),
                       MALLOC_MMAP_THRESHOLD_=str(2**18))  # so that the program leaves it alone
    ctypes.CDLL(None).mallopt(-3, 2**18)  # the same, in a process that has begun
    torch.set_num_threads(1)
    train.sample = lambda run: ""
    with contextlib.redirect_stdout(io.StringIO()):
        assert exit_code(train.main, [*flags, *TINY, "--max_steps", "2", "--out_dir", "tiny"]) == 0
        before = status("VmRSS")
        assert exit_code(train.main, [*flags, "--out_dir", "r"]) == 0
    if rank == 0:
        lines = Path("r/metrics.jsonl").read_text().splitlines()
        ms = [json.loads(line).get("perf/step_ms_median") for line in lines]
        ms = statistics.median([value for value in ms if value][1:] or [0.0])
        answers.put(dict(MB=(status("VmHWM") - before) / 1e6, ms=ms))
        answers.close()
        answers.join_thread()
    leave(0)


def measure(way: str, ranks: int, shape: list, steps: int) -> dict:
    """What rank 0 of a fresh run found."""
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**5, 2000)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [*shape, *COMMON, "--data", folder, "--max_steps", str(steps), "--save_interval",
                 "0", "--parallel", way]
        answers = fresh().Queue()
        group = [fresh().Process(target=rank_main, args=(rank, ranks, port, folder, flags, answers))
                 for rank in range(ranks)]
        for process in group:
            process.start()
        found = answers.get(timeout=300)
        for process in group:
            process.join()
    return found


def main(options) -> list[Figure]:
    ranks, large, steps = (2, TINY, 4) if options.quick else (4, LARGE, 6)
    peaks = in_turns({way: lambda way=way: measure(way, ranks, large, steps)["MB"]
                      for way in WAYS}, 1)
    cfg = config.resolve(config.parse([*large, *COMMON]))
    said = {way: estimate.estimate(replace(cfg, parallel=way), ranks, torch.float32,
                                   train.make_optimizers)["memory"] for way in WAYS}
    figures = [compare(f"memory of a rank, {way}, {ranks} ranks", "ddp", peaks[way], peaks["ddp"],
                       "{:.0f} MB", "<= 0.4" if way == "zero3" else "")
               for way in ("zero2", "zero3")]
    for way in WAYS:
        figures.append(compare(f"--estimate, {way}, {ranks} ranks", "memory of a rank",
                               [sum(said[way].values()) / 1e6], peaks[way], "{:.0f} MB"))
    if options.quick:
        return figures
    ms = in_turns({way: lambda way=way: measure(way, 2, SMALL, 20)["ms"]
                   for way in WAYS}, 2)
    return figures + [compare(f"a step, {way}, 2 ranks", "ddp", ms[way], ms["ddp"], "{:.1f} ms")
                      for way in ("zero2", "zero3")]
