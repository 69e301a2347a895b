"""Train a language model: the loop, the update, evaluation, setting up a run.

    python train.py                                        a small model on Python's own source
    python train.py --auto-resume                          continue the newest run
    torchrun --nproc_per_node=8 train.py --log_interval 50 the same training on 8 GPUs

Read `train` for the loop and `set_up` for how a run is put together. The model, the data and the
monitor are one module each; what a fork rarely opens is in steady/.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from steady.guard.ctrl_c import start

    start("tools.commands:run")

import contextlib
import gc
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import config
from config import IGNORE, Config
from data import Batch, Mixture, Size, eval_batches, eval_samples, load_data, loader
from model import Transformer, flops_per_token, generate
from monitor import Monitor, add_by_dataset
from steady.checkpoints import run_dir as rundir
from steady.checkpoints.backup import Backup
from steady.checkpoints.parts import require_shared
from steady.checkpoints.state import load_checkpoint, make_writer, reconcile_best, save_checkpoint
from steady.guard import faults, memory
from steady.guard.faults import check_finite
from steady.guard.memory import collect_garbage, tidy_memory
from steady.guard.spikes import Spikes
from steady.models import device as devices
from steady.models import float8, foreign, huggingface, lora
from steady.options import ConfigError, due
from steady.ranks import muon, parallel, ranks, replicas
from steady.ranks.watchdog import Watchdog, patience
from steady.watch.norms import output_health

# --- the loop --------------------------------------------------------------------------------


def train(run: "Run"):
    """Train until the last step or a signal to stop. `run.step` counts the updates made."""
    cfg, monitor, batches = run.cfg, run.monitor, run.batches
    gc.disable()  # collect_garbage does it, at the same steps on all ranks
    while run.step < run.last_step and not run.stop.requested(monitor):
        seed_everything(cfg.seed, run.step, run.rank)
        lr = set_learning_rate(run.optimizers, learning_rate(run.step, cfg))
        size = run.train_data.size(run.position, cfg.batch_size, run.micro_batch, run.world_size)
        # the loss is the mean over all targets of the step; DDP divides by world_size itself
        loss_scale = run.world_size / max(1, size.targets)
        for i in range(run.accumulation):
            monitor.phase("data")
            batch = next(batches)  # on the device, or on its way there
            monitor.phase("forward")
            last = i == run.accumulation - 1
            with run.shards.micro_batch(run.ddp, last), run.autocast:
                losses = run.ddp(batch.tokens, batch.targets, batch.documents)  # [B, T]
                loss = losses.sum() * loss_scale
            monitor.phase("backward")
            run.scaler.scale(loss).backward()
            monitor.add_loss(loss.detach(), losses.detach(), batch)
        monitor.phase("optimizer")
        grad_norm = update(run)  # clips; skips non-finite gradients on the device
        run.advance(size)  # step, position and tokens together
        monitor.phase("other")
        measure_output(run, batch)
        collect_garbage(run)
        monitor.step(run.step, lr, grad_norm, size, run.nonfinite, run.spikes)  # syncs at a log
        check_finite(run)
        if evaluation_due(run):
            keep_best(run, evaluate(run))
        if due(run.step, cfg.save_interval, run.last_step) or run.stop.save:
            save_checkpoint(run)
        if due(run.step, cfg.sample_interval) and run.step < run.last_step:  # or see `main`
            show_sample(run)
        tidy_memory(run)
    if run.stop.signal:
        save_checkpoint(run)
    else:
        check_finite(run, ended=True)


def learning_rate(step: int, cfg: Config) -> float:
    """The learning rate of update number `step` + 1: linear warm-up, then the schedule."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    share = 1.0
    if cfg.lr_schedule == "cosine":
        done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif cfg.lr_schedule == "wsd":
        decay_steps = min(cfg.decay_fraction * cfg.max_steps, cfg.max_steps - cfg.warmup_steps)
        share = min(1.0, (cfg.max_steps - step) / max(1.0, decay_steps))
    return cfg.min_learning_rate + share * (cfg.learning_rate - cfg.min_learning_rate)


