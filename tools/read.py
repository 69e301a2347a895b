"""The inputs of `python data.py`, found and read in pieces; some by the library `datasets`."""

import codecs
import contextlib
import csv
import glob
import gzip
import importlib
import io
import itertools
import json
import logging
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from steady.options import ConfigError
from steady.tokens.files import share_of

KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "json", ".csv": "csv",
         ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
HUB = "hf:"  # begins the name of a data set on the hub
BESIDE = ("system", "tools", "chat_template_kwargs", "label")
RECORDS = {  # keys that hold a document: optional keys read with them
    ("prompt", "completion"): ("history", *BESIDE),
    ("messages",): BESIDE,
    ("conversations",): BESIDE,
    ("instruction", "output"): ("input", "history", *BESIDE)}
CARDS = ("readme.md", "dataset_infos.json", "dataset_info.json")  # beside the records of the hub
TRAINING = {"train", "training"}  # words in the names of splits
OTHERS = {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
CHUNK_BYTES = 1 << 18  # of input, read, tokenized and written at a time
PIECE_BYTES = 1 << 20  # of text without white space: tokenizing takes 200 times as much memory
LINE_BYTES = 1 << 27  # longest line of JSON
CUT_BYTES = 100_000  # smallest text file cut in two, unless it is the only one
# Places that no token of a tokenizer in use spans: after a line end, before a space.
LINE, SPACE = r"\S\n(?=\w)", r"[^\s>](?= \w)"


class Document(NamedTuple):
    """A document, or a piece of a long one."""

    split: str
    parts: list[tuple[str, bool]]  # texts, and whether the loss counts them
    is_chat: bool = False  # whether a chat template wrote it
    begins: bool = True  # whether the document begins with this piece
    ends: bool = True  # whether it ends with it


@lru_cache  # most records have the same keys
def find_keys(names: tuple, text_field: str | None) -> tuple[tuple, tuple]:
    """(keys that hold the document, all keys used) among these names. Raises ValueError."""
    # a chat comes before a text beside it, unless --text_field asks for the text
    kinds = {(text_field,): ()} | RECORDS if text_field else RECORDS | {("text",): ()}
    for keys, more in kinds.items():
        if set(keys) <= set(names):
            return keys, keys + more
    known, found = ", ".join(map(" and ".join, RECORDS)), ", ".join(map(str, names)) or "no key"
    raise ValueError(f"has {found:.200}; expected {text_field or 'text'} (see --text_field), or "
                     f"{known}: rename them (docs/finetuning.md)")


def suffixes(path: Path) -> list[str]:
    """Such as [".txt"], or [".txt", ".gz"] for a compressed file."""
    last = path.suffix.lower()
    return [Path(path.stem).suffix.lower(), last] if last in (".gz", ".zst") else [last]


def kind_of(path: Path) -> str | None:
    """A value of KINDS, "saved", "hub", or None for anything else, such as a pipe."""
    if str(path).startswith(HUB):
        return "hub"
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return "saved"  # by datasets.save_to_disk
    return KINDS.get(suffixes(path)[0]) if path.is_file() else None


def find_inputs(inputs: list[str], out: Path, counts: Counter) -> list[Path]:
    """The sources of all inputs, each once. counts: of files skipped. Raises ConfigError."""
    found, known = {}, " ".join(KINDS)
    for name in inputs:
        path = Path(os.path.expanduser(name))
        if path.resolve() == out.resolve():
            raise ConfigError(f"{name}: is what --out names; expected another folder there")
        if path.is_dir():
            files = files_in(path, out.resolve(), counts)
        elif path.exists() or name.startswith(HUB):
            files = [path]
        else:
            files = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not files:
            raise ConfigError(f"{name}: no such file, or none in it that ends in {known}")
        if odd := [file for file in files if not kind_of(file)]:
            raise ConfigError(f"{odd[0]}: expected a regular file that ends in {known}")
        found |= {os.path.realpath(file): file for file in files}
    return list(found.values())


def files_in(folder: Path, out: Path, counts: Counter) -> list[Path]:
    """The sources in a folder, except hidden ones, `out`, and the hub's READMEs and test splits."""
    files, found = [], []
    for directory, folders, names in os.walk(folder):
        here = Path(directory)
        is_saved = kind_of(here) == "saved"
        found += [here] * is_saved
        if is_saved or here.resolve() == out:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in map(here.joinpath, names):
            if kind_of(path):
                files.append(path)
            else:
                counts["skipped", "".join(suffixes(path)) or path.name] += 1
    words = {path: {*re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())} for path in files}
    has_records = any(kind_of(path) != "text" for path in files)
    has_training = any(TRAINING & words[path] for path in files)
    for path in files:
        if has_records and path.name.lower() in CARDS:
            counts["skipped", path.name] += 1
        elif has_training and OTHERS & words[path] and not TRAINING & words[path]:
            counts["skipped", f"{min(OTHERS & words[path])} split"] += 1
        else:
            found.append(path)
    return sorted(found)


