"""When things go wrong: signals, non-finite steps, crashes, error messages."""

import contextlib
import itertools
import os
import signal
import sys
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steady.checkpoints.checkpoint import Checkpoint, latest_valid, list_checkpoints
from steady.checkpoints.state import load_checkpoint, save_checkpoint
from steady.checkpoints.writer import Writer
from steady.guard import process
from steady.guard.guard import NotFinite
from steady.guard.memory import memory_advice, out_of_memory
from steady.options import ConfigError
from steady.ranks.parallel import gathered
from steady.ranks.ranks import lost_connection
from steady.ranks.replicas import ReplicasDiffer
from steady.ranks.watchdog import start_thread
from steady.watch.sinks import alert

# --- signals ---------------------------------------------------------------------------------


STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Stop:
    """Signals become flags, and all ranks act on them at the same step.

    SIGTERM, SIGHUP, SIGINT: save and stop; a second SIGINT stops at once. SIGUSR1: save and go on.
    Ranks vote over gloo beside a step, and read the result before the next one.
    """

    def __init__(self, group=None, rank: int = 0):
        """group: of gloo, with all ranks; None for a single one."""
        self.signal, self.save = 0, False  # agreed by all ranks
        self.received = [0, 0]  # by this rank: the signal to stop for, whether to save
        self.group, self.rank, self.votes, self.vote = group, rank, None, None
        self.phase = lambda name: name  # or the monitor's, to time the wait for other ranks
        self.before = {}  # signal number → the handler that ours replaces

    def handle(self, number: int, frame):
        if number == signal.SIGUSR1:
            self.received[1] = 1
        else:
            self.received[0] = number

    def requested(self) -> bool:
        """Whether to stop before the next step; called before each, on every rank."""
        # in one line without a call, so that a signal is either in this vote or in the next one
        mine, self.received = self.received, [self.received[0], 0]
        agreed = mine
        if self.group:
            agreed = [0, 0]
            if self.vote:
                ended = self.phase("waiting")
                self.vote.wait()
                self.phase(ended)
                agreed = self.votes.tolist()
            if not agreed[0]:
                self.votes = torch.tensor(mine)
                self.vote = dist.all_reduce(self.votes, dist.ReduceOp.MAX, group=self.group,
                                            async_op=True)
        self.signal, self.save = agreed[0], bool(agreed[1])
        return self.signal != 0

    def asked(self, together: bool = False) -> bool:
        """Whether to break off what is between two steps; together: every rank calls it alike."""
        if together:
            save = self.save
            self.requested()
            self.save |= save  # is still to be done
        return bool(self.signal or not together and self.received[0])

    def until_signal(self, batches):
        """The batches until all ranks know of a signal to stop; as many on every rank."""
        return itertools.takewhile(lambda batch: not self.asked(together=True), batches)

    def agree(self):
        """Wait for all ranks; then each knows of a signal to stop that any of them has received."""
        number = torch.tensor(self.received[0])
        if self.group:
            if self.vote:
                self.vote.wait()
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        self.signal = self.signal or int(number)

    def __enter__(self):
        reader, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.pipe_before = signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        start_thread(self.attend, reader)
        for number in (*STOPPING, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self.before[number] = signal.signal(number, self.handle)
        self.received[1] |= process.early_save_requests[0]

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.pipe_before)
        os.write(self.pipe, bytes(1))
        os.close(self.pipe)

    def attend(self, reader: int):
        """Answer the first signal, and end the process at a second Ctrl-C.

        In a thread woken by the interpreter's signals, even while the training thread is stuck.
        """
        first = 0
        while number := os.read(reader, 1)[0]:
            if first and number == signal.SIGINT:
                os._exit(128 + number)
            if not first and number in STOPPING:
                first = number
                again = "; Ctrl-C again ends it at once" * (number == signal.SIGINT)
                if self.rank == 0:
                    alert(f"{signal.Signals(number).name}: stopping after this step{again}")
        os.close(reader)  # the context has ended


# --- recovery --------------------------------------------------------------------------------


MAX_ROLLBACKS = 3  # to the same checkpoint


def roll_back(run, error: NotFinite):
    """Return to the newest checkpoint, and continue with the samples after the non-finite ones.

    Raises `error` with --on_nonfinite abort, without a checkpoint, or after MAX_ROLLBACKS.
    """
    if run.cfg.on_nonfinite == "abort":
        raise error
    progress = run.progress
    position, newest = progress.position, "there is no checkpoint to roll back to"
    if run.dir.writer:
        run.dir.writer.wait()
    if run.ranks.rank == 0:
        try:
            newest = latest_valid(run.dir.path / "checkpoints") or newest
        except (ConfigError, OSError) as e:  # all are damaged, or the disk is gone
            newest = str(e)
    newest = run.ranks.broadcast(newest)
    if isinstance(newest, str):
        raise NotFinite(f"{error}; {newest}") from None
    before = progress.rollbacks.count(newest.step)
    if before == MAX_ROLLBACKS:
        raise NotFinite(f"{error}; already rolled back to {newest} {MAX_ROLLBACKS} times") from None
    load_checkpoint(run, newest)
    progress.position, progress.rollbacks = position, [newest.step] * (before + 1)
    run.guard.nonfinite.zero_()
    if run.ranks.rank == 0:
        print(f"warning: {error}; rolled back to {newest}, continuing at sample {position}",
              flush=True)
    save_checkpoint(run)  # a process that is killed now rolls back to the same place


