"""Train a language model: the loop, the update, evaluation, setting up a run.

    python train.py                                        a small model on Python's own source
    python train.py --auto-resume                          continue the newest run
    torchrun --nproc_per_node=8 train.py --log_interval 50 the same training on 8 GPUs

Read `train` for the loop and `set_up` for the parts of a run. The model, the data and the monitor
are one module each; code that forks rarely change is in steady/.
"""

if __name__ == "__main__":  # first: the imports below take seconds
    from steady.guard.process import begin

    begin()

import contextlib
import gc
import json
import math
import random
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import config
from config import Config
from data import IGNORE, Mixture, eval_batches, eval_samples, load_data, loader, what_is_evaluated
from model import Transformer, flops_per_token, generate
from monitor import Monitor
from steady.checkpoints import opening
from steady.checkpoints import run_dir as rundir
from steady.checkpoints.checkpoint import Checkpoint
from steady.checkpoints.state import Progress, load_checkpoint, reconcile_best, save_checkpoint
from steady.guard import memory, process
from steady.guard.deadline import Deadline
from steady.guard.guard import Guard, NotFinite
from steady.guard.metrics import monitor_options, starting_row, watch_for_waiting
from steady.guard.recovery import rescue, roll_back
from steady.guard.stop import Stop
from steady.models import device as devices
from steady.models import foreign, huggingface, lora
from steady.models.ema import Ema
from steady.models.evaluation import Means, copy_of_weights, measure_output, update_metrics
from steady.options import ConfigError, due, reading_paths
from steady.ranks import parallel
from steady.ranks.muon import Muon
from steady.ranks.ranks import Ranks, from_rank0, gloo_group, meet, rank_and_world
from steady.ranks.watchdog import Watchdog

# --- the loop --------------------------------------------------------------------------------


def train(run: "Run", batches):
    """Train until the last step or a signal to stop. `progress.step` counts the updates made."""
    cfg, ranks, progress, guard, stop = run.cfg, run.ranks, run.progress, run.guard, run.ranks.stop
    monitor = run.monitor  # delete every line that mentions it; training still works
    first_step = progress.step + 1
    # keeps gradients near their final size; ddp divides by world_size itself
    unit = ranks.world_size / (cfg.batch_size * cfg.seq_len)
    gc.disable()  # collect_garbage collects instead, at the same steps on all ranks
    while progress.step < run.last_step and not stop.requested():
        seed_everything(cfg.seed, progress.step, ranks.rank)
        lr = set_learning_rate(run.optimizers, learning_rate(progress.step, cfg))
        sums = 0.0  # becomes [summed loss, number of targets]
        for i in range(run.accumulation):
            monitor.phase("data")
            batch = next(batches)  # on the device, or on its way there
            monitor.phase("forward")
            with ranks.shards.micro_batch(run.ddp, i + 1 == run.accumulation), ranks.autocast:
                losses = run.ddp(batch.tokens, batch.targets, batch.documents)  # [B, T]
                loss = losses.sum() * unit  # `update` divides by the targets counted
            monitor.phase("backward")
            ranks.scaler.scale(loss).backward()
            sums = sums + torch.stack((loss.detach().float(), (batch.targets != IGNORE).sum()))
            monitor.add_losses(losses.detach(), batch)
        monitor.phase("optimizer")
        step_loss, grad_norm = update(run, sums)  # clips; skips non-finite gradients
        run.advance()  # step, position and tokens together
        monitor.phase("other")
        measure_output(run, batch)  # only at log steps, with --monitoring full
        memory.collect_garbage(progress.step, first_step)
        monitor.step(progress.step, lr=lr, loss=step_loss, grad_norm=grad_norm)
        guard.check(progress.step)  # reads the device only when it is due, as at a log
        between_steps(run)
    if stop.signal:
        save(run)
    else:
        guard.check(progress.step, ended=True)


