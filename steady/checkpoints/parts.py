"""A checkpoint in parts: a folder with one file for each rank.

    step_00000100/rank_0_of_2.ID.pt, rank_1_of_2.ID.pt

Every file holds the state of a run with that rank's rows of each sharded tensor, and is written as
a whole or not at all. ID names the save: once all ranks have written their parts of one, there is a
checkpoint, and no rank needs to say so. Not torch.distributed.checkpoint: its planning needs all
ranks, of which one may be gone when a run is rescued; a load notices hardly any flipped bit; and
its `.metadata` is a pickle, which can run code.
"""

import contextlib
import os
import re
import time
from pathlib import Path

import torch

from steady.checkpoints.sealed import atomic_write, link_or_copy, sync_directory
from steady.options import ConfigError

PART = re.compile(r"rank_(\d+)_of_(\d+)\.([0-9a-f-]+)\.pt")
DRAFT = re.compile(rf"{PART.pattern}\.tmp-\d+|manifest\.json")  # the latter of older versions
SHARED = "a file system that all hosts share"


def require_shared(path: Path):
    """Raise ConfigError if what rank 0 has made or verified is not seen on this host."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # which makes NFS forget that the name was not there
        if path.exists():
            return
        time.sleep(0.1)
    raise ConfigError(f"{path}: not visible on {os.uname().nodename}; expected {SHARED}: mount "
                      "one, and choose an --out_dir on it")


def whole_saves(names) -> list[list[str]]:
    """Of these names of files, the parts of each save of which no rank's is missing."""
    saves = {}
    for name in filter(PART.fullmatch, names):
        rank, ranks, save = PART.fullmatch(name).groups()
        saves.setdefault((int(ranks), save), {})[int(rank)] = name
    return [[parts[rank] for rank in range(ranks)] for (ranks, _), parts in saves.items()
            if parts.keys() == set(range(ranks))]


def is_whole(folder: Path) -> bool:
    return bool(whole_saves(path.name for path in folder.glob("rank_*")))


def listed(folder: Path) -> list[Path]:
    """The part of each rank, of the newest save that is whole; empty if there is none."""
    saves = whole_saves(path.name for path in folder.glob("rank_*"))
    return max(([folder / name for name in save] for save in saves),
               key=lambda parts: parts[0].stat().st_mtime_ns, default=[])


# --- its files -------------------------------------------------------------------------------


def remove_strays(folder: Path, kept=None):
    """Delete all parts and drafts but those named; by default, but the newest whole save."""
    kept = [part.name for part in listed(folder)] if kept is None else kept
    for path in folder.iterdir():
        if path.name not in kept and (PART.fullmatch(path.name) or DRAFT.fullmatch(path.name)):
            path.unlink()
    if not kept:
        with contextlib.suppress(OSError):  # something else is in there
            folder.rmdir()


def link_folder(folder: Path, new: Path):
    """Make `new` a checkpoint with the same files, which replaces the one that is there."""
    new.mkdir(exist_ok=True)
    parts = listed(folder)  # once: it may be replaced meanwhile
    for part in parts:
        if not (new / part.name).exists():
            with atomic_write(new / part.name) as draft:
                link_or_copy(part, draft)
    sync_directory(new.parent)  # which has the name of the folder
    remove_strays(new, [part.name for part in parts])


def join(states: list[dict], rows=lambda n: slice(n), copy: bool = False) -> dict:
    """The state of a run from those of all ranks, with the rows of each tensor that rows(n) says.

    What is not sharded, as numbers and a model's buffers, is that of the first. copy: keep no
    tensor in a mapped file.
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

    state = dict(states[0])
    for name in ("model", "ema", "optimizers"):
        state[name] = walk([each.get(name, {}) for each in states])
    return state
