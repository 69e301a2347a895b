"""Finds the input files of `python data.py` and reads them in pieces."""

import codecs
import glob
import gzip
import io
import itertools
import json
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
COMPRESSED = (".gz", ".zst")  # after any but the last
RECORDS = {  # keys that hold a document; those that are read with them
    ("prompt", "completion"): ("tools", "system"),
    ("messages",): ("tools", "system"),
    ("conversations",): ("tools", "system"),
    ("instruction", "output"): ("input", "system"),
}
CARDS = ("readme.md", "dataset_infos.json", "dataset_info.json")  # beside the records of the hub
TRAINING = {"train", "training"}  # words in the names of splits
OTHERS = {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
CHUNK_BYTES = 1 << 18  # of input that are read, tokenized and written at a time
PIECE_BYTES = 1 << 20  # of text without white space, at most: the library takes 200 times as much
LINE_BYTES = 1 << 27  # of JSON, at most
CUT_BYTES = 100_000  # a text file of this size, or the only one, is cut in two


class Chunk(NamedTuple):
    """A piece of one input file, to be tokenized."""

    file: str
    data: str | list  # a piece of a text; or records: lines of JSON as bytes, or decoded
    first: int = 1  # number of the first record, from 1 on
    split: str | None = None  # of a text; that of a record depends on its content
    begins: bool = True  # whether the text begins with this piece
    ends: bool = True  # whether it ends with it


@lru_cache  # of all records, few differ in this
def find_keys(names: tuple, text_field: str | None) -> tuple[tuple, tuple]:
    """Which of these keys or columns hold a document; all that are used. Raises ValueError.

    A chat goes before the text beside it, in which nothing says where replies are, unless
    --text_field asks for that.
    """
    kinds = {(text_field,): ()} | RECORDS if text_field else RECORDS | {("text",): ()}
    for keys, more in kinds.items():
        if set(keys) <= set(names):
            return keys, keys + more
    known = ", ".join(" and ".join(keys) for keys in RECORDS)
    found = ", ".join(map(str, names)) or "no key"
    raise ValueError(f"has {found:.200}; expected {text_field or 'text'} (see --text_field), or "
                     f"{known}")


# --- which files -----------------------------------------------------------------------------


def suffixes(path: Path) -> list[str]:
    """The last one in lower case, or the last two of a compressed file."""
    last = path.suffix.lower()
    return [Path(path.stem).suffix.lower(), last] if last in COMPRESSED else [last]


def kind_of(path: Path) -> str | None:
    """One of KINDS; None for a file that cannot be read."""
    return KINDS.get(suffixes(path)[0])


def find_inputs(inputs: list[str], out: Path, counts: Counter) -> list[Path]:
    """The files that the inputs name: themselves, in a folder, or by a pattern; sorted in each.

    Counts what is left out of folders. Raises ConfigError.
    """
    found = []
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
            if not kind_of(file) or not file.is_file():  # a pipe would be read twice
                raise ConfigError(f"{file}: expected a regular file that ends in {' '.join(KINDS)}")
        found += files
    return list(dict.fromkeys(found))


def files_in(folder: Path, out: Path, counts: Counter) -> list[Path]:
    """The files in a folder that can be read; without hidden folders, and without `out`."""
    found = []
    for directory, subdirectories, names in os.walk(folder):
        if Path(directory).resolve() == out:
            subdirectories.clear()
            continue
        for name in [*subdirectories]:
            if name.startswith("."):
                subdirectories.remove(name)
                counts["skipped", f"hidden folder {name}"] += 1
            elif Path(directory, name).is_symlink():  # which os.walk does not follow
                counts["skipped", f"link to a folder {name}"] += 1
        for path in (Path(directory, name) for name in names):
            if not path.is_file():
                counts["skipped", "not regular"] += 1
            elif path.suffix.lower() == ".arrow":
                raise ConfigError(f"{path}: Arrow, as of datasets.save_to_disk; expected Parquet, "
                                  "as of load_from_disk(FOLDER).to_parquet(FILE)")
            elif kind_of(path):
                found.append(path)
            else:
                counts["skipped", "".join(suffixes(path)) or "without a suffix"] += 1
    return without_others(folder, found, counts)


def without_others(folder: Path, files: list[Path], counts: Counter) -> list[Path]:
    """As datasets takes a folder of the hub: without its README, and only training splits, where
    names say so."""
    records = any(kind_of(path) != "text" for path in files)
    words = {path: {*re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())} for path in files}
    training, found = any(TRAINING & of for of in words.values()), []
    for path in files:
        if records and path.name.lower() in CARDS:
            counts["skipped", path.name] += 1
        elif training and (other := OTHERS & words[path]) and not TRAINING & words[path]:
            counts["skipped", f"{min(other)} split"] += 1
        else:
            found.append(path)
    return found


