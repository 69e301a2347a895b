"""Flags of train.py that only look: --check_checkpoints, --verify_resume, --audit, --estimate."""

from pathlib import Path

from config import Config
from steady.checkpoints.checkpoint import Checkpoint, best_checkpoint, list_checkpoints
from steady.options import ConfigError
from tools.audit import audit, scratch_folder


def look(argv: list[str], cfg: Config, train) -> int:
    """Do what one of these flags says; returns the exit code. train: the module train.py."""
    if cfg.check_checkpoints:
        text, valid = check_checkpoints(Path(cfg.check_checkpoints))
        print(text)
        return 0 if valid else 1
    if cfg.verify_resume:
        return verify_resume(argv, cfg, train)
    if cfg.audit:
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
    """Train 2 K steps with these flags, in a temporary directory, and audit the second half."""
    for name in ("epochs", "max_minutes", "resume"):
        if getattr(cfg, name):
            raise ConfigError(f"--{name}: not with --verify_resume K, which trains 2 K steps of a "
                              "new run")
    k, patience = cfg.verify_resume, 10**9 if cfg.patience else 0  # which ends no part of it
    flags = ["--verify_resume=0", f"--max_steps={2 * k}", f"--save_interval={k}",
             f"--warmup_steps={min(cfg.warmup_steps or k, k)}", "--keep_checkpoints=1",
             f"--keep_every={k}", f"--patience={patience}", "--deterministic", "--no_tensorboard",
             "--no_wandb", "--no_auto_resume", "--no_overwrite"]
    with scratch_folder("verify") as folder:
        if cfg.backup_to:  # not the run's own
            flags.append(f"--backup_to={folder / 'backup'}")
        code = train.main([*argv, *flags, f"--out_dir={folder / 'run'}"])
        return code or audit(folder / "run", 1, train)
