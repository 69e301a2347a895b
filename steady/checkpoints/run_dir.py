"""Run directories: choosing one, its only writer, its files.

    out_dir/config.yaml, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/, lock
"""

import contextlib
import dataclasses
import os
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from steady.checkpoints import opening
from steady.checkpoints.backup import Backup, download, id_in
from steady.checkpoints.checkpoint import (
    BEST,
    NAME,
    Checkpoint,
    adopt_drafts,
    best_checkpoint,
    checkpoint_at,
    find_checkpoint,
    latest_valid,
    list_checkpoints,
    require_shared,
    rotate,
    unused_name,
)
from steady.checkpoints.disk import acquire_lock, atomic_write
from steady.checkpoints.state import reconcile_best
from steady.checkpoints.writer import Writer
from steady.options import ConfigError, expect_file, reading_paths, write_yaml
from steady.ranks.ranks import from_environment
from steady.tokens.tokenizers import copy_tokenizer
from steady.watch.report import report

CLOUD_FOLDERS = ("/openbayes/home/tf_dir", "/root/tf-logs")  # displayed by OpenBayes and AutoDL
# A run writes to these, so none of them may be a link to another place.
OF_A_RUN = ("lock", "config.yaml", "metrics.jsonl", "tokenizer", "stacks", "traces", "checkpoints")


@dataclass
class RunDir:
    """The directory of a run, and its writer."""

    path: Path | None  # None for a new run, until its directory is made
    resumed_from: Checkpoint | None = None
    lock: object = None  # keeps other processes out until it is closed; of rank 0
    backup: Backup | None = None  # of rank 0
    writer: Writer | None = None  # of checkpoints; on rank 0, or on all ranks of the first copy
    saved: tuple = ()  # `Progress.state` of the newest checkpoint


# --- choosing one ----------------------------------------------------------------------------


def numbered_folders() -> list[Path]:
    """The folders runs/001, runs/002, …, in the order of their numbers."""
    found = (path for path in Path("runs").glob("*") if re.fullmatch("[0-9]+", path.name))
    return sorted(found, key=lambda path: int(path.name))


def find_run(cfg) -> Path | None:
    """The run directory; None if a new one is to be made. Changes nothing.

    Raises ConfigError if a new run would overwrite an existing one, if the directory is not
    writable, or if --resume names no checkpoint.
    """
    out_dir, same_run = Path(cfg.out_dir) if cfg.out_dir else None, cfg.auto_resume
    if cfg.resume:
        source = Checkpoint(Path(cfg.resume))
        if not source.exists():
            raise ConfigError(f"--resume {source}: no such file, nor a finished checkpoint. To "
                              f"continue a run: --auto_resume --out_dir {source}")
        out_dir = out_dir or source.run_dir
        same_run = source.run_dir and out_dir.resolve() == source.run_dir.resolve()
    elif cfg.auto_resume and not out_dir:
        out_dir = next(filter(holds_a_run, reversed(numbered_folders())), None)
    if cfg.eval_only:
        return out_dir  # only reads
    place = Path(os.path.realpath(out_dir or "runs"))
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(f"--out_dir {out_dir or 'runs/'}: {place.absolute()} is not a directory "
                          "that is writable")
    if out_dir and holds_a_run(out_dir) and not (same_run or cfg.overwrite):
        raise ConfigError(f"--out_dir {out_dir}: holds a run already. Continue it with "
                          "--auto_resume, start from one of its checkpoints with --resume, or "
                          "move it to OUT_DIR.old with --overwrite")
    if out_dir:
        refuse_links(out_dir)
    return out_dir


def refuse_links(out_dir: Path):
    """Raise ConfigError if a link in out_dir would lead a run to write beyond its lock."""
    paths = [out_dir / name for name in OF_A_RUN]
    paths += [path for path in (out_dir / "checkpoints").glob("*")
              if NAME.fullmatch(path.name) or path.name in BEST]
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link; expected it in the run directory itself. To "
                              "use another disk, put --out_dir there")
        if not path.is_dir():
            expect_file(path)


def holds_a_run(out_dir: Path) -> bool:
    names = "config.yaml", "metrics.jsonl", *(f"checkpoints/{name}" for name in BEST)
    found = any((out_dir / name).exists() for name in names)
    return found or bool(list_checkpoints(out_dir / "checkpoints"))


