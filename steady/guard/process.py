"""How a process begins and ends: Ctrl-C, closed streams, a torchrun that is gone, exit codes.

    0 finished · 1 failed, with a line that says why · 2 wrong flags, files or data, in one line
    128 + n after signal n, once the checkpoint is on the disk
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial

from steady.guard.neighbours import make_room
from steady.watch.screen import Printable, Screen

# To start loader processes: a fork server's import everything anew, and outlive a killed parent.
FORK = "fork" if sys.platform == "linux" else None


def begin():
    """Call before the slow imports (this module has none). They run without garbage collection."""
    gc.disable()  # saves a tenth of the start-up
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not if it is ignored
        # torch's search for a rank 0 that is gone never comes back to Python
        signal.signal(signal.SIGINT, signal.SIG_DFL if several_ranks() else end_at_once)
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed: or the next file opened would take its place
            setattr(sys, stream, open(os.devnull, mode))
    threading.Thread(target=make_room, daemon=True).start()
    if os.getpid() == 1:  # in a container: there, signals without a handler do nothing
        signal.signal(signal.SIGTERM, end_at_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # else they end a starting process
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        threading.Thread(target=stop_with_torchrun, args=(os.getppid(),), daemon=True).start()


def start(main: str):
    """Import `main`, a "module:function", and end the process with its exit code."""
    begin()
    import pkgutil

    function = pkgutil.resolve_name(main)
    gc.enable()
    leave(function(sys.argv[1:]))


def end_at_once(number: int, frame):
    with contextlib.suppress(OSError):  # nobody may read it
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


def stop_with_torchrun(launcher: int):
    """SIGTERM this process once torchrun was killed: it would even join the next launch."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    with contextlib.suppress(OSError):  # nobody may read it
        os.write(2, f"rank {os.environ.get('RANK')}: torchrun is gone; stopping\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)


def leave_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach every process of the group; the trainer ends its loaders itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


# --- the end ---------------------------------------------------------------------------------


def run(main):
    """Train, and end this process with the exit code of `main`, given the command line."""
    for name in "stdout", "stderr":
        with contextlib.suppress(OSError):  # not a file, as in a notebook
            setattr(sys, name, Screen(getattr(sys, name)))
    gc.freeze()  # imported modules stay
    gc.enable()
    leave(exit_code(main, sys.argv[1:]))


def run_command(prog: str, main, argv: list[str], on_ctrl_c: str = "") -> int:
    """The exit code of another command. `| head` may close its output early."""
    def print_all(argv: list[str]) -> int:
        code = 0
        try:
            try:
                code = main(argv) or 0
            except SystemExit as e:  # --help
                code = e.code or 0
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or flushing at exit fails again
        return code

    with (contextlib.redirect_stdout(Printable(sys.stdout)),
          contextlib.redirect_stderr(Printable(sys.stderr))):
        return exit_code(print_all, argv, prog, (PermissionError,), on_ctrl_c)  # others' files


def exit_code(
        main, argv: list[str], prog: str = "train.py", also_expected: tuple = (),
        on_ctrl_c: str = "interrupted; --auto_resume continues from a checkpoint, if any") -> int:
    """The exit code of `main(argv)`; expected errors are printed as one line."""
    from steady.options import ConfigError, Failed

    if several_ranks():
        from steady.ranks.ranks import leave_group, lost_connection, say_once
    say = say_once if several_ranks() else partial(print, file=sys.stderr)
    try:
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main(argv)
        if several_ranks():
            leave_group()
        return code
    except (ConfigError, *also_expected) as e:
        say(f"{prog}: error: {' '.join(str(e).splitlines())}")
        return 2
    except Failed as e:
        say(f"{prog}: failed: {e}")
        return 1
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}".rstrip(), file=sys.stderr)
        return 130
    except Exception as e:
        lost = several_ranks() and lost_connection(e)
        kind = "another rank is gone" if lost else type(e).__name__
        if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):  # say, no gcc
            kind += " (--no_compile trains without it)"
        print(f"{prog}: failed: {kind}: {str(e).splitlines()[0] if lost else e}", file=sys.stderr)
        if not lost:
            traceback.print_exc()
        return 1


def several_ranks() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def leave(code: int):
    """End the process; a rank at once, or a waking thread of gloo or NCCL may abort it."""
    import multiprocessing  # here: importing it takes 15 ms
    for loader in filter(lambda each: each.daemon, multiprocessing.active_children()):
        loader.kill()  # a stuck one ignores SIGTERM, and Python would wait for it
    if several_ranks():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # else: "terminate called without an active exception"
    gc.unfreeze()  # or C++ objects that are frozen are called leaked ("nanobind: leaked ...")
    sys.exit(code)
