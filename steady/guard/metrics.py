"""The monitor of a run of train.py: its arguments, time that DDP waits, more columns for rows."""

from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import nn

from steady.checkpoints.run_dir import tensorboard_folder
from steady.models.device import peak_flops
from steady.options import UNKNOWN, fixed_options


def monitor_options(run, flops: int) -> dict:
    """Arguments of the run's Monitor. flops: of training on one token."""
    cfg, ranks = run.cfg, run.ranks
    about = dict(vocab_size=cfg.vocab_size, micro_batch=ranks.micro_batch, ranks=ranks.world_size,
                 threads=torch.get_num_threads(),
                 settled_step=(cfg.keep_checkpoints + 2) * cfg.save_interval)
    public = asdict(cfg) | {"backup_to": None}  # the address may hold a password
    return dict(
        out_dir=run.dir.path, log_interval=cfg.log_interval, level=cfg.monitor,
        device=ranks.device, first_step=run.progress.step + 1, flops_per_token=flops, about=about,
        group=ranks.group, columns=partial(columns, run), autopsy=partial(samples_of, run),
        last_step=lambda: cfg.max_steps if cfg.max_steps != UNKNOWN else None,
        peak_flops=peak_flops(ranks.device, ranks.dtype, cfg.peak_tflops, ranks.world_size),
        tensorboard=tensorboard_folder(cfg, run.dir.path), flush_secs=cfg.tensorboard_flush_secs,
        tracker=None if cfg.tracker == "none" else (cfg.tracker, public), trace=cfg.trace,
        datasets=[dataset.name for dataset in run.train_data.datasets])


def watch_for_waiting(model: nn.Module, clock):
    """Under ddp, count the time after this rank's own gradients are ready as waiting for others.

    clock: () → the monitor's clock. Sharded models wait at each block, in forward and backward.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        def gradients_ready(_):  # a hook must return None
            clock().phase("waiting")
        first = next(p for p in model.parameters() if p.requires_grad)  # its gradient comes last
        first.register_post_accumulate_grad_hook(gradients_ready)


def starting_row(run) -> dict:
    """A row at each start, for `data.py show` and to compare validation losses."""
    about = {name: getattr(run.cfg, name) for name in fixed_options(run.cfg, "trajectory")}
    source = repr((run.train_data.order.plan, run.train_data.fingerprint)).encode()
    about |= dict(position=run.progress.position, source=hash(tuple(source)))
    return {"order": about, "evaluated": run.progress.evaluated}


def columns(run) -> dict:
    """More columns for metrics.jsonl: tokens and epochs since the run began, and so on."""
    row, data = {"train/tokens": run.progress.tokens}, run.train_data
    if run.guard.spikes:
        row |= run.guard.spikes.take(run.progress.step, run.ranks.rank == 0)
    if len(data.datasets) > 1:
        done = data.order.epochs(run.progress.position)
        row |= {f"train/epochs/{dataset.name}": epochs
                for dataset, epochs in zip(data.datasets, done, strict=True)}
    return row


def samples_of(run, step: int, rank: int) -> dict:
    """The samples of `rank` in step `step`, for the row of an anomaly."""
    data, n, progress = run.train_data, run.cfg.batch_size, run.progress
    first = progress.position - (progress.step - step + 1) * n
    first, end = data.share(first, n, rank, run.ranks.world_size)
    return dict(positions=[first, end], see=f"python data.py show {run.dir.path} {step}",
                datasets=[data.datasets[k].name for k in np.unique(data.order(first, end)[0])])
