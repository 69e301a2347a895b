"""Steps unlike the others: spikes of the loss or the gradient norm, and non-finite values."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from steady.guard import spikes
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
    again: bool = False  # the steps before were not finite either, as was reported

    def row(self, found: dict) -> dict:
        """For metrics.jsonl. found: what faults.autopsy returned."""
        row = dict(anomaly=self.kind, value=self.value, median=self.median, steps=self.steps)
        return row | dict(rank=self.rank) | found

    def text(self, found: dict) -> str:
        return describe(self.row(found))


def describe(row: dict) -> str:
    """What a row of metrics.jsonl says of an anomaly."""
    if row["anomaly"] == "not finite":
        text = "not finite: loss or gradient; without a finite gradient the update was skipped"
    else:
        text = f"{row['anomaly']}: {row['value']:.4g}, the median is {row['median']:.4g}"
    if "positions" in row:
        first, end = row["positions"]
        text += f"; rank {row['rank']}, samples {first} to {end - 1}"
    if row.get("first_bad_layer"):
        text += f"; first layer whose output is not finite: {row['first_bad_layer']}"
    return text


class AnomalyDetector:
    """Examines the losses and gradient norms of each log interval.

    report: whether to return anomalies, as on rank 0, or only to keep the medians up to date.
    """

    def __init__(self, report: bool):
        self.report = report
        self.recent = {name: deque(maxlen=WINDOW) for name in SPIKE_FACTOR}
        self.not_finite_since, self.not_finite_steps = None, 0

    def add(self, step: int, losses: np.ndarray, norms: np.ndarray, bad: np.ndarray,
            excess: np.ndarray | tuple = ()) -> tuple[list[Anomaly], list[str]]:
        """Of the newest steps, up to `step`; and what else to warn of.

        losses: [ranks, steps]; norms, bad: [steps], bad where a loss or norm is not finite;
        excess: [steps] of --skip_spikes, 0 where nothing was skipped.
        """
        steps = np.arange(step - losses.shape[1] + 1, step + 1)
        all_losses = np.where(np.isfinite(losses), losses, np.inf)
        ranks, worst = all_losses.argmax(0), all_losses.max(0)
        anomalies, texts = [], []
        if bad.any():
            first = int(bad.argmax())
            value = losses[ranks[first], first] if np.isinf(worst[first]) else norms[first]
            anomalies.append(Anomaly(
                "not finite", int(steps[first]), int(ranks[first]), float(value), 0.0,
                int(bad.sum()), again=self.not_finite_since is not None))
            self.not_finite_since = self.not_finite_since or int(steps[first])
            self.not_finite_steps += int(bad.sum())
        elif self.not_finite_since:
            texts.append(f"finite again; {self.not_finite_steps} steps from step "
                         f"{self.not_finite_since} on were not, and were skipped")
            self.not_finite_since, self.not_finite_steps = None, 0
        for name, values in (("loss", worst), ("gradient", norms)):
            median, limit = self.usual(name)
            high = ~bad & (values > limit)
            if high.any():
                i = int(np.where(high, values, -np.inf).argmax())
                anomalies.append(Anomaly(f"{name} spike", int(steps[i]), int(ranks[i]),
                                         float(values[i]), median, int(high.sum())))
            self.recent[name].extend(values[~bad].tolist())
        if np.any(excess):
            texts.append(spikes.describe(steps, excess, losses.mean(0), norms))
        return anomalies if self.report else [], texts

    def usual(self, name: str) -> tuple[float, float]:
        """(median of the newest values, what is a spike: infinity while too few are known)."""
        recent = self.recent[name]
        if len(recent) < MIN_VALUES:
            return 0.0, math.inf
        median = quantile(recent, 0.5)
        # 1.4826 median absolute deviations are one standard deviation of a normal distribution
        spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
        return median, max(SPIKE_FACTOR[name] * median, median + 10 * spread)