def continues(cfg, out_dir: Path | None) -> bool:
    """Whether the run continues from a checkpoint, if there is a valid one."""
    return bool(cfg.resume or cfg.auto_resume and out_dir and holds_a_run(out_dir))


def redirect(cfg) -> dict:
    """Options in place of those given: to continue a run downloaded from --resume URL.

    Raises ConfigError in a restart by torchrun that would begin anew.
    """
    if from_environment("TORCHELASTIC_RESTART_COUNT", 0) and not (cfg.auto_resume and cfg.out_dir):
        raise ConfigError("torchrun has restarted this run; a restart continues it only with "
                          "--auto_resume --out_dir DIR")
    if "://" not in (cfg.resume or ""):
        return {}
    new = dict(resume=None, auto_resume=False, overwrite=False, eval_only=False)
    out_dir, lock = claim(find_run(dataclasses.replace(cfg, **new)))
    with lock:
        download(cfg.resume, out_dir)
    return dict(resume=None, auto_resume=True, out_dir=str(out_dir))


def saved_config(cfg, out_dir: Path | None) -> Path | None:
    """The config.yaml of the run to continue, if there is one."""
    run = cfg.resume and Checkpoint(Path(cfg.resume)).run_dir or out_dir
    found = run and (cfg.resume or cfg.auto_resume) and (run / "config.yaml").exists()
    return run / "config.yaml" if found else None


@reading_paths()
def pick_checkpoint(cfg, out_dir: Path | None) -> RunDir:
    """The run directory, with the verified checkpoint to start from, if any; for rank 0.

    Locks the directory before it sets damaged checkpoints aside. Raises ConfigError.
    """
    found, folder = RunDir(out_dir), out_dir and out_dir / "checkpoints"
    if cfg.backup_to and not cfg.eval_only:
        goes_on = cfg.resume or cfg.auto_resume and out_dir and list_checkpoints(folder)
        found.backup = Backup(cfg.backup_to, out_dir, run_id(out_dir) if goes_on else None)
    if cfg.resume:
        found.resumed_from = find_checkpoint(Path(cfg.resume))
    elif cfg.auto_resume and out_dir:
        if not cfg.eval_only:
            found.path, found.lock = claim(out_dir)
        found.resumed_from = latest_valid(folder, ours=not cfg.eval_only)
    return found


def run_id(run_dir: Path | None) -> str | None:
    """The id in its config.yaml; None without one."""
    config = run_dir and run_dir / "config.yaml"
    return id_in(config.read_bytes()) if config and config.is_file() else None


# --- its only writer -------------------------------------------------------------------------


def claim(out_dir: Path | None):
    """Make the run directory, or the next runs/NNN for None; returns it and its lock."""
    while out_dir is None:
        newest = next(reversed(numbered_folders()), Path("0"))
        new = Path("runs") / f"{int(newest.name) + 1:03d}"
        with contextlib.suppress(FileExistsError):  # another run was quicker
            os.makedirs(os.path.realpath(new))  # also through a dangling link
            out_dir = new
    try:
        os.makedirs(os.path.realpath(out_dir), exist_ok=True)
        lock = acquire_lock(out_dir)
        (out_dir / "checkpoints").mkdir(exist_ok=True)
        adopt_drafts(out_dir / "checkpoints")
        return out_dir, lock
    except OSError as e:  # a full disk, among others
        raise ConfigError(f"--out_dir {out_dir}: cannot be written: {e.strerror}") from None


def create_run_dir(cfg, out_dir: Path | None):
    """As `claim`, for a new run; with --overwrite, moves an old one to OUT_DIR.old.

    Raises ConfigError if another run has begun there since `find_run`.
    """
    out_dir, lock = claim(out_dir)
    find_run(dataclasses.replace(cfg, out_dir=str(out_dir)))
    if not (cfg.overwrite and holds_a_run(out_dir)):
        return out_dir, lock
    with lock:
        place = out_dir.resolve()
        old = unused_name(place.with_name(f"{place.name}.old"))
        place.rename(old)
    print(f"warning: the run that was in {out_dir} is now in {old}", flush=True)
    return claim(out_dir)


# --- its files -------------------------------------------------------------------------------


