"""Whether a run learns, from the rows of metrics.jsonl; and the single steps unlike the others:
spikes of the loss or the gradient norm, and non-finite values.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass

from steady.watch.sinks import quantile
from steady.watch.words import Finding

LEAST, MOST = 5, 50  # logs that the loss is the median of: a tenth of all, within these bounds
NOISE = 100  # newest second differences of logs, which tell how much the loss varies anyway
# A spike is above the median by this factor and by ten robust standard deviations.
SPIKE_FACTOR = {"loss": 1.2, "gradient": 3.0}
MIN_VALUES = 20  # needed to know the median
WINDOW = 100  # finite values that a new one is compared with


class Learning:
    """Compares the loss of the newest logs with earlier ones and with a uniform guess.

    A run has diverged where the loss is
    - above its lowest by 20 %, by 0.1 nats and by 8 standard deviations of a log; or
    - above that of the first step by 0.5 nats and by 6 standard deviations of a step; or
    - above that of the first step and of a uniform guess by 0.5 nats, after however few logs.
    The deviations are those of second differences of logs, which a trend hardly widens.

    vocab_size: what a uniform guess chooses from; None if unknown.
    """

    def __init__(self, vocab_size: int | None = None):
        self.uniform = math.log(vocab_size) if vocab_size else math.inf
        self.first = None  # the loss of the first step
        self.recent, self.noise = deque(maxlen=MOST), deque(maxlen=NOISE)
        self.logs, self.said = 0, False
        self.newest, self.lowest = 0.0, math.inf  # smoothed losses
        self.since, self.limit = 0, math.inf  # the step since when the loss is above this, or 0
        self.step, self.interval = 0, 1  # of the newest log; the most steps from one to the next
        self.before = 0  # the step before the first log, as of a run that goes on elsewhere
        self.bad, self.bad_since, self.bad_losses = 0, 0, False  # not finite: not gradients alone
        self.val, self.best_val = None, (math.inf, 0)  # (validation loss, step)
        self.evaluated = None  # what these are of

    def add(self, row: dict) -> Finding | None:
        """The finding if the run has begun to diverge with this row."""
        if "evaluated" in row:  # other data, for one: losses that are not compared
            if self.evaluated not in (None, row["evaluated"]):
                self.val, self.best_val = None, (math.inf, 0)
            self.evaluated = row["evaluated"]
        if "val/loss" in row:
            loss = math.nan if row["val/loss"] is None else row["val/loss"]
            self.val = loss, row["step"]
            self.best_val = min(self.best_val, self.val)
        if "train/loss" not in row:
            return None
        if not self.step:  # the first log of a process is of one step
            self.step = self.before = row["step"] - 1
        began, self.step, loss = self.step + 1, row["step"], row["train/loss"]
        self.interval = max(self.interval, self.step - began + 1)
        finite = loss is not None and math.isfinite(loss)
        bad = row.get("health/nonfinite_steps") or int(not finite)
        self.bad += bad
        self.bad_since = self.bad_since or (began if bad else 0)
        self.bad_losses |= not finite
        if finite and self.first is None:
            self.first = loss
        elif finite:
            return self.compare(began, loss)
        return None

    def compare(self, began: int, loss: float) -> Finding | None:
        if len(self.recent) > 1:
            (_, earlier), (_, before) = self.recent[-2], self.recent[-1]
            self.noise.append(abs(loss - 2 * before + earlier))
        self.logs += 1
        self.recent.append((began, loss))
        newest = list(self.recent)[-max(LEAST, self.logs // 10) :]
        self.newest = quantile([value for _, value in newest], 0.5)
        limit = max(self.uniform, self.first) + 0.5
        if self.logs >= LEAST:
            self.lowest = min(self.lowest, self.newest)
            # 3.139 = 1.2816 sqrt(6); a median would not see that one log in ten is unlike the rest
            sigma = quantile(self.noise, 0.8) / 3.139
            sigma *= 1 + 5 / len(self.noise)  # as few are known only roughly
            limit = min(limit, self.lowest + max(0.2 * self.lowest, 0.1, 8 * sigma),
                        self.first + max(0.5, 6 * sigma * math.sqrt(self.interval)))
        if not self.since or self.newest <= self.limit:
            above = (step for step, value in newest if self.newest > limit and value > limit)
            self.since, self.limit = next(above, 0), limit
        said, self.said = self.said, self.since > 0 and self.logs >= LEAST
        return self.findings()[0] if self.said and not said else None

    def findings(self) -> list[Finding]:
        """What is wrong with the training up to the newest row."""
        found = []
        if self.since:
            found.append(Finding("diverged", self.since, dict(
                loss=self.newest, first=self.first, lowest=min(self.lowest, self.first))))
        elif self.logs >= LEAST and self.newest > self.uniform - 0.01:
            found.append(Finding("nothing learned", 1, dict(
                loss=self.newest, uniform=self.uniform)))
        if self.val:
            (loss, step), (best, best_step) = self.val, self.best_val
            limit = min(best + max(0.2 * best, 0.1), max(self.uniform, self.first or 0.0) + 0.5)
            if not loss <= limit:  # or NaN
                found.append(Finding("validation", best_step, dict(
                    loss=loss, step=step, best=best)))
        # of gradients alone a few: fp16's loss scaler finds its scale that way
        steps = self.step - self.before
        if self.bad_losses or self.bad > 0.01 * steps:
            found.append(Finding("not finite", self.bad_since, dict(count=self.bad, steps=steps)))
        return found


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

    def add(self, step: int, losses: list[list[float]],
            norms: list[float]) -> tuple[list[Anomaly], int]:
        """(those of the newest steps, up to `step`; how many of these are not finite).

        losses: [steps, ranks]; norms: [steps].
        """
        sizes = [[loss if math.isfinite(loss) else math.inf for loss in of_ranks]
                 for of_ranks in losses]
        worst = [max(of_ranks) for of_ranks in sizes]
        good = [math.isfinite(loss + norm) for loss, norm in zip(worst, norms, strict=True)]
        found, bad = [], good.count(False)

        def add(kind: str, i: int, value: float, median: float, steps: int, again=False):
            found.append(Anomaly(kind, step - len(norms) + 1 + i, sizes[i].index(worst[i]), value,
                                 median, steps, again))

        if bad:
            i = good.index(False)
            value = norms[i] if math.isfinite(worst[i]) else losses[i][sizes[i].index(math.inf)]
            add("not finite", i, value, 0.0, bad, self.was_bad)
        self.was_bad = bad > 0
        for name, values in (("loss", worst), ("gradient", norms)):
            finite = [*itertools.compress(values, good)]
            median, limit = self.usual(name, max(finite, default=0.0))
            high = [i for i, value in enumerate(values) if good[i] and value > limit]
            if high:
                i = max(high, key=values.__getitem__)
                add(f"{name} spike", i, values[i], median, len(high))
            self.recent[name].extend(finite)
        return found, bad

    def usual(self, name: str, highest: float) -> tuple[float, float]:
        """(median of the newest values, what is a spike: infinity while too few are known, and
        where `highest` is none anyway)."""
        recent = self.recent[name]
        if len(recent) < MIN_VALUES or highest <= SPIKE_FACTOR[name] * min(recent):
            return 0.0, math.inf
        median = quantile(recent, 0.5)
        # 1.4826 median absolute deviations are one standard deviation of a normal distribution
        spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
        return median, max(SPIKE_FACTOR[name] * median, median + 10 * spread)
