"""python data.py show: samples as text, with the tokens that the loss counts marked.

Of a folder of token files, the first samples; of a run, those that it trained on in a step.
"""

import contextlib
from itertools import groupby
from pathlib import Path

from config import parse
from data import load_mixture
from steady.options import ConfigError
from steady.tokens.files import IGNORE, TokenFile, find_files, read_sidecars
from steady.tokens.tokenizers import decode
from steady.watch.history import read_rows


def show(path: str, n: int):
    """Print the samples of update n of a run directory, or else the first n of token files."""
    if not 1 <= n <= 10**12:
        raise ConfigError(f"{n}: expected 1 or more, a number of samples or of an update")
    if Path(path, "config.yaml").exists():
        show_step(path, n)
    else:
        show_first(path, n)


def show_first(path: str, n: int):
    """Print the first n documents of a folder or file of tokens."""
    files = find_files(path, "train", "show")
    if not files:
        raise ConfigError(f"show {path}: not a run, and no train.bin or *_train*.bin in there")
    for name in files:
        file = TokenFile(name, seq_len=1)
        _, tokenizer, folder, _ = read_sidecars([file], None)
        tokenizer = "bytes" if tokenizer == "bytes" else folder
        at = file.documents()
        for i, (begin, end) in enumerate(zip(at[:n], at[1:], strict=False)):
            counted = [True] * (end - begin) if file.mask is None else file.mask[begin:end] > 0
            print(f"--- document {i} of {len(at) - 1:,} in {name}: {end - begin:,} tokens, "
                  f"{sum(counted):,} counted")
            print(marked(file.tokens[begin:end].tolist(), counted, tokenizer))
        n -= len(at) - 1
        if n <= 0:
            return


def show_step(run_dir: str, step: int):
    """Print the samples of update number `step`, in the order of their positions."""
    cfg = parse([], saved=f"{run_dir}/config.yaml")
    data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size,
                        mode=cfg.data_mode)
    # each process writes where its samples begin; the newest one before the step made it
    order, before = dict(seed=cfg.seed, batch_size=cfg.batch_size, position=0), 0
    with contextlib.suppress(OSError):
        for _, row in read_rows(Path(run_dir, "metrics.jsonl")):
            if "order" in row and row["step"] < step:
                order, before = row["order"], row["step"]
    data.order.seed, n = order["seed"], order["batch_size"]
    data.group_by_length(cfg.group_window, n)
    first = order["position"] + (step - 1 - before) * n
    source, sample = data.order(first, first + n)
    batch = data.batch(first, first + n)
    tokenizer = "bytes" if data.tokenizer == "bytes" else data.tokenizer_folder
    for i in range(n):
        dataset, ids = data.datasets[source[i]], batch.tokens[i].tolist()
        if data.mode != "stream":
            ids = ids[: dataset.lengths[sample[i]]]
        counted = [True] * len(ids)
        if data.has_prompts:  # a document's first token is no target
            same = True if batch.documents is None else batch.documents[i].diff() == 0
            counted = [False, *((batch.targets[i][:-1] != IGNORE) & same)][: len(ids)]
        path, token = dataset.find(sample[i])
        print(f"--- sample {first + i}: {dataset.name}, {path} from token {token:,}")
        print(marked(ids, counted, tokenizer))


def marked(ids: list[int], counted: list[bool], tokenizer: str | None) -> str:
    """The text of a sample, the counted stretches in brackets, unless all of it is."""
    if all(counted):
        return decode(tokenizer, ids)
    text = done = ""
    at = 0
    for counts, stretch in groupby(map(bool, counted)):
        at += len(list(stretch))
        # decoded from the beginning, since some tokenizers drop a space there
        so_far = decode(tokenizer, ids[:at])
        new, done = so_far[len(done) :], so_far
        text += f"⟦{new}⟧" if counts else new
    return text