@reading_paths()
def open_run_dir(run):
    """Rank 0 makes and locks the run directory, and prints a summary of the run.

    Each rank whose state no rank before it has gets a writer.
    """
    cfg, progress, ranks, shards = run.cfg, run.progress, run.ranks, run.ranks.shards
    number = best = None
    if ranks.rank == 0:
        if not run.dir.lock:
            run.dir.path, run.dir.lock = create_run_dir(cfg, run.dir.path)
        new = not holds_a_run(run.dir.path)
        try:
            prepare(cfg, run.dir, progress.step, run.train_data.tokenizer_folder)
        except Exception:
            if new:
                discard(run.dir.path)
            raise
        best, number = reconcile_best(progress, run.dir), secrets.randbelow(10**9) + 2
        print(opening.describe(run), flush=True)
    run.dir.path, best, number = ranks.broadcast((run.dir.path, best, number))
    progress.best_loss, progress.best_step = best
    require_shared(run.dir.path)
    if ranks.rank < shards.size:
        run.dir.writer = Writer(run.dir.path / "checkpoints", cfg.keep_checkpoints, run.dir.backup,
                                ranks.rank, shards.size, shards.group, number)


def prepare(cfg, run_dir: RunDir, step: int, tokenizer: str | None):
    """Set checkpoints newer than `step` aside; write config.yaml.

    tokenizer: the data's folder of it, to be copied.
    """
    out_dir, folder = run_dir.path, run_dir.path / "checkpoints"
    for newer in list_checkpoints(folder):
        if newer.step > step:
            newer.set_aside()
    if checkpoint_at(folder, step):  # verified just now; on a full disk there is room then
        rotate(folder, cfg.keep_checkpoints)
    own = out_dir / "tokenizer"
    if tokenizer and Path(tokenizer).resolve() != own.resolve():
        copy_tokenizer(Path(tokenizer), own)
    with atomic_write(out_dir / "config.yaml") as draft:
        # with --max_minutes, each run has its own number of steps
        again = dataclasses.replace(cfg, max_steps=None) if cfg.max_minutes else cfg
        write_yaml(again, draft, {"run": run_id(out_dir) or secrets.token_hex(8), **provenance()})
        start = run_dir.resumed_from
        if start and not checkpoint_at(folder, step):  # it may end before its first save
            start = Checkpoint(start.path.resolve())  # os.link follows no links
            start.link_to(Checkpoint.named(folder, step, sharded=start.path.is_dir()).path)


def discard(out_dir: Path):
    """Delete all that would make a directory without a run look like one."""
    with contextlib.suppress(OSError):
        (out_dir / "config.yaml").unlink(missing_ok=True)
        for checkpoint in list_checkpoints(out_dir / "checkpoints"):
            checkpoint.delete()
        (out_dir / "checkpoints").rmdir()
        (out_dir / "lock").unlink()
        out_dir.rmdir()  # unless anything else is in there


def provenance() -> dict[str, str]:
    """Notes for config.yaml on the origin of this run."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    return dict(command=" ".join(sys.argv), commit=commit or "unknown", torch=torch.__version__,
                started=time.strftime("%Y-%m-%d %H:%M:%S %z"))


def tensorboard_folder(cfg, out_dir: Path) -> Path | bool:
    """The folder of event files; several runs may share one --tensorboard_dir, or the cloud's."""
    shared = cfg.tensorboard_dir or next(filter(os.path.isdir, CLOUD_FOLDERS), None)
    if not cfg.tensorboard or not shared:
        return cfg.tensorboard
    return Path(shared) / f"{out_dir.resolve().name}-{(run_id(out_dir) or '')[:6]}".rstrip("-")


def summary(run_dir: Path) -> dict:
    """A run that has ended, for --json; null for unknown values."""
    logged = (run_dir / "metrics.jsonl").exists()  # a fork may log nothing
    out = report(run_dir) if logged else dict(step=None, figures={}, wall_s=None, verdict=[])
    figures, folder = out["figures"], run_dir / "checkpoints"
    found, best = list_checkpoints(folder), best_checkpoint(folder)
    names = {"train_loss": "train/loss", "val_loss": "val/loss", "val_loss_ema": "val/loss_ema",
             "bits_per_byte": "val/bits_per_byte", "step_ms": "step_ms_median",
             "tokens_per_second": "perf/tokens_per_second", "rss_gb": "memory/host_rss_gb",
             "peak_gb": "memory/peak_gb"}
    return dict(step=out["step"], **{name: figures.get(key) for name, key in names.items()},
                seconds=out["wall_s"], verdict=out["verdict"], run=str(run_dir),
                checkpoint=str(found[-1]) if found else None, best=str(best) if best else None)
