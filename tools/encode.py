"""Turns records and texts into token ids: what `python data.py` does to each piece of its input."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from steady.cli import ConfigError
from steady.tokens import BYTES_END_OF_TEXT, load_tokenizer, share_of
from tools.chat import Part, chat_documents
from tools.read import Chunk


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
        elif self.adds_space:
            encoded = self.encode_joined(documents, "" if begins else "\n")
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

    def encode_joined(self, documents: list[list[Part]], before: str) -> Iterator[np.ndarray]:
        """The ids of each part, without the space that would be put before a part alone.

        before: what comes before a document that is continued.
        """
        backend = self.tokenizer.backend_tokenizer
        texts = [[before, *(text for text, _ in parts)] for parts in documents]
        joined = ["".join(text) for text in texts]
        found = backend.encode_batch(joined, add_special_tokens=False)
        for text, encoding in zip(texts, found, strict=True):
            ends, starts = np.cumsum([len(part) for part in text]), np.array(encoding.offsets)[:, 0]
            part, ids = ends.searchsorted(starts, "right"), np.array(encoding.ids)
            yield from (ids[part == k] for k in range(1, len(text)))


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
