"""Text, JSONL and Parquet to token files: what `python data.py INPUT… --out DIR` runs.

DIR is then a folder that --data takes:

    train.bin, val.bin   token ids, one document after another, each ended by end-of-text
    train.bin.json       what they are: tokenizer, vocabulary, type, counts, checksum
    train.bin.docs       uint64 [documents + 1]: the token each document begins at, and the end
    train.bin.mask       uint8 for each token, 0 where it is a prompt; only where there are prompts
    tokenizer/           what transformers.AutoTokenizer loads

One process reads, others tokenize, and what they return is written in the order of the input, so
that the output does not depend on their number. Nothing is held but the chunks on their way.
"""

import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import ConfigError, option, usable_cores

CHUNK_BYTES = 1 << 18  # of text that is read, tokenized and written at once
LONGEST_LINE = 1 << 24  # bytes; a text without line ends is cut there
TRAINING_BYTES = 1 << 30  # of input, at most, that a tokenizer is trained on
CUT_BYTES = 100_000  # a text file of this size is cut in two; smaller ones are for one split whole
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PACKED = (".gz", ".zst")
BYTES_END_OF_TEXT = 256  # the "bytes" tokenizer: ids 0 … 255 are bytes, 256 ends a document


@dataclass
class Options:
    out: str = option(None, "folder to write; what it held of train.bin and val.bin is replaced")
    tokenizer: str = option(
        "bytes", "bytes, or what transformers.AutoTokenizer takes: a local folder or a hub name"
    )
    train_tokenizer: int | None = option(
        None, "train a byte-level BPE tokenizer of this many ids on the input (on 1 GB of it, "
        "spread evenly, where there is more)", metavar="VOCAB_SIZE"
    )  # fmt: skip
    val_fraction: float = option(
        0.01, "share for validation: of documents, and of a text file of 100 kB or more its end"
    )
    text_field: str = option("text", "key or column of a document's text")
    workers: int | None = option(None, "processes that tokenize (default: one a core)")
    skip_bad: bool = option(False, "leave out lines that cannot be read, and count them")


# --- writing ---------------------------------------------------------------------------------


class TokenWriter:
    """Writes one token file and what belongs to it, piece by piece."""

    def __init__(self, path: Path, vocab_size: int, **meta):
        self.path = path
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.meta = dict(format=1, vocab_size=vocab_size, **meta)
        self.tokens = self.bytes = self.documents = self.longest = self.began = 0
        self.sha = hashlib.sha256()
        self.file, self.docs, self.mask = open(path, "wb"), open(f"{path}.docs", "wb"), None
        self.docs.write(np.uint64(0).tobytes())

    def add(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None, n_bytes: int):
        """ids [n]; ends: where documents end in them; mask [n]: 0 where the loss does not count.

        Raises ConfigError for an id that the file's type cannot hold, which must not wrap.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.meta["vocab_size"]:
            raise ConfigError(
                f"{self.path}: token ids from {ids.min()} to {ids.max()}; expected ids below "
                f"{self.meta['vocab_size']}"
            )
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.sha.update(raw)
        if mask is not None and self.mask is None:
            self.mask = open(f"{self.path}.mask", "wb")
            for start in range(0, self.tokens, CHUNK_BYTES):
                self.mask.write(b"\1" * min(CHUNK_BYTES, self.tokens - start))
        if self.mask:
            self.mask.write(np.ones(len(ids), np.uint8) if mask is None else mask.tobytes())
        if len(ends):
            places = self.tokens + ends
            self.docs.write(places.astype(np.uint64).tobytes())
            self.longest = max(self.longest, int(np.diff(places, prepend=self.began).max()))
            self.began = int(places[-1])
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.documents += len(ends)

    def close(self):
        """Write the sidecar; where there are no tokens no file is left."""
        for file in (self.file, self.docs, self.mask):
            if file:
                file.close()
        if not self.tokens:
            os.remove(self.path)
            os.remove(f"{self.path}.docs")
            return
        meta = dict(self.meta, dtype=str(self.dtype), tokens=self.tokens, bytes=self.bytes,
                    documents=self.documents, checksum=self.sha.hexdigest())  # fmt: skip
        Path(f"{self.path}.json").write_text(json.dumps(meta, indent=1) + "\n")


def write_tokens(path: Path, documents: list[bytes]):
    """A byte-level token file of whole documents."""
    writer = TokenWriter(path, 257, tokenizer="bytes", end_of_text=BYTES_END_OF_TEXT)
    for document in documents:
        ids = np.append(np.frombuffer(document, np.uint8).astype(np.uint16), BYTES_END_OF_TEXT)
        writer.add(ids, np.array([len(ids)]), None, len(document))
    writer.close()


def stdlib() -> str:
    """Folder with the source of Python's standard library as bytes; made at the first call.

    Every machine that has Python has it, so that a first run needs no download. One file in
    twenty, picked by a hash of its name, is for validation.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steady"
    python = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    folder = cache / f"stdlib-2-{python}"
    if folder.exists():
        return str(folder)
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {"train": [], "val": []}
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - skip)
        for file in sorted(Path(directory) / name for name in names if name.endswith(".py")):
            name = file.relative_to(root).as_posix().encode()
            documents["val" if share_of(name, hashlib.sha256) < 13 / 256 else "train"].append(
                file.read_bytes()
            )
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache))
    for split, texts in documents.items():
        write_tokens(building / f"{split}.bin", texts)
    try:
        building.rename(folder)  # all of it appears at once, also when two processes do this
    except OSError:
        shutil.rmtree(building)
    return str(folder)


