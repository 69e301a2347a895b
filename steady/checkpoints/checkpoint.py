"""Checkpoints: one type for a file and for a folder of parts; how a run finds and rotates them.

    checkpoints/step_00000100.pt    the state of a run in one file, as torch.save writes it
    checkpoints/step_00000100/      sharded: rank_0_of_2.pt, rank_1_of_2.pt
    checkpoints/best.pt, best/      the same, a link to the one with the lowest validation loss

A part holds that rank's rows of each sharded tensor. Drafts are called NAME.tmp-NUMBER; a folder is
renamed once all parts are in it. EXPERIMENTS.md: why not torch.distributed.checkpoint.
"""

import contextlib
import errno
import os
import re
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from steady.checkpoints import disk
from steady.checkpoints.disk import link, retry
from steady.options import ConfigError

NAME = re.compile(r"step_(\d{8,})(\.pt)?")
PART = re.compile(r"rank_\d+_of_\d+\.pt")
BEST = ("best.pt", "best")
DRAFT = re.compile(r"((step_\d{8,}|best|backup)(\.pt)?)(\.tmp-[\d-]+)+")
SET_ASIDE = ".set-aside"
FORMAT = 5  # version of the dict in a file
FIELDS = dict(format=int, step=int, position=int, tokens=int, best_loss=float, best_step=int,
              model=dict, optimizers=list, optimizer_names=list, config=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A file or a folder at `path`; it may be absent or damaged."""

    path: Path

    @classmethod
    def named(cls, folder: Path, step: int, sharded: bool = False) -> "Checkpoint":
        return cls(folder / f"step_{step:08d}{'' if sharded else '.pt'}")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int:
        """The step in its name; TypeError for best."""
        return int(NAME.fullmatch(self.path.name)[1])

    @property
    def run_dir(self) -> Path | None:
        """The run directory around it; None if it was moved elsewhere."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None

    def files(self) -> list[Path]:
        """The file itself, or the parts in the folder by rank; none if one is missing."""
        try:
            found = set(filter(PART.fullmatch, os.listdir(self.path)))
        except (FileNotFoundError, NotADirectoryError):  # rank 0 may just have renamed the folder
            return [self.path] if self.path.is_file() else []
        expected = part_names(len(found))
        return [self.path / name for name in expected] if found == set(expected) else []

    def exists(self) -> bool:
        return bool(self.files())

    def find_damage(self) -> str | None:
        """Read every byte; returns the damage found, or None. Raises OSError."""
        if not (files := self.files()):
            return "it has no files, or not the parts of all ranks"
        with ThreadPoolExecutor(8) as pool:
            for file, wrong in zip(files, pool.map(find_corruption, files), strict=True):
                if wrong:
                    return wrong if file == self.path else f"{file.name}: {wrong}"
        state, *others = map(read_checkpoint, files)
        if not all(isinstance(each, dict) for each in (state, *others)):
            return "not a checkpoint"
        if state.get("format") not in (FORMAT, None):
            return None  # `states` refuses it by its version
        bad = [name for name, kind in FIELDS.items() if not isinstance(state.get(name), kind)]
        bad = bad or [name for name in ("step", "position") if state[name] < 0]
        bad = bad or [f"one {name} in all parts" for name in ("step", "config")  # of two saves, or
                      if any(part.get(name) != state[name] for part in others)]  # copied by hand
        if not bad and (name := NAME.fullmatch(self.path.name)) and int(name[1]) != state["step"]:
            return f"renamed: of step {state['step']}"
        return f"missing or wrong: {', '.join(bad)}" if bad else None

    def states(self) -> list[dict]:
        """The state in each file, mapped; verify it first. Raises ConfigError for other formats."""
        found = [read_checkpoint(file) for file in self.files()]
        if (version := found[0]["format"]) != FORMAT:
            raise ConfigError(f"{self}: format {version}; this version reads {FORMAT}; config.yaml "
                              "beside its folder names the commit to continue it with")
        return found

    def state(self) -> dict:
        """The whole state, joined from all its files."""
        return join(self.states())

    def link_to(self, new: Path):
        """Make `new` the same checkpoint, in place of any other there."""
        with disk.atomic_write(new) as draft:
            for file in self.files():  # none if it is being deleted: then there is no draft
                if file != self.path:
                    draft.mkdir(exist_ok=True)
                link(file, draft if file == self.path else draft / file.name)

    def link_as_best(self):
        """Make it best.pt, or the folder best, and delete the other of the two."""
        name, other = BEST if self.path.suffix else BEST[::-1]
        self.link_to(self.path.with_name(name))
        disk.delete(self.path.with_name(other))

    def set_aside(self):
        """Rename it to NAME.set-aside, or .set-aside-2, …, so that it is no longer used."""
        self.path.rename(unused_name(self.path.with_name(self.path.name + SET_ASIDE)))


def write_checkpoint(path: Path, state: dict):
    """Write `state`, verify every byte on the disk, and only then give the file its name."""
    with disk.atomic_write(path) as draft:
        with open(draft, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(AttributeError, OSError):  # so that the disk is read again
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if wrong := find_corruption(draft):
            raise OSError(f"{draft}: cannot be read back: {wrong}")


def read_checkpoint(path: Path):
    """The state in a file; its tensors are mapped, not read."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def find_corruption(path: Path) -> str | None:
    """Read every byte of a checkpoint file; returns its damage, or None. Raises OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                return "its checksum is wrong"
        read_checkpoint(path)
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        # EINVAL: a place outside the file; ENOENT: just deleted
        if isinstance(e, OSError) and e.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        odd = re.findall(r"GLOBAL (\S+)", str(e))  # a class that weights_only does not load
        return f"holds {odd[0]}" if odd else f"cut short, or not a checkpoint ({type(e).__name__})"
    return None


def part_names(size: int) -> list[str]:
    return [f"rank_{rank}_of_{size}.pt" for rank in range(size)]


def unused_name(path: Path) -> Path:
    """This path, or PATH-2, PATH-3, … if that is taken, even by a dangling link."""
    new, n = path, 2
    while os.path.lexists(new):
        new, n = path.with_name(f"{path.name}-{n}"), n + 1
    return new


def tree_map(call, tree, *more, name: str = ""):
    """call(name, *leaves) for the leaves of equally nested states, nested in the same way."""
    if not isinstance(tree, (dict, list, tuple)):
        return call(name.lstrip("."), tree, *more)
    keys = tree if isinstance(tree, dict) else range(len(tree))
    mapped = [tree_map(call, *(t[k] for t in (tree, *more)), name=f"{name}.{k}") for k in keys]
    return dict(zip(tree, mapped, strict=True)) if keys is tree else type(tree)(mapped)


def compare(a, b, name: str = "") -> tuple[int, list[str]]:
    """(number of leaves, names of those that differ in a bit) of two nested states."""
    ours, theirs = {}, {}
    tree_map(ours.__setitem__, a, name=name)
    tree_map(theirs.__setitem__, b, name=name)

    def differ(x, y) -> bool:
        tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        return x.dtype != y.dtype or not torch.equal(x, y) if tensors else x != y

    found = {leaf for leaf in ours.keys() & theirs.keys() if differ(ours[leaf], theirs[leaf])}
    return len(ours), sorted(found | ours.keys() ^ theirs.keys())


def join(states: list[dict], rows=lambda n: slice(n), copy: bool = False) -> dict:
    """The state of a run from the states of all ranks; of each tensor's n rows, only rows(n).

    Numbers, buffers and the like come from the first. copy: copy all tensors out of mapped files.
    """
    def join_parts(name: str, *parts):
        first = parts[0]
        if not isinstance(first, torch.Tensor):
            return first
        if first.ndim == 0 or name in states[0].get("whole", ()):
            return first.clone() if copy else first
        wanted, found, begin = rows(sum(map(len, parts))), [], 0
        for part in parts:
            start, stop = (max(0, end - begin) for end in (wanted.start or 0, wanted.stop))
            found.append(part[start:stop].clone() if copy else part[start:stop])
            begin += len(part)
        return torch.cat(found) if len(found) > 1 else found[0]

    return states[0] | {name: tree_map(join_parts, *(state.get(name, {}) for state in states))
                        for name in ("model", "ema", "optimizers")}


# --- the checkpoints of a run ----------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first."""
    found = [Checkpoint(path) for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def checkpoint_at(folder: Path, step: int) -> Checkpoint | None:
    return next((found for found in list_checkpoints(folder) if found.step == step), None)


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """best.pt or the folder best, if there is one."""
    return next(filter(Checkpoint.exists, (Checkpoint(folder / name) for name in BEST)), None)


def find_checkpoint(source: Path) -> Checkpoint | None:
    """The checkpoint at `source`, or the newest valid one of the run there; None if it is neither.

    Verified: raises ConfigError if it is damaged, or all of the run are.
    """
    checkpoint = Checkpoint(source)
    if not checkpoint.exists():
        return latest_valid(source / "checkpoints", ours=False)
    if wrong := retry(checkpoint.find_damage):
        raise ConfigError(f"{source}: not a checkpoint that can be read: {wrong}")
    return checkpoint


def latest_valid(folder: Path, ours: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint; None if there never were any.

    Damaged newer ones are set aside, if we hold the lock (`ours`). Raises ConfigError if only
    damaged ones, best.pt, or files set aside are left.
    """
    damage, found = {}, list_checkpoints(folder)  # damage: of each damaged checkpoint
    for checkpoint in reversed(found):
        if wrong := retry(checkpoint.find_damage):
            if list_checkpoints(folder)[-1:] != found[-1:]:  # its run goes on and has deleted it
                return latest_valid(folder, ours)
            damage[checkpoint] = wrong
            continue
        for damaged, wrong in damage.items():
            if ours:
                damaged.set_aside()
            print(f"warning: {damaged}: {wrong}; {'set aside' if ours else 'passed over'}",
                  flush=True)
        return checkpoint
    left = [f"{damaged.path.name}: {wrong}" for damaged, wrong in damage.items()]
    left += sorted(p.name for p in folder.glob("*") if p.name in BEST or SET_ASIDE in p.name)
    if left:
        raise ConfigError(f"{folder}: no checkpoint is valid ({'; '.join(left)}). Continue from "
                          "the best, or a backup, with --resume, or start afresh with --overwrite")
    return None


def rotate(folder: Path, keep: int):
    """Delete all but the newest `keep` checkpoints."""
    for old in list_checkpoints(folder)[:-keep]:
        disk.delete(old.path)


def adopt_drafts(folder: Path):
    """With the lock held: rename complete folders of a killed process, delete other drafts."""
    for draft in sorted(folder.iterdir(), reverse=True):  # a process's newest attempt first
        if match := DRAFT.fullmatch(draft.name):
            final = folder / match[1]
            complete = draft.is_dir() and Checkpoint(draft).exists()
            if complete and NAME.fullmatch(final.name) and not Checkpoint(final).exists():
                disk.put_in_place(draft, final)
            else:
                disk.delete(draft)


def require_shared(path: Path):
    """Raise ConfigError if this host does not see a path that rank 0 has made or verified."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS look again
        if path.exists():
            return
        time.sleep(0.1)
    raise ConfigError(f"{path}: not visible on {os.uname().nodename}; expected {disk.SHARED}: "
                      "mount one, and choose an --out_dir on it")
