"""Copies of a run at a URL that fsspec knows: uploading beside training, downloading."""

import contextlib
import os
import re
import threading
from pathlib import Path

from steady.checkpoints.checkpoint import BEST, NAME, Checkpoint
from steady.checkpoints.parts import whole_saves
from steady.checkpoints.retry import retry
from steady.options import ConfigError

# Files of a run besides its checkpoints: nothing else is uploaded, nor downloaded if found.
LOGS = re.compile(r"config\.yaml|metrics\.jsonl|(tensorboard|tokenizer|hf)/[\w.-]*\w")


class Backup:
    """Uploads the newest checkpoint and the logs of a run to a URL, in a thread.

    While one upload is under way, no other begins. Keeps the newest `keep` checkpoints there.
    Raises ConfigError for a URL that cannot be written.
    """

    def __init__(self, url: str, keep: int):
        self.fs, self.url, self.keep = open_url(url), url, keep
        try:
            self.fs.makedirs("checkpoints", exist_ok=True)
        except Exception as e:
            raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
        self.thread = None
        self.newest = None  # checkpoint
        self.uploaded = None  # the newest checkpoint that is there, and when it was written

    def offer(self, checkpoint: Checkpoint):
        """Upload a checkpoint, unless the upload of an older one is under way."""
        self.newest = checkpoint
        if not (self.thread and self.thread.is_alive()):
            self.thread = threading.Thread(target=self.upload, args=(checkpoint,), daemon=True)
            self.thread.start()

    def close(self):
        """Wait, then upload the last checkpoint and the logs as they are now."""
        if self.thread:
            self.thread.join()
        if self.newest:
            self.offer(self.newest)
            self.thread.join()

    def upload(self, checkpoint: Checkpoint):
        run_dir = checkpoint.run_dir
        try:
            if (checkpoint, checkpoint.changed_at()) != self.uploaded:  # may be written again
                self.upload_checkpoint(checkpoint)
            for log in (*run_dir.glob("*"), *run_dir.glob("*/*")):
                if LOGS.fullmatch(name := log.relative_to(run_dir).as_posix()):
                    self.put(log, name)
            found = remote_checkpoints(self.fs)
            past = [name for name in found if step_of(name) <= checkpoint.step]
            for later in found[len(past) :]:  # before this run went back; as in its directory
                for file in remote_files(self.fs, later):
                    self.fs.mv(file, f"{file}.set-aside")
            for old in past[: -self.keep]:
                for file in remote_files(self.fs, old):
                    self.fs.rm_file(file)
                with contextlib.suppress(Exception):  # where folders exist by themselves
                    self.fs.rmdir(old)
        except Exception as e:
            print(f"warning: no backup to {self.url}, training continues: {e}", flush=True)

    def upload_checkpoint(self, checkpoint: Checkpoint):
        path, changed, run_dir = checkpoint.path, checkpoint.changed_at(), checkpoint.run_dir
        held = Checkpoint(path.with_name(f"{path.name}.backup-{os.getpid()}"))
        try:
            checkpoint.link_to(held.path)  # or rotation deletes it
            refuse_other_run(self.url, run_dir, run_id(run_dir))
            self.put(run_dir / "config.yaml", "config.yaml")  # whose backup it is
            for file in held.files():
                name = path.name if file == held.path else f"{path.name}/{file.name}"
                self.put(file, f"checkpoints/{name}.part")
                self.fs.mv(f"checkpoints/{name}.part", f"checkpoints/{name}")  # all of it is there
        finally:
            held.delete()
        self.uploaded = checkpoint, changed

    def put(self, path: Path, name: str):
        self.fs.makedirs(os.path.dirname(name), exist_ok=True)
        retry(lambda: self.fs.put_file(str(path), name), Exception)


