"""Do ranks that should hold the same weights hold the same bits?

They diverge when a GPU miscalculates, or when a fork changes weights on one rank alone; DDP
averages gradients and never compares weights.
"""

from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steady.options import Failed, due
from steady.ranks.ranks import all_gather, rank_list

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class ReplicasDiffer(Failed):
    """Ranks that should hold the same weights hold different ones.

    agreed: the step since when checkpoints may be wrong; None if those who write them are right.
    """

    def __init__(self, text: str, agreed: int | None):
        super().__init__(text)
        self.agreed = agreed


class Replicas:
    """Checksums of this rank's weights, compared with the others' every `every` steps, and
    at max_steps.

    parameters: name → this rank's part, of frozen weights, too; ranks r, r + size, r + 2 size, …
    hold the same parts.
    agreed: the newest step known to have had equal weights.
    """

    def __init__(self, parameters: dict[str, Tensor], size: int, every: int, agreed: int = 0):
        self.parameters, self.size, self.every, self.agreed = parameters, size, every, agreed

    def check(self, step: int, last: int):
        """Compare, if it is due; all ranks call it in every step. Raises ReplicasDiffer."""
        if due(step, self.every, last) and dist.is_initialized():
            sums = all_gather(checksums(list(self.parameters.values())))
            self.compare(np.array(sums.tolist()), step)

    def compare(self, table: np.ndarray, step: int):
        """Raises ReplicasDiffer, on every rank. table: the checksums of each, [ranks, n]."""
        groups = [range(first, len(table), self.size) for first in range(self.size)]
        found = [difference(table, ranks, list(self.parameters)) for ranks in groups]
        lines = [text for text, _ in found if text]
        if lines:
            doubtful = any(in_doubt for _, in_doubt in found)
            raise ReplicasDiffer(f"step {step}: {'; '.join(lines)}; they last agreed at step "
                                 f"{self.agreed}", self.agreed if doubtful else None)
        self.agreed = step


@torch.no_grad()
def checksums(parameters: list[Tensor]) -> Tensor:
    """[n], on the device: the sum of each tensor's bits as integers; any flipped bit changes it."""
    return torch.stack([p.contiguous().view(INTEGERS[p.element_size()]).sum(dtype=torch.int64)
                        for p in parameters])


def difference(table: np.ndarray, ranks: range, parameters: list[str]) -> tuple[str, bool]:
    """(the ranks that differ from most others, in words, or ""; whether the first rank, the writer
    of checkpoints, may be wrong)."""
    rows = {rank: tuple(table[rank]) for rank in ranks}
    (usual, count), *others = Counter(rows.values()).most_common()
    if not others:
        return "", False
    odd = [rank for rank in ranks if rows[rank] != usual]
    differs = (table[odd] != np.array(usual)).any(0)
    layers = [name for name, each in zip(parameters, differs, strict=True) if each]
    where = layers[0] + (f" and {len(layers) - 1} others" if len(layers) > 1 else "")
    if count == others[0][1]:
        return (f"{rank_list([*ranks])} hold different weights, in {where}; which of them is wrong "
                "cannot be told; a backward pass beside run.ddp does this, whose gradients stay on "
                "each rank, as do random numbers of its own in the update"), True
    hold = "holds" if len(odd) == 1 else "hold"
    rest = [rank for rank in ranks if rank not in odd]
    text = f"{rank_list(odd)} {hold} other weights than {rank_list(rest)}, in {where}"
    return text, ranks[0] in odd
