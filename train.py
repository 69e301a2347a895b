"""Train a language model: set-up, the loop, evaluation, checkpoints, distribution.

    python train.py                                        a small model on Python's own source
    python train.py --auto-resume                          continue the newest run
    torchrun --nproc_per_node=8 train.py --log_interval 50 the same training on 8 GPUs

Read `main` for how a run is put together and `train` for the loop. The model, the data and the
monitor are one module each and can be replaced after reading that module and this one.
"""

import contextlib
import ctypes
import dataclasses
import gc
import inspect
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import config
from checkpoint import Backup, Writer, checkpoint_step, list_checkpoints, replacing, run_of
from config import IGNORE, Config, ConfigError
from data import (
    Batch,
    Mixture,
    eval_batches,
    load_mixture,
    loader,
    pick_workers,
    split_weight,
    to_device,
)
from model import (
    DTYPE_NAMES,
    DTYPES,
    Transformer,
    attention_backend,
    flops_per_token,
    generate,
    output_health,
    set_attention_backend,
)
from monitor import Monitor, peak_flops, si

# --- the loop --------------------------------------------------------------------------------


def train(run: "Run"):
    """Make the updates that are left. `step` counts those that have been made."""
    cfg, model, monitor, device, step = run.cfg, run.model, run.monitor, run.device, run.step
    parameters = list(model.named_parameters())
    batches = loader(
        run.train_data, cfg, step, run.micro_batch, run.rank, run.world_size, device, run.workers,
        run.offset,
    )  # fmt: skip
    accumulation = cfg.batch_size // (run.micro_batch * run.world_size)
    totals = None  # of each dataset since the last log
    by_dataset = cfg.loss_by_dataset and cfg.monitor != "off"
    if by_dataset and len(run.train_data.datasets) > 1:
        totals = torch.zeros(2, len(run.train_data.datasets), device=device)
    first_step = step + 1
    gc.disable()  # it would stop one rank at a time, at moments of its own

    while step < cfg.max_steps and not run.stop.requested():
        seed_everything(cfg.seed, step, run.rank)
        lr = set_learning_rate(run.optimizers, learning_rate(step, cfg))
        step_loss = torch.zeros((), device=device)
        first = step * cfg.batch_size + run.offset
        size = run.train_data.size(first, first + cfg.batch_size, run.micro_batch)
        # The gradient of the mean over all targets of the step; DDP divides by world_size itself.
        loss_scale = run.world_size / max(1, size.targets)
        for i in range(accumulation):
            monitor.phase("data")
            batch = next(batches)  # already on the device, or on its way there
            monitor.phase("forward")
            with gradient_sync(run.ddp, last=i == accumulation - 1), run.autocast:
                losses, counts = ask(run.ddp, batch, by_sequence=totals is not None)
                loss = losses.sum() * loss_scale
            monitor.phase("backward")
            run.scaler.scale(loss).backward()
            step_loss += loss.detach()
            if totals is not None:
                add_by_dataset(totals, batch, losses, counts)
        monitor.phase("optimizer")
        grad_norm = update(run, parameters, step + 1)
        step = run.step = step + 1
        monitor.phase("other")

        if cfg.monitor == "full" and monitor.due(step, cfg.health_interval):
            with run.autocast:
                monitor.log_all(output_health(model, *batch[:3]))
        if totals is not None and monitor.due(step):
            totals = log_by_dataset(run, totals)
        run.tokens += size.real_tokens
        # reads the device, but only every log_interval
        monitor.step(
            step, lr, step_loss, grad_norm, tokens=size.tokens, real_tokens=size.real_tokens
        )
        if monitor.nonfinite_in_a_row >= cfg.max_nonfinite and cfg.on_nonfinite != "skip":
            raise NotFinite(f"{monitor.nonfinite_in_a_row} steps in a row, up to step {step}, "
                            "had a loss or gradient that was not finite")  # fmt: skip
        if run.val_data and due(step, cfg.eval_interval, last=cfg.max_steps):
            val_loss = evaluate(run, step)
            if val_loss < run.best_loss:
                run.best_loss = val_loss
                save_checkpoint(run, is_best=True)
        if due(step, cfg.save_interval, last=cfg.max_steps) or run.stop.save:
            save_checkpoint(run)
        if due(step, cfg.sample_interval) and run.rank == 0:
            print(sample(run))
        if device.type == "cuda" and due(step, cfg.cache_clear_interval):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        if step == first_step:
            gc.collect()
            gc.freeze()  # what is alive now stays: no later collection need look at it
        elif due(step, GC_INTERVAL):
            gc.collect()
    if run.stop.signal:
        save_checkpoint(run)


GC_INTERVAL = 1000  # steps between garbage collections, the same on all ranks


def ask(model, batch: Batch, by_sequence: bool = False) -> tuple[Tensor, Tensor]:
    """model(tokens, targets); with more arguments only for packed rows and for mixtures."""
    more = {} if batch.documents is None else dict(documents=batch.documents)
    if by_sequence:
        more["by_sequence"] = True
    return model(batch.tokens, batch.targets, **more)


@torch.no_grad()
def add_by_dataset(totals: Tensor, batch: Batch, losses: Tensor, counts: Tensor):
    """Add to totals [2, datasets] losses and numbers of targets: [B], or sums of one dataset."""
    values = torch.stack((losses, counts)).to(totals.dtype)
    if batch.source is None:
        totals += values[:, None]
    else:
        totals.index_add_(1, batch.source, values)


def log_by_dataset(run: "Run", totals: Tensor) -> Tensor:
    """Log the losses since the last log and the epochs so far; returns totals of zero."""
    data = run.train_data
    epochs = data.epochs(run.step * run.cfg.batch_size + run.offset)
    for k, dataset in enumerate(data.datasets):
        run.monitor.log(f"train/loss/{dataset.name}", *totals[:, k])
        run.monitor.log(f"train/epochs/{dataset.name}", epochs[k])
    return torch.zeros_like(totals)


