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
# Answers to fsync of a directory on network and user-space file systems without it.
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
ATTEMPTS = 5

# --- files -----------------------------------------------------------------------------------


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


def find_corruption(path: Path) -> str | None:
    """Read every byte of a checkpoint file; returns its damage, or None. Raises OSError."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                return "its checksum is wrong"
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        # a place outside the file, or it has just been deleted
        if isinstance(e, OSError) and e.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return f"cut short, or not a checkpoint ({type(e).__name__})"
    return None


@contextlib.contextmanager
def atomic_write(path: Path):
    """Yields a draft beside `path` to write to; it replaces `path` unless an error is raised."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
        with contextlib.suppress(FileNotFoundError):  # rank 0 has synced and renamed the folder
            sync_directory(path.parent)  # the new name itself must be on the disk
    except OSError as e:
        if e.errno and not e.filename:  # as an error in writing has none
            e.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def sync_directory(path: Path):
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as e:
        if e.errno not in NO_SYNC:
            raise
    finally:
        os.close(directory)


def link(path: Path, new: Path):
    """Make `new` the same file, or a copy on a file system without hard links."""
    with atomic_write(new) as draft:
        try:
            os.link(path, draft)
        except OSError:
            shutil.copyfile(path, draft)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())


# --- errors ----------------------------------------------------------------------------------


def retry(call):
    """The result of `call()`, retried after transient errors: 0.5, 1, 2, 4 s later."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except OSError as e:
            if e.errno not in TRANSIENT or attempt == ATTEMPTS - 1:
                raise
            retry.count += 1
            print(f"warning: {e}; tried again", file=sys.stderr, flush=True)
            time.sleep(0.5 * 2**attempt)


retry.count = 0  # of this process


def lack_of_space(error: BaseException | None) -> BaseException | None:
    """The error of a full disk behind this one: torch hides it behind its own."""
    while error and getattr(error, "errno", None) not in FULL:
        error = error.__cause__ or error.__context__
    return error


def disk_error(error: BaseException, folder: Path) -> str:
    """Describe an error in writing to `folder`."""
    if not folder.is_dir():
        return f"{folder} is gone"
    if not (cause := lack_of_space(error)):
        return str(error)
    usage = shutil.disk_usage(folder)
    return (f"no space left on {folder}: {si(usage.free)}B of {si(usage.total)}B are free "
            f"({cause.strerror})")


# --- one writer ------------------------------------------------------------------------------


def acquire_lock(folder: Path, given: str = ""):
    """Become the only process that writes to `folder`, until the returned file is closed.

    A POSIX lock: forked loader processes do not inherit it, and it ends with the process, or if
    this process opens and closes the file once more. Raises ConfigError if another process holds
    it. given: the option that names the folder.
    """
    path = folder / "lock"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o666), "a+")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be opened: {e.strerror}") from None
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
