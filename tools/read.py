"""Reads the input files of `python data.py` in pieces."""

import codecs
import csv
import gzip
import importlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from steady.options import ConfigError
from steady.tokens.files import share_of

KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "json", ".csv": "csv",
         ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".zst")  # after any but the last two
MARKS = {  # at the beginning of a file; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}
RECORDS = {  # keys, or columns, that hold a document; those that are read with them
    ("prompt", "response"): ("tools", "system"),
    ("prompt", "completion"): ("tools", "system"),
    ("messages",): ("tools", "system"),
    ("conversations",): ("tools", "system"),
    ("instruction", "output"): ("input", "system"),
}
CHUNK_BYTES = 1 << 18  # of input that are read, tokenized and written at a time
CUT_BYTES = 100_000  # a text file of this size, or the only one, is cut in two
LONGEST_LINE = 1 << 20  # bytes; a longer one is cut before a space


class Chunk(NamedTuple):
    """A piece of one input file, to be tokenized."""

    file: str
    kind: str  # "text": a piece of one document; "lines": JSON objects; "rows": decoded ones
    data: bytes | list  # of rows: a ValueError says what is wrong with one, None is no row
    first: int  # number of the first line or row, from 1 on; byte offset of a text
    split: str | None = None  # of a text; that of a line or row depends on its content
    begins: bool = True  # whether the text begins with this piece
    ends: bool = True  # whether it ends with it
    n_bytes: int = 0  # of the file since the previous chunk


def find_keys(names, text_field: str) -> tuple[tuple, tuple]:
    """Which of these keys or columns hold a document; all that are read. Raises ValueError."""
    for keys, more in ({(text_field,): ()} | RECORDS).items():
        if set(keys) <= set(names):
            return keys, keys + tuple(name for name in more if name in names)
    if {"chosen", "rejected"} <= set(names):
        raise ValueError("preference data (chosen and rejected, as for DPO) is not supported")
    known = ", ".join(" and ".join(keys) for keys in RECORDS)
    found = ", ".join(map(str, names)) or "no key"
    found = found if len(found) < 200 else f"{found:.200} …"  # of a CSV without names a document
    raise ValueError(f"has {found}; expected {text_field} (see --text_field), or {known}")


def suffixes(path: Path) -> list[str]:
    """The last one in lower case, or the last two of a packed file."""
    last = path.suffix.lower()
    return [Path(path.stem).suffix.lower(), last] if last in COMPRESSED else [last]


def kind_of(path: Path) -> str | None:
    """One of KINDS; None for a file that cannot be read."""
    return KINDS.get(suffixes(path)[0])


def optional(module: str, path: Path):
    """Import what this file needs. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.split(".")[0]
        raise ConfigError(f"{path}: needs {package}: pip install {package}") from e


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


def encoding_of(file) -> str:
    first = file.peek(4)
    return next((name for mark, name in MARKS.items() if first.startswith(mark)), "utf-8-sig")


def as_text(file) -> io.TextIOWrapper:
    """`file` decoded by its mark, without which it is UTF-8.

    Bytes that are not become surrogates, which cannot be encoded: so the row can be named.
    """
    return io.TextIOWrapper(file, encoding_of(file), "surrogateescape", newline="")


def after_mark(file):
    """`file` behind its mark; decoded, unless it is UTF-8."""
    if encoding_of(file) != "utf-8-sig":
        return as_text(file)
    if file.peek(3).startswith(codecs.BOM_UTF8):
        file.read(3)
    return file


def read_chunks(files: list[Path], options, unreadable: dict[Path, str]) -> Iterator[Chunk]:
    """All files in pieces of about CHUNK_BYTES. Raises ConfigError for one that cannot be read.

    options: prepare.Options. With skip_bad the rest of such a file is left out, and the reason is
    put into `unreadable`.
    """
    for path in files:
        chunk = None
        try:
            for chunk in read_file(path, options, large=len(files) == 1):
                yield chunk
        except ConfigError as e:
            if not options.skip_bad or isinstance(e.__cause__, ImportError):
                raise
            unreadable[path] = str(e)
            if chunk and not chunk.ends:  # the document ends here
                yield chunk._replace(data=b"", begins=False, ends=True, n_bytes=0)


def read_file(path: Path, options, large: bool = False) -> Iterator[Chunk]:
    """The pieces of one file. large: cut a text in two, whatever its size."""
    try:
        with open(path, "rb") as raw, decompressed(path, raw) as file:
            before = 0
            for chunk in chunks_of(path, raw, file, options, large):
                yield chunk._replace(n_bytes=raw.tell() - before)
                before = raw.tell()
    except ConfigError:
        raise
    except Exception as e:  # each codec, and pyarrow, has errors of its own
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def chunks_of(path: Path, raw, file, options, large: bool) -> Iterator[Chunk]:
    """The pieces of `file`, which is `raw`, the file at `path`, decompressed where it has to be."""
    kind, first = kind_of(path), 1
    if kind == "text":
        yield from read_text(path, raw, file, options, large)
        return
    if kind == "lines":
        text = after_mark(file)
        lists = iter(lambda: text.readlines(CHUNK_BYTES), [])
    elif kind == "json":
        lists = read_json(path, as_text(file))
    elif kind == "csv":
        lists = read_csv(path, as_text(file), options.text_field)
        first = 2  # number 1 is the line of names, as in a spreadsheet
    elif kind == "parquet":
        lists = read_parquet(path, raw, options.text_field)
    else:
        lists = read_arrow(path, file, options.text_field)
    for data in lists:
        yield Chunk(str(path), "lines" if kind == "lines" else "rows", data, first)
        first += len(data)


def read_text(path: Path, raw, file, options, large: bool) -> Iterator[Chunk]:
    """Pieces of one document, or of two where the end of the file is for validation."""
    beginning, text, share = file.peek(1024)[:1024], after_mark(file), options.val_fraction
    if text is file and beginning.count(0) > len(beginning) // 8:
        raise ConfigError(f"{path}: holds null bytes; expected UTF-8, or UTF-16 with a mark (BOM)")
    start, cut, val, size = text.tell(), None, False, path.stat().st_size
    if text is not raw or not large and size < CUT_BYTES:
        val = share_of(path.name.encode()) < share
    elif share:
        text.seek(int(size * (1 - share)))
        text.readline()
        cut = text.tell()
        text.seek(start)
    yield from pieces(path, text, start, cut, "val" if val else "train")
    if cut is not None:
        yield from pieces(path, text, cut, None, "val")


def pieces(path: Path, file, start: int, stop: int | None, split: str) -> Iterator[Chunk]:
    """The document from byte `start`, where `file` is, to `stop`.

    It is cut after line ends with no space on either side, in very long lines before such spaces.
    No tokenizer in use makes one token of the text before and after such a place, so the pieces
    give the tokens of the document.
    """
    at, block, more = start, b"", True
    while more:
        left = CHUNK_BYTES if stop is None else stop - at - len(block)
        more = file.read(min(CHUNK_BYTES, left))
        block += more.encode() if isinstance(more, str) else more
        end = piece_end(block) if more else len(block)
        if end:
            yield Chunk(str(path), "text", block[:end], at, split, at == start, not more)
        at, block = at + end, block[end:]


def piece_end(block: bytes) -> int:
    """After the last line end with no space on either side; 0 where there is none yet."""
    for end in (b"\n", b" "):
        at = len(block) - 1
        while (at := block.rfind(end, 1, at)) > 0:
            if not (block[at - 1 : at].isspace() or block[at + 1 : at + 2].isspace()):
                return at + (end == b"\n")
        if len(block) < LONGEST_LINE:
            return 0
    at = len(block) - 1
    while block[at] & 0xC0 == 0x80 and at > len(block) - 4:  # inside a character of UTF-8
        at -= 1
    return at


def read_json(path: Path, file) -> Iterator[list]:
    """The objects of an array, or one after another, decoded one at a time."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*").match
    text, n, more = file.read(CHUNK_BYTES).lstrip(), 0, True
    array = text.startswith("[")
    text = text[array:]
    while more:
        more = file.read(max(CHUNK_BYTES, len(text)))  # doubled where no object has ended
        text, at, items = text + more, 0, []
        while True:
            at = between(text, at).end()
            try:
                item, at = decode(text, at)
            except (ValueError, RecursionError):
                break
            items.append(item)
        if items:
            yield items
            n += len(items)
        text = text[at:]
    if text.rstrip() != "]" * array:
        raise ConfigError(f"{path}: not JSON from object {n + 1:,} on; expected an array of "
                          "objects, or objects one after another")


