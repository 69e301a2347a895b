"""Copies of a run at a URL that fsspec knows: uploaded beside training, downloaded to resume."""

import contextlib
import re
import shutil
import threading
from itertools import chain
from pathlib import Path

from steady.checkpoints.checkpoint import PART, Checkpoint, best_checkpoint
from steady.checkpoints.disk import delete, put_in_place
from steady.options import ConfigError

# The files of a run; no others are uploaded or downloaded.
LOGS = re.compile(r"config\.yaml|metrics\.jsonl|(tensorboard|tokenizer)/[\w.-]*\w")
SAVED = re.compile(rf"(checkpoints/(?:step_\d{{8,}}|best)(?:\.pt|(?=/)))(?:/{PART.pattern})?")


class Backup:
    """Uploads the newest checkpoint, the best and the logs of a run to a URL, in a thread.

    One upload at a time; the URL keeps the checkpoints that the run keeps. run_dir: None if it is
    not made yet. run: the id of the run that continues; None for a new one. Raises ConfigError if
    the URL cannot be written, or holds another run, or newer steps.
    """

    def __init__(self, url: str, run_dir: Path | None, run: str | None):
        self.url, self.newest = url, None  # newest: a checkpoint
        self.sent = {}  # name at the URL → time of change of the file that was uploaded
        self.thread = threading.Thread()  # of the newest upload
        own = (run_dir or Path("runs")).resolve()
        with opened(url, "--backup_to") as self.fs:
            place, self.is_disk = Path(self.fs.path).resolve(), "file" in self.fs.fs.protocol
        if self.is_disk and (own.is_relative_to(place) or place.is_relative_to(own)):
            raise ConfigError(f"--backup_to {url}: overlaps the run in {own}; use another disk")
        with opened(url, "--backup_to"):
            self.fs.makedirs("checkpoints", exist_ok=True)  # first: it makes a bucket, too
            saved = [*remote_checkpoints(self.fs)], [p.name for p in own.glob("checkpoints/*")]
            there = self.owner()
        if there and there != run:
            raise ConfigError(f"--backup_to {url}: holds another run than {run_dir or 'this one'}; "
                              f"choose another URL, or continue that run with --resume {url}")
        newest, ours = (max(map(int, re.findall(r"step_(\d+)", str(x))), default=0) for x in saved)
        if there and newest > ours:  # an older copy of the run would delete it
            raise ConfigError(f"--backup_to {url}: holds step {newest} of this run, {run_dir} only "
                              f"step {ours}; continue it with --resume {url}")

    def owner(self) -> str:  # the id of the run at the URL; "" if none is there
        return id_in(self.fs.cat_file("config.yaml")) if self.fs.exists("config.yaml") else ""

    def offer(self, checkpoint: Checkpoint):
        """Upload a checkpoint, unless the upload of an older one is under way."""
        self.newest = checkpoint
        if not self.thread.is_alive():
            self.thread = threading.Thread(target=self.upload, args=(checkpoint,), daemon=True)
            self.thread.start()

    def close(self, asked=lambda: False):
        """Upload the last checkpoint and the logs as they are now, until `asked()` to stop."""
        for newest in (self.newest, None):  # the upload of an older one may be under way
            while self.thread.is_alive() and not asked():
                self.thread.join(0.1)
            if newest and not self.thread.is_alive():
                self.offer(newest)
        if self.thread.is_alive():
            print(f"warning: stopped before the backup of {self.newest} to {self.url}", flush=True)

    def upload(self, checkpoint: Checkpoint):
        run_dir, folder = checkpoint.run_dir, checkpoint.path.parent
        held = folder / "backup.tmp-0"  # links: rotation may delete a file before the URL answers
        try:
            files = {"config.yaml": run_dir / "config.yaml"}  # first: it names the run
            for path in (*run_dir.glob("*"), *run_dir.glob("*/*")):  # next: a step needs its rows
                if LOGS.fullmatch(log := path.relative_to(run_dir).as_posix()):
                    files[log] = path
            if self.owner() not in ("", id_in(files["config.yaml"].read_bytes())):
                raise ConfigError("it now holds another run; each needs its own URL")
            (held / "checkpoints").mkdir(parents=True, exist_ok=True)
            for each in filter(None, (best_checkpoint(folder), checkpoint)):
                each.link_to(held / "checkpoints" / each.path.name)
            files |= {str(path.relative_to(held)): path for path in sorted(held.rglob("*.pt"))}
            kept = {f"checkpoints/{path.name}" for path in (*folder.iterdir(), *held.glob("*/*"))}
            there = self.fs.find("")  # some may have been deleted meanwhile
            for key, file in files.items():
                if self.sent.get(key) != (changed := file.stat().st_mtime_ns) or key not in there:
                    self.fs.makedirs(str(Path(key).parent), exist_ok=True)
                    draft = "upload~" if self.is_disk else key  # a kill leaves one, used again
                    self.fs.put_file(str(file), draft)
                    if self.is_disk:
                        self.fs.mv(draft, key)
                    self.sent[key] = changed
            found = remote_checkpoints(self.fs)
            of_these = (saved for saved in found.values() if not files.keys().isdisjoint(saved))
            for old in {*chain(*of_these)} - files.keys() | found.keys() - kept:  # also other parts
                self.fs.rm(old, recursive=True)
        except Exception as e:
            print(f"warning: no backup to {self.url}, training continues: {e}", flush=True)
        shutil.rmtree(held, ignore_errors=True)


