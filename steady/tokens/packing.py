"""Documents packed into rows of one length, and attention within each document."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def pack(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into rows of seq_len: (order, starts).

    Row r holds the documents order[starts[r] : starts[r + 1]]. Best fit decreasing: the longest
    first, each into the fullest row that it fits into. Documents of one length are placed
    together, so the time grows with the number of lengths, not of documents.
    """
    by_length = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows = [np.empty(0, np.int64) for _ in range(seq_len + 1)]  # rows[r]: those with room r left
    has_room, n_rows = np.zeros(seq_len + 1, bool), 0
    for todo in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1):
        n = int(lengths[todo[0]])
        while len(todo):
            room = n + int(has_room[n:].argmax())  # the smallest that suffices; n if none does
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


def boundaries(documents: Tensor) -> Tensor:
    """Numbers of documents [B, T] → the first of the B * T tokens of each, and the end: int32.

    Padded with B * T (empty documents) to a multiple of 64, so that few shapes occur. No more,
    since the backward pass of flash attention keeps 128 rows for each document in fp32.
    """
    begins = np.flatnonzero(np.diff(documents.numpy(), axis=1, prepend=-1)).astype(np.int32)
    return F.pad(torch.from_numpy(begins), (0, 64 - len(begins) % 64), value=documents.numel())


def positions(begins: Tensor, shape: torch.Size) -> Tensor:
    """`boundaries` of rows of this shape → position of each token in its document, [B, T]."""
    place = torch.arange(shape.numel(), dtype=begins.dtype, device=begins.device)
    return (place - begins[torch.searchsorted(begins, place, right=True) - 1]).view(shape)


def begins_document(documents: Tensor, shape: torch.Size) -> Tensor:
    """Whether a token begins a document, bool [B, T]; documents: numbers [B, T] or `boundaries`."""
    if documents.ndim == 1:
        return positions(documents, shape) == 0
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


def document_mask(documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents [B, T] → mask [B, 1, T, T], causal in each; position of each token in its own."""
    place = torch.arange(documents.shape[1], device=documents.device)
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    start = torch.where(begins_document(documents, documents.shape), place, 0).cummax(1).values
    return mask, place - start


def trial_documents(tokens: Tensor, as_boundaries: bool) -> Tensor:
    """Documents for rows like tokens [B, T], to measure memory: boundaries of short ones or, since
    a mask of T x T does not depend on them, numbers of one in each row."""
    if not as_boundaries:
        return torch.zeros_like(tokens, dtype=torch.int32)
    end, each = tokens.numel(), min(64, tokens.shape[1])
    return torch.arange(0, end + each, each, dtype=torch.int32, device=tokens.device).clamp(max=end)
