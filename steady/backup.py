"""Copies of a run at a URL that fsspec knows: uploading beside training, downloading."""

import os
import re
import threading
from pathlib import Path

from steady.checkpoint import CHECKPOINT, checkpoint_step, find_corruption, link_or_copy, run_dir_of
from steady.cli import ConfigError
from steady.retry import retry

# Files of a run besides its checkpoints; anything else found in a backup is not downloaded.
LOGS = re.compile(r"config\.yaml|metrics\.jsonl|(tensorboard|tokenizer|hf)/[\w.-]*\w")


class Backup:
    """Uploads the newest checkpoint and the logs of a run to a URL, in a thread.

    Every `interval` steps; while one upload is under way, no other begins. Keeps the newest `keep`
    checkpoints there. Raises ConfigError for a URL that cannot be written.
    """

    def __init__(self, url: str, interval: int, keep: int):
        from fsspec.core import url_to_fs

        try:
            self.fs, self.root = url_to_fs(url)
            self.fs.makedirs(f"{self.root}/checkpoints", exist_ok=True)
        except Exception as e:  # each file system raises its own
            raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
        self.url, self.interval, self.keep = url, interval, keep
        self.thread = None
        self.begun = 0  # the step of the newest upload
        self.newest = None  # (step, path) of the newest checkpoint
        self.uploaded = None  # path of the newest checkpoint that is there

    def offer(self, step: int, path: Path, last: bool = False):
        """Upload a checkpoint if one is due; the last one always."""
        self.newest = step, path
        busy = self.thread and self.thread.is_alive()
        if not busy and (last or step // self.interval > self.begun // self.interval):
            self.begun = step
            self.thread = threading.Thread(target=self.upload, args=(path,), daemon=True)
            self.thread.start()

    def close(self):
        """Wait, then upload the last checkpoint and the logs as they are now."""
        if self.thread:
            self.thread.join()
        if self.newest:
            self.offer(*self.newest, last=True)
            self.thread.join()

    def upload(self, path: Path):
        run_dir = run_dir_of(path)
        logs = [run_dir / name for name in ("config.yaml", "metrics.jsonl")]
        for folder, names in (("tensorboard", "events.*"), ("tokenizer", "*.*"), ("hf", "*.json")):
            logs += (run_dir / folder).glob(names)
        remote = f"{self.root}/checkpoints"
        try:
            if (path, path.stat().st_mtime_ns) != self.uploaded:  # may be written again
                self.upload_checkpoint(path, f"{remote}/{path.name}")
            for log in filter(Path.exists, logs):
                name = log.relative_to(run_dir).as_posix()
                self.fs.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
                retry(lambda a=log, b=name: self.fs.put_file(str(a), f"{self.root}/{b}"), Exception)
            for old in remote_checkpoints(self.fs, remote)[: -self.keep]:
                self.fs.rm_file(old)
        except Exception as e:
            print(f"warning: no backup to {self.url}, training goes on: {e}", flush=True)

    def upload_checkpoint(self, path: Path, remote: str):
        held = path.with_name(f"{path.name}.backup-{os.getpid()}")
        link_or_copy(path, held)  # rotation may delete `path` meanwhile
        try:
            retry(lambda: self.fs.put_file(str(held), f"{remote}.part"), Exception)
            self.fs.mv(f"{remote}.part", remote)
            self.uploaded = path, path.stat().st_mtime_ns
        finally:
            held.unlink()


def remote_checkpoints(fs, folder: str) -> list[str]:
    """Paths of the step_N.pt files in a folder of an fsspec file system, oldest first."""
    names = [p for p in fs.ls(folder, detail=False) if CHECKPOINT.fullmatch(p.rpartition("/")[2])]
    return sorted(names, key=lambda p: checkpoint_step(Path(p)))


def download(url: str, to: Path, only: str | None = None) -> Path:
    """Download the backup at `url` into the folder `to`; returns its newest valid checkpoint.

    url: the folder that --backup_to named, or one checkpoint file in it. only: download nothing
    but this file, and return `to`. Raises ConfigError.
    """
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(url)
        if root.endswith(".pt"):
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
        return to
    for path in wanted:
        local = to / "checkpoints" / path.rpartition("/")[2]
        part = get(path, local.with_name(f"{local.name}.tmp-{os.getpid()}"))
        wrong = find_corruption(part)
        if not wrong:
            for log in logs:
                get(log, to / log[len(root) :].lstrip("/"))
            part.rename(local)
            return local
        print(f"warning: {path}: {wrong}", flush=True)
        part.unlink()
    raise ConfigError(f"--resume {url}: holds no valid checkpoint")