def between_steps(run: "Run"):
    """If due, clear the cache (before a save, or it waits for the copy), evaluate, save, sample."""
    cfg, progress = run.cfg, run.progress
    memory.clear_cache(run.ranks.device, progress.step, cfg.cache_clear_interval)
    if evaluation_due(run):
        keep_best(run, evaluate(run))
    if due(progress.step, cfg.save_interval, run.last_step) or run.ranks.stop.save:
        save(run)
    if due(progress.step, cfg.sample_interval) and progress.step < run.last_step:
        show_sample(run)  # after the last step, `train_with_recovery` does


def learning_rate(step: int, cfg: Config) -> float:
    """The learning rate of update number `step` + 1: linear warm-up, then the schedule."""
    planned = cfg.warmup_steps  # --max_minutes may have left fewer steps
    warmup = planned if planned <= cfg.max_steps else cfg.max_steps // 2
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    share = 1.0
    if cfg.lr_schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * ((step - warmup) / max(1, cfg.max_steps - warmup)))
    elif cfg.lr_schedule == "wsd":
        decay_steps = min(cfg.decay_fraction * cfg.max_steps, cfg.max_steps - warmup)
        share = min(1.0, (cfg.max_steps - step) / max(1.0, decay_steps))
    return cfg.min_learning_rate + share * (cfg.learning_rate - cfg.min_learning_rate)


def set_learning_rate(optimizers, lr: float) -> float:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def seed_everything(seed: int, step: int, rank: int):
    """Random numbers follow from (seed, step, rank): a resumed run needs no generator states."""
    number = hash((seed, step, rank)) % 2**63
    on_gpu = torch.cuda.is_initialized() or torch.backends.mps.is_available()
    generator = torch if on_gpu else torch.default_generator  # torch.manual_seed takes 0.2 ms
    generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@torch.no_grad()
