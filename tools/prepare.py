"""python data.py INPUT… --out DIR: text, JSON, CSV, Parquet and Arrow to token files.

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
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from steady.checkpoints.run_dir import acquire_lock
from steady.guard.process import run_command
from steady.models.device import usable_cores
from steady.options import ConfigError, check_bounds, make_parser, option, read_flags
from steady.tokens.files import TokenWriter
from steady.tokens.tokenizers import (
    byte_level_bpe,
    copy_tokenizer,
    delete_tokenizer,
    load_tokenizer,
    require_ours,
)
from tools.encode import Encoder
from tools.inputs import Skipped, find_inputs, listed
from tools.read import Chunk, read_chunks, read_file
from tools.show import show

TRAINING_BYTES = 1 << 30  # of input, at most, that a tokenizer is trained on
# what words are counted in at a time, which takes a hundred times its size; ends before a space
COUNTED = re.compile(r".{1,16384}(?!\S)|.{1,16384}", re.DOTALL)
SUMMARY = {  # by what the encoder counts
    "left out": "left out         {n:,} lines that cannot be read: {names}",
    "replaced": "replaced         {n:,} times bytes that are not UTF-8 by �: {names}",
    "marks": "conversations    {n:,} with the replies that the chat template marks as generated",
    "turns": "conversations    {n:,} as one document for each reply, since the chat template "
             "writes earlier turns differently when more follow",
    "no reply": "without a reply  {n:,} documents, of which the loss counts nothing",
    "ignored": "ignored keys     {names}",
}

USAGE = """INPUT [INPUT ...] --out DIR [--option value ...]
       data.py show DIR N           print the first N samples; what the loss counts is marked
       data.py show RUN_DIR STEP    print the samples that a run had in one step"""
ABOUT = ("Turn text, JSON, CSV (.gz, .zst too), Parquet and Arrow files, folders or patterns into "
         "token files.")


@dataclass
class Options:
    out: str = option(None, "folder to write to; a train.bin and val.bin in it are replaced")
    tokenizer: str = option(
        "bytes", "bytes, or what transformers.AutoTokenizer takes: a local folder or a hub name")
    train_tokenizer: int | None = option(
        None, "train a byte-level BPE tokenizer of this many ids on the input (on 1 GB of it, "
        "spread evenly, where there is more)", metavar="VOCAB_SIZE", above=256, at_most=2**24)
    val_fraction: float = option(
        0.01, "share for validation: of documents, and of a text file of 100 kB or more its end",
        at_least=0, below=1)
    text_field: str = option("text", "key or column of a document's text")
    workers: int | None = option(
        None, "processes that tokenize (default: one per core)", at_least=1, at_most=1000)
    skip_bad: bool = option(False, "leave out lines and files that cannot be read, and count them")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run_command("data.py", prepare_or_show, argv, "interrupted: nothing was changed")


def prepare_or_show(argv: list[str]):
    if argv[:1] == ["show"] and not {"-h", "--help"} & {*argv}:
        if len(argv) != 3 or not argv[2].isdecimal():
            raise ConfigError("expected: data.py show DIR N, a number of samples, or data.py show "
                              "RUN_DIR STEP, the number of an update")
        show(argv[1], int(argv[2]))
        return
    parser = make_parser(Options, "data.py", USAGE, ABOUT)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder or pattern")
    given = vars(read_flags(parser, argv))
    print(prepare(given.pop("inputs"), Options(**given)))


# --- the dataset -----------------------------------------------------------------------------


def prepare(inputs: list[str], options: Options) -> str:
    """Write the dataset; returns a summary. Raises ConfigError."""
    if not options.out:
        raise ConfigError("--out DIR: expected a folder to write to")
    check_bounds(options)
    if options.train_tokenizer and options.tokenizer != "bytes":
        raise ConfigError("--tokenizer and --train_tokenizer exclude each other")
    began, out = time.time(), Path(options.out).expanduser()
    files, skipped = find_inputs(inputs, out)
    if options.train_tokenizer or options.tokenizer != "bytes":
        require_ours(out / "tokenizer")
    work, lock = claim(out)
    try:
        summary = write_dataset(files, options, work / "new", skipped)
        publish(work / "new", out)
    except OSError as e:
        raise ConfigError(f"{e.filename or out}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.close()
    if left := str(skipped):
        summary += f"\nskipped          {left}"
    return f"{summary}\nseconds          {time.time() - began:.1f}\nin               {out}"


def claim(out: Path):
    """(folder for drafts, with an empty `new` in it; its lock, which ends with this process).

    Raises ConfigError.
    """
    work = out / ".preparing"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(work, f"--out {out}")
        shutil.rmtree(work / "new", ignore_errors=True)  # of a process that was killed
        (work / "new").mkdir()
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.strerror}") from None
    return work, lock


def check(files: list[Path], encoder: Encoder):
    """Raise ConfigError now for a file that would stop the work later, as one with other columns.

    By its first document, or the first piece of a text. --skip_bad leaves it out when it is read.
    """
    for path in [] if encoder.options.skip_bad else files:
        for chunk in itertools.islice(read_file(path, encoder.options), 1):
            data = chunk.data if chunk.kind == "text" else chunk.data[:1]
            encoder.documents(chunk._replace(data=data))


def write_dataset(files: list[Path], options: Options, draft: Path, skipped: Skipped) -> str:
    """Write all files into `draft`; returns a summary."""
    folder, name = find_tokenizer(files, options, draft / "tokenizer", skipped)
    encoder = Encoder(folder, options)
    check(files, encoder)
    writers = {
        split: TokenWriter(draft / f"{split}.bin", encoder.vocab_size, tokenizer=name,
                           end_of_text=encoder.end) for split in ("train", "val")
    }
    counts = Counter()  # of records: what was done with them
    chunks = read_chunks(files, options, skipped.unreadable)
    with progress(files, "tokens") as bar, closing(encode_all(chunks, encoder)) as results:
        for encoded, counted, n_bytes in results:
            for split, arrays in encoded.items():
                writers[split].add(*arrays)
            counts.update(counted)
            bar.update(n_bytes)
    train, val = writers.values()
    inputs = f"{files[0]}{' …' * (len(files) > 1)}"
    if not train.tokens:
        raise ConfigError(f"{inputs}: no document to train on")
    if counts["no reply", "train"] == train.documents:
        raise ConfigError(f"{inputs}: no document to train on has a reply, so the loss would count "
                          "nothing; expected replies of an assistant")
    train.close()
    val.close()
    lines = [
        f"documents        {train.documents:,} + {val.documents:,} (training + validation)",
        f"tokens           {train.tokens:,} + {val.tokens:,} as {train.dtype}, "
        f"vocabulary {encoder.vocab_size:,} ({name})",
        f"bytes            {train.bytes:,} + {val.bytes:,}",
        f"bytes per token  {(train.bytes + val.bytes) / (train.tokens + val.tokens):.3f}",
        f"longest document {max(train.longest, val.longest):,} tokens",
    ]
    lines += summarize(+counts)
    if options.val_fraction and not val.tokens:
        lines.append("no document was drawn for validation: try a larger --val_fraction")
    return "\n".join(lines)


def summarize(counts: Counter) -> Iterator[str]:
    """What was done with records that were not simply read."""
    for kind, line in SUMMARY.items():
        mine = Counter({name: n for (of_kind, name), n in counts.items() if of_kind == kind})
        names = listed([f"{name} ({n:,})" for name, n in mine.most_common()])
        if mine:
            yield line.format(n=mine.total(), names=names)


def publish(draft: Path, out: Path):
    """Replace the old files by the new, train.bin last: without it no run takes the others."""
    for split in ("train", "val"):
        for suffix in ("", ".json", ".docs", ".mask"):
            (out / f"{split}.bin{suffix}").unlink(missing_ok=True)
    with contextlib.suppress(ConfigError):  # not ours: --tokenizer bytes has no use for it
        delete_tokenizer(out / "tokenizer")
    if (draft / "tokenizer").exists():
        copy_tokenizer(draft / "tokenizer", out / "tokenizer")
    files = draft.glob("*.bin*")
    for new in sorted(files, key=lambda p: (p.suffix == ".bin", p.name != "val.bin")):
        new.rename(out / new.name)


def progress(files: list[Path], what: str):
    """A bar over the bytes of input, after two seconds; rarely updated if it goes to a file."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in files)
    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2, mininterval=every)


