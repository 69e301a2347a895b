"""python data.py INPUT… --out DIR: text, records and data sets to token files; see docs/data.md.

One process reads, others tokenize, and the first writes the results in the order of the input,
whatever the number of processes. Memory holds only the chunks in flight.
"""

import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from steady.checkpoints.disk import acquire_lock
from steady.guard.process import FORK, leave_to_parent, run_command
from steady.models.hub import fetch_files
from steady.options import ConfigError, check_bounds, make_parser, option, read_flags
from steady.tokens import tokenizers
from steady.tokens.files import BYTES_END_OF_TEXT, TokenWriter, share_of
from steady.watch.proc import usable_cores
from tools import read
from tools.chat import Part, chat_documents, expect
from tools.read import Document, find_inputs, find_keys, read_chunks, read_items

TRAINING_BYTES = 1 << 30  # input at most, to train a tokenizer on
LISTED = 8  # names of a kind, in the summary
UNKNOWN = "unknown tokens"
# The tokenizers library takes 200 times a text's size in memory, and is slower beyond the cache.
IN_PIECES = re.compile(rf".{{2048,4096}}?(?:{read.LINE}|{read.SPACE})|.{{1,4096}}", re.DOTALL)

USAGE = """INPUT [INPUT ...] --out DIR [--option value ...]
       data.py show DIR N           print the first N documents, marking the tokens in the loss
       data.py show RUN_DIR STEP    print the samples of one step of a run"""
ABOUT = ("Turn text, JSON, CSV (.gz, .zst too), Parquet and Arrow into token files: files, "
         "folders, patterns, or hf:OWNER/NAME[:CONFIG].")


@dataclass
class Options:
    out: str = option(None, "folder to write to; a train.bin and val.bin in it are replaced")
    tokenizer: str = option("bytes", "bytes, a folder, or a name on the hub")
    train_tokenizer: int | None = option(
        None, "train a byte-level BPE tokenizer of this many ids on the input (1 GB of it, spread "
        "evenly)", metavar="VOCAB_SIZE", above=256, at_most=2**24)
    val_fraction: float = option(
        0.01, "share for validation: random documents, and the end of text files of 100 kB or more",
        at_least=0, below=1)
    text_field: str | None = option(
        None, "key or column of a document's text (default: text, unless there is a chat)")
    workers: int | None = option(None, "processes, at most one per core (the default)", at_least=1)
    split: str = option("train", "split of a hf: data set, or of a folder of several splits")
    limit: int | None = option(None, "records of each file or data set, at most", at_least=1)
    skip_bad: bool = option(False, "leave out lines and files that cannot be read, and count them")


