"""The advice that comes with a cause is tried: it makes what was slow take less of the time."""

import time

import pytest

import data
from steady.checkpoints import writer
from steady.watch import sinks as telemetry
from steady.watch.report import report


def before_each(monkeypatch, owner, name, do):
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **how: (do(), plain(*args, **how))[1])


def nap():
    time.sleep(0.02)


ADVICE = {  # phase → (what is slow, flags before, flags that are advised)
    "data": ((data.Mixture, "batch"), [], ["--num_workers", 1]),
    "logging": ((telemetry.Sinks, "write"), ["--log_interval", 1], ["--log_interval", 10]),
    "evaluation": ((data.Batch, "add_by_dataset"), ["--eval_interval", 2], ["--eval_interval", 20]),
    "checkpoint": ((writer.Writer, "wait"), ["--save_interval", 1], ["--save_interval", 20]),
}


@pytest.mark.timed
@pytest.mark.parametrize("phase", ADVICE)
def test_advice_helps(run, tmp_path, monkeypatch, phase):
    (owner, name), before, after = ADVICE[phase]
    before_each(monkeypatch, owner, name, nap)
    common = ["--max_steps", 60, "--no_tensorboard", "--d_model", 128, "--d_ff", 512,
              *([] if phase == "evaluation" else ["--eval_interval", 0])]
    share = []
    for out_dir, flags in (("before", before), ("after", after)):
        run(*common, *flags, "--out_dir", out_dir)
        found = report(tmp_path / out_dir)
        share.append(found["seconds"][phase] / (found["wall_s"] - found["seconds"]["start-up"]))
    assert share[1] < 0.7 * share[0], share
