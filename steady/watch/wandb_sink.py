"""Weights & Biases, SwanLab or Trackio, in a process of its own: it never delays training.

    python -m steady.watch.wandb_sink RUN_DIR TRACKER FROM SETTINGS_AS_JSON

It sends the rows of metrics.jsonl from the byte FROM on, until training closes its standard input.
"""

import contextlib
import fcntl
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

END_SECONDS = 30  # for a tracker to take the last rows


def scalars(row: dict) -> dict:
    """The charts of a row of metrics.jsonl; an anomaly has none."""
    return {} if isinstance(row.get("anomaly"), str) else {
        name: value for name, value in row.items() if isinstance(value, (int, float))}


def identity(tracker: str, run_dir: Path) -> dict:
    """Options of init: one run over resumes and rollbacks, by the id in config.yaml."""
    file = run_dir / "config.yaml"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    found = re.search(r"^# run: (\w+)$", text, re.MULTILINE)
    run, about = found and found[1], dict(project="steady", name="/".join(run_dir.parts[-2:]))
    if tracker == "swanlab":  # its ids have 21 letters
        return about | dict(id=run and run.ljust(21, "0"), logdir=str(run_dir / "swanlog"))
    if tracker == "trackio":  # a run is known by its name
        return about | dict(name=f"{about['name']}-{(run or '')[:6]}")
    variables = dict(project="WANDB_PROJECT", id="WANDB_RUN_ID", name="WANDB_NAME")
    about = {k: v for k, v in (about | dict(id=run)).items() if not os.environ.get(variables[k])}
    return about | dict(dir=run_dir, settings=dict(init_timeout=10, console="off"))  # seconds


def start(run_dir: Path, tracker: str, settings: dict) -> subprocess.Popen:
    """Start the tracker's process. If it ends before training does, it says why."""
    return subprocess.Popen(
        [sys.executable, "-m", "steady.watch.wandb_sink", run_dir.resolve(), tracker,
         str((run_dir / "metrics.jsonl").stat().st_size), json.dumps(settings, default=str)],
        stdin=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2],
        start_new_session=True)  # away from the terminal's Ctrl-C


def finish(process: subprocess.Popen):
    """Raises if the process does not take the last rows, or was killed without saying why."""
    process.stdin.close()
    try:
        status = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise TimeoutError(f"it did not take the last rows within {END_SECONDS} s; send them "
                           "with the tracker's `sync` command") from None
    if status:
        raise ChildProcessError(f"its process has ended with {status}")


def main(run_dir: str, tracker: str, first_byte: str, settings: str):
    sys.stdout = sys.stderr  # the tracker's own messages
    try:
        with contextlib.suppress(OSError):  # wait for the sender of the run before
            fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX)
        run = importlib.import_module(tracker).init(
            **identity(tracker, Path(run_dir)), resume="allow", config=json.loads(settings))
        if tracker == "wandb":  # its own steps cannot go back
            run.define_metric("*", step_metric="step")
        with open(Path(run_dir) / "metrics.jsonl", "rb") as file:
            file.seek(int(first_byte))
            torn, ended = b"", False
            while not ended:
                ended = select.select([sys.stdin], [], [], 1.0)[0]
                *lines, torn = (torn + file.read()).split(b"\n")
                for charts in filter(None, map(scalars, map(json.loads, lines))):
                    how = {} if tracker == "wandb" else dict(step=charts.pop("step"))
                    run.log(charts, **how)
        signal.alarm(END_SECONDS + 5)  # if training was killed, nobody waits for this process
        run.finish()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"warning: {tracker} unreachable; continuing without it ({reason})", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
