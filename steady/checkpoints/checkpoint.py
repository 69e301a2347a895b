"""Checkpoints: one type for a file and for a folder of parts; how a run finds and rotates them.

    checkpoints/step_00000100.pt    the state of a run in one file, as torch.save writes it
    checkpoints/step_00000100/      sharded: rank_0_of_2.ID.pt, rank_1_of_2.ID.pt
    checkpoints/best.pt, best/      the same, a link to the one with the lowest validation loss

A part holds that rank's rows of each sharded tensor, and is written as a whole or not at all. ID
names the save: a folder is a checkpoint once the parts of all ranks have the same ID, so no rank
has to announce it. Why not torch.distributed.checkpoint: planning needs all ranks, but a rescue
may lack one; it misses flipped bits; and its `.metadata` is a pickle.
"""

import contextlib
import errno
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from steady.checkpoints.disk import find_corruption, lack_of_space, link, retry, sync_directory
from steady.options import ConfigError

NAME = re.compile(r"step_(\d{8,})(\.pt)?")
PART = re.compile(r"rank_(\d+)_of_(\d+)\.([0-9a-f-]+)\.pt")
BEST = ("best.pt", "best")
DRAFT = re.compile(rf"((step_\d{{8,}}|best)(\.pt)?|{PART.pattern})\.(tmp|backup)-\d+")
LEFTOVER = re.compile(r"best(\.pt)?|(step_\d{8,}|best)(\.pt)?\.(corrupt|set-aside)(-\d+)?")
FORMAT = 4  # of the dict in a file
SHARED = "a file system that all hosts share"
GONE = (0, 0)


