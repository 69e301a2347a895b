"""Run directories: which one a command means, who may write to it, what belongs in it.

    out_dir/config.yaml, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/, hf/, lock
"""

import contextlib
import dataclasses
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from steady.checkpoints.backup import download, refuse_other_run, run_id
from steady.checkpoints.checkpoint import (
    NAME,
    Checkpoint,
    best_checkpoint,
    checkpoint_at,
    finish_parts,
    latest_valid,
    list_checkpoints,
    remove_drafts,
)
from steady.checkpoints.parts import MANIFEST, is_folder
from steady.checkpoints.sealed import atomic_write
from steady.models.huggingface import KEPT, keep_config
from steady.options import ConfigError, write_yaml
from steady.ranks.ranks import restart_count
from steady.tokens.tokenizers import copy_tokenizer

CHECKPOINT_FILES = re.compile(
    r"(step_[0-9]{8,}|best)(\.pt)?(\.(corrupt|set-aside)(-[0-9]+)?)?")

OF_A_RUN = ("config.yaml", "metrics.jsonl", "tensorboard", "tokenizer", KEPT, "stacks", "traces",
            "checkpoints")

# --- which run -------------------------------------------------------------------------------


def numbered_folders() -> list[Path]:
    """The folders runs/001, runs/002, …, in the order of their numbers."""
    found = (path for path in Path("runs").glob("*") if re.fullmatch("[0-9]{1,9}", path.name))
    return sorted(found, key=lambda path: int(path.name))


def newest_run() -> Path | None:
    """The newest numbered folder that holds a run; warns of newer ones that hold none."""
    for path in reversed(numbered_folders()):
        if holds_a_run(path):
            return path
        print(f"warning: {path} holds no run: passed over", file=sys.stderr, flush=True)
    return None


def find_run(cfg) -> Path | None:
    """The run directory; None if a new one is to be made. Changes nothing.

    Raises ConfigError if a new run would overwrite an existing one, if the place is not writable,
    or if --resume names no checkpoint.
    """
    out_dir, same_run = Path(cfg.out_dir) if cfg.out_dir else None, cfg.auto_resume
    if cfg.resume and "://" not in cfg.resume:
        path = Path(cfg.resume)
        unfinished = path.is_dir() and not Checkpoint(path).exists()
        if unfinished and NAME.fullmatch(path.name):
            raise ConfigError(f"--resume {path}: has no {MANIFEST}, so it was not finished; "
                              "--auto_resume completes it if all its shards are there")
        if unfinished:
            raise ConfigError(f"--resume {path}: is a folder; expected a checkpoint. To "
                              f"continue a run: --auto_resume --out_dir {path}")
        if not path.exists():
            raise ConfigError(f"--resume {path}: no such file")
        own = Checkpoint(path).run_dir
        out_dir = out_dir or own
        same_run = own is not None and out_dir.resolve() == own.resolve()
    elif cfg.auto_resume and not out_dir:
        out_dir = newest_run()
    if out_dir and out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f"--out_dir {out_dir}: is a file; expected a directory")
    place = out_dir or Path("runs")
    while not place.exists():
        place = place.parent
    if cfg.eval_only:
        return out_dir  # only reads
    if not os.access(place, os.W_OK):
        raise ConfigError(f"--out_dir {out_dir or 'runs/'}: {place.absolute()} is not writable")
    if out_dir and holds_a_run(out_dir) and not (cfg.overwrite or same_run):
        raise ConfigError(f"--out_dir {out_dir}: holds a run already. Continue it with "
                          "--auto_resume, start from one of its checkpoints with --resume, or "
                          "move it to OUT_DIR.old with --overwrite")
    files = "lock", "metrics.jsonl", "config.yaml"
    for name in (*files, "checkpoints", "tokenizer", "stacks", "traces", KEPT) if out_dir else ():
        path = out_dir / name
        if path.is_symlink():  # the lock is beside it: another run may write where it leads
            raise ConfigError(f"{path}: is a link; expected it in the run directory itself, or "
                              "none. To use another disk, put --out_dir there")
        if name in files and path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a file; move it away, or choose another --out_dir")
    if cfg.overwrite and out_dir and out_dir.exists():
        place_of_old(out_dir)
    return out_dir


