"""--ema: averages of the weights over the steps, which often predict better than the newest ones.

They are evaluated (`val/loss_ema`), sampled from, and exported. A schedule that decays late shows
with them the quality that the decay would bring.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from steady.ranks.parallel import release


class Ema:
    """Exponential averages of this rank's part of each trained weight, on its device.

    decay: the share of an average that an update keeps; (1 + step) / (10 + step) where that is
    less, so that the initial weights are soon forgotten. tensors: name → average, as a checkpoint
    holds it; tied weights have one average under both names.
    """

    def __init__(self, model: nn.Module, shards, decay: float):
        self.model, self.decay = model, decay
        self.weights = list(shards.parameters.values())
        self.averages = [w.detach().clone() for w in self.weights]
        by_name = dict(zip(shards.parameters, self.averages, strict=True))
        names = {}  # parameter → its first name, the one in shards.parameters
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), name)
        self.tensors = {name: by_name[names[id(p)]]
                        for name, p in model.named_parameters(remove_duplicate=False)
                        if names[id(p)] in by_name}

    @torch.no_grad()
    def update(self, step: int):
        """After update number `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @contextlib.contextmanager
    def in_place(self, run) -> Iterator[None]:
        """The model computes with the averages in here; meanwhile the guard saves nothing."""
        guard, writer = run.guard, run.dir.writer
        if writer:
            writer.finish_copy()  # of the weights, where a GPU still makes it
        release(self.model)
        guard.clean = False
        self.exchange()
        try:
            yield
        finally:
            release(self.model)
            self.exchange()
            guard.clean = True

    @torch.no_grad()
    def exchange(self):
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
