"""Turns records and texts into token ids: what `python data.py` does to each piece of its input."""

import io
import itertools
import json
import operator
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from steady.options import ConfigError
from steady.tokens.files import BYTES_END_OF_TEXT, share_of
from steady.tokens.tokenizers import load_tokenizer
from tools import read
from tools.chat import Part, chat_documents
from tools.read import Chunk, find_keys


class Encoder:
    """Turns chunks into token ids. folder: of the tokenizer; None for "bytes".

    options: prepare.Options.
    """

    def __init__(self, folder: Path | None, options):
        self.options, self.tokenizer, self.prefix = options, None, []
        self.adds_space = False  # before every text, as SentencePiece's do
        self.end, self.vocab_size = BYTES_END_OF_TEXT, 257
        if folder:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
            self.tokenizer = load_tokenizer(str(folder))
            self.end = self.tokenizer.eos_token_id
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            start = self.tokenizer.bos_token_id
            if self.tokenizer.is_fast:
                self.adds_space = self.tokenizer.tokenize("a")[0].startswith("▁")
            if start is not None and self.tokenizer("")["input_ids"][:1] == [start]:
                self.prefix = [start]  # a tokenizer that begins every text with it, as Llama's

    def __call__(self, chunk: Chunk) -> tuple[dict[str, list], Counter, float]:
        """(split → calls of TokenWriter.add, counts, chunk.read). Raises ConfigError."""
        documents, counts = self.documents(chunk)
        encoded = {}
        for split in {split for split, *_ in documents}:
            mine = [document for of, *document in documents if of == split]
            encoded[split] = [self.encode(*part) for part in cut(mine, chunk)]
        return encoded, counts, chunk.read

    def documents(self, chunk: Chunk) -> tuple[list[tuple[str, list[Part], bool]], Counter]:
        """(split, parts, whether a chat template wrote it) of each; counts for `summarize`.

        Raises ConfigError with the number of such a line, unless --skip_bad.
        """
        if chunk.kind == "text":
            counts = Counter()
            try:
                text = chunk.data.decode()
            except UnicodeDecodeError as e:
                if not self.options.skip_bad:
                    raise ConfigError(f"{chunk.file}: not UTF-8 at byte "
                                      f"{chunk.first + e.start:,}, nor UTF-16 with a mark (BOM); "
                                      "--skip_bad puts � in its place") from None
                text = chunk.data.decode(errors="replace")
                counts["left out", "not UTF-8"] += 1
            return [(chunk.split, [(text, True)], False)], counts
        found = []
        counts = Counter({("ignored", name): len(chunk.data) for name in chunk.ignored})
        for number, item in enumerate(chunk.data, chunk.first):
            if chunk.kind == "lines" and not item.strip():
                continue
            try:
                record = json.loads(item) if chunk.kind == "lines" else item
                if isinstance(record, ValueError):
                    raise record
                documents, how, used = self.read(record)
                key = "\0".join(text for parts in documents for text, _ in parts).encode()
            except ConfigError as e:
                raise ConfigError(f"{chunk.file}: {e}") from None
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                if not self.options.skip_bad:
                    why = reason(e) if isinstance(e, (KeyError, UnicodeError)) else e
                    raise ConfigError(f"{chunk.file}:{number}: {why}; --skip_bad leaves such "
                                      "lines out") from None
                counts["left out", reason(e)] += 1
                continue
            counts.update(("ignored", name) for name in record if name not in used)
            if how:
                counts["chat", how] += 1
            split = "val" if share_of(key) < self.options.val_fraction else "train"
            documents = [parts for parts in documents if parts]
            found += [(split, parts, how is not None) for parts in documents]
            for parts in documents:
                counts["no reply", split] += not any(counted for _, counted in parts)
        return found, counts

    def read(self, record) -> tuple[list[list[Part]], str | None, tuple[str, ...]]:
        """The documents of a record, how its chat was written, and the keys it was read from.

        Documents have no empty parts. Raises ValueError for a record of an unknown kind.
        """
        if not isinstance(record, dict):
            raise ValueError("expected an object with keys")
        keys, used = find_keys(record, self.options.text_field)
        how, texts = None, [record[key] for key in keys]
        for key in keys:
            if record[key] is None:
                raise ValueError(f"`{key}` is null")
        if keys == (self.options.text_field,):
            documents = [[(*texts, True)]]
        elif keys[0] == "prompt" and not any(isinstance(text, list) for text in texts):
            used, documents = keys, [[*zip(texts, (False, True), strict=True)]]
        else:
            documents, how = chat_documents(self.tokenizer, record, keys)
        for text, _ in itertools.chain(*documents):
            if not isinstance(text, str):
                raise ValueError(f"expected text, found {type(text).__name__}")
        return [[part for part in parts if part[0]] for parts in documents], how, used

    def encode(self, documents: list[tuple[list[Part], bool]], begins: bool, ends: bool) -> tuple:
        """(ids, ends, mask, bytes) for TokenWriter.add; no ends for a piece before the last.

        A prompt and its response are tokenized apart, a chat in one piece, as templates do.
        """
        texts = [[text for text, _ in parts] for parts, _ in documents]
        raw = [text.encode() for text in itertools.chain(*texts)]
        fast = self.tokenizer and self.tokenizer.is_fast
        joined = [fast and (self.adds_space or is_chat) for _, is_chat in documents]
        if self.tokenizer is None:
            apart = iter([np.frombuffer(text, np.uint8) for text in raw])
        else:
            apart = itertools.compress(texts, map(operator.not_, joined))
            apart = iter(encode_batch(self.tokenizer, [*itertools.chain(*apart)]))
        together = [*itertools.compress(texts, joined)]
        together = self.encode_joined(together, "" if begins else "\n") if together else iter(())
        pieces, last = [], []  # (ids, counted); where in it each document ends
        for (parts, _), is_joined in zip(documents, joined, strict=True):
            encoded = together if is_joined else apart
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

    def encode_joined(self, texts: list[list[str]], before: str) -> Iterator[np.ndarray]:
        """The ids of each part of the documents, each tokenized in one piece.

        So without the space that SentencePiece would put before a part alone. A token belongs to
        the part that it begins in. before: what comes before a document that is continued.
        """
        backend = self.tokenizer.backend_tokenizer
        texts = [[before, *parts] for parts in texts]
        joined = ["".join(text) for text in texts]
        found = backend.encode_batch(joined, add_special_tokens=False)
        for text, encoding in zip(texts, found, strict=True):
            ends = np.cumsum([len(part) for part in text])
            starts = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]  # there may be none
            part, ids = ends.searchsorted(starts, "right"), np.array(encoding.ids)
            yield from (ids[part == k] for k in range(1, len(text)))


def cut(documents: list[tuple[list[Part], bool]], chunk: Chunk) -> Iterator[tuple]:
    """Arguments of Encoder.encode: long texts in pieces, as those of text files, or encoding them
    would take a hundred times their size.
    """
    def long(document) -> bool:
        [(text, _), *more], is_chat = document
        return not (more or is_chat or chunk.kind == "text") and len(text) > read.CHUNK_BYTES

    for is_long, group in itertools.groupby(documents, long):
        if not is_long:
            yield [*group], chunk.begins, chunk.ends
            continue
        for [(text, counted)], _ in group:
            for piece in read.pieces(chunk.file, io.BytesIO(text.encode()), 0, None, ""):
                yield [([(piece.data.decode(), counted)], False)], piece.begins, piece.ends


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
