"""The monitor's arguments and extra columns in a run of train.py."""

from dataclasses import asdict
from functools import partial

import torch

from steady.checkpoints.disk import retry
from steady.checkpoints.run_dir import tensorboard_folder
from steady.guard import faults
from steady.guard.deadline import UNKNOWN
from steady.models.device import peak_flops


def monitor_options(run, flops: int) -> dict:
    """Arguments of its Monitor. flops: of training on one token."""
    cfg, ranks = run.cfg, run.ranks
    about = dict(vocab_size=cfg.vocab_size, micro_batch=ranks.micro_batch, ranks=ranks.world_size,
                 threads=torch.get_num_threads(),
                 settled_step=(cfg.keep_checkpoints + 2) * cfg.save_interval)
    alone = ranks.shards.size == 1  # then the other ranks have nothing to add to an autopsy
    return dict(
        out_dir=run.dir.path, log_interval=cfg.log_interval, level=cfg.monitor,
        device=ranks.device, first_step=run.progress.step + 1, flops_per_token=flops, about=about,
        group=ranks.group, columns=partial(columns, run),
        last_step=lambda: cfg.max_steps if cfg.max_steps != UNKNOWN else None,
        peak_flops=peak_flops(ranks.device, ranks.dtype, cfg.peak_tflops, ranks.world_size),
        tensorboard=tensorboard_folder(cfg, run.dir.path), flush_secs=cfg.tensorboard_flush_secs,
        wandb=asdict(cfg) if cfg.wandb else None, trace=cfg.trace,
        datasets=[dataset.name for dataset in run.train_data.datasets],
        autopsy=None if alone and ranks.rank else partial(faults.autopsy, run))


def columns(run) -> dict:
    """More of a row of metrics.jsonl: tokens and epochs since the run began, and so on."""
    row, data = {"train/tokens": run.progress.tokens}, run.train_data
    if retry.count:
        row["health/retries"] = retry.count
    if run.guard.spikes:
        row |= run.guard.spikes.take(run.progress.step)
    if len(data.datasets) > 1:
        done = data.order.epochs(run.progress.position)
        row |= {f"train/epochs/{dataset.name}": epochs
                for dataset, epochs in zip(data.datasets, done, strict=True)}
    return row
