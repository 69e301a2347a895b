"""Checkpoints: valid or not there. Writing, verifying, finding, loading.

A checkpoint is a file, step_N.pt, or where each rank holds a part of the state, a folder, step_N/.
"""

import math
import os
import re
import threading
from pathlib import Path

import torch

from steady.checkpoints.parts import (
    MANIFEST,
    PART,
    WeightsNotFinite,
    delete_folder,
    find_damage_of_parts,
    finish,
    is_checkpoint_folder,
    is_folder,
    join,
    link_folder,
    load_parts,
    remove_strays,
)
from steady.checkpoints.retry import disk_error, retry
from steady.checkpoints.sealed import atomic_write, find_corruption, link_or_copy, write_checkpoint
from steady.options import ConfigError

CHECKPOINT = re.compile(r"step_(\d{8,})(\.pt)?")
DRAFT = re.compile(r"(step_\d{8,}|best)(\.pt)?\.(tmp|backup)-\d+")
MAX_FAILURES = 3  # saves in a row that may fail before training stops
NOT_FINITE = "the weights are not finite"

FORMAT = 4  # of the dict in a file

# --- one checkpoint --------------------------------------------------------------------------


def find_damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint or with what it holds, or None."""
    wrong = find_damage_of_parts(path) if path.is_dir() else find_corruption(path)
    if wrong:
        return wrong
    try:
        states = load_parts(path, "meta")
        if not all(isinstance(state, dict) and "format" in state for state in states):
            return "it holds no state of a run"
        if states[0]["format"] == FORMAT:  # else `load_checkpoint` refuses it
            join(states)  # raises where the parts do not fit together
        return None
    except OSError:
        raise
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        return f"torch cannot load it ({type(e).__name__})"


# --- the files of a run ----------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, without links and other names."""
    found = [p for p in folder.glob("step_*") if CHECKPOINT.fullmatch(p.name)]
    found = [p for p in found if is_checkpoint(p) and not p.is_symlink()]
    return sorted(found, key=lambda p: (checkpoint_step(p), changed_at(p)))


def is_checkpoint(path: Path) -> bool:
    return path.is_file() and path.suffix == ".pt" or is_checkpoint_folder(path)


def changed_at(path: Path) -> int:
    """When it was written, in ns; 0 where another process has just deleted it."""
    try:
        return (path / MANIFEST if path.is_dir() else path).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def checkpoint_path(folder: Path, step: int, in_parts: bool = False) -> Path:
    return folder / f"step_{step:08d}{'' if in_parts else '.pt'}"


def checkpoint_at(folder: Path, step: int) -> Path | None:
    """The checkpoint of this step, if there is one."""
    return next((p for p in list_checkpoints(folder)[::-1] if checkpoint_step(p) == step), None)


def best_checkpoint(folder: Path) -> Path | None:
    """best.pt, or the folder best; the newer one, if there is one."""
    found = [p for p in (folder / "best.pt", folder / "best")
             if is_checkpoint(p) and not p.is_symlink()]
    return max(found, key=changed_at, default=None)


def checkpoint_step(path: Path) -> int:
    return int(CHECKPOINT.fullmatch(path.name)[1])


def delete_checkpoint(path: Path):
    if is_folder(path):
        delete_folder(path)
    else:
        path.unlink(missing_ok=True)


def other_form(path: Path) -> Path:
    """The folder with the name of a file, or the file with the name of a folder."""
    return path.with_suffix("") if path.suffix else path.with_suffix(".pt")


def link_checkpoint(path: Path, new: Path):
    """Make `new` the same checkpoint, which replaces the one that is there."""
    if path.is_dir():
        link_folder(path, new)
    else:
        with atomic_write(new) as draft:
            link_or_copy(path, draft)


def link_as_best(path: Path):
    """Make a checkpoint the best one, which replaces the one that is there."""
    best = path.with_name("best" if path.is_dir() else "best.pt")
    link_checkpoint(path, best)
    delete_checkpoint(other_form(best))


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in; None for a file that was moved elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def require_valid(path: Path):
    """Raise ConfigError if a checkpoint is damaged, or only a part of one."""
    if PART.fullmatch(path.name) or path.name == MANIFEST:
        raise ConfigError(f"{path}: is only a part; expected its folder, {path.parent}")
    wrong = retry(lambda: find_damage(path))
    if wrong:
        raise ConfigError(f"{path}: not a checkpoint that can be read: {wrong}")


def latest_valid(folder: Path, ours: bool = True) -> Path | None:
    """The newest valid checkpoint; damaged ones after it are set aside, if the lock is ours.

    None if there are none at all. Raises ConfigError, and changes nothing, if all are damaged.
    """
    bad, done = [], "set aside as .corrupt" if ours else "passed over"
    for path in reversed(list_checkpoints(folder)):
        wrong = retry(lambda path=path: find_damage(path))
        if not wrong:
            for damaged, why in bad:
                if ours:
                    set_aside(damaged, "corrupt")
                print(f"warning: {damaged}: {why}; {done}", flush=True)
            return path
        bad.append((path, wrong))
    if bad:
        reasons = "; ".join(f"{damaged.name}: {why}" for damaged, why in bad)
        raise ConfigError(f"{folder}: no checkpoint is valid ({reasons}). Bring one back from a "
                          "backup, or start afresh with --overwrite")
    return None


