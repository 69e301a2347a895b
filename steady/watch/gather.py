"""Values of all ranks, in one copy from each device and one collective."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def scalar(value):
    """The mean of a tensor in fp32 as [], without a sync; of anything else as a number, or NaN."""
    try:
        if not isinstance(value, Tensor) or value.is_meta:
            return float(value if isinstance(value, (int, float)) else np.mean(value))
        value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()  # FSDP
        # a copy, as a loop may add to the same tensor; in bf16 a sum of ones would end at 256
        return value.mean(dtype=torch.float32) if value.dim() else value.clone().float()
    except Exception:  # text, a number too large, a sparse tensor, …
        return math.nan


def on_host(parts: list[list], device: torch.device) -> list[list[float]]:
    """Lists of numbers and tensors [] as lists of numbers, in one copy from the device."""
    tensors = [value.to(device, torch.float32) for part in parts for value in part
               if isinstance(value, Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else [])
    return [[next(copied) if isinstance(value, Tensor) else value for value in part]
            for part in parts]


def gather(parts: list[list], group=None) -> list[list[list]]:
    """The parts of every rank, by rank."""
    if not dist.is_initialized():
        return [parts]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts, group)
    return of_ranks


def slowest_rank(own_ms: list[list[float]]) -> dict[str, float]:
    """The rank with the most work of its own, its ratio to the others, and the phase.

    own_ms: [ranks, own phases]. {} for a single rank, or until each GPU has finished a timed step.
    """
    if len(own_ms) == 1 or not all(map(any, own_ms)):
        return {}
    own, busy = np.array(own_ms), np.sum(own_ms, axis=1)
    slow = int(busy.argmax())
    typical = np.median(np.delete(own, slow, 0), axis=0)
    return {"perf/slowest_rank": slow,
            "perf/slowest_rank_ratio": busy[slow] / max(1e-9, typical.sum()),
            "perf/slowest_rank_phase": int((own[slow] - typical).argmax())}
