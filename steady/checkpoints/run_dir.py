"""Run directories: choosing one, its only writer, its files."""

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from steady.checkpoints import checkpoint as checkpoints
from steady.checkpoints import opening
from steady.checkpoints.backup import Backup, download, run_id
from steady.checkpoints.checkpoint import Checkpoint, checkpoint_at, list_checkpoints
from steady.checkpoints.disk import acquire_lock, atomic_write
from steady.checkpoints.state import Progress, reconcile_best
from steady.checkpoints.writer import Writer
from steady.options import ConfigError, expect_file, reading_paths, write_yaml
from steady.ranks.ranks import from_environment
from steady.tokens.tokenizers import copy_tokenizer
from steady.watch.report import report

CLOUD_FOLDERS = ("/openbayes/home/tf_dir", "/root/tf-logs")  # displayed by OpenBayes and AutoDL
RUN_FILES = re.compile(  # a directory with any of them holds a run
    rf"config\.yaml|metrics\.jsonl|checkpoints/({checkpoints.NAME.pattern}|best(\.pt)?)")
OTHER_FILES = ("lock", "tokenizer", "stacks", "traces", "checkpoints")  # also written by a run


@dataclasses.dataclass
class RunDir:
    """The directory of a run, and its writer."""

    path: Path | None  # None for a new run, until its directory is made
    resumed_from: Checkpoint | None = None
    lock: object = None  # keeps other processes out until it is closed; of rank 0
    backup: Backup | None = None  # of rank 0
    writer: Writer | None = None  # of checkpoints; on rank 0, or on all ranks of the first copy
    saved: Progress | None = None  # in the newest checkpoint


# --- choosing one ----------------------------------------------------------------------------