def share_of(text: bytes, digest=hashlib.blake2b) -> float:
    """A number from 0 to 1 that depends on the text alone: where a document belongs."""
    return int.from_bytes(digest(text).digest()[:8], "big") / 2**64


# --- reading ---------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Some of one input file, on its way to be tokenized."""

    file: str
    kind: str  # "text": a piece of one document; "lines": JSON objects; "rows": dicts
    data: bytes | list
    first: int  # number of the first line or row, from 1 on; byte offset of a text
    split: str | None = None  # of a text; else each document has its own
    ends: bool = True  # whether the document of a text ends here
    read: float = 0.0  # bytes of the input file so far


def find_inputs(inputs: list[str], out: Path) -> list[Path]:
    """The files that are named, in folders or by patterns, sorted within each."""
    found = {}
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = (p for p in path.rglob("*") if kind_of(p) and p.is_file())
            files = sorted(p for p in inside if out.resolve() not in p.resolve().parents)
        elif path.exists():
            files = [path]
        else:
            files = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        if not files:
            raise ConfigError(f"{name}: no such file, or nothing in it that ends in "
                              f"{' '.join(SUFFIXES)}, {' or '.join(PACKED)} after it")  # fmt: skip
        for file in files:
            if not kind_of(file):
                raise ConfigError(f"{file}: expected a name that ends in {' '.join(SUFFIXES)}")
            found[file] = None
    return list(found)


def kind_of(path: Path) -> str | None:
    suffix = path.suffixes[-2] if path.suffix in PACKED and len(path.suffixes) > 1 else path.suffix
    if suffix == ".parquet":
        return "rows" if path.suffix == suffix else None
    return {".txt": "text", ".md": "text", ".jsonl": "lines"}.get(suffix)


def unpacked(path: Path, raw):
    """The file with its compression undone."""
    if path.suffix == ".gz":
        return gzip.open(raw)
    if path.suffix == ".zst":
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            try:
                import zstandard as zstd
            except ImportError:
                raise ConfigError(f"{path}: needs zstandard: pip install zstandard") from None
        return io.BufferedReader(zstd.open(raw, "rb"))
    return raw


def read_chunks(files: list[Path], options: Options) -> Iterator[Chunk]:
    before = 0  # bytes of the files that are done
    for path in files:
        kind = kind_of(path)
        if kind == "rows":
            for chunk in read_parquet(path, options):
                yield chunk._replace(read=before + chunk.read)
        else:
            with open(path, "rb") as raw, unpacked(path, raw) as file:
                if kind == "lines":
                    chunks = read_lines(path, file)
                else:
                    large = len(files) == 1 or path.stat().st_size >= CUT_BYTES
                    cut = large and file is raw and options.val_fraction > 0
                    chunks = read_text(path, file, cut, options)
                try:
                    for chunk in chunks:
                        yield chunk._replace(read=before + raw.tell())
                except Exception as e:  # each codec has errors of its own
                    if file is raw:
                        raise
                    told = str(e) or type(e).__name__
                    raise ConfigError(f"{path}: cannot be unpacked: {told}") from None
        before += path.stat().st_size


