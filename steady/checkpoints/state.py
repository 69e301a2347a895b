"""The state of a run in a checkpoint: saved, restored, compared with this run."""

import contextlib
import dataclasses
import math
from pathlib import Path

import torch

from steady.checkpoints import checkpoint as checkpoints
from steady.checkpoints.checkpoint import Checkpoint
from steady.models import lora
from steady.options import UNKNOWN, ConfigError, fixed_options
from steady.ranks.parallel import release
from steady.tokens.files import split_weight, tokenizer_hash

# Options of a parameter group that come from flags and the device. All others are state of the
# optimizer, such as the step size that Prodigy estimates, and are restored.
OF_THIS_RUN = {"params", "lr_scale", "weight_decay", "betas", "momentum", "eps",
               "foreach", "fused", "capturable"}


@dataclasses.dataclass
class Progress:
    """How far a run has come: the counts and losses that a checkpoint stores."""

    step: int = 0  # updates made
    position: int = 0  # the next update begins with this sample
    tokens: int = 0  # trained on, without padding
    best_loss: float = math.inf  # lowest validation loss, at best_step
    best_step: int = 0
    evaluated_step: int = 0  # step of the newest evaluation
    waited: int = 0  # evaluations since the best one
    evaluated: dict = dataclasses.field(default_factory=dict)  # data and options of best_loss
    max_steps: int = UNKNOWN  # if set by --max_minutes
    rollbacks: list[int] = dataclasses.field(default_factory=list)  # steps gone back to


def save_checkpoint(run, is_best: bool = False, alone: bool = False):
    """Start writing the checkpoint of this step, unless this state is saved already.

    It has no generator states: random numbers are a function of (seed, step, rank). The tensors are
    the run's own: they do not change before the next update, and on CUDA they are copied by then.
    alone: other ranks may be gone, and work given to the device since the update may never end.
    """
    progress, writer, data = run.progress, run.dir.writer, run.train_data
    if not writer or run.dir.saved == progress:
        return
    state = dict(
        format=checkpoints.FORMAT, **dataclasses.asdict(progress),
        nonfinite=run.guard.nonfinite, spikes=run.guard.spikes and run.guard.spikes.window,
        model=lora.kept(run.ranks.shards.tensors_of(run.model), run.cfg.lora_rank),
        whole=[name for name, _ in run.model.named_buffers(remove_duplicate=False)],
        optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        optimizer_names=[parameter_names(run, optimizer) for optimizer in run.optimizers],
        optimizer_classes=[type(optimizer).__name__ for optimizer in run.optimizers],
        ema=run.ema.tensors if run.ema else {}, scaler=run.ranks.scaler.state_dict(),
        config=dataclasses.asdict(run.cfg), data=data.fingerprint, stages=data.order.plan[1:],
        tokenizer=data.tokenizer, end_of_text=data.end_of_text, vocab_size=data.vocab_size,
        base=getattr(run.model, "lora_base", None))  # of adapters: their base's hash
    writer.save(progress.step, state, is_best, run.guard.updated if alone else None, alone)
    run.dir.saved = dataclasses.replace(progress)  # not if `save` raised, say as a rank was lost


