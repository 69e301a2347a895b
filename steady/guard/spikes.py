"""--skip_spikes: steps whose loss or gradient norm stands out are skipped, on the device."""

from collections import deque

import torch
from torch import Tensor

WINDOW = 128  # steps that a new one is compared with, at most
NEEDED = 64  # and at least: then the standard deviation is known to 9 % (normal distribution)
SHOWN = 5  # spikes in one warning
MOST_SEEN = 1000  # steps between two logs, at most, with their spikes counted


class Spikes:
    """The losses and gradient norms of the newest finite steps, the same on all ranks.

    A spike is more than `sigmas` standard deviations above their mean. It joins them not with its
    own value, or it would hide the next spike, but as the limit that it exceeded. So after a
    lasting rise each skipped step raises the limit, until at most one step in 1 + sigmas² is
    beyond it (Cantelli's inequality); were spikes left out, all steps might be skipped for ever.
    """

    def __init__(self, sigmas: float, device: torch.device):
        self.sigmas = sigmas
        self.window = torch.full((WINDOW, 2), torch.inf, device=device)  # inf: no step yet
        # of each step since `take`: [3], standard deviations above the mean (0: no spike), loss,
        # gradient norm
        self.seen = deque(maxlen=MOST_SEEN)

    def restore(self, window: Tensor | None):
        """Go on with the window of a checkpoint, or an empty one."""
        if window is None or window.shape != self.window.shape:
            window = torch.full_like(self.window, torch.inf)
        self.window = window.to(self.window, copy=True)

    def find(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 if the step is a spike, else 0.0, without syncing with the device.

        Both of all ranks, and the same on each, or rounding could make them decide differently.
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

    def take(self, step: int) -> dict[str, int]:
        """A column: spikes in the steps since the last call, up to `step`; warns of them."""
        table = torch.stack([*self.seen]).tolist() if self.seen else []
        self.seen.clear()
        found = [f"step {i} (loss {loss:.4g}, gradient norm {norm:.4g}, {sigmas:.3g} sigmas)"
                 for i, (sigmas, loss, norm) in enumerate(table, step - len(table) + 1) if sigmas]
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            print(f"warning: step {step}: spikes, the updates were skipped: "
                  f"{', '.join(found[:SHOWN])}{more}", flush=True)
        return {"health/skipped_spikes": len(found)}
