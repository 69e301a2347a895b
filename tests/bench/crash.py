"""Kills a run with `kill -9` at random moments, again and again, and damages what it has written.

    python -m tests.bench crash                   200 kills of one rank, and of two

In a fifth of the kills the newest checkpoint is cut short or has a bit flipped afterwards. At its
end the run's weights and optimizer must be those of an undisturbed one bit for bit, and no restart
may have begun at step 0 or have gone back more than `save_interval` steps from what was left whole.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import TINY, column, processes

import checkpoint
from prepare import write_tokens
from tests.bench.common import Figure

SAVE_INTERVAL = 3


def damage(path: Path, dice: random.Random):
    size = path.stat().st_size
    if dice.random() < 0.5:
        os.truncate(path, dice.randrange(size))
    else:
        content = bytearray(path.read_bytes())
        content[dice.randrange(size)] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


def main(options) -> list[Figure]:
    return [figure(ranks, 2 if options.quick else 200) for ranks in (1, 2)]


def figure(ranks: int, total: int) -> Figure:
    dice = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60)).encode()
        write_tokens(folder / "train.bin", [text])
        flags = [*TINY, "--data", folder, "--save_interval", SAVE_INTERVAL, "--dropout", "0.1",
                 "--eval_interval", 0, "--no_tensorboard", "--auto-resume",
                 "--log_interval", 1, "--max_steps", 12 * total]  # fmt: skip
        for process in processes(folder, ranks, [*flags, "--out_dir", "whole"]):
            assert process.code(900) == 0, process.text()
        kills = damaged = redone = after_damage = restarts_at_0 = in_training = 0
        hurt, reached, expected = None, 0, 0  # the newest step logged; the newest whole checkpoint
        run = folder / "killed"
        while True:
            log = folder / "log0.txt"
            log.unlink(missing_ok=True)
            group = processes(folder, ranks, [*flags, "--out_dir", "killed"])
            if kills < total:
                if dice.random() < 0.9:  # else while it starts
                    group[0].wait_for("\nstep ")
                time.sleep(dice.uniform(0, 0.5))
                dice.choice(group).kill(signal.SIGKILL)
                for process in group[1:] and group:  # as torchrun does
                    process.kill(signal.SIGTERM)
            codes = [process.code(900) for process in group]
            told = log.read_text() if log.exists() else ""
            if "run     " in told:  # it had got as far as its first step
                found = re.search(r"^resume  .* at step (\d+)$", told, re.MULTILINE)
                begun = int(found[1]) if found else 0
                restarts_at_0 += begun < expected
                redone = max(redone, reached - begun) if not after_damage else redone
                after_damage = 0
            if codes == [0] * ranks:
                break
            kills += 1
            in_training += "\nstep " in told
            left = checkpoint.list_checkpoints(run / "checkpoints")
            whole = [p for p in left if checkpoint.problem(p) is None]
            # one that we damaged stays where the process was killed before it looked
            assert set(left) - set(whole) <= {hurt}, "a damaged file has a whole one's name"
            left = whole
            steps = [int(s) for s in re.findall(r"^step +(\d+)/", told, re.MULTILINE)]
            newest = checkpoint.checkpoint_step(left[-1]) if left else 0
            reached = max([newest, *steps])
            if len(left) > 1 and dice.random() < 0.2:
                hurt = left[-1]
                damage(hurt, dice)
                damaged, after_damage = damaged + 1, 1
                newest = checkpoint.checkpoint_step(left[-2])
            expected = newest
        one, two = (checkpoint.list_checkpoints(folder / d / "checkpoints")[-1]
                    for d in ("whole", "killed"))  # fmt: skip
        one, two = (torch.load(p, weights_only=True) for p in (one, two))
        names = ("step", "model", "optimizers", "position")
        count, different = checkpoint.compare(*({n: s[n] for n in names} for s in (one, two)))
        logged = list(column(run, "train/loss"))
    print(f"{ranks} rank(s): {kills} kills ({in_training} while training, the others in "
          f"start-up), {damaged} of them with a damaged checkpoint, "
          f"{one['step']} steps\nrestarts before what was whole: {restarts_at_0}\n"
          f"steps made again after a kill: at most {redone} (save_interval {SAVE_INTERVAL}, and "
          f"those made while one was written)\n"
          f"rows of metrics.jsonl twice: {len(logged) - len(set(logged))}\n"
          f"final state: {len(different)} of {count} tensors and values differ")  # fmt: skip
    assert not restarts_at_0
    return Figure(
        f"{kills} kills of {ranks} rank(s): tensors and values as undisturbed",
        "all",
        [1 - len(different) / count],
        ">= 1",
        str(count - len(different)),
        str(count),
    )