def holds_records(path: Path) -> bool:
    """Whether a .json file holds an array or one object per line, rather than settings."""
    try:
        with open(path, "rb") as raw, decompressed(path, raw) as file:
            text = as_text(file)
            first, second = text.readline(LONGEST_LINE), text.readline(LONGEST_LINE)
    except Exception:  # to be named by whoever reads it
        return True
    return first.lstrip()[:1] == "[" or first[:1] == second[:1] == "{"


def read_csv(path: Path, file, text_field: str) -> Iterator[list]:
    """Rows under a line of names."""
    csv.field_size_limit(2**31 - 1)  # instead of 131,072 characters
    lines, items, size = csv.reader(file, strict=True), [], 0
    try:
        names = next(lines, None)
        if names is None:  # empty
            return
        columns_of(path, names, text_field)
        for fields in lines:
            if len(fields) == len(names):
                items.append(dict(zip(names, fields, strict=True)))
            elif fields:
                items.append(ValueError(f"{len(fields)} fields; expected {len(names)}, as in the "
                                        "first line"))
            else:
                items.append(None)  # an empty line, which has a number, too
            size += sum(map(len, fields))
            if size >= CHUNK_BYTES:
                yield items
                items, size = [], 0
        yield items
    except csv.Error as e:
        raise ConfigError(f"{path}:{lines.line_num}: not CSV: {e}") from None


