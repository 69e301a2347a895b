"""Ctrl-C where no run handles it: during the imports, which take seconds, and in loader processes.

Imports nothing heavy itself.
"""

import os
import signal


def during_imports():
    """From here on, one word instead of a traceback."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, interrupted)


def after_imports():
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)


def leave_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach every process of the group; the trainer ends its loaders itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
