"""Reads the input files of `python data.py` in pieces."""

import gzip
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from steady.cli import ConfigError
from steady.tokens import share_of
from tools.inputs import kind_of

RECORDS = {  # keys, or columns, that hold a document; those that are read with them
    ("prompt", "response"): ("tools", "system"),
    ("prompt", "completion"): ("tools", "system"),
    ("messages",): ("tools", "system"),
    ("conversations",): ("tools", "system"),
    ("instruction", "output"): ("input", "system"),
}
CHUNK_BYTES = 1 << 18  # of input that are read, tokenized and written at a time
CUT_BYTES = 100_000  # a text file of this size, or the only one, is cut in two
LONGEST_LINE = 1 << 24  # bytes; a text without line ends is cut there


class Chunk(NamedTuple):
    """A piece of one input file, to be tokenized."""

    file: str
    kind: str  # "text": a piece of one document; "lines": JSON objects; "rows": dicts
    data: bytes | list
    first: int  # number of the first line or row, from 1 on; byte offset of a text
    split: str | None = None  # of a text; lines and rows are divided later, one by one
    begins: bool = True  # whether the text begins with this piece
    ends: bool = True  # whether it ends with it
    read: float = 0.0  # bytes of the file since the previous chunk
    ignored: tuple = ()  # columns of the file that are not in the rows


def find_keys(names, text_field: str) -> tuple[tuple, tuple]:
    """Which of these keys or columns hold a document; all that are read. Raises ValueError."""
    for keys, more in ({(text_field,): ()} | RECORDS).items():
        if set(keys) <= set(names):
            return keys, keys + tuple(name for name in more if name in names)
    known = ", ".join(" and ".join(keys) for keys in RECORDS)
    raise ValueError(f"has {', '.join(map(str, names)) or 'no key'}; expected {text_field} "
                     f"(see --text_field), or {known}")


def optional(module: str, path: Path):
    """Import what this file needs. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ConfigError(f"{path}: needs {package}: pip install {package}") from None


def decompressed(path: Path, raw):
    """`raw`, the open file, decompressed if its name says that it is compressed."""
    if path.suffix.lower() == ".gz":
        return gzip.open(raw)
    if path.suffix.lower() == ".zst":
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            zstd = optional("zstandard", path)
        return io.BufferedReader(zstd.open(raw, "rb"))
    return raw


def read_chunks(files: list[Path], text_field: str, val_fraction: float) -> Iterator[Chunk]:
    """All files in pieces of about CHUNK_BYTES. Raises ConfigError."""
    for path in files:
        if kind_of(path) == "rows":
            yield from read_parquet(path, text_field)
        else:
            large = len(files) == 1 or path.stat().st_size >= CUT_BYTES
            yield from read_file(path, large, val_fraction)


def read_file(path: Path, large: bool, val_fraction: float) -> Iterator[Chunk]:
    """A text or JSONL file; the end of a large text is for validation."""
    with open(path, "rb") as raw, decompressed(path, raw) as file:
        if kind_of(path) == "lines":
            chunks = read_lines(path, file)
        else:
            may_cut = large and file is raw and val_fraction > 0
            chunks = read_text(path, file, may_cut, val_fraction)
        before = 0
        try:
            for chunk in chunks:
                yield chunk._replace(read=raw.tell() - before)
                before = raw.tell()
        except Exception as e:  # each codec has errors of its own
            if file is raw:
                raise
            reason = str(e) or type(e).__name__
            raise ConfigError(f"{path}: cannot be unpacked: {reason}") from None


def read_lines(path: Path, file) -> Iterator[Chunk]:
    first = 1
    while lines := file.readlines(CHUNK_BYTES):
        yield Chunk(str(path), "lines", lines, first)
        first += len(lines)


def read_text(path: Path, file, may_cut: bool, val_fraction: float) -> Iterator[Chunk]:
    """Pieces of one document, or of two where the end of the file is for validation."""
    cut = line_after(file, path.stat().st_size * (1 - val_fraction)) if may_cut else None
    if cut is not None:
        yield from pieces(path, file, 0, cut, "train")
        yield from pieces(path, file, cut, None, "val")
    else:
        val = not may_cut and share_of(path.name.encode()) < val_fraction
        yield from pieces(path, file, 0, None, "val" if val else "train")


def line_after(file, place: float) -> int | None:
    """The first byte from `place` on that begins a line and is not a space."""
    file.seek(int(place))
    file.readline()
    while (first := file.read(1)).isspace():
        if first != b"\n":
            file.readline()
    at = file.tell() - 1
    file.seek(0)
    return at if first else None


def pieces(path: Path, file, start: int, stop: int | None, split: str) -> Iterator[Chunk]:
    """The document from byte `start`, where `file` is, to `stop`.

    It is cut after line ends with no space on either side. No tokenizer in use makes one token of
    the text before and after such a place, so the pieces give the tokens of the document.
    """
    at, block, more = start, b"", True
    while more:
        left = CHUNK_BYTES if stop is None else stop - at - len(block)
        more = file.read(min(CHUNK_BYTES, left))
        block += more
        end = piece_end(block) if more else len(block)
        if end:
            yield Chunk(str(path), "text", block[:end], at, split, at == start, not more)
        at, block = at + end, block[end:]


def piece_end(block: bytes) -> int:
    """After the last line end with no space on either side; 0 where there is none yet."""
    at = len(block) - 1
    while (at := block.rfind(b"\n", 1, at)) > 0:
        if not (block[at - 1 : at].isspace() or block[at + 1 : at + 2].isspace()):
            return at + 1
    if len(block) < LONGEST_LINE:
        return 0
    at = len(block) - 1
    while block[at] & 0xC0 == 0x80 and at > len(block) - 4:  # inside a character of UTF-8
        at -= 1
    return at


def read_parquet(path: Path, text_field: str) -> Iterator[Chunk]:
    pq, errors = optional("pyarrow.parquet", path), optional("pyarrow", path).ArrowException
    try:
        # pages as they are needed, not whole row groups
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        names = file.schema_arrow.names
        try:
            _, columns = find_keys(names, text_field)
        except ValueError as e:
            raise ConfigError(f"{path}: {e}") from None
        ignored = tuple(name for name in names if name not in columns)
        about, first = file.metadata, 1
        n_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        batch_size = min(10_000, max(1, CHUNK_BYTES * about.num_rows // max(1, n_bytes)))
        for batch in file.iter_batches(batch_size, columns=[*columns], use_threads=False):
            data = batch.to_pylist()
            read = path.stat().st_size * len(data) / about.num_rows
            yield Chunk(str(path), "rows", data, first, read=read, ignored=ignored)
            first += len(data)
    except (errors, OSError) as e:
        raise ConfigError(f"{path}: cannot be read as Parquet: {e}") from None
