"""Values of all ranks, in one copy from each device and one collective."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steady.watch.sinks import plain


def scalar(value):
    """A tensor of one element as [], a NumPy scalar as a number; never syncs with the device."""
    return value.detach().reshape(()) if isinstance(value, Tensor) else plain(value)


def on_device(values: list, device: torch.device) -> Tensor:
    """Numbers and tensors [] as [n] in fp32, in one copy from the host."""
    numbers = [value for value in values if not isinstance(value, Tensor)]
    numbers = iter(torch.tensor(numbers, dtype=torch.float32, device=device).unbind())
    return torch.stack([value.to(device, torch.float32) if isinstance(value, Tensor)
                        else next(numbers) for value in values])


def gather(values: Tensor, names: list[str], group=None) -> Tensor:
    """[n] of each rank → [ranks, n], the same on every rank.

    names: of the metrics among the values. Raises RuntimeError on all ranks where they differ: gloo
    aborts where sizes do, and else the values of one metric would be averaged with another's.
    """
    if not dist.is_initialized():
        return values[None]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, names, group)
    alone = {name: [rank for rank, have in enumerate(of_ranks) if name in have]
             for name in sorted(set().union(*of_ranks) - set(of_ranks[0]).intersection(*of_ranks))}
    if alone:
        found = "; ".join(f"{name} by {ranks} alone" for name, ranks in alone.items())
        raise RuntimeError(f"all ranks must log the same metrics: {found}")
    table = values.new_empty(len(of_ranks), len(values))
    dist.all_gather(list(table), values)
    return table


def slowest_rank(own_ms: list[list[float]]) -> dict[str, float]:
    """The rank with the most work of its own, its ratio to the others, and the phase.

    own_ms: [own phases, ranks]. {} for a single rank, and where the GPU of one has not got to the
    end of a step that is timed, as with a log at each step.
    """
    if len(own_ms[0]) == 1 or not np.any(own_ms, 0).all():
        return {}
    own = np.transpose(own_ms)
    busy = own.sum(1)
    slow = int(busy.argmax())
    typical = np.median(np.delete(own, slow, 0), axis=0)
    return {
        "perf/slowest_rank": slow,
        "perf/slowest_rank_ratio": busy[slow] / max(1e-9, typical.sum()),
        "perf/slowest_rank_phase": int((own[slow] - typical).argmax()),
        "ranks_ms": [round(float(ms), 3) for ms in busy],
    }