def due(step: int, every: int, last: int | None = None) -> bool:
    """Whether something is due that is done every so many steps, and at the last; 0 is never."""
    return every > 0 and (step % every == 0 or step == last)


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of the update after `step` updates: linear warm-up, then the schedule."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "cosine":
        done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif cfg.lr_schedule == "wsd":
        decay_steps = min(cfg.decay_fraction * cfg.max_steps, cfg.max_steps - cfg.warmup_steps)
        share = min(1.0, (cfg.max_steps - step) / max(1.0, decay_steps))
    else:
        share = 1.0
    return cfg.min_learning_rate + share * (cfg.learning_rate - cfg.min_learning_rate)


def set_learning_rate(optimizers, lr: float) -> float:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    return lr


def seed_everything(seed: int, step: int, rank: int):
    """Make the random numbers of a step a function of (seed, step, rank), as its samples are.

    So dropout needs no generator state in the checkpoint, from any rank, to resume bit for bit.
    """
    number = hash((seed, step, rank)) % 2**63
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def gradient_sync(model: nn.Module, last: bool):
    """Under DDP, add up gradients over ranks only in the last micro-batch of a step."""
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


@torch.no_grad()
def update(run: "Run", parameters: list[tuple[str, nn.Parameter]], step: int) -> Tensor | None:
    """Update number `step`, clipped to the global norm cfg.grad_clip; returns the norm before.

    Where that is not finite nothing changes. Neither is asked for on the host: the optimizers
    read a factor and a flag on the device, under the names that torch's fused kernels know. An
    optimizer that does not know them costs one synchronization a step.
    """
    max_norm = run.cfg.grad_clip
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # does nothing but in fp16
    grad_norm = torch.nn.utils.get_total_norm([p.grad for _, p in parameters if p.grad is not None])
    not_finite = (~grad_norm.isfinite()).float()
    divisor = (grad_norm / max_norm).clamp(min=1.0) if max_norm else torch.ones_like(grad_norm)
    with run.monitor.health(step, parameters):
        run.between_steps = False
        for optimizer in run.optimizers:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale, optimizer.found_inf = divisor, not_finite
                optimizer.step()
            elif not not_finite:
                held = [p.grad for group in optimizer.param_groups for p in group["params"]]
                torch._foreach_div_([g for g in held if g is not None], divisor)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.between_steps = True
    run.scaler.update()
    return grad_norm


# --- optimizers ------------------------------------------------------------------------------


def make_optimizers(model: nn.Module, cfg: Config, device: torch.device) -> list:
    """The optimizers of a run; together they hold every parameter exactly once."""
    trained = [p for p in model.parameters() if p.requires_grad]
    in_blocks = {id(p) for p in model.blocks.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) in in_blocks]
    others = [p for p in trained if p.ndim != 2 or id(p) not in in_blocks]
    decayed = dict(weight_decay=cfg.weight_decay)
    groups = [dict(params=others, weight_decay=0.0)]
    optimizers = []
    if cfg.optimizer == "muon":
        ns_dtype = torch.bfloat16 if multiplies_bf16(device) else torch.float32
        optimizers.append(Muon(matrices, lr=cfg.learning_rate, ns_dtype=ns_dtype, **decayed))
    else:
        groups.append(dict(params=matrices, **decayed))
    betas = cfg.beta1, cfg.beta2
    fused = device.type != "mps"  # whose kernel ignores the clipping of `update` in torch 2.11
    optimizers.append(torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=betas, fused=fused))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan 2024), for matrices; scaled to AdamW's size of update.

    As torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but matrices of one shape go through
    Newton-Schulz together, in a type the device multiplies fast, and a gradient that is not finite
    is skipped on the device. The default model on 2 cores without bf16: 13 ms against 31 ms.
    """

    _step_supports_amp_scaling = True  # reads grad_scale and found_inf, as fused AdamW does

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95,
                 ns_steps: int = 4, ns_dtype: torch.dtype = torch.float32):  # fmt: skip
        self.ns_steps, self.ns_dtype = ns_steps, ns_dtype
        self.grad_scale = self.found_inf = None
        together = {}
        for p in params:  # of one shape, but 2^24 numbers at most, of which a step makes copies
            some = together.setdefault(p.shape, [[]])
            if some[-1] and (len(some[-1]) + 1) * p.numel() > 2**24:
                some.append([])
            some[-1].append(p)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        super().__init__([dict(params=ps) for some in together.values() for ps in some], defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params, lr = group["params"], group["lr"]
            grad = torch.stack([p.grad for p in params])  # [n, rows, columns]
            go = 1.0
            if self.found_inf is not None:
                grad = grad.div_(self.grad_scale).nan_to_num_(0.0, 0.0, 0.0)
                go = 1.0 - self.found_inf
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grad)
            momentum = state["momentum"]
            momentum += (grad - momentum) * ((1 - group["momentum"]) * go)
            direction = self.orthogonal(grad.lerp(momentum, group["momentum"]))
            size = 0.2 * math.sqrt(max(params[0].shape))  # arXiv:2502.16982, section 2.2
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"] * go)
            torch._foreach_sub_(params, list((direction * (lr * size * go)).unbind()))

    def orthogonal(self, g: Tensor) -> Tensor:
        """g [n, rows, columns] → about U V^T of each one's singular value decomposition."""
        tall = g.shape[1] > g.shape[2]
        x = (g.mT if tall else g).to(self.ns_dtype)
        x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(self.ns_steps):
            square = x @ x.mT
            polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, polynomial, x, beta=3.4445)
        return (x.mT if tall else x).to(g.dtype)


