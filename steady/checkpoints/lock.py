"""Which process may write to a folder."""

import fcntl
import os
import socket
from pathlib import Path

from steady.options import ConfigError


def acquire_lock(run_dir: Path, given: str = ""):
    """Become the one process that writes to run_dir, until the returned file is closed.

    A POSIX lock: forked loader processes do not inherit it, and it ends with the process, however
    that ends. It would also end if this process opened and closed the file once more.

    Raises ConfigError where another process holds it. given: the option that names run_dir.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.fdopen(os.open(run_dir / "lock", flags, 0o666), "a+")
    except OSError as e:
        raise ConfigError(f"{run_dir / 'lock'}: cannot be opened: {e.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samefile(file.fileno(), run_dir / "lock"):
            raise BlockingIOError("its owner has just moved it away, with --overwrite")
    except (BlockingIOError, PermissionError, FileNotFoundError):
        file.seek(0)
        owner = file.readline().strip() or "another process"
        raise ConfigError(f"{given or f'--out_dir {run_dir}'}: {owner} is writing there; stop it, "
                          "or choose another directory") from None
    except OSError as e:  # some network file systems have no locks
        print(f"warning: {run_dir} cannot be locked against a second run: {e}", flush=True)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
