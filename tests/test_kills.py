"""kill -9 at any moment: between two renames, in an evaluation, at the last step, in a rollback.

Every attempt counts its file operations, steps and evaluated batches, and is killed at a random one
of them. However often that happens, a run ends as the undisturbed one, to the last bit. Of kills
there are a hundred, or STEADY_KILLS.
"""

import os
import random
import signal
import sys
from multiprocessing import RawValue
from pathlib import Path

import pytest
from conftest import before, column, poison

import data
import train
from steady.checkpoints import writer
from steady.checkpoints.checkpoint import best_checkpoint, compare, list_checkpoints

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.link", "os.truncate")
FLAGS = ["--max_steps", 18, "--save_interval", 3, "--eval_interval", 4, "--log_interval", 2,
         "--max_nonfinite", 2, "--keep_checkpoints", 2, "--dropout", 0.1, "--auto-resume",
         "--num_workers", 0]
KEPT = ("step", "position", "tokens", "best_loss", "best_step", "evaluated_step", "nonfinite",
        "spikes", "rollbacks", "model", "optimizers", "scaler")


def count_and_die(rank: int, count, die_at: int):
    """In each process: samples 64 to 95 are poison; count what happens, die at number `die_at`."""
    def event(*_):
        count.value += 1
        if count.value == die_at:
            signal.raise_signal(signal.SIGKILL)

    def audit(name: str, args):
        if name in FILE_EVENTS and "runs/" in str(args[0]):
            event()

    writer.PARTS_SECONDS = 10.0  # a killed rank writes nothing
    sys.addaudithook(audit)
    poison(64, 96)
    before(train, "learning_rate", event)
    before(data.Batch, "add_by_dataset", event)


def end_of(run: Path) -> dict:
    """What a run has come to: the newest and the best checkpoint, and its evaluations."""
    found = {}
    folder = run / "checkpoints"
    for name, path in (("newest", list_checkpoints(folder)[-1]), ("best", best_checkpoint(folder))):
        assert path.find_damage() is None
        state = path.state()
        found[name] = {key: state[key] for key in KEPT}
    return found | {"val/loss": column(run, "val/loss")}


@pytest.mark.slow
@pytest.mark.parametrize("policy, ranks, share, way", [
    ("skip", 1, 0.32, "ddp"), ("rollback", 1, 0.32, "ddp"), ("skip", 2, 0.16, "ddp"),
    ("skip", 2, 0.12, "zero3"), ("rollback", 3, 0.08, "zero3")])
def test_killed_anywhere_a_run_ends_as_undisturbed(start, tmp_path, policy, ranks, share, way):
    kills = round(share * int(os.environ.get("STEADY_KILLS", 100)))
    dice, count = random.Random(f"{policy}{ranks}"), RawValue("i")
    (tmp_path / "runs").mkdir()

    def attempt(out_dir: str, die_at: int, victim: int = 0) -> list[int]:
        """The exit codes of the ranks."""
        count.value = 0

        def hook(rank):
            mine = count if rank == victim else RawValue("i")
            count_and_die(rank, mine, die_at if rank == victim else 0)

        group = start(*FLAGS, "--on_nonfinite", policy, "--parallel", way, "--batch_size",
                      12 if ranks == 3 else 8, "--out_dir", f"runs/{out_dir}", ranks=ranks,
                      hook=hook)
        codes = {victim: group[victim].code()}
        others = {rank: process for rank, process in enumerate(group) if rank != victim}
        for process in others.values() if codes[victim] else ():
            process.kill(signal.SIGTERM)  # as torchrun does
            if not process.ends_within(30):  # gloo misses one death in fifty
                process.kill(signal.SIGKILL)
        codes |= {rank: process.code() for rank, process in others.items()}
        printed = "".join(process.text() for process in group)
        terminated = -signal.SIGTERM, 128 + signal.SIGTERM  # ours to handle or not
        assert set(codes.values()) <= {0, 1, -signal.SIGKILL, *terminated}, printed
        assert codes[victim] in (0, -signal.SIGKILL), printed
        for process in group:
            process.log.unlink()
        return [codes[rank] for rank in range(ranks)]

    assert attempt("whole", 0) == [0] * ranks
    moments, whole = count.value, end_of(tmp_path / "runs/whole")
    assert bool(whole["newest"]["rollbacks"]) == (policy == "rollback")
    done = n = 0
    while done < kills:
        n, left = n + 1, 8  # a new run, killed up to so many times
        while attempt(str(n), dice.randint(1, moments) if left else 0,
                      dice.randrange(ranks))[0] != 0:
            done, left = done + 1, left - 1
        assert compare(whole, end_of(tmp_path / f"runs/{n}"))[1] == [], f"run {n}"
