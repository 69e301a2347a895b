"""Norms of gradients and weights, and how much an update changes them: overall and by layer."""

import contextlib
import re

import torch
from torch import Tensor


@contextlib.contextmanager
def measure_update(named_parameters: list[tuple[str, Tensor]], log):
    """Around an optimizer step: log(name, tensor) of each norm, without syncing with the device.

    A copy of the weights is kept while the step is made.
    """
    trained = [(name, p) for name, p in named_parameters if p.grad is not None]
    names = [name for name, _ in trained]
    weights = [p.detach() for _, p in trained]
    for group, norm in group_norms(names, [p.grad for _, p in trained]).items():
        log(f"health/grad_norm{group}", norm)
    before = [w.clone() for w in weights]
    sizes = group_norms(names, before)
    yield
    changes = group_norms(names, torch._foreach_sub(before, weights))
    for group, size in sizes.items():
        log(f"health/param_norm{group}", size)
        log(f"health/update_ratio{group}", changes[group] / size.clamp(min=1e-12))


def group_norms(names: list[str], tensors: list[Tensor]) -> dict[str, Tensor]:
    """Norms over all tensors ("") and over those of each layer ("/blocks.0"), on the device."""
    groups = {}
    for i, name in enumerate(names):
        layer = re.match(r"(.*?\.\d+)\.|[^.]*", name)
        groups.setdefault("/" + (layer[1] or layer[0]), []).append(i)
    norms = torch.stack(torch._foreach_norm(tensors)).float()
    return {"": norms.norm()} | {group: norms[i].norm() for group, i in groups.items()}
