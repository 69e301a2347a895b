"""The samples in token files: blocks of a stream, or documents, alone or packed into rows."""

from fractions import Fraction
from pathlib import Path

import numpy as np

from steady.options import ConfigError
from steady.tokens.files import IGNORE, TokenFile
from steady.tokens.packing import pack


class Dataset:
    """One source of the mixture. A subclass defines its samples.

    n_samples; `read(samples, length, pad)`: the first three fields of a Batch; `find(sample,
    column)`: the file of a token and its index there; `row_lengths_vary`: whether batches need
    padding; for documents also `lengths` and `targets`: tokens and counted targets of samples.
    """

    mode, row_lengths_vary, has_prompts = "stream", False, False
    details = ""  # shown at the start of a run

    def __init__(self, name: str, files: list[Path], weights: dict, seq_len: int):
        self.name, self.seq_len, self.weights = name, seq_len, weights
        self.document_lengths = np.array([seq_len])  # all blocks of a stream are this long
        self.files = [*map(TokenFile, files)]
        self.n_tokens = sum(file.n_tokens for file in self.files)
        self.dtype = np.result_type(*(file.dtype for file in self.files))

    def number(self, per_file: list[int], n_samples: int):
        """Number the blocks or documents of all files, per_file[i] in file i."""
        self.first, self.n_samples = np.cumsum([0, *per_file]), n_samples  # of each file; the end
        self.weights = {n: Fraction(n_samples) if w is None else w for n, w in self.weights.items()}

    def file_of(self, numbers):
        """Index of the file that holds each of these blocks or documents. Raises ConfigError."""
        found = self.first.searchsorted(numbers, "right") - 1
        for i in np.unique(found):
            self.files[i].require_complete()
        return found


class Stream(Dataset):
    """Samples are blocks of seq_len + 1 tokens that overlap by one."""

    def __init__(self, *args):
        super().__init__(*args)
        per_file = [(file.n_tokens - 1) // self.seq_len for file in self.files]
        self.number(per_file, sum(per_file))
        if not self.n_samples:
            raise ConfigError(f"{self.files[0].path}: {self.n_tokens:,} tokens; expected more "
                              f"than --seq_len {self.seq_len}")

    def read(self, blocks: np.ndarray, length: int, pad: int):
        """Token ids [len(blocks), seq_len + 1], targets and documents None."""
        file_of_block = self.file_of(blocks)
        begins = (blocks - self.first[file_of_block]) * self.seq_len
        out = [self.files[i].tokens[begin : begin + self.seq_len + 1]
               for i, begin in zip(file_of_block, begins, strict=True)]
        return np.array(out, self.dtype), None, None

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
        found = [places_of(file, self.seq_len) for file in self.files]
        n_documents, *places = zip(*found, strict=True)
        self.begins, ends, targets = map(np.concatenate, places)
        if not len(ends):
            raise ConfigError(f"{self.files[0].path}: no document of two tokens or more")
        if not targets.any():
            raise ConfigError(f"{self.files[0].path}: no document has a response within its "
                              f"first --seq_len {self.seq_len} tokens; try a larger --seq_len")
        whole = ends - self.begins - 1
        self.document_lengths = np.minimum(whole, self.seq_len)
        alone = np.arange(len(ends)), np.arange(len(ends) + 1)
        self.in_rows = pack(self.document_lengths, self.seq_len) if packing else alone
        order, starts = self.in_rows
        self.lengths = np.add.reduceat(self.document_lengths[order], starts[:-1])
        self.targets = np.add.reduceat(targets[order], starts[:-1])
        self.number([len(begins) for _, begins, *_ in found], len(self.lengths))
        self.details = f", {sum(n_documents):,} documents"
        self.details += f" ({len(ends):,} pieces)" * (len(ends) > sum(n_documents))
        if n_cut := int((whole > self.seq_len).sum()):
            lost = 1 - self.document_lengths.sum() / whole.sum()
            self.details += f" ({n_cut:,} longer than --seq_len are cut: {lost:.1%} of the tokens)"
        if n_empty := int((targets == 0).sum()):
            self.details += f" ({n_empty:,} without a response)"
        self.details += f" in {self.n_samples:,} rows" * packing

    def documents_of(self, sample: int) -> np.ndarray:
        order, starts = self.in_rows
        return order[starts[sample] : starts[sample + 1]]

    def read(self, samples: np.ndarray, length: int, pad: int):
        """Three arrays [len(samples), length]; documents is None without packing."""
        dtype = np.result_type(self.dtype, np.min_scalar_type(pad))  # pad may be of wider files
        tokens = np.full((len(samples), length), pad, dtype)
        targets = np.full_like(tokens, IGNORE, np.int32)
        documents = np.zeros_like(tokens, np.int32)
        rows = [self.documents_of(sample) for sample in samples]
        file_of = iter(self.file_of(np.concatenate(rows)))  # all at once: a stat is slow
        for row, in_row in enumerate(rows):
            at = 0
            for number, document in enumerate(in_row):
                file = self.files[next(file_of)]
                begin, n = self.begins[document], self.document_lengths[document]
                ids = file.tokens[begin : begin + n + 1]
                tokens[row, at : at + n] = ids[:-1]
                counted = True if file.mask is None else file.mask[begin + 1 : begin + n + 1] != 0
                np.copyto(targets[row, at : at + n], ids[1:], "same_kind", where=counted)
                documents[row, at : at + n] = number
                at += n
            documents[row, at:] = len(in_row)  # padding is a document of its own
        return tokens, targets, documents if self.mode == "packed" else None

    def find(self, sample: int, column: int = 0) -> tuple[Path, int]:
        for document in self.documents_of(sample):
            if column < self.document_lengths[document]:
                break
            column -= self.document_lengths[document]
        return self.files[self.file_of(document)].path, int(self.begins[document] + column)


def places_of(file: TokenFile, seq_len: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """(number of documents of two tokens or more; begins, ends, counted targets of their pieces).

    Pieces have seq_len + 1 tokens at most, and overlap by one; with a mask documents are whole.
    """
    at = file.documents()
    keep = np.diff(at) > 1  # a single token predicts nothing
    begins, ends = at[:-1][keep], at[1:][keep]
    if file.mask is None:
        n = -(-(ends - begins - 1) // seq_len)  # pieces of each text
        number = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n)
        begins, ends = np.repeat(begins, n) + number * seq_len, np.repeat(ends, n)
        ends = np.minimum(ends, begins + seq_len + 1)
        return int(keep.sum()), begins, ends, ends - begins - 1
    places = np.stack((begins + 1, np.minimum(ends, begins + 1 + seq_len)), 1).ravel()
    counted = file.mask[: places.max(initial=0)]  # reduceat takes no place at the very end
    return len(begins), begins, ends, np.add.reduceat(counted, places[:-1], dtype=np.int64)[::2]
