"""Do ranks that should hold the same weights hold the same bits?

They part where a GPU miscalculates, or where a fork changes weights on one rank alone; DDP averages
gradients and never compares weights.
"""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from steady.hangs import names

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class ReplicasDiffer(Exception):
    """Ranks that should hold the same weights hold different ones."""


class Replicas:
    """Checksums of this rank's weights, made every so many steps and compared at the next log.

    parameters: name → this rank's part; ranks r, r + size, r + 2 size, … hold the same parts.
    agreed: the step at which they were the same for certain.
    """

    def __init__(self, parameters: dict[str, Tensor], size: int, every: int, agreed: int):
        self.parameters, self.size, self.every = parameters, size, every
        self.newest, self.step, self.agreed = [], 0, agreed

    def measure(self, step: int):
        if self.every and step % self.every == 0:
            sums = checksums(list(self.parameters.values()))
            self.newest, self.step = [*sums.unbind()], step

    def take(self) -> list[Tensor]:
        """The newest checksums, once: single numbers on the device, or none."""
        taken, self.newest = self.newest, []
        return taken

    def compare(self, table: np.ndarray):
        """Raises ReplicasDiffer, on every rank. table: what `take` gave on each, [ranks, n]."""
        if not table.size:
            return
        lines = [line for first in range(self.size)
                 if (line := difference(table, range(first, len(table), self.size),
                                        list(self.parameters)))]
        if lines:
            raise ReplicasDiffer(f"step {self.step}: {'; '.join(lines)}. They agreed at step "
                                 f"{self.agreed}: --resume a checkpoint that is no later, if that "
                                 "of rank 0 is in doubt")
        self.agreed = self.step


@torch.no_grad()
def checksums(parameters: list[Tensor]) -> Tensor:
    """[2 n], on the device: the sum of each tensor's bits as integers, in two halves of 24 bits.

    Those are exact in fp32, and a bit that flips, of 32, changes one of them.
    """
    sums = [p.contiguous().view(INTEGERS[p.element_size()]).sum(dtype=torch.int64)
            for p in parameters]
    sums = torch.stack(sums)
    return torch.stack((sums & 0xFFFFFF, (sums >> 24) & 0xFFFFFF), 1).float().flatten()


def difference(table: np.ndarray, ranks: range, parameters: list[str]) -> str:
    """Which of the ranks differs from most others, and in what; "" if none does."""
    rows = {rank: tuple(table[rank]) for rank in ranks}
    (usual, count), *others = Counter(rows.values()).most_common()
    if not others:
        return ""
    odd = [rank for rank in ranks if rows[rank] != usual]
    differs = (table[odd] != np.array(usual)).any(0).reshape(-1, 2).any(1)
    layers = [name for name, each in zip(parameters, differs, strict=True) if each]
    where = layers[0] + (f" and {len(layers) - 1} others" if len(layers) > 1 else "")
    usual_ranks = [rank for rank in ranks if rows[rank] == usual]
    if count == others[0][1]:
        return (f"{names(sorted(odd + usual_ranks))} hold different weights, in {where}; which of "
                "them is wrong cannot be told")
    return f"{names(odd)} holds other weights than {names(usual_ranks)}, in {where}"
