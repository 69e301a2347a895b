"""A checkpoint in parts: a folder with one file for each rank, and a manifest that makes them one.

    step_00000100/rank_0_of_2.ID.pt, rank_1_of_2.ID.pt, manifest.json

Every file holds the state of a run with that rank's rows of each sharded tensor. The manifest has
the checksum of every file and is written last: until then there is no checkpoint. Not
torch.distributed.checkpoint: its planning needs all ranks, of which one may be gone when a run is
rescued; a load notices hardly any flipped bit; and its `.metadata` is a pickle, which can run code.
"""

import contextlib
import json
import os
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from steady.checkpoints.sealed import (
    atomic_write,
    checksum,
    find_corruption,
    link_or_copy,
    sync_directory,
)
from steady.options import ConfigError

MANIFEST = "manifest.json"
PART = re.compile(r"rank_(\d+)_of_(\d+)\.[0-9a-f-]+\.pt")
DRAFT = re.compile(rf"({PART.pattern}|{re.escape(MANIFEST)})\.tmp-\d+")
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


def describe(path: Path) -> dict:
    return dict(folder=path.parent.name, name=path.name, crc32=checksum(path))


def write_manifest(folder: Path, files: list[dict]):
    text = json.dumps(dict(files=files))
    with atomic_write(folder / MANIFEST) as draft, open(draft, "w") as file:
        file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder.parent)  # which has the name of the folder


def read_manifest(folder: Path) -> list[dict]:
    """What `describe` said of the part of each rank. Raises ValueError if it is damaged."""
    text, _, seal = (folder / MANIFEST).read_text("utf-8").partition("\n")
    if seal != f"{zlib.crc32(text.encode()):08x}\n":
        raise ValueError("the checksum of its manifest is wrong")
    try:
        files = json.loads(text)["files"]
        ours = all(PART.fullmatch(file["name"]) and isinstance(file["crc32"], int)
                   for file in files)
    except (KeyError, TypeError) as e:
        raise ValueError("its manifest is not one of this program") from e
    if not files or not ours:
        raise ValueError("its manifest does not list the parts of a checkpoint")
    return files


def listed(folder: Path) -> list[Path]:
    """The part of each rank. Raises ValueError if the manifest is damaged."""
    return [folder / file["name"] for file in read_manifest(folder)]


def find_damage(folder: Path) -> str | None:
    """Read every byte of all parts; returns what is wrong, or None."""
    def look(file: dict) -> str | None:
        part = folder / file["name"]
        if not part.is_file():
            return f"{part.name} is missing"
        wrong = find_corruption(part)
        if not wrong and checksum(part) != file["crc32"]:
            wrong = "is not the file that its manifest lists"
        return f"{part.name}: {wrong}" if wrong else None

    try:
        files = read_manifest(folder)
    except ValueError as e:
        return str(e)
    with ThreadPoolExecutor(8) as pool:  # reading and checksums run beside one another
        return next(filter(None, pool.map(look, files)), None)


# --- its files -------------------------------------------------------------------------------


def finish(folder: Path):
    """Write the manifest of a folder in which all ranks have written their parts, but for that.

    So nothing is lost where rank 0 could not wait for the others.
    """
    found = {}  # of one save → {rank: part}
    for path in folder.glob("rank_*"):
        name = PART.fullmatch(path.name)
        if name:
            save = int(name[2]), path.name.split(".")[1]
            found.setdefault(save, {})[int(name[1])] = path
    for (ranks, _), paths in found.items():
        whole = paths.keys() == set(range(ranks))
        if whole and not any(find_corruption(path) for path in paths.values()):
            write_manifest(folder, [describe(paths[rank]) for rank in range(ranks)])
            return


def remove_strays(folder: Path):
    """Delete parts and drafts that the manifest does not name; all of them where there is none."""
    try:
        kept = {file["name"] for file in read_manifest(folder)}
    except FileNotFoundError:
        kept = set()
    except ValueError:
        return  # damaged: for `latest_valid` to set aside
    for path in folder.iterdir():
        if PART.fullmatch(path.name) and path.name not in kept or DRAFT.fullmatch(path.name):
            path.unlink()
    if not kept:
        with contextlib.suppress(OSError):  # something else is in there
            folder.rmdir()


def delete_folder(folder: Path):
    """Delete a checkpoint, the manifest first: what a kill leaves of it is no checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_strays(folder)


def link_folder(folder: Path, new: Path):
    """Make `new` a checkpoint with the same files, which replaces the one that is there."""
    new.mkdir(exist_ok=True)
    files = read_manifest(folder)  # once: it may be replaced meanwhile
    for name in (file["name"] for file in files):
        if not (new / name).exists():
            with atomic_write(new / name) as draft:
                link_or_copy(folder / name, draft)
    write_manifest(new, files)
    remove_strays(new)


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
    for name in ("model", "optimizers"):
        state[name] = walk([each[name] for each in states])
    return state