@dataclass(frozen=True)
class Checkpoint:
    """A file or a folder at `path`; it may be absent or damaged."""

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
        """From its name; TypeError for best."""
        return int(NAME.fullmatch(self.name)[1])

    @property
    def run_dir(self) -> Path | None:
        """The run directory around it; None if it was moved elsewhere."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None

    def files(self) -> list[Path]:
        """The file itself, or the parts of the newest save with one for each rank, by rank."""
        if self.path.is_file():
            return [self.path]
        saves = {}  # (number of ranks, ID) → rank → part
        for path in self.path.glob("rank_*"):
            if match := PART.fullmatch(path.name):
                rank, ranks, save = match.groups()
                saves.setdefault((int(ranks), save), {})[int(rank)] = path
        complete = [[parts[rank] for rank in range(ranks)] for (ranks, _), parts in saves.items()
                    if parts.keys() == set(range(ranks))]
        return max(complete, key=lambda parts: changed_at(parts[0]), default=[])

    def exists(self) -> bool:
        return bool(self.files())

    def changed_at(self) -> tuple[int, int]:
        return max(map(changed_at, self.files()), default=GONE)

    def find_damage(self) -> str | None:
        """Read every byte; returns the damage found, or None."""
        found = self.read(find_corruption)
        if not found:
            return "it has no files, or not the parts of all ranks"
        damage = (f"{file.name}: {wrong}" for file, wrong in found.items() if wrong)
        return found.get(self.path) or next(damage, None)

    def states(self) -> list[dict]:
        """The state in its file, or one for each rank; tensors are mapped. Raises ConfigError."""
        load = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
        try:
            found = list(self.read(load).values())
            version = found[0]["format"]
        except Exception as e:  # zipfile, pickle and torch each have errors of their own
            raise ConfigError(f"{self}: gone, or not a checkpoint that can be read "
                              f"({type(e).__name__})") from e
        if version != FORMAT:
            raise ConfigError(f"{self}: format {version}; this version reads {FORMAT}")
        return found

    def read(self, how) -> dict:
        """file → `how(file)`, all of one save: again if the run has replaced some meanwhile."""
        while True:
            files = self.files()
            before = max(map(changed_at, files), default=GONE)
            try:
                with ThreadPoolExecutor(8) as pool:  # reads one file while it checks another
                    found = dict(zip(files, pool.map(how, files), strict=True))
                if self.changed_at() in (before, GONE):  # or deleted once read
                    return found
            except Exception:
                if self.changed_at() == before != GONE:
                    raise

    def state(self) -> dict:
        """The whole state, joined from all its files; verify it first."""
        return join(self.states())

    def link_to(self, new: Path):
        """Make `new` the same checkpoint, in place of any other there."""
        if not self.path.is_dir():
            return link(self.path, new)
        new.mkdir(exist_ok=True)
        files = self.files()  # once: the run may replace them meanwhile
        for file in files:
            link(file, new / file.name)
        sync_directory(new.parent)
        Checkpoint(new).clean([new / file.name for file in files])

    def link_as_best(self):
        """Make it best.pt, or the folder best, and delete the other of the two."""
        name, other = BEST if self.path.suffix else BEST[::-1]
        self.link_to(self.path.with_name(name))
        Checkpoint(self.path.with_name(other)).delete()

    def clean(self, kept: list[Path]):
        """Delete our files in its folder except `kept`, and the folder if it is empty then."""
        for path in self.path.iterdir():
            if (PART.fullmatch(path.name) or DRAFT.fullmatch(path.name)) and path not in kept:
                path.unlink()
        if not kept:
            with contextlib.suppress(OSError):  # not empty
                self.path.rmdir()

    def delete(self):
        if self.path.is_dir():
            self.clean([])
        else:
            self.path.unlink(missing_ok=True)

    def set_aside(self, why: str = "set-aside"):
        """Rename it to NAME.set-aside, or .set-aside-2, …, so that it counts no longer."""
        self.path.rename(unused_name(self.path.with_name(f"{self.name}.{why}")))


def changed_at(path: Path) -> tuple[int, int]:
    """(time of the last change in ns, to some 4 ms; inode) of a file, or GONE."""
    try:
        return (stat := path.stat()).st_mtime_ns, stat.st_ino
    except FileNotFoundError:  # another process has just deleted it
        return GONE


def unused_name(path: Path) -> Path:
    """This path, or PATH-2, PATH-3, … if that is taken, even by a dangling link."""
    new, n = path, 2
    while os.path.lexists(new):
        new, n = path.with_name(f"{path.name}-{n}"), n + 1
    return new


def averaged(state: dict) -> dict:
    """The state for use elsewhere: with --ema, its averages are the weights."""
    return state | {"model": state["model"] | state.get("ema", {})}


def join(states: list[dict], rows=lambda n: slice(n), copy: bool = False) -> dict:
    """The state of a run from the states of all ranks: of n rows of each tensor, rows(n).

    Numbers, buffers and whatever else is not sharded come from the first. copy: keep no tensor in
    a mapped file.
    """
    whole = set(states[0].get("whole", ()))

    def walk(values: list, name: str = ""):
        first = values[0]
        if isinstance(first, dict):
            return {k: walk([v[k] for v in values], k) for k in first}
        if isinstance(first, (list, tuple)):
            return type(first)(walk(list(each)) for each in zip(*values, strict=True))
        if not isinstance(first, torch.Tensor):
            return first
        if first.ndim == 0 or name in whole:
            return first.clone() if copy else first
        wanted, found, begin = rows(sum(map(len, values))), [], 0
        for value in values:
            start, stop = (max(0, end - begin) for end in (wanted.start or 0, wanted.stop))
            found.append(value[start:stop])
            begin += len(value)
        return torch.cat(found) if len(found) > 1 or copy else found[0]

    joined = {name: walk([each.get(name, {}) for each in states])
              for name in ("model", "ema", "optimizers")}
    return states[0] | joined


# --- the checkpoints of a run ----------------------------------------------------------------


def named_checkpoints(folder: Path) -> list[Checkpoint]:
    """All with the name of one, complete or not, oldest first."""
    found = [Checkpoint(path) for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda c: (c.step, c.changed_at()))


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first, without folders that lack a part."""
    return list(filter(Checkpoint.exists, named_checkpoints(folder)))