def parameter_names(run, optimizer) -> list[str]:
    """Names of an optimizer's parameters, in its order."""
    names = {id(p): name for name, p in run.ranks.shards.parameters.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def load_checkpoint(run, checkpoint: Checkpoint):
    """Restore `run` from a verified checkpoint. Raises ConfigError if it is another run's."""
    checkpoints.require_shared(checkpoint.path)
    states = checkpoint.states()  # verified just now, so it is in memory
    refuse_changes(run, checkpoint, states[0])
    shards, guard, lora_rank = run.ranks.shards, run.guard, run.cfg.lora_rank
    first, moved = states[0], len(states) != shards.size
    parts, rows = (states, shards.rows) if moved else ([states[shards.rank]], slice)
    state = checkpoints.join(parts, rows, copy=True)
    # buffers and progress are rank 0's: other parts' may differ after an error, or a torn upload
    state["model"] |= {k: x for k, x in first["model"].items() if k in first.get("whole", ())}
    copy_weights(checkpoint, state["model"], lora.kept(shards.tensors_of(run.model), lora_rank))
    if run.ema:  # starts from the weights if the checkpoint has no averages
        averages = {name: state["model"][name] for name in run.ema.tensors}
        copy_weights(checkpoint, state.get("ema") or averages, run.ema.tensors)
    release(run.model)
    restore_optimizers(run, checkpoint, state, moved)
    restore_progress(run, first)
    guard.nonfinite.copy_(first["nonfinite"])
    if guard.spikes and first["spikes"] is not None:
        guard.spikes.window.copy_(first["spikes"])
    run.ranks.minimum(1)  # a barrier: the next save may replace the file, which is still mapped
    guard.agreed = run.progress.step
    run.dir.saved = dataclasses.replace(run.progress)


def restore_optimizers(run, checkpoint: Checkpoint, state: dict, moved: bool):
    """Give each parameter, by name, its optimizer state. Raises ConfigError."""
    held = [parameter_names(run, optimizer) for optimizer in run.optimizers]
    if [set(names) for names in held] != [set(names) for names in state["optimizer_names"]]:
        raise ConfigError(f"{checkpoint}: its optimizers hold other parameters; resume with the "
                          "--optimizer of that run")
    pairs = zip(state["optimizers"], state["optimizer_names"], strict=True)
    for optimizer, mine, (saved, names) in zip(run.optimizers, held, pairs, strict=True):
        states = {i if isinstance(i, str) else mine.index(names[i]): each  # strings: its own keys
                  for i, each in saved["state"].items()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, name in enumerate(mine):  # unless moved, each rank reads its own file
            leaves = {}
            checkpoints.tree_map(leaves.__setitem__, states.get(i, {}))
            for key, x in leaves.items():
                if moved and isinstance(x, torch.Tensor) and x.ndim and len(x) != len(params[i]):
                    raise ConfigError(f"{checkpoint}: {type(optimizer).__name__}'s {key} of {name} "
                                      "cannot be resharded by rows; resume with as many ranks")
        groups = optimizer.state_dict()["param_groups"]
        if len(groups) == len(saved["param_groups"]):
            for group, before in zip(groups, saved["param_groups"], strict=True):
                group.update((k, before[k]) for k in before.keys() - OF_THIS_RUN)
        optimizer.load_state_dict(saved | {"state": states, "param_groups": groups})
        for i, p in enumerate(params):
            optimizer.state[p] |= checkpoints.tree_map(  # as saved: torch has cast it to p's dtype
                lambda _, x, cast: x.to(cast.device) if isinstance(x, torch.Tensor) else x,
                states.get(i, {}), optimizer.state[p])
    if state["scaler"] and run.ranks.scaler.is_enabled():
        run.ranks.scaler.load_state_dict(state["scaler"])


def restore_progress(run, state: dict):
    """Continue the counts of the checkpoint; options may decide max_steps anew."""
    cfg, progress = run.cfg, run.progress
    before = dataclasses.replace(progress)  # as set up, or before a rollback
    vars(progress).update((name, state[name]) for name in vars(before).keys() & state.keys())
    changed = [name for name, x in before.evaluated.items() if progress.evaluated.get(name) != x]
    if changed:  # older losses cannot be compared with new ones
        if progress.best_step and before.step == 0 and run.ranks.rank == 0:
            print(f"resume  {', '.join(changed)} changed since step {progress.step}: the best "
                  "validation loss and --patience begin anew", flush=True)
        progress.best_loss, progress.best_step, progress.waited = math.inf, 0, 0
        progress.evaluated = before.evaluated
    if run.train_data.row_lengths_vary and cfg.batch_size != state["config"]["batch_size"]:
        progress.position += -progress.position % cfg.batch_size  # between two groups
    if cfg.epochs and not progress.rollbacks:  # the batch size may have changed
        left = cfg.epochs * run.train_data.n_samples - progress.position
        cfg.max_steps = progress.step + max(0, -(-left // cfg.batch_size))
    same = cfg.max_minutes == state["config"].get("max_minutes")
    progress.max_steps = min(before.max_steps, progress.max_steps if same else UNKNOWN)
    cfg.max_steps = min(cfg.max_steps, progress.max_steps)


def copy_weights(checkpoint: Checkpoint, saved: dict, tensors: dict):
    """Copy a state dict into the tensors of a model of the same shape. Raises ConfigError."""
    shapes = [{(name, t.shape) for name, t in each.items()} for each in (saved, tensors)]
    if odd := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
        raise ConfigError(f"{checkpoint}: not a checkpoint of this model: {len(odd)} tensors are "
                          f"missing, unexpected or of another shape, such as {odd[0]}")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def reconcile_best(progress: Progress, run_dir) -> tuple[float, int]:
    """Make best.pt agree with the restored run; returns the (loss, step) now in it.

    best.pt is older if a save failed or the process was killed before replacing it, and newer if
    the run continues from an earlier checkpoint.
    """
    folder, expected = run_dir.path / "checkpoints", (progress.best_loss, progress.best_step)
    best = checkpoints.best_checkpoint(folder)
    wanted = checkpoints.checkpoint_at(folder, progress.best_step)
    found = read_best(best)
    if found == expected:
        return expected
    if read_best(wanted) == expected:
        wanted.link_as_best()
        return expected
    usable = found and 0 < progress.best_step and found[1] <= progress.step
    if progress.best_step:  # the disk was full, for example
        now = f"{best} is of step {found[1]}" if usable else "the best and --patience begin anew"
        print(f"warning: {folder}: no best.pt of step {progress.best_step}; {now}", flush=True)
    if best and not usable:
        best.set_aside()
    return found if usable else (math.inf, 0)


def read_best(best: Checkpoint | None) -> tuple | None:
    """(validation loss, step) of a checkpoint that was the best when it was saved; else None."""
    with contextlib.suppress(Exception):  # not verified: readers of its weights do that
        first, *others = best.states() if best else []
        if all(0 < each["best_step"] == each["step"] == first["step"] for each in (first, *others)):
            return first["best_loss"], first["step"]
    return None


def refuse_changes(run, checkpoint: Checkpoint, state: dict):
    """Raise ConfigError if model, data or an option that fixes the trajectory has changed."""
    cfg, data = run.cfg, run.train_data
    saved = vars(type(cfg)()) | state["config"]  # options added since then had their defaults
    weights = fixed_options(cfg, "weights")
    compared = weights + fixed_options(cfg, "function")
    compared += [] if cfg.eval_only else fixed_options(cfg, "trajectory")
    changed = {name: f"{saved[name]} -> {getattr(cfg, name)}" for name in compared
               if saved[name] != getattr(cfg, name)}
    if len({Path(name).name for name in (saved["init_from"], cfg.init_from) if name}) < 2:
        changed.pop("init_from", None)  # it may have moved, or is not needed any more
    if tokenizer_hash(state.get("tokenizer")) != tokenizer_hash(data.tokenizer):
        changed["tokenizer"] = f"{state.get('tokenizer')} -> {data.tokenizer}"
    if not cfg.eval_only:
        if [split_weight(s)[1] for s in saved["data"]] != [split_weight(s)[1] for s in cfg.data]:
            changed["data"] = f"{' '.join(saved['data'])} -> {' '.join(cfg.data)}"
        if state.get("stages", []) != data.order.plan[1:]:
            changed["stage"] = " -> ".join(f"{' '.join(of.get('stage') or ['none'])} of "
                                           f"{of['max_steps']} steps" for of in (saved, vars(cfg)))
        files, old = ([list(file) for file in each] for each in (data.fingerprint, state["data"]))
        if files != old:
            new = [f"{file[0]} ({file[1]:,} tokens)" for file in files if file not in old]
            changed["data"] = f"has changed: {', '.join(new) or 'its order'}"
        classes = [type(optimizer).__name__ for optimizer in run.optimizers]
        if len(before := state.get("optimizer_classes", [])) == len(classes) and before != classes:
            changed["optimizer"] = f"{' '.join(before)} -> {' '.join(classes)}"
    refused = [name for name in changed if name in weights or name not in cfg.allow_change]
    if refused:
        differences = ", ".join(f"{name} {changed[name]}" for name in refused)
        advice = f"To continue nevertheless: --allow_change {' '.join(refused)}"
        if set(refused) & set(weights):
            advice = "Its weights fit no other model; use the options of its config.yaml (--config)"
        raise ConfigError(f"{checkpoint}: this run differs from it: {differences}. {advice}")
    if state.get("base") != getattr(run.model, "lora_base", None):
        raise ConfigError(f"{checkpoint}: adapts other weights than --init_from {cfg.init_from} "
                          "now has")
