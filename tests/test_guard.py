"""The guard stands alone: training's safety does not hang on the monitor."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, in_clone

from steady.checkpoints.checkpoint import Checkpoint, compare

FLAGS = [*TINY, "--max_steps", 12, "--log_interval", 2, "--save_interval", 4, "--eval_interval", 6,
         "--max_nonfinite", 2, "--skip_spikes", 6, "--sample_interval", 0]


def poison():
    """The losses of samples 40 to 55, of steps 6 and 7, are not finite."""
    import data
    import model

    batch, forward = data.Mixture.batch, model.Transformer.forward

    def poisoned(self, start, stop):
        found = batch(self, start, stop)
        return found._replace(tokens=found.tokens * 0) if 40 <= start < 56 else found

    data.Mixture.batch = poisoned
    model.Transformer.forward = lambda self, tokens, *rest: (
        forward(self, tokens, *rest) * (1.0 if tokens.any() else math.nan))


@pytest.fixture
def fork(tmp_path) -> Path:
    """The repository with no line of train.py that names the monitor."""
    for path in (*ROOT.glob("*.py"), ROOT / "steady", ROOT / "tools"):
        (tmp_path / path.name).symlink_to(path)
    lines = (ROOT / "train.py").read_text().splitlines(keepends=True)
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").write_text("".join(line for line in lines if "monitor" not in line))
    return tmp_path


def go(folder: Path, *flags, before=lambda: None) -> str:
    process = in_clone(folder, [*FLAGS, *flags], before)
    assert process.code() == 0, process.text()
    return process.text()


def same_end(a: Path, b: Path) -> bool:
    ends = [Checkpoint(folder / "checkpoints/step_00000012.pt").state() for folder in (a, b)]
    return not any(compare(ends[0][name], ends[1][name])[1] for name in ("model", "optimizers"))


def test_without_the_monitor_it_trains_saves_and_resumes(fork, run, corpus):
    assert not re.search("monitor", (fork / "train.py").read_text())
    told = json.loads(go(fork, "--data", corpus, "--out_dir", "bare", "--json").splitlines()[-1])
    assert told["train_loss"] is None and told["checkpoint"].endswith("step_00000012.pt")
    assert " values same" in go(fork, "--data", corpus, "--verify_resume", 3)
    go(fork, "--data", corpus, "--out_dir", "parts", "--max_steps", 8, "--lr_schedule", "constant")
    go(fork, "--data", corpus, "--out_dir", "parts", "--auto-resume", "--max_steps", 12)
    go(fork, "--data", corpus, "--out_dir", "whole", "--lr_schedule", "constant")
    assert same_end(fork / "parts", fork / "whole")
    run(*FLAGS, "--data", corpus, "--out_dir", fork / "watched")
    assert same_end(fork / "bare", fork / "watched")


def test_without_the_monitor_steps_are_skipped_and_runs_go_back(fork, corpus):
    told = go(fork, "--data", corpus, "--out_dir", "r", "--on_nonfinite", "rollback",
              "--log_interval", 1, before=poison)
    assert "; rolled back to " in told
    end = Checkpoint(fork / "r/checkpoints/step_00000012.pt").state()
    assert all(tensor.isfinite().all() for tensor in end["model"].values())
    assert len(end["rollbacks"]) == 1 and int(torch.as_tensor(end["nonfinite"])) == 0
