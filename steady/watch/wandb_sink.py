"""Weights & Biases, in a process of its own, so that nothing in it delays training.

    python -m steady.watch.wandb_sink RUN_DIR FROM SETTINGS

It sends the rows of metrics.jsonl after the byte FROM until its standard input ends, with the
training process. SETTINGS: JSON.
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

START_SECONDS = 10  # for W&B to answer
END_SECONDS = 30  # and to take the last rows


def scalars(row: dict) -> dict:
    """The charts of a row of metrics.jsonl; an anomaly has none."""
    return {} if "anomaly" in row else {
        name: value for name, value in row.items()
        if isinstance(value, (int, float)) and not name.startswith("limit/")}


def identity(run_dir: Path) -> dict:
    """One run of W&B over resumes and rollbacks: the id in config.yaml, unless the environment
    names another."""
    file = run_dir / "config.yaml"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    found = re.search(r"^# run: (\w+)$", text, re.MULTILINE)
    ours = dict(WANDB_PROJECT=("project", "steady"), WANDB_RUN_ID=("id", found and found[1]),
                WANDB_NAME=("name", "/".join(run_dir.parts[-2:])))
    return dict(option for variable, option in ours.items() if not os.environ.get(variable))


def start(run_dir: Path, settings: dict) -> subprocess.Popen:
    """The process. If it ends before training does, it says why."""
    size = (run_dir / "metrics.jsonl").stat().st_size
    return subprocess.Popen(
        [sys.executable, "-m", "steady.watch.wandb_sink", run_dir.resolve(), str(size),
         json.dumps(settings, default=str)],
        stdin=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,  # away from the terminal's Ctrl-C
    )


def finish(process: subprocess.Popen):
    """Raises if it does not take the last rows, or was killed and has not said why."""
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
        signal.alarm(END_SECONDS + 5)  # if training was killed, nobody waits for this process
        run.finish()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"warning: W&B unreachable; continuing without it ({reason})", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