def read_lines(path: Path, file) -> Iterator[Chunk]:
    first = 1
    while lines := file.readlines(CHUNK_BYTES):
        yield Chunk(str(path), "lines", lines, first)
        first += len(lines)


def read_text(path: Path, file, may_cut: bool, options: Options) -> Iterator[Chunk]:
    """Pieces of one document: of two where the end of the file is for validation."""
    cut = line_after(file, path.stat().st_size * (1 - options.val_fraction)) if may_cut else None
    if cut is not None:
        yield from pieces(path, file, 0, cut, "train")
        yield from pieces(path, file, cut, None, "val")
    else:
        val = not may_cut and share_of(path.name.encode()) < options.val_fraction
        yield from pieces(path, file, 0, None, "val" if val else "train")


def line_after(file, place: float) -> int | None:
    """The first byte from `place` on that begins a line and is no space."""
    file.seek(int(place))
    file.readline()
    while (first := file.read(1)).isspace():
        file.readline()
    at = file.tell() - 1
    file.seek(0)
    return at if first else None


def pieces(path: Path, file, at: int, stop: int | None, split: str) -> Iterator[Chunk]:
    """The bytes from `at`, where file is, to stop, cut after line ends with no space around them.

    There no tokenizer in use makes one token of what comes before and after, so that the pieces
    give the tokens of the whole.
    """
    block, more = b"", True
    while more:
        left = CHUNK_BYTES if stop is None else stop - at - len(block)
        more = file.read(min(CHUNK_BYTES, left))
        block += more
        end = piece_end(block) if more else len(block)
        if end:
            yield Chunk(str(path), "text", block[:end], at, split, ends=not more)
        at, block = at + end, block[end:]


def piece_end(block: bytes) -> int:
    """After the last line end with no space on either side of it; 0: there is none yet."""
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


def read_parquet(path: Path, options: Options) -> Iterator[Chunk]:
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError:
        raise ConfigError(f"{path}: needs pyarrow: pip install pyarrow") from None
    try:
        # pages as they are needed, not whole row groups
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        names, kinds = file.schema_arrow.names, ([options.text_field], *CONVERSATIONS)
        columns = next((kind for kind in kinds if set(kind) <= set(names)), None)
        if columns is None:
            raise ConfigError(f"{path}: columns {', '.join(names)}; expected "
                              f"{options.text_field} (see --text_field), prompt and response, "
                              "or messages")  # fmt: skip
        rows, size = max(1, file.metadata.num_rows), path.stat().st_size
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        row_bytes = sum(group.total_byte_size for group in groups) / rows
        batch_size = int(min(10_000, max(1, CHUNK_BYTES / max(1.0, row_bytes))))
        first = 1
        for batch in file.iter_batches(batch_size, columns=list(columns), use_threads=False):
            data = batch.to_pylist()
            read = size * (first + len(data) - 1) / rows
            yield Chunk(str(path), "rows", data, first, read=read)
            first += len(data)
    except (ArrowException, OSError) as e:
        raise ConfigError(f"{path}: not Parquet that can be read: {e}") from None


# --- tokenizing ------------------------------------------------------------------------------

CONVERSATIONS = (("prompt", "response"), ("messages",))
Part = tuple[str, bool]  # text, and whether the loss counts it


class Encoded(NamedTuple):
    split: str
    ids: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None
    bytes: int


