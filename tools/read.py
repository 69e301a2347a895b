"""The input files of `python data.py`, found and read in pieces."""

import codecs
import glob
import gzip
import io
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from steady.options import ConfigError
from steady.tokens.files import share_of

KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "json", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")  # a second suffix, except of Parquet
RECORDS = {  # keys that hold a document: optional keys read with them
    ("prompt", "completion"): ("tools", "system"),
    ("messages",): ("tools", "system"),
    ("conversations",): ("tools", "system"),
    ("instruction", "output"): ("input", "system"),
}
CARDS = ("readme.md", "dataset_infos.json", "dataset_info.json")  # beside the records of the hub
TRAINING = {"train", "training"}  # words in the names of splits
OTHERS = {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
CHUNK_BYTES = 1 << 18  # of input, read, tokenized and written at a time
PIECE_BYTES = 1 << 20  # of text without white space: tokenizing takes 200 times as much memory
LINE_BYTES = 1 << 27  # longest line of JSON
CUT_BYTES = 100_000  # smallest text file cut in two, unless it is the only one


class Chunk(NamedTuple):
    """A piece of one input file, to be tokenized."""

    file: str
    data: str | list  # a piece of a text; or records, decoded or as lines of JSON in bytes
    first: int = 1  # number of the first record, counted from 1
    split: str | None = None  # of a text; records are drawn by their content
    begins: bool = True  # whether the text begins with this piece
    ends: bool = True  # whether it ends with it


@lru_cache  # most records have the same keys
def find_keys(names: tuple, text_field: str | None) -> tuple[tuple, tuple]:
    """(keys that hold the document, all keys used) among these names. Raises ValueError.

    A chat takes precedence over a text beside it, unless --text_field asks for the text.
    """
    kinds = {(text_field,): ()} | RECORDS if text_field else RECORDS | {("text",): ()}
    for keys, more in kinds.items():
        if set(keys) <= set(names):
            return keys, keys + more
    known = ", ".join(" and ".join(keys) for keys in RECORDS)
    found = ", ".join(map(str, names)) or "no key"
    raise ValueError(f"has {found:.200}; expected {text_field or 'text'} (see --text_field), or "
                     f"{known}")


# --- finding files ---------------------------------------------------------------------------


def suffixes(path: Path) -> list[str]:
    """As [".txt"], or [".txt", ".gz"] of a compressed file."""
    last = path.suffix.lower()
    return [Path(path.stem).suffix.lower(), last] if last in COMPRESSED else [last]


def kind_of(path: Path) -> str | None:
    """One of KINDS; None for a file that cannot be read."""
    return KINDS.get(suffixes(path)[0])


def find_inputs(inputs: list[str], out: Path, counts: Counter) -> list[Path]:
    """The files of all inputs (files, folders or patterns), each once.

    Counts the files skipped in folders. Raises ConfigError.
    """
    found = {}
    for name in inputs:
        path = Path(name).expanduser()
        if path.resolve() == out.resolve():
            raise ConfigError(f"{name}: is what --out names; expected another folder there")
        if path.is_dir():
            files = files_in(path, out.resolve(), counts)
        else:
            files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        files = sorted(files)
        if not files:
            raise ConfigError(f"{name}: no such file, or no file in it that ends in "
                              f"{' '.join(KINDS)}, with or without {' or '.join(COMPRESSED)}")
        for file in files:
            if not kind_of(file) or not file.is_file():  # a pipe cannot be read twice
                raise ConfigError(f"{file}: expected a regular file that ends in {' '.join(KINDS)}")
        found |= dict.fromkeys(files)
    return list(found)


def files_in(folder: Path, out: Path, counts: Counter) -> list[Path]:
    """The files to read in a folder, except in hidden folders and in `out`.

    As `datasets` reads a folder of the hub: without its README, and only the training split if
    names tell the splits apart.
    """
    files, skipped = [], []
    for directory, folders, names in os.walk(folder):
        if Path(directory).resolve() == out:
            folders.clear()
            continue
        skipped += [f"link to a folder {name}" for name in folders
                    if Path(directory, name).is_symlink() and not name.startswith(".")]
        skipped += [f"hidden folder {name}" for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(directory, name) for name in names]
    words = {path: {*re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())} for path in files}
    known = [path for path in files if kind_of(path)]
    has_records = any(kind_of(path) != "text" for path in known)
    has_training = any(TRAINING & words[path] for path in known)
    found = []
    for path in files:
        other = OTHERS & words[path] if has_training and not TRAINING & words[path] else ()
        if not path.is_file():
            skipped.append("not regular")
        elif path.suffix.lower() == ".arrow":
            raise ConfigError(f"{path}: Arrow, as of datasets.save_to_disk; expected Parquet, "
                              "as of load_from_disk(FOLDER).to_parquet(FILE)")
        elif not kind_of(path):
            skipped.append("".join(suffixes(path)) or "without a suffix")
        elif has_records and path.name.lower() in CARDS:
            skipped.append(path.name)
        elif other:
            skipped.append(f"{min(other)} split")
        else:
            found.append(path)
    counts.update(("skipped", reason) for reason in skipped)
    return found


