"""Checkpoints: one type for a file and for a folder of parts; how a run finds and rotates them.

    checkpoints/step_00000100.pt    the state of a run in one file, as torch.save writes it
    checkpoints/step_00000100/      sharded: rank_0_of_2.pt, rank_1_of_2.pt
    checkpoints/best.pt, best/      the same, a link to the one with the lowest validation loss

A part holds that rank's rows of each sharded tensor. The parts are written into a draft of the
folder, NAME.tmp-NUMBER, which gets its name once all of them are there. Why not
torch.distributed.checkpoint: planning needs all ranks, but a rescue may lack one; it misses flipped
bits; and its `.metadata` is a pickle.
"""

import contextlib
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from steady.checkpoints.disk import find_corruption, link, retry, sync_directory
from steady.options import ConfigError

NAME = re.compile(r"step_(\d{8,})(\.pt)?")
PART = re.compile(r"rank_(\d+)_of_(\d+)\.pt")
BEST = ("best.pt", "best")
DRAFT = re.compile(r"((step_\d{8,}|best|backup)(\.pt)?)(\.tmp-[\d-]+)+")
SET_ASIDE = ".set-aside"
FORMAT = 5  # of the dict in a file
FIELDS = dict(format=int, step=int, position=int, tokens=int, best_loss=float, best_step=int,
              model=dict, optimizers=list, optimizer_names=list, config=dict)
SHARED = "a file system that all hosts share"


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
        """The file itself, or the parts in the folder by rank; none if one is missing."""
        if self.path.is_file():
            return [self.path]
        parts = {}  # (rank, number of ranks) → file
        for path in self.path.glob("rank_*"):
            if match := PART.fullmatch(path.name):
                parts[int(match[1]), int(match[2])] = path
        complete = sorted(parts) == [(rank, len(parts)) for rank in range(len(parts))]
        return [parts[key] for key in sorted(parts)] if complete else []

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
        return find_odd_fields(load_file(files[0]))

    def states(self) -> list[dict]:
        """The state in its file, or one for each rank; tensors are mapped. Raises ConfigError."""
        try:
            found = [load_file(file) for file in self.files()]
            version = found[0]["format"]
        except Exception as e:  # zipfile, pickle and torch each have errors of their own
            raise ConfigError(f"{self}: gone, or not a checkpoint that can be read "
                              f"({type(e).__name__})") from e
        if version != FORMAT:
            raise ConfigError(f"{self}: format {version}; this version reads {FORMAT}")
        return found

    def state(self) -> dict:
        """The whole state, joined from all its files; verify it first."""
        return join(self.states())

    def link_to(self, new: Path):
        """Make `new` the same checkpoint, in place of any other there."""
        if not self.path.is_dir():
            return link(self.path, new)
        draft = new.with_name(f"{new.name}.tmp-1")
        draft.mkdir(exist_ok=True)
        for file in self.files():
            link(file, draft / file.name)
        put_in_place(draft, new)

    def link_as_best(self):
        """Make it best.pt, or the folder best, and delete the other of the two."""
        name, other = BEST if self.path.suffix else BEST[::-1]
        self.link_to(self.path.with_name(name))
        Checkpoint(self.path.with_name(other)).delete()

    def delete(self):
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def set_aside(self):
        """Rename it to NAME.set-aside, or .set-aside-2, …, so that it counts no longer."""
        self.path.rename(unused_name(self.path.with_name(self.name + SET_ASIDE)))


def put_in_place(draft: Path, final: Path):
    """Give a complete folder its name. If killed in between, `adopt_drafts` does it."""
    sync_directory(draft)  # it has the names of all parts
    old = Checkpoint(final.with_name(f"{final.name}.tmp-0"))
    if final.is_dir():
        final.rename(old)
    draft.rename(final)
    sync_directory(final.parent)
    old.delete()


def load_file(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def find_odd_fields(state) -> str | None:
    """Names of fields that are missing, or not as `save_checkpoint` writes them."""
    if not isinstance(state, dict):
        return "not a checkpoint"
    if state.get("format") not in (FORMAT, None):
        return None  # `states` refuses it by its version
    odd = [name for name, kind in FIELDS.items() if not isinstance(state.get(name), kind)]
    odd = odd or [name for name in ("step", "position") if state[name] < 0]
    return f"missing or wrong: {', '.join(odd)}" if odd else None


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


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first."""
    found = [Checkpoint(path) for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def checkpoint_at(folder: Path, step: int) -> Checkpoint | None:
    """The checkpoint of this step, if there is one."""
    return next((found for found in list_checkpoints(folder) if found.step == step), None)


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """best.pt or the folder best, if there is one."""
    found = (Checkpoint(folder / name) for name in BEST)
    return next(filter(Checkpoint.exists, found), None)


def find_checkpoint(source: Path) -> Checkpoint | None:
    """The checkpoint at `source`, or the newest valid one of the run there; verified.

    None if it is neither. Raises ConfigError if it is damaged, or all of the run are.
    """
    checkpoint = Checkpoint(source)
    if not checkpoint.exists():
        return latest_valid(source / "checkpoints", ours=False)
    if wrong := retry(checkpoint.find_damage):
        raise ConfigError(f"{source}: not a checkpoint that can be read: {wrong}")
    return checkpoint


def latest_valid(folder: Path, ours: bool = True) -> Checkpoint | None:
    """The newest valid checkpoint; damaged newer ones are set aside, if we hold the lock (`ours`).

    None if there never were any. Raises ConfigError, and changes nothing, if all are damaged, or
    if only best.pt or files set aside are left.
    """
    bad = []
    for checkpoint in reversed(list_checkpoints(folder)):
        wrong = retry(checkpoint.find_damage)
        if not wrong:
            for damaged, why in bad:
                if ours:
                    damaged.set_aside()
                print(f"warning: {damaged}: {why}; {'set aside' if ours else 'passed over'}",
                      flush=True)
            return checkpoint
        bad.append((checkpoint, wrong))
    left = [f"{damaged.name}: {why}" for damaged, why in bad]
    left += [name for name in BEST if (folder / name).exists()]
    left += sorted(path.name for path in folder.glob(f"*{SET_ASIDE}*"))
    if left:
        raise ConfigError(f"{folder}: no checkpoint is valid ({'; '.join(left)}). Continue from "
                          "the best with --resume, bring one back from a backup, or start afresh "
                          "with --overwrite")
    return None


def rotate(folder: Path, keep: int):
    """Delete all but the newest `keep` checkpoints."""
    for old in list_checkpoints(folder)[:-keep]:
        old.delete()


def adopt_drafts(folder: Path):
    """Name the complete folders that a killed process left, and delete its other drafts.

    Only for the holder of the lock.
    """
    for draft in sorted(folder.iterdir(), reverse=True):  # .tmp-0, an old folder, comes last
        if match := DRAFT.fullmatch(draft.name):
            final = folder / match[1]
            whole = draft.is_dir() and Checkpoint(draft).exists()
            if whole and NAME.fullmatch(final.name) and not final.exists():
                draft.rename(final)
            else:
                Checkpoint(draft).delete()


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