def checkpoint_at(folder: Path, step: int) -> Checkpoint | None:
    """The checkpoint of this step, if there is one."""
    return next((found for found in list_checkpoints(folder)[::-1] if found.step == step), None)


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """best.pt or the folder best, the newer of the two, if there is one."""
    found = filter(Checkpoint.exists, (Checkpoint(folder / name) for name in BEST))
    return max(found, key=Checkpoint.changed_at, default=None)


def find_checkpoint(source: Path) -> Checkpoint | None:
    """The checkpoint at `source`, or the newest valid one of the run there; verified.

    None if it is neither. Raises ConfigError if it is damaged, or all of the run are.
    """
    checkpoint = Checkpoint(source)
    if not checkpoint.exists():
        return latest_valid(source / "checkpoints", ours=False)
    wrong = retry(checkpoint.find_damage)
    if wrong:
        raise ConfigError(f"{source}: not a checkpoint that can be read: {wrong}")
    return checkpoint


def latest_valid(folder: Path, ours: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint; damaged newer ones are set aside, if we hold the lock (`ours`).

    None if there never were any. Raises ConfigError, and changes nothing, if all are damaged, or
    if only best.pt or files set aside are left.
    """
    bad, done = [], "set aside as .corrupt" if ours else "passed over"
    for checkpoint in reversed(list_checkpoints(folder)):
        wrong = retry(checkpoint.find_damage)
        if not checkpoint.exists():  # the run goes on: it has deleted this, and has a newer one
            return latest_valid(folder, ours)
        if not wrong:
            for damaged, why in bad:
                if ours:
                    damaged.set_aside("corrupt")
                print(f"warning: {damaged}: {why}; {done}", flush=True)
            return checkpoint
        bad.append((checkpoint, wrong))
    left = [f"{damaged.name}: {why}" for damaged, why in bad]
    left += sorted(path.name for path in folder.glob("*") if LEFTOVER.fullmatch(path.name))
    if left:
        raise ConfigError(f"{folder}: no checkpoint is valid ({'; '.join(left)}). Continue from "
                          "the best with --resume, bring one back from a backup, or start afresh "
                          "with --overwrite")
    return None


def rotate(folder: Path, keep: int, step: int) -> list[Checkpoint]:
    """Delete all but the newest `keep` checkpoints.

    Also parts of failed saves before this step. Returns the deleted ones.
    """
    old = list_checkpoints(folder)[:-keep]
    old += [each for each in named_checkpoints(folder) if each.step < step and not each.exists()]
    for each in old:
        each.delete()
    return old


def make_room(folder: Path, keep: int, step: int, error: BaseException) -> bool:
    """After the error of a full disk: make the rotation of the next save now, if one is valid.

    Returns whether anything was deleted.
    """
    full, keep = lack_of_space(error), max(1, keep - 1)
    if not full or full.errno == errno.EFBIG:
        return False
    if all(each.find_damage() for each in list_checkpoints(folder)[: -keep - 1 : -1]):
        return False
    gone = rotate(folder, keep, step)
    if gone:
        print(f"warning: {folder}: no space left; deleted {', '.join(c.name for c in gone)}",
              flush=True)
    return bool(gone)


def remove_drafts(folder: Path):
    """Delete the unfinished files of a killed process; only for the holder of the lock."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name):
            Checkpoint(path).delete()
    for each in (*named_checkpoints(folder), Checkpoint(folder / "best")):
        if each.path.is_dir():
            each.clean(each.files())


def require_shared(path: Path):
    """Raise ConfigError if this host does not see a path that rank 0 has made or verified."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS look again
        if path.exists():
            return
        time.sleep(0.1)
    raise ConfigError(f"{path}: not visible on {os.uname().nodename}; expected {SHARED}: mount "
                      "one, and choose an --out_dir on it")


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
