"""Does a run that was moved to another machine go on as it would have on the old one?

A checkpoint holds the losses and gradient norms of the first steps that followed the one before it.
Where torch, the device or the number of ranks have changed, a resume repeats those steps from that
earlier checkpoint and reports how far the results differ. It stops nothing.
"""

import contextlib
import dataclasses

import torch

from data import loader
from monitor import Monitor
from steady.checkpoints.checkpoint import checkpoint_at
from steady.checkpoints.state import load_checkpoint, machine_of
from steady.options import ConfigError, Failed

# Options of the run's process then, so that a longer schedule is no difference.
SCHEDULE = ("max_steps", "warmup_steps", "learning_rate", "min_learning_rate", "lr_schedule",
            "decay_fraction")
# Where one of these has changed, a difference says nothing of the machine.
DECIDING = ("optimizer", "beta1", "beta2", "weight_decay", "grad_clip", "skip_spikes", "dropout",
            "precision", "half_residual", "attention", "batch_size", "seed")
QUIET = dict(eval_interval=0, save_interval=0, sample_interval=0, log_interval=0, monitor="off",
             tensorboard=False, wandb=False, patience=0, replay_interval=0, max_minutes=None)


def changed(then: dict, now: dict) -> str:
    """What differs between two machines, as "torch 2.13.0 -> 2.15.0, ranks 2 -> 4"."""
    return ", ".join(f"{name} {then[name]} -> {now[name]}" for name in now
                     if then[name] != now[name])


def check_continuity(run, train):
    """Repeat some steps where the machine has changed, on all ranks, and report; then be where
    the run was. train: of train.py."""
    ranks, source = run.ranks, run.dir.resumed_from
    # in this run, where all ranks find it: best.pt may have become an older one
    start = checkpoint_at(run.dir.path / "checkpoints", run.progress.step)
    saved = start.states(mmap=True)[0]
    if "trail_of_all" not in saved:  # of an older version, of rank 0 alone
        return
    differences, earlier = changed(saved["machine"], machine_of(ranks)), None
    then = dataclasses.asdict(type(run.cfg)()) | saved["config"]  # newer options were off
    comparable = all(then[name] == getattr(run.cfg, name) for name in DECIDING)
    if then["dropout"] and saved["machine"]["ranks"] != ranks.world_size:
        comparable = False  # each rank drops other units
    trail = saved["trail_of_all"].clone()
    if differences and comparable and len(trail) and ranks.rank == 0:
        earlier = checkpoint_at(source.path.parent, saved["trail_from"])
        if earlier and (earlier.find_damage() or
                        earlier.states("meta")[0].get("max_steps") != saved.get("max_steps")):
            earlier = None  # damaged, or --max_minutes has set the schedule since
    earlier = ranks.broadcast(earlier)
    if not earlier:
        return
    schedule = {name: then[name] for name in SCHEDULE}
    whole, progress, of_newest = run.cfg, dict(vars(run.progress)), run.dir.saved
    run.cfg, found = dataclasses.replace(whole), None
    # of several ranks, those that all know of; another one leaves them in the middle of a step
    errors = Exception if ranks.world_size == 1 else Failed
    try:
        load_checkpoint(run, earlier)
        found = repeat_steps(run, dataclasses.replace(run.cfg, **schedule, **QUIET), len(trail),
                             train)
    except ConfigError:
        pass  # it was saved with other options, as --allow_change allows
    except errors as e:
        if ranks.rank == 0:
            print(f"resume  steps could not be repeated from {earlier}: {e}", flush=True)
    run.cfg, run.guard.clean = whole, True
    for p in run.model.parameters():
        p.grad = None
    load_checkpoint(run, start)
    vars(run.progress).update(progress)
    run.dir.saved = of_newest
    if found is None:
        return
    if ranks.rank == 0:
        print(report(trail, found, earlier.step, differences), flush=True)


def repeat_steps(run, cfg, n: int, train) -> torch.Tensor:
    """Losses and gradient norms [n, 2] of the next n steps, of which nothing is written."""
    whole, writer, ranks, stop = run.cfg, run.dir.writer, run.ranks, run.ranks.stop
    end = run.progress.step + n
    run.cfg, run.dir.writer, stop.requested = cfg, None, lambda: run.progress.step >= end
    run.monitor = Monitor(cfg, ranks, run.progress, None, flops_per_token=0)
    ranks.watchdog.clock = run.monitor.clock
    batches = loader(run.train_data, cfg, run.progress.position, n, ranks.micro_batch, ranks.rank,
                     ranks.world_size, ranks.device, ranks.workers)
    try:
        with contextlib.closing(batches):
            train(run, batches)
    finally:
        run.monitor.close()
        run.cfg, run.dir.writer = whole, writer
        del stop.requested
    return run.guard.trail[:n].cpu()


def report(trail: torch.Tensor, found: torch.Tensor, step: int, differences: str) -> str:
    if torch.equal(trail, found):
        return (f"resume  continues exactly: steps {step + 1} to {step + len(trail)} have the same "
                f"losses here; changed: {differences}")
    relative = ((found - trail).abs() / trail.abs().clamp(min=1e-12)).amax(1)
    first = step + 1 + int((found != trail).any(1).nonzero()[0])
    return (f"resume  differs by {float(relative.max()):.1g} from step {first} on, of steps "
            f"{step + 1} to {step + len(trail)} repeated here; changed: {differences}")
