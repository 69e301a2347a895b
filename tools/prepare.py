"""python data.py INPUT… --out DIR: text, JSONL and Parquet to token files.

DIR is then a folder that --data takes:

    train.bin, val.bin   token ids, one document after another, each ended by end-of-text
    train.bin.json       what they are: tokenizer, vocabulary, type, counts, checksum
    train.bin.docs       uint64 [documents + 1]: the token each document begins at, and the end
    train.bin.mask       uint8 for each token, 0 where it is a prompt; only where there are prompts
    tokenizer/           what transformers.AutoTokenizer loads

One process reads chunks of the input, others tokenize them, and the first writes the results in the
order of the input, so the output does not depend on how many there are. Memory holds only
the chunks in flight.
"""

import contextlib
import gzip
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steady.cli import ConfigError, check_bounds, make_parser, option, read_flags, run_command
from steady.device import usable_cores
from steady.tokens import (
    BYTES_END_OF_TEXT,
    TokenWriter,
    byte_level_bpe,
    copy_tokenizer,
    delete_tokenizer,
    load_tokenizer,
    share_of,
    tokenizer_files,
)
from tools.chat import Part, chat_documents
from tools.inputs import find_inputs, kind_of, shorten
from tools.show import show

CONVERSATIONS = (("prompt", "response"), ("messages",))  # columns, or keys, that hold one
MAX_COUNTS = 1000  # names of ignored keys and reasons that are counted
CHUNK_BYTES = 1 << 18  # of input that are read, tokenized and written at a time
CUT_BYTES = 100_000  # a text file of this size, or the only one, is cut in two
LONGEST_LINE = 1 << 24  # bytes; a text without line ends is cut there
TRAINING_BYTES = 1 << 30  # of input, at most, that a tokenizer is trained on

USAGE = """INPUT [INPUT ...] --out DIR [--option value ...]
       data.py show RUN_DIR STEP    print the samples that a run had in one step"""
ABOUT = "Turn text, JSONL (.gz, .zst too) and Parquet files, folders or patterns into token files."


@dataclass
class Options:
    out: str = option(None, "folder to write; what it held of train.bin and val.bin is replaced")
    tokenizer: str = option(
        "bytes", "bytes, or what transformers.AutoTokenizer takes: a local folder or a hub name")
    train_tokenizer: int | None = option(
        None, "train a byte-level BPE tokenizer of this many ids on the input (on 1 GB of it, "
        "spread evenly, where there is more)", metavar="VOCAB_SIZE", above=256)
    val_fraction: float = option(
        0.01, "share for validation: of documents, and of a text file of 100 kB or more its end",
        at_least=0, below=1)
    text_field: str = option("text", "key or column of a document's text")
    workers: int | None = option(
        None, "processes that tokenize (default: one a core)", at_least=1)
    skip_bad: bool = option(False, "leave out lines that cannot be read, and count them")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run_command("data.py", prepare_or_show, argv, "interrupted: nothing was changed")


def prepare_or_show(argv: list[str]):
    if argv[:1] == ["show"]:
        if len(argv) != 3 or not argv[2].isdecimal():
            raise ConfigError("expected: data.py show RUN_DIR STEP, the number of an update")
        show(argv[1], int(argv[2]))
        return
    parser = make_parser(Options, "data.py", USAGE, ABOUT)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="to be turned into tokens")
    given = vars(read_flags(parser, argv))
    print(prepare(given.pop("inputs"), Options(**given)))


# --- the dataset -----------------------------------------------------------------------------


