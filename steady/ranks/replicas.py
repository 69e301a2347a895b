"""Do ranks that should hold the same weights hold the same bits?

They diverge when a GPU miscalculates, or when a fork changes weights on one rank alone; DDP
averages gradients and never compares weights.
"""

from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steady.options import Failed
from steady.ranks.ranks import rank_list

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class ReplicasDiffer(Failed):
    """Ranks hold different weights. agreed: checkpoints after this step are in doubt, if any."""

    def __init__(self, text: str, agreed: int | None):
        super().__init__(text)
        self.agreed = agreed


def compare_replicas(shards, step: int, agreed: int):
    """Compare this rank's weights and buffers with the others'. Raises ReplicasDiffer.

    shards: parallel.Shards; ranks r, r + shards.size, r + 2 shards.size, … hold the same rows.
    agreed: the newest step known to have had equal weights.
    """
    if dist.is_initialized():
        tensors = shards.tensors_of(shards.model)  # a forward pass may have replaced buffers
        sums = checksums(list(tensors.values()))
        table = sums.new_empty(dist.get_world_size(), len(sums))
        dist.all_gather(list(table), sums)
        compare_checksums(np.array(table.tolist()), list(tensors), shards, step, agreed)


def compare_checksums(table: np.ndarray, names: list[str], shards, step: int, agreed: int):
    """Raises ReplicasDiffer, on every rank. table: checksums [ranks, names]; buffers as rank 0."""
    size, differs, in_doubt = shards.size, np.zeros(table.shape, bool), False
    for first in range(size):  # `first` writes the checkpoints of these ranks
        rows = table[first::size]
        usual, count = Counter(map(tuple, rows)).most_common(1)[0]
        differs[first::size] = rows != np.array(usual)
        in_doubt |= differs[first].any() or 2 * count <= len(rows)
    differs |= [size > 1 and name in shards.whole for name in names] & (table != table[0])
    if odd := np.flatnonzero(differs.any(1)).tolist():
        text = (f"step {step}: the weights of {rank_list(odd)} differ from those of other ranks, "
                f"first in {names[differs.any(0).argmax()]}: after a backward pass beside run.ddp, "
                "random numbers in `update`, or a buffer of each rank's own, or on a faulty "
                f"device; they last agreed at step {agreed}")
        raise ReplicasDiffer(text, agreed if in_doubt else None)


@torch.no_grad()
def checksums(parameters: list[Tensor]) -> Tensor:
    """[n], on the device: the sum of each tensor's bits as integers; any flipped bit changes it."""
    return torch.stack([p.contiguous().view(INTEGERS[p.element_size()]).sum(dtype=torch.int64)
                        for p in parameters])
