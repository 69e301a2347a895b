"""Checkpoints: a file is whole or it is not there. Writing, checking, finding, copying elsewhere.

    python train.py --check_checkpoints runs/001    lists them: step, size, loss, valid or not

This module knows files and dicts of tensors and nothing of training. A checkpoint is what
`torch.save` writes, with a checksum of the whole file in the comment that a zip may end with, so
that `torch.load` and `unzip` read it like any other.
"""

import contextlib
import os
import re
import shutil
import socket
import struct
import threading
import zipfile
import zlib
from pathlib import Path

import torch

from config import ConfigError, retry

CHECKPOINT = re.compile(r"step_(\d{8,})\.pt")
DRAFT = re.compile(r"(step_\d{8,}|best)\.pt\.(tmp|backup)-\d+")
SEAL = struct.Struct("<16sI")  # a name, CRC-32 of all that stands before
SEAL_NAME = b"steady checksum:"
ZIP_END = struct.Struct("<4s16sH")  # signature, what does not matter here, length of the comment
CHUNK_BYTES = 1 << 24
MAX_FAILURES = 3  # saves in a row that may fail before training stops


# --- one file --------------------------------------------------------------------------------


class SealedFile:
    """What torch.save writes to, from beginning to end: passes bytes on, keeps their checksum."""

    def __init__(self, file):
        self.file, self.crc, self.last = file, 0, b""

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if self.last:  # held back: the last bytes are changed by `seal`
            self.pass_on(self.last)
        self.last = bytes(data[-ZIP_END.size :])
        self.pass_on(data[: -ZIP_END.size])
        return len(data)

    def pass_on(self, data):
        self.crc = zlib.crc32(data, self.crc)
        self.file.write(data)

    def flush(self):
        self.file.flush()

    def seal(self):
        """Announce the comment in the zip's last record, and write it."""
        signature, rest, length = ZIP_END.unpack(self.last)
        assert signature == b"PK\5\6" and length == 0, "torch.save has changed its format"
        self.pass_on(ZIP_END.pack(signature, rest, SEAL.size))
        self.file.write(SEAL.pack(SEAL_NAME, self.crc))
        self.file.flush()


