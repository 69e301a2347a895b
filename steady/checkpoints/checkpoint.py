"""Checkpoints: one type, whether a file or a folder of parts, and those of a run.

    checkpoints/step_00000100.pt    the state of a run in one file, sealed by a checksum
    checkpoints/step_00000100/      where the state is sharded: a file for each rank
    checkpoints/best.pt, best/      the same, a link to the one with the lowest validation loss
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from steady.checkpoints import parts
from steady.checkpoints.parts import PART
from steady.checkpoints.retry import retry
from steady.checkpoints.sealed import atomic_write, find_corruption, link_or_copy
from steady.options import ConfigError

NAME = re.compile(r"step_(\d{8,})(\.pt)?")
BEST = ("best.pt", "best")
DRAFT = re.compile(r"(step_\d{8,}|best)(\.pt)?\.(tmp|backup)-\d+")
FORMAT = 4  # of the dict in a file


@dataclass(frozen=True)
class Checkpoint:
    """A file or a folder at `path`, which may be absent or damaged."""

    path: Path

    @classmethod
    def named(cls, folder: Path, step: int, sharded: bool = False) -> "Checkpoint":
        return cls(folder / f"step_{step:08d}{'' if sharded else '.pt'}")

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def step(self) -> int:
        """From its name; AttributeError for best."""
        return int(NAME.fullmatch(self.name)[1])

    @property
    def run_dir(self) -> Path | None:
        """The run directory that it is in; None for one that was moved elsewhere."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None

    def exists(self) -> bool:
        """Whether it is there as a whole: a folder that lacks a part was never finished."""
        if self.path.suffix == ".pt":
            return self.path.is_file()
        return parts.is_whole(self.path)

    def files(self) -> list[Path]:
        """Those with the state; none where it is absent or not whole."""
        return [self.path] if self.path.is_file() else parts.listed(self.path)

    def changed_at(self) -> int:
        """When it was written, in ns; 0 where another process has just deleted it."""
        try:
            return max(file.stat().st_mtime_ns for file in self.files())
        except (FileNotFoundError, ValueError):
            return 0

    def find_damage(self) -> str | None:
        """What is wrong with its bytes, all of which are read; or None."""
        files = self.files()
        if not files:
            return "it has no files, or not the parts of all ranks"
        with ThreadPoolExecutor(8) as pool:  # reading and checksums run beside one another
            for file, wrong in zip(files, pool.map(find_corruption, files), strict=True):
                if wrong:
                    return wrong if file == self.path else f"{file.name}: {wrong}"
        return None

    def require_valid(self):
        """Raise ConfigError if it is damaged, or only a part of one."""
        if PART.fullmatch(self.name):
            raise ConfigError(f"{self}: is only a part; expected its folder, {self.path.parent}")
        wrong = retry(self.find_damage)
        if wrong:
            raise ConfigError(f"{self}: not a checkpoint that can be read: {wrong}")

    def states(self, device: str = "cpu", mmap: bool = False) -> list[dict]:
        """What its files hold: one state, or that of each rank. Raises ConfigError."""
        try:
            found = [torch.load(file, map_location=device, weights_only=True, mmap=mmap)
                     for file in self.files()]
            version = found[0]["format"]
        except Exception as e:  # zipfile, pickle and torch each have errors of their own
            raise ConfigError(f"{self}: not a checkpoint that can be read "
                              f"({type(e).__name__})") from e
        if version != FORMAT:
            raise ConfigError(f"{self}: format {version}; this version reads {FORMAT}")
        return found

    def state(self, device: str = "cpu") -> dict:
        """The whole state, joined from all its files; verify it first."""
        return parts.join(self.states(device, mmap=device == "cpu"))

    def link_to(self, new: Path):
        """Make `new` the same checkpoint, in place of the one that is there."""
        if self.path.is_dir():
            parts.link_folder(self.path, new)
        else:
            with atomic_write(new) as draft:
                link_or_copy(self.path, draft)

    def link_as_best(self):
        """Make it best.pt, or the folder best, and delete the other of the two."""
        name, other = BEST if self.path.suffix else BEST[::-1]
        self.link_to(self.path.with_name(name))
        Checkpoint(self.path.with_name(other)).delete()

    def delete(self):
        if self.path.is_dir():
            parts.remove_strays(self.path, kept=())
        else:
            self.path.unlink(missing_ok=True)

    def set_aside(self, why: str = "set-aside"):
        """Rename it to NAME.set-aside, or .set-aside-2, …, so that nothing takes it for current."""
        self.path.rename(unused_name(self.path.with_name(f"{self.name}.{why}")))


