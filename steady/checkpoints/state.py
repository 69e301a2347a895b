"""The state of a run as a checkpoint holds it: saved, restored, compared with this run."""

import dataclasses
import math
import os
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import (
    FORMAT,
    Writer,
    best_checkpoint,
    checkpoint_at,
    find_damage,
    find_odd_contents,
    link_as_best,
    set_aside,
)
from steady.checkpoints.parts import PartWriter, join, load_parts, require_shared, same_parts
from steady.options import ConfigError, fixed_options
from steady.ranks.parallel import release
from steady.ranks.ranks import shared_notes
from steady.tokens.files import split_weight

PROGRESS = ("step", "position", "tokens", "best_loss", "best_step", "evaluated_step", "rollbacks")


def make_writer(run, backup) -> Writer | None:
    """Rank 0's writer of whole checkpoints, or that of this rank's part.

    None on the other ranks, which hold what one of those holds.
    """
    parts = None
    attempt = run.stop.broadcast_from_rank0(os.urandom(4).hex())
    if run.shards.size > 1 and run.shards.first:
        parts = PartWriter(run.rank, run.shards.size, shared_notes("checkpoints"), attempt)
    if run.rank and not parts:
        return None
    return Writer(run.out_dir / "checkpoints", run.cfg.keep_checkpoints, run.cfg.keep_every,
                  backup, (run.best_loss, run.best_step), parts)


def save_checkpoint(run, is_best: bool = False, alone: bool = False):
    """Start writing the checkpoint of this step, unless this state is saved already.

    As the best one, too, if it is. Rank 0 writes a file, since weights and optimizers are the same
    on all ranks; where they are divided, each rank of the first copy writes its part. There is no
    generator state: random numbers are a function of (seed, step, rank). alone: some ranks may be
    gone, so nothing is agreed with them.
    """
    failed = run.writer is not None and run.step in run.writer.failed
    if run.shards.size > 1 and not alone:
        failed = run.stop.broadcast_from_rank0(failed)
    elif run.shards.size > 1 and run.writer:
        failed = not checkpoint_at(run.writer.folder, run.step)
    if run.saved == saved_at(run) and not failed:
        return
    run.saved = saved_at(run)
    if not run.writer:
        return
    previous = run.monitor.phase("checkpoint")
    data = run.train_data
    state = dict(
        format=FORMAT,
        **{name: getattr(run, name) for name in PROGRESS},
        nonfinite=run.nonfinite,
        spikes=run.spikes and run.spikes.window,
        waited=run.waited,
        model=run.tensors,
        whole=[name for name, _ in run.model.named_buffers()],
        optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        optimizer_names=[parameter_names(run, optimizer) for optimizer in run.optimizers],
        scaler=run.scaler.state_dict(),
        config=dataclasses.asdict(run.cfg),
        data=data.fingerprint,
        tokenizer=data.tokenizer, end_of_text=data.end_of_text, vocab_size=data.vocab_size,
        base=getattr(run.model, "base", None),  # of adapters
    )
    run.writer.save(run.step, state, is_best)
    run.monitor.phase(previous)


def saved_at(run) -> tuple:
    """What tells one state of a run from another: a checkpoint is saved if any of it changed."""
    return run.step, run.position, run.evaluated_step, run.best_step


