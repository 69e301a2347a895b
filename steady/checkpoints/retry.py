"""Errors of disks and networks: retried where they may pass, explained where they persist."""

import errno
import shutil
import sys
import time
from pathlib import Path

from steady.watch.findings import si

TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET,
             errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or file size limit
ATTEMPTS = 5


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


def disk_error(error: BaseException, folder: Path) -> str:
    """Describe an error in writing to `folder`: torch hides a full disk behind its own."""
    if not folder.is_dir():
        return f"{folder} is gone: was it moved or deleted while this run writes there?"
    cause = lack_of_space(error)
    if not cause:
        return str(error)
    usage = shutil.disk_usage(folder)
    return (f"no space left on {folder}: {si(usage.free)}B of {si(usage.total)}B are free "
            f"({cause.strerror})")


def lack_of_space(error: BaseException | None) -> BaseException | None:
    """The error of a full disk behind this one."""
    while error and getattr(error, "errno", None) not in FULL:
        error = error.__cause__ or error.__context__
    return error
