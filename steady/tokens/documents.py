"""The samples in token files: blocks of a stream, or documents, alone or packed into rows."""

from fractions import Fraction
from pathlib import Path

import numpy as np

from steady.checkpoints.disk import retry
from steady.options import ConfigError
from steady.tokens.files import IGNORE, TokenFile
from steady.tokens.packing import pack


class Dataset:
    """One source of the mixture. A subclass defines its samples.

    n_samples; `read(samples, length, pad)`: the first three fields of a Batch; `find(sample,
    column)`: the file of a token and its index there; `row_lengths_vary`: whether batches need
    padding; for documents also `lengths` and `targets`: tokens and counted targets of samples.
    """

    details = ""  # for the screen

    def __init__(self, name: str, files: list[Path], seq_len: int, weight: Fraction | None):
        self.name, self.seq_len, self.weight = name, seq_len, weight
        self.files = [retry(lambda file=file: TokenFile(file, seq_len)) for file in files]
        self.n_tokens = sum(file.n_tokens for file in self.files)
        self.dtype = np.result_type(*(file.dtype for file in self.files))

    def number(self, per_file: list[int], n_samples: int):
        """Number the blocks or documents, `per_file` in each, through all files."""
        self.first = np.cumsum([0, *per_file])  # of each file, and the end
        self.n_samples = n_samples
        self.weight = self.weight or Fraction(n_samples)

    def file_of(self, numbers):
        """Index of the file that holds each of these blocks or documents. Raises ConfigError."""
        found = self.first.searchsorted(numbers, "right") - 1
        for i in np.unique(found):
            self.files[i].require_complete()
        return found


class Stream(Dataset):
    """Samples are blocks of seq_len + 1 tokens that overlap by one."""

    mode, row_lengths_vary, has_prompts = "stream", False, False

    def __init__(self, *args):
        super().__init__(*args)
        per_file = [len(file.blocks) for file in self.files]
        self.number(per_file, sum(per_file))
        if not self.n_samples:
            raise ConfigError(f"{self.files[0].path}: {self.n_tokens:,} tokens; expected more "
                              f"than --seq_len {self.seq_len}")

    def read(self, blocks: np.ndarray, length: int, pad: int):
        """Token ids [len(blocks), seq_len + 1], targets and documents None."""
        file_of_block = self.file_of(blocks)
        out = np.empty((len(blocks), self.seq_len + 1), self.dtype)
        for i in np.unique(file_of_block):
            mine = file_of_block == i
            out[mine] = self.files[i].blocks[blocks[mine] - self.first[i]]
        return out, None, None

    def find(self, block: int, column: int = 0) -> tuple[Path, int]:
        i = self.file_of(block)
        return self.files[i].path, int(block - self.first[i]) * self.seq_len + column


class Documents(Dataset):
    """Samples are documents, or with `packing` rows filled by several of them.

    The last token of a document is only a target: one of n + 1 tokens has a length of n. Above
    seq_len plain text goes on in pieces, and a document with a prompt is cut.
    """

    def __init__(self, *args, packing: bool = False):
        super().__init__(*args)
        self.mode, self.row_lengths_vary = "packed" if packing else "documents", not packing
        self.has_prompts = any(file.mask is not None for file in self.files)
        begins, ends, targets, self.n_documents = [], [], [], 0
        for file in self.files:
            at = file.documents()
            keep = np.diff(at) > 1  # a single token predicts nothing
            self.n_documents += int(keep.sum())
            found = at[:-1][keep], at[1:][keep]
            found = self.pieces(*found) if file.mask is None else found
            begins.append(found[0])
            ends.append(found[1])
            targets.append(file.count_targets(begins[-1], ends[-1]))
        per_file = [len(places) for places in begins]
        begins, ends, targets = map(np.concatenate, (begins, ends, targets))
        if not len(begins):
            raise ConfigError(f"{self.files[0].path}: no document of two tokens or more")
        if not targets.any():
            raise ConfigError(f"{self.files[0].path}: no document has a response within its "
                              f"first --seq_len {self.seq_len} tokens; try a larger --seq_len")
        self.begins = begins
        whole = ends - begins - 1
        self.document_lengths = np.minimum(whole, self.seq_len)
        self.n_cut = int((whole > self.seq_len).sum())
        self.lost = 1 - self.document_lengths.sum() / whole.sum()
        self.n_empty = int((targets == 0).sum())
        self.in_rows = np.arange(len(begins)), np.arange(len(begins) + 1)
        if packing:
            self.in_rows = pack(self.document_lengths, self.seq_len)
        order, starts = self.in_rows
        self.lengths = np.add.reduceat(self.document_lengths[order], starts[:-1])
        self.targets = np.add.reduceat(targets[order], starts[:-1])
        self.number(per_file, len(self.lengths))

    def pieces(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Texts in pieces of seq_len + 1 tokens at most that, like blocks, overlap by one."""
        n = -(-(ends - begins - 1) // self.seq_len)  # of each text
        number = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n)
        begins, ends = np.repeat(begins, n) + number * self.seq_len, np.repeat(ends, n)
        return begins, np.minimum(ends, begins + self.seq_len + 1)

    def documents_of(self, sample: int) -> np.ndarray:
        order, starts = self.in_rows
        return order[starts[sample] : starts[sample + 1]]

    def read(self, samples: np.ndarray, length: int, pad: int):
        """Three arrays [len(samples), length]; documents is None without packing."""
        shape = len(samples), length
        tokens = np.full(shape, pad, self.dtype)
        targets = np.full(shape, IGNORE, np.int32)
        documents = np.zeros(shape, np.int32)
        rows = [self.documents_of(sample) for sample in samples]
        file_of = iter(self.file_of(np.concatenate(rows)))  # all at once: a stat is slow
        for row, in_row in enumerate(rows):
            at = 0
            for number, document in enumerate(in_row):
                file = self.files[next(file_of)]
                begin, n = self.begins[document], self.document_lengths[document]
                ids = file.tokens[begin : begin + n + 1]
                tokens[row, at : at + n] = ids[:-1]
                targets[row, at : at + n] = ids[1:]
                if file.mask is not None:
                    prompt = file.mask[begin + 1 : begin + n + 1] == 0
                    targets[row, at : at + n][prompt] = IGNORE
                documents[row, at : at + n] = number
                at += n
            documents[row, at:] = number + 1  # padding is a document of its own
        return tokens, targets, documents if self.mode == "packed" else None

    def find(self, sample: int, column: int = 0) -> tuple[Path, int]:
        for document in self.documents_of(sample):
            if column < self.document_lengths[document]:
                break
            column -= self.document_lengths[document]
        return self.files[self.file_of(document)].path, int(self.begins[document] + column)

    @property
    def details(self) -> str:
        text, pieces = f", {self.n_documents:,} documents", len(self.begins)
        text += f" ({pieces:,} pieces)" if pieces > self.n_documents else ""
        if self.n_cut:
            text += (f" ({self.n_cut:,} longer than --seq_len are cut: {self.lost:.1%} of the "
                     "tokens)")
        text += f" ({self.n_empty:,} without a response)" if self.n_empty else ""
        return text + (f" in {self.n_samples:,} rows" if self.mode == "packed" else "")
