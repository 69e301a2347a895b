"""What keeps wrong weights out of a run: skipped steps are counted, and all ranks compared.

It needs no monitor: it reads the device itself, at the steps of a log.
"""

import time

import torch
from torch import Tensor

from steady.guard.deadline import Deadline
from steady.guard.spikes import Spikes
from steady.options import Failed, due
from steady.ranks.replicas import Replicas

PATIENCE = 30.0  # seconds for the steps that a device was given before one of them failed


class NotFinite(Failed):
    """Too many steps in a row were not finite, or the weights are not."""


class Guard:
    """Asked in every step whether to make its update, and after it whether to go on.

    nonfinite: skipped updates in a row, on the device. clean: the weights are those
    of the newest step, not half updated; on CUDA once the device has come to the event `updated`.
    spikes: with --skip_spikes. deadline: of --max_minutes.
    """

    def __init__(self, cfg, ranks):
        self.cfg, self.ranks, self.clean = cfg, ranks, True
        self.updated = torch.cuda.Event() if ranks.device.type == "cuda" else None
        self.nonfinite = torch.zeros((), device=ranks.device)
        self.spikes = Spikes(cfg.skip_spikes, ranks.device) if cfg.skip_spikes else None
        self.deadline = Deadline(cfg.max_minutes)
        self.replicas = Replicas(ranks.shards.tensors, ranks.shards.size,
                                 cfg.check_replicas_interval)

    def skips(self, found_inf: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Above 0 if the update is to be skipped, without syncing with the device.

        found_inf: 1.0 if the gradient is not finite; loss, grad_norm: of all ranks.
        """
        self.nonfinite = (self.nonfinite + 1) * found_inf
        return found_inf + self.spikes.find(loss, grad_norm) if self.spikes else found_inf

    def update_made(self):
        self.clean = True
        if self.updated:
            self.updated.record()

    def device_is_there(self) -> bool:
        """Whether the device has made the newest update; waits for it, but not for ever."""
        until = time.monotonic() + PATIENCE
        while self.updated and not self.updated.query() and time.monotonic() < until:
            time.sleep(0.01)
        return not self.updated or self.updated.query()

    def check(self, step: int, ended: bool = False):
        """Raise NotFinite after too many non-finite steps in a row, or ReplicasDiffer.

        Looks only at multiples of log_interval, and not at the log of a process's first step, so
        that a resumed run acts at the same step as an uninterrupted one. With --on_nonfinite skip
        it raises only if the weights are not finite either: then no later step can be. ended:
        whether the run has made all steps.
        """
        cfg = self.cfg
        self.replicas.check(step, cfg.max_steps)
        looks = due(step, cfg.log_interval, cfg.max_steps)
        count = int(self.nonfinite) if looks or ended else 0
        many = looks and count >= cfg.max_nonfinite
        if (many or ended) and not self.weights_are_finite():
            raise NotFinite(f"the weights are not finite at step {step}, and skipping steps cannot "
                            "help; try a lower --learning_rate, or --grad_clip 1")
        if ended and count >= cfg.max_nonfinite and self.ranks.rank == 0:
            print(f"warning: the last {count} steps had a loss or gradient that was not finite, "
                  "and were skipped", flush=True)
        if many and cfg.on_nonfinite != "skip":
            raise NotFinite(f"{count} steps in a row, up to step {step}, had a loss or gradient "
                            "that was not finite")

    def weights_are_finite(self) -> bool:
        """Of all ranks; as a checkpoint's writer looks at them. Waits for the device."""
        tensors = self.ranks.shards.tensors.values()
        norms = torch._foreach_norm([t for t in tensors if t.is_floating_point()])
        return self.ranks.minimum(int(torch.stack(norms).sum().isfinite())) == 1