@contextlib.contextmanager
def opened(url: str, option: str):
    """Yields fsspec's file system of the folder at `url`; its errors become ConfigErrors."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    try:
        fs, root = url_to_fs(url)
        yield DirFileSystem(root, fs)
    except Exception as e:  # each file system raises its own
        raise ConfigError(f"{option} {url}: {type(e).__name__}: {e}") from None


def remote_checkpoints(fs) -> dict[str, list[str]]:
    """The checkpoints in a backup, the best and then the oldest first, with the files of each."""
    found = {}
    for match in filter(None, map(SAVED.fullmatch, fs.find("checkpoints"))):
        found.setdefault(match[1], []).append(match[0])
    return dict(sorted(found.items(), key=lambda item: int(re.sub(r"\D", "", item[0]) or 0)))


def id_in(config: bytes) -> str:
    """The id of a run, from its config.yaml; "" if it has none."""
    found = re.search(rb"^# run: (\w+)$", config, re.MULTILINE)
    return found[1].decode() if found else ""


def run_id(run_dir: Path | None) -> str | None:
    """The run's id from its config.yaml; None if there is none."""
    config = run_dir and run_dir / "config.yaml"
    return id_in(config.read_bytes()) if config and config.is_file() else None


def download(url: str, to: Path):
    """Download a backup: its newest valid checkpoint, the best, the logs. Raises ConfigError."""
    draft = to / "checkpoints/backup.tmp-0"  # deleted by the next attempt if this one is cut off
    with opened(url, "--resume") as fs:
        others = {file for file in fs.find("")
                  if LOGS.fullmatch(file) or ("best" in file and SAVED.fullmatch(file))}
        for name, files in reversed(remote_checkpoints(fs).items()):
            for file in {*files, *others}:
                (draft / file).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(file, str(draft / file))
            wrong = Checkpoint(draft / name).find_damage()
            put_in_place(draft / name, to / name)  # before the logs, or the run would begin at 0
            if wrong:
                print(f"warning: {name}: {wrong}", flush=True)
                Checkpoint(to / name).set_aside()
                continue
            for file in others - {*files}:
                (to / file).parent.mkdir(exist_ok=True)
                (draft / file).rename(to / file)
            return delete(draft)
    raise ConfigError(f"--resume {url}: no valid checkpoint; expected a URL of --backup_to")
