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
    """Where permutation number `key` of 0 … n - 1 sends i; all uint64, no table, O(1) per element.

    A Feistel network on pairs (left, right) of Z_a x Z_b, which is a bijection for any round
    function. a * b exceeds n by less than sqrt(n) + 1; a result of n or more is encrypted again
    ("cycle walking", Black and Rogaway 2002), which few elements need.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    a, b = np.uint64(a), np.uint64(b)
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

    The pattern is as short as the weights allow, at most 10,000 (where counts are rounded), and
    each dataset is spread evenly over it.
    """
    weights = [w / sum(weights) for w in weights]
    length = min(10_000, math.lcm(*(w.denominator for w in weights)))
    counts = [math.floor(w * length) for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda k: counts[k] - weights[k] * length)
    for k in by_remainder[: length - sum(counts)]:
        counts[k] += 1
    counts = [max(1, n) for n in counts]  # a small dataset is rare, but never left out
    slots = [(Fraction(2 * i + 1, 2 * c), k) for k, c in enumerate(counts) for i in range(c)]
    return np.array([k for _, k in sorted(slots)])


class Order:
    """The dataset and its sample at each global position of a run: a function of (seed, position).

    sizes: how many samples each dataset has; weights: its share of the mixture.
    """

    WINDOW = 4096  # positions ordered at once: 0.4 µs each; 64 at once: 2.4 µs each

    def __init__(self, sizes: list[int], weights: list[Fraction], seed: int):
        self.sizes, self.seed = sizes, seed
        self.pattern = mixture_pattern(weights)
        self.rank_in_pattern = np.zeros_like(self.pattern)
        for k in range(len(sizes)):
            mine = self.pattern == k
            self.rank_in_pattern[mine] = np.arange(mine.sum())
        self.window, self.group, self.lengths = self.WINDOW, None, None
        self.cached_window = None, None

    def group_by_length(self, steps: int, batch_size: int, lengths: Callable):
        """From now on, sort each window of `steps` batches by length, cut it into batches, and
        shuffle those. So a step's samples are still a function of (seed, batch_size, position).

        lengths: (dataset of each sample, its number there) → tokens of each.
        """
        self.window, self.group, self.lengths = steps * batch_size, batch_size, lengths
        self.cached_window = None, None

    def epochs(self, position: int) -> list[float]:
        """Epochs of each dataset that come before this position."""
        cycle, r = divmod(position, len(self.pattern))
        done = []
        for k, n in enumerate(self.sizes):
            mine = self.pattern == k
            done.append((cycle * int(mine.sum()) + int(mine[:r].sum())) / n)
        return done

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """[2, stop - start]: the dataset and its sample at each global position."""
        windows = range(start // self.window, (stop - 1) // self.window + 1)
        found = [self.of_window(w) for w in windows]
        found = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        first = windows[0] * self.window
        return found[:, start - first : stop - first]

    def of_window(self, window: int) -> np.ndarray:
        cached, found = self.cached_window
        if cached == window:
            return found
        g = np.arange(window * self.window, (window + 1) * self.window, dtype=np.uint64)
        cycle, r = np.divmod(g, np.uint64(len(self.pattern)))
        source = self.pattern[r]
        sample = np.empty_like(g)
        for k in np.unique(source):
            mine, n = np.flatnonzero(source == k), self.sizes[k]
            per_cycle = np.uint64((self.pattern == k).sum())
            index = cycle[mine] * per_cycle + self.rank_in_pattern[r[mine]].astype(np.uint64)
            epoch, i = np.divmod(index, np.uint64(n))
            key = mix(mix(np.uint64([self.seed]) + np.uint64(int(k) << 32)) + epoch)
            sample[mine] = permute(i, n, key)
        found = np.stack((source, sample.astype(np.int64)))
        if self.group:
            by_length = np.argsort(self.lengths(*found), kind="stable").reshape(-1, self.group)
            n = len(by_length)
            key = np.full(n, mix(np.uint64([self.seed]) ^ ~np.uint64(window))[0])
            shuffled = permute(np.arange(n, dtype=np.uint64), n, key).astype(np.int64)
            found = found[:, by_length[shuffled].ravel()]
        self.cached_window = window, found
        return found
