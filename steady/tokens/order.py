"""The order of samples as arithmetic: keyed permutations without a table, a mixture's pattern.

Everything is a function of its arguments, so a run resumes at any position in constant time.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """Hash each uint64 of x to a uint64 (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Apply permutation number `key` of 0 … n - 1 to i; all uint64, no table, O(1) per element.

    A Feistel network on pairs (left, right) of Z_a x Z_b: a bijection for any round function. a * b
    exceeds n by less than sqrt(n) + 1; the few results of n or more are encrypted again ("cycle
    walking", Black and Rogaway 2002).
    """
    a = math.isqrt(max(0, n - 1)) + 1
    a, b = np.uint64(a), np.uint64(-(-n // a))
    out, todo = i.copy(), np.arange(len(i))
    while len(todo):
        left, right = np.divmod(out[todo], b)
        for round in range(4):
            round_key = mix(key[todo] + np.uint64(2 * round))
            left = (left + mix(right ^ round_key) % a) % a
            right = (right + mix(left ^ ~round_key) % b) % b
        out[todo] = left * b + right
        todo = todo[out[todo] >= n]
    return out


def mixture_pattern(weights: list[Fraction]) -> np.ndarray:
    """The repeating order of datasets: dataset k fills a share of exactly weights[k] of it.

    As short as the weights allow, at most about 10,000 (then counts are rounded), and each dataset
    is spread evenly.
    """
    weights = [Fraction(w) / sum(weights) for w in weights]
    length = min(10_000, math.lcm(*(w.denominator for w in weights)))
    counts = [math.floor(w * length) for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda k: counts[k] - weights[k] * length)
    for k in by_remainder[: length - sum(counts)]:
        counts[k] += 1
    counts = [n or int(w > 0) for n, w in zip(counts, weights, strict=True)]  # none is left out
    slots = [(Fraction(2 * i + 1, 2 * c), k) for k, c in enumerate(counts) for i in range(c)]
    return np.array([k for _, k in sorted(slots)])


class Stage:
    """One mixture, at positions begin … end - 1; before: earlier samples of each dataset."""

    def __init__(self, begin: int, weights: list[Fraction], before: list[int]):
        self.begin, self.end, self.before = begin, math.inf, before
        self.pattern = mixture_pattern(weights)
        self.places = [np.flatnonzero(self.pattern == k) for k in range(len(weights))]

    def samples_before(self, k: int, position):
        """The number of samples of dataset k before this position; also of an array of them."""
        cycle, r = divmod(position - self.begin, len(self.pattern))
        return self.before[k] + cycle * len(self.places[k]) + self.places[k].searchsorted(r)

    def position_of(self, k: int, number: int) -> int:
        """The position of this sample of dataset k, if possible at the start of a cycle."""
        cycle, r = divmod(number - self.before[k], len(self.places[k]))
        return self.begin + cycle * len(self.pattern) + (int(self.places[k][r]) if r else 0)


class Order:
    """The dataset and its sample at each global position of a run: a function of (seed, position).

    sizes: how many samples each dataset has; weights: its share of the mixture; later: (first
    position, weights) of each later stage. plan: [first position, share of each dataset] of all.
    """

    WINDOW = 4096  # positions ordered at once: 0.4 µs each; 64 at once: 2.4 µs each

    def __init__(self, sizes: list[int], weights: list[Fraction], seed: int, later=()):
        self.sizes, self.seed = sizes, seed
        self.stages = [Stage(0, weights, [0] * len(sizes))]
        for begin, weights in later:
            before = [self.stages[-1].samples_before(k, begin) for k in range(len(sizes))]
            self.stages[-1].end = begin
            self.stages.append(Stage(begin, weights, before))
        self.plan = [[s.begin, *(len(p) / len(s.pattern) for p in s.places)] for s in self.stages]
        self.window, self.group, self.lengths = self.WINDOW, None, None
        self.cached_window = None, None

    def group_by_length(self, steps: int, batch_size: int, lengths: Callable):
        """From now on, sort each window of `steps` batches by length, cut it into batches, and
        shuffle those. So a step's samples are still a function of (seed, batch_size, position).

        A window ends at a new epoch of any dataset, so it holds no sample twice.
        lengths: (dataset of each sample, its number there) → tokens of each.
        """
        self.window, self.group, self.lengths = steps * batch_size, batch_size, lengths
        self.cached_window = None, None

    def stage_at(self, position: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.begin <= position)

    def epochs(self, position: int) -> list[float]:
        """Epochs of each dataset before this position."""
        stage = self.stage_at(position)
        return [stage.samples_before(k, position) / n for k, n in enumerate(self.sizes)]

    def window_at(self, position: int) -> tuple[int, int]:
        """Begin and end of the window around a position."""
        stage, begin = self.stage_at(position), position // self.window * self.window
        end, first, last = begin + self.window, stage.begin, stage.end
        for k, n in enumerate(self.sizes if self.group else ()):
            if len(stage.places[k]):
                epoch = stage.samples_before(k, position) // n
                epoch -= stage.position_of(k, epoch * n) > position
                first = max(first, stage.position_of(k, epoch * n))
                last = min(last, stage.position_of(k, (epoch + 1) * n))
        if last - first <= self.window:  # one window for a whole epoch
            return first, last
        return max(begin, first), min(end, last)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """[2, stop - start]: the dataset and its sample at each global position."""
        found = []
        while start < stop:
            begin, end = window = self.window_at(start)
            if self.cached_window[0] != window:
                self.cached_window = window, self.of_window(begin, end)
            found.append(self.cached_window[1][:, start - begin : stop - begin])
            start = end
        return np.concatenate(found, axis=1)

    def of_window(self, begin: int, end: int) -> np.ndarray:
        stage, g = self.stage_at(begin), np.arange(begin, end)
        source = stage.pattern[(g - stage.begin) % len(stage.pattern)]
        sample = np.empty_like(g)
        for k in np.unique(source):
            mine, n = np.flatnonzero(source == k), self.sizes[k]
            epoch, i = np.divmod(stage.samples_before(k, g[mine]).astype(np.uint64), np.uint64(n))
            key = mix(mix(np.uint64([self.seed]) + np.uint64(int(k) << 32)) + epoch)
            sample[mine] = permute(i, n, key)
        found = np.stack((source, sample))
        return found[:, self.by_length(begin, end, found)] if self.group else found

    def by_length(self, begin: int, end: int, found: np.ndarray) -> np.ndarray:
        """The order of the samples found in a window: sorted, in shuffled batches.

        A step that began in the previous window gets the shortest samples, a step that ends in the
        next window the longest. So no step gets a sample twice if both windows are whole epochs.
        """
        lengths, n = self.lengths(*found), end - begin
        head = min(-begin % self.group, n)
        tail = end % self.group if head < n else 0
        part = np.zeros(n, np.int8)
        exact = np.lexsort((*found, lengths))  # the same in both windows
        part[exact[:head]], part[exact[n - tail :]] = -1, 1
        order = np.lexsort((lengths, part))
        batches = order[head : n - tail].reshape(-1, self.group)
        number = begin // self.window if begin % self.window == 0 else begin
        key = np.full(len(batches), mix(np.uint64([self.seed]) ^ ~np.uint64(number))[0])
        shuffled = permute(np.arange(len(batches), dtype=np.uint64), len(batches), key)
        return np.concatenate((order[:head], batches[shuffled].ravel(), order[n - tail :]))
