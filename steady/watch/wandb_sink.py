"""Weights & Biases, in a process of its own: nothing that it does or waits for delays training.

    python -m steady.watch.wandb_sink FOLDER    settings, then rows: lines of JSON on standard input
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

START_SECONDS = 10  # what W&B may take to be reached
END_SECONDS = 30  # and to take the last rows
MOST_UNSENT = 1 << 20  # bytes that wait for it; the rows after that are left out


class WandbSink:
    """Hands rows to the process, which itself says why if it ends before training does."""

    def __init__(self, folder: Path, settings: dict):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steady.watch.wandb_sink", folder.resolve()],
            stdin=subprocess.PIPE, bufsize=0, cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,  # away from the terminal's Ctrl-C
        )
        os.set_blocking(self.process.stdin.fileno(), False)
        self.unsent = b""
        self.write(settings)

    def check(self):
        """Raises OSError where it was ended, and so has not said why."""
        if self.process.poll():
            raise ChildProcessError(f"its process has ended with {self.process.returncode}")

    def write(self, row: dict):
        self.check()
        if len(self.unsent) < MOST_UNSENT:
            self.unsent += json.dumps(row, default=str).encode() + b"\n"
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.unsent:
                self.unsent = self.unsent[os.write(self.process.stdin.fileno(), self.unsent) :]

    def close(self):
        """Raises OSError if it does not take the last rows."""
        try:
            try:
                self.process.communicate(self.unsent, min(2, END_SECONDS))
            except subprocess.TimeoutExpired:
                print(f"waiting up to {END_SECONDS} s for W&B to take the last rows", flush=True)
                self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise TimeoutError(f"it did not take the last rows within {END_SECONDS} s; `wandb "
                               "sync` sends them") from None
        self.check()


def main(folder: str):
    try:
        import wandb

        run = wandb.init(
            project="steady", dir=folder, config=json.loads(sys.stdin.readline()),
            settings=wandb.Settings(init_timeout=START_SECONDS, console="off"),
        )
        run.define_metric("*", step_metric="step")  # W&B's own steps cannot go back
        for line in sys.stdin:
            run.log(json.loads(line))
        signal.alarm(END_SECONDS + 5)  # where training was killed, nobody waits for this process
        run.finish()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"warning: W&B unreachable; continuing without it ({reason})", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
