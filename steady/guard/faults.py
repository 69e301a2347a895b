"""When things go wrong: signals, non-finite steps, crashes, error messages."""

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steady.checkpoints.checkpoint import (
    NotSaved,
    checkpoint_at,
    checkpoint_step,
    latest_valid,
    list_checkpoints,
    set_aside,
)
from steady.checkpoints.retry import FULL
from steady.checkpoints.state import load_checkpoint, save_checkpoint
from steady.guard import ctrl_c
from steady.guard.memory import out_of_memory
from steady.options import ConfigError, due, typed
from steady.ranks.hangs import LEFT_OUT
from steady.ranks.parallel import gathered
from steady.ranks.ranks import RanksMissing, rank_and_world, say_once
from steady.ranks.replicas import ReplicasDiffer

# --- signals ---------------------------------------------------------------------------------


class Stop:
    """Signals become flags, and all ranks act on them at the same step.

    SIGTERM, SIGHUP, SIGINT: save and stop; a second SIGINT stops at once. SIGUSR1: save and go on.
    Ranks exchange the signals they received over gloo while a step is computed, and read the result
    before the next one, so the exchange never waits for a device.
    """

    def __init__(self, world_size: int):
        self.signal, self.save = 0, False  # agreed by all ranks
        self.received = [0, 0]  # by this rank: the signal to stop for, whether to save
        self.group = None
        if world_size > 1:  # rank 0 may upload for hours while the others wait at the end
            self.group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        self.votes = self.exchange = None
        self.before = {}  # signal number → the handler that ours replaces

    def handle(self, number: int, frame):
        if number == signal.SIGUSR1:
            self.received[1] = 1
        elif number == signal.SIGINT and self.received[0]:
            os._exit(128 + number)
        else:
            self.received[0] = number

    def requested(self, monitor) -> bool:
        """Whether to stop before the next step; called before each, on every rank."""
        mine = list(self.received)
        self.received[1] = 0  # before the exchange: a signal that comes meanwhile is for the next
        agreed = mine
        if self.group:
            agreed = [0, 0]
            if self.exchange:
                ended = monitor.phase("waiting")
                self.exchange.wait()
                monitor.phase(ended)
                agreed = self.votes.tolist()
            if not agreed[0]:
                self.votes = torch.tensor(mine)
                self.exchange = dist.all_reduce(
                    self.votes, dist.ReduceOp.MAX, group=self.group, async_op=True
                )
        self.signal, self.save = agreed[0], bool(agreed[1])
        return self.signal != 0

    def broadcast_from_rank0(self, value):
        """Rank 0's value, on every rank."""
        box = [value]
        if self.group:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def minimum(self, number: int) -> int:
        """The smallest `number` of any rank."""
        box = torch.tensor(number)
        if self.group:
            dist.all_reduce(box, dist.ReduceOp.MIN, group=self.group)
        return int(box)

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                self.before[number] = signal.signal(number, self.handle)
        self.received[1] |= early_save_requests[0]

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


# --- recovery --------------------------------------------------------------------------------


class NotFinite(Exception):
    """Too many steps in a row were not finite, or the weights are not."""


def check_finite(run, ended: bool = False):
    """Raise NotFinite after too many non-finite steps in a row, counted up to the last log.

    Only at multiples of log_interval, not at the log of a process's first step, so that a resumed
    run acts at the same step as an uninterrupted one. With --on_nonfinite skip only if the weights
    are not finite either: then no later step can be. ended: whether the run has made all steps.
    """
    cfg, count = run.cfg, run.monitor.nonfinite_in_a_row
    many = count >= cfg.max_nonfinite and due(run.step, cfg.log_interval, cfg.max_steps)
    if (many or ended) and not weights_are_finite(run):
        raise NotFinite(f"the weights are not finite at step {run.step}, and skipping steps cannot "
                        "help; try a lower --learning_rate, or --grad_clip 1")
    if ended and not cfg.log_interval and run.nonfinite >= cfg.max_nonfinite and run.rank == 0:
        print(f"warning: the last {int(run.nonfinite)} steps had a loss or gradient that was not "
              "finite, and were skipped", flush=True)  # which no log has said
    if many and cfg.on_nonfinite != "skip":
        raise NotFinite(f"{count} steps in a row, up to step {run.step}, had a loss or gradient "
                        "that was not finite")


