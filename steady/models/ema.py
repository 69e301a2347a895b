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
        trained = [p for p in model.parameters() if p.requires_grad]
        average_of = dict(zip(map(id, trained), self.averages, strict=True))
        self.tensors = {name: average_of[id(p)]
                        for name, p in model.named_parameters(remove_duplicate=False)
                        if id(p) in average_of}

    @torch.no_grad()
    def update(self, step: int):
        """After update number `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @contextlib.contextmanager
    def in_place(self, run) -> Iterator[None]:
        """The model computes with the averages in here; meanwhile the guard saves nothing."""
        if run.dir.writer:
            run.dir.writer.finish_copy()  # of the weights, to a checkpoint of this step
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
