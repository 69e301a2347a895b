"""The guard stands alone: training's safety does not hang on the monitor."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, environment

from steady.checkpoints.checkpoint import compare, read_state

FLAGS = [*TINY, "--max_steps", 12, "--log_interval", 2, "--save_interval", 4, "--eval_interval", 6,
         "--max_nonfinite", 2, "--skip_spikes", 6]

# Steps 6 and 7 of the first pass are not finite.
POISON = """
import math, sys
import conftest, train
plain, bad = train.learning_rate, [5, 6]
def learning_rate(step, cfg):
    lr = plain(step, cfg)
    spoil = bool(bad) and step == bad[0]
    if spoil:
        bad.pop(0)
    train.Transformer.factor = math.nan if spoil else 1.0
    return lr
train.learning_rate = learning_rate
forward = train.Transformer.forward
train.Transformer.forward = lambda self, *a: forward(self, *a) * self.factor
conftest.main(sys.argv[1:])
"""


@pytest.fixture
def fork(tmp_path) -> Path:
    """The repository with no line of train.py that names the monitor."""
    for path in (*ROOT.glob("*.py"), ROOT / "steady", ROOT / "tools"):
        (tmp_path / path.name).symlink_to(path)
    lines = (ROOT / "train.py").read_text().splitlines(keepends=True)
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").write_text("".join(line for line in lines if "monitor" not in line))
    (tmp_path / "poison.py").write_text(POISON)
    return tmp_path


def go(folder: Path, corpus: Path, *flags, script="train.py", code=0) -> str:
    path = f"{folder}:{environment()['PYTHONPATH']}"
    command = [sys.executable, script, *FLAGS, "--data", corpus, *flags]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True,
                          env=environment() | {"PYTHONPATH": path}, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def same_end(a: Path, b: Path) -> bool:
    ends = [read_state(folder / "checkpoints/step_00000012.pt") for folder in (a, b)]
    return not any(compare(ends[0][name], ends[1][name])[1] for name in ("model", "optimizers"))


def test_without_the_monitor_it_trains_saves_and_resumes(fork, run, corpus):
    assert not re.search("monitor", (fork / "train.py").read_text())
    go(fork, corpus, "--out_dir", "bare")
    go(fork, corpus, "--out_dir", "parts", "--max_steps", 8, "--lr_schedule", "constant")
    go(fork, corpus, "--out_dir", "parts", "--auto-resume", "--max_steps", 12)
    go(fork, corpus, "--out_dir", "whole", "--lr_schedule", "constant")
    assert same_end(fork / "parts", fork / "whole")
    run(*FLAGS, "--data", corpus, "--out_dir", fork / "watched")
    assert same_end(fork / "bare", fork / "watched")


@pytest.mark.parametrize("policy, words", [("skip", []), ("rollback", ["back to", "step_00000004"]),
                                           ("abort", ["failed: 2 steps in a row"])])
def test_without_the_monitor_steps_are_skipped_and_runs_go_back(fork, corpus, policy, words):
    told = go(fork, corpus, "--out_dir", "r", "--on_nonfinite", policy, "--log_interval", 1,
              script="poison.py", code=policy == "abort")
    assert all(text in told for text in words)
    if policy != "abort":
        end = read_state(fork / "r/checkpoints/step_00000012.pt")
        assert all(tensor.isfinite().all() for tensor in end["model"].values())
        assert len(end["rollbacks"]) == (policy == "rollback")
        assert int(torch.as_tensor(end["nonfinite"])) == 0
