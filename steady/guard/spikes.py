"""--skip_spikes: steps whose loss or gradient norm stands out are skipped, on the device."""

import torch
from torch import Tensor

WINDOW = 128  # steps that a new one is compared with, at most
NEEDED = 64  # and at least: then the standard deviation is known to 9 % (normal distribution)
SHOWN = 5  # spikes in one warning


class Spikes:
    """The losses and gradient norms of the newest finite steps, the same on all ranks.

    A spike is more than `sigmas` standard deviations above their mean. It joins them not with its
    own value, which would hide the next spike, but as the limit that it exceeded. So after a
    lasting rise each skipped step raises the limit, until at most one step in 1 + sigmas² is
    beyond it (Cantelli's inequality); were spikes left out, all steps might be skipped for ever.
    """

    def __init__(self, sigmas: float, device: torch.device):
        self.sigmas = sigmas
        self.window = torch.full((WINDOW, 2), torch.inf, device=device)  # inf: no step yet
        self.excess = None  # [], standard deviations that the newest step was above; 0: no spike

    def restore(self, window: Tensor | None):
        """Go on with the window of a checkpoint; with an empty one where it holds none."""
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
        self.excess = torch.where(spike, sigmas.max(), 0.0)
        return spike.float()


def describe(steps, excess, losses, norms) -> str:
    """The warning of the spikes among these steps; losses and norms: of all ranks."""
    found = [f"step {step} (loss {loss:.4g}, gradient norm {norm:.4g}, {sigmas:.3g} sigmas)"
             for step, sigmas, loss, norm in zip(steps, excess, losses, norms, strict=True)
             if sigmas]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"spikes, the updates were skipped: {', '.join(found[:SHOWN])}{more}"