def unused_name(path: Path) -> Path:
    """This path, or PATH-2, PATH-3, … where that is taken, also by a link that leads nowhere."""
    new, n = path, 2
    while os.path.lexists(new):
        new, n = path.with_name(f"{path.name}-{n}"), n + 1
    return new


# --- those of a run --------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first, without other names."""
    found = [Checkpoint(path) for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(filter(Checkpoint.exists, found), key=lambda c: (c.step, c.changed_at()))


def checkpoint_at(folder: Path, step: int) -> Checkpoint | None:
    """The checkpoint of this step, if there is one."""
    return next((found for found in list_checkpoints(folder)[::-1] if found.step == step), None)


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """best.pt, or the folder best; the newer one, if there is one."""
    found = filter(Checkpoint.exists, (Checkpoint(folder / name) for name in BEST))
    return max(found, key=Checkpoint.changed_at, default=None)


def find_checkpoint(source: Path) -> Checkpoint | None:
    """The checkpoint that a path names, verified: itself, or the newest valid one of a run.

    None if it is neither. Raises ConfigError where it is damaged, or all of a run are.
    """
    checkpoint = Checkpoint(source)
    if source.is_file() or checkpoint.exists():
        checkpoint.require_valid()
        return checkpoint
    return latest_valid(source / "checkpoints", ours=False)


def latest_valid(folder: Path, ours: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint; damaged ones after it are set aside, if the lock is ours.

    None if there are none at all. Raises ConfigError, and changes nothing, if all are damaged.
    """
    bad, done = [], "set aside as .corrupt" if ours else "passed over"
    for checkpoint in reversed(list_checkpoints(folder)):
        wrong = retry(checkpoint.find_damage)
        if not wrong:
            for damaged, why in bad:
                if ours:
                    damaged.set_aside("corrupt")
                print(f"warning: {damaged}: {why}; {done}", flush=True)
            return checkpoint
        bad.append((checkpoint, wrong))
    if bad:
        reasons = "; ".join(f"{damaged.name}: {why}" for damaged, why in bad)
        raise ConfigError(f"{folder}: no checkpoint is valid ({reasons}). Bring one back from a "
                          "backup, or start afresh with --overwrite")
    return None


def rotate(folder: Path, keep: int, keep_every: int):
    """Delete all but the newest `keep` checkpoints and those at multiples of `keep_every`."""
    found = list_checkpoints(folder)
    for old in found[:-keep]:
        if not keep_every or old.step % keep_every:
            old.delete()
    for path in step_folders(folder):  # parts of a save that failed
        if found and Checkpoint(path).step < found[-1].step:
            parts.remove_strays(path)


def step_folders(folder: Path) -> list[Path]:
    """The folders of parts in a run's, finished or not."""
    found = (path for path in folder.glob("step_*") if NAME.fullmatch(path.name))
    return [path for path in found if path.is_dir()]


def remove_drafts(folder: Path):
    """Delete what a killed process left unfinished; only for the process that holds the lock."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name):
            Checkpoint(path).delete()
    for path in [*step_folders(folder), folder / "best"]:
        if path.is_dir():
            parts.remove_strays(path)


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
