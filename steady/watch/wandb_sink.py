"""Weights & Biases, in a process of its own: nothing that it does or waits for delays training.

    python -m steady.watch.wandb_sink RUN_DIR FROM SETTINGS

It sends the rows that are added to metrics.jsonl after the byte FROM until its standard input ends,
with the process that trains. SETTINGS: JSON.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

START_SECONDS = 10  # what W&B may take to be reached
END_SECONDS = 30  # and to take the last rows


def scalars(row: dict) -> dict:
    """What of a row of metrics.jsonl is drawn as charts; the numbers of an anomaly are not."""
    return {} if "anomaly" in row else {
        name: value for name, value in row.items()
        if isinstance(value, (int, float)) and not name.startswith("limit/")}


def run_id(run_dir: Path) -> str:
    """The id in its config.yaml, the same after a resume; "" where there is none."""
    file = run_dir / "config.yaml"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    found = re.search(r"^# run: (\w+)$", text, re.MULTILINE)
    return found[1] if found else ""


def identity(run_dir: Path) -> dict:
    """One run of W&B over resumes and rollbacks; what the user's environment sets is kept."""
    ours = dict(project="steady", id=run_id(run_dir) or None, name="/".join(run_dir.parts[-2:]))
    names = dict(project="WANDB_PROJECT", id="WANDB_RUN_ID", name="WANDB_NAME")
    return {k: v for k, v in ours.items() if not os.environ.get(names[k])}


def start(run_dir: Path, settings: dict) -> subprocess.Popen:
    """The process, which itself says why if it ends before training does."""
    size = (run_dir / "metrics.jsonl").stat().st_size
    return subprocess.Popen(
        [sys.executable, "-m", "steady.watch.wandb_sink", run_dir.resolve(), str(size),
         json.dumps(settings, default=str)],
        stdin=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,  # away from the terminal's Ctrl-C
    )


def finish(process: subprocess.Popen):
    """Raises OSError if it does not take the last rows, or was killed and has not said why."""
    process.stdin.close()
    try:
        status = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise TimeoutError(f"it did not take the last rows within {END_SECONDS} s; `wandb sync` "
                           "sends them") from None
    if status:
        raise ChildProcessError(f"its process has ended with {status}")


def main(run_dir: str, first_byte: str, settings: str):
    try:
        import wandb

        with contextlib.suppress(OSError):  # until a predecessor has sent its rows
            fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX)
        run = wandb.init(
            **identity(Path(run_dir)), resume="allow", dir=run_dir, config=json.loads(settings),
            settings=wandb.Settings(init_timeout=START_SECONDS, console="off"),
        )
        run.define_metric("*", step_metric="step")  # W&B's own steps cannot go back
        with open(Path(run_dir) / "metrics.jsonl", "rb") as file:
            file.seek(int(first_byte))
            torn, ended = b"", False
            while not ended:
                ended = select.select([sys.stdin], [], [], 1.0)[0]
                *lines, torn = (torn + file.read()).split(b"\n")
                for row in map(json.loads, lines):
                    run.log(scalars(row))
        signal.alarm(END_SECONDS + 5)  # where training was killed, nobody waits for this process
        run.finish()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"warning: W&B unreachable; continuing without it ({reason})", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
