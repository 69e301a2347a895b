"""Lines on the screen before the first step of a run, and for an early end."""

import math
import signal

import torch

from steady.models.device import DTYPE_NAMES, attention_backend, device_name
from steady.options import UNKNOWN
from steady.watch.findings import si


def early_end(cfg, progress, signal_number: int = 0) -> str:
    """Why training has ended before max_steps; "" if it has not."""
    if signal_number:
        return (f"stopped at step {progress.step} by {signal.Signals(signal_number).name}; "
                "--auto_resume continues from there")
    if progress.step < cfg.max_steps:
        return (f"stopped at step {progress.step}: no evaluation since step {progress.best_step} "
                f"had a lower loss (--patience {cfg.patience})")
    return ""


def rate_jump(run, learning_rate) -> str:
    """A line if the newest update had another rate than the schedule gives it; or ""."""
    group, step = run.optimizers[-1].param_groups[0], run.progress.step  # Muon's depend on ranks
    before, now = (learning_rate(at, run.cfg) * group.get("lr_scale", 1.0)
                   for at in (step - 1, step))
    lr = group.get("lr", before)
    same = any(math.isclose(lr, known, rel_tol=0.01) for known in (before, now))
    return "" if same else f"resume  learning rate {lr:.2e} -> {now:.2e}: its schedule changed\n"


def describe(run) -> str:
    """Device, model, data and step of a run, in a few lines for the screen."""
    cfg, data, ranks, progress = run.cfg, run.train_data, run.ranks, run.progress
    parameters = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    of_those = ""
    if trained < parameters:
        linear = {id(m.weight) for m in run.model.modules() if isinstance(m, torch.nn.Linear)}
        left = sum(p.numel() for p in run.model.blocks.parameters()
                   if p.ndim > 1 and not p.requires_grad and id(p) not in linear)
        others = f"; no adapters in {left / 1e6:.2f} M outside linear layers, as in experts"
        of_those = f" ({trained / 1e6:.2f} M trained{others if left else ''})"
    minutes = cfg.max_minutes if cfg.max_steps == UNKNOWN else None
    steps = f"{minutes:g} minutes" if minutes else f"{cfg.max_steps} steps"
    samples = progress.position + (0 if minutes else cfg.max_steps - progress.step) * cfg.batch_size
    _, *shares = zip(*data.order.plan, strict=True)
    each = zip(data.datasets, shares, data.order.epochs(samples), strict=True)
    sources = [f"{d.name} {' → '.join(f'{x:.1%}' for x in share)} ({epochs:.2f} epochs){d.details}"
               for d, share, epochs in each]
    name = f"--depth {cfg.depth} (EXPERIMENTS.md)" if cfg.depth else cfg.init_from or cfg.model
    foreign = ", through transformers' own module" if cfg.model == "transformers" else ""
    sharded = f", {cfg.parallel} over {ranks.shards.size}" if ranks.shards.size > 1 else ""
    return "\n".join(filter(None, [
        f"device  {ranks.world_size} x {ranks.device.type} ({device_name(ranks.device)}), "
        f"{DTYPE_NAMES[ranks.dtype]}, {attention_backend(cfg, ranks.device, ranks.dtype)} "
        f"attention, compile {'on' if run.compiled else 'off'}{sharded}",
        f"model   {name}: {parameters / 1e6:.2f} M parameters{of_those}, "
        f"{cfg.n_layer} layers of width {cfg.d_model}, {cfg.n_head} heads ({cfg.n_kv_head} kv), "
        f"vocabulary {cfg.vocab_size}{foreign}",
        f"data    {si(data.n_tokens)} tokens: {', '.join(sources)} in {steps}, "
        f"{ranks.workers} loader processes per rank",
        f"step    {'at most ' * data.row_lengths_vary}{si(cfg.batch_size * cfg.seq_len)} tokens = "
        f"{cfg.batch_size} x {cfg.seq_len}: {ranks.world_size} x {run.accumulation} micro-batches "
        f"of {ranks.micro_batch}; rate {cfg.learning_rate:.3g}, decay {cfg.weight_decay:.2g}",
        f"run     {run.dir.path}" + ", a new run" * (cfg.auto_resume and not run.dir.resumed_from),
        f"resume  {run.dir.resumed_from} at step {progress.step}" * bool(run.dir.resumed_from)]))
