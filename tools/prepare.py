"""python data.py INPUT… --out DIR: text, records and data sets to token files; see docs/data.md.

One process reads chunks of the input, others tokenize them, and the first writes the results in the
order of the input, whatever the number of processes. Memory holds only the chunks in flight.
"""

import hashlib
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from steady.checkpoints.disk import acquire_lock
from steady.guard.process import FORK, run_command
from steady.models.hub import fetch_files
from steady.options import ConfigError, check_bounds, make_parser, option, read_flags
from steady.tokens import tokenizers
from steady.tokens.files import TokenWriter
from steady.watch.proc import usable_cores
from tools.encode import IN_PIECES, UNKNOWN, Encoder
from tools.read import Chunk, find_inputs, read_chunks, read_file

TRAINING_BYTES = 1 << 30  # of input, to train a tokenizer on
LISTED = 8  # names of a kind, in the summary

USAGE = """INPUT [INPUT ...] --out DIR [--option value ...]
       data.py show DIR N           print the first N samples, marking the tokens in the loss
       data.py show RUN_DIR STEP    print the samples of one step of a run"""
ABOUT = ("Turn text, JSON, CSV (.gz, .zst too), Parquet and Arrow into token files: files, "
         "folders, patterns, or hf:OWNER/NAME[:CONFIG].")


@dataclass
class Options:
    out: str = option(None, "folder to write to; a train.bin and val.bin in it are replaced")
    tokenizer: str = option(
        "bytes", "bytes, or what transformers.AutoTokenizer takes: a local folder or a hub name")
    train_tokenizer: int | None = option(
        None, "train a byte-level BPE tokenizer of this many ids on the input (on 1 GB of it, "
        "spread evenly, if there is more)", metavar="VOCAB_SIZE", above=256, at_most=2**24)
    val_fraction: float = option(
        0.01, "share for validation: of documents, and of a text file of 100 kB or more its end",
        at_least=0, below=1)
    text_field: str | None = option(
        None, "key or column of a document's text (default: text, unless there is a chat)")
    workers: int | None = option(
        None, "processes that tokenize (default: one per core)", at_least=1, at_most=1000)
    split: str = option("train", "split of a hf: data set, or of a folder of several splits")
    limit: int | None = option(None, "records of each file or data set, at most", at_least=1)
    skip_bad: bool = option(False, "leave out lines and files that cannot be read, and count them")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run_command("data.py", prepare_or_show, argv, "interrupted: nothing was changed")


def prepare_or_show(argv: list[str]):
    if argv[:1] == ["show"] and not {"-h", "--help"} & {*argv}:
        if len(argv) != 3 or not argv[2].isdecimal():
            raise ConfigError("expected: data.py show DIR N, a number of samples, or data.py show "
                              "RUN_DIR STEP, the number of an update")
        from tools.show import show

        show(argv[1], int(argv[2]))
        return
    parser = make_parser(Options, "data.py", USAGE, ABOUT)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, pattern, hf:NAME")
    given = vars(read_flags(parser, argv))
    # without torch, unused by tokenizers, transformers starts 1.2 s sooner and takes 190 MB less
    sys.modules.setdefault("torch", None)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    print(prepare(given.pop("inputs"), Options(**given)))


# --- the dataset -----------------------------------------------------------------------------


def prepare(inputs: list[str], options: Options) -> str:
    """Write the dataset; returns a summary. Raises ConfigError."""
    check_bounds(options)
    if not options.out:
        raise ConfigError("--out DIR: expected a folder to write to")
    if options.train_tokenizer and options.tokenizer != "bytes":
        raise ConfigError("--tokenizer and --train_tokenizer exclude each other")
    out, counts = Path(options.out).expanduser(), Counter()
    files = find_inputs(inputs, out, counts)
    if options.train_tokenizer or options.tokenizer != "bytes":
        tokenizers.require_ours(out / "tokenizer")
    work = out / ".preparing"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with closing(acquire_lock(work, f"--out {out}")):
            try:
                shutil.rmtree(work / "new", ignore_errors=True)  # of a killed process
                (work / "new").mkdir()
                summary = write_dataset(files, options, work / "new", counts)
                publish(work / "new", out)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.filename or out}: {e.strerror}") from e
    return f"{summary}\nin               {out}"


def check(files: list[Path], encoder: Encoder):
    """Read the beginning of each file, unless --skip_bad. Raises ConfigError."""
    options = replace(encoder.options, limit=1, val_fraction=0.0)  # no search for a place to cut
    for path in [] if options.skip_bad else files:
        for chunk in itertools.islice(read_file(path, options), 1):
            encoder.documents(chunk)