class Encoder:
    """Turns records and texts into token ids. folder: of the tokenizer, None for "bytes"."""

    def __init__(self, folder: Path | None, options):
        self.options, self.tokenizer, self.prefix = options, None, []
        self.adds_space = False  # whether before every text, as SentencePiece's do
        self.end, self.vocab_size = BYTES_END_OF_TEXT, 257
        self.unknown, self.known = None, set()  # an id; characters that get tokens
        if folder:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
            self.tokenizer = tokenizers.load_tokenizer(str(folder))
            if not self.tokenizer.is_fast:
                raise ConfigError("--tokenizer: expected one with a tokenizer.json")
            self.end = self.tokenizer.eos_token_id
            if self.end is None:
                raise ConfigError("--tokenizer: has no end-of-text (eos_token)")
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            self.adds_space = "".join(self.tokenizer.tokenize("a")).startswith(("▁", "Ġ"))
            self.prefix = tokenizers.text_start(self.tokenizer)
            model = self.tokenizer.backend_tokenizer.model
            state = json.loads(model.__getstate__())  # a Unigram model's has an id, others' a token
            self.unknown = state.get("unk_id", model.token_to_id(state.get("unk_token") or ""))

    def __getitem__(self, chunk: list[tuple]) -> tuple[dict[str, tuple], Counter] | ConfigError:
        """(split → arguments of TokenWriter.add, counts for the summary), or an error."""
        try:
            documents, counts = self.documents(chunk)
        except ConfigError as e:
            return e  # raised from a process, it would come with a traceback around it
        found = {split: self.encode([d for d in documents if d.split == split])
                 for split in {document.split for document in documents}}
        if self.tokenizer:
            counts[UNKNOWN] += sum(int((ids == self.unknown).sum()) for ids, *_ in found.values())
            text = "".join(text for document in documents for text, _ in document.parts)
            encode = self.tokenizer.backend_tokenizer.encode
            for letter in sorted(set(text) - self.known):
                if encode(letter, add_special_tokens=False).ids or letter.isspace():
                    self.known.add(letter)
                else:
                    counts["no token for", repr(letter)] += text.count(letter)
        return found, counts

    def documents(self, chunk: list[tuple]) -> tuple[list[Document], Counter]:
        """(documents, long ones in pieces; counts for the summary). Raises ConfigError."""
        found, counts = [], Counter()
        for file, number, data in chunk:
            if isinstance(data, Document):
                found.append(data)
                continue
            if isinstance(data, bytes) and not data.strip():
                continue
            try:
                record = json.loads(data.decode()) if isinstance(data, bytes) else data
                documents, used, is_chat, more_counts = self.read(record)
                key = "\0".join(text for parts in documents for text, _ in parts).encode()
            except ConfigError as e:
                raise ConfigError(f"{file}: {e}") from None
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                why = reason(e)
                if not self.options.skip_bad:
                    raise ConfigError(f"{file}:{number}: {why}; --skip_bad leaves it out") from None
                counts["left out", why] += 1
                continue
            counts += more_counts
            counts.update(("ignored keys", name) for name in record if name not in used)
            split = "val" if share_of(key) < self.options.val_fraction else "train"
            counts["empty", "documents"] += documents.count([])
            for parts in filter(None, documents):
                counts["without a reply", split] += not any(counted for _, counted in parts)
                [(text, counted), *more] = parts
                if more or is_chat or not counted or len(text) <= read.CHUNK_BYTES:
                    found.append(Document(split, parts, is_chat))
                else:
                    found += read.pieces(file, io.BytesIO(text.encode()), 0, math.inf, split)
        return found, counts

    def read(self, record) -> tuple[list[list[Part]], tuple[str, ...], bool, Counter]:
        """(documents of a record; keys used; whether it is a chat; counts). Raises ValueError."""
        if None in expect(dict, record, "record"):  # the csv module's key for surplus fields
            raise ValueError("more fields than the header has")
        names = (name if record[name] is not None else f"{name}: null" for name in record)
        keys, used = find_keys(tuple(names), self.options.text_field)
        if "label" in used and str(record.get("label")).lower() in ("false", "0", "0.0"):  # CSV
            raise ValueError("label false: a rejected completion, which would be learned")
        earlier = str(record.get("history") or "") if "history" in used else ""
        if earlier.lstrip().startswith("[") and earlier.strip("[] \n"):
            raise ValueError("history: expected all turns in one list of messages")
        is_chat, counts = False, Counter()
        if keys == used or keys[0] == "prompt" and isinstance(record["prompt"], str):
            used = keys  # all text, of which the last counts
            documents = [[(expect(str, record[key], key), key == keys[-1]) for key in keys]]
        else:
            is_chat, (documents, counts) = True, chat_documents(self.tokenizer, record, keys)
        return ([[part for part in parts if part[0]] for parts in documents], used, is_chat, counts)

    def encode(self, documents: list[Document]) -> tuple:
        """(ids, ends, mask, bytes) for TokenWriter.add; no ends for a piece before the last."""
        ids, counts, last, n_bytes = [], [], [], 0  # last: parts that end a document
        for document in documents:
            texts, counted = zip(*document.parts, strict=True)
            found = self.tokenize(texts, document.is_chat, document.begins)
            start = [] if document.is_chat else self.prefix  # templates write the prefix
            if document.begins and found[0][: len(start)].tolist() != start:
                found[0] = np.append(start, found[0])
            if document.ends and found[-1][-1:].tolist() != [self.end]:
                found[-1] = np.append(found[-1], self.end)
            ids += found
            counts += counted
            n_bytes += sum(len(text.encode()) for text in texts)
            if document.ends:
                last.append(len(ids) - 1)
        sizes = [len(part) for part in ids]
        mask = None if all(counts) else np.repeat(np.array(counts, np.uint8), sizes)
        ids = np.concatenate(ids, dtype=np.uint32, casting="unsafe")
        return ids, np.cumsum(sizes)[last], mask, n_bytes

    def tokenize(self, texts: tuple[str, ...], is_chat: bool, begins: bool) -> list[np.ndarray]:
        """The ids of each text, tokenized apart, except in a chat or if each would get a space.

        Then a token belongs to the text it begins in. begins: False if it continues a document.
        """
        if self.tokenizer is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        if not (is_chat or self.adds_space):
            return [self.ids(text) for text in texts]
        texts = ["" if begins else "\n", *texts]  # after a line end a text gets no space
        encoding = self.tokenizer.backend_tokenizer.encode("".join(texts), add_special_tokens=False)
        ends, ids = np.cumsum([len(text) for text in texts]), np.array(encoding.ids)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T  # also for no tokens
        part = np.maximum(ends.searchsorted(starts, "right"), stops > ends[0])
        return [ids[part == k] for k in range(1, len(texts))]

    def ids(self, text: str) -> np.ndarray:
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        found = (encode([p], add_special_tokens=False)[0].ids for p in IN_PIECES.findall(text))
        return np.fromiter(itertools.chain.from_iterable(found), np.uint32)


