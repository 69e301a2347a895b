"""Trackers get the metrics, and nothing that they do reaches training."""

import pytest
from conftest import column, events_of, rows

from steady.checkpoints import run_dir
from steady.watch import wandb_sink


@pytest.mark.slow
def test_wandb_gets_the_metrics(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("--out_dir", "r", "--wandb")
    (kept,) = (tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in kept.read_bytes()


@pytest.fixture
def fake_tracker(tmp_path, monkeypatch):
    """fake_tracker(**bodies): modules that keep the rows they are given in rows.jsonl."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def make(init="", log="", finish=""):
        (tmp_path / "fake").mkdir()
        text = f"""
import json, sys, time
Settings = dict
def init(**settings):
    with open({str(tmp_path / "inits.jsonl")!r}, "a") as file:
        print(json.dumps({{k: str(v) for k, v in settings.items()}}), file=file)
    {init or 'return sys.modules[__name__]'}
def define_metric(*args, **how): pass
def log(row, step=None):
    {log or 'pass'}
    assert (step is None) == (__name__ == "wandb" or "end" in row)
    with open({str(tmp_path / "rows.jsonl")!r}, "a") as file:
        print(json.dumps(row if step is None else row | dict(step=step)), file=file)
def finish():
    {finish or 'log(dict(end=1))'}
"""
        for name in ("wandb", "swanlab", "trackio"):
            (tmp_path / "fake" / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        monkeypatch.syspath_prepend(tmp_path / "fake")
        hangs = "sleep" in init + log + finish
        monkeypatch.setattr(wandb_sink, "END_SECONDS", 0.1 if hangs else 60)

    return make


@pytest.mark.parametrize("flags", [["--wandb"], ["--tracker", "swanlab"], ["--tracker", "trackio"]])
def test_a_tracker_gets_each_row_once_and_the_end(run, tmp_path, fake_tracker, flags):
    """And a resume continues its run, without the flag."""
    fake_tracker()
    for steps in (8, 16):
        run("--out_dir", "r", "--auto_resume", "--max_steps", steps, *flags,
            "--backup_to", f"memory://me:secret@host/{tmp_path.name}")
        flags = []
    assert "secret" not in (tmp_path / "inits.jsonl").read_text()
    got = rows(tmp_path, "rows.jsonl")
    losses = [(row["step"], row["train/loss"]) for row in got if "train/loss" in row]
    assert losses == list(column(tmp_path / "r", "train/loss").items())
    assert got.count({"end": 1}) == 2 and got[-1] == {"end": 1}
    one, two = ({k: row.get(k) for k in ("project", "id", "name")}
                for row in rows(tmp_path, "inits.jsonl"))
    assert one == two and one["project"] == "steady" and "/r" in one["name"]
    run("--out_dir", "r", "--auto_resume", "--max_steps", 20, "--tracker", "none")
    assert len(rows(tmp_path, "inits.jsonl")) == 2


def test_a_run_is_one_run_of_wandb_and_of_a_shared_tensorboard_dir(
        run, tmp_path, fake_tracker, monkeypatch):
    """Also after a resume, and with the project that the user has set."""
    fake_tracker()
    for name, steps in (("a", 8), ("a", 12), ("b", 4)):
        run("--out_dir", name, "--wandb", "--auto_resume", "--max_steps", steps,
            "--tensorboard", "--tensorboard_dir", "tb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run("--out_dir", "b", "--wandb", "--auto_resume", "--max_steps", 8)
    inits = rows(tmp_path, "inits.jsonl")
    a, again, b, mine = inits
    assert a["id"] == again["id"] != b["id"] == mine["id"] and a["name"].endswith("/a")
    assert {call["resume"] for call in inits} == {"allow"}
    assert a["project"] == "steady" and "project" not in mine
    curves = [[event.step for event in events_of(folder).Scalars("train/loss")]
              for folder in sorted((tmp_path / "tb").iterdir()) if folder.name[:2] in ("a-", "b-")]
    assert curves == [[1, 4, 8, 9, 12], [1, 4]]


@pytest.mark.parametrize("bodies", [
    dict(init="raise OSError('no network')"), dict(init="time.sleep(99)"),
    dict(log="import os; os.kill(os.getpid(), 9)"), dict(finish="time.sleep(99)")])
def test_what_wandb_does_changes_nothing_else(run, tmp_path, fake_tracker, bodies):
    fake_tracker(**bodies)
    printed = run("--out_dir", "r", "--wandb", "--tensorboard", "--max_steps", 16)
    assert list(column(tmp_path / "r", "train/loss")) == [1, 4, 8, 12, 16]
    events = events_of(tmp_path / "r/tensorboard").Scalars("train/loss")
    assert [event.step for event in events] == [1, 4, 8, 12, 16]
    assert printed.count("tracker disabled") == ("raise" not in str(bodies))  # it says why itself


def test_the_folder_that_a_cloud_displays_is_the_default(run, tmp_path, monkeypatch):
    shown = tmp_path / "tf_dir"
    monkeypatch.setattr(run_dir, "CLOUD_FOLDERS", ("/nowhere", str(shown)))
    run("--out_dir", "a", "--tensorboard", "--max_steps", 4)
    assert (tmp_path / "a/tensorboard").is_dir()
    shown.mkdir()
    run("--out_dir", "b", "--tensorboard", "--max_steps", 4)
    run("--out_dir", "c", "--tensorboard", "--tensorboard_dir", "mine", "--max_steps", 4)
    run("--out_dir", "d", "--max_steps", 4)
    (folder,) = shown.iterdir()
    assert folder.name.startswith("b-") and not (tmp_path / "b/tensorboard").exists()
    assert [event.step for event in events_of(folder).Scalars("train/loss")] == [1, 4]
