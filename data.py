"""Token files, the order in which they are read, and the loader.

The sample at global position g (0, 1, 2, … over the whole run) is a function of (seed, g) alone,
and step s trains on positions s * batch_size … (s + 1) * batch_size - 1. So a run resumes at any
step in constant time, with no loader state, and 1 or 8 processes see the same samples in the same
steps.

A sample is a block of one long stream of tokens (`Stream`), or a document, or several documents
that together fill a row (`Documents`).

Another data source replaces `Mixture.batch`: give it `batch(start, stop) -> Batch` that answers the
same for the same positions, and everything said above stays true.
"""

import contextlib
import json
import math
import signal
import sys
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import DataLoader

from config import (
    IGNORE,
    Config,
    ConfigError,
    make_parser,
    parse,
    read_flags,
    retry,
    usable_cores,
)

# --- the order -------------------------------------------------------------------------------


def mix(x: np.ndarray) -> np.ndarray:
    """Hash each uint64 of x to a uint64 (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where permutation number `key` of 0 … n - 1 sends i; all uint64, no table, O(1) an element.

    A Feistel network on pairs (left, right) of Z_a x Z_b, which is a bijection for any round
    function. a * b exceeds n by less than sqrt(n) + 1, and a result that is not below n is sent
    round again ("cycle walking", Black and Rogaway 2002), so that few elements go twice.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    a, b = np.uint64(a), np.uint64(b)
    out, todo = i.copy(), np.arange(len(i))
    while len(todo):
        left, right = np.divmod(out[todo], b)
        for round in range(4):
            round_key = mix(key[todo] + np.uint64(2 * round))
            left = (left + mix(right ^ round_key) % a) % a
            right = (right + mix(left ^ ~round_key) % b) % b
        out[todo] = left * b + right
        todo = todo[out[todo] >= n]
    return out


def mixture_pattern(weights: list[Fraction]) -> np.ndarray:
    """The repeating order of datasets: dataset k fills a share of exactly weights[k] of it.

    The pattern is as short as the weights allow, at most 10,000 (where counts are rounded), and
    each dataset is spread evenly over it.
    """
    weights = [w / sum(weights) for w in weights]
    length = min(10_000, math.lcm(*(w.denominator for w in weights)))
    counts = [math.floor(w * length) for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda k: counts[k] - weights[k] * length)
    for k in by_remainder[: length - sum(counts)]:
        counts[k] += 1
    counts = [max(1, n) for n in counts]  # a small dataset is rare, but not left out
    slots = [(Fraction(2 * i + 1, 2 * c), k) for k, c in enumerate(counts) for i in range(c)]
    return np.array([k for _, k in sorted(slots)])


# --- token files -----------------------------------------------------------------------------

GPT2_VOCAB = 50257  # what files without a sidecar hold, unless --vocab_size says otherwise
SHARD_MAGIC = {20240520: np.uint16, 20240801: np.uint32}  # llm.c, modded-nanogpt; llm.c's Llama 3
SHARD_HEADER_BYTES = 256 * 4


class TokenFile:
    """One memory-mapped file of token ids: ours, nanoGPT's, or a shard of llm.c's format.

    blocks[b] are the seq_len + 1 tokens of block b, the last of which is also the first of the
    next; where the file is shorter than one block there is none.

    Raises ConfigError where the file's size is not what its format says.
    """

    def __init__(self, path: Path, seq_len: int):
        self.path, self.seq_len = path, seq_len
        size = path.stat().st_size
        sidecar = Path(f"{path}.json")
        try:
            self.meta = json.loads(sidecar.read_text()) if sidecar.exists() else {}
        except ValueError as e:
            raise ConfigError(f"{sidecar}: not JSON: {e}") from None
        header = np.fromfile(path, np.int32, 3)
        dtype = self.meta.get("dtype", "uint16")
        if dtype not in ("uint16", "uint32"):
            raise ConfigError(f"{sidecar}: dtype {dtype}; expected uint16 or uint32")
        self.dtype, self.offset = np.dtype(dtype), 0
        if len(header) == 3 and int(header[0]) in SHARD_MAGIC:
            self.dtype = np.dtype(SHARD_MAGIC[int(header[0])])
            self.offset = SHARD_HEADER_BYTES
            self.meta["tokens"] = int(header[2])
        self.n_tokens, rest = divmod(size - self.offset, self.dtype.itemsize)
        expected = self.meta.get("tokens", self.n_tokens)
        if rest or self.n_tokens != expected or self.n_tokens <= 0:
            raise ConfigError(
                f"{path}: {size:,} bytes; expected {expected:,} tokens of {self.dtype.itemsize} "
                f"bytes after a header of {self.offset}: is the file whole?"
            )
        self.map()

    def map(self):
        mapped = np.memmap(self.path, self.dtype, "r", self.offset, (self.n_tokens,))
        self.tokens = np.asarray(mapped)  # indexing a memmap itself is several times slower
        self.blocks = np.empty((0, self.seq_len + 1), self.dtype)
        if self.n_tokens > self.seq_len:
            self.blocks = sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len]
        masked = Path(f"{self.path}.mask")
        self.mask = np.asarray(np.memmap(masked, np.uint8, "r")) if masked.exists() else None

    def documents(self) -> np.ndarray:
        """[documents + 1] where each begins, and the end of the last, in tokens."""
        path = Path(f"{self.path}.docs")
        if not path.exists():
            raise ConfigError(f"{self.path}: nothing says where its documents begin ({path.name}); "
                              "make it with python data.py, or use --data_mode stream")  # fmt: skip
        at = np.fromfile(path, np.uint64).astype(np.int64)
        masked = self.n_tokens if self.mask is None else len(self.mask)
        if len(at) < 2 or at[-1] != self.n_tokens or (np.diff(at) < 0).any() or masked != at[-1]:
            raise ConfigError(f"{path}: does not belong to {self.path.name}: its documents end at "
                              f"{at[-1] if len(at) else 0:,} of {self.n_tokens:,} tokens, "
                              f"the mask at {masked:,}")  # fmt: skip
        return at

    def count_targets(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """How many tokens of documents, cut at seq_len, the loss counts."""
        stops = np.minimum(ends, begins + 1 + self.seq_len)
        if self.mask is None or not len(begins):
            return stops - begins - 1
        places = np.stack((begins + 1, stops), 1).ravel()
        inside = places[:-1]  # reduceat takes no place at the very end
        return np.add.reduceat(self.mask[: places[-1]], inside, dtype=np.int64)[::2]

    def __getstate__(self):  # a loader process that does not fork maps the file itself
        return {**self.__dict__, "tokens": None, "blocks": None, "mask": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.map()


def find_files(path: str, split: str, option: str = "--data") -> list[Path]:
    """The token files of `split` ("train" or "val") in a folder, or the one file that path is."""
    root = Path(path).expanduser()
    if root.is_dir():
        single = root / f"{split}.bin"
        return [single] if single.exists() else sorted(root.glob(f"*_{split}*.bin"))
    if not root.exists():
        raise ConfigError(f"{option} {path}: no such file or folder")
    if root.suffix != ".bin":
        raise ConfigError(f"{option} {path}: expected a file of token ids, which ends in .bin")
    return [root]


class Batch(NamedTuple):
    """Samples as rows of a micro-batch of B sequences of T tokens."""

    tokens: torch.Tensor  # [B, T]; without targets [B, T + 1], then they are what follows
    targets: torch.Tensor | None = None  # [B, T], -100 where the loss does not count
    documents: torch.Tensor | None = None  # [B, T]: the number of a token's document in its row
    source: torch.Tensor | None = None  # [B]: the number of the dataset


class Size(NamedTuple):
    """How much work the samples of a step are, on all ranks together."""

    tokens: int  # with padding
    real_tokens: int  # without
    targets: int  # that the loss counts


class Dataset:
    """One source of the mixture."""

    def __init__(self, name: str, files: list[Path], seq_len: int, weight: Fraction | None):
        self.name, self.seq_len, self.weight = name, seq_len, weight
        self.files = [retry(lambda file=file: TokenFile(file, seq_len)) for file in files]
        self.n_tokens = sum(file.n_tokens for file in self.files)
        self.dtype = np.result_type(*(file.dtype for file in self.files))

    def number(self, in_files: list[int], n_samples: int):
        """Number blocks or documents through all files, that have so many each."""
        self.first = np.cumsum([0, *in_files])  # of each file, and the end
        self.n_samples = n_samples
        if self.weight is None:
            self.weight = Fraction(max(1, n_samples))

    def file_of(self, numbers):
        """Which of the files blocks or documents with these numbers are in."""
        return self.first.searchsorted(numbers, "right") - 1


class Stream(Dataset):
    """Samples are blocks of seq_len + 1 tokens that overlap by one."""

    def __init__(self, *args):
        super().__init__(*args)
        in_files = [len(file.blocks) for file in self.files]
        self.number(in_files, sum(in_files))
        if not self.n_samples:
            raise ConfigError(
                f"{self.files[0].path}: {self.n_tokens:,} tokens; expected more than "
                f"--seq_len {self.seq_len}"
            )

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Token ids [len(blocks), seq_len + 1]."""
        if len(self.files) == 1:
            return self.files[0].blocks[blocks]  # one copy of whole rows
        file_of_block = self.file_of(blocks)
        out = np.empty((len(blocks), self.seq_len + 1), self.dtype)
        for i in np.unique(file_of_block):
            mine = file_of_block == i
            out[mine] = self.files[i].blocks[blocks[mine] - self.first[i]]
        return out

    def find(self, block: int, column: int = 0) -> tuple[Path, int]:
        """The file that a block is in, and the token there that stands in this column of it."""
        i = self.file_of(block)
        return self.files[i].path, int(block - self.first[i]) * self.seq_len + column


