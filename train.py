"""Train a language model: set-up, the loop, evaluation, checkpoints, distribution.

    python train.py                                        a small model on Python's own source
    python train.py --auto-resume                          continue the newest run
    torchrun --nproc_per_node=8 train.py --log_interval 50 the same training on 8 GPUs

Read `main` for how a run is put together and `train` for the loop. The model, the data and the
monitor are one module each and can be replaced after reading that module and this one.
"""

import contextlib
import dataclasses
import gc
import inspect
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import config
from config import Config, ConfigError
from data import Mixture, decode, eval_batches, load_mixture, loader, pick_workers, split_targets
from model import (
    Transformer,
    attention_backend,
    flops_per_token,
    generate,
    output_health,
    set_attention_backend,
)
from monitor import Monitor, peak_flops, si

# --- the loop --------------------------------------------------------------------------------


def train(run: "Run", step: int, best_loss: float):
    """Make updates number step + 1 … max_steps. `step` counts the updates that have been made."""
    cfg, model, monitor, device = run.cfg, run.model, run.monitor, run.device
    parameters = list(model.named_parameters())
    batches = loader(
        run.train_data, cfg, step, run.micro_batch, run.rank, run.world_size, device, run.workers
    )
    accumulation = cfg.batch_size // (run.micro_batch * run.world_size)
    # The gradient of the mean over all tokens of the step; DDP divides by world_size by itself.
    loss_scale = run.world_size / (cfg.batch_size * cfg.seq_len)
    saved_step, first_step = step, step + 1
    gc.disable()  # it would stop one rank at a time, at moments of its own

    while step < cfg.max_steps:
        seed_everything(cfg.seed, step, run.rank)
        lr = set_learning_rate(run.optimizers, learning_rate(step, cfg))
        step_loss = torch.zeros((), device=device)
        for i in range(accumulation):
            monitor.phase("data")
            tokens, targets = next(batches)  # already on the device, or on its way there
            monitor.phase("forward")
            with gradient_sync(run.ddp, last=i == accumulation - 1), run.autocast:
                loss = run.ddp(tokens, targets)[0] * loss_scale
            monitor.phase("backward")
            run.scaler.scale(loss).backward()
            step_loss += loss.detach()
        monitor.phase("optimizer")
        step += 1
        grad_norm = update(run, parameters, step)
        monitor.phase("other")

        if cfg.monitor == "full" and monitor.due(step, cfg.health_interval):
            with run.autocast:
                monitor.log_all(output_health(model, tokens))
        # reads the device, but only every log_interval
        monitor.step(step, lr, step_loss, grad_norm, tokens=cfg.batch_size * cfg.seq_len)
        if run.val_data and due(step, cfg.eval_interval, last=cfg.max_steps):
            val_loss = evaluate(run, step)
            if val_loss < best_loss:
                best_loss, saved_step = val_loss, step
                save_checkpoint(run, step, best_loss, is_best=True)
        if saved_step != step and due(step, cfg.save_interval, last=cfg.max_steps):
            saved_step = step
            save_checkpoint(run, step, best_loss)
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


