"""python data.py show: samples as text, with the tokens counted by the loss in brackets.

For a folder of token files, the first documents; for a run, the samples of one of its steps.
"""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

from config import parse
from data import load_mixture
from steady.options import ConfigError, fixed_options
from steady.tokens.files import IGNORE, split_stages
from steady.watch.history import read_rows


def show(path: str, n: int):
    """Print the samples of step n of a run, or the first n documents of token files."""
    samples = samples_of_step if Path(path, "config.yaml").exists() else first_documents
    for title, ids, counted, to_text in samples(path, n):
        text, done, at, all_count = "", "", 0, all(counted)  # if all count, no brackets
        for counts, stretch in groupby(map(bool, counted)):
            at += len(list(stretch))
            so_far = to_text(ids[:at])  # some tokenizers drop a space at the beginning
            new, done = so_far[len(done) :], so_far
            text += f"⟦{new}⟧" if counts and not all_count else new
        print(f"--- {title}\n{text}")


def first_documents(path: str, n: int):
    """Yields (title, ids, whether the loss counts each, ids → text) of up to n documents."""
    data = load_mixture([path], "train", seq_len=1, seed=0, option="show", mode="stream")
    file = data.datasets[0].files[0]
    at = file.documents()
    for i, (begin, end) in enumerate(zip(at[:n], at[1:], strict=False)):
        counted = [True] * (end - begin) if file.mask is None else file.mask[begin:end] > 0
        yield (f"document {i} of {len(at) - 1:,} in {file.path}: {end - begin:,} tokens, "
               f"{sum(counted):,} counted", file.tokens[begin:end].tolist(), counted, data.decode)


def samples_of_step(run_dir: str, step: int):
    """As `first_documents`, for the samples of one step in the order of their positions."""
    cfg = parse([], saved=f"{run_dir}/config.yaml")
    # each start of the run logs the options of its samples; the last before the step counts
    log = Path(run_dir, "metrics.jsonl")
    rows = (row for _, row in read_rows(log) if "order" in row) if log.exists() else ()
    starts = {row["step"]: row["order"] for row in rows} or {0: dict(position=0)}
    if not min(starts) < step <= (cfg.max_steps or step):  # unknown with --max_minutes
        raise ConfigError(f"step {step}: expected {min(starts) + 1} to {cfg.max_steps or '…'}")
    order = starts[before := max(at for at in starts if at < step)]
    cfg = replace(cfg, **{k: order[k] for k in order.keys() & fixed_options(cfg, "trajectory")})
    data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size, "--data",
                        cfg.data_mode, split_stages(cfg.stage, cfg.max_steps, cfg.batch_size))
    source, n = hash(tuple(repr((data.order.plan, data.fingerprint)).encode())), cfg.batch_size
    if order.get("source", source) != source:
        raise ConfigError(f"step {step}: trained with another --stage or --data than the newest")
    data.group_by_length(data.GROUP_STEPS, n)
    first = order["position"] + (step - 1 - before) * n
    source, sample = data.order(first, first + n)
    batch = data.batch(first, first + n)
    for i in range(n):
        dataset, tokens = data.datasets[source[i]], batch.tokens[i].tolist()
        targets = tokens[1:] if batch.targets is None else batch.targets[i].tolist()
        length = len(targets) if data.mode == "stream" else dataset.lengths[sample[i]]
        numbers = [0] * length if batch.documents is None else batch.documents[i].tolist()
        ids, counted = [], []  # the last token of a document is only a target
        for at in (list(group) for _, group in groupby(range(length), numbers.__getitem__)):
            found = [not data.has_prompts, *(targets[k] != IGNORE for k in at)]
            counted += found[: len(at) + found[-1]]
            ids += [*(tokens[k] for k in at), targets[at[-1]]][: len(at) + found[-1]]
        place = f"number {sample[i]:,}" if not hasattr(dataset, "find") else (  # generated
            "{} from token {:,}".format(*dataset.find(sample[i])))
        yield f"sample {first + i}: {dataset.name}, {place}", ids, counted, data.decode
