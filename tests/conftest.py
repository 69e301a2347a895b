"""What the tests share: a small corpus, a way to run the real program, and small configurations."""

import contextlib
import gc
import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
import train  # noqa: E402
from data import write_tokens  # noqa: E402

torch.set_num_threads(1)  # as `environment` does for other processes, for the same reason

# A model and a run that take milliseconds a step.
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "1", "--d_model", "32", "--d_ff", "64",
        "--seq_len", "32", "--batch_size", "8", "--max_steps", "12", "--warmup_steps", "2",
        "--eval_steps", "2", "--log_interval", "4"]  # fmt: skip


def tiny_config(**changes) -> config.Config:
    return replace(config.resolve(config.parse([*TINY, "--vocab_size", "257"])), **changes)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with train.bin and val.bin: lines of arithmetic, which a model can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["".join(f"{a} + {b} = {a + b}\n" for b in range(60)).encode() for a in range(60)]
    write_tokens(folder / "train.bin", texts[:54])
    write_tokens(folder / "val.bin", texts[54:])
    return folder


@pytest.fixture
def run(corpus, tmp_path, monkeypatch):
    """run(*flags) → what the program printed, run in tmp_path with TINY and the corpus.

    bare: without either. expect: the exit code. ranks: processes under torchrun. Runs train.py's
    own `command` in this process, which saves seconds, unless there are ranks or another script.
    """
    monkeypatch.chdir(tmp_path)

    def run(*flags, bare=False, ranks=1, script=None, expect=0, timeout=120):
        flags = [*([] if bare else [*TINY, "--data", str(corpus)]), *map(str, flags)]
        if ranks == 1 and script is None:
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = train.command(flags)
            gc.enable()
            assert code == expect, output.getvalue()
            return output.getvalue()
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
                    "--master_port", str(free_port())]  # fmt: skip
        done = subprocess.run(
            [sys.executable, *(launcher if ranks > 1 else []), str(script or TRAIN), *flags],
            env=environment(), capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def environment() -> dict[str, str]:
    # One thread: the models are tiny, and two processes with two spinning threads each on two
    # cores are thirty times slower than with one.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def column(run_dir: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows(run_dir) if name in row}