def rotate(folder: Path, keep: int, keep_every: int):
    """Delete all but the newest `keep` checkpoints and those at multiples of `keep_every`."""
    found = list_checkpoints(folder)
    for old in found[:-keep]:
        if not keep_every or checkpoint_step(old) % keep_every:
            delete_checkpoint(old)
    for path in folder.glob("step_*"):  # parts of a save that failed
        if CHECKPOINT.fullmatch(path.name) and is_folder(path) and found:
            if checkpoint_step(path) < checkpoint_step(found[-1]):
                remove_strays(path)


def finish_parts(folder: Path):
    """Complete the checkpoints that lack nothing but a manifest; only for who holds the lock."""
    for path in folder.glob("step_*"):
        if CHECKPOINT.fullmatch(path.name) and is_folder(path) and not is_checkpoint(path):
            finish(path)


def remove_drafts(folder: Path):
    """Delete what a killed process left unfinished; only for the process that holds the lock."""
    for path in folder.iterdir():
        if is_folder(path):
            if DRAFT.fullmatch(path.name):
                delete_folder(path)
            elif CHECKPOINT.fullmatch(path.name) or path.name == "best":
                remove_strays(path)
        if DRAFT.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def compare(a, b, name: str = "") -> tuple[int, list[str]]:
    """(number of leaves, names of those that differ in a bit) of two nested states."""
    if isinstance(a, (dict, list, tuple)) and type(a) is type(b) and len(a) == len(b):
        items = a.items() if isinstance(a, dict) else enumerate(a)
        found = [compare(v, b.get(k) if isinstance(b, dict) else b[k], f"{name}.{k}".lstrip("."))
                 for k, v in items]
        return sum(n for n, _ in found), [d for _, ds in found for d in ds]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    else:
        same = a == b
    return 1, [] if same else [name]


def read_state(path: Path, device: str = "cpu") -> dict:
    """The whole state in a checkpoint that has been verified, from all its parts."""
    return join(load_parts(path, device, mmap=device == "cpu"))


def set_aside(path: Path, why: str = "set-aside"):
    """Rename it to NAME.set-aside, or .set-aside-2, …, so that nothing takes it for current."""
    new, n = path.with_name(f"{path.name}.{why}"), 2
    while os.path.lexists(new):  # also a link that leads nowhere
        new, n = path.with_name(f"{path.name}.{why}-{n}"), n + 1
    path.rename(new)


# --- writing beside training -----------------------------------------------------------------


class NotSaved(OSError):
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
        self.failed, self.reason = set(), ""  # steps in a row whose save failed; why the last did

    def save(self, step: int, state: dict, is_best: bool = False):
        """Copy `state` and have it written as step_N.pt and, if it is the best, as best.pt.

        Raises NotSaved after too many failures in a row.
        """
        if self.thread and self.thread.is_alive():
            print(f"step {step}: waiting until the checkpoint of step {self.step} is written",
                  flush=True)
        self.wait()
        if len(self.failed) >= MAX_FAILURES:
            raise NotSaved(f"{self.folder}: {len(self.failed)} checkpoints in a row could not be "
                           f"written: {self.reason}")
        weights = [t for t in state["model"].values() if t.is_floating_point()]
        norm = torch.stack(torch._foreach_norm(weights)).sum()  # not finite if any weight is not
        copied, event = self.copy_to_host(dict(state, weights_norm=norm), "", {}), None
        if norm.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.step = step
        self.thread = threading.Thread(target=self.write, args=(step, copied, event, is_best))
        self.thread.start()

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
        path = checkpoint_path(self.folder, step, in_parts=bool(self.parts))
        try:
            if event:
                event.synchronize()
            finite = bool(state.pop("weights_norm").isfinite())
            if self.parts:
                self.parts.write(path, state, None if finite else WeightsNotFinite(NOT_FINITE))
                if self.parts.rank:
                    return
            elif finite:
                retry(lambda: write_checkpoint(path, state))
            else:
                raise WeightsNotFinite(NOT_FINITE)
            delete_checkpoint(other_form(path))
            if is_best:
                link_as_best(path)
                self.in_best = state["best_loss"], step
            rotate(self.folder, self.keep, self.keep_every)
            self.failed.clear()
        except Exception as e:
            if isinstance(e, WeightsNotFinite):
                print(f"warning: step {step}: {NOT_FINITE}; not saved", flush=True)
                return
            if self.parts and self.parts.hurry:
                return  # `rescue` says what there is
            if self.parts and self.parts.rank:  # rank 0 counts
                print(f"warning: step {step}: the part of rank {self.parts.rank} could not be "
                      f"written: {disk_error(e, self.folder)}", flush=True)
                return
            self.failed.add(step)  # once, also where an evaluation and save_interval save it
            self.reason = disk_error(e, self.folder)
            print(f"warning: step {step}: the checkpoint could not be written, training continues "
                  f"({len(self.failed)} of {MAX_FAILURES}): {self.reason}", flush=True)
            return
        if self.backup:
            self.backup.offer(step, path)

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
        if self.failed:
            raise NotSaved(f"{self.folder}: the last checkpoint, of step {self.step}, is not "
                           f"there: {self.reason}")
