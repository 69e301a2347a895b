"""What --skip_spikes gains where some batches are bad, and what it costs where none is.

    python -m tests.bench spikes

A small model on characters, at a high learning rate. In 1 % of the steps all tokens are random. The
validation loss at the end, with and without the option, from the same weights on the same samples;
the steps skipped, and how many of them were planted.
"""

import contextlib
import gc
import io
import json
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import train
from steady.guard.process import exit_code
from steady.guard.spikes import NEEDED, Spikes
from tests.bench.common import Figure, compare, in_turns, logged_step_ms
from tests.bench.small import some_text, write_characters

FLAGS = ["--n_layer", "1", "--n_head", "2", "--n_kv_head", "2", "--d_model", "32", "--d_ff", "88",
         "--seq_len", "32", "--batch_size", "8", "--device", "cpu", "--precision", "fp32",
         "--no_compile", "--no_tensorboard", "--save_interval", "0", "--eval_steps", "0",
         "--learning_rate", "3e-2"]
SHARE = 0.01  # of the steps are bad
SIGMAS = [0, 3, 6]


def bad_steps(seed: int, steps: int, share: float) -> set[int]:
    """Their numbers; none among the first, which are never skipped."""
    dice = torch.rand(steps + 1, generator=torch.Generator().manual_seed(seed))
    return {step for step in range(NEEDED + 1, steps + 1) if dice[step] < share}


def with_bad_steps(load_data, bad: set[int], cfg):
    """In the place of load_data: the tokens of these steps are random."""
    data, val_data = load_data(cfg)
    read = data.batch

    def batch(start: int, stop: int):
        found = read(start, stop)
        if start // cfg.batch_size + 1 in bad:
            dice = torch.Generator().manual_seed(start)
            random = torch.randint(data.vocab_size, found.tokens.shape, generator=dice)
            found = found._replace(tokens=random.to(found.tokens.dtype))
        return found

    data.batch = batch
    return data, val_data


def final(flags: list, bad: set[int], seed: int, steps: int, sigmas: float) -> tuple:
    """(validation loss, steps skipped, how many of those were bad)."""
    found, find = [], Spikes.find

    def noted(self, *values):
        found.append(find(self, *values))
        return found[-1]

    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          patch.object(train, "load_data", partial(with_bad_steps, train.load_data, bad)),
          patch.object(train, "sample", lambda run: ""), patch.object(Spikes, "find", noted)):
        argv = [*flags, "--max_steps", steps, "--eval_interval", steps, "--seed", seed,
                "--skip_spikes", sigmas, "--log_interval", "100", "--out_dir", folder]
        assert exit_code(train.main, [*map(str, argv)]) == 0
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    gc.enable()  # which training switches off
    loss = next(row["val/loss"] for row in rows if "val/loss" in row)
    skipped = {step for step, spike in enumerate(found, start=1) if spike}
    return loss, len(skipped), len(skipped & bad)


def main(options) -> list[Figure]:
    seeds, steps, rounds = (1, 40, 1) if options.quick else (3, 600, 3)
    figures = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        vocab_size = write_characters(some_text(options)[:400_000], data)
        flags = [*FLAGS, "--data", data, "--vocab_size", vocab_size]
        for share in (0, SHARE):
            bad = [bad_steps(seed, steps, share) for seed in range(seeds)]
            ends = {k: [final(flags, bad[seed], seed, steps, k) for seed in range(seeds)]
                    for k in SIGMAS}
            losses = {k: [loss for loss, _, _ in found] for k, found in ends.items()}
            for k in SIGMAS[1:]:
                what = f"validation loss, {share:.0%} bad, {k} sigmas"
                figures.append(compare(what, "without", losses[k], losses[0], "{:.4f}"))
                print(f"{what}: {losses[k]}; without: {losses[0]}; skipped "
                      f"{sum(n for _, n, _ in ends[k])} of {seeds * steps} steps, "
                      f"{sum(n for _, _, n in ends[k])} of {sum(map(len, bad))} bad ones",
                      flush=True)
        flags += ["--max_steps", steps, "--log_interval", "20"]
        measures = {k: partial(logged_step_ms, [*flags, "--skip_spikes", k]) for k in (0, 6)}
        ms = in_turns(measures, rounds)
    return [*figures, compare("ms/step, nothing bad, 6 sigmas", "without", ms[6], ms[0],
                              "{:.2f} ms")]
