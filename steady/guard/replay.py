"""--replay_interval: a micro-batch computed twice, to find a device that miscalculates.

A processor or a memory that flips bits leaves no other sign: the loss stays plausible. A weight
that was altered in memory is the same in both passes: ranks/replicas.py finds that. The random
numbers of a step are a function of its number, so both passes have the same.
"""


import torch
import torch.distributed as dist
from torch import Tensor

from steady.options import Failed, due
from steady.ranks.parallel import local_part
from steady.ranks.replicas import checksums

# Relative differences of a loss and of a gradient's norm that are rounding, where kernels may add
# in any order.
OF_LOSS, OF_NORM = 1e-4, 1e-2


class Miscalculated(Failed):
    """A rank had two results of the same micro-batch."""


def replay(run, batch, seed_everything):
    """Where it is due, compute a micro-batch twice; raises Miscalculated, on all ranks, where the
    results differ.

    To be called before an update; the gradients of the step stay as they are, beside those of the
    pass. Bit by bit on a CPU and with deterministic algorithms. Waits for the device.
    seed_everything: (seed, step, rank), so that dropout is the same.
    """
    model, ranks = run.model, run.ranks
    if not due(run.progress.step + 1, run.cfg.replay_interval):
        return
    kept = [p.grad for p in model.parameters()]
    exact = ranks.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    first, second = (measure(run, batch, seed_everything, exact) for _ in range(2))
    for p, grad in zip(model.parameters(), kept, strict=True):
        p.grad = grad
    found = difference(first, second, exact)
    names = ["the loss", *(name for name, p in model.named_parameters() if p.requires_grad)]
    told = f"rank {ranks.rank} ({ranks.device}): {names[found]}" if found is not None else None
    of_all = [told]
    if ranks.group:
        of_all = [None] * ranks.world_size
        dist.all_gather_object(of_all, told, ranks.group)
    if any(of_all):
        raise Miscalculated(f"step {run.progress.step + 1}: the same micro-batch had two results, "
                            f"of {'; '.join(filter(None, of_all))}; the update was not made: do "
                            "not trust this machine")


def measure(run, batch, seed_everything, exact: bool) -> Tensor:
    """[n], on the host: checksums of the losses and each gradient, or the loss and their norms."""
    run.monitor.phase("other")  # not that of waiting, as `watch_for_waiting` would have it
    for p in run.model.parameters():
        p.grad = None
    seed_everything(run.cfg.seed, run.progress.step, run.ranks.rank)
    with run.ranks.autocast:
        losses = run.model(batch.tokens, batch.targets, batch.documents)
    losses.sum().backward()
    grads = [local_part(p.grad) if p.grad is not None else local_part(p).new_zeros(1)
             for p in run.model.parameters() if p.requires_grad]
    if exact:
        return checksums([losses.detach(), *grads]).cpu()
    norms = torch.stack([grad.norm().float() for grad in grads])
    return torch.cat((losses.detach().sum()[None], norms)).cpu()


def difference(first: Tensor, second: Tensor, exact: bool) -> int | None:
    """The first of what `measure` returns that differs."""
    if exact:
        differs = first != second
    else:
        bounds = torch.full_like(first, OF_NORM)
        bounds[0] = OF_LOSS
        differs = ~((first - second).abs() <= bounds * first.abs())  # also where one is NaN
        differs &= first.isfinite() | second.isfinite()
    return int(differs.nonzero()[0]) if differs.any() else None