def set_learning_rate(optimizers, lr: float) -> float:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def seed_everything(seed: int, step: int, rank: int):
    """Make the random numbers of a step a function of (seed, step, rank), as its samples are.

    So dropout resumes bit for bit without generator states in the checkpoint.
    """
    number = hash((seed, step, rank)) % 2**63
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@torch.no_grad()
def update(run: "Run") -> Tensor:
    """Apply the gradients, clipped to the global norm cfg.grad_clip; returns the unclipped norm.

    A non-finite norm or a spike skips the update, without a sync: the optimizers read a divisor and
    a flag on the device, `grad_scale` and `found_inf`, as torch's fused kernels do. An optimizer
    that does not read them costs one sync a step.
    """
    run.shards.move_gradients()
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # a no-op except in fp16
    grads = [p.grad for p in run.parameters.values() if p.grad is not None]
    grad_norm = run.shards.norms(grads).norm()
    found_inf = (~grad_norm.isfinite()).float()  # or NaN
    parallel.agree_on_scale(run.scaler, run.optimizers, found_inf)
    divisor = (grad_norm / (run.cfg.grad_clip or math.inf)).clamp(min=1.0)
    run.nonfinite = (run.nonfinite + 1) * found_inf
    if run.spikes:
        found_inf = found_inf + run.spikes.find(run.monitor.step_loss, grad_norm)
    with run.monitor.health(run.step + 1, run.parameters, run.shards.norms):
        run.clean = False
        for optimizer in run.optimizers:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale, optimizer.found_inf = divisor, found_inf
                optimizer.step()
            elif not found_inf:
                grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
                torch._foreach_div_([g for g in grads if g is not None], divisor)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    run.scaler.update()
    return grad_norm


def make_optimizers(model: nn.Module, cfg: Config, device: torch.device,
                    parameters: dict[str, nn.Parameter] | None = None, shards=None) -> list:
    """The optimizers of a run; together they hold every parameter exactly once.

    parameters: what this rank holds of those of the model, in their order.
    """
    in_blocks = {id(p) for p in model.blocks.parameters()}
    names = {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) in in_blocks}
    parameters = parameters or dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    matrices = [p for name, p in trained.items() if name in names]
    others = [p for name, p in trained.items() if name not in names]
    groups = [dict(params=others, weight_decay=0.0)]
    optimizers = []
    if cfg.optimizer == "muon":
        fast = cfg.precision != "fp32" and devices.multiplies_bf16(device)
        ns_dtype = torch.bfloat16 if fast else torch.float32
        optimizers.append(muon.Muon(matrices, cfg.learning_rate, cfg.weight_decay,
                                    ns_dtype=ns_dtype, shards=shards))
    else:
        groups.append(dict(params=matrices, weight_decay=cfg.weight_decay))
    betas = cfg.beta1, cfg.beta2
    fused = device.type != "mps"  # whose fused kernel ignores the divisor of `update` in torch 2.11
    optimizers.append(torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=betas, fused=fused))
    return optimizers


# --- evaluation ------------------------------------------------------------------------------


def evaluation_due(run: "Run") -> bool:
    """Also true on resuming at a step that a crash left without its evaluation."""
    is_due = due(run.step, run.cfg.eval_interval, run.cfg.max_steps)
    return run.val_data is not None and is_due and run.evaluated_step < run.step