def weights_are_finite(run) -> bool:
    """Of all ranks; as a checkpoint's writer looks at them. Waits for the device."""
    norms = torch._foreach_norm([t for t in run.tensors.values() if t.is_floating_point()])
    return run.stop.minimum(int(torch.stack(norms).sum().isfinite())) == 1


MAX_ROLLBACKS = 3  # to the same checkpoint


def roll_back(run, error: NotFinite):
    """Return to the newest checkpoint, and continue with the samples after the non-finite ones.

    Raises `error` with --on_nonfinite abort, without a checkpoint, or after MAX_ROLLBACKS.
    """
    if run.cfg.on_nonfinite == "abort":
        raise error
    path, position = None, run.position
    if run.writer:
        run.writer.wait()
    if run.rank == 0:
        path = latest_valid(run.out_dir / "checkpoints")
    path = run.stop.broadcast_from_rank0(path)
    rollbacks = [step for step in run.rollbacks if path and step == checkpoint_step(path)]
    if path is None or len(rollbacks) == MAX_ROLLBACKS:
        why = f"gone back to {path} {MAX_ROLLBACKS} times" if path else "there is no checkpoint"
        raise NotFinite(f"{error}; {why}") from None
    load_checkpoint(run, path)
    run.position, run.rollbacks = position, [*rollbacks, run.step]
    run.nonfinite = torch.zeros_like(run.nonfinite)
    if run.rank == 0:
        print(f"warning: {error}; back to {path}, on with sample {position}", flush=True)
    save_checkpoint(run)  # a process that is killed now rolls back to the same place


rescuing = threading.Lock()  # the watchdog may do it for a training thread that never comes back


def rescue(run):
    """After an error, save the last completed step, unless an update has begun since.

    Uses no collective: the other ranks may be gone. Where each holds a part of the state, it is
    saved if all of them come to this.
    """
    rescuing.acquire()
    try:
        signs = run.watchdog.last_signs()
        if signs and not run.watchdog.verdict:
            print(f"rank {run.rank}: {signs}", file=sys.stderr, flush=True)
        if not run.writer:
            return
        if run.writer.parts:
            run.writer.parts.hurry = True
        if not run.clean or run.step == 0 or LEFT_OUT in (run.watchdog.verdict or ""):
            return  # after an exchange that was left out, sums may be of different steps
        save_checkpoint(run, alone=True)
        run.writer.wait()
        if run.writer.parts and not checkpoint_at(run.writer.folder, run.step):
            print(f"saved this rank's part of step {run.step}; the next start completes it if "
                  "every rank has", file=sys.stderr, flush=True)
        elif run.rank == 0 and checkpoint_at(run.writer.folder, run.step):
            print(f"saved the last completed step, {run.step}", file=sys.stderr, flush=True)
    except Exception as e:
        print(f"warning: step {run.step} could not be saved: {e}", file=sys.stderr, flush=True)
    finally:
        rescuing.release()


def set_doubtful_aside(run, error: ReplicasDiffer):
    """Where a rank that writes checkpoints may be the wrong one, those since they last agreed.

    Unless there would be none left: then the message has to do.
    """
    if run.rank or not run.writer or error.agreed is None:
        return
    run.writer.wait()
    found = list_checkpoints(run.writer.folder)
    doubtful = [path for path in found if checkpoint_step(path) > error.agreed]
    for path in doubtful if len(doubtful) < len(found) else []:
        set_aside(path)
        print(f"warning: {path}: its weights are in doubt; set aside", flush=True)


@torch.no_grad()
def autopsy(run, step: int, rank: int) -> dict:
    """The samples that `rank` had in step `step`, and the first layer whose output they break.

    With the current weights: the samples of a past step can be read again, its weights are gone.
    """
    data, n = run.train_data, run.cfg.batch_size
    first = run.position - (run.step - step + 1) * n
    first, end = data.share(first, n, rank, run.world_size)
    sources = np.unique(data.order(first, end)[0])
    bad, names = [], {module: name for name, module in run.model.named_modules() if name}

    def look(module: nn.Module, inputs, output):
        if isinstance(output, Tensor) and not output.isfinite().all():
            bad.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    run.model.eval()
    try:
        for start in range(first, end, run.micro_batch):
            batch = data.rows(start, start + run.micro_batch, end).to(run.device)
            with run.autocast, gathered(run.model):
                losses = run.model.forward(batch.tokens, batch.targets, batch.documents)
            if not bad and not losses.isfinite().all():
                bad.append("head")  # whose weight the loss uses without calling the module
    finally:
        run.model.train()
        for hook in hooks:
            hook.remove()
    return dict(
        positions=[first, end],
        datasets=[data.datasets[k].name for k in sources],
        first_bad_layer=bad[0] if bad else None,
    )


