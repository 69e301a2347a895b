"""Roll back after non-finite steps; after an error, save the last completed step."""

import time

from steady.checkpoints.checkpoint import latest_valid, list_checkpoints
from steady.checkpoints.state import load_checkpoint, save_checkpoint
from steady.guard.guard import NotFinite
from steady.guard.memory import memory_advice, out_of_memory
from steady.options import ConfigError
from steady.ranks.replicas import ReplicasDiffer
from steady.watch.sinks import alert, say

MAX_ROLLBACKS = 3  # to the same checkpoint


def roll_back(run, error: NotFinite):
    """Return to the newest checkpoint, and continue with the samples after the non-finite ones.

    Raises `error` with --on_nonfinite abort, without a checkpoint, or after MAX_ROLLBACKS.
    """
    if run.cfg.on_nonfinite == "abort":
        raise error
    progress = run.progress
    position, newest, problem = progress.position, None, "there is no checkpoint to roll back to"
    if run.dir.writer:
        run.dir.writer.wait()
    if run.ranks.rank == 0:
        try:
            newest = latest_valid(run.dir.path / "checkpoints")
        except (ConfigError, OSError) as e:  # all checkpoints are damaged, or the disk is gone
            problem = str(e)
    newest, problem = run.ranks.broadcast((newest, problem))
    if newest is None:
        raise NotFinite(f"{error}; {problem}") from None
    before = progress.rollbacks.count(newest.step)
    if before == MAX_ROLLBACKS:
        raise NotFinite(f"{error}; already rolled back to {newest} {MAX_ROLLBACKS} times") from None
    load_checkpoint(run, newest)
    progress.position, progress.rollbacks = position, [newest.step] * (before + 1)
    run.guard.nonfinite.zero_()
    if run.ranks.rank == 0:
        say(f"warning: {error}; rolled back to {newest}, continuing at sample {position}")
    save_checkpoint(run)  # a process that is killed now rolls back to the same place


def rescue(run, error: BaseException):
    """Before a run ends with this error: save its last step, unless the error is in the weights.

    Uses no collective: other ranks may be gone. Raises MemoryError, with advice, if memory ran out.
    """
    if isinstance(error, ReplicasDiffer):
        if run.ranks.rank == 0 and error.agreed is not None:
            quarantine(run.dir.writer, error)
        return
    try:
        save_last_step(run)
    except Exception as e:
        alert(f"warning: step {run.progress.step} could not be saved: {e}")
    if out_of_memory(error):
        raise MemoryError(memory_advice(run.ranks, run.cfg.batch_size, error)) from error


def save_last_step(run):
    """Save the last completed step, unless an update has begun since, and say so.

    Only ranks with a writer save; if sharded, all of them must get here for a checkpoint.
    """
    writer, step = run.dir.writer, run.progress.step
    if not writer:
        return
    writer.hurry = True
    mixed = run.ranks.watchdog.verdict.startswith("waiting")  # sums may be of different steps
    sound = run.guard.clean and step > 0 and not mixed
    until = time.monotonic() + 30.0  # seconds: a device may never answer
    while sound and run.guard.updated and not run.guard.updated.query():
        sound = time.monotonic() < until
        time.sleep(0.01)
    if sound:
        save_checkpoint(run, alone=True)
    writer.wait()  # also for an older checkpoint on its way to the disk
    if sound and writer.written == step:
        alert(f"saved the last completed step, {step}")


def quarantine(writer, error: ReplicasDiffer):
    """Set aside the checkpoints since the ranks last agreed, unless no other would be left."""
    writer.wait()
    found = list_checkpoints(writer.folder)
    if found and found[0].step <= error.agreed:
        for doubtful in (checkpoint for checkpoint in found if checkpoint.step > error.agreed):
            doubtful.set_aside()
            print(f"warning: {doubtful}: its weights are in doubt; set aside", flush=True)