class Documents(Dataset):
    """Samples are documents, cut at seq_len, or with `packing` rows that several of them fill.

    The last token of a document is only a target: one of n + 1 tokens has a length of n.
    """

    def __init__(self, *args, packing: bool = False):
        super().__init__(*args)
        begins, ends, targets = [], [], []
        for file in self.files:
            at = file.documents()
            keep = np.diff(at) > 1  # one of a single token predicts nothing
            begins.append(at[:-1][keep])
            ends.append(at[1:][keep])
            targets.append(file.count_targets(begins[-1], ends[-1]))
        in_files = [len(places) for places in begins]
        begins, ends = np.concatenate(begins), np.concatenate(ends)
        self.begins, lengths = begins, ends - begins - 1
        self.lengths = np.minimum(lengths, self.seq_len)  # of each document
        self.n_cut = int((lengths > self.seq_len).sum())
        if not len(begins):
            raise ConfigError(f"{self.files[0].path}: no document of two tokens or more")
        self.rows = pack(self.lengths, self.seq_len) if packing else None
        targets = np.concatenate(targets)
        self.n_empty = int((targets == 0).sum())
        if not targets.any():
            raise ConfigError(f"{self.files[0].path}: nothing to train on: no response in the "
                              f"first --seq_len {self.seq_len} tokens of any document")  # fmt: skip
        self.sample_lengths, self.sample_targets = self.lengths, targets
        if packing:
            order, starts = self.rows
            self.sample_lengths = np.add.reduceat(self.lengths[order], starts[:-1])
            self.sample_targets = np.add.reduceat(targets[order], starts[:-1])
        self.number(in_files, len(self.sample_lengths))

    def documents_of(self, sample: int) -> np.ndarray:
        if self.rows is None:
            return np.array([sample])
        order, starts = self.rows
        return order[starts[sample] : starts[sample + 1]]

    def find(self, sample: int, column: int = 0) -> tuple[Path, int]:
        """The file and the token there that stands in this column of the sample's row."""
        for document in self.documents_of(sample):
            if column < self.lengths[document]:
                break
            column -= self.lengths[document]
        return self.files[self.file_of(document)].path, int(self.begins[document] + column)

    def read_into(self, sample: int, tokens, targets, documents):
        """Fill the beginnings of three rows [T]; targets has -100 where the loss does not count."""
        at = 0
        for number, document in enumerate(self.documents_of(sample)):
            file = self.files[self.file_of(document)]
            begin, n = self.begins[document], self.lengths[document]
            ids, mask = file.tokens[begin : begin + n + 1], file.mask
            tokens[at : at + n] = ids[:-1]
            targets[at : at + n] = ids[1:]
            if mask is not None:
                targets[at : at + n][mask[begin + 1 : begin + n + 1] == 0] = IGNORE
            documents[at : at + n] = number
            at += n
        documents[at:] = number + 1  # padding is a document of its own


