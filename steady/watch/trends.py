"""Whether a run learns, and whether a resource ends before the run does: from its history."""

import math

import numpy as np

from steady.watch.findings import Finding, si
from steady.watch.history import History, quantile

# --- learning --------------------------------------------------------------------------------

LEAST, MOST = 5, 50  # logs in a smoothed loss: a tenth of all, within these bounds


def diverged(history: History) -> list[Finding]:
    """Findings: divergence, nothing learned, a worse validation loss, non-finite steps."""
    steps, losses = history.column("step"), history.column("train/loss")
    finite = np.isfinite(losses)
    found = learning(steps[finite], losses[finite], history.about.get("vocab_size"))
    if vals := [(loss, step) for step, loss in history.evaluations.items()]:
        loss, step = vals[-1]
        best, since = min(vals, key=lambda val: (math.isnan(val[0]), val))
        if not loss <= best + max(0.2 * abs(best), 0.1):  # or NaN
            found.append(Finding("validation", since, dict(loss=loss, step=step, best=best)))
    bad = [each for each in history.nonfinite if each["step"] >= history.rows[0]["step"]]
    count = sum(each["count"] for each in bad)
    total = history.logged - history.rows[0]["step"] + 1 if history.rows else 0
    # a few non-finite gradients are normal: fp16's loss scaler finds its scale that way
    if count > (0.01 * total if all(each["finite"] for each in bad) else 0):
        found.append(Finding("not finite", bad[0]["step"], dict(count=int(count), steps=total)))
    return found


