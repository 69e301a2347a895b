"""Steps unlike the others: spikes of the loss or the gradient norm, and non-finite values."""

from collections import deque

import numpy as np

from steady.guard.spikes import describe
from steady.watch.sinks import quantile

# A spike is above the median by this factor and by ten robust standard deviations.
SPIKE_FACTOR = {"loss": 1.2, "gradient": 3.0}
MIN_VALUES = 20  # needed to know the median


class AnomalyDetector:
    """Examines the losses and gradient norms of each log interval.

    window_size: how many finite values a new one is compared with.
    autopsy: (step, rank) → what to add to a row: samples, the first layer that is not finite.
    report: whether to return anomalies, as on rank 0, or only to keep the medians up to date.
    """

    def __init__(self, window_size: int, autopsy, report: bool):
        self.autopsy, self.report = autopsy, report
        self.recent = {name: deque(maxlen=window_size) for name in SPIKE_FACTOR}
        self.not_finite_since, self.not_finite_steps = None, 0

    def add(self, step: int, losses: np.ndarray, norms: np.ndarray, bad: np.ndarray,
            excess: np.ndarray | tuple = ()) -> list:
        """[(step, row or None, warning or None)] of the newest steps, up to `step`.

        losses: [ranks, steps]; norms, bad: [steps], bad where a loss or norm is not finite;
        excess: [steps] of --skip_spikes, 0 where nothing was skipped.
        """
        steps = np.arange(step - losses.shape[1] + 1, step + 1)
        worst = np.where(np.isfinite(losses), losses, np.inf)
        ranks = worst.argmax(0)
        found = {}  # kind → [(value, median, step, rank)]
        for i in np.flatnonzero(bad):
            value = losses[ranks[i], i] if np.isinf(worst[ranks[i], i]) else norms[i]
            found.setdefault("not finite", []).append((float(value), 0.0, steps[i], ranks[i]))
        for name, values in (("loss", worst.max(0)), ("gradient", norms)):
            for i, median in self.spikes(name, values, bad):
                item = (float(values[i]), median, steps[i], ranks[i])
                found.setdefault(f"{name} spike", []).append(item)
        out = []
        if "not finite" in found:
            self.not_finite_steps += len(found["not finite"])
        elif self.not_finite_since is not None:
            text = (f"finite again; {self.not_finite_steps} steps from step "
                    f"{self.not_finite_since} on were not, and were skipped")
            out.append((step, None, text))
            self.not_finite_since, self.not_finite_steps = None, 0
        if np.any(excess):
            out.append((step, None, describe(steps, excess, losses.mean(0), norms)))
        if self.report:
            out += [self.describe(kind, items) for kind, items in found.items()]
        return out

    def spikes(self, name: str, values: np.ndarray, bad: np.ndarray) -> list[tuple[int, float]]:
        """[(index, median before)] of the spikes; all finite values join the window."""
        recent, out = self.recent[name], []
        if len(recent) >= MIN_VALUES:
            median = quantile(recent, 0.5)
            if not (values > SPIKE_FACTOR[name] * median).any():  # the usual case: a sort less
                recent.extend(values[~bad].tolist())
                return out
            # 1.4826 median absolute deviations are one standard deviation of a normal distribution
            spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
            limit = max(SPIKE_FACTOR[name] * median, median + 10 * spread)
            out = [(i, median) for i in np.flatnonzero(~bad & (values > limit))]
        recent.extend(values[~bad].tolist())
        return out

    def describe(self, kind: str, items: list):
        """(step, row, warning) of the first non-finite step or the largest spike."""
        value, median, step, rank = items[0] if kind == "not finite" else max(items)
        step, rank = int(step), int(rank)
        row = dict(anomaly=kind, value=value, median=median, steps=len(items), rank=rank)
        row |= self.autopsy(step, rank)
        if kind == "not finite":
            if self.not_finite_since is not None:
                return step, row, None  # said already
            self.not_finite_since = step
            text = "not finite: loss or gradient, the update was skipped"
        else:
            text = f"{kind}: {value:.4g}, the median is {median:.4g}"
        if "positions" in row:
            text += f"; rank {rank}, samples {row['positions'][0]} to {row['positions'][1] - 1}"
        if row.get("first_bad_layer"):
            text += f"; first layer whose output is not finite: {row['first_bad_layer']}"
        return step, row, text