def reason(error: Exception) -> str:
    """Why a record is left out, in the same words for each kind of error."""
    if isinstance(error, json.JSONDecodeError):
        return "not JSON; expected an object on each line, or in .json an array of objects"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, UnicodeEncodeError) or "TextEncodeInput" in str(error):
        return "half of a character (a lone surrogate), or not UTF-8"
    if isinstance(error, KeyError):
        return f"no {error}"
    return " ".join(str(error).split())[:300]


def encode_all(chunks: Iterator[list[tuple]], encoder: Encoder) -> Iterator[tuple]:
    """Encode the chunks in several processes; yields the results in their order."""
    from torch.utils.data import DataLoader  # here: mistakes show two seconds sooner

    workers = min(encoder.options.workers or math.inf, usable_cores())
    for result in DataLoader(
            encoder, batch_size=None, sampler=chunks, num_workers=workers * (workers > 1),
            collate_fn=copy,  # nothing to collate
            worker_init_fn=start_worker, multiprocessing_context=FORK if workers > 1 else None):
        if isinstance(result, ConfigError):
            raise result
        yield result


def start_worker(worker: int):
    """Exit when the parent is killed; unread results would keep this process alive."""
    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    leave_to_parent(worker)
    threading.Thread(target=end_with_parent, daemon=True).start()


def main(argv: list[str]) -> int:
    return run_command("data.py", prepare_or_show, argv, "interrupted: nothing was changed")


def prepare_or_show(argv: list[str]):
    if argv[:1] == ["show"] and not {"-h", "--help"} & {*argv}:
        if len(argv) != 3 or not re.fullmatch("0*[1-9][0-9]{0,11}", argv[2]):
            raise ConfigError("expected: data.py show DIR N, or data.py show RUN_DIR STEP, from 1")
        from tools.show import show

        return show(argv[1], int(argv[2]))
    parser = make_parser(Options, "data.py", USAGE, ABOUT)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, pattern, hf:NAME")
    given = vars(read_flags(parser, argv))
    print(prepare(given.pop("inputs"), Options(**given)))


def prepare(inputs: list[str], options: Options) -> str:
    """Write the dataset; returns a summary. Raises ConfigError."""
    check_bounds(options)
    if not options.out:
        raise ConfigError("--out DIR: expected a folder to write to")
    if options.train_tokenizer and options.tokenizer != "bytes":
        raise ConfigError("--tokenizer and --train_tokenizer exclude each other")
    out, counts = Path(os.path.expanduser(options.out)), Counter()
    files = find_inputs(inputs, out, counts)
    if options.train_tokenizer or options.tokenizer != "bytes":
        tokenizers.require_ours(out / "tokenizer")
    work, draft = out / ".preparing", out / ".preparing/new"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with closing(acquire_lock(work, f"--out {out}")):
            try:
                shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
                draft.mkdir()
                summary = write_dataset(files, options, draft, counts)
                publish(draft, out)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.filename or out}: {e.strerror}") from e
    except RuntimeError as e:
        if not str(e).startswith("DataLoader worker"):
            raise
        raise ConfigError("a tokenizing process was killed; use fewer --workers") from None
    return f"{summary}\nin               {out}"


def check(files: list[Path], encoder: Encoder) -> Iterator:
    """Read the beginning of each file, unless --skip_bad; yields nothing. Raises ConfigError."""
    options = replace(encoder.options, limit=1, val_fraction=0.0)  # no search for a place to cut
    for path in [] if options.skip_bad else files:
        encoder.documents([*itertools.islice(read_items([path], options, Counter()), 1)])
    yield from ()