# --- evaluation ------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: "Run", step: int) -> float:
    """Mean loss in nats over the same validation samples every time, shared out over all ranks."""
    cfg, data = run.cfg, run.val_data
    previous = run.monitor.phase("evaluation")
    run.model.eval()
    n = len(data.datasets)
    totals = torch.zeros(2, n, device=run.device)  # sum of losses, number of targets
    for batch in eval_batches(
        data, cfg.eval_steps * cfg.batch_size, run.micro_batch, run.rank, run.world_size, run.device
    ):
        with run.autocast:
            losses, counts = ask(run.model, batch, by_sequence=n > 1)
        add_by_dataset(totals, batch, losses, counts)
    run.model.train()
    if run.world_size > 1:
        dist.all_reduce(totals)
    loss_sums, counts = totals.tolist()
    loss = sum(loss_sums) / max(1.0, sum(counts))
    row = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}
    if data.bytes_per_token:
        row["val/bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
    if n > 1:
        row |= {f"val/loss/{d.name}": total / count for d, total, count
                in zip(data.datasets, loss_sums, counts, strict=True) if count}  # fmt: skip
    if run.rank == 0:
        shown = " | ".join(f"{name[len('val/') :]} {value:.4f}" for name, value in row.items())
        print(f"step {step}: validation {shown}", flush=True)
    run.monitor.write(step, row)
    run.monitor.phase(previous)
    return loss


def sample(run: "Run", max_new_tokens: int = 400) -> str:
    """Text that the model writes, with the same dice every time.

    From the beginning of a document; where there are prompts, in answer to one of them.
    """
    if not all(p.isfinite().all() for p in run.model.parameters()):
        return "(none: the weights are not finite)"
    data = run.val_data or run.train_data
    batch, end = data.batch(0, 1), run.train_data.end_of_text
    prompt = batch.tokens[:, :1].long() if end is None else torch.tensor([[end]])
    if data.has_prompts:
        counted = (batch.targets[0] != IGNORE).nonzero()
        prompt = batch.tokens[:, : int(counted[0]) + 1 if len(counted) else 1].long()
    torch.manual_seed(0)
    with run.autocast:
        tokens = generate(run.model, prompt.to(run.device), max_new_tokens, 0.8, top_k=50)
    decode = run.train_data.decode
    if not data.has_prompts:
        return decode(tokens[0, 1:].tolist())
    written = tokens[0, prompt.shape[1] :].tolist()
    written = written[: written.index(end)] if end in written else written
    return f"{decode(prompt[0].tolist())}\n→ {decode(written)}"


# --- checkpoints -----------------------------------------------------------------------------

FORMAT = 2  # of the checkpoint file; 1 had no position


def save_checkpoint(run: "Run", is_best: bool = False):
    """Have checkpoints/step_N.pt written, and best.pt, unless this step has been saved already.

    Only rank 0 writes: weights and optimizers are the same on all, and nothing else is state.
    """
    if run.saved_step == run.step:
        return
    run.saved_step = run.step
    if run.rank:
        return
    previous = run.monitor.phase("checkpoint")
    state = dict(
        format=FORMAT,
        step=run.step,
        position=run.step * run.cfg.batch_size + run.offset,  # of the next sample
        tokens=run.tokens,
        best_loss=run.best_loss,
        model=run.model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        optimizer_names=[held_names(run.model, optimizer) for optimizer in run.optimizers],
        scaler=run.scaler.state_dict(),
        config=dataclasses.asdict(run.cfg),
        data=run.train_data.fingerprint(),
        tokenizer=run.train_data.tokenizer,
        end_of_text=run.train_data.end_of_text,
        vocab_size=run.train_data.vocab_size,
    )  # fmt: skip
    run.writer.save(run.step, state, is_best)
    run.monitor.phase(previous)


def held_names(model: nn.Module, optimizer) -> list[str]:
    """Names of the parameters that an optimizer holds, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def load_checkpoint(run: "Run", path: Path):
    """Put what is in `path`, a file that is whole, into the run.

    Raises ConfigError where it does not belong to it.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format"]
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        raise ConfigError(f"{path}: not a checkpoint that can be read ({type(e).__name__})") from e
    if version not in (1, FORMAT):
        raise ConfigError(f"{path}: format {version}; this version reads 1 and {FORMAT}")
    refuse_changes(run, path, state)
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as e:
        raise ConfigError(f"{path}: not a checkpoint of this model: {e}") from None
    for optimizer, saved, names in zip(
        run.optimizers, state["optimizers"], state["optimizer_names"], strict=True
    ):
        if held_names(run.model, optimizer) != names:
            raise ConfigError(f"{path}: its optimizer holds other parameters, or in another order")
        # Rates, decay and betas are those of this run's flags, not of the saved one's.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved | {"param_groups": groups})
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    run.step = run.saved_step = state["step"]
    before = run.step * state["config"]["batch_size"] * state["config"]["seq_len"]
    run.tokens = state.get("tokens", before)  # older files have none
    run.best_loss = state["best_loss"]
    position = state.get("position", run.step * state["config"]["batch_size"])
    run.offset = position - run.step * run.cfg.batch_size
    if run.train_data.group and run.offset and run.rank == 0:
        print("warning: of the documents in the --group_window at hand some come twice or not at "
              "all: it begins elsewhere with another batch_size")  # fmt: skip


def refuse_changes(run: "Run", path: Path, state: dict):
    """Raise ConfigError where what makes up the trajectory is not what it was in the checkpoint."""
    cfg, saved, data = run.cfg, state["config"], run.train_data
    names = config.WEIGHTS + config.TRAJECTORY
    if cfg.eval_only:
        names = (*config.WEIGHTS, "rope_theta", "rope_scaling", "norm_eps")
    changed = {name: f"{saved[name]} -> {getattr(cfg, name)}" for name in names
               if name in saved and saved[name] != getattr(cfg, name)}  # fmt: skip
    if state["tokenizer"] != data.tokenizer:
        changed["tokenizer"] = f"{state['tokenizer']} -> {data.tokenizer}"
    mine, theirs = data.fingerprint(), state["data"]
    if cfg.eval_only:
        mine, saved = theirs, saved | {"data": cfg.data}
    if [split_weight(spec)[1] for spec in cfg.data] != [split_weight(s)[1] for s in saved["data"]]:
        changed["data"] = f"{' '.join(saved['data'])} -> {' '.join(cfg.data)}"
    if mine != theirs:
        names = [f"{f[0]} ({f[1]:,} tokens)" for f in mine if f not in theirs] or ["its order"]
        changed["data"] = f"has changed: {', '.join(names)}"
    refused = set(changed) - (set(cfg.allow_change) - set(config.WEIGHTS))
    if refused:
        told = ", ".join(f"{name} {how}" for name, how in changed.items() if name in refused)
        names = " ".join(name for name in changed if name in refused)
        advice = f"To go on nevertheless: --allow_change {names}"
        if refused & set(config.WEIGHTS):
            advice = "Its weights fit no other model; leave those flags out, or start a new run"
        raise ConfigError(f"{path}: this run differs from it: {told}. {advice}")
    if run.rank == 0 and saved["max_steps"] != cfg.max_steps > state["step"]:
        old = dataclasses.replace(
            cfg, max_steps=saved["max_steps"], warmup_steps=saved["warmup_steps"]
        )
        before, now = learning_rate(state["step"], old), learning_rate(state["step"], cfg)
        print(f"resume  max_steps {old.max_steps} -> {cfg.max_steps}: the schedule has its new "
              f"length; the learning rate goes from {before:.2e} to {now:.2e}")  # fmt: skip


# --- stops and faults ------------------------------------------------------------------------


class Stop:
    """Signals become flags, and all ranks act on them at the same step.

    SIGTERM, SIGINT: save and stop; a second SIGINT stops at once. SIGUSR1: save and go on. What
    each rank has heard is exchanged by the CPUs while a step is computed and read in the next one,
    so neither waits for a device.
    """

    def __init__(self, world_size: int):
        self.signal, self.save = 0, False  # what all ranks have agreed on
        self.heard = [0, 0]  # by this rank: number of the signal to stop for, whether to save
        self.group = dist.new_group(backend="gloo") if world_size > 1 else None
        self.votes = self.exchange = None
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.before = {}  # number → the handler that ours stands in for

    def hear(self, number: int, frame):
        if number == signal.SIGUSR1:
            self.heard[1] = 1
        elif number == signal.SIGINT and self.heard[0]:
            os._exit(128 + number)
        else:
            self.heard[0] = number

    def requested(self) -> bool:
        """Whether to stop before the next step; to be called before each, on every rank."""
        if self.launcher not in (None, os.getppid()):
            self.heard[0] = signal.SIGTERM  # torchrun is gone, and with it who would restart us
        heard, agreed = self.heard, self.heard
        if self.group:
            agreed = [0, 0]
            if self.exchange:
                self.exchange.wait()
                agreed = self.votes.tolist()
            if not agreed[0]:
                self.votes = torch.tensor(heard)
                self.exchange = dist.all_reduce(
                    self.votes, dist.ReduceOp.MAX, group=self.group, async_op=True
                )
        self.signal, self.save = agreed[0], bool(agreed[1])
        self.heard = [heard[0], 0]
        return self.signal != 0

    def agree(self, value):
        """What rank 0 has of this, on all ranks."""
        box = [value]
        if self.group:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def least(self, number: int) -> int:
        """The smallest of what the ranks have."""
        box = torch.tensor(number)
        if self.group:
            dist.all_reduce(box, dist.ReduceOp.MIN, group=self.group)
        return int(box)

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self.before[number] = signal.signal(number, self.hear)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class NotFinite(Exception):
    """Too many steps in a row, up to this one, were not finite."""


MAX_ROLLBACKS = 3  # to the same checkpoint


def roll_back(run: "Run", error: NotFinite):
    """Back to the newest checkpoint, and on with the samples after those that were not finite."""
    if run.cfg.on_nonfinite == "abort":
        raise error
    path = None
    if run.rank == 0:
        run.writer.wait()
        path = checkpoint.newest_whole(run.out_dir / "checkpoints")
    path = run.stop.agree(path)
    run.rollbacks = [step for step in run.rollbacks if path and step == checkpoint_step(path)]
    if path is None or len(run.rollbacks) == MAX_ROLLBACKS:
        raise error
    position = run.step * run.cfg.batch_size + run.offset
    load_checkpoint(run, path)
    run.offset = position - run.step * run.cfg.batch_size
    run.rollbacks.append(run.step)
    if run.rank == 0:
        print(f"warning: {error}; back to {path}, on with sample {position}", flush=True)


def rescue(run: "Run"):
    """After an error, save the last step that was completed, where the state is that of one.

    Without asking other ranks for anything: they may be gone.
    """
    if not run.between_steps or run.step == 0 or run.rank:
        return
    try:
        save_checkpoint(run)
        run.writer.wait()
        if checkpoint.path_of(run.writer.folder, run.step).exists():
            print(f"saved the last completed step, {run.step}", file=sys.stderr, flush=True)
    except Exception as e:
        print(f"warning: step {run.step} could not be saved: {e}", file=sys.stderr, flush=True)


def out_of_memory(error: BaseException) -> bool:
    """Whether it is that of CUDA's allocator, or the nameless one of the CPU's."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def largest_micro_batch(model, cfg: Config, world_size: int, autocast, device) -> int:
    """The largest power of two of sequences whose forward and backward pass fit into memory.

    On a CPU, where nothing says that memory is short until it is too late, up to 16,384 tokens.
    """
    per_rank = cfg.batch_size // world_size
    most = per_rank if device.type == "cuda" else min(per_rank, max(1, 16384 // cfg.seq_len))
    kept = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]  # for the optimizer
    size = 1
    try:
        while True:
            tokens = torch.zeros(size, cfg.seq_len, dtype=torch.long, device=device)
            with autocast:
                loss = ask(model.forward, Batch(tokens, tokens, tokens if cfg.packing else None))[0]
            loss.backward()
            if 2 * size > most:
                break
            size *= 2
    except RuntimeError as e:
        if not out_of_memory(e) or size == 1:
            raise
        size //= 2
    del kept
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size


def memory_advice(run: "Run", error: BaseException) -> str:
    """What was asked for, what was free, which --micro_batch_size to try."""
    free = ""
    if run.device.type == "cuda":
        free = " ({:.1f} of {:.1f} GB are free)".format(
            *(n / 1e9 for n in torch.cuda.mem_get_info(run.device))
        )
    per_rank = run.cfg.batch_size // run.world_size
    smaller = [m for m in range(1, run.micro_batch // 2 + 1) if per_rank % m == 0]
    advice = f"try --micro_batch_size {smaller[-1]}" if smaller else "try a shorter --seq_len"
    return f"out of memory{free}: {str(error).splitlines()[0]} {advice}; the result stays the same"


# --- setting a run up ------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What a run consists of; everything here is made once in `main`."""

    cfg: Config
    out_dir: Path | None  # None on a rank that writes nothing
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    micro_batch: int
    workers: int
    train_data: Mixture
    val_data: Mixture | None
    model: Transformer
    ddp: nn.Module  # the model, wrapped for gradient synchronization where there are more ranks
    optimizers: list
    scaler: torch.amp.GradScaler
    autocast: torch.autocast
    stop: Stop
    monitor: Monitor | None = None
    writer: Writer | None = None  # of checkpoints; on rank 0
    step: int = 0  # updates that have been made
    saved_step: int = 0
    best_loss: float = math.inf
    tokens: int = 0  # that have been trained on, without padding
    offset: int = 0  # update s + 1 begins with sample s * batch_size + this: 0, but after a
    # rollback or a change of batch_size
    downloaded: Path | None = None  # what is deleted after --eval_only
    lock: object = None  # an open file that keeps other processes out of out_dir
    rollbacks: list[int] = dataclasses.field(default_factory=list)  # steps gone back to
    between_steps: bool = True  # the weights are those of `step`, not half updated


def pick_device(name: str, local_rank: int) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    available = dict(cuda=cuda, mps=mps, cpu=True)
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available[name]:
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds none on this machine")
    if name == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(f"{torch.cuda.device_count()} GPUs: expected one for each process")
    return torch.device(name, local_rank if name == "cuda" else None)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware itself multiplies bf16: elsewhere it is emulated, 4 times slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "bf16" if multiplies_bf16(device) else "fp32"
    return DTYPES[precision]


def keep_freed_memory(device: torch.device):
    """On a CPU: take large tensors from huge pages, and do not hand freed memory back.

    Otherwise a step gets all its memory anew, in pages of 4 kB, each cleared by the kernel when it
    is first touched: a fifth of the time of gpt2-124m. Holes among what is kept cost memory, up to
    a third more. Only with glibc, whose own variables for it, MALLOC_..., come first where set.
    """
    if device.type == "cpu" and not any(name.startswith("MALLOC_") for name in os.environ):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at a large tensor
        with contextlib.suppress(AttributeError, OSError, TypeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: bytes from which a tensor is mapped by itself
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end that are kept


def distribute(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """Wrap the finished model for training on several ranks; FSDP would go here."""
    if world_size == 1:
        return model
    ddp = nn.parallel.DistributedDataParallel
    # The buffers are constants: do not send them every step. torch 2.13 renamed the option.
    names = inspect.signature(ddp).parameters
    keep = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    devices = [device.index] if device.type == "cuda" else None
    return ddp(model, device_ids=devices, gradient_as_bucket_view=True, **{keep: False})


def run_numbers() -> list[str]:
    return [path.name for path in Path("runs").glob("*") if path.name.isdigit()]


def find_run(cfg: Config) -> Path | None:
    """The directory of the run; None where a new one is to be made. Changes nothing.

    Raises ConfigError where a new run would fall into an old one, where nothing can be written, or
    where --resume names no file.
    """
    out_dir, continues = Path(cfg.out_dir) if cfg.out_dir else None, cfg.auto_resume
    if cfg.resume and "://" not in cfg.resume:
        if not Path(cfg.resume).is_file():
            raise ConfigError(f"--resume {cfg.resume}: no such file")
        out_dir, continues = out_dir or run_of(Path(cfg.resume)), True
    elif cfg.auto_resume and not out_dir:
        newest = max(run_numbers(), key=int, default=None)
        out_dir = newest and Path("runs") / newest
    if out_dir and out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f"--out_dir {out_dir}: is a file; expected a directory")
    place = out_dir or Path("runs")
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise ConfigError(f"--out_dir {out_dir or 'runs/'}: {place.absolute()} is not writable")
    if out_dir and holds_a_run(out_dir) and not (cfg.overwrite or continues):
        raise ConfigError(
            f"--out_dir {out_dir}: holds a run already. Continue it with --auto-resume, start "
            f"from one of its checkpoints with --resume, or delete it with --overwrite"
        )
    return out_dir


def holds_a_run(out_dir: Path) -> bool:
    return (out_dir / "config.yaml").exists() or bool(list_checkpoints(out_dir / "checkpoints"))


RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # where torchrun says how often it has restarted us


def restarted(cfg: Config) -> Config:
    """When torchrun has restarted its processes, go on with what they have made so far."""
    if os.environ.get(RESTARTS, "0") == "0" or cfg.auto_resume:
        return cfg
    runs = [Path("runs") / number for number in run_numbers()]
    if cfg.out_dir or cfg.resume and run_of(Path(cfg.resume)):
        runs = [Path(cfg.out_dir) if cfg.out_dir else run_of(Path(cfg.resume))]
    runs = [run for run in runs if checkpoint.is_of_my_launcher(run)]
    ours = runs and dict(auto_resume=True, overwrite=False, resume=None, out_dir=str(runs[-1]))
    return dataclasses.replace(cfg, **(ours or {}))


def claim(out_dir: Path | None):
    """Make the run directory, the next runs/NNN where none is named; returns it and its lock."""
    while out_dir is None:
        new = Path("runs") / f"{max(map(int, run_numbers()), default=0) + 1:03d}"
        with contextlib.suppress(FileExistsError):  # another run was quicker
            new.mkdir(parents=True)
            out_dir = new
    try:
        (out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out_dir {out_dir}: cannot be made: {e.strerror}") from None
    return out_dir, checkpoint.lock(out_dir)


def prepare_directory(out_dir: Path, cfg: Config, step: int):
    """Only what the run that goes on from `step` has made so far is left in its place."""
    if cfg.overwrite:
        for name in ("config.yaml", "metrics.jsonl"):
            (out_dir / name).unlink(missing_ok=True)
        for name in ("tensorboard", "checkpoints"):
            shutil.rmtree(out_dir / name, ignore_errors=True)
        (out_dir / "checkpoints").mkdir()
    checkpoint.remove_drafts(out_dir / "checkpoints")
    for newer in list_checkpoints(out_dir / "checkpoints"):
        if checkpoint_step(newer) > step:
            newer.rename(newer.with_suffix(".pt.set-aside"))


def keep_tokenizer(folder: str | None, mine: Path, overwrite: bool):
    """Copy it into the run, which then has all that generation and export need."""
    if folder and Path(folder).resolve() == mine.resolve():
        return
    if folder or overwrite:
        shutil.rmtree(mine, ignore_errors=True)
    if folder:
        shutil.copytree(folder, mine)


def describe(run: Run, attention: str, compiled: bool) -> str:
    """What runs where, in a few lines."""
    cfg, model = run.cfg, run.model
    count = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else cpu_name()
    accumulation = cfg.batch_size // (run.micro_batch * run.world_size)
    data = run.train_data
    epochs = [f"{n:.2f} epochs" for n in data.epochs(cfg.max_steps * cfg.batch_size)]
    sources = f"{data.datasets[0].name}: {si(data.n_tokens)} tokens, {epochs[0]}"
    if len(epochs) > 1:
        weights = [d.weight / sum(d.weight for d in data.datasets) for d in data.datasets]
        each = zip(data.datasets, weights, epochs, strict=True)
        sources = ", ".join(f"{d.name} {float(w):.1%} ({n})" for d, w, n in each)
        sources += f": {si(data.n_tokens)} tokens"
    if not data.is_stream:
        cut = sum(d.n_cut for d in data.datasets)
        sources += f", {sum(len(d.lengths) for d in data.datasets):,} documents"
        sources += f" ({cut:,} longer than --seq_len are cut)" if cut else ""
        empty = sum(d.n_empty for d in data.datasets)
        sources += f" ({empty:,} without a response)" if empty else ""
        sources += f" in {data.n_samples:,} rows" if data.is_packed else ""
    tokens = f"{si(cfg.batch_size * cfg.seq_len)} tokens"
    if not data.is_stream and not data.is_packed:
        tokens = f"at most {tokens}"
    return "\n".join((
        f"device  {run.world_size} x {run.device.type} ({name}), "
        f"{DTYPE_NAMES[run.dtype]}, {attention} attention, compile {'on' if compiled else 'off'}",
        f"model   {cfg.init_from or cfg.model}: {count / 1e6:.2f} M parameters, {cfg.n_layer} "
        f"layers of width {cfg.d_model}, {cfg.n_head} heads ({cfg.n_kv_head} kv), "
        f"vocabulary {cfg.vocab_size}",
        f"data    {sources} in {cfg.max_steps} steps, {run.workers} loader processes a rank",
        f"step    {tokens} = {cfg.batch_size} x {cfg.seq_len}: "
        f"{run.world_size} x {accumulation} micro-batches of {run.micro_batch}, {cfg.optimizer}",
        f"run     {run.out_dir}",
    ))  # fmt: skip


def cpu_name() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = names[0] if names else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def provenance() -> dict[str, str]:
    """Notes for config.yaml: where this run came from."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "command": " ".join(sys.argv),
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def rank_and_world() -> tuple[int, int, int, int]:
    """(rank, local rank, world size, local world size), as torchrun tells them."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return tuple(int(os.environ.get(name, alone)) for name, alone in names.items())


def load_data(cfg: Config) -> tuple[Mixture, Mixture | None]:
    """The training and the validation data; fills in cfg.vocab_size and cfg.data_mode."""
    val_option = "--val_data" if cfg.val_data else "--data"

    def load(paths: list[str], split: str, option: str, seed: int):
        return load_mixture(paths, split, cfg.seq_len, seed, cfg.vocab_size, option, cfg.data_mode,
                            cfg.packing)  # fmt: skip

    val_data = None
    if cfg.eval_only:  # what was trained on need not be there
        train_data = val_data = load(cfg.val_data or cfg.data, "val", val_option, 0)
        if train_data is None:
            raise ConfigError("--eval_only: no validation data; name some with --val_data")
    else:
        train_data = load(cfg.data, "train", "--data", cfg.seed)
        train_data.group_by_length(cfg.group_window, cfg.batch_size)
    cfg.vocab_size = train_data.vocab_size
    cfg.data_mode = "stream" if train_data.is_stream else "documents"
    val_data = val_data or load(cfg.val_data or cfg.data, "val", val_option, 0)
    if val_data:
        if val_data.tokenizer != train_data.tokenizer:
            raise ConfigError(f"{val_option}: made with {val_data.tokenizer}, --data with "
                              f"{train_data.tokenizer}")  # fmt: skip
        # all that is evaluated, sorted
        val_data.group_by_length(1, min(cfg.eval_steps * cfg.batch_size, val_data.n_samples))
    return train_data, val_data


def join_ranks(rank: int, world_size: int, device: torch.device):
    """Make this process one of a group, where there are more."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        cuda = device.type == "cuda"
        store = next(dist.rendezvous("env://", rank, world_size))[0]
        # torchrun keeps the store over a restart: the addresses in it are those of dead processes
        store = dist.PrefixStore(f"attempt {os.environ.get(RESTARTS, 0)}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size,
            device_id=device if cuda else None,
        )  # fmt: skip


def make_model(cfg: Config, rank: int, fresh: bool) -> nn.Module:
    """The model; where it is fresh, and no checkpoint follows, with the weights of --init_from."""
    if cfg.model == "transformers":
        from convert import Foreign

        model = Foreign(cfg)
        if rank == 0:
            print(f"model   {cfg.init_from} is trained through transformers' own module, without "
                  "what makes steady's fast")  # fmt: skip
        return model
    model = Transformer(cfg)
    if cfg.init_from and fresh:
        from convert import fetch, load_weights

        left = load_weights(model, fetch(cfg.init_from))
        if left and rank == 0:
            print(f"warning: {cfg.init_from}: left out: {', '.join(left)}", flush=True)
    return model


def set_up(argv: list[str], cfg: Config) -> Run:
    """The run that `argv`, parsed as `cfg`, asks for, ready for its next step.

    Raises ConfigError.
    """
    rank, local_rank, world_size, local_world_size = rank_and_world()
    cfg = restarted(cfg)
    out_dir = find_run(cfg)
    with tempfile.TemporaryDirectory() as folder:
        old_run = run_of(Path(cfg.resume)) or out_dir if cfg.resume else out_dir
        if cfg.resume and "://" in cfg.resume:
            old_run = checkpoint.download(cfg.resume, Path(folder), only="config.yaml")
        if (cfg.resume or cfg.auto_resume) and old_run and (old_run / "config.yaml").exists():
            # flags need not be repeated
            cfg = restarted(config.parse(argv, saved=str(old_run / "config.yaml")))
    resumed = bool(cfg.resume) or bool(out_dir and cfg.auto_resume and holds_a_run(out_dir))
    if cfg.init_from and (cfg.model == "transformers" or not resumed):
        from convert import adopt

        cfg = adopt(cfg)
    cfg = config.resolve(cfg)
    micro_batch = config.micro_batch_size(cfg, world_size)
    device = pick_device(cfg.device, local_rank)
    dtype = pick_dtype(cfg.precision, device)
    keep_freed_memory(device)
    set_attention_backend(cfg.attention)
    attention = attention_backend(cfg, device, dtype)
    torch.autograd.set_detect_anomaly(cfg.detect_anomaly)
    train_data, val_data = load_data(cfg)
    if cfg.init_from and not resumed and "tokenizer" not in cfg.allow_change:
        from convert import check_tokenizer

        check_tokenizer(cfg.init_from, train_data)
    backup = None
    if cfg.backup_to and rank == 0:
        backup = Backup(cfg.backup_to, cfg.backup_interval, cfg.keep_checkpoints)
    join_ranks(rank, world_size, device)
    stop = Stop(world_size)

    start, held, downloaded = cfg.resume, None, None
    if rank == 0 and start and "://" in start:
        if cfg.eval_only:
            downloaded = Path(tempfile.mkdtemp())
        else:
            out_dir, held = claim(out_dir)
        start = str(checkpoint.download(start, downloaded or out_dir))
    elif rank == 0 and start:
        checkpoint.require_whole(Path(start))
    elif rank == 0 and cfg.auto_resume and out_dir and out_dir.is_dir():
        if not cfg.eval_only:
            out_dir, held = claim(out_dir)
        start = checkpoint.newest_whole(out_dir / "checkpoints")
    start = stop.agree(start and str(start))
    if cfg.eval_only and not (start or cfg.init_from):
        raise ConfigError("--eval_only: there is no checkpoint to evaluate")

    torch.manual_seed(cfg.seed)
    model = make_model(cfg, rank, fresh=not start).to(device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if cfg.micro_batch_size == "auto":
        fits = stop.least(largest_micro_batch(model, cfg, world_size, autocast, device))
        micro_batch = config.micro_batch_size(cfg, world_size, fits)
    compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
    if compiled:
        # In place, so that names in checkpoints are those of the module. Padded rows are of many
        # lengths: one graph for all of them.
        lengths_vary = not train_data.is_stream and not train_data.is_packed
        model.compile(dynamic=True if lengths_vary else None)
    run = Run(
        cfg, out_dir, rank, world_size, device, dtype, micro_batch,
        pick_workers(cfg.num_workers, device, local_world_size), train_data, val_data, model,
        distribute(model, device, world_size), make_optimizers(model, cfg, device),
        torch.amp.GradScaler(device.type, enabled=dtype == torch.float16), autocast, stop,
    )  # fmt: skip
    if start:
        load_checkpoint(run, Path(start))
    if cfg.eval_only:
        cfg.tensorboard, run.out_dir, run.downloaded = False, None, downloaded
        return run
    if run.step >= cfg.max_steps:
        if rank == 0:
            print(f"{start} has made all {cfg.max_steps} steps: nothing to do")
        return run
    if world_size > 1:
        # The gradient of the first parameter is the last to be ready: what the backward pass
        # takes from then on is time that it waits for the gradients of the other ranks.
        def wait(gradient):
            run.monitor.phase("waiting")

        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(wait)
    if rank == 0:
        run.out_dir, run.lock = (out_dir, held) if held else claim(out_dir)
        prepare_directory(run.out_dir, cfg, run.step)
        keep_tokenizer(train_data.tokenizer_folder, run.out_dir / "tokenizer", cfg.overwrite)
        with replacing(run.out_dir / "config.yaml") as draft:
            config.write_yaml(cfg, draft, provenance())
        run.writer = Writer(
            run.out_dir / "checkpoints", cfg.keep_checkpoints, cfg.keep_every, backup
        )
        print(describe(run, attention, compiled), flush=True)
        if start:
            print(f"resume  {start} at step {run.step}", flush=True)
    return run


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    cfg = config.parse(argv)
    os.umask(os.umask(0o077) | 0o002)  # what is written is not for everybody to change
    if cfg.check_checkpoints:
        text, whole = checkpoint.table(Path(cfg.check_checkpoints))
        print(text)
        return 0 if whole else 1
    if cfg.verify_resume:
        return verify_resume(argv, cfg)
    if cfg.estimate:
        print(estimate(cfg))
        return 0
    run = set_up(argv, cfg)
    if run.cfg.eval_only:
        run.monitor = make_monitor(run)
        try:
            evaluate(run, run.step)
        finally:
            run.monitor.close()
            if run.downloaded:
                shutil.rmtree(run.downloaded)
        return 0
    if run.step >= run.cfg.max_steps:
        return 0
    with run.stop:
        report = make_steps(run)
        if run.world_size > 1:
            dist.barrier(group=run.stop.group)  # a rank that ends early would have others killed
    if run.rank == 0:
        run.lock.close()
        print(report)
        if run.stop.signal:
            print(f"stopped at step {run.step} by {signal.Signals(run.stop.signal).name}; "
                  "--auto-resume goes on from there")  # fmt: skip
        else:
            print("sample  of what it writes:\n")
            print(sample(run))
    return 128 + run.stop.signal if run.stop.signal else 0


def estimate(cfg: Config) -> str:
    """What the run will need. Nothing is allocated; the data is looked at for its vocabulary."""
    from estimate import report

    if cfg.init_from:
        from convert import adopt

        cfg = adopt(cfg)
    cfg = config.resolve(cfg)
    if cfg.model == "transformers":
        raise ConfigError(f"--estimate: {cfg.init_from} is not a model of steady's own kind")
    if cfg.vocab_size is None:
        load_data(cfg)
    # where bf16 is slow at hand, the run is for another machine, on which it is not
    dtype = torch.bfloat16 if cfg.precision == "auto" else pick_dtype(cfg.precision, None)
    return report(cfg, cfg.world_size, dtype, make_optimizers)


def make_steps(run: Run) -> str:
    """Train, with what is done about faults around it; returns the monitor's report."""
    while True:
        run.monitor = make_monitor(run)
        order = dict(seed=run.cfg.seed, batch_size=run.cfg.batch_size, offset=run.offset)
        run.monitor.write(run.step, {"order": order})  # which samples its steps have
        try:
            train(run)
            break
        except NotFinite as e:
            roll_back(run, e)
        except BaseException as e:
            rescue(run)
            if out_of_memory(e):
                raise MemoryError(memory_advice(run, e)) from e
            raise
        finally:
            if run.rank == 0:
                run.writer.wait()
            report = run.monitor.close()
    if run.rank == 0:
        run.writer.close(copy=not run.stop.signal)  # who sends a signal does not wait long
    return report


def make_monitor(run: Run) -> Monitor:
    """The monitor of the steps from here on; only rank 0 writes."""
    cfg = run.cfg

    def gather(values: Tensor) -> Tensor:
        if run.world_size == 1:
            return values[None]
        table = values.new_empty(run.world_size, len(values))
        dist.all_gather(list(table), values)
        return table

    peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else peak_flops(run.device, run.dtype)
    board = cfg.tensorboard and run.rank == 0
    return Monitor(
        cfg,
        start_step=run.step,
        start_tokens=run.tokens,
        flops_per_token=flops_per_token(run.model, cfg, run.train_data.typical_length()),
        peak=peak * run.world_size if peak else None,
        device=run.device,
        out_dir=run.out_dir if run.rank == 0 else None,
        tensorboard_dir=Path(cfg.tensorboard_dir or run.out_dir / "tensorboard") if board else None,
        gather=gather,
        autopsy=lambda step, rank: autopsy(run, step, rank),
    )


@torch.no_grad()
def autopsy(run: Run, step: int, rank: int) -> dict:
    """The samples that `rank` had in update number `step`, and the first layer they break.

    That layer is looked for with the weights of now: the samples of a past step are known, its
    weights are not.
    """
    per_rank = run.cfg.batch_size // run.world_size
    first = (step - 1) * run.cfg.batch_size + run.offset + rank * per_rank
    sources = np.unique(run.train_data.order(first, first + per_rank)[0])
    bad, names = [], {module: name for name, module in run.model.named_modules() if name}

    def look(module: nn.Module, inputs, output):
        if isinstance(output, Tensor) and not output.isfinite().all():
            bad.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    run.model.eval()
    for start in range(first, first + per_rank, run.micro_batch):
        batch = to_device(run.train_data.batch(start, start + run.micro_batch), run.device)
        with run.autocast:
            losses = ask(run.model.forward, batch)[0]
        if not bad and not losses.isfinite().all():
            bad.append("head")  # which the loss takes apart and does not call
    run.model.train()
    for hook in hooks:
        hook.remove()
    return dict(
        positions=[first, first + per_rank],
        datasets=[run.train_data.datasets[k].name for k in sources],
        first_bad_layer=bad[0] if bad else None,
    )


def verify_resume(argv: list[str], cfg: Config) -> int:
    """Train 2 K steps, and K more from the checkpoint of step K; 0 where both end the same.

    Two whole runs of this program with these flags, in a temporary directory.
    """
    k, rank = cfg.verify_resume, rank_and_world()[0]
    # under torchrun the same on all ranks of a machine
    folder = Path(tempfile.gettempdir()) / f"steady-verify-{os.getuid()}-{os.getppid()}"
    warmup = min(cfg.warmup_steps or k, k)
    flags = ["--verify_resume=0", f"--max_steps={2 * k}", f"--save_interval={k}",
             f"--warmup_steps={warmup}", "--keep_checkpoints=2", "--no_tensorboard"]  # fmt: skip
    whole, halves = folder / "whole", folder / "halves"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        main([*argv, *flags, f"--out_dir={whole}"])
        middle = checkpoint.path_of(whole / "checkpoints", k)
        main([*argv, *flags, f"--out_dir={halves}", f"--resume={middle}"])
        if rank:
            return 0
        ends = (checkpoint.path_of(run / "checkpoints", 2 * k) for run in (whole, halves))
        one, two = (torch.load(p, map_location="cpu", weights_only=True) for p in ends)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    state = ("model", "optimizers", "scaler", "step", "position", "best_loss")
    count, different = checkpoint.compare({n: one[n] for n in state}, {n: two[n] for n in state})
    if different:
        print(f"verify_resume: differs after {k} + {k} steps: {different[0]} and "
              f"{len(different) - 1} others of {count}")  # fmt: skip
        return 1
    print(f"verify_resume: identical, {count} values and tensors after {k} + {k} steps")
    return 0


def command(argv: list[str]) -> int:
    """Run `main`; returns the exit code, having said in one line what went wrong."""
    first = rank_and_world()[0] == 0
    try:
        code = main(argv)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code
    except ConfigError as e:
        if first or dist.is_initialized():  # one rank's own trouble is shown
            print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --auto-resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    except NotFinite as e:
        if first:
            print(f"train.py: failed: {e}", file=sys.stderr)
        return 1
    except Exception as e:
        if dist.is_initialized() and LOST_CONNECTION.search(str(e)):
            # the other rank has the traceback that tells something
            print(
                "train.py: failed: another rank is gone:", str(e).splitlines()[0], file=sys.stderr
            )
        else:
            print(f"train.py: failed: {type(e).__name__}: {e}", file=sys.stderr)
            traceback.print_exc()
        return 1


LOST_CONNECTION = re.compile(
    "closed by peer|reset by peer|[Bb]roken pipe|remote process exited|communicator was aborted"
)


if __name__ == "__main__":
    code = command(sys.argv[1:])
    if rank_and_world()[1] > 1:
        # A thread of gloo or NCCL that wakes while the interpreter is being taken down aborts the
        # process ("terminate called without an active exception"): leave without taking it down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
