"""Flags of train.py that only look: --check_checkpoints, --verify_resume, --audit, --estimate."""

import os
import shutil
import tempfile
from pathlib import Path

from config import Config
from steady.checkpoints.checkpoint import (
    Checkpoint,
    best_checkpoint,
    checkpoint_at,
    compare,
    list_checkpoints,
)
from steady.options import ConfigError
from steady.ranks.ranks import rank_and_world


def look(argv: list[str], cfg: Config, train) -> int:
    """Do what one of these flags says; returns the exit code. train: the module train.py."""
    if cfg.check_checkpoints:
        text, valid = check_checkpoints(Path(cfg.check_checkpoints))
        print(text)
        return 0 if valid else 1
    if cfg.verify_resume:
        return verify_resume(argv, cfg, train.main)
    if cfg.audit:
        from tools.audit import audit

        return audit(Path(cfg.audit), cfg.segments, train)
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
        if wrong := checkpoint.find_damage():
            all_valid, told = False, f"INVALID: {wrong}"
        else:
            state = checkpoint.state("meta")
            told = f"valid, step {state['step']}, best loss {state['best_loss']:.4f}"
        lines.append(f"{checkpoint.path.name:22s} {told}")
    return "\n".join(lines), all_valid


COMPARED = ("model", "ema", "optimizers", "scaler", "step", "position", "tokens", "best_loss",
            "spikes")


def verify_resume(argv: list[str], cfg: Config, train) -> int:
    """Train 2 K steps, then K again from the checkpoint of step K; 0 if both end the same.

    Both are real runs of this program with these flags, in a temporary directory.
    """
    for name in ("epochs", "max_minutes"):
        if getattr(cfg, name):
            raise ConfigError(f"--{name}: not with --verify_resume K, which trains 2 K steps")
    if cfg.resume:
        raise ConfigError("--resume: not with --verify_resume K, which starts afresh")
    k, rank = cfg.verify_resume, rank_and_world()[0]
    # the parent's id: under torchrun the same on all ranks of a machine
    folder = Path(tempfile.gettempdir()) / f"steady-verify-{os.getuid()}-{os.getppid()}"
    flags = ["--verify_resume=0", f"--max_steps={2 * k}", f"--save_interval={k}",
             f"--warmup_steps={min(cfg.warmup_steps or k, k)}", "--keep_checkpoints=2",
             "--patience=0", "--deterministic", "--no_tensorboard", "--no_wandb",
             "--no_auto_resume", "--no_overwrite"]
    flags += [f"--backup_to={folder / 'backup'}"] if cfg.backup_to else []  # not the run's own
    straight, resumed = folder / "straight", folder / "resumed"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        code = train([*argv, *flags, f"--out_dir={straight}"])
        if code:
            return code
        middle = checkpoint_at(straight / "checkpoints", k)
        code = train([*argv, *flags, f"--out_dir={resumed}", f"--resume={middle}"])
        if code or rank:
            return code
        one, two = (checkpoint_at(run / "checkpoints", 2 * k).state()
                    for run in (straight, resumed))
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    count, different = compare({n: one[n] for n in COMPARED}, {n: two[n] for n in COMPARED})
    if different:
        print(f"verify_resume: differs after {k} + {k} steps: {different[0]} and "
              f"{len(different) - 1} others of {count}")
        return 1
    print(f"verify_resume: identical, {count} values and tensors after {k} + {k} steps")
    return 0