@torch.no_grad()
def evaluate(run: "Run") -> float:
    """Mean loss in nats over the same validation samples, shared by all ranks; NaN of none."""
    cfg, data = run.cfg, run.val_data
    previous = run.monitor.phase("evaluation")
    run.model.eval()
    totals = torch.zeros(2, len(data.datasets), device=run.device)  # sums of losses, of targets
    n = eval_samples(cfg, data)
    for batch in eval_batches(data, n, run.micro_batch, run.rank, run.world_size, run.device):
        run.monitor.phase("evaluation")  # a sign of progress
        with run.autocast:
            losses = run.model(batch.tokens, batch.targets, batch.documents)
        add_by_dataset(totals, losses, batch)
    run.model.train()
    parallel.release(run.model)
    if run.world_size > 1:
        dist.all_reduce(totals)
    sums, counts = totals.tolist()
    run.evaluated_step = run.step
    run.monitor.phase(previous)
    if not any(counts):
        if run.rank == 0:
            print(f"warning: step {run.step}: the validation data has no target that counts")
        return math.nan
    loss = sum(sums) / sum(counts)
    counted = {"val/loss": sum(counts)}  # tokens that each loss is the mean of
    row = {"val/loss": loss, "val/perplexity": math.inf if loss > 700 else math.exp(loss)}
    if data.bytes_per_token:
        row["val/bits_per_byte"] = sum(sums) / math.log(2) / np.dot(counts, data.bytes_per_token)
    if len(data.datasets) > 1:
        for dataset, total, count in zip(data.datasets, sums, counts, strict=True):
            if count:
                row[f"val/loss/{dataset.name}"] = total / count
                counted[f"val/loss/{dataset.name}"] = count
    if run.rank == 0:
        sizes = {name: f" ({count:,.0f} tokens)"
                 for name, count in counted.items() if cfg.eval_only}
        shown = " | ".join(f"{name[len('val/') :]} {value:{'.4f' if value < 1e4 else '.4g'}}"
                           f"{sizes.get(name, '')}" for name, value in row.items())
        if n < data.n_samples:
            shown += f" ({n:,} of {data.n_samples:,} sequences)"
        print(f"step {run.step}: validation {shown}", flush=True)
    run.monitor.write(run.step, row)
    return loss


def keep_best(run: "Run", val_loss: float):
    best = run.writer.best() if run.rank == 0 else None  # a save of a better one may have failed
    run.best_loss, run.best_step = run.stop.broadcast_from_rank0(best)
    run.waited += 1
    if val_loss < run.best_loss:
        run.best_loss, run.best_step, run.waited = val_loss, run.step, 0
        save_checkpoint(run, is_best=True)


def measure_output(run: "Run", batch: Batch):
    """With --monitor full, when due: log the output's entropy on this rank's last micro-batch."""
    if run.cfg.monitor == "full" and run.monitor.due(run.step, run.cfg.health_interval):
        with run.autocast, parallel.gathered(run.model):
            counted = batch.targets != IGNORE
            real = counted.any()  # not with surplus samples alone
            found = output_health(run.model, batch.tokens, counted, batch.documents)
            for name, value in found.items():
                run.monitor.log(name, value * real, real)


def show_sample(run: "Run", title: str = ""):
    """Print a sample of what the model writes; called on every rank."""
    if run.rank == 0 or run.shards.size > 1:  # then it takes all of them
        previous = run.monitor.phase("evaluation")
        text = sample(run)
        run.monitor.phase(previous)
        if run.rank == 0:
            print(f"{title}{text}", flush=True)
            run.monitor.write(run.step, {"sample": text})


def sample(run: "Run", max_new_tokens: int = 400) -> str:
    """Text generated with a fixed sampling seed.

    From the beginning of a document or, where the data has prompts, in answer to the first one.
    """
    data = run.val_data or run.train_data
    batch, end = data.batch(0, 1), run.train_data.end_of_text
    prompt = batch.tokens[:, :1].long() if end is None else torch.tensor([[end]])
    if data.has_prompts:
        counted = (batch.targets[0] != IGNORE).nonzero()
        prompt = batch.tokens[:, : int(counted[0]) + 1 if len(counted) else 1].long()
    prompt = prompt.to(run.device)
    with run.autocast, parallel.gathered(run.model):
        if not run.model.predict(prompt).isfinite().all():
            return "(none: the output of the model is not finite)"
        torch.manual_seed(0)
        tokens = generate(run.model, prompt, max_new_tokens, 0.8, top_k=50)
    if not data.has_prompts:
        return data.decode(tokens[0, 1:].tolist())
    answer = tokens[0, prompt.shape[1] :].tolist()
    answer = answer[: answer.index(end)] if end in answer else answer
    return f"{data.decode(prompt[0].tolist())}\n→ {data.decode(answer)}"


# --- setting up a run ------------------------------------------------------------------------


