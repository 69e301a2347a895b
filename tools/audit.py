"""python train.py --audit RUN [--segments N]: is this run what its checkpoints and logs say?

Random segments between neighbouring checkpoints are trained again from the earlier one. Weights,
optimizer state and counters at the later one, and the losses logged in between, must be the same
bit for bit. For several ranks: the same command under torchrun, with as many as the run had.
Nothing in RUN is changed. Exit code 0: verified; 1: something differs; 2: it cannot be told here.
"""

import contextlib
import dataclasses
import io
import os
import random
import re
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from config import Config
from steady.checkpoints.checkpoint import Checkpoint, checkpoint_at, compare, list_checkpoints
from steady.checkpoints.state import machine_of, save_checkpoint
from steady.options import ConfigError, write_yaml
from steady.ranks.ranks import rank_and_world
from steady.watch.sinks import read_rows
from tools.continuity import changed

# What decides the rest of a run. Not the best loss so far, which belongs to a directory.
COMPARED = ("step", "position", "tokens", "model", "ema", "optimizers", "scaler", "nonfinite",
            "spikes", "evaluated_step")
MEANS = ("train/loss", "train/grad_norm")  # over the steps since the log before
VALUES = ("train/learning_rate", "train/tokens", "val/loss", "val/loss_ema", "val/bits_per_byte")
SAME_MEAN = 1e-9  # relative: of the same numbers, added in another order
LOG = "metrics.jsonl"
ROUNDING = 1e-3  # relative: on another machine, called rounding
# What a segment does not need, and must not do.
QUIET = dict(backup_to=None, wandb=False, tensorboard=False, sample_interval=0, keep_every=0,
             max_minutes=None, num_workers="0")


def audit(run_dir: Path, segments: int, train) -> int:
    """Returns the exit code. train: the module train.py."""
    rank, _, world_size, _ = rank_and_world()
    found = list_checkpoints(run_dir / "checkpoints")
    pairs = list(zip(found, found[1:], strict=False))
    if not pairs:
        raise ConfigError(f"--audit {run_dir}: expected two checkpoints or more, as "
                          "--keep_checkpoints and --keep_every keep them")
    machine = found[-1].states("meta")[0].get("machine")
    if not machine:
        raise ConfigError(f"--audit {run_dir}: an older version of this program has made it, "
                          "which kept too little for this")
    if machine["ranks"] != world_size:
        raise ConfigError(f"--audit {run_dir}: made by {machine['ranks']} processes, not "
                          f"{world_size}; expected torchrun --nproc_per_node={machine['ranks']}")
    threads = re.search(r", (\d+) threads?$", machine["device"])
    if threads:
        torch.set_num_threads(int(threads[1]))
    # under torchrun all ranks of a machine have the same parent
    draw = random.Random(os.getppid() if world_size > 1 else None)
    chosen = sorted(draw.sample(pairs, min(segments, len(pairs))), key=lambda pair: pair[0].step)
    verified, steps, wrong, apart = 0, 0, False, False
    with scratch_folder("audit") as folder:
        for earlier, later in chosen:
            text, here = audit_segment(run_dir, earlier, later, folder / later.name, train)
            if rank == 0:
                print(f"steps {earlier.step} to {later.step}: {text or 'verified'}", flush=True)
            if not text:
                verified, steps = verified + 1, steps + later.step - earlier.step
            wrong, apart = wrong or bool(text and here), apart or bool(text and not here)
    if rank == 0:
        unlogged = "" if (run_dir / LOG).exists() else f", without losses: there is no {LOG}"
        print(f"audit   verified {verified} of {len(pairs)} segments, {steps} steps{unlogged}")
    return 1 if wrong else 2 if apart else 0


def differences(one: dict, two: dict) -> tuple[int, list[str]]:
    """(number of values and tensors in two states, names of those that differ)."""
    return compare({n: one.get(n) for n in COMPARED}, {n: two.get(n) for n in COMPARED})