def parameter_names(run, optimizer) -> list[str]:
    """Names of the parameters that an optimizer holds, in its order."""
    names = {id(p): name for name, p in run.parameters.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def load_checkpoint(run, path: Path) -> dict:
    """Restore `run` from a checkpoint that has been verified; returns the options of its save.

    Each rank reads its own rows, from however many parts. Raises ConfigError if the checkpoint does
    not belong to this run.
    """
    require_shared(path)
    try:
        states = load_parts(path, "cpu", mmap=True)  # verified just now, so it is in memory
        version = states[0]["format"]
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        raise ConfigError(f"{path}: not a checkpoint that can be read ({type(e).__name__})") from e
    if version != FORMAT:
        raise ConfigError(f"{path}: format {version}; this version reads {FORMAT}")
    wrong = find_odd_contents(states[0])
    if wrong:
        raise ConfigError(f"{path}: not a checkpoint that can be read: {wrong}")
    refuse_changes(run, path, states[0])
    state = join(states, run.shards.rows, copy=True)
    copy_weights(path, state["model"], run.tensors)
    release(run.model)
    counts = len(run.optimizers), len(state["optimizers"]), len(state["optimizer_names"])
    if len(set(counts)) > 1:
        raise ConfigError(f"{path}: it holds {counts[1]} optimizers; expected {counts[0]}: "
                          "resume with the --optimizer of that run")
    for optimizer, saved, names in zip(
        run.optimizers, state["optimizers"], state["optimizer_names"], strict=True
    ):
        if parameter_names(run, optimizer) != names:
            raise ConfigError(f"{path}: its optimizer holds other parameters, or in another order")
        # Learning rate, decay and betas are those of this run's flags, not the saved ones.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved | {"param_groups": groups})
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    for name in PROGRESS:
        setattr(run, name, state[name])
    run.waited = state.get("waited", 0)  # older ones have none
    run.nonfinite = torch.as_tensor(state["nonfinite"]).to(run.device)
    if run.spikes:
        run.spikes.restore(state.get("spikes"))
    run.saved = saved_at(run)
    cfg, saved = run.cfg, state["config"]
    if cfg.epochs and not run.rollbacks:  # the batch size may have been another one
        left = cfg.epochs * run.train_data.n_samples - run.position
        cfg.max_steps = run.step + max(0, -(-left // cfg.batch_size))
    grouped = run.train_data.order.group and any(
        saved.get(name) != getattr(cfg, name) for name in ("batch_size", "group_window"))
    if grouped and run.position and not run.rank and not cfg.eval_only:
        print("warning: --batch_size or --group_window has changed, so some documents of this "
              "window come twice or not at all", flush=True)
    return saved


def copy_weights(path: Path, saved: dict, tensors: dict):
    """Copy a state dict into the tensors of a model. Raises ConfigError where they differ."""
    odd = sorted(saved.keys() ^ tensors.keys())
    odd += [name for name in saved.keys() & tensors.keys()
            if saved[name].shape != tensors[name].shape]
    if odd:
        raise ConfigError(f"{path}: not a checkpoint of this model: {len(odd)} tensors are "
                          f"missing, not expected or of another shape, as {odd[0]}")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def reconcile_best(run) -> tuple[float, int]:
    """Make best.pt agree with the restored run; returns (loss, step) of what it then holds.

    best.pt is older if a save failed or the process was killed before replacing it, and newer if
    the run continues from an earlier checkpoint.
    """
    folder = run.out_dir / "checkpoints"
    best, wanted = best_checkpoint(folder), checkpoint_at(folder, run.best_step)
    found = read_best(best, run.resumed_from)
    if found == (run.best_loss, run.best_step):
        return found
    if run.best_step and read_best(wanted, run.resumed_from) == (run.best_loss, run.best_step):
        link_as_best(wanted)
        return run.best_loss, run.best_step
    if found and 0 < found[1] <= run.step:
        print(f"warning: the weights of the best validation loss, {run.best_loss:.4f} at step "
              f"{run.best_step}, were lost; {best} is of step {found[1]}", flush=True)
        return found
    if best:
        set_aside(best)
    return math.inf, 0


def read_best(path: Path | None, verified: Path | None) -> tuple[float, int] | None:
    """(validation loss, step) of a checkpoint that was the best when it was saved; else None.

    verified: another one, which is not read again where both are links to the same files.
    """
    if path is None or not (verified and same_parts(path, verified)) and find_damage(path):
        return None
    state = load_parts(path, "meta")[0]
    is_best = state.get("best_step") == state.get("step")
    return (state["best_loss"], state["step"]) if is_best else None


def refuse_changes(run, path: Path, state: dict):
    """Raise ConfigError if model, data or an option that fixes the trajectory has changed."""
    cfg, saved, data = run.cfg, state["config"], run.train_data
    weights = fixed_options(cfg, "weights")
    compared = weights + fixed_options(cfg, "function")
    if not cfg.eval_only:
        compared += fixed_options(cfg, "trajectory")
    changed = {name: f"{saved[name]} -> {getattr(cfg, name)}" for name in compared
               if name in saved and saved[name] != getattr(cfg, name)}
    if state.get("tokenizer") != data.tokenizer:
        changed["tokenizer"] = f"{state.get('tokenizer')} -> {data.tokenizer}"
    if not cfg.eval_only:
        if weights_of(saved["data"]) != weights_of(cfg.data):
            changed["data"] = f"{' '.join(saved['data'])} -> {' '.join(cfg.data)}"
        if not same_files(data.fingerprint, state["data"]):
            new = [f"{file[0]} ({file[1]:,} tokens)" for file in data.fingerprint
                   if not any(same_files([file], [old]) for old in state["data"])]
            changed["data"] = f"has changed: {', '.join(new) or 'its order'}"
    refused = [name for name in changed if name in weights or name not in cfg.allow_change]
    if refused:
        differences = ", ".join(f"{name} {changed[name]}" for name in refused)
        advice = f"To continue nevertheless: --allow_change {' '.join(refused)}"
        if set(refused) & set(weights):
            advice = "Its weights fit no other model; leave those flags out, or start a new run"
        raise ConfigError(f"{path}: this run differs from it: {differences}. {advice}")
    if state.get("base") != getattr(run.model, "base", None):
        raise ConfigError(f"{path}: adapts other weights than --init_from {cfg.init_from} now has")


def same_files(files: list, saved: list) -> bool:
    """Whether fingerprints agree in name, tokens, checksum, and a content sample of one length."""
    def same(a: list, b: list) -> bool:
        n = 4 if len(a) == len(b) == 4 and len(a[3]) == len(b[3]) else 3
        return list(a[:n]) == list(b[:n])
    return len(files) == len(saved) and all(map(same, files, saved))


def weights_of(specs: list[str]) -> list:
    """The mixture weights of PATH[:WEIGHT] sources."""
    return [split_weight(spec)[1] for spec in specs]
