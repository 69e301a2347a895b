"""--ema: averages of the weights over the steps often predict better than the newest weights.

They are evaluated (`val/loss_ema`), sampled from and exported. Before a late decay of the learning
rate, they already show roughly the quality after that decay.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from steady.ranks.parallel import release


class Ema:
    """Exponential averages of this rank's part of each trained weight, on its device.

    decay: the share of an average kept by an update; at most (1 + step) / (10 + step), to forget
    the initial weights soon. tensors: name → average, for checkpoints; tied weights have one
    average under both names.
    """

    def __init__(self, model: nn.Module, shards, decay: float):
        self.model, self.decay = model, decay
        self.weights = list(shards.parameters.values())
        self.averages = [w.detach().clone() for w in self.weights]
        trained = [p for p in model.parameters() if p.requires_grad]
        average_of = dict(zip(map(id, trained), self.averages, strict=True))
        self.tensors = {name: average_of[id(p)]
                        for name, p in model.named_parameters(remove_duplicate=False)
                        if id(p) in average_of}

    @torch.no_grad()
    def update(self, step: int):
        """Update the averages after update number `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @contextlib.contextmanager
    def in_place(self, run) -> Iterator[None]:
        """Within this context the averages are the weights, and the guard saves nothing."""
        if run.dir.writer:
            run.dir.writer.finish_copy()  # a checkpoint of this step copies the weights
        release(self.model)
        run.guard.clean = False
        self.exchange()
        try:
            yield
        finally:
            release(self.model)
            self.exchange()
            run.guard.clean = True

    @torch.no_grad()
    def exchange(self):
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