def holds_a_run(out_dir: Path) -> bool:
    names = "config.yaml", "metrics.jsonl", "checkpoints/best.pt", "checkpoints/best"
    has_one = list_checkpoints(out_dir / "checkpoints")
    return bool(has_one) or any((out_dir / name).exists() for name in names)


def place_of_old(out_dir: Path) -> Path:
    """OUT_DIR.old, to which --overwrite moves a run. Raises ConfigError if other things are there.

    config.yaml comes there first and leaves last, so a kill in between leaves it recognizable.
    """
    place = out_dir.resolve()
    old = place.with_name(f"{place.name}.old")
    names = {path.name for path in old.iterdir()} if old.is_dir() else set()
    config = old / "config.yaml"
    ours = names <= {"lock"} or names <= {*OF_A_RUN, "lock"} and config.exists() and run_id(config)
    if os.path.lexists(old) and not (is_folder(old) and ours):
        raise ConfigError(f"--overwrite: {old} is not a run alone, so it is not replaced; move it "
                          "away, or choose another --out_dir")
    return old


def move_to_old(out_dir: Path, tokenizer_folder: str | None):
    """Move the run in out_dir to OUT_DIR.old, in place of an older one; other files stay.

    Where a kill interrupted this, config.yaml is there already, and nothing is replaced: the rest
    follows. tokenizer_folder: the data's, which stays where out_dir is the folder of the data.
    Raises ConfigError.
    """
    old, tokenizer = place_of_old(out_dir), out_dir / "tokenizer"
    with contextlib.suppress(OSError):  # made by `claim`, or it is not empty
        (out_dir / "checkpoints").rmdir()
    names = [name for name in OF_A_RUN if os.path.lexists(out_dir / name)]
    if tokenizer_folder and Path(tokenizer_folder).resolve() == tokenizer.resolve():
        names = [name for name in names if name != tokenizer.name]
    try:
        if "config.yaml" in names and old.exists():
            with contextlib.closing(acquire_lock(old, given=f"--overwrite: {old}")):
                for path in (old / name for name in reversed(OF_A_RUN)):
                    if is_folder(path):
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)  # of a link, not what it leads to
        for name in names:
            old.mkdir(exist_ok=True)
            if os.path.lexists(old / name):
                raise ConfigError(f"--overwrite: {old / name} is there already; move {old} away")
            (out_dir / name).rename(old / name)
        (out_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as e:  # another file system, or a parent that is read-only
        raise ConfigError(f"--overwrite: {out_dir} cannot be moved to {old}: "
                          f"{e.strerror}") from None
    if names:
        print(f"warning: the run that was in {out_dir} is now in {old}", flush=True)


def continues(cfg, out_dir: Path | None) -> bool:
    """Whether the run continues from a checkpoint, if there is a valid one."""
    return bool(cfg.resume) or bool(cfg.auto_resume and out_dir and holds_a_run(out_dir))


def after_restart(cfg):
    """After a restart by torchrun: options that continue the run its processes worked on.

    It counts no restart where a host comes or goes: then only --overwrite would do harm.
    """
    if not launch() or not (restart_count() or cfg.overwrite):
        return cfg
    runs = numbered_folders()
    named = cfg.out_dir or cfg.resume and Checkpoint(Path(cfg.resume)).run_dir
    if named:
        runs = [Path(named)]
    ours = [run for run in runs if is_of_this_launch(run)]
    if not ours:
        return cfg
    change = dict(auto_resume=True, overwrite=False, resume=None, out_dir=str(ours[-1]))
    return dataclasses.replace(cfg, **change)


def is_of_this_launch(run_dir: Path) -> bool:
    """Whether a process of this launch wrote config.yaml there.

    It is written once --overwrite has moved the old run away: until then it is another run's.
    """
    try:
        text = (run_dir / "config.yaml").read_text("utf-8", "replace")
    except OSError:
        return False
    return f"\n# launch: {launch()}\n" in text


def launch() -> str:
    """The random name that torchrun gives its folder of logs, the same over restarts; or "".

    Not its process id: in a container, every torchrun may be process 1.
    """
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # NAME/attempt_0/0/error.json
    return file.parents[2].name if file.match(f"*/attempt_{restart_count()}/*/*") else ""


@contextlib.contextmanager
def saved_config(cfg, out_dir: Path | None):
    """Yields the path of the config.yaml of the run that is continued, or None."""
    with tempfile.TemporaryDirectory() as folder:
        old = out_dir
        if cfg.resume and "://" in cfg.resume:
            old = Path(folder)
            download(cfg.resume, old, only="config.yaml")
        elif cfg.resume:
            old = Checkpoint(Path(cfg.resume)).run_dir or out_dir
        path = old and old / "config.yaml"
        yield path if path and path.exists() and (cfg.resume or cfg.auto_resume) else None


@dataclass
class RunDir:
    """Where a run writes."""

    path: Path | None  # None for a new run, until its directory is made
    resumed_from: Checkpoint | None = None  # the one that it continues from
    lock: object = None  # keeps other processes out until it is closed; of rank 0
    writer: object = None  # of checkpoints; on rank 0, or on all ranks of the first copy
    saved: tuple = ()  # `Progress.state` of the newest checkpoint


def find_start(cfg, out_dir: Path | None) -> RunDir:
    """With the checkpoint to start from, verified; for rank 0.

    Locks the run directory before changing it: damaged checkpoints are set aside, a backup is
    downloaded. Raises ConfigError.
    """
    if cfg.backup_to and not cfg.eval_only:
        check_backup(cfg, out_dir)
    lock = None
    if cfg.resume and "://" in cfg.resume:
        if cfg.eval_only:  # downloaded into a folder that is deleted afterwards
            lock = contextlib.ExitStack()
            place = Path(lock.enter_context(tempfile.TemporaryDirectory()))
        else:
            out_dir, lock = claim(out_dir)
            place = out_dir
        return RunDir(out_dir, download(cfg.resume, place), lock)
    if cfg.resume:
        checkpoint = Checkpoint(Path(cfg.resume))
        checkpoint.require_valid()
        return RunDir(out_dir, checkpoint)
    if cfg.auto_resume and out_dir and out_dir.is_dir():
        if not cfg.eval_only:
            out_dir, lock = claim(out_dir)
        checkpoint = latest_valid(out_dir / "checkpoints", ours=lock is not None)
        if not checkpoint:
            refuse_leftovers(out_dir / "checkpoints")
        return RunDir(out_dir, checkpoint, lock)
    return RunDir(out_dir)


def check_backup(cfg, out_dir: Path | None):
    """Raise ConfigError if --backup_to holds another run, or is the run directory."""
    fetched = "://" in (cfg.resume or "")
    with saved_config(cfg, out_dir) as saved:
        ours = saved and (fetched or saved.parent.resolve() == out_dir.resolve())
        ours = ours and (cfg.resume or list_checkpoints(out_dir / "checkpoints"))
        refuse_other_run(cfg.backup_to, out_dir, run_id(saved) if ours else None)


def refuse_leftovers(folder: Path):
    """Raise ConfigError where a run has no checkpoint to continue from, but once had one."""
    best = best_checkpoint(folder)
    if best:
        raise ConfigError(f"{folder}: holds no checkpoint but {best.name}. Continue from it with "
                          f"--resume {best}, or start afresh with --overwrite")
    left = sorted(path.name for path in folder.glob("*")
                  if CHECKPOINT_FILES.fullmatch(path.name) and not NAME.fullmatch(path.name))
    if left:
        raise ConfigError(f"{folder}: no checkpoint is left but {', '.join(left)}. Bring one back "
                          "from a backup, or start afresh with --overwrite")


# --- one writer ------------------------------------------------------------------------------


def claim(out_dir: Path | None):
    """Make the run directory, the next runs/NNN if none is named; returns it and its lock."""
    os.umask(os.umask(0o077) | 0o002)  # the files of a run are never world-writable
    while out_dir is None:
        newest = next(reversed(numbered_folders()), Path("0"))
        new = Path("runs") / f"{int(newest.name) + 1:03d}"
        with contextlib.suppress(FileExistsError):  # another run was quicker
            new.mkdir(parents=True)
            out_dir = new
    try:
        (out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(out_dir)
        finish_parts(out_dir / "checkpoints")
        return out_dir, lock
    except OSError as e:  # a full disk, among others
        raise ConfigError(f"--out_dir {out_dir}: cannot be written: {e.strerror}") from None


def claim_unused(cfg, out_dir: Path | None):
    """As `claim`. Raises ConfigError where another run has begun and ended since `find_run`.

    To build a large model takes minutes, in which this directory was not locked.
    """
    own = cfg.resume and Checkpoint(Path(cfg.resume)).run_dir
    out_dir, lock = claim(out_dir)
    same_run = own and own.resolve() == out_dir.resolve()
    if cfg.overwrite or same_run or not holds_a_run(out_dir):
        return out_dir, lock
    lock.close()
    raise ConfigError(f"--out_dir {out_dir}: another run has written there since this one started. "
                      "Continue it with --auto_resume, or choose another directory")


def acquire_lock(run_dir: Path, given: str = ""):
    """Become the one process that writes to run_dir, until the returned file is closed.

    A POSIX lock: forked loader processes do not inherit it, and it ends with the process, however
    that ends. It would also end if this process opened and closed the file once more.

    Raises ConfigError where another process holds it. given: the option that names run_dir.
    """
    import fcntl

    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.fdopen(os.open(run_dir / "lock", flags, 0o666), "a+")
    except OSError as e:
        raise ConfigError(f"{run_dir / 'lock'}: cannot be opened: {e.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.readline().strip() or "another process"
        raise ConfigError(f"{given or f'--out_dir {run_dir}'}: {owner} is writing there; stop it, "
                          "or choose another directory") from None
    except OSError as e:  # some network file systems have no locks
        print(f"warning: {run_dir} cannot be locked against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


# --- its contents ----------------------------------------------------------------------------


def prepare(cfg, run_dir: RunDir, step: int, tokenizer: str | None):
    """Clear the claimed directory of anything newer than the step; write config.yaml.

    tokenizer: the folder of the data's, which is copied.
    """
    out_dir, folder = run_dir.path, run_dir.path / "checkpoints"
    if cfg.overwrite:
        move_to_old(out_dir, tokenizer)
    remove_drafts(folder)
    for newer in list_checkpoints(folder):
        if newer.step > step:
            newer.set_aside()
    own = out_dir / "tokenizer"
    if tokenizer and Path(tokenizer).resolve() != own.resolve():
        copy_tokenizer(Path(tokenizer), own)
    if cfg.init_from:
        keep_config(cfg, out_dir, run_dir.resumed_from)
    config = out_dir / "config.yaml"
    run = run_id(config) if run_dir.resumed_from and config.exists() else ""  # if it goes on
    with atomic_write(config) as draft:
        write_yaml(cfg, draft, {"run": run or secrets.token_hex(8), **provenance()})
        start = run_dir.resumed_from
        if start and not checkpoint_at(folder, step):  # it may end before its first save
            start = Checkpoint(start.path.resolve())  # os.link follows no links
            start.link_to(Checkpoint.named(folder, step, sharded=start.path.is_dir()).path)


def provenance() -> dict[str, str]:
    """Notes for config.yaml: where this run came from."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "command": " ".join(sys.argv),
        "launch": launch() or "without torchrun",
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
