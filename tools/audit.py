"""python train.py --audit RUN [--segments N]: is this run what its checkpoints and logs say?

Random segments between neighbouring checkpoints are trained again from the earlier one. Weights,
optimizer state and counters at the later one, and the losses logged in between, must be the same
bit for bit. For several ranks: the same command under torchrun, with as many as the run had.
Nothing in RUN is changed. Exit code 0: verified; 1: something differs; 2: it cannot be told here.
"""

import contextlib
import dataclasses
import io
import random
import re
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from config import Config
from steady.checkpoints.checkpoint import Checkpoint, checkpoint_at, compare, list_checkpoints
from steady.checkpoints.state import machine_of, save_checkpoint
from steady.checkpoints.writer import NotSaved
from steady.models.huggingface import KEPT
from steady.options import ConfigError, fixed_options, write_yaml
from steady.ranks.ranks import from_rank0, meet, rank_and_world
from steady.ranks.watchdog import patience
from steady.watch.sinks import read_rows
from tools.continuity import changed

COMPARED = ("step", "position", "tokens", "model", "ema", "optimizers", "scaler", "nonfinite",
            "spikes")
OF_ITS_PROCESS = ("position", "nonfinite")  # changed by a rollback
LOG = "metrics.jsonl"  # which a fork may not write
MEANS = ("train/loss", "train/grad_norm")  # over the steps since the log before
VALUES = ("train/learning_rate", "train/tokens", "val/loss", "val/loss_ema", "val/bits_per_byte")
SAME_MEAN = 1e-9  # relative: of the same numbers, added in another order
ROUNDING = 1e-3  # relative: on another machine, called rounding
# What a segment does not need, and must not do.
QUIET = dict(backup_to=None, wandb=False, tensorboard=False, sample_interval=0, keep_every=0,
             max_minutes=None, num_workers="0")


class Stopped(Exception):
    """By a signal, in the middle of a segment."""


class Untold(ConfigError):
    """What differs in a segment, or keeps it from being compared, is not the run's fault."""


def audit(run_dir: Path, segments: int, train) -> int:
    """Returns the exit code. train: the module train.py."""
    rank, _, world_size, _ = rank_and_world()
    store = meet(rank, world_size, patience(0))
    chosen, of = from_rank0(store, lambda: choose(run_dir, segments))  # the run may be going on
    verified, steps, code = 0, 0, 0
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left
    try:
        with scratch_folder("audit") as folder:
            for earlier, later in chosen:
                try:
                    text = (from_rank0(store, partial(damage, earlier, later))
                            or audit_segment(run_dir, earlier, later, folder / later.name, train))
                    code = 1 if text else code
                except Untold as e:
                    text, code = str(e), code or 2
                if not text:
                    verified, steps = verified + 1, steps + later.step - earlier.step
                if rank == 0:
                    print(f"steps {earlier.step} to {later.step}: {text or 'verified'}", flush=True)
    except Stopped as e:
        return 128 + e.args[0]
    finally:
        signal.signal(signal.SIGTERM, before)
    if rank == 0:
        unlogged = "" if (run_dir / LOG).exists() else f", without losses: there is no {LOG}"
        print(f"audit   verified {verified} of {of} segments, {steps} steps{unlogged}")
    return code


def choose(run_dir: Path, segments: int) -> tuple[list, int]:
    """Some pairs of neighbouring checkpoints, and how many there are."""
    found = list_checkpoints(run_dir / "checkpoints")
    pairs = list(zip(found, found[1:], strict=False))
    if not pairs:
        raise ConfigError(f"--audit {run_dir}: expected two checkpoints or more, as "
                          "--keep_checkpoints and --keep_every keep them")
    chosen = random.sample(pairs, min(segments, len(pairs)))
    return sorted(chosen, key=lambda pair: pair[0].step), len(pairs)


def damage(*pair: Checkpoint) -> str:
    """What is wrong with the bytes of one of them, or "". Raises Untold."""
    for checkpoint in pair:
        wrong = checkpoint.find_damage()
        if not checkpoint.exists():
            raise Untold(f"{checkpoint} is gone: the run goes on")
        if wrong:
            return f"{checkpoint}: {wrong}"
    return ""


