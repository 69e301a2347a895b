"""Records and texts become token ids, for `python data.py`."""

import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steady.options import ConfigError
from steady.tokens.files import BYTES_END_OF_TEXT, share_of
from steady.tokens.tokenizers import load_tokenizer, text_start
from tools import read
from tools.chat import Part, chat_documents, expect
from tools.read import Chunk, find_keys

# The tokenizers library takes 200 times the size of a text, and is slower beyond the cache.
IN_PIECES = re.compile(rf".{{2048,4096}}?(?:{read.LINE}|{read.SPACE})|.{{1,4096}}", re.DOTALL)
UNKNOWN = "unknown tokens"


class Document(NamedTuple):
    split: str
    parts: list[Part]
    is_chat: bool  # whether a chat template wrote it


class Encoder:
    """Turns chunks into token ids. folder: of the tokenizer, None for "bytes"."""

    def __init__(self, folder: Path | None, options):
        self.options, self.tokenizer, self.prefix = options, None, []
        self.adds_space = False  # before every text, as SentencePiece's do
        self.before = "\n"  # stands before a continued text, so that it gets no space
        self.end, self.vocab_size = BYTES_END_OF_TEXT, 257
        self.unknown, self.known = None, set()  # an id; characters that get tokens
        if folder:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
            self.tokenizer = load_tokenizer(str(folder))
            if not self.tokenizer.is_fast:
                raise ConfigError("--tokenizer: is written in Python; expected one with a "
                                  "tokenizer.json")
            self.end = self.tokenizer.eos_token_id
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            tokenize = self.tokenizer.tokenize
            self.adds_space = "".join(tokenize("a")).startswith(("▁", "Ġ"))
            if tokenize("a") == tokenize("\na"):  # T5's turns a line end into that space
                self.before = ""
            self.prefix = text_start(self.tokenizer)
            model = self.tokenizer.backend_tokenizer.model
            unknown = getattr(model, "unk_token", self.tokenizer.unk_token)  # Unigram's has none
            self.unknown = unknown and model.token_to_id(unknown)

    def __call__(self, chunk: Chunk) -> tuple[dict[str, tuple], Counter]:
        """(split → arguments of TokenWriter.add, counts for the summary). Raises ConfigError."""
        documents, counts = self.documents(chunk)
        found = {split: self.encode([d for d in documents if d.split == split], chunk)
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

    def documents(self, chunk: Chunk) -> tuple[list[Document], Counter]:
        """The documents of a chunk, and counts for the summary. Raises ConfigError."""
        if isinstance(chunk.data, str):
            return [Document(chunk.split, [(chunk.data, True)], False)], Counter()
        found, counts = [], Counter()
        for number, item in enumerate(chunk.data, chunk.first):
            if isinstance(item, bytes) and not item.strip():
                continue
            try:
                record = json.loads(item.decode()) if isinstance(item, bytes) else item
                documents, used, is_chat, more_counts = self.read(record)
                key = "\0".join(text for parts in documents for text, _ in parts).encode()
            except ConfigError as e:
                raise ConfigError(f"{chunk.file}: {e}") from None
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                why = reason(e)
                if not self.options.skip_bad:
                    raise ConfigError(f"{chunk.file}:{number}: {why}; --skip_bad leaves such "
                                      "lines out") from None
                counts["left out", why] += 1
                continue
            counts += more_counts
            counts.update(("ignored keys", name) for name in record if name not in used)
            split = "val" if share_of(key) < self.options.val_fraction else "train"
            counts["empty", "documents"] += documents.count([])
            for parts in filter(None, documents):
                found.append(Document(split, parts, is_chat))
                counts["without a reply", split] += not any(counted for _, counted in parts)
        return found, counts

    def read(self, record) -> tuple[list[list[Part]], tuple[str, ...], bool, Counter]:
        """(documents of a record; keys used; whether it is a chat; counts). Raises ValueError."""
        if None in expect(dict, record, "record"):  # the csv module's key for surplus fields
            raise ValueError("more fields than the header has")
        names = (name if record[name] is not None else f"{name}: null" for name in record)
        keys, used = find_keys(tuple(names), self.options.text_field)
        is_chat, counts = False, Counter()
        if keys in [("text",), (self.options.text_field,)]:
            documents = [[(expect(str, record[keys[0]], keys[0]), True)]]
        elif keys[0] == "prompt" and isinstance(record["prompt"], str):
            used = keys
            documents = [[(expect(str, record[key], key), key != "prompt") for key in keys]]
        else:
            is_chat, (documents, counts) = True, chat_documents(self.tokenizer, record, keys)
        return ([[part for part in parts if part[0]] for parts in documents], used, is_chat, counts)

    def encode(self, documents: list[Document], chunk: Chunk) -> tuple:
        """(ids, ends, mask, bytes) for TokenWriter.add; no ends for a piece before the last."""
        ids, counts, last, n_bytes = [], [], [], 0  # last: indices of the parts that end
        for document in documents:
            for parts, begins, ends in pieces_of(document, chunk):
                texts, counted = zip(*parts, strict=True)
                found = self.tokenize(texts, document.is_chat, begins)
                start = [] if document.is_chat else self.prefix  # templates write it
                if begins and found[0][: len(start)].tolist() != start:
                    found[0] = np.append(start, found[0])
                if ends and found[-1][-1:].tolist() != [self.end]:
                    found[-1] = np.append(found[-1], self.end)
                ids += found
                counts += counted
                n_bytes += sum(len(text.encode()) for text in texts)
                if ends:
                    last.append(len(ids) - 1)
        sizes = [len(part) for part in ids]
        mask = None if all(counts) else np.repeat(np.array(counts, np.uint8), sizes)
        ids = np.concatenate(ids, dtype=np.uint32, casting="unsafe")
        return ids, np.cumsum(sizes)[last], mask, n_bytes

    def tokenize(self, texts: tuple[str, ...], is_chat: bool, begins: bool) -> list[np.ndarray]:
        """The ids of each text, tokenized apart: not of a chat, or where each would get a space.

        There a token belongs to the text it begins in. begins: False for a continued document,
        tokenized after a line end; a token of both belongs to the text.
        """
        if self.tokenizer is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        if not (is_chat or self.adds_space):
            return [self.ids(text) for text in texts]
        texts = ["" if begins else self.before, *texts]
        encoding = self.tokenizer.backend_tokenizer.encode("".join(texts), add_special_tokens=False)
        ends, ids = np.cumsum([len(text) for text in texts]), np.array(encoding.ids)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T  # also of no tokens
        part = np.maximum(ends.searchsorted(starts, "right"), stops > ends[0])
        return [ids[part == k] for k in range(1, len(texts))]

    def ids(self, text: str) -> np.ndarray:
        found, encode = [], self.tokenizer.backend_tokenizer.encode_batch_fast
        for piece in IN_PIECES.findall(text):
            found += encode([piece], add_special_tokens=False)[0].ids
        return np.array(found, np.uint32)


def pieces_of(document: Document, chunk: Chunk) -> Iterator[tuple[list[Part], bool, bool]]:
    """(parts, begins, ends) of a document; a long plain text comes in several pieces."""
    [(text, counted), *more] = document.parts
    if more or document.is_chat or isinstance(chunk.data, str) or len(text) <= read.CHUNK_BYTES:
        yield document.parts, chunk.begins, chunk.ends
        return
    file = io.BytesIO(text.encode())
    for piece in read.pieces(chunk.file, file, 0, math.inf, document.split):
        yield [(piece.data, counted)], piece.begins, piece.ends


def reason(error: Exception) -> str:
    """Why a record is left out, in the same words for all of a kind."""
    if isinstance(error, json.JSONDecodeError):
        return "not JSON; expected an object on each line, or in .json an array of objects"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, UnicodeEncodeError) or "TextEncodeInput" in str(error):
        return "half of a character (a lone surrogate)"
    if isinstance(error, KeyError):
        return f"no {error}"
    return " ".join(str(error).split())[:300]