def find_run(cfg) -> Path | None:
    """The run directory; None if a new one is to be made. Changes nothing.

    Raises ConfigError if it cannot be written, holds another run, or --resume has no checkpoint.
    """
    out_dir, own = Path(cfg.out_dir) if cfg.out_dir else None, None
    if cfg.resume:
        source = Checkpoint(Path(cfg.resume))
        if not source.exists():
            raise ConfigError(f"--resume {source}: no such file, nor a finished checkpoint. To "
                              "continue a run: --auto_resume --out_dir RUN; to tune: --init_from")
        out_dir, own = out_dir or source.run_dir, source.run_dir
    elif cfg.auto_resume:
        own = out_dir = out_dir or next(filter(run_files, reversed(numbered_folders())), None)
    if cfg.eval_only:
        return out_dir  # only reads
    real = Path(os.path.realpath(out_dir or "runs"))
    place = next(each for each in (real / "checkpoints", real, *real.parents) if each.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(f"--out_dir {out_dir or 'runs/'}: {place} is not a directory to write to")
    if out_dir and run_files(out_dir) and not (own and own.resolve() == real or cfg.overwrite):
        raise ConfigError(f"--out_dir {out_dir}: holds a run already. Continue it with "
                          "--auto_resume, start from one of its checkpoints with --resume, or "
                          "move it to OUT_DIR.old with --overwrite")
    if re.search("[\udc80-\udcff]", str(real)):  # torch cannot read a file there
        raise ConfigError(f"--out_dir {out_dir or real}: expected a name in UTF-8")
    # a link would lead the run to write beyond its lock
    for path in (*(out_dir / name for name in OTHER_FILES), *run_files(out_dir)) if out_dir else ():
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link; to use another disk, put --out_dir there")
        if not path.is_dir():
            expect_file(path)
    return out_dir


def numbered_folders() -> list[Path]:
    """The folders runs/001, runs/002, …, in the order of their numbers."""
    found = (path for path in Path("runs").glob("*") if re.fullmatch("[0-9]+", path.name))
    return sorted(found, key=lambda path: int(path.name))


def run_files(out_dir: Path) -> list[Path]:
    """The files and folders that show that a directory holds a run."""
    found = *out_dir.glob("*"), *out_dir.glob("checkpoints/*")
    return [path for path in found if RUN_FILES.fullmatch(path.relative_to(out_dir).as_posix())]


def saved_config(cfg, out_dir: Path | None) -> Path | None:
    """The config.yaml of the run to continue; None for a new one."""
    of_checkpoint = Checkpoint(Path(cfg.resume)).run_dir if cfg.resume else None
    run = (of_checkpoint or out_dir) if cfg.resume or cfg.auto_resume else None
    return run / "config.yaml" if run and (run / "config.yaml").exists() else None


def redirect(cfg) -> dict:
    """Options to continue a run downloaded from --resume URL. Raises ConfigError."""
    if from_environment("TORCHELASTIC_RESTART_COUNT", 0) and not (cfg.auto_resume and cfg.out_dir):
        raise ConfigError("torchrun has restarted this run; a restart continues it only with "
                          "--auto_resume --out_dir DIR")
    if "://" not in (cfg.resume or ""):
        return {}
    new = dict(resume=None, auto_resume=False, overwrite=False, eval_only=False)
    out_dir, lock = claim(find_run(dataclasses.replace(cfg, **new)))
    with lock, deleted_if_refused(out_dir):
        download(cfg.resume, out_dir)
    return dict(resume=None, auto_resume=True, out_dir=str(out_dir))


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
        found.resumed_from = checkpoints.find_checkpoint(Path(cfg.resume))
    elif cfg.auto_resume and out_dir:
        if not cfg.eval_only:
            found.path, found.lock = claim(out_dir)
        found.resumed_from = checkpoints.latest_valid(folder, ours=not cfg.eval_only)
    return found


# --- its only writer -------------------------------------------------------------------------


def claim(out_dir: Path | None, overwrite: bool = False):
    """Make the run directory, or the next runs/NNN for None; returns it and its lock.

    overwrite: move a run that is there to OUT_DIR.old.
    """
    while out_dir is None:
        newest = next(reversed(numbered_folders()), Path("0"))
        new = Path("runs") / f"{int(newest.name) + 1:03d}"
        with contextlib.suppress(FileExistsError):  # another run was quicker
            os.makedirs(os.path.realpath(new))  # also through a dangling link
            out_dir = new
    try:
        place = os.path.realpath(out_dir)
        os.makedirs(place, exist_ok=True)
        lock = acquire_lock(out_dir)
        if overwrite and run_files(out_dir):
            with lock:
                old = checkpoints.unused_name(Path(f"{place}.old"))
                os.rename(place, old)
            print(f"warning: the run that was in {out_dir} is now in {old}", flush=True)
            return claim(Path(place))  # not "." here: it has moved along
        (out_dir / "checkpoints").mkdir(exist_ok=True)
        checkpoints.adopt_drafts(out_dir / "checkpoints")
        return out_dir, lock
    except OSError as e:  # a full disk, among others
        raise ConfigError(f"--out_dir {out_dir}: cannot be written: {e.filename or out_dir}: "
                          f"{e.strerror}") from None


@contextlib.contextmanager
def deleted_if_refused(out_dir: Path):
    """If an error is raised, deletes a claimed directory that was empty before."""
    found = {*out_dir.glob("*"), *out_dir.glob("checkpoints/*")}
    try:
        yield
    except Exception:
        if found == {out_dir / "checkpoints", out_dir / "lock"}:
            shutil.rmtree(out_dir, ignore_errors=True)
        raise


@reading_paths()
def open_run_dir(run):
    """Rank 0 makes and locks the run directory, and prints a summary of the run.

    The ranks that hold the first copy of the model each get a writer.
    """
    own, ranks, shards = run.dir, run.ranks, run.ranks.shards
    best = begin(run) if ranks.rank == 0 else None
    own.path, best, number, name = ranks.broadcast(
        (own.path, best, secrets.randbelow(10**9), run_id(own.path)))
    run.progress.best_loss, run.progress.best_step = best
    checkpoints.require_shared(own.path)
    if ranks.rank < shards.size:
        own.writer = Writer(own.path / "checkpoints", run.cfg.keep_checkpoints, own.backup,
                            ranks.rank, shards.size, shards.group, number, name)


def begin(run) -> tuple[float, int]:
    """Prepare the run directory for the steps to come; returns (loss, step) of best.pt."""
    cfg, own, step = run.cfg, run.dir, run.progress.step
    if not own.lock:
        own.path, own.lock = claim(own.path, cfg.overwrite)
        find_run(dataclasses.replace(cfg, out_dir=str(own.path)))  # another may have begun there
    folder, start = own.path / "checkpoints", own.resumed_from
    with deleted_if_refused(own.path):
        for other in list_checkpoints(folder):
            if other.step > step or other.step == step and start not in (None, other) and (
                    [*map(os.stat, other.files())] != [*map(os.stat, start.files())]):
                other.set_aside()  # of another branch
        if checkpoint_at(folder, step):  # verified just now, so older ones can make room
            checkpoints.rotate(folder, cfg.keep_checkpoints)
        tokenizer, copy = run.train_data.tokenizer_folder, own.path / "tokenizer"
        if tokenizer and Path(tokenizer).resolve() != copy.resolve():
            copy_tokenizer(Path(tokenizer), copy)
        # with --max_minutes, each start sets its own number of steps
        saved = dataclasses.replace(cfg, max_steps=None) if cfg.max_minutes else cfg
        notes = {"run": run_id(own.path) or secrets.token_hex(8), **provenance()}
        with atomic_write(own.path / "config.yaml") as draft:
            write_yaml(saved, draft, notes)
            if start and not checkpoint_at(folder, step):  # the run may end before its first save
                start.link_to(Checkpoint.named(folder, step, sharded=start.path.is_dir()).path)
    print(opening.describe(run), flush=True)
    return reconcile_best(run.progress, own)


# --- its files -------------------------------------------------------------------------------


def provenance() -> dict[str, str]:
    """Notes on the origin of this run, for config.yaml."""
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
    found, best = list_checkpoints(folder), checkpoints.best_checkpoint(folder)
    names = {"train_loss": "train/loss", "val_loss": "val/loss", "val_loss_ema": "val/loss_ema",
             "bits_per_byte": "val/bits_per_byte", "step_ms": "step_ms_median",
             "tokens_per_second": "perf/tokens_per_second", "rss_gb": "memory/host_rss_gb",
             "peak_gb": "memory/peak_gb"}
    return dict(step=out["step"], **{name: figures.get(key) for name, key in names.items()},
                seconds=out["wall_s"], verdict=out["verdict"], run=str(run_dir),
                checkpoint=str(found[-1]) if found else None, best=str(best) if best else None)
