"""The guard stands alone: training's safety does not hang on the monitor."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_same_end, in_clone, poison
from test_forks import fork as change
from test_readme import copy_files

from steady.checkpoints.checkpoint import Checkpoint

FLAGS = [*TINY, "--max_steps", 12, "--log_interval", 2, "--save_interval", 4, "--eval_interval", 6,
         "--max_nonfinite", 2, "--skip_spikes", 6, "--sample_interval", 0]


@pytest.fixture
def fork(tmp_path) -> Path:
    """The repository with no line of train.py that names the monitor."""
    change("no monitor", copy_files(tmp_path / "fork"))
    return tmp_path / "fork"


def go(folder: Path, *flags, before=lambda: None) -> str:
    process = in_clone(folder, [*FLAGS, *flags], before)
    assert process.code() == 0, process.text()
    return process.text()


def test_without_the_monitor_it_trains_saves_and_resumes(fork, run, corpus):
    assert not re.search("monitor", (fork / "train.py").read_text())
    told = json.loads(go(fork, "--data", corpus, "--out_dir", "bare", "--json").splitlines()[-1])
    assert told["train_loss"] is None and told["checkpoint"].endswith("step_00000012.pt")
    assert " values same" in go(fork, "--data", corpus, "--verify_resume", 3)
    run(*FLAGS, "--data", corpus, "--out_dir", fork / "watched")
    assert_same_end(fork / "bare", fork / "watched")


def test_without_the_monitor_steps_are_skipped_and_runs_go_back(fork, corpus):
    told = go(fork, "--data", corpus, "--out_dir", "r", "--on_nonfinite", "rollback",
              "--log_interval", 1, before=lambda: poison(40, 56))  # of steps 6 and 7
    assert "; rolled back to " in told
    end = Checkpoint(fork / "r/checkpoints/step_00000012.pt").state()
    assert all(tensor.isfinite().all() for tensor in end["model"].values())
    assert len(end["rollbacks"]) == 1 and int(torch.as_tensor(end["nonfinite"])) == 0