def prepare(inputs: list[str], options: Options) -> str:
    """Write the dataset; returns a summary. Raises ConfigError."""
    if not options.out:
        raise ConfigError("--out DIR: expected a folder to write to")
    check_bounds(options)
    if options.train_tokenizer and options.tokenizer != "bytes":
        raise ConfigError("--tokenizer and --train_tokenizer exclude one another")
    began, out = time.time(), Path(options.out).expanduser()
    files, skipped = find_inputs(inputs, out)
    if options.train_tokenizer or options.tokenizer != "bytes":
        tokenizer_files(out / "tokenizer")  # refuses one that is not ours
    draft = out / ".preparing"
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    try:
        draft.mkdir(parents=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.strerror}") from None
    try:
        summary = write_dataset(files, options, draft)
        publish(draft, out)
    except OSError as e:
        raise ConfigError(f"{e.filename or out}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if told := str(skipped):
        summary += f"\nskipped          {told}"
    return f"{summary}\nseconds          {time.time() - began:.1f}\nin               {out}"


def write_dataset(files: list[Path], options: Options, draft: Path) -> str:
    """Write all files into `draft`; returns a summary."""
    folder, name = find_tokenizer(files, options, draft / "tokenizer")
    encoder = Encoder(folder, options)
    writers = {
        split: TokenWriter(draft / f"{split}.bin", encoder.vocab_size, tokenizer=name,
                           end_of_text=encoder.end) for split in ("train", "val")
    }
    counts = Counter()  # of records: what was done with them
    with progress(files, "tokens") as bar:
        for encoded, counted, read in encode_all(read_chunks(files, options), encoder):
            for split, documents in encoded.items():
                writers[split].add(*documents)
            for what, n in counted.items():
                if what in counts or len(counts) < MAX_COUNTS:
                    counts[what] += n
            bar.update(read)
    train, val = writers.values()
    if not train.tokens:
        raise ConfigError(f"{files[0]}{' …' * (len(files) > 1)}: no document to train on")
    train.close()
    val.close()
    lines = [
        f"documents        {train.documents:,} + {val.documents:,} (training + validation)",
        f"tokens           {train.tokens:,} + {val.tokens:,} as {train.dtype}, "
        f"vocabulary {encoder.vocab_size:,} ({name})",
        f"bytes            {train.bytes:,} + {val.bytes:,}",
        f"bytes a token    {(train.bytes + val.bytes) / (train.tokens + val.tokens):.3f}",
        f"longest document {max(train.longest, val.longest):,} tokens",
    ]
    lines += summarize(counts)
    if options.val_fraction and not val.tokens:
        lines.append("no document was drawn for validation: try a larger --val_fraction")
    return "\n".join(lines)


def summarize(counts: Counter) -> list[str]:
    """What was done with records that were not simply read."""
    def of(kind: str) -> Counter:
        return Counter({name: n for (of, name), n in counts.items() if of == kind})

    def listed(named: Counter) -> str:
        return shorten([f"{name} ({n:,})" for name, n in named.most_common()])

    left_out, chats, ignored, lines = of("left out"), of("chat"), of("ignored"), []
    if left_out:
        lines.append(f"left out         {left_out.total():,} lines that cannot be read: "
                     f"{listed(left_out)}")
    if chats["marks"]:
        lines.append(f"conversations    {chats['marks']:,} with the replies that the chat template "
                     "marks as generated")
    if chats["turns"]:
        lines.append(f"conversations    {chats['turns']:,} as one document for each reply, since "
                     "the chat template writes earlier turns differently when more follow")
    if ignored:
        lines.append(f"ignored keys     {listed(ignored)}")
    return lines


def publish(draft: Path, out: Path):
    """Replace the old files by the new, train.bin last: without it no run takes the others."""
    for split in ("train", "val"):
        for suffix in ("", ".json", ".docs", ".mask"):
            (out / f"{split}.bin{suffix}").unlink(missing_ok=True)
    with contextlib.suppress(ConfigError):  # not ours: --tokenizer bytes has no use for it
        delete_tokenizer(out / "tokenizer")
    if (draft / "tokenizer").exists():
        copy_tokenizer(draft / "tokenizer", out / "tokenizer")
    files = [path for path in draft.iterdir() if path.is_file()]
    for new in sorted(files, key=lambda p: (p.suffix == ".bin", p.name != "val.bin")):
        new.rename(out / new.name)


def progress(files: list[Path], what: str):
    """A bar over the bytes of input, after two seconds; rarely updated if it goes to a file."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in files)
    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2, mininterval=every)


# --- reading ---------------------------------------------------------------------------------


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


def read_chunks(files: list[Path], options: Options) -> Iterator[Chunk]:
    """All files in pieces of about CHUNK_BYTES. Raises ConfigError."""
    for path in files:
        if kind_of(path) == "rows":
            yield from read_parquet(path, options.text_field)
        else:
            large = len(files) == 1 or path.stat().st_size >= CUT_BYTES
            yield from read_file(path, large, options.val_fraction)


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
        names, kinds = file.schema_arrow.names, ([text_field], *CONVERSATIONS)
        columns = next((kind for kind in kinds if set(kind) <= set(names)), None)
        if columns is None:
            raise ConfigError(f"{path}: columns {', '.join(names)}; expected {text_field} "
                              "(see --text_field), prompt and response, or messages")
        columns = [*columns, *(["tools"] if columns == ("messages",) and "tools" in names else [])]
        ignored = tuple(name for name in names if name not in columns)
        about, first = file.metadata, 1
        n_bytes = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        batch_size = min(10_000, max(1, CHUNK_BYTES * about.num_rows // max(1, n_bytes)))
        for batch in file.iter_batches(batch_size, columns=columns, use_threads=False):
            data = batch.to_pylist()
            read = path.stat().st_size * len(data) / about.num_rows
            yield Chunk(str(path), "rows", data, first, read=read, ignored=ignored)
            first += len(data)
    except (errors, OSError) as e:
        raise ConfigError(f"{path}: cannot be read as Parquet: {e}") from None


# --- tokenizing ------------------------------------------------------------------------------

class Encoder:
    """Turns chunks into token ids. folder: of the tokenizer; None for "bytes"."""

    def __init__(self, folder: Path | None, options: Options):
        self.options, self.tokenizer, self.prefix = options, None, []
        self.end, self.vocab_size = BYTES_END_OF_TEXT, 257
        if folder:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
            self.tokenizer = load_tokenizer(str(folder))
            self.end = self.tokenizer.eos_token_id
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            start = self.tokenizer.bos_token_id
            if start is not None and self.tokenizer("")["input_ids"][:1] == [start]:
                self.prefix = [start]  # a tokenizer that begins every text with it, as Llama's

    def __call__(self, chunk: Chunk) -> tuple[dict[str, tuple], Counter, float]:
        """(split → what TokenWriter.add takes, counts, chunk.read). Raises ConfigError."""
        documents, counts = self.documents(chunk)
        encoded = {}
        for split in {split for split, _ in documents}:
            mine = [parts for of, parts in documents if of == split]
            encoded[split] = self.encode(mine, chunk.begins, chunk.ends)
        return encoded, counts, chunk.read

    def documents(self, chunk: Chunk) -> tuple[list[tuple[str, list[Part]]], Counter]:
        """(split, parts) of each document, and counts for `summarize`.

        Raises ConfigError with the number of such a line, unless --skip_bad.
        """
        if chunk.kind == "text":
            text, counts = chunk.data, Counter()
            if self.tokenizer:  # to "bytes" any bytes will do
                try:
                    text = chunk.data.decode()
                except UnicodeDecodeError as e:
                    if not self.options.skip_bad:
                        raise ConfigError(f"{chunk.file}: not UTF-8 at byte "
                                          f"{chunk.first + e.start:,}; --skip_bad puts � in its "
                                          "place") from None
                    text = chunk.data.decode(errors="replace")
                    counts["left out", "not UTF-8"] += 1
            return [(chunk.split, [(text, True)])], counts
        found = []
        counts = Counter({("ignored", name): len(chunk.data) for name in chunk.ignored})
        for number, item in enumerate(chunk.data, chunk.first):
            if chunk.kind == "lines" and not item.strip():
                continue
            try:
                record = json.loads(item) if chunk.kind == "lines" else item
                documents, how, used = self.read(record)
                key = "\0".join(text for parts in documents for text, _ in parts).encode()
            except ConfigError:
                raise
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                if not self.options.skip_bad:
                    raise ConfigError(f"{chunk.file}:{number}: {e}; --skip_bad leaves such "
                                      "lines out") from None
                counts["left out", reason(e)] += 1
                continue
            counts.update(("ignored", name) for name in record if name not in used)
            if how:
                counts["chat", how] += 1
            split = "val" if share_of(key) < self.options.val_fraction else "train"
            found += [(split, parts) for parts in documents if parts]
        return found, counts

    def read(self, record) -> tuple[list[list[Part]], str, tuple[str, ...]]:
        """The documents of a record, how a conversation was written, and the keys it was read from.

        Documents have no empty parts. Raises ValueError for a record of an unknown kind.
        """
        if not isinstance(record, dict):
            raise ValueError("expected an object with keys")
        field, how = self.options.text_field, ""
        if field in record:
            used, documents = (field,), [[(record[field], True)]]
        elif "prompt" in record and "response" in record:
            used = "prompt", "response"
            documents = [[(record["prompt"], False), (record["response"], True)]]
        elif "messages" in record:
            used = "messages", "tools"
            documents, how = chat_documents(self.tokenizer, record)
        else:
            raise ValueError(f"has {', '.join(map(str, record)) or 'no key'}; expected {field} "
                             "(see --text_field), prompt and response, or messages")
        for text, _ in itertools.chain(*documents):
            if not isinstance(text, str):
                raise ValueError(f"expected text, found {type(text).__name__}")
        return [[part for part in parts if part[0]] for parts in documents], how, used

    def encode(self, documents: list[list[Part]], begins: bool, ends: bool) -> tuple:
        """(ids, ends, mask, bytes) for TokenWriter.add; no ends for a piece before the last."""
        texts = [text for parts in documents for text, _ in parts]
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        if self.tokenizer is None:
            encoded = iter([np.frombuffer(text, np.uint8) for text in raw])
        else:
            encoded = iter(encode_batch(self.tokenizer, texts))
        pieces, last = [], []  # (ids, counted); where in it each document ends
        for parts in documents:
            mine = [(next(encoded), counted) for _, counted in parts]
            if begins and self.prefix and list(mine[0][0][:1]) != self.prefix:
                mine.insert(0, (self.prefix, mine[0][1]))
            if ends and list(mine[-1][0][-1:]) != [self.end]:
                mine.append(([self.end], mine[-1][1]))
            pieces += mine
            last.append(len(pieces) - 1)
        sizes, counts = [len(ids) for ids, _ in pieces], [counted for _, counted in pieces]
        ids = np.concatenate([ids for ids, _ in pieces], dtype=np.uint32, casting="unsafe")
        mask = None if all(counts) else np.repeat(np.array(counts, np.uint8), sizes)
        return ids, np.cumsum(sizes)[last if ends else []], mask, sum(map(len, raw))


def reason(error: Exception) -> str:
    """Why a line was left out, in the same words for all lines of a kind."""
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    if isinstance(error, KeyError):
        return f"no {error}"
    return " ".join(str(error).split())[:100]


def encode_batch(tokenizer, texts: list[str]) -> list[list[int]]:
    if not tokenizer.is_fast:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    fast = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in fast]


def encode_all(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[tuple]:
    """Encode the chunks in several processes; yields the results in their order."""
    workers = encoder.options.workers or usable_cores()
    if workers == 1:
        yield from map(encoder, chunks)
        return
    pending = deque()
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(encoder,)) as pool:
        try:
            for chunk in chunks:
                pending.append(pool.submit(encode_in_worker, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def start_worker(encoder: Encoder):
    global worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker_encoder = encoder


def end_with_parent():
    """Killed, the parent cannot end its workers, which would wait for chunks forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(chunk: Chunk) -> tuple:
    return worker_encoder(chunk)


# --- the tokenizer ---------------------------------------------------------------------------


def find_tokenizer(files: list[Path], options: Options, folder: Path) -> tuple[Path | None, str]:
    """Train or copy the tokenizer into `folder`: (folder, or None for "bytes"; its name).

    The name ends in a hash, so that two datasets can be checked for the same tokenizer.
    """
    if options.train_tokenizer:
        train_tokenizer(files, options, folder)
        name = f"bpe-{options.train_tokenizer}"
    elif options.tokenizer == "bytes":
        return None, "bytes"
    else:
        load_tokenizer(options.tokenizer).save_pretrained(folder)
        name = Path(options.tokenizer).name
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*token*.json")))
    return folder, f"{name}@{hashlib.sha256(content).hexdigest()[:12]}"


def train_tokenizer(files: list[Path], options: Options, folder: Path):
    """A byte-level BPE of options.train_tokenizer ids, saved so that AutoTokenizer loads it."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = byte_level_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_tokenizer, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    every = max(1, -(-sum(file.stat().st_size for file in files) // TRAINING_BYTES))
    reader = Encoder(None, options)

    def texts():
        with progress(files, "reading to train the tokenizer") as bar:
            for chunk in itertools.islice(read_chunks(files, options), 0, None, every):
                if chunk.kind == "text":
                    yield [chunk.data.decode(errors="replace")]
                else:
                    yield [text for _, parts in reader.documents(chunk)[0] for text, _ in parts]
                bar.update(every * chunk.read)

    tokenizer.backend_tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save_pretrained(folder)