def write_checkpoint(path: Path, state: dict):
    """Write `state`, see that every byte of it can be read back, and only then give it its name."""
    with replacing(path) as draft:
        with open(draft, "wb") as file:
            sealed = SealedFile(file)
            torch.save(state, sealed)
            sealed.seal()
            os.fsync(file.fileno())
            forget_cached(file.fileno())
        wrong = problem(draft)
        if wrong:
            raise OSError(f"{draft}: {wrong}: what was read back is not what was written")


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint file, having read every byte of it; None if nothing is.

    A file without our checksum, as torch.save alone makes it, is checked by those of its records.
    """
    size = path.stat().st_size
    if size < SEAL.size + ZIP_END.size:
        return f"only {size} bytes"
    with open(path, "rb") as file:
        crc, left = 0, size - SEAL.size
        while left:
            data = file.read(min(CHUNK_BYTES, left))
            if not data:
                return "it became shorter while it was read"
            crc, left = zlib.crc32(data, crc), left - len(data)
        seal = file.read()
        forget_cached(file.fileno())
    if seal[: len(SEAL_NAME)] == SEAL_NAME:
        return None if SEAL.unpack(seal) == (SEAL_NAME, crc) else "its checksum is wrong"
    signature, _, comment = ZIP_END.unpack((data + seal)[-ZIP_END.size :])
    if signature != b"PK\5\6" or comment:
        return "its end is missing"
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as e:  # of a damaged zip zipfile raises what it happens to stumble over
        return f"not a whole zip file ({e})"
    return f"{bad} in it is damaged" if bad else None


def forget_cached(descriptor: int):
    """Let what is read next come from the disk, and leave the memory to the training data."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def replacing(path: Path):
    """A draft to write beside `path`, which takes its place when all went well."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)  # the new name itself must be on the disk
        os.close(directory)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


# --- the files of a run ----------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The step_N.pt files of a run, oldest first; a link or another name is not one of them."""
    found = [p for p in folder.glob("step_*.pt") if CHECKPOINT.fullmatch(p.name)]
    return sorted((p for p in found if p.is_file() and not p.is_symlink()), key=checkpoint_step)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def checkpoint_step(path: Path) -> int:
    return int(CHECKPOINT.fullmatch(path.name)[1])


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in; None for a file that was taken elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def require_whole(path: Path):
    """Raises ConfigError where a checkpoint is damaged."""
    wrong = retry(lambda: problem(path))
    if wrong:
        raise ConfigError(f"{path}: not a checkpoint that can be read: {wrong}")


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, with the damaged ones after it set aside.

    None where there are none at all. Raises ConfigError, and changes nothing, where all are bad.
    """
    bad = []
    for path in reversed(list_checkpoints(folder)):
        wrong = retry(lambda path=path: problem(path))
        if not wrong:
            for damaged, why in bad:
                damaged.rename(damaged.with_name(damaged.name + ".corrupt"))
                print(f"warning: {damaged}: {why}; set aside as .corrupt", flush=True)
            return path
        bad.append((path, wrong))
    if bad:
        raise ConfigError(
            f"{folder}: no checkpoint is whole ({'; '.join(f'{p.name}: {why}' for p, why in bad)})"
            f". Bring one back from a backup, or start afresh with --overwrite"
        )
    return None


def rotate(folder: Path, keep: int, keep_every: int):
    """Delete all but the newest `keep` checkpoints, and those of every `keep_every` steps."""
    for old in list_checkpoints(folder)[:-keep]:
        if not keep_every or checkpoint_step(old) % keep_every:
            old.unlink()


def remove_drafts(folder: Path):
    """What a process that was killed had not finished; only for the one that holds the lock."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def lock(run_dir: Path):
    """Be the one process that writes to run_dir, until the file that this returns is closed.

    A POSIX lock: forked loader processes do not inherit it, and it ends with the process, however
    that ends. It would also end if this process opened and closed the file once more.

    Raises ConfigError where another process has it.
    """
    import fcntl

    file = open(run_dir / "lock", "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().partition(",")[0] or "another process"
        raise ConfigError(
            f"--out_dir {run_dir}: {owner} is writing there; stop it, or choose another directory"
        ) from None
    except OSError as e:  # some network file systems have no locks
        print(f"warning: {run_dir} cannot be locked against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.write(f", started by {os.getppid()}\n")  # under torchrun the same after a restart
    file.flush()
    return file


def is_of_my_launcher(run_dir: Path) -> bool:
    """Whether the last to lock run_dir was started by the process that has started this one."""
    try:
        return (run_dir / "lock").read_text().endswith(f", started by {os.getppid()}\n")
    except OSError:
        return False


def table(run_dir: Path) -> tuple[str, bool]:
    """(a line for each checkpoint in a run directory, whether all are whole)."""
    folder = run_dir / "checkpoints" if (run_dir / "checkpoints").is_dir() else run_dir
    if not folder.is_dir():
        raise ConfigError(f"--check_checkpoints {run_dir}: no such directory")
    lines, fine = [f"{'file':22s} {'step':>9s} {'MB':>9s} {'best loss':>9s}"], True
    best = [p for p in [folder / "best.pt"] if p.is_file()]
    for path in [*list_checkpoints(folder), *best, *sorted(folder.glob("*.corrupt"))]:
        wrong, step, loss = problem(path), "", ""
        if not wrong:
            state = torch.load(path, map_location="meta", weights_only=True)
            step, loss = state["step"], f"{state['best_loss']:.4f}"
        fine = fine and not wrong
        lines.append(f"{path.name:22s} {step:>9} {path.stat().st_size / 1e6:9.1f} {loss:>9s}  "
                     f"{'INVALID: ' + wrong if wrong else 'valid'}")  # fmt: skip
    return "\n".join(lines), fine


def compare(a, b, name: str = "") -> tuple[int, list[str]]:
    """(number of leaves, names of those that differ in a bit) of two nested states."""
    if isinstance(a, (dict, list, tuple)) and type(a) is type(b) and len(a) == len(b):
        items = a.items() if isinstance(a, dict) else enumerate(a)
        found = [compare(v, b.get(k) if isinstance(b, dict) else b[k], f"{name}.{k}".lstrip("."))
                 for k, v in items]  # fmt: skip
        return sum(n for n, _ in found), [d for _, ds in found for d in ds]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    else:
        same = a == b
    return 1, [] if same else [name]


# --- writing beside training -----------------------------------------------------------------


class Writer:
    """Writes checkpoints in a thread: training waits for a copy to host memory, not for the disk.

    The host memory is allocated once. One write is in flight at most; a save that finds one waits.
    backup: a Backup, which is offered each file that was written and verified.
    """

    def __init__(self, folder: Path, keep: int, keep_every: int = 0, backup=None):
        self.folder, self.keep, self.keep_every, self.backup = folder, keep, keep_every, backup
        self.buffers, self.thread, self.step = {}, None, 0
        self.failures = 0  # in a row

    def save(self, step: int, state: dict, is_best: bool = False):
        """Take a copy of `state` and have it written as step_N.pt, and as best.pt.

        Raises OSError where too many saves in a row have failed.
        """
        if self.thread and self.thread.is_alive():
            print(f"step {step}: waiting until the checkpoint of step {self.step} is written",
                  flush=True)  # fmt: skip
        self.wait()
        if self.failures >= MAX_FAILURES:
            raise OSError(f"{self.folder}: {self.failures} checkpoints in a row could not be "
                          "written")  # fmt: skip
        weights = [t for t in state["model"].values() if t.is_floating_point()]
        size = torch.stack(torch._foreach_norm(weights)).sum()  # not finite where a weight is not
        copied, event = self.to_host(dict(state, weights_size=size), "", {}), None
        if size.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.step = step
        self.thread = threading.Thread(target=self.write, args=(step, copied, event, is_best))
        self.thread.start()

    def to_host(self, value, key: str, seen: dict):
        """`value` with each tensor in it copied to the buffer that belongs to its place."""
        if isinstance(value, dict):
            return {k: self.to_host(v, f"{key}/{k}", seen) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_host(v, f"{key}/{i}", seen) for i, v in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and place in seen:  # tied weights stay one tensor
            return seen[place]
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.buffers[key] = buffer
        seen[place] = buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        return buffer

    def write(self, step: int, state: dict, event, is_best: bool):
        path = path_of(self.folder, step)
        try:
            if event:
                event.synchronize()
            if not state.pop("weights_size").isfinite():
                print(f"warning: step {step}: the weights are not finite; not saved", flush=True)
                return
            retry(lambda: write_checkpoint(path, state))
            if is_best:
                with replacing(self.folder / "best.pt") as draft:
                    link_or_copy(path, draft)
            rotate(self.folder, self.keep, self.keep_every)
            self.failures = 0
        except Exception as e:
            self.failures += 1
            print(f"warning: step {step}: the checkpoint could not be written, training goes on "
                  f"({self.failures} of {MAX_FAILURES}): {e}", flush=True)  # fmt: skip
            return
        if self.backup:
            self.backup.offer(step, path)

    def wait(self):
        """Until what is being written is on the disk."""
        if self.thread:
            self.thread.join()

    def close(self, copy: bool):
        """Wait for the disk and, with `copy`, for the backup of what is newest now.

        Raises OSError where the last checkpoint could not be written.
        """
        self.wait()
        if self.backup and copy:
            self.backup.close()
        if self.failures:
            raise OSError(f"{self.folder}: the last checkpoint, of step {self.step}, is not there")


def link_or_copy(path: Path, draft: Path):
    try:
        os.link(path, draft)
    except OSError:  # no hard links on this file system
        shutil.copyfile(path, draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())


# --- another place ---------------------------------------------------------------------------


class Backup:
    """Copies the newest checkpoint and the logs of a run to a URL that fsspec knows, in a thread.

    Every `interval` steps, one copy at a time: while one is under way no other is begun.
    """

    def __init__(self, url: str, interval: int, keep: int):
        from fsspec.core import url_to_fs

        try:
            self.fs, self.root = url_to_fs(url)
            self.fs.makedirs(f"{self.root}/checkpoints", exist_ok=True)
        except Exception as e:  # each file system has errors of its own
            raise ConfigError(f"--backup_to {url}: {type(e).__name__}: {e}") from None
        self.url, self.interval, self.keep = url, interval, keep
        self.copied, self.thread, self.newest = 0, None, None
        self.uploaded = None  # the checkpoint that is there already

    def offer(self, step: int, path: Path, last: bool = False):
        """A checkpoint to copy, where it is time; the last one always is."""
        self.newest = step, path
        busy = self.thread and self.thread.is_alive()
        if not busy and (last or step // self.interval > self.copied // self.interval):
            self.copied = step
            self.thread = threading.Thread(target=self.copy, args=(path,), daemon=True)
            self.thread.start()

    def close(self):
        """Copy what the last checkpoint and the logs have become."""
        if self.thread:
            self.thread.join()
        if self.newest:
            self.offer(*self.newest, last=True)
            self.thread.join()

    def copy(self, path: Path):
        run_dir = run_of(path)
        logs = [run_dir / name for name in ("config.yaml", "metrics.jsonl")]
        logs += (run_dir / "tensorboard").glob("events.*")
        remote = f"{self.root}/checkpoints"
        try:
            if path != self.uploaded:
                self.upload(path, f"{remote}/{path.name}")
            for log in filter(Path.exists, logs):
                name = log.relative_to(run_dir).as_posix()
                self.fs.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
                retry(lambda a=log, b=name: self.fs.put_file(str(a), f"{self.root}/{b}"), Exception)
            for old in remote_checkpoints(self.fs, remote)[: -self.keep]:
                self.fs.rm_file(old)
        except Exception as e:
            print(f"warning: no backup to {self.url}, training goes on: {e}", flush=True)

    def upload(self, path: Path, remote: str):
        held = path.with_name(f"{path.name}.backup-{os.getpid()}")
        link_or_copy(path, held)  # rotation may delete `path` meanwhile
        try:  # under a name of its own until it is whole
            retry(lambda: self.fs.put_file(str(held), f"{remote}.part"), Exception)
            self.fs.mv(f"{remote}.part", remote)
            self.uploaded = path
        finally:
            held.unlink()


def remote_checkpoints(fs, folder: str) -> list[str]:
    """Paths of the step_N.pt files in a folder of a file system of fsspec, oldest first."""
    names = [p for p in fs.ls(folder, detail=False) if CHECKPOINT.fullmatch(p.rpartition("/")[2])]
    return sorted(names, key=lambda p: checkpoint_step(Path(p)))


def download(url: str, to: Path, only: str | None = None) -> Path:
    """Bring the backup of a run at `url` into the folder `to`; returns its newest whole checkpoint.

    url: the folder that --backup_to named, or one checkpoint file in it. only: no more than this
    file, and `to` is returned. Raises ConfigError.
    """
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(url)
        if root.endswith(".pt"):
            wanted, root = [root], root.rpartition("/")[0].removesuffix("/checkpoints")
        else:
            wanted = remote_checkpoints(fs, f"{root}/checkpoints")[::-1]
        logs = [p for p in fs.find(root) if "/checkpoints/" not in p]
    except Exception as e:
        raise ConfigError(f"--resume {url}: {type(e).__name__}: {e}") from None

    def get(path: str, local: Path) -> Path:
        local.parent.mkdir(parents=True, exist_ok=True)
        retry(lambda: fs.get_file(path, str(local)), Exception)
        return local

    if only:
        for log in (p for p in logs if p.rpartition("/")[2] == only):
            get(log, to / only)
        return to
    for path in wanted:
        local = get(path, to / "checkpoints" / path.rpartition("/")[2])
        wrong = problem(local)
        if not wrong:
            for log in logs:
                get(log, to / log[len(root) :].lstrip("/"))
            return local
        print(f"warning: {path}: {wrong}", flush=True)
        local.unlink()
    raise ConfigError(f"--resume {url}: holds no checkpoint that is whole")
