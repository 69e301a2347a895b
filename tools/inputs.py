"""The input files of `python data.py`: which there are, and which are skipped."""

import glob
import json
import os
from collections import Counter
from pathlib import Path

from steady.options import ConfigError
from tools.read import COMPRESSED, KINDS, holds_records, kind_of, suffixes

LISTED = 8  # of a kind, in a summary


class Skipped:
    """What folders hold that is not read; with --skip_bad also why files could not be read."""

    def __init__(self):
        self.kinds, self.hidden, self.unreadable = Counter(), set(), {}

    def __str__(self) -> str:
        parts = []
        if self.kinds:
            kinds = listed([f"{n:,} {kind}" for kind, n in self.kinds.most_common()])
            parts.append(f"{self.kinds.total():,} files: {kinds}")
        if self.hidden:
            parts.append(f"hidden folders: {listed(sorted(self.hidden))}")
        if self.unreadable:
            reasons = listed([*self.unreadable.values()], "; ")
            parts.append(f"{len(self.unreadable):,} files that cannot be read: {reasons}")
        return "; ".join(parts)


def listed(names: list[str], comma: str = ", ") -> str:
    return comma.join(names[:LISTED] + ["…"] * (len(names) > LISTED))


def find_inputs(inputs: list[str], out: Path) -> tuple[list[Path], Skipped]:
    """The files that the inputs name: themselves, in a folder, or by a pattern; sorted in each."""
    found, skipped = [], Skipped()
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_dir():
            files = files_in(path, out.resolve(), skipped)
        else:
            files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(files)
        if not files:
            raise ConfigError(f"{name}: no such file, or no file in it that ends in "
                              f"{' '.join(KINDS)}, with or without {' or '.join(COMPRESSED)}")
        for file in files:
            if not kind_of(file):
                raise ConfigError(f"{file}: expected a name that ends in {' '.join(KINDS)}")
            if not file.is_file():  # a pipe would be read twice
                raise ConfigError(f"{file}: not a regular file")
        found += files
    return list(dict.fromkeys(found)), skipped


def files_in(folder: Path, out: Path, skipped: Skipped) -> list[Path]:
    """The files in a folder that can be read; without hidden folders, and without `out`."""
    found = []
    for directory, subdirectories, names in os.walk(folder):
        here = Path(directory)
        if here.resolve() == out or out in here.resolve().parents:
            subdirectories.clear()
            continue
        skipped.hidden |= {name for name in subdirectories if name.startswith(".")}
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for path in (here / name for name in saved_by_datasets(here) or names):
            if not path.is_file():
                skipped.kinds["not regular"] += 1
            elif kind_of(path) and (kind_of(path) != "json" or holds_records(path)):
                found.append(path)
            else:
                skipped.kinds["".join(suffixes(path)) or "without a suffix"] += 1
    return found


def saved_by_datasets(folder: Path) -> list[str]:
    """The names of the files that datasets.save_to_disk wrote; none in another folder.

    Others beside them are caches. Raises ConfigError for several splits, of which some will be
    for tests, and where a file is missing.
    """
    splits = listed_in(folder / "dataset_dict.json", "splits")
    if len(splits) > 1:
        raise ConfigError(f"{folder}: has the splits {', '.join(splits)}; expected one of them, "
                          f"such as {folder / splits[0]}")
    names = [file["filename"] for file in listed_in(folder / "state.json", "_data_files")]
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(f"{folder}: {name} is not there; its state.json lists it")
    return names


def listed_in(path: Path, key: str) -> list:
    """The list under `key` in a file of JSON; empty where there is none."""
    try:
        return [*json.loads(path.read_bytes())[key]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