def pack(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents that together fill rows of seq_len: (order, starts).

    Row r has the documents order[starts[r] : starts[r + 1]]. The longest first, each into the
    fullest row that it fits into (best fit decreasing); those of one length go at once, so that it
    takes time for each length and not for each document.
    """
    by_length = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows = [np.empty(0, np.int64) for _ in range(seq_len + 1)]  # with so much room left
    has_room = np.zeros(seq_len + 1, bool)
    n_rows = 0
    ends = np.flatnonzero(np.diff(lengths[by_length], append=-1)) + 1
    for todo in np.split(by_length, ends[:-1]):
        n = int(lengths[todo[0]])
        while len(todo):
            room = n + int(has_room[n:].argmax())
            if not has_room[room]:
                new = -(-len(todo) // (seq_len // n))
                room, rows[seq_len] = seq_len, np.arange(n_rows, n_rows + new)
                n_rows += new
            taken, rows[room] = rows[room][: len(todo)], rows[room][len(todo) :]
            row_of[todo[: len(taken)]] = taken
            todo = todo[len(taken) :]
            rows[room - n] = np.concatenate((rows[room - n], taken))
            has_room[[room, room - n]] = len(rows[room]) > 0, True
    order = np.argsort(row_of, kind="stable")
    return order, np.searchsorted(row_of[order], np.arange(n_rows + 1))


class Mixture:
    """The training data: all datasets in their proportions, in the order that `seed` gives."""

    WINDOW = 4096  # positions whose order is computed at once: 0.4 µs each, 2.4 µs in 64s
    ROUND = 8  # the length of padded rows is a multiple of this: what matrix units like

    def __init__(self, datasets: list[Dataset], seed: int, vocab_size: int | None = None):
        self.datasets, self.seed = datasets, seed
        self.seq_len = datasets[0].seq_len
        files = [file for d in datasets for file in d.files]
        metas = [file.meta for file in files]
        data_vocab = max(meta.get("vocab_size", 0) for meta in metas)
        if any("vocab_size" not in meta for meta in metas):
            data_vocab = max(data_vocab, vocab_size or GPT2_VOCAB)
        self.vocab_size = vocab_size or data_vocab
        if data_vocab > self.vocab_size:
            raise ConfigError(
                f"--vocab_size {vocab_size}: the tokenizer of the data has {data_vocab} ids"
            )
        known = {meta["tokenizer"]: file.path for file, meta in zip(files, metas, strict=True)
                 if meta.get("tokenizer")}  # fmt: skip
        if len(known) > 1:
            told = ", ".join(f"{path} {name}" for name, path in known.items())
            raise ConfigError(f"--data: sources with different tokenizers: {told}")
        self.tokenizer = next(iter(known), None)
        self.tokenizer_folder = None
        if self.tokenizer not in (None, "bytes"):
            beside = (file.path.parent / "tokenizer" for file in files)
            self.tokenizer_folder = next((str(path) for path in beside if path.is_dir()), None)
        self.end_of_text = next((m["end_of_text"] for m in metas if "end_of_text" in m), None)
        n_bytes = [meta.get("bytes") for meta in metas]
        self.bytes_per_token = None
        if all(n_bytes) and not self.has_prompts:
            self.bytes_per_token = sum(n_bytes) / sum(d.n_tokens for d in datasets)
        self.dtype = np.result_type(*(d.dtype for d in datasets))
        self.pattern = mixture_pattern([d.weight for d in datasets])
        self.rank_in_pattern = np.zeros_like(self.pattern)
        for k in range(len(datasets)):
            mine = self.pattern == k
            self.rank_in_pattern[mine] = np.arange(mine.sum())
        self.window, self.group = self.WINDOW, None
        self._window = (None, None)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.datasets[0], Stream)

    @property
    def is_packed(self) -> bool:
        return not self.is_stream and self.datasets[0].rows is not None

    @property
    def has_prompts(self) -> bool:
        """Whether the loss leaves out some tokens; a stream is all text."""
        return not self.is_stream and any(
            f.mask is not None for d in self.datasets for f in d.files
        )

    @property
    def n_samples(self) -> int:
        return sum(d.n_samples for d in self.datasets)

    @property
    def n_tokens(self) -> int:
        return sum(d.n_tokens for d in self.datasets)

    def fingerprint(self) -> list[list]:
        """What must be unchanged for a run to continue on the same data, also if it has moved."""
        files = [file for d in self.datasets for file in d.files]
        return [[f.path.name, f.n_tokens, f.meta.get("checksum", "")] for f in files]

    def group_by_length(self, steps: int, batch_size: int):
        """From now on the documents of a batch of positions are of similar lengths.

        Within each window of so many batches they are sorted by length, cut into batches, and
        those shuffled. So a step's samples are still a function of (seed, batch_size, g). Does
        nothing with 0 steps, and where all samples are of one length.
        """
        if steps and not (self.is_stream or self.is_packed):
            self.window, self.group = steps * batch_size, batch_size
            self._window = (None, None)

    def epochs(self, position: int) -> list[float]:
        """How often each dataset has been gone through before this position."""
        cycle, r = divmod(position, len(self.pattern))
        done = [cycle * int((self.pattern == k).sum()) + int((self.pattern[:r] == k).sum())
                for k in range(len(self.datasets))]  # fmt: skip
        return [n / d.n_samples for n, d in zip(done, self.datasets, strict=True)]

    def order(self, start: int, stop: int) -> np.ndarray:
        """[2, stop - start]: the dataset and the sample of it at each global position."""
        windows = range(start // self.window, (stop - 1) // self.window + 1)
        found = [self._order_of_window(w) for w in windows]
        found = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        first = windows[0] * self.window
        return found[:, start - first : stop - first]

    def _order_of_window(self, window: int) -> np.ndarray:
        cached, found = self._window
        if cached != window:
            g = np.arange(window * self.window, (window + 1) * self.window, dtype=np.uint64)
            cycle, r = np.divmod(g, np.uint64(len(self.pattern)))
            source = self.pattern[r]
            sample = np.empty_like(g)
            for k, dataset in enumerate(self.datasets):
                mine = np.flatnonzero(source == k)
                if not len(mine):
                    continue
                per_cycle = np.uint64((self.pattern == k).sum())
                index = cycle[mine] * per_cycle + self.rank_in_pattern[r[mine]].astype(np.uint64)
                epoch, i = np.divmod(index, np.uint64(dataset.n_samples))
                key = mix(mix(np.uint64([self.seed]) + np.uint64(k << 32)) + epoch)
                sample[mine] = permute(i, dataset.n_samples, key)
            found = np.stack((source, sample.astype(np.int64)))
            if self.group:
                found = found[:, self._by_length(found, window)]
            self._window = (window, found)
        return found

    def _by_length(self, found: np.ndarray, window: int) -> np.ndarray:
        by_length = np.argsort(self._lengths(*found), kind="stable").reshape(-1, self.group)
        n = len(by_length)
        key = np.full(n, mix(np.uint64([self.seed]) ^ ~np.uint64(window))[0])
        return by_length[permute(np.arange(n, dtype=np.uint64), n, key).astype(np.int64)].ravel()

    def _lengths(self, source: np.ndarray, sample: np.ndarray, of: str = "sample_lengths"):
        out = np.empty(len(source), np.int64)
        for k in np.unique(source):
            mine = source == k
            out[mine] = getattr(self.datasets[k], of)[sample[mine]]
        return out

    def row_length(self, longest):
        """Tokens in the rows of a micro-batch whose longest sample has so many."""
        if self.is_packed:
            return self.seq_len + 0 * longest
        return np.minimum(-(-longest // self.ROUND) * self.ROUND, self.seq_len)

    def size(self, start: int, stop: int, micro_batch: int) -> Size:
        """Of the samples at these positions, in micro-batches."""
        if self.is_stream:
            return Size(*[(stop - start) * self.seq_len] * 3)
        order = self.order(start, stop)
        lengths = self._lengths(*order)
        rows = self.row_length(lengths.reshape(-1, micro_batch).max(1))
        targets = self._lengths(*order, of="sample_targets")
        return Size(int(rows.sum()) * micro_batch, int(lengths.sum()), int(targets.sum()))

    def typical_length(self) -> float:
        """Mean tokens that the attention of a token goes over: FLOPs of attention grow with it."""
        if self.is_stream:
            return self.seq_len
        lengths = np.concatenate([d.lengths for d in self.datasets]).astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def batch(self, start: int, stop: int) -> Batch:
        """The samples at these positions.

        Ids stay 2 or 4 bytes wide, a quarter or half of what the model wants, until they are on
        its device. Raises ConfigError for an id that is not in the vocabulary.
        """
        source, sample = self.order(start, stop)
        if self.is_stream:
            batch = Batch(self._read_blocks(source, sample))
        else:
            batch = Batch(*self._read_documents(source, sample))
        for ids, later in ((batch.tokens, 0), (batch.targets, 1)):  # a target is the next token
            if ids is not None and ids.max() >= self.vocab_size:
                row, column = np.argwhere(ids >= self.vocab_size)[0]
                path, token = self.datasets[source[row]].find(sample[row], column)
                raise ConfigError(
                    f"{path}: token id {ids[row, column]} at token {token + later:,}; expected "
                    f"ids below --vocab_size {self.vocab_size}"
                )
        if len(self.datasets) > 1:
            batch = batch._replace(source=source)
        return Batch(*(None if a is None else torch.from_numpy(a) for a in batch))

    def _read_blocks(self, source: np.ndarray, block: np.ndarray) -> np.ndarray:
        if len(self.datasets) == 1:
            return self.datasets[0].read(block)
        out = np.empty((len(block), self.seq_len + 1), self.dtype)
        for k in np.unique(source):
            mine = source == k
            out[mine] = self.datasets[k].read(block[mine])
        return out

    def _read_documents(self, source: np.ndarray, sample: np.ndarray):
        """tokens, targets, and in packed rows the numbers of documents, [B, T] each."""
        shape = len(sample), int(self.row_length(self._lengths(source, sample).max()))
        tokens = np.full(shape, self.end_of_text or 0, self.dtype)
        targets = np.full(shape, IGNORE, np.int32)
        documents = np.zeros(shape, np.int16)
        for i, (k, number) in enumerate(zip(source, sample, strict=True)):
            self.datasets[k].read_into(number, tokens[i], targets[i], documents[i])
        return tokens, targets, documents if self.is_packed else None

    def __getitems__(self, positions: range) -> Batch:  # what DataLoader calls
        return retry(lambda: self.batch(positions.start, positions.stop))

    def decode(self, ids: list[int]) -> str:
        return decode("bytes" if self.tokenizer == "bytes" else self.tokenizer_folder, ids)


def load_mixture(
    paths: list[str], split: str, seq_len: int, seed: int, vocab_size: int | None = None,
    option: str = "--data", mode: str = "auto", packing: bool = False,
) -> Mixture | None:  # fmt: skip
    """The mixture of the PATH[:WEIGHT] sources that `option` names.

    mode: "stream", "documents", or "auto": documents where some file has prompts, or for packing.
    The validation data beside --data may be missing: then this is None.
    """
    found, sources = [], [split_weight(spec) for spec in paths]
    if len({weight is None for _, weight in sources}) > 1:
        raise ConfigError(f"{option} {' '.join(paths)}: give every source a weight, or none")
    for path, weight in sources:
        optional = split == "val" and option == "--data"
        if optional and Path(path).is_file():
            continue  # a file to train on has nothing beside it
        folder = path
        if path == "stdlib":
            from prepare import stdlib  # makes it, the first time

            folder = stdlib()
        files = find_files(folder, split, option)
        if files:
            found.append((path, files, weight))
        elif not optional:
            raise ConfigError(f"{option} {path}: no {split}.bin and no *_{split}*.bin in there")
    if not found:
        return None
    names = [Path(path).stem for path, *_ in found]
    if len(set(names)) < len(names):  # a/train.bin and b/train.bin
        names = [str(path) for path, *_ in found]
    prompts = any(Path(f"{file}.mask").exists() for _, files, _ in found for file in files)
    kind = Stream
    if mode == "documents" or mode == "auto" and (packing or prompts):
        kind = partial(Documents, packing=packing)
    datasets = [kind(name, files, seq_len, weight)
                for name, (_, files, weight) in zip(names, found, strict=True)]  # fmt: skip
    return Mixture(datasets, seed, vocab_size)


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    path, _, weight = spec.rpartition(":")
    try:
        weight = Fraction(weight) if path else None
    except ValueError:
        return spec, None  # the colon belongs to the path
    if weight is not None and weight <= 0:
        raise ConfigError(f"--data {spec}: expected a weight above 0")
    return (path, weight) if path else (spec, None)


# --- the loader ------------------------------------------------------------------------------


def pick_workers(num_workers: str, device: torch.device, local_world_size: int) -> int:
    """Loader processes for this rank.

    auto is 0 on a CPU: a batch of 64 x 1,024 tokens takes 0.23 ms to read from the page cache and
    1.8 ms to get from another process, which also takes a core from the model. With CUDA it is
    up to 2, so that a page that must come from the disk does not hold up the launch of kernels.
    """
    if num_workers != "auto":
        return int(num_workers)
    return min(2, usable_cores() // local_world_size) if device.type == "cuda" else 0


def leave_signals_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach the whole process group; the trainer decides when loaders end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def as_it_is(batch: Batch) -> Batch:
    return batch  # Mixture gives whole micro-batches


def loader(
    data: Mixture, cfg: Config, start_step: int, micro_batch: int, rank: int, world_size: int,
    device: torch.device, workers: int, offset: int = 0,
):  # fmt: skip
    """Micro-batches of `micro_batch` samples on `device`.

    From step `start_step` to step cfg.max_steps - 1; step s takes the samples that begin with
    s * cfg.batch_size + offset. One micro-batch is always on its way to the device while the one
    before it is computed.
    """

    def positions():
        per_rank = cfg.batch_size // world_size
        for step in range(start_step, cfg.max_steps):
            first = step * cfg.batch_size + offset + rank * per_rank
            for start in range(first, first + per_rank, micro_batch):
                yield range(start, start + micro_batch)

    pin = cfg.pin_memory and device.type == "cuda"
    batches = DataLoader(
        data,
        batch_sampler=positions(),
        collate_fn=as_it_is,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=cfg.prefetch_factor if workers else None,
        worker_init_fn=leave_signals_to_parent,
        generator=torch.Generator(),  # else it draws a seed from the one that dropout uses
    )
    ahead = None
    for batch in batches:
        ready, ahead = ahead, to_device(batch, device)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def eval_batches(
    data: Mixture, max_samples: int, micro_batch: int, rank: int, world_size: int,
    device: torch.device,
):  # fmt: skip
    """This rank's share of the first `max_samples` samples, or of one epoch where that is less.

    Every rank yields as many micro-batches of the same shape; what is over is masked.
    """
    n, stride = min(max_samples, data.n_samples), micro_batch * world_size
    for start in range(0, n, stride):
        first = start + rank * micro_batch
        batch = to_device(data.batch(first, first + micro_batch), device)
        if first + micro_batch > n:
            batch = batch._replace(targets=batch.targets.clone())
            batch.targets[max(0, n - first) :] = IGNORE
        yield batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with tokens and targets as int64 [B, T] on `device`."""
    if device.type == "cuda":  # a quarter of the bytes cross the bus; the GPU widens them
        # asynchronous where the batch is pinned
        batch = Batch(*(x if x is None else x.to(device, non_blocking=True) for x in batch))
    tokens, targets, documents, source = (x if x is None else x.long().to(device) for x in batch)
    if targets is None:
        tokens, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    return Batch(tokens, targets, documents, source)


# --- text ------------------------------------------------------------------------------------


def decode(tokenizer: str | None, ids: list[int]) -> str:
    """The text of token ids; the ids themselves where no tokenizer is known."""
    if tokenizer == "bytes":
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer_in(tokenizer).decode(ids)


@lru_cache
def tokenizer_in(folder: str):
    from prepare import load_tokenizer

    return load_tokenizer(folder, needs_end=False)


# --- python data.py --------------------------------------------------------------------------


def show(run_dir: str, step: int):
    """Print the samples of update number `step` of a run, in the order of their positions."""
    if step < 1:
        raise ConfigError(f"step {step}: expected 1 or more, the number of an update")
    cfg = parse([], saved=f"{run_dir}/config.yaml")
    data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size,
                        mode=cfg.data_mode, packing=cfg.packing)  # fmt: skip
    batch_size, offset = cfg.batch_size, 0
    with contextlib.suppress(OSError, ValueError), open(f"{run_dir}/metrics.jsonl") as file:
        for row in (json.loads(line) for line in file if '"order"' in line):
            if row["step"] < step:  # said where a process begins, for what it may have changed
                order = row["order"]
                data.seed, batch_size, offset = order["seed"], order["batch_size"], order["offset"]
    data.group_by_length(cfg.group_window, batch_size)
    first = (step - 1) * batch_size + offset
    source, sample = data.order(first, first + batch_size)
    batch = data.batch(first, first + batch_size)
    for i in range(batch_size):
        dataset, ids = data.datasets[source[i]], batch.tokens[i].tolist()
        if not data.is_stream:
            ids = ids[: dataset.sample_lengths[sample[i]]]
        path, token = dataset.find(sample[i])
        print(f"--- sample {first + i}: {dataset.name}, {path} from token {token:,}")
        print(data.decode(ids))


USAGE = """INPUT [INPUT ...] --out DIR [--option value ...]
       data.py show RUN_DIR STEP    print the samples that a run had in one step"""
ABOUT = "Turn text, JSONL (.gz, .zst too) and Parquet files, folders or patterns into token files."


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        if argv[:1] == ["show"]:
            if len(argv) != 3 or not argv[2].isdigit():
                raise ConfigError("expected: data.py show RUN_DIR STEP, the number of an update")
            show(argv[1], int(argv[2]))
            return 0
        import prepare

        parser = make_parser(prepare.Options, "data.py", USAGE, ABOUT)
        parser.add_argument("inputs", nargs="+", metavar="INPUT", help="to be turned into tokens")
        given = vars(read_flags(parser, argv))
        print(prepare.prepare(given.pop("inputs"), prepare.Options(**given)))
    except ConfigError as e:
        print(f"data.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was changed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main(sys.argv[1:]))
