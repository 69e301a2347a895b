"""Documents packed into rows of one length."""

import numpy as np


def pack(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into rows of seq_len: (order, starts).

    Row r holds the documents order[starts[r] : starts[r + 1]]. Best fit decreasing: the longest
    first, each into the fullest row that it fits into. Documents of one length are placed
    together, so the time grows with the number of lengths, not of documents.
    """
    by_length = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows = [np.empty(0, np.int64) for _ in range(seq_len + 1)]  # rows[r]: those with room r left
    has_room = np.zeros(seq_len + 1, bool)
    n_rows = 0
    ends = np.flatnonzero(np.diff(lengths[by_length], append=-1)) + 1
    for todo in np.split(by_length, ends[:-1]):
        n = int(lengths[todo[0]])
        while len(todo):
            room = n + int(has_room[n:].argmax())  # the least that suffices; n if none does
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