def write_dataset(files: list[Path], options: Options, draft: Path, counts: Counter) -> str:
    """Write all files into `draft`; returns a summary. counts: of inputs skipped so far."""
    folder, name = find_tokenizer(files, options, draft / "tokenizer")
    encoder = Encoder(folder, options)
    # read after the fork, which hangs before Python 3.12 if a thread of Arrow's begins meanwhile
    chunks = itertools.chain(check(files, encoder), read_chunks(files, options, counts))
    train, val = (TokenWriter(draft / f"{split}.bin", encoder.vocab_size, end_of_text=encoder.end,
                              tokenizer=name, prefix=encoder.prefix) for split in ("train", "val"))
    bar = tqdm(desc="tokenized", unit="B", unit_scale=True, delay=2, mininterval=5)
    with bar, closing(encode_all(chunks, encoder)) as results:
        for encoded, counted in results:
            for split, arrays in encoded.items():
                (train if split == "train" else val).add(*arrays)
            counts.update(counted)
            bar.update(train.bytes + val.bytes - bar.n)
    if not train.tokens:
        drawn = f": the {val.documents:,} are drawn for validation; try another --val_fraction"
        raise ConfigError(f"{files[0]}: no document to train on{drawn if val.tokens else ''}")
    if counts["without a reply", "train"] == train.documents:
        raise ConfigError(f"{files[0]}: no document to train on has a reply of role 'assistant'")
    train.close()
    val.close()
    tokens, unknown = train.tokens + val.tokens, counts.pop(UNKNOWN, 0)
    lines = {
        "documents": f"{train.documents:,} + {val.documents:,} (training + validation)",
        "tokens": f"{train.tokens:,} + {val.tokens:,} as {train.dtype}, vocabulary "
        f"{encoder.vocab_size:,} ({name})",
        "bytes per token": f"{(train.bytes + val.bytes) / tokens:.3f}",
        UNKNOWN: f"{unknown:,} ({unknown / tokens:.1%})" * bool(unknown)}
    for kind in dict.fromkeys(kind for kind, _ in +counts):
        found = [f"{name} ({n:,})" for (k, name), n in (+counts).most_common() if k == kind]
        lines[kind] = ", ".join(found[:LISTED]) + " …" * (len(found) > LISTED)
    if options.val_fraction and not val.tokens:
        lines["validation"] = "no document was drawn for validation: try a larger --val_fraction"
    return "\n".join(f"{kind:16} {text}" for kind, text in lines.items() if text)


def publish(draft: Path, out: Path):
    """Replace the old files, train.bin last: without it no run takes the others."""
    for split in ("train", "val"):
        for suffix in ("", ".json", ".docs", ".mask"):
            (out / f"{split}.bin{suffix}").unlink(missing_ok=True)
    with suppress(ConfigError):  # somebody else's, unused with --tokenizer bytes
        tokenizers.delete_tokenizer(out / "tokenizer")
    for new in sorted(draft.iterdir(), key=lambda p: (p.suffix == ".bin", p.name != "val.bin")):
        new.rename(out / new.name)


def find_tokenizer(files: list[Path], options: Options, folder: Path) -> tuple[Path | None, str]:
    """Train or copy the tokenizer into `folder`: (folder, or None for "bytes"; name@hash)."""
    if options.train_tokenizer:
        train_tokenizer(files, options, folder)
        name = f"bpe-{options.train_tokenizer}"
    elif options.tokenizer == "bytes":
        return None, "bytes"
    else:
        # load it by folder: by name, transformers retries the hub for a minute, with warnings
        tokenizers.keep_tokenizer(fetch_files(options.tokenizer, weights=False), folder)
        name = Path(options.tokenizer).name
    (folder / tokenizers.MADE).touch()
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*token*.json")))
    return folder, f"{name}@{hashlib.sha256(content).hexdigest()[:12]}"


def train_tokenizer(files: list[Path], options: Options, folder: Path):
    """A byte-level BPE of options.train_tokenizer ids, saved so that AutoTokenizer loads it."""
    from tokenizers import models, pre_tokenizers, trainers

    reader = Encoder(None, options)
    list(check(files, reader))
    tokenizer = tokenizers.byte_level_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=options.train_tokenizer, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    every = 1 + sum(file.stat().st_size for file in files if file.is_file()) // TRAINING_BYTES
    chunks = itertools.islice(read_chunks(files, options, Counter()), 0, None, every)
    texts = (text for chunk in chunks for document in reader.documents(chunk)[0]
             for text, _ in document.parts)
    tokenizer.backend_tokenizer.train_from_iterator(map(IN_PIECES.findall, texts), trainer)
    tokenizer.save_pretrained(folder)
    tokenizers.serve_version_4(folder)