# --- their content ---------------------------------------------------------------------------


def decompressed(path: Path, raw):
    """`raw`, the open file, decompressed if its name says that it is compressed."""
    if path.suffix.lower() == ".gz":
        return gzip.open(raw)
    if path.suffix.lower() == ".zst":
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            return io.BufferedReader(Zstd(raw))
        return io.BufferedReader(zstd.open(raw, "rb"))
    return raw


class Zstd(io.RawIOBase):
    """Decompresses `raw`. zstandard's own reader takes half a frame for the end of the file."""

    def __init__(self, raw):
        self.raw, self.at = raw, 0
        self.pieces, self.left = zstd_pieces(raw), memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.left and (piece := next(self.pieces, None)) is not None:
            self.left = memoryview(piece)
        n = min(len(buffer), len(self.left))
        buffer[:n], self.left = self.left[:n], self.left[n:]
        self.at += n
        return n

    def seek(self, to: int, whence: int = 0) -> int:
        to = (to, self.at + to, float("inf"))[whence]
        if to < self.at:
            self.raw.seek(0)
            self.__init__(self.raw)
        while self.at < to and self.read(min(CHUNK_BYTES, to - self.at)):
            pass
        return self.at


def zstd_pieces(raw) -> Iterator[bytes]:
    import zstandard

    frame = None
    # 256 bytes decompress to 8 MB at most
    while data := (frame and frame.unused_data) or raw.read(256):
        if frame is None or frame.eof:
            frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(data)
    if frame is None or not frame.eof:
        raise EOFError("ended before the end of its last frame")


