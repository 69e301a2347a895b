"""Copies of a run at a URL that fsspec knows: uploading beside training, downloading."""

import contextlib
import os
import re
import threading
from pathlib import Path

from steady.checkpoints.checkpoint import NAME, Checkpoint
from steady.checkpoints.parts import PART, whole_saves
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
        self.fs, self.root = open_url(url)
        try:
            self.fs.makedirs(f"{self.root}/checkpoints", exist_ok=True)
        except Exception as e:
            raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
        self.url, self.keep = url, keep
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
        remote = f"{self.root}/checkpoints"
        try:
            if (checkpoint, checkpoint.changed_at()) != self.uploaded:  # may be written again
                self.upload_checkpoint(checkpoint, f"{remote}/{checkpoint.name}")
            for log in (*run_dir.glob("*"), *run_dir.glob("*/*")):
                name = log.relative_to(run_dir).as_posix()
                if LOGS.fullmatch(name):
                    self.fs.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
                    self.put(log, f"{self.root}/{name}")
            found = remote_checkpoints(self.fs, remote)
            past = [p for p in found if step_of(p) <= checkpoint.step]
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

    def upload_checkpoint(self, checkpoint: Checkpoint, remote: str):
        path, changed, run_dir = checkpoint.path, checkpoint.changed_at(), checkpoint.run_dir
        held = Checkpoint(path.with_name(f"{path.name}.backup-{os.getpid()}"))
        config = "config.yaml"
        try:
            checkpoint.link_to(held.path)  # or rotation deletes it
            refuse_other_run(self.url, run_dir, run_id(run_dir / config))
            self.upload_file(run_dir / config, f"{self.root}/{config}")  # whose backup it is
            if held.path.is_dir():
                self.fs.makedirs(remote, exist_ok=True)
                for part in held.files():
                    self.upload_file(part, f"{remote}/{part.name}")
            else:
                self.upload_file(held.path, remote)
        finally:
            held.delete()
        self.uploaded = checkpoint, changed

    def upload_file(self, path: Path, remote: str):
        """Under its name once all of it is there."""
        self.put(path, f"{remote}.part")
        self.fs.mv(f"{remote}.part", remote)

    def put(self, path: Path, remote: str):
        retry(lambda: self.fs.put_file(str(path), remote), Exception)


def open_url(url: str, option: str = "--backup_to") -> tuple:
    """(fsspec's file system, the path in it). Raises ConfigError."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except Exception as e:  # each file system raises its own
        raise ConfigError(f"{option} {url}: {type(e).__name__}: {e}") from None


def run_id(config: Path | str) -> str:
    """Which run a config.yaml, or its text, is of; "" where an older version wrote it."""
    text = config.read_text("utf-8", "replace") if isinstance(config, Path) else config
    found = re.search("^# run: (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def refuse_other_run(url: str, run_dir: Path | None, mine: str | None):
    """Raise ConfigError if the backup at `url` is of another run than run_dir, or in it.

    mine: its `run_id`; None for a new run, whose backup cannot be there yet.
    """
    from fsspec.implementations.local import LocalFileSystem

    fs, root = open_url(url)
    place, own = Path(root).resolve(), (run_dir or Path("runs")).resolve()
    within = place == own or place in own.parents or own in place.parents
    if within and isinstance(fs, LocalFileSystem):
        raise ConfigError(f"--backup_to {url}: overlaps the run in {own}; expected a "
                          "place on another disk or machine")
    try:
        theirs = "" if remote_checkpoints(fs, f"{root}/checkpoints") else None
        with contextlib.suppress(FileNotFoundError):
            theirs = run_id(fs.cat_file(f"{root}/config.yaml").decode("utf-8", "replace"))
    except Exception as e:
        raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
    if theirs is not None and (mine is None or theirs not in ("", mine)):
        raise ConfigError(f"--backup_to {url}: holds another run than {run_dir or 'this new one'}. "
                          f"Continue that one with --resume {url}, or choose another URL")


def step_of(remote: str) -> int:
    return Checkpoint(Path(remote)).step


def remote_checkpoints(fs, folder: str) -> list[str]:
    """Paths of the checkpoints in a folder of an fsspec file system, oldest first."""
    found = [p.rstrip("/") for p in fs.ls(folder, detail=False)] if fs.exists(folder) else []
    found = [p for p in found if NAME.fullmatch(p.rpartition("/")[2])]
    whole = [p for p in found if p.endswith(".pt")
             or whole_saves(part.rpartition("/")[2] for part in remote_files(fs, p))]
    return sorted(whole, key=step_of)


def remote_files(fs, checkpoint: str) -> list[str]:
    """The files of a remote checkpoint: itself, or its parts."""
    if checkpoint.endswith(".pt"):
        return [checkpoint]
    return [p for p in fs.ls(checkpoint, detail=False) if PART.fullmatch(p.rpartition("/")[2])]


def download(url: str, to: Path, only: str | None = None) -> Checkpoint | None:
    """Download the backup at `url` into the folder `to`; returns its newest valid checkpoint.

    url: the folder that --backup_to named, or one checkpoint in it. only: download nothing
    but this file, and return None. Raises ConfigError.
    """
    fs, root = open_url(url, "--resume")
    try:
        if NAME.fullmatch(root.rpartition("/")[2]) or root.endswith(".pt"):
            wanted, root = [root], root.rpartition("/")[0].removesuffix("/checkpoints")
        else:
            wanted = remote_checkpoints(fs, f"{root}/checkpoints")[::-1]
        logs = [p for p in fs.find(root) if LOGS.fullmatch(p[len(root) :].lstrip("/"))]
    except Exception as e:
        raise ConfigError(f"--resume {url}: {type(e).__name__}: {e}") from None

    def get(path: str, local: Path) -> Path:
        local.parent.mkdir(parents=True, exist_ok=True)
        retry(lambda: fs.get_file(path, str(local)), Exception)
        return local

    if only:
        for log in (p for p in logs if p[len(root) :].lstrip("/") == only):
            get(log, to / only)
        return None
    for path in wanted:
        local = Checkpoint(to / "checkpoints" / path.rpartition("/")[2])
        draft, wrong = Checkpoint(local.path.with_name(f"{local.name}.tmp-{os.getpid()}")), ""
        try:
            for file in remote_files(fs, path):
                get(file, draft.path / file.rpartition("/")[2] if file != path else draft.path)
        except Exception as e:  # each file system raises its own; an older one may be there
            wrong = f"{type(e).__name__}: {e}"
        wrong = wrong or (draft.find_damage() if draft.path.exists() else "it has no files")
        if not wrong:
            for log in logs:
                get(log, to / log[len(root) :].lstrip("/"))
            if local.path.exists():
                local.set_aside()
            draft.path.rename(local.path)
            return local
        print(f"warning: {path}: {wrong}", flush=True)
        draft.delete()
    raise ConfigError(f"--resume {url}: holds no valid checkpoint")