def update(run: "Run", sums: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the gradients of the mean over all targets, clipped to the global norm cfg.grad_clip.

    sums: losses and targets of this rank. Returns (this rank's loss, scaled so that the mean over
    ranks is the step's; the unclipped norm). A non-finite norm or a spike skips the update. Fused
    optimizers and Muon read `grad_scale` and `found_inf` on the device; others sync in each step.
    """
    shards, cfg = run.ranks.shards, run.cfg
    shards.move_gradients(run.ddp)
    for optimizer in run.optimizers:
        run.ranks.scaler.unscale_(optimizer)  # a no-op except in fp16
    grads = [p.grad for p in shards.parameters.values() if p.grad is not None]
    over_ranks = torch.stack((*sums, shards.norms(grads).norm().float()))
    if dist.is_initialized():
        dist.all_reduce(over_ranks)  # the norm as well: all ranks must decide alike
    n_targets = over_ranks[1]
    share = n_targets.where(n_targets > 0, 1.0) / (cfg.batch_size * cfg.seq_len)  # with a loss
    loss, grad_norm = over_ranks[::2] / run.ranks.world_size / share  # their means over ranks
    divisor = share * (grad_norm / (cfg.grad_clip or math.inf)).clamp(min=1.0)
    before = copy_of_weights(shards) if run.measures(run.progress.step + 1) else None
    if run.dir.writer:
        run.dir.writer.finish_copy()  # a checkpoint may still be copying the weights
    run.guard.clean = False
    found_inf = run.guard.skips((~grad_norm.isfinite()).float(), loss, grad_norm)
    for optimizer in run.optimizers:
        step, promises = type(optimizer).step, optimizer  # that it reads both on the device
        if not step.__module__.startswith("torch."):
            promises = step  # a subclass with its own step still has torch's attribute
        elif not optimizer.state and any(g.get("momentum") for g in optimizer.param_groups):
            promises = None  # SGD: skipped on the device, a first step leaves momentum undefined
        if getattr(promises, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = divisor, found_inf
            optimizer.step()
        elif not found_inf:
            held = (p for group in optimizer.param_groups for p in group["params"])
            if grads := [p.grad for p in held if p.grad is not None]:
                torch._foreach_div_(grads, divisor)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.ranks.scaler.update()
    run.monitor.log_all(update_metrics(shards, before) if before else {})
    return sums[0] / share, grad_norm


EMBEDDING_SCALE = 3.0  # times the learning rate, beside Muon; measured: EXPERIMENTS.md


def make_optimizers(model: nn.Module, cfg: Config, device: torch.device,
                    shards: parallel.Shards) -> list:
    """The optimizers of a run; together they hold each of shards.parameters exactly once."""
    blocks, kinds = set(model.blocks.modules()), {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            # a stack of matrices, such as experts, but not a convolution's kernel
            stack = p.ndim == 3 and min(p.shape[1:]) > 1 and not hasattr(module, "kernel_size")
            if isinstance(module, nn.Embedding):
                kinds[name] = "other" if p is model.head.weight else "table"
            else:
                is_matrix = module in blocks and (p.ndim == 2 or stack)
                kinds[name] = "matrix" if is_matrix else "other"
    trained = {name: p for name, p in shards.parameters.items() if p.requires_grad}
    matrices = [dict(params=[p for name, p in trained.items() if kinds[name] == "matrix"],
                     weight_decay=cfg.weight_decay)]
    others = [dict(params=[p for name, p in trained.items() if kinds[name] == "other"]),
              dict(params=[p for name, p in trained.items() if kinds[name] == "table"])]
    optimizers = []
    if cfg.optimizer == "muon":
        others[1]["lr_scale"] = EMBEDDING_SCALE
        fast = cfg.precision != "fp32" and devices.multiplies_bf16(device)
        optimizers.append(Muon(matrices, cfg.learning_rate, shards=shards,
                               dtype=torch.bfloat16 if fast else torch.float32))
    else:
        others += matrices
    fused = device.type != "mps"  # MPS's fused kernel ignores `update`'s divisor in torch 2.11
    optimizers.append(torch.optim.AdamW(others, lr=cfg.learning_rate, fused=fused,
                                        betas=(cfg.beta1, cfg.beta2), weight_decay=0.0))
    return optimizers


# --- evaluation ------------------------------------------------------------------------------


def evaluation_due(run: "Run") -> bool:
    """Also true on resuming at a step that crashed before its evaluation."""
    step = run.progress.step
    is_due = due(step, run.cfg.eval_interval, run.cfg.max_steps)
    return run.val_data is not None and is_due and run.progress.evaluated_step < step


@torch.no_grad()
def evaluate(run: "Run") -> float | None:
    """Mean loss in nats over all ranks, on the same samples each time; NaN if no target counts.

    None after a signal to stop. With --ema, the averaged weights' loss. Another metric is one line:
    `means.add(f"val/NAME{of}", values, batch)`, values of [B, T].
    """
    cfg, data, ranks, step = run.cfg, run.val_data, run.ranks, run.progress.step
    if cfg.save_interval:
        save(run)  # first: an evaluation takes long and may fail
    previous = run.monitor.phase("evaluation")
    run.model.eval()
    means, n = Means(data, ranks), eval_samples(cfg, data)
    for of in ("", "_ema") if run.ema else ("",):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(ranks.rank)  # a loss that draws numbers draws the same each time
        with run.ema.in_place(run) if of else contextlib.nullcontext():
            for batch in eval_batches(data, n, ranks):
                if ranks.stop.asked(together=True):
                    break
                run.monitor.phase("evaluation")  # a sign of progress
                with ranks.autocast:
                    losses = run.model(batch.tokens, batch.targets, batch.documents)
                means.add(f"val/loss{of}", losses, batch)
    run.model.train()
    parallel.release(run.model)
    if ranks.stop.signal:  # a resume evaluates this step
        return None
    row, shown = means.row(n, with_counts=cfg.eval_only)
    run.monitor.phase(previous)
    if ranks.rank == 0:
        print(f"step {step}: validation {shown}", flush=True)
    run.monitor.write(step, row)
    return row.get("val/loss_ema" if run.ema else "val/loss", math.nan)


def keep_best(run: "Run", val_loss: float | None):
    if val_loss is None:
        return
    progress = run.progress
    progress.evaluated_step, progress.waited = progress.step, progress.waited + 1
    if val_loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.waited = float(val_loss), progress.step, 0
        save(run, is_best=True)


def save(run: "Run", is_best: bool = False):
    previous = run.monitor.phase("checkpoint")
    save_checkpoint(run, is_best=is_best)
    run.monitor.phase(previous)


def show_sample(run: "Run", title: str = ""):
    """Print text generated by the model; called on every rank."""
    if run.ranks.rank == 0 or run.ranks.shards.size > 1:  # a sharded model takes all ranks
        if run.cfg.save_interval:
            save(run)
        previous = run.monitor.phase("evaluation")
        text = sample(run)
        run.model.train()
        run.monitor.phase(previous)
        if run.ranks.rank == 0 and not run.ranks.stop.asked():  # else the text was cut short
            print(f"{title}{text}", flush=True)
            run.monitor.write(run.progress.step, {"sample": text})


@torch.no_grad()
def sample(run: "Run", max_new_tokens: int = 400) -> str:
    """Text generated with a fixed sampling seed, from the prompt that the data gives."""
    data = run.val_data or run.train_data
    prompt = data.prompt().to(run.ranks.device)
    weights = run.ema.in_place(run) if run.ema else contextlib.nullcontext()
    with weights, run.ranks.autocast, parallel.gathered(run.model):
        if not run.model.eval().forward(prompt).isfinite().all():
            return "(none: the output of the model is not finite)"
        torch.manual_seed(0)
        tokens = generate(run.model, prompt, max_new_tokens, 0.8, top_k=50,
                          on_token=lambda _: run.ranks.stop.asked(run.ranks.shards.size > 1))
    return data.answer(tokens[0].tolist(), prompt.shape[1])


# --- setting up a run ------------------------------------------------------------------------


@dataclass
class Run:
    """The parts of a run."""

    cfg: Config
    progress: Progress  # how far it has come
    ranks: Ranks  # this process's rank, device and precision
    dir: rundir.RunDir  # output
    train_data: Mixture
    val_data: Mixture | None
    model: Transformer
    ddp: nn.Module  # the model, wrapped if there are several ranks
    optimizers: list
    guard: Guard
    ema: Ema | None = None  # with --ema
    deadline: Deadline | None = None  # with --max_minutes
    monitor: Monitor | None = None

    @property
    def accumulation(self) -> int:
        return -(-self.cfg.batch_size // (self.ranks.micro_batch * self.ranks.world_size))

    @property
    def last_step(self) -> int:
        """max_steps, or the current step once --patience has run out."""
        stops = 0 < self.cfg.patience <= self.progress.waited
        return self.progress.step if stops else self.cfg.max_steps

    @property
    def compiled(self) -> bool:
        return self.ranks.device.type == "cuda" if self.cfg.compile is None else self.cfg.compile

    def measures(self, step: int) -> bool:
        """Whether norms, updates and entropy are measured in this step."""
        return self.cfg.monitor == "full" and self.monitor.due(step)

    def advance(self):
        """Count the update just made."""
        progress, n = self.progress, self.cfg.batch_size
        progress.tokens += int(self.train_data.count_tokens(progress.position, n))
        progress.position += n
        progress.step += 1
        if self.ema:
            self.ema.update(progress.step)
        self.guard.update_made()
        if self.deadline:
            self.deadline.set_max_steps(self.cfg, progress, self.ranks, self.val_data)


def set_up(cfg: Config, out_dir: Path | None = None) -> Run:
    """The run of a resolved Config, ready for its next step. Raises ConfigError.

    out_dir: its directory; None for a new one, made by `open_run_dir`.
    """
    rank, local_rank, world_size, local_world_size = rank_and_world()
    watchdog = Watchdog(cfg.hang_seconds)
    uneven = bool(rundir.saved_config(cfg, out_dir))  # a continued run takes any number of ranks
    micro_batch = memory.micro_batch_size(cfg, world_size, uneven=uneven)  # refuses bad sizes early
    # data
    with reading_paths():
        train_data, val_data = load_data(cfg)
    cfg = config.resolve(cfg)  # --epochs has set max_steps
    # device and precision
    device = devices.pick_device(cfg.device, local_rank)
    dtype = devices.pick_dtype(cfg.precision, device)
    workers = devices.pick_workers(cfg.num_workers, device, local_world_size)
    devices.configure(cfg, device)
    attention = devices.attention_backend(cfg, device, dtype)  # error if it cannot run here
    varlen = attention == devices.VARLEN and getattr(Transformer, "takes_boundaries", False)
    for data in filter(None, (train_data, val_data)):
        data.boundaries = varlen
    # the other ranks
    group = gloo_group(world_size, device)
    shards = parallel.Shards(cfg.parallel, world_size, cfg.shard_size, device.type)
    ranks = Ranks(rank, world_size, device, dtype, workers, shards,
                  Stop(group, rank), watchdog, micro_batch, group)
    ranks.require_same("data", lambda: [d and d.fingerprint for d in (train_data, val_data)])
    # the checkpoint to continue from
    run_dir = rundir.pick_checkpoint(cfg, out_dir) if rank == 0 else rundir.RunDir(out_dir)
    checkpoint = run_dir.resumed_from = ranks.broadcast(run_dir.resumed_from)
    if cfg.init_from and not checkpoint and cfg.model != "transformers":  # it reads other formats
        ranks.require_same("init_from", partial(huggingface.fingerprint, cfg.init_from))
    if cfg.eval_only and not (checkpoint or cfg.init_from):
        raise ConfigError("--eval_only: there is no checkpoint to evaluate")
    # model, optimizers, state
    ranks.micro_batch = memory.choose_micro_batch(cfg, ranks, uneven)
    model = make_model(cfg, train_data, checkpoint, device, dtype, shards)
    shards.hold(model)
    if len(lora.kept(shards.parameters, cfg.lora_rank)) < len(shards.parameters):
        raise ConfigError("--lora_rank: checkpoints would lack the other weights that are trained")
    run = Run(
        cfg, Progress(evaluated=what_is_evaluated(cfg, val_data)), ranks, run_dir, train_data,
        val_data, model, ddp=parallel.distribute(model, device, world_size, cfg.deterministic),
        optimizers=shards.checked(make_optimizers(model, cfg, device, shards), cfg.learning_rate),
        guard=Guard(cfg, ranks),
        ema=Ema(model, shards, cfg.ema) if cfg.ema else None,
        deadline=Deadline(cfg.max_minutes) if cfg.max_minutes else None,
    )
    if run.compiled:  # in place: parameter names stay the module's
        parallel.compile_in_place(model, run.optimizers, train_data.row_lengths_vary, world_size)
    watch_for_waiting(run.ddp, lambda: run.monitor.clock)
    if checkpoint:
        load_checkpoint(run, checkpoint)
    return run


@reading_paths()
def choose_run(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration and the run directory; None if a new directory is to be made."""
    cfg = config.parse(argv)
    meant = rundir.redirect(cfg)
    cfg = replace(cfg, **meant)
    out_dir = rundir.find_run(cfg)
    saved = rundir.saved_config(cfg, out_dir)  # the flags of a resumed run need not be repeated
    cfg = replace(config.parse(argv, saved), **meant)
    if cfg.init_from and not (saved and (cfg.model != "transformers" or cfg.d_model)):  # else known
        cfg = huggingface.config_from_hf(cfg)
    return config.resolve(cfg), out_dir


def make_model(cfg: Config, data: Mixture, checkpoint: Checkpoint | None, device: torch.device,
               dtype: torch.dtype, shards: parallel.Shards) -> nn.Module:
    """The model, or this rank's shard; has --init_from's weights unless there is a checkpoint."""
    if cfg.init_from and not checkpoint and "tokenizer" not in cfg.allow_change:
        huggingface.check_tokenizer(cfg.init_from, data)
    if cfg.model == "transformers":
        model = foreign.HFModel(cfg)
        shards.shard(huggingface.adapt(model, cfg, dtype), dtype)
        return model.to(device)
    memory.refuse_too_large(cfg, device, shards.size)
    whole = shards.size == 1 and not cfg.lora_rank  # else sharded or cast before it is allocated
    with torch.device(device if whole else "meta"), parallel.Initializer(None):  # sets nothing
        model = huggingface.adapt(Transformer(cfg), cfg, dtype)
    shards.shard(model, dtype)
    if not whole:
        model.to_empty(device=device)
    torch.manual_seed(cfg.seed)
    with parallel.Initializer(shards), parallel.all_set(model, buffers=not whole):
        model.init_weights()
        lora.init_weights(model)
    if cfg.init_from and (cfg.lora_rank or not checkpoint):  # with LoRA it holds only adapters
        with reading_paths():
            huggingface.load_initial(model, cfg.init_from, shards)
    return model


# --- running it ------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run `python train.py`; returns the exit code."""
    cfg = config.parse(argv)
    if cfg.check_checkpoints or cfg.verify_resume or cfg.estimate:
        from tools.verify import inspect

        return inspect(argv, cfg, main, make_optimizers)
    meet(cfg.hang_seconds)
    run = set_up(*from_rank0(lambda: choose_run(argv)))  # rank 0 chooses for all
    cfg, progress, ranks, stop, run_dir = run.cfg, run.progress, run.ranks, run.ranks.stop, run.dir
    if cfg.eval_only:
        with ranks.watchdog:
            run.monitor = Monitor(None, 0, level="off", device=ranks.device)
            ranks.watchdog.follow(progress, run_dir, run.monitor.clock)
            evaluate(run)
        return 0
    if progress.step >= run.last_step and not evaluation_due(run):
        if ranks.rank == 0:
            if run_dir.lock and progress.best_step:  # the run directory is ours to repair
                reconcile_best(progress, run_dir)
            finished = f"already finished ({progress.step} steps)"
            print(f"{run_dir.path}: {opening.early_end(cfg, progress) or finished}; nothing to do")
    else:
        rundir.open_run_dir(run)
        with stop, ranks.watchdog:
            train_with_recovery(run)
    if cfg.json and ranks.rank == 0:
        print(json.dumps(rundir.summary(run_dir.path)), flush=True)
    if run_dir.lock:
        run_dir.lock.close()
    return 128 + stop.signal if stop.signal else 0


def train_with_recovery(run: Run):
    """Train, rolling back or rescuing when steps fail; report, and show a sample."""
    cfg, progress, ranks, stop = run.cfg, run.progress, run.ranks, run.ranks.stop
    if 0 < progress.step < cfg.max_steps and ranks.rank == 0:
        print(opening.rate_jump(run, learning_rate), end="", flush=True)
    report, flops = "", flops_per_token(run.model, cfg, run.train_data.typical_length())
    while True:
        run.monitor = Monitor(**monitor_options(run, flops))
        stop.phase = run.monitor.phase
        run.monitor.write(progress.step, starting_row(run))
        ranks.watchdog.follow(progress, run.dir, run.monitor.clock)
        batches = loader(run.train_data, cfg, progress.position, cfg.max_steps - progress.step,
                         ranks)
        try:
            if evaluation_due(run):
                keep_best(run, evaluate(run))
                save(run)  # records the evaluation: there may be no step left
            with contextlib.closing(batches):  # ends its processes before errors are reported
                train(run, batches)
            break
        except NotFinite as e:
            roll_back(run, e)
        except BaseException as e:
            rescue(run, e)
            raise
        finally:
            if run.dir.writer:
                run.dir.writer.wait()
            report = run.monitor.close()
    ranks.watchdog.ended.set()  # first: an upload may take hours
    if run.dir.writer:
        run.dir.writer.close(stop.asked)  # after a signal, time is short
    received = -ranks.minimum(-stop.received[0])  # together: torchrun kills the rest if one leaves
    stop.signal = stop.signal or received
    if ranks.rank == 0:
        early_end = opening.early_end(cfg, progress, stop.signal)
        print(*filter(None, (report, early_end)), sep="\n", flush=True)
    if not stop.signal and cfg.sample_interval != 0:
        try:
            show_sample(run, "sample  of what it writes:\n\n")
        except Exception:  # training is done
            traceback.print_exc()


if __name__ == "__main__":
    process.run(main)