GC_INTERVAL = 1000  # steps between garbage collections, the same on all ranks


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
        for optimizer in run.optimizers:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale, optimizer.found_inf = divisor, not_finite
                optimizer.step()
            elif not not_finite:
                held = [p.grad for group in optimizer.param_groups for p in group["params"]]
                torch._foreach_div_([g for g in held if g is not None], divisor)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    run.scaler.update()
    return grad_norm if run.cfg.monitor != "off" else None


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
        by_shape = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        super().__init__([dict(params=ps) for ps in by_shape.values()], defaults)

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
    total = torch.zeros(2, device=run.device)  # sum of losses, number of targets
    for tokens, targets in eval_batches(
        data, cfg.eval_steps * cfg.batch_size, run.micro_batch, run.rank, run.world_size, run.device
    ):
        with run.autocast:
            total += torch.stack(run.model(tokens, targets))
    run.model.train()
    if run.world_size > 1:
        dist.all_reduce(total)
    loss_sum, count = total.tolist()
    loss = loss_sum / count
    row = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}
    if data.bytes_per_token:
        row["val/bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
    if run.rank == 0:
        shown = " | ".join(f"{name[len('val/') :]} {value:.4f}" for name, value in row.items())
        print(f"step {step}: validation {shown}", flush=True)
    run.monitor.write(step, row)
    run.monitor.phase(previous)
    return loss


def sample(run: "Run", max_new_tokens: int = 400) -> str:
    """Text that the model writes, from the beginning of a document; the same dice every time."""
    if not all(p.isfinite().all() for p in run.model.parameters()):
        return "(none: the weights are not finite)"
    first = run.train_data.end_of_text
    if first is None:
        first = int((run.val_data or run.train_data).batch(0, 1)[0, 0])
    prompt = torch.tensor([[first]], device=run.device)
    torch.manual_seed(0)
    with run.autocast:
        tokens = generate(run.model, prompt, max_new_tokens, temperature=0.8, top_k=50)
    return decode(run.train_data.tokenizer, tokens[0, 1:].tolist())


# --- checkpoints -----------------------------------------------------------------------------

CHECKPOINT = re.compile(r"step_(\d{8,})\.pt")
FORMAT = 1  # of the checkpoint file; a change that older code cannot read raises it


def save_checkpoint(run: "Run", step: int, best_loss: float, is_best: bool = False):
    """Write checkpoints/step_N.pt, whole or not at all, then best.pt, then drop the oldest.

    Only rank 0 writes: weights and optimizers are the same on all, and nothing else is state.
    """
    if run.rank:
        return
    previous = run.monitor.phase("checkpoint")
    state = dict(
        format=FORMAT,
        step=step,
        best_loss=best_loss,
        model=run.model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        optimizer_names=[held_names(run.model, optimizer) for optimizer in run.optimizers],
        scaler=run.scaler.state_dict(),
        config=dataclasses.asdict(run.cfg),
        data=run.train_data.fingerprint(),
        tokenizer=run.train_data.tokenizer,
        vocab_size=run.train_data.vocab_size,
    )  # fmt: skip
    folder = run.out_dir / "checkpoints"
    path = folder / f"step_{step:08d}.pt"
    with replacing(path) as draft, open(draft, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if is_best:
        with replacing(folder / "best.pt") as draft:
            shutil.copyfile(path, draft)
    for old in list_checkpoints(folder)[: -run.cfg.keep_checkpoints]:
        old.unlink()
    run.monitor.phase(previous)


@contextlib.contextmanager
def replacing(path: Path):
    """A draft to write beside `path`, which takes its place when all went well."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)  # the new name itself must be on the disk
        os.close(directory)
    finally:
        draft.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """The step_N.pt files of a run, oldest first; a link or another name is not one of them."""
    found = [p for p in folder.glob("step_*.pt") if CHECKPOINT.fullmatch(p.name)]
    return sorted((p for p in found if p.is_file() and not p.is_symlink()), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    return int(CHECKPOINT.fullmatch(path.name)[1])


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in; None for a file that was taken elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def held_names(model: nn.Module, optimizer) -> list[str]:
    """Names of the parameters that an optimizer holds, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def load_checkpoint(run: "Run", path: Path) -> tuple[int, float]:
    """Put the state in `path` into model, optimizers and scaler; returns (step, best_loss).

    Raises ConfigError where the file does not belong to this model or data.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format"]
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        raise ConfigError(f"{path}: not a checkpoint that can be read ({type(e).__name__})") from e
    if version != FORMAT:
        raise ConfigError(f"{path}: format {version}; this version reads {FORMAT}")
    mine, theirs = run.train_data.fingerprint(), state["data"]
    if mine != theirs:
        changed = [f"{f[0]} ({f[1]:,} tokens)" for f in mine if f not in theirs] or ["its order"]
        raise ConfigError(f"{path}: the data has changed since: {', '.join(changed)}")
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
    return state["step"], state["best_loss"]


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
    monitor: Monitor | None = None


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
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


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


def find_run(cfg: Config) -> tuple[Path | None, Path | None]:
    """(run directory, checkpoint to start from); None where a new one is to be made.

    Raises ConfigError where a new run would fall into an old one, or --resume names no file.
    """
    if cfg.resume:
        path = Path(cfg.resume)
        if not path.is_file():
            raise ConfigError(f"--resume {path}: no such file")
        return Path(cfg.out_dir) if cfg.out_dir else run_of(path), path
    if cfg.auto_resume:
        newest = max(run_numbers(), key=int, default=None)
        out_dir = Path(cfg.out_dir or Path("runs") / newest) if cfg.out_dir or newest else None
        found = list_checkpoints(out_dir / "checkpoints") if out_dir else []
        return out_dir, found[-1] if found else None
    if cfg.out_dir:
        out_dir = Path(cfg.out_dir)
        if out_dir.exists() and not out_dir.is_dir():
            raise ConfigError(f"--out_dir {out_dir}: is a file; expected a directory")
        held = (out_dir / "config.yaml").exists() or list_checkpoints(out_dir / "checkpoints")
        if held and not cfg.overwrite:
            raise ConfigError(
                f"--out_dir {out_dir}: holds a run already. Continue it with --auto-resume, start "
                f"from one of its checkpoints with --resume, or delete it with --overwrite"
            )
    return Path(cfg.out_dir) if cfg.out_dir else None, None


def prepare_directory(out_dir: Path | None, cfg: Config, step: int) -> Path:
    """Make the run directory, the next runs/NNN where none is named.

    Checkpoints of later steps than the one that the run goes on from are set aside.
    """
    if out_dir is None:
        out_dir = Path("runs") / f"{max(map(int, run_numbers()), default=0) + 1:03d}"
    if cfg.overwrite and out_dir.exists():
        for name in ("config.yaml", "metrics.jsonl"):
            (out_dir / name).unlink(missing_ok=True)
        for name in ("tensorboard", "checkpoints"):
            shutil.rmtree(out_dir / name, ignore_errors=True)
    try:
        (out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out_dir {out_dir}: cannot be made: {e.strerror}") from None
    for newer in list_checkpoints(out_dir / "checkpoints"):
        if checkpoint_step(newer) > step:
            newer.rename(newer.with_suffix(".pt.set-aside"))
    return out_dir


def describe(run: Run, attention: str, compiled: bool) -> str:
    """What runs where, in a few lines."""
    cfg, model = run.cfg, run.model
    count = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else cpu_name()
    accumulation = cfg.batch_size // (run.micro_batch * run.world_size)
    epochs = cfg.max_steps * cfg.batch_size / run.train_data.n_blocks
    sources = ", ".join(d.name for d in run.train_data.datasets)
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[run.dtype]
    return "\n".join((
        f"device  {run.world_size} x {run.device.type} ({name}), {dtype}, {attention} attention, "
        f"compile {'on' if compiled else 'off'}",
        f"model   {cfg.model}: {count / 1e6:.2f} M parameters, {cfg.n_layer} layers of width "
        f"{cfg.d_model}, {cfg.n_head} heads ({cfg.n_kv_head} kv), vocabulary {cfg.vocab_size}",
        f"data    {sources}: {si(run.train_data.n_tokens)} tokens, {epochs:.2f} epochs in "
        f"{cfg.max_steps} steps, {run.workers} loader processes a rank",
        f"step    {si(cfg.batch_size * cfg.seq_len)} tokens = {cfg.batch_size} x {cfg.seq_len}: "
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


def main(argv: list[str]):
    rank, local_rank, world_size, local_world_size = rank_and_world()
    cfg = config.parse(argv)
    out_dir, start = find_run(cfg)
    old_run = start and run_of(start) or out_dir
    if (cfg.resume or cfg.auto_resume) and old_run and (old_run / "config.yaml").exists():
        cfg = config.parse(argv, saved=str(old_run / "config.yaml"))  # flags need no repeating
    cfg = config.resolve(cfg)
    micro_batch = config.micro_batch_size(cfg, world_size)
    device = pick_device(cfg.device, local_rank)
    dtype = pick_dtype(cfg.precision, device)
    set_attention_backend(cfg.attention)
    attention = attention_backend(cfg, device, dtype)
    torch.autograd.set_detect_anomaly(cfg.detect_anomaly)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    train_data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size)
    cfg.vocab_size = train_data.vocab_size
    option = "--val_data" if cfg.val_data else "--data"
    val_data = load_mixture(cfg.val_data or cfg.data, "val", cfg.seq_len, 0, cfg.vocab_size, option)

    torch.manual_seed(cfg.seed)
    model = Transformer(cfg).to(device)
    compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
    if compiled:
        model.compile()  # in place, so that names in checkpoints are those of the module
    run = Run(
        cfg, out_dir, rank, world_size, device, dtype, micro_batch,
        pick_workers(cfg.num_workers, device, local_world_size), train_data, val_data, model,
        distribute(model, device, world_size), make_optimizers(model, cfg, device),
        torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    )  # fmt: skip
    step, best_loss = load_checkpoint(run, start) if start else (0, math.inf)
    if step >= cfg.max_steps:
        if rank == 0:
            print(f"{start} has made all {cfg.max_steps} steps: nothing to do")
        return

    if rank == 0:
        run.out_dir = prepare_directory(out_dir, cfg, step)
        with replacing(run.out_dir / "config.yaml") as draft:
            config.write_yaml(cfg, draft, provenance())
        print(describe(run, attention, compiled), flush=True)
        if start:
            print(f"resume  {start} at step {step}", flush=True)
    run.monitor = make_monitor(run, step)
    try:
        train(run, step, best_loss)
    finally:
        report = run.monitor.close()
    if rank == 0:
        print(report)
        print("sample  of what it writes:\n")
        print(sample(run))
    if world_size > 1:
        dist.destroy_process_group()


def make_monitor(run: Run, step: int) -> Monitor:
    """The monitor of a run that has made `step` steps; only rank 0 writes."""
    cfg = run.cfg

    def gather(values: Tensor) -> Tensor:
        if run.world_size == 1:
            return values[None]
        table = values.new_empty(run.world_size, len(values))
        dist.all_gather(list(table), values)
        return table

    if run.world_size > 1:
        # The gradient of the first parameter is the last to be ready: what the backward pass
        # takes from then on is time that it waits for the gradients of the other ranks.
        def wait(gradient):
            run.monitor.phase("waiting")

        first = next(p for p in run.model.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(wait)
    peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else peak_flops(run.device, run.dtype)
    board = cfg.tensorboard and run.rank == 0
    return Monitor(
        cfg,
        start_step=step,
        flops_per_token=flops_per_token(run.model, cfg),
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
    first = (step - 1) * run.cfg.batch_size + rank * per_rank
    sources = np.unique(run.train_data.order(first, first + per_rank)[0])
    bad, names = [], {module: name for name, module in run.model.named_modules() if name}

    def look(module: nn.Module, inputs, output):
        if isinstance(output, Tensor) and not output.isfinite().all():
            bad.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    run.model.eval()
    for start in range(first, first + per_rank, run.micro_batch):
        batch = run.train_data.batch(start, start + run.micro_batch)
        with run.autocast:
            run.model.forward(*split_targets(batch, run.device))
    run.model.train()
    for hook in hooks:
        hook.remove()
    return dict(
        positions=[first, first + per_rank],
        datasets=[run.train_data.datasets[k].name for k in sources],
        first_bad_layer=bad[0] if bad else None,
    )


def command(argv: list[str]) -> int:
    """Run `main`; returns the exit code, having said in one line what went wrong."""
    try:
        main(argv)
    except ConfigError as e:
        if rank_and_world()[0] == 0 or dist.is_initialized():  # one rank's own trouble is shown
            print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --auto-resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    except Exception as e:
        print(f"train.py: failed: {type(e).__name__}: {e}", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = command(sys.argv[1:])
    if rank_and_world()[1] > 1:
        # A thread of gloo or NCCL that wakes while the interpreter is being taken down aborts the
        # process ("terminate called without an active exception"): leave without taking it down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
