"""Kills a run with `kill -9` at random moments, again and again, and damages what it has written.

    python -m tests.bench crash                   200 kills of one rank, and of two

In a fifth of the kills the newest checkpoint is cut short or has a bit flipped afterwards. At its
end the run's weights and optimizer must be those of an undisturbed one bit for bit, and no restart
may have begun at step 0 or before the newest valid checkpoint.
"""

import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import compare, list_checkpoints
from steady.tokens.files import write_tokens
from tests.bench.common import Figure
from tests.conftest import TINY, processes, rows

SAVE_INTERVAL = 3


def damage(path: Path, rng: random.Random):
    size = path.stat().st_size
    if rng.random() < 0.5:
        os.truncate(path, rng.randrange(size))
    else:
        content = bytearray(path.read_bytes())
        content[rng.randrange(size)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def kill_one(group, rng: random.Random):
    """At a random moment: mostly while it trains, else while it starts."""
    if rng.random() < 0.9:
        group[0].wait_for("\nstep ")
    time.sleep(rng.uniform(0, 0.5))
    rng.choice(group).kill(signal.SIGKILL)
    for process in group[1:] and group:  # as torchrun does
        process.kill(signal.SIGTERM)


def final_state(run: Path) -> dict:
    state = torch.load(list_checkpoints(run / "checkpoints")[-1], weights_only=True)
    return {name: state[name] for name in ("step", "model", "optimizers", "position")}


def figure(ranks: int, total: int, folder: Path) -> Figure:
    rng = random.Random(0)
    text = "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60)).encode()
    write_tokens(folder / "train.bin", [text])
    flags = [*TINY, "--data", folder, "--save_interval", SAVE_INTERVAL, "--dropout", "0.1",
             "--eval_interval", 0, "--no_tensorboard", "--auto-resume",
             "--log_interval", 1, "--max_steps", 12 * total]
    for process in processes(folder, ranks, [*flags, "--out_dir", "undisturbed"]):
        assert process.code(900) == 0, process.text()
    kills = damaged = repeated = in_training = 0
    hurt, reached, expected = None, 0, 0  # a damaged file; newest step logged; newest valid one
    was_damaged = False
    log = folder / "log0.txt"
    while True:
        log.unlink(missing_ok=True)
        group = processes(folder, ranks, [*flags, "--out_dir", "killed"])
        if kills < total:
            kill_one(group, rng)
        codes = [process.code(900) for process in group]
        told = log.read_text() if log.exists() else ""
        if "run     " in told:  # it had got as far as its first step
            found = re.search(r"^resume  .*at step (\d+)$", told, re.MULTILINE)
            begun = int(found[1]) if found else 0
            assert begun >= expected, f"begun at step {begun}; there was a valid step {expected}"
            repeated = repeated if was_damaged else max(repeated, reached - begun)
            was_damaged = False
        if codes == [0] * ranks:
            break
        kills += 1
        in_training += "\nstep " in told
        left = list_checkpoints(folder / "killed/checkpoints")
        valid = [checkpoint for checkpoint in left if not checkpoint.find_damage()]
        # one that we damaged stays where the process was killed before it looked
        assert set(left) - set(valid) <= {hurt}, "a damaged file has a valid one's name"
        expected = valid[-1].step if valid else 0
        reached = max([expected, *map(int, re.findall(r"^step +(\d+)/", told, re.MULTILINE))])
        if len(valid) > 1 and rng.random() < 0.2:
            hurt, expected = valid[-1], valid[-2].step
            damage(hurt.path, rng)
            damaged, was_damaged = damaged + 1, True
    end = final_state(folder / "undisturbed")
    count, different = compare(end, final_state(folder / "killed"))
    logged = [row["step"] for row in rows(folder / "killed") if "train/loss" in row]
    print(f"{ranks} rank(s): {kills} kills ({in_training} while training, the others in "
          f"start-up), {damaged} of them with a damaged checkpoint, {end['step']} steps\n"
          "restarts before the newest valid checkpoint: 0\n"
          f"steps made again after a kill: at most {repeated} (save_interval {SAVE_INTERVAL}, and "
          f"those made while one was written)\n"
          f"rows of metrics.jsonl twice: {len(logged) - len(set(logged))}\n"
          f"final state: {len(different)} of {count} tensors and values differ")
    return Figure(f"{kills} kills of {ranks} rank(s): tensors and values as undisturbed", "all",
                  [1 - len(different) / count], ">= 1", str(count - len(different)), str(count))


def main(options) -> list[Figure]:
    figures = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            figures.append(figure(ranks, 2 if options.quick else 200, Path(folder)))
    return figures
