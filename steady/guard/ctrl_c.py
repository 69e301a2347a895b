"""How a command starts: Ctrl-C while it imports, which takes seconds, and streams that are closed.

And Ctrl-C in loader processes, and the end of torchrun, which sends no signal. Imports nothing
heavy itself.
"""

import os
import signal
import sys
import threading
import time


def begin():
    """Call before what takes long to import."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, interrupted)
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed: or the next file opened would take its place
            setattr(sys, stream, open(os.devnull, mode))
    stop_with_torchrun()


def start(main: str):
    """Import `main`, a "module:function", and end the process with its exit code."""
    begin()
    import pkgutil

    sys.exit(pkgutil.resolve_name(main)(sys.argv[1:]))


def after_imports():
    """From here on, Ctrl-C is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)


def leave_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach every process of the group; the trainer ends its loaders itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stop_with_torchrun():
    """From here on, SIGTERM to this process when its parent has changed: torchrun was killed.

    Its ranks would stay, and even join the next launch on the same port. Not without torchrun: a
    process that outlives its shell, as with nohup, is meant to.
    """
    def watch(launcher: int):
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.write(2, f"rank {os.environ.get('RANK')}: torchrun is gone, so it stops\n".encode())
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.get("TORCHELASTIC_RUN_ID"):
        threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
