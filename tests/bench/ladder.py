"""The best learning rate for each --depth, and the power of depth that `of_depth` uses.

    python -m tests.bench ladder          hours on two cores

Runs of the default data over a quarter of the steps, in turns of seeds. Each rate has its weight
decay: their product with the number of steps is that of the recipe. For each depth a parabola in
the logarithm of the rate, with one curvature for all of them, goes through the losses, each less
the mean of its seed; its lowest point is the best rate. Their logarithms give the power of depth,
with an interval from 1,000 draws of seeds.
"""

import json
import math
import subprocess
import sys
import tempfile

import numpy as np

from config import of_depth
from tests.bench.common import Figure
from tests.bench.startup import TRAIN

FACTORS = {1: (0.4, 0.6, 0.8, 1.1, 1.6), 2: (0.5, 0.7, 1, 1.4, 2), 3: (0.7, 1, 1.4, 2),
           4: (0.6, 0.9, 1.7)}  # depth → rates, in those of `of_depth`
SEEDS = {1: 3, 2: 3, 3: 3, 4: 2}
SHARE = 4  # of the steps of the recipe: one in so many


def val_loss(depth: int, factor: float, seed: int) -> float:
    recipe = of_depth(depth)
    steps, rate = recipe["max_steps"] // SHARE, factor * recipe["learning_rate"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([
            sys.executable, str(TRAIN), "--depth", str(depth), "--max_steps", str(steps),
            "--learning_rate", str(rate), "--weight_decay", str(1.5 / (rate * steps)), "--seed",
            str(seed), "--json", "--sample_interval=0", "--save_interval=0", "--no_tensorboard",
            "--eval_interval=1000000", "--out_dir", folder], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["val_loss"]


def best_rates(losses: dict[tuple[int, float, int], float]) -> dict[int, float]:
    """depth → the best factor, by least squares. losses: of (depth, factor, seed)."""
    groups = sorted({(depth, seed) for depth, _, seed in losses})
    depths = sorted({depth for depth, _ in groups})
    rows, values = [], []
    for (depth, factor, seed), loss in losses.items():
        x = math.log(factor)
        slope = [x * (depth == each) for each in depths]
        rows.append([x * x, *slope, *((depth, seed) == group for group in groups)])
        values.append(loss)
    curvature, *slopes = np.linalg.lstsq(np.array(rows, float), np.array(values))[0]
    return {depth: math.exp(-slope / (2 * curvature))
            for depth, slope in zip(depths, slopes[: len(depths)], strict=False)}


def power(losses: dict) -> float:
    """Of depth, in the best rate."""
    rates = {depth: factor * of_depth(depth)["learning_rate"]
             for depth, factor in best_rates(losses).items()}
    return float(np.polyfit(np.log([*rates]), np.log([*rates.values()]), 1)[0])


def interval(losses: dict, draws: int = 1000) -> tuple[float, float]:
    """Nine tenths of the powers when seeds are drawn anew."""
    random, powers = np.random.default_rng(0), []
    for _ in range(draws):
        drawn = {}
        for depth in {depth for depth, *_ in losses}:
            seeds = sorted({seed for each, _, seed in losses if each == depth})
            for i, seed in enumerate(random.choice(seeds, len(seeds))):
                drawn |= {(depth, factor, i): loss for (each, factor, s), loss in losses.items()
                          if (each, s) == (depth, seed)}
        powers.append(power(drawn))
    return tuple(np.quantile(powers, (0.05, 0.95)))


def main(options) -> list[Figure]:
    losses = {}
    for depth in [1, 2] if options.quick else FACTORS:
        for seed in range(1, 1 + SEEDS[depth]):
            for factor in FACTORS[depth][::2 if options.quick else 1]:
                losses[depth, factor, seed] = loss = val_loss(depth, factor, seed)
                print(f"depth {depth}, rate {factor} of the recipe's, seed {seed}: {loss:.4f}",
                      flush=True)
    low, high = interval(losses)
    print(f"best rate as depth^{power(losses):.2f} ({low:.2f} to {high:.2f})")
    return [Figure(f"depth {depth}: best rate", "that of --depth", [factor])
            for depth, factor in best_rates(losses).items()]
