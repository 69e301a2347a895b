"""The disk: files that are valid or absent, errors retried or explained, one writer a folder."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import time
import zipfile
from pathlib import Path

from steady.options import ConfigError
from steady.watch.findings import si

TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET,
             errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or file size limit
# Errors from fsync of a directory where a network or user-space file system lacks it.
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts


def write_checkpoint(path: Path, state: dict):
    """Write `state`, verify every byte on the disk, and only then give the file its name."""
    import torch  # here: a report starts two seconds sooner without it

    with atomic_write(path) as draft:
        with open(draft, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(AttributeError, OSError):  # so that the disk is read again
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if wrong := find_corruption(draft):
            raise OSError(f"{draft}: cannot be read back: {wrong}")


def read_checkpoint(path: Path):
    """The state in a file; its tensors are mapped, not read."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def find_corruption(path: Path) -> str | None:
    """Read every byte of a checkpoint file; returns its damage, or None. Raises OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                return "its checksum is wrong"
        read_checkpoint(path)
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        # a place outside the file, or it has just been deleted
        if isinstance(e, OSError) and e.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return f"cut short, or not a checkpoint ({type(e).__name__})"
    return None


@contextlib.contextmanager
def atomic_write(path: Path):
    """Yields a draft beside `path`, for a file or a folder; without an error it becomes `path`."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        put_in_place(draft, path)
    except OSError as e:
        if e.errno and not e.filename:  # as an error in writing has none
            e.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            delete(draft)


def put_in_place(draft: Path, path: Path):
    """Rename a draft to `path`; a folder takes the place of another folder."""
    old = path.with_name(f"{path.name}.tmp-0-0")  # after a kill `adopt_drafts` takes one of both
    if draft.is_dir():
        sync(draft)
        if path.is_dir():
            path.rename(old)
    os.replace(draft, path)
    with contextlib.suppress(FileNotFoundError):  # rank 0 has synced and renamed the folder
        sync(path.parent)  # the new name itself must be on the disk
    delete(old)


def sync(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def link(path: Path, new: Path):
    """Make `new` the same file, or a copy on a file system without hard links."""
    try:
        os.link(path, new)
    except OSError:
        shutil.copyfile(path, new)
        sync(new)


def delete(path: Path):
    """Delete a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def retry(call):
    """The result of `call()`, retried after transient errors."""
    for delay in DELAYS:
        try:
            return call()
        except OSError as e:
            if e.errno not in TRANSIENT:
                raise
            print(f"warning: {e}; tried again", file=sys.stderr, flush=True)
        time.sleep(delay)
    return call()


def disk_error(error: BaseException, folder: Path, advice: str = "") -> str:
    """Describe an error in writing to `folder`. advice: added if the disk is full."""
    cause = error
    while cause and getattr(cause, "errno", None) not in FULL:  # torch hides it behind its own
        cause = cause.__cause__ or cause.__context__
    if not cause:
        return str(error)
    usage = shutil.disk_usage(folder)
    return (f"no space left on {folder}: {si(usage.free)}B of {si(usage.total)}B are free "
            f"({cause.strerror}){advice}")


def acquire_lock(folder: Path, given: str = ""):
    """Become the only process that writes to `folder`, until the returned file is closed.

    A POSIX lock: forked loader processes do not inherit it, and it ends with the process, or if
    this process opens and closes the file once more. given: the option that names the folder.
    Raises ConfigError if another process holds it, OSError without permission to write.
    """
    path = folder / "lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    file = os.fdopen(os.open(path, flags, 0o666), "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samefile(file.fileno(), path):
            raise BlockingIOError("its owner has just moved it away, with --overwrite")
    except (BlockingIOError, PermissionError, FileNotFoundError):
        file.seek(0)
        owner = file.readline().strip() or "another process"
        raise ConfigError(f"{given or f'--out_dir {folder}'}: {owner} is writing there; stop it, "
                          "or choose another directory") from None
    except OSError as e:  # some network file systems have no locks
        print(f"warning: {folder} cannot be locked against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
