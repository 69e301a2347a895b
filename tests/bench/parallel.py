"""What --parallel takes and saves, on real ranks of gloo: memory, time, checkpoints.

    python -m tests.bench parallel

Four ranks on two cores: their times say how much more work a step is, not how fast a cluster is.
Memory is the growth of a rank's resident set from before the run to its peak, with each large
tensor mapped by itself; the largest allocation is that of one tensor in all of start-up, steps,
save and load.
"""

import contextlib
import io
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import config
import train
from steady.checkpoints import state, writer
from steady.guard.process import exit_code, leave
from tests.bench.common import Figure, compare, in_turns, random_tokens, seconds
from tools import estimate

LARGE = ["--n_layer", "10", "--n_head", "8", "--n_kv_head", "8", "--d_model", "1024", "--d_ff",
         "2816", "--vocab_size", "8000"]
SMALL = ["--n_layer", "4", "--n_head", "4", "--n_kv_head", "4", "--d_model", "256", "--d_ff", "704",
         "--vocab_size", "2000"]
COMMON = ["--seq_len", "64", "--batch_size", "4", "--optimizer", "adamw", "--precision", "fp32",
          "--eval_interval", "0", "--no_tensorboard", "--log_interval", "2", "--monitor", "light"]


class Largest(estimate.Live):
    """Also keeps the size of the largest allocation."""

    most = 0

    def see(self, storage, size=None):
        super().see(storage, size)
        self.most = max(self.most, self.sizes[storage._cdata])


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024


def rank_main(rank: int, world_size: int, ports: list, folder: str, flags: list, what: str,
              answers):
    """One rank of a run; rank 0 answers with what was asked for."""
    os.chdir(folder)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                       LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(ports[0]))
    torch.set_num_threads(1)
    found, train.sample, plain = {}, lambda run: "", state.save_checkpoint
    if what == "peak":  # loads the libraries
        with contextlib.redirect_stdout(io.StringIO()):
            tiny = ["--d_model", "64", "--d_ff", "64", "--n_layer", "1", "--vocab_size", "2000"]
            assert exit_code(train.main, [*flags, *tiny, "--out_dir", "tiny"]) == 0
        os.environ["MASTER_PORT"] = str(ports[1])
    before = status("VmRSS")

    def save(run, *args, **options):
        """Time the copy, and a save that waits for the disk, as without a thread."""
        if run.dir.writer:
            run.dir.writer.wait()
        dist.barrier()
        found.setdefault("stall", []).append(seconds(partial(plain, run, *args, **options)))
        if run.dir.writer:
            run.dir.writer.wait()
        dist.barrier()
        began = time.perf_counter()
        if run.dir.writer:
            state = dict(weights=run.ranks.shards.tensors,
                         states=[o.state_dict() for o in run.optimizers])
            writer.write_checkpoint(Path(f"plain{rank}.pt"), state)
        dist.barrier()
        found.setdefault("sync", []).append(time.perf_counter() - began)

    if what == "save":
        train.save_checkpoint = save
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if what == "largest":
            largest = stack.enter_context(Largest())
        assert exit_code(train.main, [*flags, "--out_dir", "r"]) == 0
        if what == "largest":
            found["largest"] = largest.most
    if rank == 0:
        found["peak"] = status("VmHWM") - before
        lines = Path("r/metrics.jsonl").read_text().splitlines()
        ms = [json.loads(line).get("perf/step_ms_median") for line in lines]
        found["ms"] = statistics.median([value for value in ms if value][1:] or [0.0])
        answers.put(found)
        answers.close()
        answers.join_thread()
    leave(0)


def measure(way: str, ranks: int, shape: list, steps: int, what: str = "", more=()) -> dict:
    """What rank 0 of a fresh run found."""
    spawn = multiprocessing.get_context("spawn")
    if what == "peak":
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(Path(folder) / "train.bin", 10**5, 2000)
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1], two.getsockname()[1]]
        saves = steps if what in ("largest", "save") else 0
        flags = [*shape, *COMMON, "--data", folder, "--max_steps", str(steps), "--save_interval",
                 str(saves and max(1, saves // 4)), "--parallel", way, *more]
        answers = spawn.Queue()
        group = [spawn.Process(target=rank_main, args=(rank, ranks, ports, folder, flags, what,
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
    peaks = in_turns({way: lambda way=way: measure(way, ranks, large, steps, "peak")["peak"] / 1e6
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
    whole = sum(p.numel() * 4 for p in train.Transformer(cfg).parameters()) / 1e6
    most = measure("zero3", ranks, large, 4, "largest")["largest"] / 1e6
    figures.append(Figure("largest allocation, zero3", "all weights", [most / whole], "<= 0.5",
                          f"{most:.1f} MB", f"{whole:.0f} MB"))
    ms = in_turns({way: lambda way=way: measure(way, 2, SMALL, 20)["ms"]
                   for way in estimate.WAYS}, rounds)
    figures += [compare(f"a step, {way}, 2 ranks", "ddp", ms[way], ms["ddp"], "{:.1f} ms")
                for way in ("zero2", "zero3")]
    saves = [measure("zero3", 2, large, 8, "save") for _ in range(rounds)]
    stall, sync = ([statistics.median(s[name][1:]) for s in saves] for name in ("stall", "sync"))
    figures.append(compare("sharded checkpoint: training waits", "written before going on", stall,
                           sync, "{:.3f} s", "<= 0.15"))
    return figures