def save_last_step(run, error: BaseException) -> str:
    """After an error, save the last completed step, unless an update has begun since.

    Returns a line for the screen, or "". Uses no collective: the other ranks may be gone. If all
    ranks hold the same weights, rank 0 saves them, and so does the rank that failed: rank 0 may
    wait on its GPU for a collective that never ends. Sharded, each rank saves its part, and there
    is a checkpoint if all of them get here.
    """
    own = isinstance(error, Exception) and not lost_connection(error)
    writer, step, folder = run.dir.writer, run.progress.step, run.dir.path / "checkpoints"
    if not writer and own and run.ranks.shards.size == 1:
        time.sleep(min(1 + 0.1 * run.ranks.rank, 10))
        file = Checkpoint.named(folder, step).path
        if not any(folder.glob(f"{file.name}*")):  # nor a draft of it, by another rank
            writer = run.dir.writer = Writer(folder, keep=sys.maxsize)  # rank 0 deletes old ones
    if not writer:
        return ""
    writer.hurry = True
    sound = (run.guard.clean and step and not run.ranks.watchdog.mixed
             and run.guard.device_is_there())
    if sound:
        save_checkpoint(run, alone=True)
    writer.wait()  # also for an older one on its way to the disk
    if not sound or writer.written != step:
        return ""
    part = ", this rank's part of it" if writer.size > 1 else ""
    return f"saved the last completed step, {step}{part}"


def save_if_sound(run, error: BaseException):
    """Before a run ends with this error: save its last step, unless the error is in the weights.

    Raises MemoryError, with advice, if memory ran out.
    """
    if isinstance(error, ReplicasDiffer):
        if run.ranks.rank == 0:
            quarantine(run.dir.writer, error)
        return
    try:
        said = save_last_step(run, error)
    except Exception as e:
        said = f"warning: step {run.progress.step} could not be saved: {e}"
    signs = run.ranks.watchdog.last_signs()
    if signs and not run.ranks.watchdog.verdict:
        said = f"rank {run.ranks.rank}: {signs}\n{said}"
    if said:
        alert(said.strip())
    if out_of_memory(error):
        raise MemoryError(memory_advice(run.ranks, run.cfg.batch_size, error)) from error


def quarantine(writer, error: ReplicasDiffer):
    """Set aside the checkpoints since the ranks last agreed, unless no other would be left."""
    if error.agreed is None:
        return
    writer.wait()
    found = list_checkpoints(writer.folder)
    doubtful = [checkpoint for checkpoint in found if checkpoint.step > error.agreed]
    for checkpoint in doubtful if len(doubtful) < len(found) else []:
        checkpoint.set_aside()
        print(f"warning: {checkpoint}: its weights are in doubt; set aside", flush=True)


@torch.no_grad()
def autopsy(run, step: int, rank: int) -> dict:
    """The samples of `rank` in step `step`, and the first layer with an output that is not finite.

    Uses the current weights, since those of a past step are gone.
    """
    data, n, progress = run.train_data, run.cfg.batch_size, run.progress
    first = progress.position - (progress.step - step + 1) * n
    first, end = data.share(first, n, rank, run.ranks.world_size)
    bad, names = [], {module: name for name, module in run.model.named_modules() if name}

    def look(module: nn.Module, inputs, output):
        if isinstance(output, Tensor) and not output.isfinite().all():
            bad.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    run.model.eval()
    try:
        for start in range(first, end, run.ranks.micro_batch):
            batch = data.rows(start, start + run.ranks.micro_batch, end).to(run.ranks.device)
            with run.ranks.autocast, gathered(run.model):
                losses = run.model.forward(batch.tokens, batch.targets, batch.documents)
            if not losses.isfinite().all():
                bad.append("head")  # the loss uses its weight without calling the module
    finally:
        run.model.train()
        for hook in hooks:
            hook.remove()
    sources = np.unique(data.order(first, end)[0])
    return dict(positions=[first, end], datasets=[data.datasets[k].name for k in sources],
                first_bad_layer=bad[0] if bad else None,
                see=f"python data.py show {run.dir.path} {step}")


# --- errors around training ------------------------------------------------------------------


@contextlib.contextmanager
def reading_paths():
    """While files that options name are read and made, an OSError is the user's: ConfigError."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f"{e.filename or 'a file'}: {e.strerror}; name a path that can be used "
                          "here") from e


@contextlib.contextmanager
def only_warning(what: str):
    """An error in here, with its traceback, is a warning: what matters is done."""
    try:
        yield
    except Exception as e:
        print(f"warning: {what}: {type(e).__name__}: {e}", file=sys.stderr)
        traceback.print_exc()
