"""Non-finite steps and spikes are skipped on the device, and counted; all ranks are compared.

Independent of the monitor: it reads the device itself, at log steps.
"""

from collections import deque

import torch
from torch import Tensor

from steady.options import Failed, due
from steady.ranks.replicas import compare_replicas

WINDOW = 128  # steps that a new one is compared with, at most
NEEDED = 64  # and at least: they give the standard deviation to 9 % (normal distribution)


class NotFinite(Failed):
    """Too many steps in a row were not finite, or the weights are not."""


class Guard:
    """Decides in every step whether to make the update, and after it whether to go on.

    nonfinite: skipped updates in a row, on the device. clean: the weights are those of the newest
    step, not half updated; on CUDA once the device has reached the event `updated`. agreed: the
    newest step known to have had equal weights on all ranks.
    """

    def __init__(self, cfg, ranks):
        self.cfg, self.ranks, device = cfg, ranks, ranks.device
        self.clean, self.agreed = True, 0
        self.updated = torch.cuda.Event() if device.type == "cuda" else None
        self.nonfinite = torch.zeros((), device=device)
        self.spikes = Spikes(cfg.skip_spikes, device, cfg.log_interval) if cfg.skip_spikes else None

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

    def check(self, step: int, ended: bool = False):
        """Raise NotFinite after too many non-finite steps in a row, or ReplicasDiffer.

        Reads the device only at multiples of log_interval, so that a resumed run acts at the same
        step as an uninterrupted one. With --on_nonfinite skip it raises only if the weights are not
        finite either: then no later step can be. ended: whether the run has made all steps.
        """
        cfg, shards = self.cfg, self.ranks.shards
        if due(step, cfg.check_replicas_interval, cfg.max_steps):
            compare_replicas(shards, step, self.agreed)
            self.agreed = step
        at_log = due(step, cfg.log_interval, cfg.max_steps)
        count = int(self.nonfinite) if at_log or ended else 0
        many = at_log and count >= cfg.max_nonfinite
        if many or ended:  # waits for the device
            buffers = dict(shards.model.named_buffers(remove_duplicate=False))
            norms = torch._foreach_norm([
                x.nan_to_num(torch.nan, 0, 0) if name in buffers else x  # a mask has infinities
                for name, x in shards.tensors_of(shards.model).items() if x.is_floating_point()])
            if not self.ranks.minimum(int(torch.stack(norms).sum().isfinite())):
                raise NotFinite(f"the weights are not finite at step {step}, and skipping steps "
                                "cannot help; try a lower --learning_rate, or --grad_clip 1")
        if ended and count >= cfg.max_nonfinite and self.ranks.rank == 0:
            print(f"warning: the last {count} steps had a loss or gradient that was not finite, "
                  "and were skipped", flush=True)
        if many and cfg.on_nonfinite != "skip":
            raise NotFinite(f"{count} steps in a row, up to step {step}, had a loss or gradient "
                            "that was not finite")


class Spikes:
    """--skip_spikes: the losses and gradient norms of the newest finite steps, alike on all ranks.

    A spike is more than `sigmas` standard deviations above their mean. It joins them as the limit
    that it exceeded: its own value would hide the next spike. After a lasting rise each skipped
    step raises the limit, until at most one step in 1 + sigmas² is beyond it (Cantelli's
    inequality); if spikes were left out, every later step could be skipped.
    """

    def __init__(self, sigmas: float, device: torch.device, log_interval: int = 1000):
        self.sigmas = sigmas
        self.window = torch.full((WINDOW, 2), torch.inf, device=device)  # inf: no step yet
        # the newest since `take`: standard deviations above the mean (0: no spike), loss, norm
        self.seen = deque(maxlen=log_interval)

    def find(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 if the step is a spike, else 0.0, without syncing with the device.

        loss, grad_norm: of all ranks and equal on each, or ranks might decide differently.
        """
        latest = torch.stack((loss, grad_norm)).float()
        seen = self.window.masked_fill(self.window.isinf(), torch.nan)
        mean = seen.nanmean(0)
        deviation = (seen - mean).square().nanmean(0).sqrt()
        unknown = seen[-NEEDED].isnan() | (deviation == 0)  # then no step would raise the limit
        limit = torch.where(unknown, torch.inf, mean + self.sigmas * deviation)
        finite = latest.isfinite().all()
        spike = finite & (latest > limit).any()
        longer = torch.cat((self.window[1:], latest.minimum(limit)[None]))
        self.window = torch.where(finite, longer, self.window)
        sigmas = torch.where(latest > limit, (latest - mean) / deviation, 0.0)
        self.seen.append(torch.cat((torch.where(spike, sigmas.max(), 0.0)[None], latest)))
        return spike.float()

    def take(self, step: int, warns: bool) -> dict[str, int]:
        """A column: the spikes in the steps since the last call, up to `step`; warns: of them."""
        table = torch.stack([*self.seen]).tolist() if self.seen else []
        self.seen.clear()
        found = [f"step {i} (loss {loss:.4g}, gradient norm {norm:.4g}, {sigmas:.3g} sigmas)"
                 for i, (sigmas, loss, norm) in enumerate(table, step - len(table) + 1) if sigmas]
        if found and warns:
            more = f" and {len(found) - 5} more" * (len(found) > 5)
            print(f"warning: step {step}: spikes, the updates were skipped: "
                  f"{', '.join(found[:5])}{more}", flush=True)
        return {"health/skipped_spikes": len(found)}