def read_chunks(files: list[Path], options, counts: Counter) -> Iterator[list[tuple]]:
    """All items in lists of about CHUNK_BYTES; arguments as in `read_items`."""
    chunk, size = [], 0
    for file, number, data in read_items(files, options, counts):
        chunk.append((file, number, data))
        size += len(data if isinstance(data, bytes) else repr(data))
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def read_items(files: list[Path], options, counts: Counter) -> Iterator[tuple]:
    """Yields (file, number from 1, record or Document) of all sources, even those before an error.

    options: prepare.Options. counts: of sources left out and without an item. Raises ConfigError.
    """
    for path in files:
        number, data = 0, None
        try:
            if kind_of(path) == "text":
                found = read_text(path, options.val_fraction, large=len(files) == 1)
            else:
                found = itertools.islice(read_records(path, options), options.limit)
            for number, data in enumerate(found, 1):
                yield path, number, data
        except ImportError as e:
            package = "backports.zstd" if path.suffix.lower() == ".zst" else "datasets"
            raise ConfigError(f"{path}: needs {package}: pip install {package}") from e
        except Exception as e:  # each codec, and each format of `datasets`, has errors of its own
            reason = " ".join(str(e).split()) or type(e).__name__
            if not isinstance(e, ConfigError):
                reason = f"{path}: cannot be read: {reason:.300}"
            if not options.skip_bad:
                raise ConfigError(reason) from e
            counts["left out", reason] += 1
            if isinstance(data, Document) and not data.ends:
                yield path, number, data._replace(parts=[("", True)], begins=False, ends=True)
        else:
            counts["empty", str(path)] += number == 0


