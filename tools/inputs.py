"""The input files of `python data.py`: which there are, and which are skipped."""

import glob
import os
from collections import Counter
from pathlib import Path

from steady.cli import ConfigError
from steady.tokens import require_regular

KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".parquet": "rows"}
COMPRESSED = (".gz", ".zst")
LISTED = 8  # of a kind, in a summary


class Skipped:
    """What folders hold that is not read."""

    def __init__(self):
        self.kinds, self.hidden = Counter(), set()

    def __str__(self) -> str:
        said = []
        if self.kinds:
            listed = shorten([f"{n:,} {kind}" for kind, n in self.kinds.most_common()])
            said.append(f"{self.kinds.total():,} files: {listed}")
        if self.hidden:
            said.append(f"hidden folders: {shorten(sorted(self.hidden))}")
        return "; ".join(said)


def shorten(names: list[str]) -> str:
    return ", ".join(names[:LISTED] + ["…"] * (len(names) > LISTED))


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
            require_regular(file)
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
        for path in (here / name for name in names):
            if not path.is_file():
                skipped.kinds["not regular"] += 1
            elif kind_of(path):
                found.append(path)
            else:
                skipped.kinds["".join(suffixes(path)) or "without a suffix"] += 1
    return found


def suffixes(path: Path) -> list[str]:
    """The last one in lower case, or the last two of a packed file."""
    last = path.suffix.lower()
    return [Path(path.stem).suffix.lower(), last] if last in COMPRESSED else [last]


def kind_of(path: Path) -> str | None:
    """As in read.Chunk; None for a file that cannot be read."""
    kind, *packed = suffixes(path)
    found = KINDS.get(kind)
    return None if packed and found == "rows" else found
