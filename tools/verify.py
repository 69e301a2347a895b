"""Flags of train.py that only look: --check_checkpoints, --verify_resume, --estimate."""

import contextlib
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist

from config import Config
from steady.checkpoints.checkpoint import (
    Checkpoint,
    best_checkpoint,
    checkpoint_at,
    compare,
    list_checkpoints,
)
from steady.options import ConfigError
from steady.ranks.ranks import from_rank0, meet, rank_and_world
from steady.ranks.watchdog import patience

COMPARED = ("step", "position", "tokens", "model", "ema", "optimizers", "scaler", "nonfinite",
            "spikes")


def look(argv: list[str], cfg: Config, train) -> int:
    """Do what one of these flags says; returns the exit code. train: the module train.py."""
    if cfg.check_checkpoints:
        text, valid = check_checkpoints(Path(cfg.check_checkpoints))
        print(text)
        return 0 if valid else 1
    if cfg.verify_resume:
        return verify_resume(argv, cfg, train)
    from tools.estimate import estimate_run

    print(estimate_run(cfg, train.make_optimizers))
    return 0


def check_checkpoints(run_dir: Path) -> tuple[str, bool]:
    """(a line for each checkpoint in a run directory, whether all are valid)."""
    folder = run_dir / "checkpoints" if (run_dir / "checkpoints").is_dir() else run_dir
    if not folder.is_dir():
        raise ConfigError(f"--check_checkpoints {run_dir}: no such directory")
    corrupt = map(Checkpoint, sorted(folder.glob("*.corrupt*")))
    found = [*list_checkpoints(folder), *filter(None, [best_checkpoint(folder)]), *corrupt]
    if Checkpoint(folder).exists():
        found = [Checkpoint(folder)]
    if not found:
        raise ConfigError(f"--check_checkpoints {run_dir}: has no checkpoints; expected a run "
                          "directory, as runs/001")
    lines, all_valid = [], True
    for checkpoint in found:
        wrong = checkpoint.find_damage()
        if not checkpoint.exists() and ".corrupt" not in checkpoint.name:
            continue  # deleted by the run, which goes on
        if wrong:
            all_valid, told = False, f"INVALID: {wrong}"
        else:
            state = checkpoint.state("meta")
            told = f"valid, step {state['step']}, best loss {state['best_loss']:.4f}"
        lines.append(f"{checkpoint.path.name:22s} {told}")
    return "\n".join(lines), all_valid


def verify_resume(argv: list[str], cfg: Config, train) -> int:
    """Train 2 K steps with these flags, then the last K again from step K; compare both ends.

    Returns 0 if every bit is the same, 1 if not. Raises ConfigError if they cannot be compared.
    """
    for name in ("epochs", "max_minutes", "resume", "eval_only"):
        if getattr(cfg, name):
            raise ConfigError(f"--{name}: not with --verify_resume K, which trains 2 K steps of a "
                              "new run")
    k = cfg.verify_resume
    flags = ["--verify_resume=0", f"--max_steps={2 * k}", f"--save_interval={k}",
             f"--warmup_steps={min(cfg.warmup_steps or k, k)}", "--keep_checkpoints=1",
             f"--keep_every={k}", "--deterministic", "--no_tensorboard", "--no_wandb",
             "--no_auto_resume", "--no_overwrite", "--no_json", "--sample_interval=0",
             f"--patience={10**9 if cfg.patience else 0}"]  # ends neither run
    with scratch_folder() as (folder, store):
        for name in ("whole", "resumed"):
            mine = [f"--out_dir={folder / name}"]
            if cfg.backup_to:  # not the run's own
                mine.append(f"--backup_to={folder / name}-backup")
            if name == "resumed":
                start = from_rank0(store, partial(the_checkpoint, folder / "whole", k))
                mine.append(f"--resume={start}")
            if code := train.main([*argv, *flags, *mine]):
                return code
        n, names = from_rank0(store, partial(compare_ends, folder, 2 * k))
        if store:
            dist.barrier()  # it may be in rank 0, which ends now
    if rank_and_world()[0] == 0:
        found = f"{len(names)} of {n} values differ, as {names[0]}" if names else f"{n} values same"
        print(f"verify  steps {k} to {2 * k} resumed: {found}")
    return 1 if names else 0


@contextlib.contextmanager
def scratch_folder():
    """(a temporary folder of all ranks, which rank 0 makes and deletes; their store)."""
    rank, _, world_size, _ = rank_and_world()
    store = meet(rank, world_size, patience(0))
    folder = Path(from_rank0(store, lambda: tempfile.mkdtemp(prefix="steady-verify-")))
    try:
        yield folder, store
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def compare_ends(folder: Path, step: int) -> tuple[int, list[str]]:
    """(number of values, names of those that differ) of both checkpoints of this step."""
    ends = [the_checkpoint(folder / name, step) for name in ("whole", "resumed")]
    return compare(*({name: end.state()[name] for name in COMPARED} for end in ends))


def the_checkpoint(run_dir: Path, step: int) -> Checkpoint:
    if found := checkpoint_at(run_dir / "checkpoints", step):
        return found
    raise ConfigError(f"--verify_resume: there is no checkpoint of step {step}")
