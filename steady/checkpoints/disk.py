"""The disk: files that are valid or absent, errors retried or explained, one writer a folder."""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

from steady.options import ConfigError
from steady.watch.findings import si

TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET,
             errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or file size limit
# Errors from fsync of a directory where a network or user-space file system lacks it.
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
SHARED = "a file system that all hosts share"
DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts


@contextlib.contextmanager
def atomic_write(path: Path):
    """Yields a draft beside `path`, for a file or a folder; without an error it becomes `path`."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        put_in_place(draft, path)
    except OSError as e:
        if e.errno and not e.filename:  # errors in writing have none
            e.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            delete(draft)


def put_in_place(draft: Path, path: Path):
    """Rename a draft to `path`; a folder takes the place of another folder."""
    old = path.with_name(f"{path.name}.tmp-0-0")  # after a kill `adopt_drafts` takes one of the two
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
        os.link(path.resolve(), new)  # it follows no links
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
    while cause and getattr(cause, "errno", None) not in FULL:  # torch wraps it in its own errors
        cause = cause.__cause__ or cause.__context__
    if not cause or cause.errno == errno.EFBIG:  # a limit of the file system, or of ulimit -f
        return str(cause or error)
    usage = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
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
    file = os.fdopen(os.open(path, flags, 0o666), "a+", 1)  # flushed at the end of a line
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
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    return file