@contextlib.contextmanager
def scratch_folder(purpose: str):
    """A temporary folder, the same for all ranks of a machine: under torchrun they share a parent.

    Rank 0 empties and deletes it.
    """
    folder = Path(tempfile.gettempdir()) / f"steady-{purpose}-{os.getuid()}-{os.getppid()}"
    rank = rank_and_world()[0]
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def audit_segment(run_dir: Path, earlier: Checkpoint, later: Checkpoint, folder: Path,
                  train) -> tuple[str, bool]:
    """(what differs, or ""; whether that is the run's fault); on ranks other than 0 ("", True)."""
    rank = rank_and_world()[0]
    for checkpoint in (earlier, later):
        if wrong := checkpoint.find_damage():
            return f"{checkpoint}: {wrong}", True
    state = later.state()
    if earlier.state("meta").get("max_steps") != state.get("max_steps"):
        return "not repeated: in it --max_minutes or the schedule plateau set max_steps", False
    output = io.StringIO()
    with (tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(output),
          contextlib.redirect_stderr(output)):
        options = Path(own, "config.yaml")
        write_yaml(dataclasses.replace(Config(**state["config"]), **QUIET), options, {})
        run = train.set_up([f"--config={options}", f"--resume={earlier}",
                            f"--out_dir={folder / 'run'}", "--allow_change=data"])
        train.open_run_dir(run)
        run.ranks.stop.requested = lambda: run.progress.step >= later.step
        with run.ranks.stop, run.ranks.watchdog:
            train.train_with_recovery(run)
        save_checkpoint(run)
        if run.dir.writer:
            run.dir.writer.wait()
        if run.ranks.world_size > 1:
            dist.barrier(group=run.ranks.group)
    if rank:
        return "", True
    run.dir.lock.close()
    again = checkpoint_at(folder / "run/checkpoints", later.step)
    if not again:
        return f"made again, it ends at step {run.progress.step}", True
    again = again.state()
    rows = []
    if (run_dir / LOG).exists():  # a fork may log nothing
        rows = different_rows(run_dir, folder / "run", earlier.step, later.step)
    names = differences(state, again)[1]
    files, then = ([list(file) for file in each] for each in (run.train_data.fingerprint,
                                                              state["data"]))
    if files != then:
        names.insert(0, "the data, with other files or contents than the run was trained on,")
    if not rows and not names:
        return "", True
    text = "; ".join([f"{name} at step {step}: {was:.9g} in the log, {now:.9g} made again"
                      for step, name, was, now in rows[:1]]
                     + [f"{name} at step {later.step}" for name in names[:1]])
    text += f" differs ({len(names)} of the checkpoint, {len(rows)} logged values)"
    machine = changed(state["machine"], machine_of(run.ranks))
    if run.ranks.device.type == "cuda" and not run.cfg.deterministic:
        machine = ", ".join(filter(None, (machine, "not trained with --deterministic")))
    distance = max([abs(now - was) / max(abs(was), 1e-12) for _, _, was, now in rows]
                   + [distance_of(state["model"], again["model"])])
    if machine and distance < ROUNDING:
        return f"{text}, by {distance:.1g}: rounding, as this machine differs: {machine}", False
    return f"{text}, by {distance:.1g}" + (f"; {machine}" if machine else ""), True


def distance_of(old: dict, new: dict) -> float:
    """The largest relative difference of a weight, by norm."""
    return max(float((new[name] - w).norm() / w.norm().clamp(min=1e-12))
               for name, w in old.items() if w.is_floating_point())


def different_rows(run_dir: Path, again: Path, begin: int, end: int) -> list:
    """(step, name, logged, made again) of logged values between two steps that differ.

    The process that makes the steps again also logs the first one: so the first mean is put
    together from two. One that reaches back beyond `begin` is not compared.
    """
    was, now = ({(row["step"], name): value for _, row in read_rows(run / LOG)
                 for name, value in row.items() if row["step"] <= end
                 and name in (*MEANS, *VALUES) and value is not None}
                for run in (run_dir, again))
    logs = sorted(step for step, name in was if name == "train/loss")
    first = min((step for step in logs if step > begin), default=0)
    found = []
    for (step, name), value in sorted(was.items()):
        other, bound = now.get((step, name)), 0.0
        if step <= begin or name in MEANS and step == first and begin not in (0, *logs):
            continue
        if name in MEANS and step == first and begin + 1 < step and (begin + 1, name) in now:
            steps, bound = step - begin, SAME_MEAN
            other = (now[begin + 1, name] + (steps - 1) * now.get((step, name), 0.0)) / steps
        if other is None or not abs(other - value) <= bound * abs(value):
            found.append((step, name, value, other if other is not None else float("nan")))
    return found
