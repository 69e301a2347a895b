"""python data.py show RUN_DIR STEP: the samples that a run trained on in a step, as text."""

import contextlib
import json

from config import parse
from data import load_mixture
from steady.cli import ConfigError


def show(run_dir: str, step: int):
    """Print the samples of update number `step`, in the order of their positions."""
    if step < 1:
        raise ConfigError(f"step {step}: expected 1 or more, the number of an update")
    cfg = parse([], saved=f"{run_dir}/config.yaml")
    data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size,
                        mode=cfg.data_mode, packing=cfg.packing)
    # each process writes where its samples begin; the newest one before the step made it
    order, before = dict(seed=cfg.seed, batch_size=cfg.batch_size, position=0), 0
    with contextlib.suppress(OSError, ValueError), open(f"{run_dir}/metrics.jsonl") as file:
        for row in (json.loads(line) for line in file if '"order"' in line):
            if row["step"] < step:
                order, before = row["order"], row["step"]
    data.order.seed, n = order["seed"], order["batch_size"]
    data.group_by_length(cfg.group_window, n)
    first = order["position"] + (step - 1 - before) * n
    source, sample = data.order(first, first + n)
    lengths = data.per_sample("lengths", source, sample)
    batch = data.batch(first, first + n)
    for i in range(n):
        dataset, ids = data.datasets[source[i]], batch.tokens[i].tolist()
        if data.mode == "documents":
            ids = ids[: lengths[i]]
        path, token = dataset.find(sample[i])
        print(f"--- sample {first + i}: {dataset.name}, {path} from token {token:,}")
        print(data.decode(ids))