@contextlib.contextmanager
def opened(path: Path):
    """The content of a file, decompressed according to its name, after its byte order mark."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    if path.suffix.lower() == ".zst":
        new = sys.version_info >= (3, 14)
        opener = importlib.import_module("compression.zstd" if new else "backports.zstd").open
    with opener(path, "rb") as file:
        start = file.read(1024)
        if start.startswith(UTF16) or 8 * start.count(0) > len(start):
            raise ConfigError(f"{path}: UTF-16, or no text; expected UTF-8")
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        yield file


def read_records(path: Path, options) -> Iterator:
    """Records as objects, or as undecoded lines of JSON."""
    kind = kind_of(path)
    if kind not in ("lines", "json", "csv"):
        yield from read_rows(path, kind, options)
        return
    with opened(path) as file:
        if kind == "csv":
            csv.field_size_limit(LINE_BYTES)
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            delimiter = "\t" if ".tsv" in suffixes(path) else ","
            rows = csv.DictReader(text, delimiter=delimiter, strict=True)
            if len({*(rows.fieldnames or ())}) < len(rows.fieldnames or ()):
                raise ConfigError(f"{path}: two columns have the same name")
            yield from rows
            return
        begin, lines = file.tell(), iter(lambda: file.readline(LINE_BYTES), b"")
        line = next(filter(bytes.strip, lines), b"").strip(b" \t\r") if kind == "json" else b""
        file.seek(begin)
        if line.startswith(b"[") or line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
            # the objects of arrays, or objects over several lines, one after another
            text, at, decoder = file.read().decode().lstrip(), 0, json.JSONDecoder()
            while at < len(text):
                value, at = decoder.raw_decode(text, at)
                yield from value if isinstance(value, list) else [value]
                at = json.decoder.WHITESPACE.match(text, at).end()
            return
        for number, line in enumerate(lines, 1):
            if len(line) == LINE_BYTES:
                raise ConfigError(f"{path}:{number}: a line of {LINE_BYTES:,} bytes or more")
            yield line


def read_rows(path: Path, kind: str, options) -> Iterator[dict]:
    """Rows by the library `datasets`, streamed or mapped; columns without a document are ""."""
    import datasets
    from pyarrow.dataset import ParquetFragmentScanOptions

    for library in ("datasets", "huggingface_hub"):  # errors are exceptions, too
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    if kind == "hub":
        name, _, config = str(path).removeprefix(HUB).partition(":")
        found = datasets.load_dataset(name, config or None, split=options.split, streaming=True)
    elif kind == "saved":
        found = datasets.load_from_disk(str(path))
        if isinstance(found, dict) and options.split not in found:
            raise ConfigError(f"{path}: no split {options.split}; expected {' or '.join(found)}")
        found = found[options.split] if isinstance(found, dict) else found
    else:
        # by default pyarrow keeps all that it has read
        lean = ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        how = dict(batch_size=100, fragment_scan_options=lean) if kind == "parquet" else {}
        found = datasets.load_dataset(kind, data_files=[glob.escape(str(path))], split="train",
                                      streaming=True, **how)
    others = {}
    if names := found.column_names:
        find_keys(tuple(names), options.text_field)
        known = {options.text_field or "text"}.union(*(k + more for k, more in RECORDS.items()))
        others = dict.fromkeys((name for name in names if name not in known), "")
        found = found.select_columns([name for name in names if name in known])
    for batch in found.iter(16):
        for values in zip(*batch.values(), strict=True):
            yield others | dict(zip(batch, without_none([*values], keep=()), strict=True))


def without_none(x, keep: tuple = ("arguments", "tools")):
    """Without keys that are None (Parquet adds those of other rows); values of `keep` unchanged."""
    if isinstance(x, dict):
        return {k: v if k in keep else without_none(v, keep) for k, v in x.items() if v is not None}
    return [without_none(v, keep) for v in x] if isinstance(x, list) else x


def read_text(path: Path, share: float, large: bool) -> Iterator[Document]:
    """Pieces of one document, or of two if the end of the file is for validation."""
    with opened(path) as file:
        start = file.tell()
        if not share or not large and path.stat().st_size < CUT_BYTES:
            split = "val" if share_of(os.fsencode(path.name)) < share else "train"
            yield from pieces(path, file, start, math.inf, split)
            return
        # cut in the first half of the last `share`, after a line or before a space if possible
        size = file.seek(0, io.SEEK_END)
        at = file.seek(max(start, int(size * (1 - share))))
        text = file.read(min(CHUNK_BYTES, max(4, (size - at) // 2)))
        inside = bytes(range(0x80, 0xC0))  # bytes within a character of UTF-8
        places = text.find(b"\n") + 1 or -1, text.find(b" "), len(text) - len(text.lstrip(inside))
        cut = at + next(place for place in places if place >= 0)
        file.seek(start)
        yield from pieces(path, file, start, cut, "train")
        yield from pieces(path, file, cut, math.inf, "val")


def pieces(path, file, start: int, stop: float, split: str) -> Iterator[Document]:
    """The document in bytes `start` to `stop`, with `file` at its start, cut at the last LINE or,
    without one, the last SPACE, or after PIECE_BYTES without either."""
    at, block, more = start, b"", True
    while more:
        more = file.read(min(CHUNK_BYTES, stop - at - len(block)))
        block += more
        text = block.decode(errors="surrogateescape")
        end = len(text)
        if more:
            cut = re.match(f"(?s:.*){LINE}", text) or re.match(f"(?s:.*){SPACE}", text)
            end = cut.end() if cut else 0
        if not end and len(block) >= PIECE_BYTES:
            end = len(text) - 4  # the last character may be incomplete: 3 escaped bytes at most
        if not end:
            continue
        try:
            piece = text[:end].encode()
        except UnicodeEncodeError as e:
            bad = at + len(text[: e.start].encode())
            raise ConfigError(f"{path}: not UTF-8 at byte {bad:,}") from None
        yield Document(split, [(text[:end], True)], False, at == start, not more)
        at, block = at + len(piece), block[len(piece) :]
