"""Ctrl-C during the imports, which take seconds: one word instead of a traceback.

Imports nothing heavy itself.
"""

import os
import signal


def during_imports():
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, interrupted)


def after_imports():
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)