class Encoder:
    """Chunks to token ids; made once in each process.

    folder: of the tokenizer, None for "bytes".
    """

    def __init__(self, folder: str | None, options: Options):
        self.folder, self.options, self.tokenizer, self.prefix = folder, options, None, []
        self.end, self.vocab_size = BYTES_END_OF_TEXT, 257
        if folder:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
            self.tokenizer = load_tokenizer(folder)
            self.end = self.tokenizer.eos_token_id
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            start = self.tokenizer.bos_token_id
            if start is not None and self.tokenizer("")["input_ids"][:1] == [start]:
                self.prefix = [start]  # a tokenizer that begins every text with it, as Llama's

    def __call__(self, chunk: Chunk) -> tuple[list[Encoded], int]:
        """What to write, and the number of lines that were left out."""
        documents, skipped = self.documents(chunk)
        out = []
        for split in ("train", "val"):
            mine = [parts for s, parts in documents if s == split]
            if mine:
                whole = chunk.kind != "text"
                out.append(Encoded(split, *self.encode(mine, whole, chunk.first == 0, chunk.ends)))
        return out, skipped

    def documents(self, chunk: Chunk) -> tuple[list[tuple[str, list[Part]]], int]:
        """(split, parts) of each, and how many lines were left out because they cannot be read.

        Raises ConfigError with the number of the line where those are not to be left out.
        """
        if chunk.kind == "text":
            if self.tokenizer is None:  # any bytes will do
                return [(chunk.split, [(chunk.data, True)])], 0
            try:
                return [(chunk.split, [(chunk.data.decode(), True)])], 0
            except UnicodeDecodeError as e:
                if self.options.skip_bad:
                    text = chunk.data.decode(errors="replace")
                    return [(chunk.split, [(text, True)])], 1
                raise ConfigError(f"{chunk.file}: not UTF-8 at byte {chunk.first + e.start:,}; "
                                  "--skip_bad puts � in its place") from None  # fmt: skip
        out, skipped = [], 0
        for number, item in enumerate(chunk.data, chunk.first):
            if chunk.kind == "lines" and not item.strip():
                continue
            try:
                record = json.loads(item) if chunk.kind == "lines" else item
                parts = [(text, counts) for text, counts in self.parts(record) if text]
                key = "\0".join(text for text, _ in parts).encode()
            except ConfigError:
                raise
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                if not self.options.skip_bad:
                    raise ConfigError(f"{chunk.file}:{number}: {e}; --skip_bad leaves such "
                                      "lines out") from None  # fmt: skip
                skipped += 1
                continue
            if parts:
                val = share_of(key) < self.options.val_fraction
                out.append(("val" if val else "train", parts))
        return out, skipped

    def parts(self, record) -> list[Part]:
        """Raises ValueError where it is none of the kinds that are known."""
        if not isinstance(record, dict):
            raise ValueError("expected an object with keys")
        field = self.options.text_field
        if field in record:
            parts = [(record[field], True)]
        elif "prompt" in record and "response" in record:
            parts = [(record["prompt"], False), (record["response"], True)]
        elif "messages" in record:
            parts = self.chat(record["messages"])
        else:
            raise ValueError(f"has {', '.join(map(str, record)) or 'no key'}; expected {field} "
                             "(see --text_field), prompt and response, or messages")  # fmt: skip
        for text, _ in parts:
            if not isinstance(text, str):
                raise ValueError(f"expected text, found {type(text).__name__}")
        return parts

    def chat(self, messages: list[dict]) -> list[Part]:
        """A conversation as the tokenizer's template writes it; what assistants say counts.

        A reply begins where the template, asked for the next one, would leave off.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ConfigError("messages need a --tokenizer that has a chat template")
        from jinja2 import TemplateError

        def written(n: int, reply_follows: bool = False) -> str:
            try:
                return self.tokenizer.apply_chat_template(
                    messages[:n], tokenize=False, add_generation_prompt=reply_follows
                )
            except TemplateError as e:
                raise ValueError(f"the chat template refuses it: {e}") from None

        whole, parts, done = written(len(messages)), [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i == 0:  # a greeting answers nobody
                continue
            before, after = written(i, reply_follows=True), written(i + 1)
            if i + 1 == len(messages):
                after = whole
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError("the chat template writes earlier turns differently when more "
                                 "follow, so that replies cannot be told from prompts")  # fmt: skip
            parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        parts.append((whole[done:], False))
        text, counted = next(part for part in reversed(parts) if part[0])
        if text.rstrip().endswith(self.tokenizer.eos_token):  # then the document ends there
            return [part for part in parts if part[0]][:-1] + [(text.rstrip(), counted)]
        return parts

    def encode(self, documents: list[list[Part]], whole: bool, begins: bool, ends: bool):
        """(ids, ends, mask, bytes) of documents, or, where not whole, of a piece of one."""
        parts = [part for document in documents for part in document]
        if self.tokenizer is None:
            texts = [text if isinstance(text, bytes) else text.encode() for text, _ in parts]
            n_bytes = sum(map(len, texts))
            encoded = [np.frombuffer(text, np.uint8) for text in texts]
        else:
            texts = [text for text, _ in parts]
            n_bytes = sum(len(text.encode()) for text in texts)
            encoded = encode_batch(self.tokenizer, texts)
        pieces, counts, lengths, i = [], [], [], 0
        for document in documents:
            mine = [(encoded[i + j], counted) for j, (_, counted) in enumerate(document)]
            i += len(document)
            if self.prefix and (whole or begins) and list(mine[0][0][:1]) != self.prefix:
                mine.insert(0, (self.prefix, mine[0][1]))
            if (whole or ends) and list(mine[-1][0][-1:]) != [self.end]:
                mine.append(([self.end], mine[-1][1]))
            pieces += [ids for ids, _ in mine]
            counts += [counted for _, counted in mine]
            lengths.append(sum(len(ids) for ids, _ in mine))
        sizes = [len(ids) for ids in pieces]
        if self.tokenizer is None:
            ids = np.concatenate(pieces)
        else:
            ids = np.fromiter(itertools.chain.from_iterable(pieces), np.uint32, sum(sizes))
        mask = None if all(counts) else np.repeat(np.array(counts, np.uint8), sizes)
        where = np.cumsum(lengths) if whole or ends else np.empty(0, int)
        return ids, where, mask, n_bytes


def load_tokenizer(name: str, needs_end: bool = True):
    """Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as e:  # of transformers, tokenizers and the hub
        raise ConfigError(f"tokenizer {name}: cannot be loaded: {str(e).splitlines()[0]}") from e
    if needs_end and tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer {name}: has no end-of-text (eos_token)")
    return tokenizer


