"""Copies of a run at a URL that fsspec knows: uploading beside training, downloading."""

import os
import re
import threading
from pathlib import Path

from steady.checkpoints.checkpoint import PART, Checkpoint
from steady.options import ConfigError

# Files of a run: nothing else is uploaded, nor downloaded if found.
LOGS = re.compile(r"config\.yaml|metrics\.jsonl|(tensorboard|tokenizer|hf)/[\w.-]*\w")
SAVED = re.compile(rf"(checkpoints/step_\d{{8,}}(?:\.pt|(?=/)))(?:/{PART.pattern})?")


class Backup:
    """Uploads the newest checkpoint and the logs of a run to a URL, in a thread.

    While one upload is under way, no other begins. Keeps the newest `keep` checkpoints there.
    run_dir: None for one that is not made yet. run: the id of the run that continues; None for a
    new one. Raises ConfigError if the URL cannot be written, or holds another run or this one.
    """

    def __init__(self, url: str, keep: int, run_dir: Path | None, run: str | None):
        self.url, self.keep, self.fs = url, keep, open_url(url, "--backup_to")
        self.newest = None  # checkpoint
        self.uploaded = None  # the newest checkpoint that is there, and when it was written
        self.thread = threading.Thread()  # of the newest upload
        own, place = (run_dir or Path("runs")).resolve(), Path(self.fs.path).resolve()
        within = own.is_relative_to(place) or place.is_relative_to(own)
        if within and "file" in self.fs.fs.protocol:
            raise ConfigError(f"--backup_to {url}: overlaps the run in {own}; expected a place on "
                              "another disk or machine")
        try:
            self.fs.makedirs("checkpoints", exist_ok=True)
            theirs = self.run_there()
        except Exception as e:  # each file system raises its own
            raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
        if theirs not in (None, run):
            raise ConfigError(f"--backup_to {url}: holds another run than "
                              f"{run_dir or 'this new one'}. Continue that one with --resume "
                              f"{url}, or choose another URL")

    def run_there(self) -> str | None:
        """The id of the run whose backup is there; None if there is none."""
        if self.fs.exists("config.yaml"):
            return id_in(self.fs.cat_file("config.yaml"))
        return "" if remote_checkpoints(self.fs) else None

    def offer(self, checkpoint: Checkpoint):
        """Upload a checkpoint, unless the upload of an older one is under way."""
        self.newest = checkpoint
        if not self.thread.is_alive():
            self.thread = threading.Thread(target=self.upload, args=(checkpoint,), daemon=True)
            self.thread.start()

    def close(self, asked=lambda: False):
        """Upload the last checkpoint and the logs as they are now, until `asked()` to stop."""
        if not self.newest:
            return
        last = threading.Thread(target=self.finish, daemon=True)
        last.start()
        while last.is_alive() and not asked():
            last.join(0.1)
        if last.is_alive():
            print(f"warning: stopped before the backup of {self.newest} to {self.url} was made",
                  flush=True)

    def finish(self):
        self.thread.join()
        self.upload(self.newest)

    def upload(self, checkpoint: Checkpoint):
        held = Checkpoint(checkpoint.path.with_name(f"{checkpoint.name}.backup-{os.getpid()}"))
        try:
            changed = checkpoint.changed_at()
            try:
                checkpoint.link_to(held.path)  # now, or rotation deletes it before the URL answers
                self.upload_run(checkpoint, changed, held)
            finally:
                held.delete()
        except Exception as e:
            print(f"warning: no backup to {self.url}, training continues: {e}", flush=True)

    def upload_run(self, checkpoint: Checkpoint, changed: int, held: Checkpoint):
        mine = id_in((checkpoint.run_dir / "config.yaml").read_bytes())
        if self.run_there() not in (None, mine):
            raise ValueError("it holds another run, which began at the same time")
        self.draft = f"{mine}.draft"
        self.put(checkpoint.run_dir / "config.yaml", "config.yaml")  # first: whose backup it is
        for name in remote_checkpoints(self.fs):
            if Checkpoint(Path(name)).step > checkpoint.step:  # this run has gone back since
                self.fs.mv(name, f"{name}.set-aside", recursive=True)
        if (checkpoint, changed) != self.uploaded:  # may be written again
            self.upload_checkpoint(held, f"checkpoints/{checkpoint.name}")
            self.uploaded = checkpoint, changed
        for pattern in ("*", "*/*"):
            for path in checkpoint.run_dir.glob(pattern):
                name = path.relative_to(checkpoint.run_dir).as_posix()
                if LOGS.fullmatch(name):
                    self.put(path, name)
        for old in list(remote_checkpoints(self.fs))[: -self.keep]:
            self.fs.rm(old, recursive=True)

    def upload_checkpoint(self, held: Checkpoint, name: str):
        names = {file: name if file == held.path else f"{name}/{file.name}"
                 for file in held.files()}
        for file, its_name in names.items():
            self.put(file, its_name)
        for old in set(remote_checkpoints(self.fs).get(name, ())) - set(names.values()):
            self.fs.rm(old)  # parts of an earlier save of this step

    def put(self, file: Path, name: str):
        """Upload a file; one of this name is there until the new one is whole."""
        self.fs.makedirs(os.path.dirname(name), exist_ok=True)
        new = self.draft if self.fs.exists(name) else name
        self.fs.put_file(str(file), new)
        if new != name:
            self.fs.mv(new, name)


def open_url(url: str, option: str):
    """fsspec's file system of the folder at `url`. Raises ConfigError."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    try:
        fs, root = url_to_fs(url)
    except Exception as e:  # each file system raises its own
        raise ConfigError(f"{option} {url}: {type(e).__name__}: {e}") from None
    return DirFileSystem(root, fs)


def remote_checkpoints(fs) -> dict[str, list[str]]:
    """The checkpoints in a backup with the files of each, oldest first."""
    found = {}
    for name in fs.find("checkpoints"):
        if match := SAVED.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return dict(sorted(found.items(), key=lambda item: Checkpoint(Path(item[0])).step))


def id_in(config: bytes) -> str:
    """The id of a run, in its config.yaml; "" where an older version wrote it."""
    found = re.search(rb"^# run: (\w+)$", config, re.MULTILINE)
    return found[1].decode() if found else ""


def download(url: str, to: Path) -> Checkpoint:
    """Download the backup at `url` into the folder `to`; returns its newest valid checkpoint.

    Raises ConfigError.
    """
    fs = open_url(url, "--resume")

    def get(name: str, local: Path):
        local.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(name, str(local))

    try:
        for checkpoint, files in reversed(remote_checkpoints(fs).items()):
            draft = f"{checkpoint}.tmp-{os.getpid()}"
            for file in files:
                get(file, to / file.replace(checkpoint, draft, 1))
            wrong = Checkpoint(to / draft).find_damage()
            if not wrong:  # before config.yaml: a run without a checkpoint begins at 0
                found = Checkpoint((to / draft).rename(to / checkpoint))
                for log in filter(LOGS.fullmatch, fs.find("")):
                    get(log, to / log)
                return found
            print(f"warning: {checkpoint}: {wrong}", flush=True)
            Checkpoint(to / draft).delete()
    except Exception as e:
        raise ConfigError(f"--resume {url}: {type(e).__name__}: {e}") from None
    raise ConfigError(f"--resume {url}: holds no valid checkpoint")