def read_parquet(path: Path, raw, text_field: str) -> Iterator[list]:
    # pages as they are needed, not whole row groups
    pq = optional("pyarrow.parquet", path)
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    columns, others = columns_of(path, file.schema_arrow.names, text_field)
    about, done = file.metadata, 0
    n_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    batch_size = min(10_000, max(1, CHUNK_BYTES * about.num_rows // max(1, n_bytes)))
    for batch in file.iter_batches(batch_size, columns=columns, use_threads=False):
        done += len(batch)
        raw.seek(path.stat().st_size * done // about.num_rows)  # as if read, for the bar
        yield [others | row for row in batch.to_pylist()]


def read_arrow(path: Path, file, text_field: str) -> Iterator[list]:
    """A stream, as datasets.save_to_disk writes it, or a file of Arrow's."""
    ipc = optional("pyarrow.ipc", path)
    if file.peek(6).startswith(b"ARROW1"):
        reader = ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = reader = ipc.open_stream(file)
    columns, others = columns_of(path, reader.schema.names, text_field)
    for batch in batches:
        batch = batch.select(columns)
        n_rows = max(1, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, n_rows):
            yield [others | row for row in batch.slice(start, n_rows).to_pylist()]


def columns_of(path: Path, names: list[str], text_field: str) -> tuple[list[str], dict]:
    """Columns that hold a document; the others, which are not read. Raises ConfigError."""
    try:
        _, columns = find_keys(names, text_field)
    except ValueError as e:
        raise ConfigError(f"{path}: {e}") from None
    return [*columns], {name: None for name in names if name not in columns}