def learning(steps: np.ndarray, losses: np.ndarray, vocab_size: float | None) -> list[Finding]:
    """A run has diverged once its smoothed loss exceeds the lowest by 20 %, 0.1 nats and 8 standard
    deviations of a log; or the first step's by 0.5 nats and 6 standard deviations of a step; or
    that and a uniform guess by 0.5 nats.
    """
    if len(losses) <= LEAST:
        return []
    uniform = math.log(vocab_size) if vocab_size and vocab_size > 1 else math.inf
    first, rest = losses[0], losses[1:]
    width = min(max(LEAST, len(rest) // 10), MOST)
    smooth = np.array([np.median(rest[max(0, i - width + 1) : i + 1])
                       for i in range(LEAST - 1, len(rest))])
    newest, lowest = smooth[-1], smooth.min()
    # From second differences: a trend hardly widens them. For a normal distribution, the 0.8
    # quantile of their size is 3.139 = 1.2816 sqrt(6) sigma; the last factor is for few logs.
    sigma = float(np.quantile(np.abs(np.diff(rest, 2)), 0.8)) / 3.139 * (1 + 5 / len(rest))
    limit = min(max(first, uniform) + 0.5, lowest + max(0.2 * abs(lowest), 0.1, 8 * sigma),
                first + max(0.5, 6 * sigma * math.sqrt(np.diff(steps).max())))
    facts = dict(loss=float(newest), first=float(first), lowest=float(min(first, lowest)))
    if newest > limit:
        below = np.flatnonzero(smooth <= limit)
        start = below[-1] if len(below) else 0  # start of the newest stretch above the limit
        start += int(np.argmax(rest[start:] > limit))
        return [Finding("diverged", int(steps[start]) + 1, facts)]
    if newest > uniform - 0.01:
        return [Finding("nothing learned", 1, facts | dict(uniform=uniform))]
    return []


# --- single steps ----------------------------------------------------------------------------

SPIKE_FACTOR = {"loss": 1.2, "gradient": 3.0}  # and ten robust standard deviations above the median
MIN_VALUES, WINDOW = 20, 100  # finite values needed, and used, for the median


class Spikes:
    """Finds non-finite steps and spikes among the losses and gradient norms of a log interval."""

    def __init__(self):
        self.recent = {name: [] for name in SPIKE_FACTOR}
        self.was_bad = False

    def add(self, steps: list, losses: list[list], norms: list[float]) -> tuple[list, int]:
        """(anomalies of these steps, as rows; number of non-finite steps).

        losses: [steps, ranks]; norms: [steps], or of another length if not all are known. "again":
        the last interval had non-finite steps as well.
        """
        sizes = [[x if math.isfinite(x) else math.inf for x in of_ranks] for of_ranks in losses]
        norms = norms if len(norms) == len(sizes) else [0.0] * len(sizes)
        values = {"loss": [max(of_ranks) for of_ranks in sizes], "gradient": norms}
        good = [i for i in range(len(sizes)) if math.isfinite(values["loss"][i] + norms[i])]
        bad = [i for i in range(len(sizes)) if i not in good]
        found = [("not finite", bad[0], math.nan, 0.0)] if bad else []
        for name, each in values.items():
            i = max(good, key=each.__getitem__, default=0)
            median, limit = self.usual(name, each[i])
            if good and each[i] > limit:
                found.append((f"{name} spike", i, each[i], median))
            self.recent[name] = [*self.recent[name], *(each[i] for i in good)][-WINDOW:]
        rows = [dict(step=steps[i], anomaly=kind, value=value, median=median,
                     rank=sizes[i].index(max(sizes[i])),
                     again=self.was_bad and kind == "not finite")
                for kind, i, value, median in found]
        self.was_bad = bool(bad)
        return rows, len(bad)

    def usual(self, name: str, highest: float) -> tuple[float, float]:
        """(median, spike limit): infinity while too few values are known."""
        recent = self.recent[name]
        if len(recent) < MIN_VALUES or highest <= SPIKE_FACTOR[name] * min(recent):
            return 0.0, math.inf
        median = quantile(recent, 0.5)
        # 1.4826 median absolute deviations are one standard deviation of a normal distribution
        spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
        limit = max(SPIKE_FACTOR[name] * median, median + 10 * spread)
        return median, limit or 10 * max(recent) or math.inf  # limit 0: a hinge loss, mostly 0


# --- resources -------------------------------------------------------------------------------

SAMPLES = 20  # at least, for a trend
HORIZON = 5  # growth is extrapolated to at most so many times the observed span
RESOURCES = {  # name → (column: used, or free; column of its limit, or "" for 0)
    # with the loader's processes, without mapped files (token files): the system may drop those
    "host memory": ("memory/host_anonymous_gb", "limit/host_gb"),
    # without the allocator's unused reserve: it can be given back
    "device memory": ("memory/allocated_gb", "limit/device_gb"),
    "open files": ("memory/open_files", "limit/open_files"),
    "threads": ("memory/threads", "limit/threads"),
    "disk space": ("disk/free_gb", "")}


def runs_out(history: History) -> list[Finding]:
    """Resources that would run out before the last step."""
    about, steps, found = history.about, history.column("step"), []
    for name, (column, limit) in RESOURCES.items():
        # since the newest process began; for the disk, once old checkpoints are deleted, too
        after = history.process_began if limit else about.get("settled_step", 0)
        used = history.column(column) * (1 if limit else -1)
        known = np.isfinite(used) & (steps > after)
        x, values, room = steps[known], used[known], about.get(limit, math.inf) if limit else 0.0
        if len(values) < SAMPLES:
            continue
        if name == "device memory":  # a step needs more than stays between steps
            room -= max(0.0, history.last("memory/peak_gb") - values[-1])
        growth = trend(x, values - values[0], room - values[0])
        if growth and growth[2] < (about.get("last_step") or 0):
            since, per_step, at_step = growth
            rate = f"{si(1e9 * per_step)}B" if column.endswith("_gb") else f"{per_step:.3g}"
            found.append(Finding(name, since, dict(
                at_step=max(at_step, int(steps[-1])), last_step=int(about["last_step"]),
                rate=f"{rate}/step", per_step=per_step)))
    return found


def trend(steps: np.ndarray, values: np.ndarray, limit: float) -> tuple | None:
    """(first step of sustained growth, slope, step of reaching the limit) or None.

    Looks at the newest quarter, then half, then all samples, as the first may be warm-up. Growth
    must go on through five blocks, leave the range seen before, and reach the limit within HORIZON
    times its length so far, even if it slows down like 1 - exp(-t).
    """
    for start in (3 * len(values) // 4, len(values) // 2, 0):
        x, y = steps[start:], values[start:]
        if len(y) < SAMPLES:
            continue
        blocks = np.array([np.median(block) for block in np.array_split(y, 5)])
        rises, total = np.diff(blocks), blocks[-1] - blocks[0]
        if (rises.min() <= total / 16  # a quarter of the mean rise; a single jump is in one
                or blocks[-1] - values[: start + len(y) // 5].max() < 0.5 * total):
            continue  # a sawtooth
        slope, level = np.polyfit(x, y, 1)
        left = max(0.0, limit - slope * x[-1] - level)
        # Saturating growth falls by the same ratio from half to half. Take the lowest ratio that
        # the noise of the medians of two blocks allows.
        off = values - slope * steps - level
        noise = float(np.median(np.abs(off[start:])))
        doubt = 3 * noise * math.sqrt(3.1 * 5 / len(y))
        first, second = blocks[2] - blocks[0], blocks[4] - blocks[2]
        ratio = (second - doubt) / (first + doubt)
        if (left > HORIZON * slope * (x[-1] - x[0])
                or ratio < 1 and left > second * ratio / (1 - ratio)):
            continue
        while start and abs(off[start - 1]) < 4 * noise + 1e-6 * total:
            start -= 1  # the growth began before this half
        return round(steps[start]), float(slope), round(x[-1] + left / slope)
    return None
