"""Errors of disks and networks: retried where they may pass, explained where they persist."""

import errno
import random
import shutil
import sys
import time
from pathlib import Path

TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET,
             errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or file size limit
ATTEMPTS = 5


def retry(call, kind: type = OSError):
    """The result of `call()`, retried after transient errors: 0.5, 1, 2, 4 s later, plus jitter.

    An error with an errno is transient if it is in TRANSIENT. One without is transient only for
    another `kind` than OSError, as fsspec's own are, unless a file is missing or forbidden.
    """
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except kind as e:
            number = getattr(e, "errno", None)
            lasting = isinstance(e, (FileNotFoundError, PermissionError))
            passing = number in TRANSIENT if number else kind is not OSError and not lasting
            if not passing or attempt == ATTEMPTS - 1:
                raise
            retry.count += 1
            print(f"warning: {e}; tried again", file=sys.stderr, flush=True)
            # jitter of up to a half, not from `random` itself, whose state training may depend on
            time.sleep(0.5 * 2**attempt * (1 + random.SystemRandom().random() / 2))


retry.count = 0  # of this process


def disk_error(error: BaseException, folder: Path) -> str:
    """Describe an error in writing to `folder`: torch hides a full disk behind its own."""
    if not folder.is_dir():
        return f"{folder} is gone: was it moved or deleted while this run writes there?"
    cause = error
    while cause and getattr(cause, "errno", None) not in FULL:
        cause = cause.__cause__ or cause.__context__
    if not cause:
        return str(error)
    usage = shutil.disk_usage(folder)
    return (f"no space left on {folder}: {usage.free / 1e9:.2f} of {usage.total / 1e9:.1f} GB are "
            f"free ({cause.strerror})")
