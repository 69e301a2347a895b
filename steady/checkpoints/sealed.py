"""One file, written so that it is valid or absent: a draft, its checksum, the disk, its name.

The checksum of all of it is appended to the zip file that torch.save writes, so that `torch.load`
and `unzip` read the file like any other.
"""

import contextlib
import errno
import os
import shutil
import struct
import zlib
from pathlib import Path

import torch

SEAL = struct.Struct("<16sI")  # SEAL_NAME, CRC-32 of everything before the seal
SEAL_NAME = b"steady checksum:"
CHUNK_BYTES = 1 << 24
# Answers to fsync of a directory on network and user-space file systems, which cannot do it.
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)


class ChecksummedFile:
    """A file for torch.save to write to; keeps a checksum of its bytes."""

    def __init__(self, file):
        self.file, self.crc = file, 0

    def write(self, data) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


def write_checkpoint(path: Path, state: dict):
    """Write `state`, verify every byte on the disk, and only then give the file its name."""
    with atomic_write(path) as draft:
        with open(draft, "wb") as file:
            sealed = ChecksummedFile(file)
            torch.save(state, sealed)
            file.write(SEAL.pack(SEAL_NAME, sealed.crc))
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(AttributeError, OSError):  # so that the disk is read again
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        wrong = find_corruption(draft)
        if wrong:
            raise OSError(f"{draft}: {wrong}: what was read back is not what was written")


def find_corruption(path: Path) -> str | None:
    """Read every byte of a checkpoint file; returns what is wrong with it, or None."""
    crc, left = 0, max(0, path.stat().st_size - SEAL.size)
    with open(path, "rb") as file:
        while left:
            data = file.read(min(CHUNK_BYTES, left))
            if not data:
                return "it became shorter while it was being read"
            crc, left = zlib.crc32(data, crc), left - len(data)
        seal = file.read()
    if not seal.startswith(SEAL_NAME):
        return "its checksum is missing: cut short, or not written by this program"
    return None if seal == SEAL.pack(SEAL_NAME, crc) else "its checksum is wrong"


@contextlib.contextmanager
def atomic_write(path: Path):
    """Yields a draft beside `path` to write to, which replaces it if nothing was raised."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
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