def write_dataset(files: list[Path], options: Options, draft: Path, counts: Counter) -> str:
    """Write all files into `draft`; returns a summary. counts: of inputs skipped so far."""
    folder, name = find_tokenizer(files, options, draft / "tokenizer")
    encoder = Encoder(folder, options)
    check(files, encoder)
    writers = {split: TokenWriter(draft / f"{split}.bin", encoder.vocab_size, tokenizer=name,
                                  end_of_text=encoder.end) for split in ("train", "val")}
    bar = tqdm(desc="tokenized", unit="B", unit_scale=True, delay=2, mininterval=5)
    with bar, closing(encode_all(read_chunks(files, options, counts), encoder)) as results:
        for encoded, counted in results:
            for split, arrays in encoded.items():
                writers[split].add(*arrays)
            counts.update(counted)
            bar.update(sum(writer.bytes for writer in writers.values()) - bar.n)
    train, val = writers.values()
    if not train.tokens:
        drawn = f": the {val.documents:,} are drawn for validation; try another --val_fraction"
        raise ConfigError(f"{files[0]}: no document to train on{drawn if val.tokens else ''}")
    if counts["without a reply", "train"] == train.documents:
        raise ConfigError(f"{files[0]}: no document to train on has a reply, so the loss would "
                          "count nothing; expected replies of an assistant")
    for writer in writers.values():
        writer.close()
    lines = {
        "documents": f"{train.documents:,} + {val.documents:,} (training + validation)",
        "tokens": f"{train.tokens:,} + {val.tokens:,} as {train.dtype}, vocabulary "
        f"{encoder.vocab_size:,} ({name})",
        "bytes per token": f"{(train.bytes + val.bytes) / (train.tokens + val.tokens):.3f}",
    }
    if unknown := counts.pop(UNKNOWN, 0):
        lines[UNKNOWN] = f"{unknown:,} ({unknown / (train.tokens + val.tokens):.1%})"
    for kind in dict.fromkeys(kind for kind, _ in +counts):
        found = [f"{name} ({n:,})" for (k, name), n in (+counts).most_common() if k == kind]
        lines[kind] = ", ".join(found[:LISTED]) + " …" * (len(found) > LISTED)
    if options.val_fraction and not val.tokens:
        lines["validation"] = "no document was drawn for validation: try a larger --val_fraction"
    return "\n".join(f"{kind:16} {text}" for kind, text in lines.items())


def publish(draft: Path, out: Path):
    """Replace the old files, train.bin last: without it no run takes the others."""
    for split in ("train", "val"):
        for suffix in ("", ".json", ".docs", ".mask"):
            (out / f"{split}.bin{suffix}").unlink(missing_ok=True)
    with suppress(ConfigError):  # somebody else's, unused with --tokenizer bytes
        tokenizers.delete_tokenizer(out / "tokenizer")
    for new in sorted(draft.iterdir(), key=lambda p: (p.suffix == ".bin", p.name != "val.bin")):
        new.rename(out / new.name)


# --- tokenizing ------------------------------------------------------------------------------


def encode_all(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[tuple]:
    """Encode the chunks in several processes; yields the results in their order."""
    workers = encoder.options.workers or usable_cores()
    if workers == 1:
        yield from map(encoder, chunks)
        return
    context, pending = multiprocessing.get_context(FORK), deque()
    pool = ProcessPoolExecutor(workers, context, start_worker, (encoder,))
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
    finally:
        pool.shutdown(cancel_futures=True)  # wait=False would race with the exit


def start_worker(encoder: Encoder):
    global worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker_encoder = encoder


def end_with_parent():
    """Exit with a parent that was killed; workers would wait for chunks forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(chunk: Chunk) -> tuple:
    return worker_encoder(chunk)


# --- the tokenizer ---------------------------------------------------------------------------


def find_tokenizer(files: list[Path], options: Options, folder: Path) -> tuple[Path | None, str]:
    """Train or copy the tokenizer into `folder`: (folder, or None for "bytes"; name@hash)."""
    if options.train_tokenizer:
        train_tokenizer(files, options, folder)
        name = f"bpe-{options.train_tokenizer}"
    elif options.tokenizer == "bytes":
        return None, "bytes"
    else:
        # by its folder: by name, transformers retries the hub for a minute, with warnings
        tokenizers.keep_tokenizer(fetch_files(options.tokenizer, weights=False), folder)
        name = Path(options.tokenizer).name
    (folder / tokenizers.MADE).touch()
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*token*.json")))
    return folder, f"{name}@{hashlib.sha256(content).hexdigest()[:12]}"


def train_tokenizer(files: list[Path], options: Options, folder: Path):
    """A byte-level BPE of options.train_tokenizer ids, saved so that AutoTokenizer loads it."""
    from tokenizers import models, pre_tokenizers, trainers

    reader = Encoder(None, options)
    check(files, reader)
    tokenizer = tokenizers.byte_level_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_tokenizer, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    every = 1 + sum(file.stat().st_size for file in files if file.is_file()) // TRAINING_BYTES
    chunks = itertools.islice(read_chunks(files, options, Counter()), 0, None, every)
    texts = (text for chunk in chunks for document in reader.documents(chunk)[0]
             for text, _ in document.parts)
    tokenizer.backend_tokenizer.train_from_iterator(map(IN_PIECES.findall, texts), trainer)
    tokenizer.save_pretrained(folder)
    tokenizers.serve_version_4(folder)
