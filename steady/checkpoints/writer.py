"""Writing checkpoints beside training: in a thread, by one rank or by each its shard."""

import json
import math
import threading
import time
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import Checkpoint, rotate
from steady.checkpoints.parts import SHARED, remove_strays
from steady.checkpoints.retry import disk_error, retry
from steady.checkpoints.sealed import sync_directory, write_checkpoint
from steady.options import Failed

MAX_FAILURES = 3  # saves in a row that may fail before training stops
PATIENCE = 60.0  # seconds, at least, that rank 0 waits for the parts of the others
NOT_FINITE = "the weights are not finite"


class NotSaved(Failed):
    """Checkpoints could not be written; the message says why."""


class Writer:
    """Writes checkpoints in a thread: training waits for a copy to host memory, not for the disk.

    The host memory is allocated once. At most one write is in flight; the next save waits for it.
    backup: a Backup, which is offered each checkpoint that was written and verified.
    parts: a PartWriter, where this rank holds only a part of the state.
    """

    def __init__(self, folder: Path, keep: int, keep_every: int = 0, backup=None,
                 best=(math.inf, 0), parts=None):
        self.folder, self.keep, self.keep_every, self.backup = folder, keep, keep_every, backup
        self.parts = parts
        self.in_best = best  # (loss, step) of best.pt
        self.buffers, self.thread, self.step = {}, None, 0
        self.stream = self.copied = None  # on CUDA: where copies are made, when the newest is done
        self.failures, self.reason = 0, ""  # saves in a row that failed; why the last did

    def save(self, step: int, state: dict, is_best: bool = False, updated=None):
        """Copy `state` and have it written as step_N.pt and, if it is the best, as best.pt.

        From a GPU it is copied beside what comes next, up to the next update: see `finish_copy`.
        updated: the CUDA event after which the device has `state`, if what it was given since may
        never end; by default all that it was given. Raises NotSaved after too many failures in a
        row.
        """
        if self.thread and self.thread.is_alive():
            print(f"step {step}: waiting until the checkpoint of step {self.step} is written",
                  flush=True)
        self.wait()
        if self.failures >= MAX_FAILURES:
            raise NotSaved(f"{self.folder}: {self.failures} checkpoints in a row could not be "
                           f"written: {self.reason}")
        weights = [t for t in state["model"].values() if t.is_floating_point()]
        if weights[0].is_cuda:
            self.stream = self.stream or torch.cuda.Stream()
            if updated:
                self.stream.wait_event(updated)
            else:
                self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            norm = torch.stack(torch._foreach_norm(weights)).sum()  # not finite if a weight is not
            copied = self.copy_to_host(dict(state, weights_norm=norm), "", {})
        self.copied = self.stream and self.stream.record_event()
        if not state["model"].keys().isdisjoint(state.get("whole", ())):  # as of a batch norm:
            self.finish_copy()  # a forward pass may change them
        self.step = step
        self.thread = threading.Thread(target=self.write,
                                       args=(step, copied, self.copied, is_best))
        self.thread.start()

    def finish_copy(self):
        """Before an update: wait until the weights are copied."""
        if self.copied:
            self.copied.synchronize()
            self.copied = None

    def copy_to_host(self, value, key: str, seen: dict):
        """`value` with each tensor copied to the host buffer that belongs to its key."""
        if isinstance(value, dict):
            return {k: self.copy_to_host(v, f"{key}/{k}", seen) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            copies = (self.copy_to_host(v, f"{key}/{i}", seen) for i, v in enumerate(value))
            return type(value)(copies)
        if not isinstance(value, torch.Tensor):
            return value
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and place in seen:  # tied weights stay one tensor
            return seen[place]
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.buffers[key] = buffer
        seen[place] = buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        return buffer

    def write(self, step: int, state: dict, event, is_best: bool):
        checkpoint = Checkpoint.named(self.folder, step, sharded=bool(self.parts))
        try:
            if event:
                event.synchronize()
            finite = bool(state.pop("weights_norm").isfinite())
            if self.parts:
                self.parts.write(checkpoint.path, state, finite)
                if self.parts.rank:
                    return
            elif finite:
                retry(lambda: write_checkpoint(checkpoint.path, state))
            else:
                raise WeightsNotFinite(NOT_FINITE)
            if is_best:
                checkpoint.link_as_best()
                self.in_best = state["best_loss"], step
            rotate(self.folder, self.keep, self.keep_every)
            self.failures = 0
            if self.backup:
                self.backup.offer(checkpoint)
        except WeightsNotFinite:
            print(f"warning: step {step}: {NOT_FINITE}; not saved", flush=True)
        except Exception as e:
            self.reason, what = disk_error(e, self.folder), "the checkpoint could not be written"
            if self.parts and self.parts.rank:  # rank 0 decides when there are too many
                what = f"the part of rank {self.parts.rank} could not be written"
            else:
                self.failures += 1
                what += f" ({self.failures} of {MAX_FAILURES})"
            print(f"warning: step {step}: {what}: {self.reason}", flush=True)

    def best(self) -> tuple[float, int]:
        """(validation loss, step) of the weights in best.pt."""
        self.wait()
        return self.in_best

    def wait(self):
        """Wait until the write in flight is on the disk."""
        if self.thread:
            self.thread.join()

    def close(self, copy: bool):
        """Wait for the disk and, with `copy`, for a backup of the newest checkpoint.

        Raises NotSaved if the last checkpoint could not be written.
        """
        self.wait()
        if self.backup and copy:
            self.backup.close()
        if self.failures:
            raise NotSaved(f"{self.folder}: the last checkpoint, of step {self.step}, is not "
                           f"there: {self.reason}")


class Missing(OSError):
    """The part of some rank is not there."""


class WeightsNotFinite(Missing):
    """The weights of some rank are not finite, and so never saved."""


class PartWriter:
    """Writes this rank's parts; rank 0 then waits until those of the others are there.

    notes: a store in which the ranks report what they wrote, without waiting for one another.
    attempt: a text that no earlier process of this run has used.
    """

    def __init__(self, rank: int, size: int, notes, attempt: str):
        self.rank, self.size, self.notes, self.attempt = rank, size, notes, attempt
        self.count = 0  # of saves begun, the same on all ranks
        self.hurry = False  # whether some rank may be gone, or be stuck until this one is
        self.newest = None  # folder of the newest part written

    def write(self, folder: Path, state: dict, finite: bool = True):
        """Write one checkpoint. Raises what went wrong; on rank 0 also Missing, for another rank's.

        finite: whether the weights are; else nothing is written, and the others learn of it.
        """
        began, save = time.monotonic(), f"{self.attempt}-{self.count}"
        self.count += 1
        names, note = [f"rank_{rank}_of_{self.size}.{save}.pt" for rank in range(self.size)], {}
        try:
            if not finite:
                raise WeightsNotFinite(NOT_FINITE)
            if not folder.parent.is_dir():
                raise FileNotFoundError(f"{folder.parent} is not seen here; expected {SHARED}")
            folder.mkdir(exist_ok=True)
            retry(lambda: write_checkpoint(folder / names[self.rank], state))
            sync_directory(folder.parent)  # which has the name of the folder
            self.newest = folder
        except Exception as e:
            note = dict(error=str(e), finite=finite)
            raise
        finally:
            self.notes.set(f"{save} {self.rank}", json.dumps(note))
        if self.rank:
            return
        patience = max(PATIENCE, 4 * (time.monotonic() - began))
        for rank, name in enumerate(names):
            key = f"{save} {rank}"
            while not self.notes.check([key]):
                if self.hurry or time.monotonic() - began > patience:
                    raise Missing(f"rank {rank} has not written its part")
                time.sleep(0.02)
            note = json.loads(self.notes.get(key))
            if note:
                kind = Missing if note["finite"] else WeightsNotFinite
                raise kind(f"rank {rank}: {note['error']}")
            if not (folder / name).is_file():
                raise Missing(f"{folder / name} is not seen here: written by a rank that was at "
                              f"another step, or not to {SHARED}")
        remove_strays(folder, names)  # what was replaced