@dataclass
class Run:
    """The state of a run and everything it uses; made in `set_up`."""

    cfg: Config
    out_dir: Path | None  # None for a new run, until open_run_dir makes its directory
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    micro_batch: int
    workers: int
    train_data: Mixture
    val_data: Mixture | None
    model: Transformer
    shards: parallel.Shards  # which part of it this rank holds
    parameters: dict[str, nn.Parameter]  # that part of each, by name
    tensors: dict[str, Tensor]  # the same and buffers, as checkpoints name them
    ddp: nn.Module  # the model, wrapped where there are several ranks
    optimizers: list
    scaler: torch.amp.GradScaler
    autocast: torch.autocast
    stop: faults.Stop
    watchdog: Watchdog
    batches: object = None  # the loader's micro-batches from `position` on
    monitor: Monitor | None = None
    writer: object = None  # of checkpoints; on rank 0, or on all ranks of the first copy
    lock: object = None  # the file that keeps other processes out of out_dir until it is closed
    step: int = 0  # updates made
    position: int = 0  # the next update begins with this sample
    tokens: int = 0  # trained on, without padding
    best_loss: float = math.inf  # lowest validation loss, at best_step
    best_step: int = 0
    evaluated_step: int = 0  # step of the newest evaluation
    waited: int = 0  # evaluations since that of best_step
    nonfinite: Tensor | float = 0.0  # steps in a row whose update was skipped, on the device
    first_step: int = 1  # of this process
    resumed_from: Path | None = None
    saved: tuple = ()  # `saved_at` of the newest checkpoint
    rollbacks: list[int] = field(default_factory=list)  # steps gone back to
    spikes: Spikes | None = None  # with --skip_spikes
    clean: bool = True  # the weights are those of `step`, not half updated

    @property
    def accumulation(self) -> int:
        return -(-self.cfg.batch_size // (self.micro_batch * self.world_size))

    @property
    def last_step(self) -> int:
        """max_steps, or this one where --patience has run out."""
        return self.step if 0 < self.cfg.patience <= self.waited else self.cfg.max_steps

    @property
    def compiled(self) -> bool:
        return self.device.type == "cuda" if self.cfg.compile is None else self.cfg.compile

    def advance(self, size: Size):
        """Count the update just made."""
        self.step += 1
        self.position += self.cfg.batch_size
        self.tokens += size.real_tokens
        self.clean = True


@faults.setting_up()
def set_up(argv: list[str]) -> Run:
    """The run that `argv` asks for, ready for its next step. Raises ConfigError."""
    rank, local_rank, world_size, local_world_size = ranks.rank_and_world()
    store = ranks.meet(rank, world_size, patience(config.parse(argv).hang_seconds))
    cfg, out_dir = ranks.from_rank0(store, lambda: choose_run(argv))
    watchdog = Watchdog(cfg.hang_seconds)
    ranks.check_shard_size(cfg.shard_size, world_size)
    started = rundir.continues(cfg, out_dir)
    micro_batch = memory.micro_batch_size(cfg, world_size, uneven=started)
    device = devices.pick_device(cfg.device, local_rank)
    dtype = devices.pick_dtype(cfg.precision, device)
    devices.configure(cfg, device)
    attention = devices.attention_backend(cfg, device, dtype)  # refuses one that cannot run here
    varlen = attention == devices.VARLEN and getattr(Transformer, "takes_boundaries", False)
    train_data, val_data = load_data(cfg)
    cfg = config.resolve(cfg)  # with the steps of --epochs
    for data in filter(None, (train_data, val_data)):
        data.boundaries = varlen
    ranks.join_ranks(store, rank, world_size, device, patience(cfg.hang_seconds))
    shards = parallel.Shards(cfg.parallel, world_size, cfg.shard_size, device.type)
    stop = faults.Stop(world_size)
    found = rundir.find_start(cfg, out_dir) if rank == 0 else None
    checkpoint = stop.broadcast_from_rank0(found and found.checkpoint)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if cfg.micro_batch_size == "auto":
        fits = memory.largest_micro_batch(
            lambda: make_model(cfg, train_data, checkpoint, device, dtype, shards.alone()), cfg,
            world_size, autocast, device, varlen)
        micro_batch = memory.micro_batch_size(cfg, world_size, stop.minimum(fits), started)
    model = make_model(cfg, train_data, checkpoint, device, dtype, shards)
    float8.convert(model, cfg, device, dtype)
    parameters = shards.parameters_of(model)
    run = Run(
        cfg=cfg, out_dir=found.out_dir if found else out_dir, lock=found and found.lock,
        rank=rank, world_size=world_size, device=device, dtype=dtype, micro_batch=micro_batch,
        workers=devices.pick_workers(cfg.num_workers, device, local_world_size),
        train_data=train_data, val_data=val_data,
        model=model, shards=shards, parameters=parameters,
        tensors=lora.kept(shards.tensors_of(model)),
        ddp=parallel.distribute(model, device, world_size),
        optimizers=shards.checked(make_optimizers(model, cfg, device, parameters, shards)),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        autocast=autocast, stop=stop, watchdog=watchdog,
        spikes=Spikes(cfg.skip_spikes, device) if cfg.skip_spikes else None,
    )
    watchdog.run = run
    if run.compiled:  # in place, so that names in checkpoints stay those of the module
        parallel.compile_in_place(model, run.optimizers, train_data.row_lengths_vary)
    parallel.watch_for_waiting(run.ddp, lambda: run.monitor)
    if checkpoint:
        restore(run, Path(checkpoint))
    elif cfg.eval_only and not cfg.init_from:
        raise ConfigError("--eval_only: there is no checkpoint to evaluate")
    return run


def choose_run(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration and the run directory; None if a new directory is to be made."""
    cfg = rundir.after_restart(config.parse(argv))
    out_dir = rundir.find_run(cfg)
    with rundir.saved_config(cfg, out_dir) as saved:
        if saved:  # a run that continues: its flags need not be repeated
            cfg = rundir.after_restart(config.parse(argv, saved))
    has_shape = rundir.continues(cfg, out_dir) and (cfg.model != "transformers" or cfg.d_model)
    if cfg.init_from and not has_shape:
        cfg = huggingface.config_from_hf(cfg)
    return config.resolve(cfg), out_dir


def make_model(cfg: Config, data: Mixture, checkpoint: str | None, device: torch.device,
               dtype: torch.dtype, shards: parallel.Shards) -> nn.Module:
    """The model, or this rank's part of it; with --init_from's weights if no checkpoint follows."""
    if cfg.init_from and not checkpoint and "tokenizer" not in cfg.allow_change:
        huggingface.check_tokenizer(cfg.init_from, data)
    checkpoint = None if cfg.lora_rank else checkpoint  # which holds only adapters
    if cfg.model == "transformers":
        model = foreign.HFModel(cfg, Path(checkpoint) if checkpoint else None)
        shards.divide(huggingface.adapt(model, cfg, dtype), dtype)
        return model.to(device)
    memory.refuse_too_large(cfg, shards.size)
    with torch.device("meta"):
        model = huggingface.adapt(Transformer(cfg), cfg, dtype)
    shards.divide(model, dtype)
    model.to_empty(device=device)
    torch.manual_seed(cfg.seed)
    with parallel.WholeDraws(shards):
        model.init_weights()
        lora.init_weights(model)
    if cfg.init_from and not checkpoint:
        huggingface.load_initial(model, cfg.init_from, shards)
    return model


def restore(run: Run, checkpoint: Path):
    """Continue from a checkpoint. Raises ConfigError where it does not belong to this run."""
    saved = load_checkpoint(run, checkpoint)
    run.resumed_from = checkpoint
    if run.rank or run.cfg.eval_only:
        return
    if run.cfg.max_steps != saved["max_steps"] and run.cfg.max_steps > run.step:
        old = replace(run.cfg, **{k: saved[k] for k in ("max_steps", "warmup_steps")})
        before, now = (learning_rate(run.step, cfg) for cfg in (old, run.cfg))
        print(f"resume  max_steps {old.max_steps} -> {run.cfg.max_steps}: the schedule has its new "
              f"length; the learning rate goes from {before:.2e} to {now:.2e}")


@faults.setting_up()
def open_run_dir(run: Run):
    """Rank 0 makes and locks the run directory, and says what is about to run."""
    cfg, backup, best = run.cfg, None, None
    if run.rank == 0:
        if cfg.backup_to:
            backup = Backup(cfg.backup_to, cfg.backup_interval, cfg.keep_checkpoints)
        if not run.lock:
            run.out_dir, run.lock = rundir.claim_unused(cfg, run.out_dir)
        rundir.prepare(run)
        best = reconcile_best(run)
        print(rundir.describe(run), flush=True)
    run.out_dir, (run.best_loss, run.best_step) = run.stop.broadcast_from_rank0((run.out_dir, best))
    require_shared(run.out_dir)
    run.writer = make_writer(run, backup)


def make_monitor(run: Run) -> Monitor:
    """The monitor of the steps from here on; only rank 0 writes."""
    cfg, data = run.cfg, run.train_data

    def epochs() -> dict[str, float]:
        done = zip(data.datasets, data.order.epochs(run.position), strict=True)
        return {f"train/epochs/{dataset.name}": n for dataset, n in done}

    peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else devices.peak_flops(run.device, run.dtype)
    return Monitor(
        cfg, run.device, start_step=run.step, start_tokens=run.tokens,
        out_dir=run.out_dir if run.rank == 0 and not cfg.eval_only else None,
        flops_per_token=flops_per_token(run.model, cfg, data.typical_length()),
        peak=peak * run.world_size if peak else None,
        gather=lambda values, names: ranks.gather(values, names, run.stop.group),
        datasets=[d.name for d in data.datasets], epochs=epochs,
        autopsy=lambda step, rank: faults.autopsy(run, step, rank), together=run.shards.size > 1,
        replicas=replicas.Replicas(run.shards.tensors_of(run.model), run.shards.size,
                                   cfg.check_replicas_interval, run.step),
    )


# --- running it ------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Train as `argv` says; returns the exit code."""
    run = set_up(argv)
    if run.cfg.eval_only:
        with contextlib.closing(run.lock or contextlib.ExitStack()):
            run.monitor = make_monitor(run)
            evaluate(run)
        return 0
    if run.step >= run.last_step and not evaluation_due(run):
        if run.rank == 0:
            if run.lock:  # the run directory is ours to repair
                reconcile_best(run)
            ended = rundir.early_end(run) or f"has made all {run.step} steps"
            print(f"{run.out_dir} {ended}: nothing to do")
        return 0
    open_run_dir(run)
    with run.stop, run.watchdog:
        report = train_with_recovery(run)
        if run.world_size > 1:
            dist.barrier(group=run.stop.group)  # torchrun kills the others if one leaves
    if run.rank == 0:
        print(*filter(None, (report, rundir.early_end(run))), sep="\n")
    if not run.stop.signal:
        with faults.only_warning("no sample"):
            show_sample(run, "sample  of what it writes:\n\n")
    if run.lock:
        run.lock.close()
    return 128 + run.stop.signal if run.stop.signal else 0


def train_with_recovery(run: Run) -> str:
    """Train, rolling back or rescuing when steps fail; returns the monitor's report."""
    while True:
        run.monitor, run.first_step = make_monitor(run), run.step + 1
        order = dict(seed=run.cfg.seed, batch_size=run.cfg.batch_size, position=run.position)
        run.monitor.write(run.step, {"order": order})  # for `data.py show`
        run.batches = loader(run.train_data, run.cfg, run.position, run.cfg.max_steps - run.step,
                             run.micro_batch, run.rank, run.world_size, run.device, run.workers)
        try:
            if evaluation_due(run):
                keep_best(run, evaluate(run))
            with contextlib.closing(run.batches):  # ends its processes before errors are reported
                train(run)
            break
        except faults.NotFinite as e:
            faults.roll_back(run, e)
        except replicas.ReplicasDiffer as e:
            faults.set_doubtful_aside(run, e)
            raise  # without a save
        except BaseException as e:
            faults.rescue(run)
            if memory.out_of_memory(e):
                raise MemoryError(memory.memory_advice(run, e)) from e
            raise
        finally:
            if run.writer:
                run.writer.wait()
            report = run.monitor.close()
    run.watchdog.ended.set()  # an upload may take hours
    if run.writer:
        run.writer.close(copy=not run.stop.signal)  # after a signal, time is short
    return report
