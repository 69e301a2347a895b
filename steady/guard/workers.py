"""Loader processes: signals are the trainer's, and a batch that finds no room is an error."""

import signal

import torch
from torch.utils.data import get_worker_info

from steady.options import Failed


def leave_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach every process of the group; the trainer ends its loaders itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


def share(batch: tuple) -> tuple:
    """In a loader process, copy a batch to shared memory, as the queue to the trainer would: its
    thread drops a batch that finds no room there, and the trainer waits for ever. Raises Failed.
    """
    try:
        for tensor in filter(torch.is_tensor, batch if get_worker_info() else ()):
            tensor.share_memory_()
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise Failed(f"a loader process cannot hand over a batch in /dev/shm: {reason}; make it "
                     "larger (docker run --shm-size 1g), or take --num_workers 0") from None
    return batch
