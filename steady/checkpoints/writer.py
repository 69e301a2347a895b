"""Writing checkpoints beside training, in a thread: one rank all of it, or each rank its shard."""

import contextlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from steady.checkpoints.backup import run_id
from steady.checkpoints.checkpoint import Checkpoint, part_names, rotate, tree_map, write_checkpoint
from steady.checkpoints.disk import SHARED, delete, disk_error, put_in_place, retry
from steady.options import Failed

MAX_FAILURES = 3  # saves in a row that may fail before training stops
PARTS_SECONDS = 60.0  # seconds, at least, that rank 0 waits for the parts of the others
HURRY = 3.0  # after an error: other ranks may be gone, or waiting for this one to exit


class Writer:
    """Writes checkpoints in a thread: training waits for a copy to host memory, not for the disk.

    At most one write is in flight. Each of the `size` ranks of `group` that share the state has a
    writer of its part. number: of the first draft; the same on all ranks, unlike any earlier run's.
    """

    def __init__(self, folder: Path, keep: int, backup=None, rank: int = 0, size: int = 1,
                 group=None, number: int = 1, run_id: str | None = None):
        self.folder, self.keep, self.backup, self.run_id = folder, keep, backup, run_id
        self.rank, self.size, self.group, self.number = rank, size, group, number
        self.hurry = False  # after an error
        self.buffers, self.step = {}, 0
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.writing = self.thread.submit(int)  # starts it: later the system may have none left
        self.stream = self.copied = None  # on CUDA: for copies; the event that ends the newest
        self.failures, self.reason = 0, ""  # saves in a row that failed; the last error
        self.written = None  # the step of the newest checkpoint that this rank saw complete

    def save(self, step: int, state: dict, is_best: bool = False, updated=None, alone=False):
        """Copy `state` and write it as step_N.pt and, if it is the best, as best.pt.

        A copy from a GPU goes on beside the next forward pass: see `finish_copy`. updated: the
        CUDA event that completes `state`. alone: other ranks may be gone. Raises Failed.
        """
        self.wait()
        if self.failures >= MAX_FAILURES and not alone:  # alone: try, there may be space by now
            raise Failed(f"{self.folder}: {self.failures} checkpoints in a row could not be "
                         f"written: {self.reason}")
        if next(iter(state["model"].values())).is_cuda:
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_event(updated or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.stream):  # does nothing if it is None
            weights = [x.nan_to_num(torch.nan, 0, 0) if name in state.get("whole", ()) else x
                       for name, x in state["model"].items() if x.is_floating_point()]
            norm = torch.stack(torch._foreach_norm(weights)).sum()  # a buffer may hold infinities
            if self.group and not alone:  # also waits for rank 0's previous save
                dist.all_reduce(norm, group=self.group)
            copied = tree_map(partial(self.copy_to_host, {}), dict(state, weights_norm=norm))
        self.copied = self.stream and self.stream.record_event()
        if not state["model"].keys().isdisjoint(state.get("whole", ())):  # as a batch norm's:
            self.finish_copy()  # a forward pass may change these buffers
        self.step, self.number = step, self.number + 1
        self.writing = self.thread.submit(self.write, step, copied, self.copied, is_best)

    def copy_to_host(self, seen: dict, name: str, value):
        """A tensor's copy, in the host buffer of that name; a number of NumPy as one of Python."""
        if not isinstance(value, torch.Tensor):
            return value.item() if getattr(value, "shape", None) == () else value  # else unreadable
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and place in seen:  # tied weights stay one tensor
            return seen[place]
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.buffers[name] = buffer
        seen[place] = buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        return buffer

    def finish_copy(self):
        """Before an update: wait until the weights are copied."""
        if self.copied:
            self.copied.synchronize()
            self.copied = None

    def write(self, step: int, state: dict, event, is_best: bool):
        """Write a checkpoint; runs in the thread."""
        checkpoint = Checkpoint.named(self.folder, step, sharded=self.size > 1)
        try:
            if event:
                event.synchronize()
            if not state.pop("weights_norm").isfinite():
                print(f"warning: step {step}: the weights are not finite; not saved", flush=True)
                return
            if retry(lambda: run_id(self.folder.parent)) not in ("", None, self.run_id):
                raise OSError("another run has begun here, after this one's folder was moved away")
            self.folder.mkdir(exist_ok=True)
            self.write_files(checkpoint.path, step, state)
            if self.rank == 0:
                self.written = step
                delete(Checkpoint.named(self.folder, step, sharded=self.size == 1).path)
                if is_best:
                    retry(checkpoint.link_as_best)
                rotate(self.folder, self.keep)
                if self.backup:
                    self.backup.offer(checkpoint)
            self.failures = 0
        except Exception as e:
            self.failures = min(self.failures + 1, MAX_FAILURES)
            self.reason = disk_error(e, self.folder,
                                     "; free some space, or lower --keep_checkpoints")
            what = f"the part of rank {self.rank}" if self.rank else "the checkpoint"
            print(f"warning: step {step}: {what} could not be written ({self.failures} of "
                  f"{MAX_FAILURES}): {self.reason}", flush=True)

    def write_files(self, path: Path, step: int, state: dict):
        """Write the checkpoint, or this rank's part of it; rank 0 waits for the other parts."""
        if self.size == 1:
            return retry(lambda: write_checkpoint(path, state))
        draft = path.with_name(f"{path.name}.tmp-{self.number}")
        parts, began = part_names(self.size), time.monotonic()
        if self.rank == 0 and not self.hurry:  # other parts may come after its own failure
            for left in self.folder.glob(f"step_*.tmp-{self.number - 1}"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            draft.mkdir(exist_ok=True)
            retry(lambda: write_checkpoint(draft / parts[self.rank], state))
            now = time.monotonic()
            if self.rank:
                if Checkpoint(draft).exists() or Checkpoint(path).exists():
                    self.written = step
                return
            patience = max(PARTS_SECONDS, 3 * (now - began))
            while missing := set(parts) - set(seen := os.listdir(draft)):
                if "failed" in seen or time.monotonic() - now > (HURRY if self.hurry else patience):
                    raise OSError(f"not written, or not to {SHARED}: {', '.join(sorted(missing))}")
                time.sleep(0.02)
            put_in_place(draft, path)
        except Exception:
            if self.rank:
                with contextlib.suppress(OSError):
                    (draft / "failed").touch()  # rank 0 need not wait any longer
            elif not self.hurry:  # else the next start adopts it, if complete
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def wait(self):
        """Wait until the write in flight is on the disk."""
        self.writing.result()

    def close(self, asked=lambda: False):
        """Wait for the disk and, until `asked()`, a backup. Raises Failed if the last save did."""
        self.wait()
        if self.backup and not asked():
            self.backup.close(asked)
        if self.failures:
            raise Failed(f"{self.folder}: the last checkpoint, of step {self.step}, is missing: "
                         f"{self.reason}")