# --- reading them ----------------------------------------------------------------------------


def read_chunks(files: list[Path], options, counts: Counter) -> Iterator[Chunk]:
    """All files in pieces of about CHUNK_BYTES. Raises ConfigError.

    options: prepare.Options. With skip_bad the unreadable rest of a file is left out and counted.
    """
    for path in files:
        chunk = None
        try:
            for chunk in read_file(path, options, large=len(files) == 1):
                yield chunk
            if chunk is None:
                counts["empty", str(path)] += 1
        except ConfigError as e:
            if not options.skip_bad or isinstance(e.__cause__, ImportError):
                raise
            counts["left out", str(e)] += 1
            if chunk and not chunk.ends:
                yield chunk._replace(data="", begins=False, ends=True)


def read_file(path: Path, options, large: bool = False) -> Iterator[Chunk]:
    """The pieces of one file. large: cut a text in two, whatever its size. Raises ConfigError."""
    try:
        with open(path, "rb") as raw, decompressed(path, raw) as file:
            if kind_of(path) == "text":
                skip_mark(path, file)
                yield from read_text(path, file, options.val_fraction, large)
                return
            first = 1
            for records in read_records(path, file, options.text_field):
                yield Chunk(str(path), records, first)
                first += len(records)
    except ConfigError:
        raise
    except ImportError as e:
        package = "pyarrow" if kind_of(path) == "parquet" else "backports.zstd"
        raise ConfigError(f"{path}: needs {package}: pip install {package}") from e
    except Exception as e:  # each codec, and pyarrow, has errors of its own
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def decompressed(path: Path, raw):
    """The content of an open file, decompressed according to its name."""
    if path.suffix.lower() == ".gz":
        return gzip.open(raw)
    if path.suffix.lower() == ".zst":
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            from backports import zstd
        return zstd.open(raw)
    return raw


def skip_mark(path: Path, file) -> bytes:
    """Go to the beginning of the text, after its byte order mark; returns the next 1 kB."""
    start = file.read(1024)
    utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if utf16 or 8 * start.count(0) > len(start):
        raise ConfigError(f"{path}: UTF-16, or no text; expected UTF-8")
    text = start.removeprefix(codecs.BOM_UTF8)
    file.seek(len(start) - len(text))
    return text


def read_records(path: Path, file, text_field: str | None) -> Iterator[list]:
    """The records of a file, about CHUNK_BYTES at a time."""
    if kind_of(path) == "parquet":
        yield from read_parquet(path, text_field)
    elif skip_mark(path, file).lstrip()[:1] == b"[" and kind_of(path) == "json":
        items = json.load(file)
        yield from (items[i : i + 100] for i in range(0, len(items), 100))
    else:
        yield from read_lines(path, file)