@contextlib.contextmanager
def scratch_folder(purpose: str):
    """A temporary folder, the same for all ranks, which rank 0 makes and deletes."""
    rank, _, world_size, _ = rank_and_world()
    store = meet(rank, world_size, patience(0))
    folder = Path(from_rank0(store, lambda: tempfile.mkdtemp(prefix=f"steady-{purpose}-")))
    try:
        yield folder
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def audit_segment(run_dir: Path, earlier: Checkpoint, later: Checkpoint, folder: Path,
                  train) -> str:
    """What differs, or ""; on ranks other than 0 "". Raises Untold."""
    rank, _, world_size, _ = rank_and_world()
    before, state = earlier.states("meta")[0], later.state()
    if not {"machine", "trail_from"} <= before.keys() & state.keys():
        raise Untold("made by an older version of this program")
    # by a process that resumed there, maybe with other options, or that was rolled back
    saved_again = state["trail_from"] == later.step
    maker = before if saved_again else state
    then = maker["machine"]
    if maker["config"].keys() - {f.name for f in dataclasses.fields(Config)}:
        raise Untold("made by a version of this program that has other options")
    if then["ranks"] != world_size:
        raise Untold(f"made by {then['ranks']} processes, not {world_size}: use torchrun "
                     f"--nproc_per_node={then['ranks']}")
    if threads := re.search(r", (\d+) threads?$", then["device"]):
        torch.set_num_threads(int(threads[1]))
    run = train_again(earlier, later, maker["config"], folder, run_dir, train)
    if rank:
        return ""
    again = checkpoint_at(folder / "run/checkpoints", later.step)
    if not again:
        return f"made again, it ends at step {run.progress.step}"
    again = again.state()
    log = [row for _, row in read_rows(run_dir / LOG)] if (run_dir / LOG).exists() else []
    began = [row["step"] for row in log
             if "order" in row and earlier.step < row["step"] < later.step]
    compared = [name for name in COMPARED if not saved_again or name not in OF_ITS_PROCESS]
    names = compare(*({n: each.get(n) for n in compared} for each in (state, again)))[1]
    # that of the next step, where that one failed before its update; none yet if saved again
    lr = train.learning_rate(later.step, run.cfg)
    train.set_learning_rate([SimpleNamespace(**each) for each in again["optimizers"]], lr)
    names = [name for name in names if not name.endswith(".lr") or not saved_again
             and name in compare(state["optimizers"], again["optimizers"], "optimizers")[1]]
    evaluated = -1 if saved_again else state["evaluated_step"]
    rows = []
    if log and not began:
        rows = [row for row in different_rows(run_dir, folder / "run", earlier.step, later.step)
                if not row[1].startswith("val/") or row[0] <= evaluated]
    if [list(file) for file in run.train_data.fingerprint] != list(map(list, state["data"])):
        names.insert(0, "the data, with other files or contents than the run was trained on,")
    if not rows and not names:
        return ""
    text = "; ".join([f"{name} at step {step}: {was:.9g} in the log, {now:.9g} made again"
                      for step, name, was, now in rows[:1]]
                     + [f"{name} at step {later.step}" for name in names[:1]])
    text += f" differs ({len(names)} of the checkpoint, {len(rows)} logged values)"
    machine = changed(then, machine_of(run.ranks))
    if run.ranks.device.type == "cuda" and not run.cfg.deterministic:
        machine = ", ".join(filter(None, (machine, "not trained with --deterministic")))
    distance = max([abs(now - was) / max(abs(was), 1e-12) for _, _, was, now in rows]
                   + [distance_of(state["model"], again["model"])])
    text += f", by {distance:.1g}"
    unknown = [f"another process went on at step {began[0]}"] if began else []
    unknown += [f"step {later.step} was saved again"] * saved_again
    unknown += ["max_steps was set in between"] * (before["max_steps"] != state["max_steps"])
    if unknown:
        raise Untold(f"{text}: it cannot be told, as {', and '.join(unknown)}")
    if machine and distance < ROUNDING:
        raise Untold(f"{text}: rounding, as this machine differs: {machine}")
    return text + (f"; {machine}" if machine else "")


def train_again(earlier: Checkpoint, later: Checkpoint, options: dict, folder: Path, run_dir: Path,
                train):
    """From one checkpoint to the other, in `folder`/run; returns the run that ended there.

    It continues a run directory with these options, which has but a link to the checkpoint.
    """
    source, rank = folder / "source", rank_and_world()[0]
    start = source / "checkpoints" / earlier.name
    if rank == 0:
        start.parent.mkdir(parents=True)
        start.symlink_to(earlier.path.resolve())
        (source / KEPT).symlink_to((run_dir / KEPT).resolve())
        write_yaml(dataclasses.replace(Config(**options), **QUIET), source / "config.yaml", {})
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        run = train.set_up([f"--resume={start}", f"--out_dir={folder / 'run'}", "--allow_change",
                            "data", "tokenizer", *fixed_options(Config, "trajectory"),
                            *fixed_options(Config, "function")])
        train.open_run_dir(run)
        stop = run.ranks.stop
        asked = stop.requested
        stop.requested = lambda: run.progress.step >= later.step or asked()
        try:
            with stop, run.ranks.watchdog:
                train.train_with_recovery(run)
            if stop.signal:
                raise Stopped(stop.signal)
            save_checkpoint(run)
            if run.dir.writer:
                run.dir.writer.close()
        except NotSaved as e:
            raise ConfigError(f"--audit: the steps made again are not there: {e}") from None
        if run.ranks.world_size > 1:
            dist.barrier(group=run.ranks.group)
    if rank == 0:
        run.dir.lock.close()
        if (run_dir / LOG).exists() and LOG not in run.monitor.sinks.open:
            raise ConfigError(f"--audit: {folder / 'run' / LOG} could not be written")
    return run


def distance_of(old: dict, new: dict) -> float:
    """The largest relative difference of a weight, by norm."""
    return max(float((new[name] - w).norm() / w.norm().clamp(min=1e-12))
               for name, w in old.items() if w.is_floating_point())


def different_rows(run_dir: Path, again: Path, begin: int, end: int) -> list:
    """(step, name, logged, made again) of logged values between two steps that differ.

    The process that makes the steps again also logs the first one: so the first mean is put
    together from two. One that reaches back beyond `begin` is not compared.
    """
    was, now = ({(row["step"], name): value for _, row in read_rows(run / "metrics.jsonl")
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