# --- the end of the program ------------------------------------------------------------------

early_save_requests = [0]  # SIGUSR1 during start-up, which would end the process


def prepare_process():
    """Call first: output may lose its terminal, and SIGUSR1 may come before there is a run."""
    sys.stdout, sys.stderr = Screen(sys.stdout), Screen(sys.stderr)
    signal.signal(signal.SIGUSR1, lambda *_: early_save_requests.__setitem__(0, 1))


class Screen:
    """A standard stream that drops output it cannot write, instead of ending the training.

    On a full disk, a closed pipe or terminal, or for characters that its encoding lacks.
    """

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        with self.or_nowhere():
            self.stream.write(text)
        return len(text)

    def flush(self):
        with self.or_nowhere():
            self.stream.flush()

    @contextlib.contextmanager
    def or_nowhere(self):
        try:
            yield
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # or flushing it at exit fails again
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


LOST_CONNECTION = re.compile(
    "closed by peer|reset by peer|[Bb]roken pipe|remote process exited|communicator was aborted"
)


def lost_connection(e: Exception) -> bool:
    """Whether torch has lost its connection to another rank, which has the traceback that matters.

    Not the program itself to a server. gloo's are plain RuntimeErrors, which begin with the place
    in its source.
    """
    of_gloo = type(e) is RuntimeError and re.match(r"\[\S*gloo/transport/", str(e))
    return bool(LOST_CONNECTION.search(str(e)) and (of_gloo or isinstance(e, dist.DistError)))


@contextlib.contextmanager
def setting_up():
    """Before training, an error about a path that was named is the user's: raises ConfigError."""
    try:
        yield
    except OSError as e:
        names = [str(name) for name in (e.filename, e.filename2) if name]
        if not any(map(was_named, names)) and e.errno not in FULL:
            raise
        raise ConfigError(f"{' and '.join(names) or 'a file'}: {e.strerror}; expected a path that "
                          "can be used here, name another one") from e
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not out_of_memory(e):
            raise
        raise MemoryError(f"{str(e) or 'out of memory'}; choose smaller sizes; --estimate says "
                          "what they need") from e


@contextlib.contextmanager
def only_warning(what: str):
    """An error in here, with its traceback, is a warning: what matters is done."""
    try:
        yield
    except Exception as e:
        print(f"warning: {what}: {type(e).__name__}: {e}", file=sys.stderr)
        traceback.print_exc()


def was_named(path: str) -> bool:
    """Whether it is, or is in, what options name or stand for; else the code has named it."""
    named = {*typed, *(text.rpartition(":")[0] for text in typed), "runs",  # PATH[:WEIGHT]
             os.environ.get("XDG_CACHE_HOME") or "~/.cache"}
    folders = (os.path.abspath(os.path.expanduser(text)) for text in named if text)
    return any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in folders)


def exit_code(main, argv: list[str]) -> int:
    """The exit code of `main(argv)`; errors are printed, those of the user as one line."""
    rank0 = True
    try:
        ctrl_c.after_imports()
        rank0 = rank_and_world()[0] == 0
        code = main(argv)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code
    except ConfigError as e:
        say_once(f"train.py: error: {' '.join(str(e).splitlines())}")
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --auto-resume continues from the newest checkpoint", file=sys.stderr)
        return 130
    except (NotFinite, NotSaved, ReplicasDiffer, RanksMissing) as e:
        if rank0 or isinstance(e, RanksMissing):  # which may be rank 0
            print(f"train.py: failed: {e}", file=sys.stderr)
        return 1
    except Exception as e:
        if lost_connection(e):
            reason = str(e).splitlines()[0]
            print(f"train.py: failed: another rank is gone: {reason}", file=sys.stderr)
        else:
            print(f"train.py: failed: {type(e).__name__}: {e}", file=sys.stderr)
            traceback.print_exc()
        return 1


def leave(code: int):
    """End the process.

    With several ranks, without shutting the interpreter down: a gloo or NCCL thread that wakes up
    meanwhile would abort the process ("terminate called without an active exception").
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.unfreeze()  # or C++ objects that are frozen are called leaked ("nanobind: leaked ...")
    sys.exit(code)