def read_lines(path: Path, file) -> Iterator[list]:
    """Lines, about CHUNK_BYTES at a time. Raises ConfigError for one that is too long."""
    lines, size = [], 0
    try:
        for number in itertools.count(1):
            line = file.readline(LINE_BYTES)
            if len(line) == LINE_BYTES:
                raise ConfigError(f"{path}:{number}: a line of {LINE_BYTES:,} bytes or more; "
                                  "expected shorter documents")
            if not line:
                break
            lines.append(line)
            size += len(line)
            if size >= CHUNK_BYTES:
                yield lines
                lines, size = [], 0
    except Exception:
        yield lines
        raise
    if lines:
        yield lines


def read_parquet(path: Path, text_field: str) -> Iterator[list]:
    """Rows; columns that hold no document are None."""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)  # not whole row groups
    names = file.schema_arrow.names
    find_keys(tuple(names), text_field)
    known = {text_field or "text"}.union(*(keys + more for keys, more in RECORDS.items()))
    others = {name: None for name in names if name not in known}
    about = file.metadata
    n_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    batch_size = min(10_000, max(1, CHUNK_BYTES * about.num_rows // max(1, n_bytes)))
    columns = [name for name in names if name in known]
    for batch in file.iter_batches(batch_size, columns=columns, use_threads=False):
        yield [others | row for row in batch.to_pylist()]


# --- texts -----------------------------------------------------------------------------------


def read_text(path: Path, file, share: float, large: bool) -> Iterator[Chunk]:
    """Pieces of one document, or of two if the end of the file is for validation."""
    start = file.tell()
    if not large and path.stat().st_size < CUT_BYTES:
        split = "val" if share_of(os.fsencode(path.name)) < share else "train"
        yield from pieces(path, file, start, math.inf, split)
    elif not share:
        yield from pieces(path, file, start, math.inf, "train")
    else:
        cut = find_cut(file, start, share)
        file.seek(start)
        yield from pieces(path, file, start, cut, "train")
        yield from pieces(path, file, cut, math.inf, "val")


def find_cut(file, start: int, share: float) -> int:
    """The byte to cut at before the last `share` of a text.

    Within the first half of that share: after a line, or else before a space or a character.
    """
    size = file.seek(0, io.SEEK_END)
    at = file.seek(max(start, int(size * (1 - share))))
    text = file.read(min(CHUNK_BYTES, max(4, (size - at) // 2)))
    inside = bytes(range(0x80, 0xC0))  # bytes within a character of UTF-8
    places = text.find(b"\n") + 1 or -1, text.find(b" "), len(text) - len(text.lstrip(inside))
    return at + next(place for place in places if place >= 0)


# Places that no token of a tokenizer in use spans: after a line end, before a space.
LINE, SPACE = r"\S\n(?=\w)", r"[^\s>](?= \w)"


def last_cut(text: str) -> int:
    """The last LINE or, without one, the last SPACE; 0 without either."""
    found = re.match(f"(?s:.*){LINE}", text) or re.match(f"(?s:.*){SPACE}", text)
    return found.end() if found else 0


def pieces(path: Path, file, start: int, stop: float, split: str) -> Iterator[Chunk]:
    """The document in bytes `start` to `stop`, with `file` at its start.

    Cut at `last_cut`, so the pieces have the same tokens as the whole document. PIECE_BYTES without
    such a place are cut between two characters.
    """
    at, block, more = start, b"", True
    while more:
        more = file.read(min(CHUNK_BYTES, stop - at - len(block)))
        block += more
        text = block.decode(errors="surrogateescape")
        end = last_cut(text) if more else len(text)
        if not end and len(block) >= PIECE_BYTES:
            end = len(text) - 4  # the last character may be incomplete: 3 escaped bytes at most
        if not end:
            continue
        try:
            piece = text[:end].encode()
        except UnicodeEncodeError as e:
            bad = at + len(text[: e.start].encode())
            raise ConfigError(f"{path}: not UTF-8 at byte {bad:,}") from None
        yield Chunk(str(path), text[:end], 1, split, at == start, not more)
        at, block = at + len(piece), block[len(piece) :]
