"""Flags of train.py that only inspect: --check_checkpoints, --verify_resume, --estimate.

The second trains twice in a temporary folder and compares the final checkpoints bit for bit.
"""

import tempfile
from pathlib import Path

import torch.distributed as dist

from config import Config
from steady.checkpoints import checkpoint as checkpoints
from steady.options import ConfigError, reading_paths
from steady.ranks.ranks import from_rank0, rank_and_world
from tools.estimate import estimate_run

COMPARED = ("step", "position", "tokens", "model", "ema", "optimizers", "scaler", "nonfinite",
            "spikes")


def inspect(argv: list[str], cfg: Config, train, make_optimizers) -> int:
    """Returns the exit code. train: `main` of train.py."""
    if cfg.check_checkpoints:
        return check_checkpoints(Path(cfg.check_checkpoints))
    if cfg.verify_resume:
        return verify_resume(argv, cfg, train)
    print(estimate_run(cfg, make_optimizers))
    return 0


@reading_paths()
def check_checkpoints(run_dir: Path) -> int:
    """Print a line for each checkpoint; returns 1 if any is damaged."""
    folder, code = run_dir / "checkpoints", 0
    aside = map(checkpoints.Checkpoint, sorted(folder.glob("*.set-aside*")))
    found = [*checkpoints.list_checkpoints(folder), checkpoints.best_checkpoint(folder), *aside]
    if not any(found):
        wrong = "has no checkpoints" if run_dir.is_dir() else "no such directory"
        raise ConfigError(f"--check_checkpoints {run_dir}: {wrong}; expected a run, as runs/001")
    for checkpoint in filter(None, found):
        damage = checkpoint.find_damage()
        if damage and checkpoint.path.exists():  # else just deleted by the run
            print(f"{checkpoint.path.name:22s} INVALID: {damage}")
            code = 1
        elif not damage:
            state = checkpoint.states()[0]
            print(f"{checkpoint.path.name:22s} valid, step {state['step']}, best loss "
                  f"{state['best_loss']:.4f}")
    return code


def verify_resume(argv: list[str], cfg: Config, train) -> int:
    """Train 2 K steps, then the last K again; returns 0 if every bit of the ends is the same."""
    for name in ("epochs", "max_minutes", "resume", "eval_only", "backup_to"):
        if getattr(cfg, name):
            raise ConfigError(f"--{name}: not with --verify_resume, which trains a new run")
    k = cfg.verify_resume
    flags = [*argv, "--verify_resume=0", f"--max_steps={2 * k}", f"--save_interval={k}",
             f"--warmup_steps={min(cfg.warmup_steps or k, k)}", f"--keep_checkpoints={2 * k}",
             "--deterministic", "--no_tensorboard", "--tracker=none", "--no_auto_resume",
             "--no_overwrite", "--no_json", "--sample_interval=0",
             f"--patience={10**9 if cfg.patience else 0}"]  # ends neither run

    def saved(run_dir: Path, step: int) -> checkpoints.Checkpoint:
        if checkpoint := checkpoints.checkpoint_at(run_dir / "checkpoints", step):
            return checkpoint
        raise ConfigError(f"--verify_resume: there is no checkpoint of step {step}")

    def end(run_dir: Path) -> dict:
        return {name: x for name, x in saved(run_dir, 2 * k).state().items() if name in COMPARED}

    # only the names on rank 0 count: the folders of other ranks stay empty
    with tempfile.TemporaryDirectory(prefix="steady-verify-", ignore_cleanup_errors=True) as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        if code := train([*flags, f"--out_dir={whole}"]):
            return code
        middle = from_rank0(lambda: saved(whole, k))
        if code := train([*flags, f"--out_dir={resumed}", f"--resume={middle}"]):
            return code
        n, differing = from_rank0(lambda: checkpoints.compare(*map(end, (whole, resumed))))
    if rank_and_world()[0] == 0:
        result = f"{len(differing)} of {n} values differ, as {differing[0]}" if differing else (
            f"all {n} values same")
        print(f"verify  steps {k} to {2 * k} resumed: {result}", flush=True)
    if dist.is_initialized():
        dist.barrier()  # with code 1, the first rank to leave ends the others
    return int(bool(differing))