def encode_batch(tokenizer, texts: list[str]) -> list[list[int]]:
    if not tokenizer.is_fast:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    fast = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in fast]


def train_tokenizer(files: list[Path], options: Options, folder: Path):
    """A byte-level BPE of options.train_tokenizer ids, saved so that AutoTokenizer loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if options.train_tokenizer <= len(alphabet):
        raise ConfigError(f"--train_tokenizer {options.train_tokenizer}: expected more than "
                          f"{len(alphabet)}, the bytes and end-of-text")  # fmt: skip
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_tokenizer, special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet, show_progress=False,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in files)
    every = -(-size // TRAINING_BYTES)
    reader = Encoder(None, options)

    def texts():
        with progress(size, "reading to train the tokenizer") as bar:
            for chunk in itertools.islice(read_chunks(files, options), 0, None, every):
                if chunk.kind == "text":
                    yield [chunk.data.decode(errors="replace")]
                else:
                    yield [text for _, parts in reader.documents(chunk)[0] for text, _ in parts]
                bar.update(int(chunk.read) - bar.n)

    bpe.train_from_iterator(texts(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def progress(total: int, what: str):
    """A bar over bytes of input for what takes longer than two seconds; few lines into a file."""
    from tqdm import tqdm

    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2, mininterval=every)


# --- all of it -------------------------------------------------------------------------------

_encoder = None  # a process that is forked has it from its parent


def start_worker(folder: str | None, options: Options):
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that reads and writes ends this one
    _encoder = _encoder or Encoder(folder, options)


def encode_in_worker(chunk: Chunk):
    return _encoder(chunk)


def encode_all(chunks: Iterator[Chunk], encoder: Encoder, workers: int):
    """(chunk, what became of it) in order; as many chunks at once as keeps the workers busy."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    global _encoder
    _encoder = encoder
    with ProcessPoolExecutor(
        workers, initializer=start_worker, initargs=(encoder.folder, encoder.options)
    ) as pool:
        try:
            pending = deque()
            for chunk in chunks:
                pending.append((chunk, pool.submit(encode_in_worker, chunk)))
                if len(pending) > 2 * workers:
                    done, result = pending.popleft()
                    yield done, result.result()
            for done, result in pending:
                yield done, result.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def prepare(inputs: list[str], options: Options) -> str:
    """Write the dataset; returns a summary. Raises ConfigError."""
    if not options.out:
        raise ConfigError("--out DIR: expected, to write to")
    if not 0 <= options.val_fraction < 1:
        raise ConfigError(f"--val_fraction {options.val_fraction}: expected at least 0, below 1")
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: expected at least 1")
    if options.train_tokenizer and options.tokenizer != "bytes":
        raise ConfigError("--tokenizer and --train_tokenizer exclude one another")
    began, out = time.time(), Path(options.out).expanduser()
    files = find_inputs(inputs, out)
    draft = out / ".preparing"
    shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
    try:
        draft.mkdir(parents=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.strerror}") from None
    try:
        text = write_dataset(files, options, draft)
        publish(draft, out)
    except OSError as e:
        raise ConfigError(f"{e.filename or out}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return f"{text}\nseconds          {time.time() - began:.1f}\nin               {out}"


def write_dataset(files: list[Path], options: Options, draft: Path) -> str:
    folder, name = None, options.tokenizer
    if options.train_tokenizer or options.tokenizer != "bytes":
        folder = draft / "tokenizer"
        if options.train_tokenizer:
            train_tokenizer(files, options, folder)
            name = f"bpe-{options.train_tokenizer}"
        else:
            load_tokenizer(options.tokenizer).save_pretrained(folder)
        whole = b"".join(p.read_bytes() for p in sorted(folder.glob("*token*.json")))
        # by the hash two data sets know that they have the same one
        name = f"{Path(name).name}@{hashlib.sha256(whole).hexdigest()[:12]}"
    encoder = Encoder(folder and str(folder), options)
    writers = {
        split: TokenWriter(draft / f"{split}.bin", encoder.vocab_size, tokenizer=name,
                           end_of_text=encoder.end) for split in ("train", "val")
    }  # fmt: skip
    skipped, total = 0, sum(file.stat().st_size for file in files)
    workers = options.workers or usable_cores()
    chunks = encode_all(read_chunks(files, options), encoder, workers)
    with progress(total, "tokens") as bar:
        for chunk, (found, bad) in chunks:
            for split, *rest in found:
                writers[split].add(*rest)
            skipped += bad
            bar.update(int(chunk.read) - bar.n)
    train, val = writers.values()
    if not train.tokens:
        raise ConfigError(f"{files[0]}{' …' * (len(files) > 1)}: no document to train on")
    for writer in (train, val):
        writer.close()
    both = f"{train.documents:,} + {val.documents:,}"
    lines = [
        f"documents        {both} (training + validation)",
        f"tokens           {train.tokens:,} + {val.tokens:,} as {train.dtype}, "
        f"vocabulary {encoder.vocab_size:,} ({name})",
        f"bytes            {train.bytes:,} + {val.bytes:,}",
        f"bytes a token    {(train.bytes + val.bytes) / (train.tokens + val.tokens):.3f}",
        f"longest document {max(train.longest, val.longest):,} tokens",
    ]
    if skipped:
        lines.append(f"left out         {skipped:,} lines that cannot be read")
    if options.val_fraction and not val.tokens:
        lines.append("no document fell to validation: try a larger --val_fraction")
    return "\n".join(lines)


def publish(draft: Path, out: Path):
    """Put the new files in place of the old; until the last is there no training run takes any."""
    for split in ("train", "val"):
        for suffix in ("", ".json", ".docs", ".mask"):
            (out / f"{split}.bin{suffix}").unlink(missing_ok=True)
    shutil.rmtree(out / "tokenizer", ignore_errors=True)
    for new in sorted(draft.iterdir(), key=lambda p: (p.suffix == ".bin", p.name != "val.bin")):
        new.rename(out / new.name)