def open_url(url: str, option: str = "--backup_to"):
    """fsspec's file system of the folder at `url`. Raises ConfigError."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    try:
        fs, root = url_to_fs(url)
    except Exception as e:  # each file system raises its own
        raise ConfigError(f"{option} {url}: {type(e).__name__}: {e}") from None
    return DirFileSystem(root, fs)


def run_id(run_dir: Path) -> str:
    """The id in its config.yaml; "" without one, or where an older version wrote it."""
    config = run_dir / "config.yaml"
    return id_in(config.read_bytes()) if config.exists() else ""


def id_in(config: bytes) -> str:
    found = re.search(rb"^# run: (\w+)$", config, re.MULTILINE)
    return found[1].decode() if found else ""


def refuse_other_run(url: str, run_dir: Path | None, mine: str | None):
    """Raise ConfigError if the backup at `url` is of another run than run_dir, or in it.

    mine: its `run_id`; None for a new run, whose backup cannot be there yet.
    """
    from fsspec.implementations.local import LocalFileSystem

    fs, own = open_url(url), (run_dir or Path("runs")).resolve()
    place = Path(fs.path).resolve()
    within = place == own or place in own.parents or own in place.parents
    if within and isinstance(fs.fs, LocalFileSystem):
        raise ConfigError(f"--backup_to {url}: overlaps the run in {own}; expected a "
                          "place on another disk or machine")
    try:
        theirs = "" if remote_checkpoints(fs) else None
        with contextlib.suppress(FileNotFoundError):
            theirs = id_in(fs.cat_file("config.yaml"))
    except Exception as e:
        raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
    if theirs is not None and (mine is None or theirs not in ("", mine)):
        raise ConfigError(f"--backup_to {url}: holds another run than {run_dir or 'this new one'}. "
                          f"Continue that one with --resume {url}, or choose another URL")


def step_of(name: str) -> int:
    return Checkpoint(Path(name)).step


def remote_checkpoints(fs) -> list[str]:
    """The names of the checkpoints in a backup, oldest first."""
    found = fs.ls("checkpoints", detail=False) if fs.exists("checkpoints") else []
    found = [name.rstrip("/") for name in found]
    found = [name for name in found if NAME.fullmatch(os.path.basename(name))]
    return sorted((name for name in found if remote_files(fs, name)), key=step_of)


def remote_files(fs, checkpoint: str) -> list[str]:
    """The files of a checkpoint in a backup: itself, or its parts if there are those of a save."""
    if checkpoint.endswith(".pt"):
        return [checkpoint]
    found = {os.path.basename(name): name for name in fs.ls(checkpoint, detail=False)}
    return [found[name] for save in whole_saves(found) for name in save]


def download(url: str, to: Path, only: str | None = None) -> Checkpoint | None:
    """Download the backup at `url` into the folder `to`; returns its newest valid checkpoint.

    url: the folder that --backup_to named, or one checkpoint in it. only: download nothing
    but this file, and return None. Raises ConfigError.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    one = NAME.fullmatch(name) or name in BEST
    fs = open_url(place.removesuffix("/checkpoints") if one else url, "--resume")
    try:
        wanted = [f"checkpoints/{name}"] if one else remote_checkpoints(fs)[::-1]
        logs = [name for name in fs.find("") if LOGS.fullmatch(name)]
    except Exception as e:
        raise ConfigError(f"--resume {url}: {type(e).__name__}: {e}") from None

    def get(name: str, local: Path):
        local.parent.mkdir(parents=True, exist_ok=True)
        retry(lambda: fs.get_file(name, str(local)), Exception)

    if only:
        if only in logs:
            get(only, to / only)
        return None
    for path in wanted:
        local = Checkpoint(to / path)
        draft, wrong = Checkpoint(local.path.with_name(f"{local.name}.tmp-{os.getpid()}")), ""
        try:
            for file in remote_files(fs, path):
                get(file, draft.path / os.path.basename(file) if file != path else draft.path)
        except Exception as e:  # each file system raises its own; an older one may be there
            wrong = f"{type(e).__name__}: {e}"
        wrong = wrong or draft.find_damage()
        if not wrong:
            for log in logs:
                get(log, to / log)
            if local.path.exists():
                local.set_aside()
            draft.path.rename(local.path)
            return local
        print(f"warning: {path}: {wrong}", flush=True)
        draft.delete()
    raise ConfigError(f"--resume {url}: holds no valid checkpoint")
