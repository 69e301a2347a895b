"""The order of samples as arithmetic: keyed permutations without a table, a mixture's pattern.

Everything is a function of its arguments, so a run resumes at any position in constant time.
"""

import math
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