# --- tokenizing ------------------------------------------------------------------------------


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
        except BrokenProcessPool:
            raise ConfigError("a tokenizing process was killed, perhaps for lack of memory: fewer "
                              "--workers need less") from None
        except BaseException:
            pool.shutdown(cancel_futures=True)  # not wait=False, which the interpreter's end races
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


def find_tokenizer(files: list[Path], options: Options, folder: Path,
                   skipped: Skipped) -> tuple[Path | None, str]:
    """Train or copy the tokenizer into `folder`: (folder, or None for "bytes"; its name).

    The name ends in a hash, so that two datasets can be checked for the same tokenizer.
    """
    if options.train_tokenizer:
        train_tokenizer(files, options, folder, skipped)
        name = f"bpe-{options.train_tokenizer}"
    elif options.tokenizer == "bytes":
        return None, "bytes"
    else:
        source = Path(options.tokenizer)
        if not source.exists():  # transformers would retry the hub for a minute, with warnings
            from steady.models.huggingface import fetch_files

            source = fetch_files(options.tokenizer, weights=False)
        load_tokenizer(str(source)).save_pretrained(folder)
        about = folder / "tokenizer_config.json"
        settings = json.loads(about.read_text("utf-8"))
        for name in ("is_local", "local_files_only"):  # where it was loaded from is no part of it
            settings.pop(name, None)
        about.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        name = Path(options.tokenizer).name
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*token*.json")))
    return folder, f"{name}@{hashlib.sha256(content).hexdigest()[:12]}"


def train_tokenizer(files: list[Path], options: Options, folder: Path, skipped: Skipped):
    """A byte-level BPE of options.train_tokenizer ids, saved so that AutoTokenizer loads it."""
    from tokenizers import models, pre_tokenizers, trainers

    reader = Encoder(None, options)
    check(files, reader)
    tokenizer = byte_level_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_tokenizer, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    every = max(1, -(-sum(file.stat().st_size for file in files) // TRAINING_BYTES))

    def texts():
        with progress(files, "reading to train the tokenizer") as bar:
            chunks = read_chunks(files, options, skipped.unreadable)
            for chunk in itertools.islice(chunks, 0, None, every):
                found = [text for document in reader.documents(chunk)[0]
                         for text, _ in document.parts]
                pieces = [piece for text in found for piece in COUNTED.findall(text)]
                for i in range(0, len(pieces), 64):  # it collects 256 of these lists
                    yield pieces[i : i + 64]
                bar.update(every * chunk.n_bytes)

    tokenizer.backend_tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save_pretrained(folder)
