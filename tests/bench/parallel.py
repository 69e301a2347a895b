"""Memory of a rank with each --parallel, and as --estimate predicts it, on four ranks of gloo.

    python -m tests.bench parallel

Memory is the growth of a rank's resident set from before the run to its peak, with each large
tensor mapped by itself.
"""

import contextlib
import ctypes
import io
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import config
import train
from steady.guard.process import exit_code, leave
from tests.bench.common import SPAWN, Figure, compare, random_tokens
from tests.conftest import free_port
from tools import estimate

WAYS = ("ddp", "zero2", "zero3")
LARGE = ["--n_layer", "10", "--n_head", "8", "--n_kv_head", "8", "--d_model", "1024", "--d_ff",
         "2816", "--vocab_size", "8000"]
TINY = ["--n_layer", "1", "--d_model", "64", "--d_ff", "64", "--vocab_size", "2000"]
COMMON = ["--seq_len", "64", "--batch_size", "4", "--optimizer", "adamw", "--precision", "fp32",
          "--eval_interval", "0", "--save_interval", "0", "--no_tensorboard"]


def status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024


def rank_main(rank: int, ranks: int, port: int, folder: str, flags: list[str], answers):
    """One rank of two runs, of which the first loads libraries; rank 0 answers for the second."""
    os.chdir(folder)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                       LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                       MALLOC_MMAP_THRESHOLD_=str(2**18))  # so that the program leaves it alone
    ctypes.CDLL(None).mallopt(-3, 2**18)  # the same, in a process that has begun
    torch.set_num_threads(1)
    train.sample = lambda run: ""
    with contextlib.redirect_stdout(io.StringIO()):
        assert exit_code(train.main, [*flags, *TINY, "--max_steps", "2", "--out_dir", "tiny"]) == 0
        before = status("VmRSS")
        assert exit_code(train.main, [*flags, "--max_steps", "6", "--out_dir", "r"]) == 0
    if rank == 0:
        answers.put((status("VmHWM") - before) / 1e6)
        answers.close()
        answers.join_thread()
    leave(0)


def memory_mb(way: str, ranks: int, shape: list[str]) -> float:
    """Of rank 0 of a fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**5, 2000)
        flags, port = [*shape, *COMMON, "--data", folder, "--parallel", way], free_port()
        answers = SPAWN.Queue()
        group = [SPAWN.Process(target=rank_main, args=(rank, ranks, port, folder, flags, answers))
                 for rank in range(ranks)]
        for process in group:
            process.start()
        found = answers.get(timeout=300)
        for process in group:
            process.join()
    return found


def main(options) -> list[Figure]:
    ranks, shape = (2, TINY) if options.quick else (4, LARGE)
    mb = {way: memory_mb(way, ranks, shape) for way in WAYS}
    cfg = config.resolve(config.parse([*shape, *COMMON]))
    predicted = {way: estimate.estimate(replace(cfg, parallel=way), ranks, torch.float32,
                                        train.make_optimizers)["memory"] for way in WAYS}
    figures = [compare(f"memory of a rank, {way}, {ranks} ranks", "ddp", [mb[way]], [mb["ddp"]],
                       "{:.0f} MB", "<= 0.4" if way == "zero3" else "")
               for way in ("zero2", "zero3")]
    return figures + [compare(f"--estimate, {way}, {ranks} ranks", "memory of a rank",
                              [sum(predicted[way].values()) / 1e6], [mb[way]], "{:.0f} MB")
                      for way in WAYS]
