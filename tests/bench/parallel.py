"""What --parallel takes and saves, on real ranks of gloo: memory and time.

    python -m tests.bench parallel

Four ranks on two cores: their times say how much more work a step is, not how fast a cluster is.
Memory is the growth of a rank's resident set from before the run to its peak, with each large
tensor mapped by itself.
"""

import contextlib
import io
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
from pathlib import Path

import torch

import config
import train
from steady.guard.process import exit_code, leave
from tests.bench.common import Figure, compare, in_turns, random_tokens
from tools import estimate

LARGE = ["--n_layer", "10", "--n_head", "8", "--n_kv_head", "8", "--d_model", "1024", "--d_ff",
         "2816", "--vocab_size", "8000"]
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--vocab_size", "2000"]
COMMON = ["--seq_len", "64", "--batch_size", "4", "--optimizer", "adamw", "--precision", "fp32",
          "--eval_interval", "0", "--no_tensorboard", "--log_interval", "2", "--monitor", "light"]


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024


def rank_main(rank: int, world_size: int, ports: list, folder: str, flags: list, peak: bool,
              answers):
    """One rank of a run; rank 0 answers with bytes and ms/step."""
    os.chdir(folder)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                       LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(ports[0]))
    torch.set_num_threads(1)
    train.sample = lambda run: ""
    if peak:  # loads the libraries
        with contextlib.redirect_stdout(io.StringIO()):
            tiny = ["--d_model", "64", "--d_ff", "64", "--n_layer", "1", "--vocab_size", "2000"]
            assert exit_code(train.main, [*flags, *tiny, "--out_dir", "tiny"]) == 0
        os.environ["MASTER_PORT"] = str(ports[1])
    before = status("VmRSS")

    with contextlib.redirect_stdout(io.StringIO()):
        assert exit_code(train.main, [*flags, "--out_dir", "r"]) == 0
    if rank == 0:
        lines = Path("r/metrics.jsonl").read_text().splitlines()
        ms = [json.loads(line).get("perf/step_ms_median") for line in lines]
        ms = statistics.median([value for value in ms if value][1:] or [0.0])
        answers.put(dict(peak=status("VmHWM") - before, ms=ms))
        answers.close()
        answers.join_thread()
    leave(0)


def measure(way: str, ranks: int, shape: list, steps: int, peak: bool = False) -> dict:
    """What rank 0 of a fresh run found."""
    spawn = multiprocessing.get_context("spawn")
    if peak:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**5, 2000)
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1], two.getsockname()[1]]
        flags = [*shape, *COMMON, "--data", folder, "--max_steps", str(steps), "--save_interval",
                 "0", "--parallel", way]
        answers = spawn.Queue()
        group = [spawn.Process(target=rank_main, args=(rank, ranks, ports, folder, flags, peak,
                                                       answers)) for rank in range(ranks)]
        for process in group:
            process.start()
        found = answers.get(timeout=300)
        for process in group:
            process.join()
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    return found


def main(options) -> list[Figure]:
    rounds, ranks = (1, 2) if options.quick else (3, 4)
    large, steps = (SMALL, 4) if options.quick else (LARGE, 6)
    peaks = in_turns({way: lambda way=way: measure(way, ranks, large, steps, True)["peak"] / 1e6
                      for way in estimate.WAYS}, 1 if options.quick else 2)
    cfg = config.resolve(config.parse([*large, *COMMON]))
    said = estimate.estimate(cfg, ranks, torch.float32, train.make_optimizers)["memory"]
    figures = [compare(f"memory of a rank, {way}, {ranks} ranks", "ddp", peaks[way], peaks["ddp"],
                       "{:.0f} MB", "<= 0.4" if way == "zero3" else "")
               for way in ("zero2", "zero3")]
    for way in estimate.WAYS:
        figures.append(compare(f"--estimate, {way}, {ranks} ranks", "memory of a rank",
                               [sum(said[way].values()) / 1e6] * len(peaks[way]), peaks[way],
                               "{:.0f} MB"))
    ms = in_turns({way: lambda way=way: measure(way, 2, SMALL, 20)["ms"]
                   for way in estimate.WAYS}, rounds)
    figures += [compare(f"a step, {way}, 2 ranks", "ddp", ms[way], ms["ddp"], "{:.1f} ms")
                for way in ("zero2", "zero3")]
    return figures
