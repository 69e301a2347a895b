"""How often `monitor.py compare` errs: harmless changes kept, planted effects found.

    python -m tests.bench referee                    from the runs in results/referee.json
    REFEREE_ANEW=1 python -m tests.bench referee     trains them anew: 2,200 tiny runs

Null pairs: runs that are alike but for rounding or random numbers; and of unlike arms, centred. A
night is 100 comparisons of up to 20 pairs drawn from one kind. Planted effects are compared one
after another with one ledger; the true difference is that of 20 pairs of other seeds.
"""

import contextlib
import functools
import gc
import io
import json
import math
import os
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train
from steady.guard.process import exit_code
from tests.bench.common import Figure
from tools import compare

RESULTS = Path(__file__).parent / "results/referee.json"
BASE = ("--n_layer=1 --d_model=64 --n_head=2 --n_kv_head=1 --d_ff=176 --seq_len=32 --batch_size=8 "
        "--max_steps=100 --learning_rate=0.006 --precision=fp32 --no_compile --monitoring=off")
PAIRS, TRUTH = 240, 20
UNLIKE = "unstable runs against stable ones, taken to be as good"
UNSTABLE = "--optimizer=adamw --learning_rate=0.03"
NULLS = {  # kind: (A, B, added to B's seed)
    "another seed": ("", "", 10**6),
    "another seed, unstable runs": (UNSTABLE, UNSTABLE, 10**6),
    "initial weights drawn in another order": ("", "reversed", 0),
    "another micro-batch size": ("", "--micro_batch_size=2", 0),
    UNLIKE: ("", UNSTABLE, 0)}
PLANTED = ["--learning_rate=0.003", "--learning_rate=0.012", "--learning_rate=0.024",
           "--learning_rate=0.0066", "--warmup_steps=30", "--dropout=0.1", "--beta2=0.999",
           "--beta1=0.5", "--weight_decay=0", "--weight_decay=1", "--d_ff=88", "--d_ff=352",
           "--n_layer=2", "--lr_schedule=cosine", "--lr_schedule=constant", "--n_kv_head=2",
           "--no_qk_norm", "--optimizer=adamw", "--tie_embeddings", "--rope_theta=100"]


def nights(kind: str, losses, count: int, random) -> np.ndarray:
    """[count, 100, 20, 2]: the pairs of 100 comparisons a night, none twice in a comparison.

    The arms of a harmless change are swapped at random; unlike arms get the same mean.
    """
    losses, rows = np.array(losses), -(-100 * 20 // len(losses)) * count
    which = random.permuted(np.tile(np.arange(len(losses)), (rows, 1)), axis=1)
    found = losses[which].reshape(count, -1, 20, 2)[:, :100]
    if kind == UNLIKE:
        return found - losses.mean(0)
    return np.where(random.random((*found.shape[:-1], 1)) < 0.5, found, found[..., ::-1])


def ends(losses: np.ndarray, level) -> tuple[np.ndarray, np.ndarray]:
    """(whether each row of pairs [N, 2] finds a difference, prefers B), as `decide` does."""
    found, preferred = np.zeros((2, *losses.shape[:-2]), bool)
    for n in compare.LOOKS:
        if n <= losses.shape[-2]:
            mean, half = compare.difference(losses[..., :n, :], level)
            new = ~found & (abs(mean) > np.maximum(half, compare.ROUNDING))
            preferred |= new & (mean < 0)
            found |= new
    return found, preferred


# --- measuring -------------------------------------------------------------------------------


@functools.cache
def trained(flags: tuple[str, ...]) -> SimpleNamespace:
    """What `python train.py` with these flags leaves, made in this process."""
    output, plain = io.StringIO(), train.Transformer.modules
    if "reversed" in flags:
        train.Transformer.modules = lambda self: reversed([*plain(self)])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        argv = [flag for flag in flags if flag != "reversed"]
        code = exit_code(train.main, [*argv, f"--out_dir={folder}/run"])
    train.Transformer.modules = plain
    gc.enable()  # training switches it off, and freezes what is alive
    if trained.cache_info().misses % 20 == 0:
        gc.unfreeze()
        gc.collect()
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr="")


def loss(flags: str, seed: int) -> float:
    arm = SimpleNamespace(code=Path(), flags=f"{BASE} {flags}".split(), loss="val_loss", key=None)
    return compare.result_of("", arm, seed)["loss"]


def pairs(a: str, b: str, seeds: range, more: int = 0) -> list[tuple[float, float]]:
    return [(loss(a, seed), loss(b, seed + more)) for seed in seeds]


def measure():
    torch.set_num_threads(1)
    compare.subprocess = SimpleNamespace(run=lambda argv, **_: trained(tuple(argv[2:-1])))
    found = dict(torch=torch.__version__, planted=[])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found["nulls"] = {kind: pairs(a, b, range(PAIRS), more)
                          for kind, (a, b, more) in NULLS.items()}
        for flags in PLANTED:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                compare.compare([BASE, f"{BASE} {flags}", "--json"])
            row = json.loads(said.getvalue().splitlines()[-1])
            gaps = [b - a for a, b in pairs("", flags, range(1000, 1000 + TRUTH))]
            true, half = compare.interval(gaps, 0.05 * len(compare.LOOKS))  # of one look
            found["planted"].append(dict(flags=flags, true=true, half=half, better=row["better"],
                                         verdict=row["verdict"]))
    RESULTS.write_text(json.dumps(found) + "\n")


# --- reporting -------------------------------------------------------------------------------


def share(n: int, of: int) -> str:
    """With its 95 % interval (Wilson)."""
    middle, z2 = n + 2, 4
    half = 2 * math.sqrt(n * (of - n) / of + 1)
    return f"{n} of {of}, {(middle - half) / (of + z2):.1%} to {(middle + half) / (of + z2):.1%}"


def main(options) -> list[Figure]:
    if os.environ.get("REFEREE_ANEW"):
        measure()
    found, figures = json.loads(RESULTS.read_text()), []
    count = 20 if options.quick else 1000
    for kind, values in found["nulls"].items():
        losses = nights(kind, values, count, np.random.default_rng(1))
        kept = ends(losses, compare.level_of(np.arange(1, 101)))[1].any(1).sum()
        figures.append(Figure(f"nights that keep a harmless change: {kind}", "100 comparisons each",
                              [kept / count], "<= 0.05", share(kept, count)))
    print("| B | true difference | verdict | |\n|---|---|---|---|")
    outcomes = Counter()
    for row in found["planted"]:
        right = "B" if row["true"] < 0 else "A"
        end = "undecided" if not row["better"] else "right" if row["better"] == right else "wrong"
        outcomes[end] += 1
        print(f"| `{row['flags']}` | {row['true']:+.4f} ±{row['half']:.4f} | {row['verdict']} | "
              f"{end} |")
    for end, aim in (("right", ""), ("wrong", "<= 0"), ("undecided", "")):
        n, of = outcomes[end], outcomes.total()
        figures.append(Figure(f"planted effects: {end}", f"{TRUTH} pairs of other seeds", [n / of],
                              aim, f"{n} of {of}"))
    return figures
