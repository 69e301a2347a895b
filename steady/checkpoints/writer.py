"""Writing checkpoints beside training, in a thread: one rank all of it, or each rank its shard."""

import math
import threading
import time
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import SHARED, Checkpoint, make_room, rotate
from steady.checkpoints.disk import (
    disk_error,
    lack_of_space,
    retry,
    sync_directory,
    write_checkpoint,
)
from steady.options import Failed

MAX_FAILURES = 3  # saves in a row that may fail before training stops
PATIENCE = 60.0  # seconds, at least, that rank 0 waits for the parts of the others


class NotSaved(Failed):
    """Checkpoints could not be written; the message says why."""


class WeightsNotFinite(OSError):
    """The weights of some rank are not finite, and so never saved."""


class Writer:
    """Writes checkpoints in a thread: training waits for a copy to host memory, not for the disk.

    At most one write is in flight; the next save waits for it. If the state is sharded over `size`
    ranks, each has a writer of its part. notes: a store for the result of each part. attempt: a
    text that no earlier process of this run has used.
    """

    def __init__(self, folder: Path, keep: int, backup=None,
                 best=(math.inf, 0), rank: int = 0, size: int = 1, notes=None, attempt: str = ""):
        self.folder, self.keep, self.backup = folder, keep, backup
        self.in_best = best  # (loss, step) of best.pt
        self.rank, self.size, self.notes, self.attempt = rank, size, notes, attempt
        self.hurry = False  # a rank may be gone, or be stuck until this one is
        self.buffers, self.thread, self.step = {}, None, 0
        self.of_best = False  # whether the write in flight is of better weights
        self.stream = self.copied = None  # on CUDA: for copies; the event that ends the newest
        self.count = 0  # saves begun, the same on all ranks
        self.failures, self.reason = 0, ""  # saves in a row that failed; the last error
        self.written = None  # the step of the newest file

    def save(self, step: int, state: dict, is_best: bool = False, updated=None):
        """Copy `state` and write it as step_N.pt and, if it is the best, as best.pt.

        A copy from a GPU goes on beside the next forward pass: see `finish_copy`. updated: the
        CUDA event after which `state` is complete, if work given to the device since may never
        end. Raises NotSaved after MAX_FAILURES in a row.
        """
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
        self.step, self.of_best = step, is_best
        self.thread = threading.Thread(target=self.write,
                                       args=(step, copied, self.copied, is_best))
        self.thread.start()

    def finish_copy(self):
        """Before an update: wait until the weights are copied."""
        if self.copied:
            self.copied.synchronize()
            self.copied = None

    def copy_to_host(self, value, key: str, seen: dict):
        """`value` with each tensor copied to the host buffer of its key."""
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

    def write(self, step: int, state: dict, event, is_best: bool, again: bool = False):
        """In the thread. again: room was made for it on a full disk."""
        checkpoint = Checkpoint.named(self.folder, step, sharded=self.size > 1)
        try:
            if event:
                event.synchronize()
            self.write_files(checkpoint.path, step, state)
            if self.rank == 0:
                if is_best:
                    checkpoint.link_as_best()
                    self.in_best = state["best_loss"], step
                rotate(self.folder, self.keep, step)
                if self.backup:
                    self.backup.offer(checkpoint)
            self.failures = 0
        except WeightsNotFinite as e:
            print(f"warning: step {step}: {e}; not saved", flush=True)
        except Exception as e:
            if self.rank == 0 and make_room(self.folder, self.keep, step, e):
                if self.size == 1 and not again:  # else it is for the next save
                    return self.write(step, state, None, is_best, again=True)
            self.failures += 1
            self.reason = disk_error(e, self.folder)
            if lack_of_space(e):
                self.reason += "; free some space, or lower --keep_checkpoints"
            what = f"the part of rank {self.rank}" if self.rank else "the checkpoint"
            print(f"warning: step {step}: {what} could not be written ({self.failures} of "
                  f"{MAX_FAILURES}): {self.reason}", flush=True)

    def write_files(self, path: Path, step: int, state: dict):
        """Write one checkpoint. Raises the error, on rank 0 also of another rank."""
        if self.size == 1:
            return self.write_file(path, step, state)
        began, save, note = time.monotonic(), f"{self.attempt}-{self.count}", ""
        self.count += 1
        parts = [path / f"rank_{rank}_of_{self.size}.{save}.pt" for rank in range(self.size)]
        try:
            path.mkdir(exist_ok=True)
            self.write_file(parts[self.rank], step, state)
            sync_directory(self.folder)  # it has the name of the new folder
        except Exception as e:
            full = lack_of_space(e)
            note = f"{full.errno}: {full.strerror}" if full else f"{type(e).__name__}: {e}"
            raise
        finally:
            self.notes.set(f"{save} {self.rank}", note)
        if self.rank == 0:
            until = time.monotonic() + max(PATIENCE, 3 * (time.monotonic() - began))
            for rank, part in enumerate(parts):
                self.wait_for_part(part, rank, f"{save} {rank}", until)
            Checkpoint(path).clean(parts)  # without parts of older saves

    def write_file(self, path: Path, step: int, state: dict):
        state = dict(state)
        if not state.pop("weights_norm").isfinite():
            raise WeightsNotFinite("the weights are not finite")
        retry(lambda: write_checkpoint(path, state))
        self.written = step

    def wait_for_part(self, file: Path, rank: int, key: str, until: float):
        """Wait for the note of this rank. Raises OSError if its part is not there."""
        while not self.notes.check([key]):
            if self.hurry or time.monotonic() > until:
                raise OSError(f"rank {rank} has not written its part")
            time.sleep(0.02)
        kind, _, reason = self.notes.get(key).decode().partition(": ")
        if kind == WeightsNotFinite.__name__:
            raise WeightsNotFinite(reason)
        if kind:
            why = f"rank {rank}: {reason}"
            raise OSError(int(kind), why) if kind.isdecimal() else OSError(why)
        if not file.is_file():
            raise OSError(f"{file} is not seen here: written by a rank that was at another step, "
                          f"or not to {SHARED}")

    def best(self) -> tuple[float, int]:
        """(validation loss, step) of the weights in best.pt; waits for any on their way there.

        If ranks write parts, also until rank 0 has cleaned the folder that they may write to next.
        """
        if self.size > 1 or self.of_best:
            self.wait()
        return self.in_best

    def wait(self):
        """Wait until the write in flight is on the disk."""
        if self.thread:
            self.thread.join()

    def close(self, asked=lambda: False):
        """Wait for the disk and, until `asked()` to stop, for a backup.

        Raises NotSaved if the last save failed.
        """
        self.wait()
        if self.backup and not asked():
            self.backup.close(asked)
        if self.failures:
            raise NotSaved(f"{self.folder}: the last checkpoint, of step {self.step}, is not "
                           f"there: {self.reason}")