def read_chunks(files: list[Path], options, counts: Counter) -> Iterator[Chunk]:
    """All files in pieces of about CHUNK_BYTES. Raises ConfigError for one that cannot be read.

    options: prepare.Options. With skip_bad the rest of such a file is left out and counted.
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
            if chunk and not chunk.ends:  # the document ends here
                yield chunk._replace(data="", begins=False, ends=True)


def read_file(path: Path, options, large: bool = False) -> Iterator[Chunk]:
    """The pieces of one file. large: cut a text in two, whatever its size. Raises ConfigError."""
    try:
        with open(path, "rb") as raw, decompressed(path, raw) as file:
            yield from chunks_of(path, file, options, large)
    except ConfigError:
        raise
    except ImportError as e:
        package = e.name.split(".")[0]
        raise ConfigError(f"{path}: needs {package}: pip install {package}") from e
    except Exception as e:  # each codec, and pyarrow, has errors of its own
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def chunks_of(path: Path, file, options, large: bool) -> Iterator[Chunk]:
    """The pieces of `file`, the file at `path`, decompressed where it has to be."""
    kind, first = kind_of(path), 1
    if kind == "parquet":
        lists = read_parquet(path, options.text_field)
    else:
        start = file.read(1024)  # not peek, which sees as little as the first frame
        file.seek(0)
        utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if utf16 or 8 * start.count(0) > len(start):
            raise ConfigError(f"{path}: UTF-16, or no text; expected UTF-8")
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        if kind == "text":
            yield from read_text(path, file, options.val_fraction, large)
            return
        if kind == "json" and start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            items = json.load(file)
            lists = (items[i : i + 100] for i in range(0, len(items), 100))
        else:
            lists = read_lines(path, file)
    for data in lists:
        yield Chunk(str(path), data, first)
        first += len(data)


def read_lines(path: Path, file) -> Iterator[list]:
    """Lines, about CHUNK_BYTES at a time. Raises ConfigError for one that is too long."""
    lines, size = [], 0
    for number in itertools.count(1):
        try:
            line = file.readline(LINE_BYTES)
            if len(line) == LINE_BYTES:
                raise ConfigError(f"{path}:{number}: a line of {LINE_BYTES:,} bytes or more; "
                                  "expected shorter documents")
        except Exception:
            yield lines  # that were read
            raise
        lines += filter(None, [line])
        size += len(line)
        if lines and (size >= CHUNK_BYTES or not line):
            yield lines
            lines, size = [], 0
        if not line:
            return


def read_text(path: Path, file, share: float, large: bool) -> Iterator[Chunk]:
    """Pieces of one document, or of two where the end of the file is for validation."""
    start, cut, split = file.tell(), None, "train"
    if not large and path.stat().st_size < CUT_BYTES:
        split = "val" if share_of(os.fsencode(path.name)) < share else "train"
    elif share:
        cut = find_cut(file, start, share)
        file.seek(start)
    yield from pieces(path, file, start, cut, split)
    if cut is not None:
        yield from pieces(path, file, cut, None, "val")


def find_cut(file, start: int, share: float) -> int:
    """Where to cut off the last `share` of a text: after a line, before a space or a character.

    At the first such place in the first half of it.
    """
    size = file.seek(0, io.SEEK_END)
    at = file.seek(max(start, int(size * (1 - share))))
    text = file.read(min(CHUNK_BYTES, max(4, (size - at) // 2)))
    places = text.find(b"\n") + 1 or -1, text.find(b" "), len(text) - len(text.lstrip(INSIDE))
    return at + next(place for place in places if place >= 0)


INSIDE = bytes(range(0x80, 0xC0))  # bytes of a character in UTF-8 but its first

# Places that no token of a tokenizer in use spans: after a line end, before a space.
LINE, SPACE = r"\S\n(?=\w)", r"[^\s>](?= \w)"


def pieces(path: Path, file, start: int, stop: int | None, split: str) -> Iterator[Chunk]:
    """The document from byte `start`, where `file` is, to `stop`.

    It is cut at the last LINE or, where there is none, the last SPACE, so the tokens of the pieces
    are those of the document. PIECE_BYTES without either are cut between two characters.
    """
    at, block, searched, more = start, b"", 0, True
    while more:
        left = CHUNK_BYTES if stop is None else stop - at - len(block)
        more = file.read(min(CHUNK_BYTES, left))
        block += more
        end = piece_end(block, searched) if more else len(block)
        if not end and len(block) >= PIECE_BYTES:
            end = len(block.rstrip(INSIDE)) - 1
        if end:
            try:
                text = block[:end].decode()
            except UnicodeDecodeError as e:
                raise ConfigError(f"{path}: not UTF-8 at byte {at + e.start:,}") from None
            yield Chunk(str(path), text, 1, split, at == start, not more)
        at, block, searched = at + end, block[end:], 0 if end else len(block)


def piece_end(block: bytes, searched: int) -> int:
    """The last place to cut at; 0 where there is none, as in the bytes searched before."""
    for end in (b"\n", b" "):
        at = len(block) - 1
        while (at := block.rfind(end, max(1, searched - 1), at)) > 0:
            around = block[max(0, at - 4) : at], block[at + 1 : at + 5]
            before, after = (part.decode(errors="ignore") for part in around)
            if re.match(LINE if end == b"\n" else SPACE, before[-1:] + end.decode() + after[:1]):
                return at + (end == b"\n")
    return 0


def read_parquet(path: Path, text_field: str) -> Iterator[list]:
    """Rows with their columns that hold a document; the others are None."""
    # pages as they are needed, not whole row groups
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    names = file.schema_arrow.names
    find_keys(tuple(names), text_field)
    known = {text_field or "text"}.union(*(keys + more for keys, more in RECORDS.items()))
    columns = [name for name in names if name in known]  # each row may have nulls in others
    others = {name: None for name in names if name not in known}
    about = file.metadata
    n_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    batch_size = min(10_000, max(1, CHUNK_BYTES * about.num_rows // max(1, n_bytes)))
    for batch in file.iter_batches(batch_size, columns=columns, use_threads=False):
        yield [others | row for row in batch.to_pylist()]
