"""Run directories: which one a command means, who may write to it, what belongs in it.

    out_dir/config.yaml, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/, hf/, lock
"""

import contextlib
import dataclasses
import os
import platform
import re
import secrets
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
    BEST,
    NAME,
    Checkpoint,
    checkpoint_at,
    latest_valid,
    list_checkpoints,
    remove_drafts,
    unused_name,
)
from steady.checkpoints.sealed import atomic_write
from steady.models.huggingface import KEPT, keep_config
from steady.options import ConfigError, write_yaml
from steady.ranks.ranks import restart_count
from steady.tokens.tokenizers import copy_tokenizer

# What no run continues from by itself.
LEFTOVERS = re.compile(r"best(\.pt)?|(step_\d{8,}|best)(\.pt)?\.(corrupt|set-aside)(-\d+)?")
OF_A_RUN = ("config.yaml", "metrics.jsonl", "tensorboard", "tokenizer", KEPT, "stacks", "traces",
            "checkpoints")

# --- which run -------------------------------------------------------------------------------


def numbered_folders() -> list[Path]:
    """The folders runs/001, runs/002, …, in the order of their numbers."""
    found = (path for path in Path("runs").glob("*") if re.fullmatch("[0-9]{1,9}", path.name))
    return sorted(found, key=lambda path: int(path.name))


def find_run(cfg) -> Path | None:
    """The run directory; None if a new one is to be made. Changes nothing.

    Raises ConfigError if a new run would overwrite an existing one, if the place is not writable,
    or if --resume names no checkpoint.
    """
    out_dir, same_run = Path(cfg.out_dir) if cfg.out_dir else None, cfg.auto_resume
    if cfg.resume and "://" not in cfg.resume:
        path = Path(cfg.resume)
        if path.is_dir() and not Checkpoint(path).exists():
            raise ConfigError(f"--resume {path}: is a folder, but no finished checkpoint. To "
                              f"continue a run: --auto_resume --out_dir {path}")
        if not path.exists():
            raise ConfigError(f"--resume {path}: no such file")
        own = Checkpoint(path).run_dir
        out_dir = out_dir or own
        same_run = own is not None and out_dir.resolve() == own.resolve()
    elif cfg.auto_resume and not out_dir:
        out_dir = next(filter(holds_a_run, reversed(numbered_folders())), None)
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
    if out_dir:
        refuse_links(out_dir)
    return out_dir


def refuse_links(out_dir: Path):
    """Raise ConfigError if a run in out_dir would write elsewhere, which its lock does not cover.

    Checked once, so nothing below a claimed directory needs to ask what is a link.
    """
    files, checkpoints = ("lock", "metrics.jsonl", "config.yaml"), out_dir / "checkpoints"
    paths = [out_dir / name for name in (*files, "tokenizer", "stacks", "traces", KEPT)]
    paths += [path for path in checkpoints.glob("*") if NAME.fullmatch(path.name)]
    for path in (checkpoints, *paths, *(checkpoints / name for name in BEST)):
        if path.is_symlink() or path.name in files and path.is_dir():
            raise ConfigError(f"{path}: is a link, or no file; expected it in the run directory "
                              "itself, or none. To use another disk, put --out_dir there")


def holds_a_run(out_dir: Path) -> bool:
    names = "config.yaml", "metrics.jsonl", *(f"checkpoints/{name}" for name in BEST)
    has_one = list_checkpoints(out_dir / "checkpoints")
    return bool(has_one) or any((out_dir / name).exists() for name in names)


def move_to_old(out_dir: Path, tokenizer_folder: str | None):
    """Move the run in out_dir to OUT_DIR.old, or OUT_DIR.old-2, …; other files stay.

    tokenizer_folder: the data's, which stays where out_dir is the folder of the data.
    Raises ConfigError.
    """
    if not holds_a_run(out_dir):
        return
    place = out_dir.resolve()
    old = unused_name(place.with_name(f"{place.name}.old"))
    try:
        old.mkdir()
        for name in OF_A_RUN:
            of_data = tokenizer_folder and Path(tokenizer_folder).resolve() == place / name
            if os.path.lexists(out_dir / name) and not of_data:
                (out_dir / name).rename(old / name)
        (out_dir / "checkpoints").mkdir()
    except OSError as e:  # another file system, or a parent that is read-only
        raise ConfigError(f"--overwrite: {out_dir} cannot be moved to {old}: "
                          f"{e.strerror}") from None
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
    named = cfg.out_dir or cfg.resume and Checkpoint(Path(cfg.resume)).run_dir
    for run in [Path(named)] if named else reversed(numbered_folders()):
        text = ""  # --overwrite moves that of an older run away before there is one of this launch
        with contextlib.suppress(OSError):
            text = (run / "config.yaml").read_text("utf-8", "replace")
        if f"\n# launch: {launch()}\n" in text:
            return dataclasses.replace(cfg, auto_resume=True, overwrite=False, resume=None,
                                       out_dir=str(run))
    return cfg


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
    if cfg.auto_resume and out_dir:
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
        refuse_other_run(cfg.backup_to, out_dir, run_id(saved.parent) if ours else None)


def refuse_leftovers(folder: Path):
    """Raise ConfigError where a run has no checkpoint to continue from, but once had one."""
    left = sorted(path.name for path in folder.glob("*") if LEFTOVERS.fullmatch(path.name))
    if left:
        raise ConfigError(f"{folder}: no checkpoint is left but {', '.join(left)}. Continue from "
                          "the best with --resume, bring another back from a backup, or start "
                          "afresh with --overwrite")


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
        return out_dir, lock
    except OSError as e:  # a full disk, among others
        raise ConfigError(f"--out_dir {out_dir}: cannot be written: {e.strerror}") from None


def claim_unused(cfg, out_dir: Path | None):
    """As `claim`. Raises ConfigError where another run has written there since `find_run`."""
    out_dir, lock = claim(out_dir)
    find_run(dataclasses.replace(cfg, out_dir=str(out_dir)))
    return out_dir, lock


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
    run = run_id(out_dir) if run_dir.resumed_from else ""  # if it goes on
    with atomic_write(out_dir / "config.yaml") as draft:
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
