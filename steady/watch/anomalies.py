"""Steps unlike the others: spikes of the loss or the gradient norm, and non-finite values."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from steady.watch.sinks import quantile

# A spike is above the median by this factor and by ten robust standard deviations.
SPIKE_FACTOR = {"loss": 1.2, "gradient": 3.0}
MIN_VALUES = 20  # needed to know the median
WINDOW = 100  # finite values that a new one is compared with


@dataclass
class Anomaly:
    """The first non-finite step of a log interval, or its largest spike."""

    kind: str  # "not finite", "loss spike", "gradient spike"
    step: int
    rank: int  # whose loss it was
    value: float
    median: float  # of the steps before
    steps: int  # how many of this kind the interval has
    again: bool = False  # the interval before had some that were not finite, too

    def row(self, found: dict) -> dict:
        """For metrics.jsonl. found: what faults.autopsy returned."""
        return dict(anomaly=self.kind, value=self.value, median=self.median, steps=self.steps,
                    rank=self.rank) | found


class AnomalyDetector:
    """Examines the losses and gradient norms of each log interval."""

    def __init__(self):
        self.recent = {name: deque(maxlen=WINDOW) for name in SPIKE_FACTOR}
        self.was_bad = False

    def add(self, step: int, losses: np.ndarray, norms: np.ndarray,
            bad: np.ndarray) -> list[Anomaly]:
        """Of the newest steps, up to `step`.

        losses: [ranks, steps]; norms, bad: [steps], bad where a loss or norm is not finite.
        """
        steps = np.arange(step - losses.shape[1] + 1, step + 1)
        all_losses = np.where(np.isfinite(losses), losses, np.inf)
        ranks, worst = all_losses.argmax(0), all_losses.max(0)
        found = []
        if bad.any():
            first = int(bad.argmax())
            value = losses[ranks[first], first] if np.isinf(worst[first]) else norms[first]
            found.append(Anomaly("not finite", int(steps[first]), int(ranks[first]), float(value),
                                 0.0, int(bad.sum()), again=self.was_bad))
        self.was_bad = bool(bad.any())
        for name, values in (("loss", worst), ("gradient", norms)):
            median, limit = self.usual(name)
            high = ~bad & (values > limit)
            if high.any():
                i = int(np.where(high, values, -np.inf).argmax())
                found.append(Anomaly(f"{name} spike", int(steps[i]), int(ranks[i]),
                                     float(values[i]), median, int(high.sum())))
            self.recent[name].extend(values[~bad].tolist())
        return found

    def usual(self, name: str) -> tuple[float, float]:
        """(median of the newest values, what is a spike: infinity while too few are known)."""
        recent = self.recent[name]
        if len(recent) < MIN_VALUES:
            return 0.0, math.inf
        median = quantile(recent, 0.5)
        # 1.4826 median absolute deviations are one standard deviation of a normal distribution
        spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
        return median, max(SPIKE_FACTOR[name] * median, median + 10 * spread)
