"""Promises that hostile or unlucky use once broke: each test was seen to fail before."""

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, TRAIN, Process, after_updates, column, environment, poison

import train
from steady.checkpoints import backup, checkpoint, writer
from steady.checkpoints.checkpoint import Checkpoint, list_checkpoints
from steady.checkpoints.run_dir import RunDir
from steady.checkpoints.state import Progress, reconcile_best


def best(run_dir: Path) -> tuple[float, int]:
    state = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    return state["best_loss"], state["step"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- files of others are left alone ---


def test_only_the_command_line_can_trust_remote_code(run, tmp_path):
    (tmp_path / "c.yaml").write_text("trust_remote_code: true\n")
    assert "command line" in run("--config", "c.yaml", expect=2)
    run("--out_dir", "r")
    config = tmp_path / "r/config.yaml"
    config.write_text(config.read_text() + "trust_remote_code: true\n")
    assert "command line" in run("--auto-resume", "--out_dir", "r", bare=True, expect=2)


def test_a_checkpoint_of_one_run_does_not_overwrite_another(run, tmp_path):
    run("--out_dir", "a", "--save_interval", 6)
    run("--out_dir", "b", "--seed", 2)
    before = contents(tmp_path / "b")
    output = run("--resume", "a/checkpoints/step_00000006.pt", "--out_dir", "b", expect=2)
    assert "holds a run already" in output and contents(tmp_path / "b") == before


def test_a_second_set_aside_keeps_the_first(run, tmp_path):
    run("--out_dir", "r", "--save_interval", 4)
    folder = tmp_path / "r/checkpoints"
    for _ in range(3):
        run("--resume", "r/checkpoints/step_00000004.pt", "--save_interval", 4, bare=True)
    names = {p.name for p in folder.glob("step_00000012*")}
    assert names == {"step_00000012.pt", "step_00000012.pt.set-aside",
                     "step_00000012.pt.set-aside-2", "step_00000012.pt.set-aside-3"}


def test_overwrite_moves_the_old_run(run, tmp_path):
    run("--out_dir", "r")
    (tmp_path / "r/notes.txt").write_text("mine")  # stays, as what is not a run's
    (tmp_path / "r/checkpoints/mine.pt").write_text("mine")
    before, old = contents(tmp_path / "r"), tmp_path / "r.old"
    run("--out_dir", "r", "--overwrite", "--max_steps", 4)
    assert (tmp_path / "r/notes.txt").exists() and not (tmp_path / "r/checkpoints/mine.pt").exists()
    assert contents(old) == {name: text for name, text in before.items()
                             if name not in ("notes.txt", "lock")}
    assert [p.name for p in list_checkpoints(tmp_path / "r/checkpoints")] == ["step_00000004.pt"]
    run("--out_dir", "r", "--overwrite", "--max_steps", 2)
    assert [p.name for p in list_checkpoints(old / "checkpoints")] == ["step_00000004.pt"]
    (old / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    assert f"{old} is not a run alone" in run("--out_dir", "r", "--overwrite", expect=2)
    assert contents(tmp_path) == before


def test_overwrite_never_leaves_half_of_a_run_in_place(run, tmp_path):
    """Where config.yaml is gone, the older run in OUT_DIR.old is not replaced."""
    run("--out_dir", "r", "--max_steps", 2)
    run("--out_dir", "r", "--max_steps", 4, "--overwrite")
    (tmp_path / "r/config.yaml").unlink()
    before = {name: text for name, text in contents(tmp_path).items() if "lock" not in name}
    told = run("--out_dir", "r", "--max_steps", 6, "--overwrite", expect=2)
    assert "r.old/metrics.jsonl is there already" in told
    assert {name: text for name, text in contents(tmp_path).items()
            if "lock" not in name} == before


@pytest.mark.parametrize("moved", range(1, 5))
def test_a_move_that_was_interrupted_goes_on(run, tmp_path, monkeypatch, moved):
    run("--out_dir", "r", "--max_steps", 4)
    run("--out_dir", "r", "--max_steps", 6, "--overwrite")
    plain, left = Path.rename, [moved]

    def rename(self, target):
        if self.parent.name == "r":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        run("--out_dir", "r", "--max_steps", 8, "--overwrite", expect=130 if moved < 4 else 0)
    run("--out_dir", "r", "--max_steps", 8, *(["--overwrite"] if moved < 4 else ["--auto_resume"]))
    for place, step in (("r", 8), ("r.old", 6)):
        assert list(column(tmp_path / place, "train/loss"))[-1] == step
        assert Checkpoint.named(tmp_path / place / "checkpoints", step).path.exists()


@pytest.mark.parametrize("name, way", [
    ("lock", "--overwrite"), ("metrics.jsonl", "--overwrite"),
    ("checkpoints", "--overwrite"), ("checkpoints", "--auto_resume"),
])
def test_links_are_refused_before_anything_changes(run, tmp_path, name, way):
    run("--out_dir", "r")
    (tmp_path / "target").mkdir()
    elsewhere = tmp_path / "target" / name
    (tmp_path / "r" / name).rename(elsewhere)
    (tmp_path / "r" / name).symlink_to(elsewhere)
    before = contents(tmp_path)
    assert "is a link" in run("--out_dir", "r", way, expect=2)
    assert contents(tmp_path) == before


def test_a_backup_writes_only_the_files_of_a_run(run, tmp_path):
    run("--out_dir", "r", "--backup_to", "file://" + str(tmp_path / "bucket"))
    bucket = tmp_path / "bucket"
    (bucket / "lock").write_text("stolen")
    (bucket / "train.py").write_text("evil")

    class Objects:  # an object store whose keys are any text
        def __init__(self, fs):
            self.fs = fs

        def find(self, root):
            return [*self.fs.find(root), f"{root}/../escaped.txt", f"{root}/tokenizer/../../x"]

        def __getattr__(self, name):
            return getattr(self.fs, name)

    import fsspec.core

    plain = fsspec.core.url_to_fs

    def url_to_fs(url):
        fs, root = plain(url)
        return Objects(fs), root

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", url_to_fs)
        backup.download(bucket.as_uri(), tmp_path / "back")
    found = contents(tmp_path / "back")
    assert "config.yaml" in found and "checkpoints/step_00000012.pt" in found
    assert not {"lock", "train.py"} & set(found) and not (tmp_path / "escaped.txt").exists()


# --- evaluations and the best weights ---


def test_an_evaluation_that_failed_is_made_up_for(run, tmp_path, monkeypatch):
    flags = ["--eval_interval", 4, "--save_interval", 4]
    run(*flags, "--out_dir", "whole")
    plain = train.eval_batches

    for fails_at in (8, 12):  # in the middle of the run, and at its last step
        name = f"r{fails_at}"
        evaluations = iter(range(1, 10))

        def batches(*args, at=fails_at // 4, calls=evaluations):
            if next(calls) == at:
                raise RuntimeError("broken data")
            return plain(*args)

        monkeypatch.setattr(train, "eval_batches", batches)
        output = run(*flags, "--out_dir", name, expect=1)
        assert f"saved the last completed step, {fails_at}" in output
        monkeypatch.setattr(train, "eval_batches", plain)
        run("--auto-resume", "--out_dir", name, bare=True)
        assert column(tmp_path / name, "val/loss") == column(tmp_path / "whole", "val/loss")
        assert best(tmp_path / name) == best(tmp_path / "whole")
        assert "nothing to do" in run("--auto-resume", "--out_dir", name, bare=True)


@pytest.mark.parametrize("moment", ["before the link", "failed save"])
def test_best_agrees_with_best_loss_after_a_restart(run, corpus, tmp_path, moment):
    """The loss falls at each evaluation: the newest is the best."""
    flags = ["--eval_interval", 4, "--save_interval", 6, "--max_steps", 12,
             "--learning_rate", "0.02"]
    run(*flags, "--out_dir", "whole")
    assert best(tmp_path / "whole")[1] == 12

    def hook():
        plain_link, plain_write = checkpoint.link_or_copy, writer.write_checkpoint

        def link(path, draft):
            if "00000008" in path.name:
                os._exit(9)
            plain_link(path, draft)

        def write(path, state):
            if "00000008" in path.name:
                raise OSError(28, "No space left on device")
            plain_write(path, state)

        if moment == "before the link":
            checkpoint.link_or_copy = link
        else:
            writer.write_checkpoint = write

    process = Process(tmp_path, [*TINY, "--data", corpus, *flags, "--out_dir", "r"], hook)
    if moment == "before the link":
        assert process.code() == 9
        assert best(tmp_path / "r")[1] == 4  # the file is older than what step 8 says
        run("--auto-resume", "--out_dir", "r", "--max_steps", 8, "--warmup_steps", 2, bare=True)
        assert best(tmp_path / "r")[1] == 8
    else:
        assert process.code() == 0, process.text()
        assert "no space left on" in process.text() and "unexpected pos" not in process.text()
    newest = torch.load(list_checkpoints(tmp_path / "r/checkpoints")[-1], weights_only=True)
    assert (newest["best_loss"], newest["best_step"]) == best(tmp_path / "r")


def test_weights_of_the_best_that_were_lost_are_not_claimed(run, tmp_path):
    run("--out_dir", "r", "--eval_interval", 4, "--learning_rate", "0.02")
    folder = tmp_path / "r/checkpoints"
    (folder / "best.pt").unlink()
    old = torch.load(Checkpoint.named(folder, 12).path, weights_only=True)
    writer.write_checkpoint(folder / "step_00000012.pt", old | dict(best_loss=0.5, best_step=8))
    run("--auto-resume", "--out_dir", "r", "--max_steps", 16, "--eval_interval", 4, bare=True)
    loss, step = best(tmp_path / "r")
    assert step == 16 and loss == column(tmp_path / "r", "val/loss")[16] > 0.5


def test_where_no_best_weights_are_left_none_are_claimed(run, tmp_path):
    run("--out_dir", "r", "--eval_interval", 4)
    (tmp_path / "r/checkpoints/best.pt").unlink()
    progress = Progress(best_step=8, best_loss=0.5, step=12)
    assert reconcile_best(progress, RunDir(tmp_path / "r")) == (math.inf, 0)


def test_parts_of_a_save_that_failed_go_once_a_later_one_is_whole(tmp_path):
    for step in (3, 6):
        (tmp_path / f"step_{step:08}.pt").touch()
    parts = [tmp_path / f"step_{step:08}/rank_0_of_2.a-0.pt" for step in (5, 7)]
    for path in parts:
        path.parent.mkdir()
        path.touch()
    checkpoint.rotate(tmp_path, keep=5, keep_every=0)
    assert not parts[0].parent.exists() and parts[1].exists()  # 7 may still be written
    assert len(list_checkpoints(tmp_path)) == 2


# --- state that decides the trajectory ---


@pytest.mark.parametrize("policy", ["rollback", "abort"])
def test_a_kill_in_a_streak_of_non_finite_steps_changes_nothing(corpus, tmp_path, policy):
    """Samples 64 to 159 are poison: from step 9 on. Killed after step 14, between two logs."""
    flags = [*TINY, "--max_steps", 24, "--save_interval", 2, "--log_interval", 8,
             "--max_nonfinite", 6, "--on_nonfinite", policy, "--eval_interval", 0,
             "--keep_checkpoints", 20, "--data", corpus]

    def hook(kill: bool):
        plain_save = train.save_checkpoint

        def save(run, **how):
            plain_save(run, **how)
            if kill and run.progress.step == 14:
                run.dir.writer.wait()
                os._exit(9)

        poison(64, 160)
        train.save_checkpoint = save

    ends = {}
    for name in ("whole", "killed"):
        process = Process(tmp_path, [*flags, "--out_dir", name], lambda n=name: hook(n == "killed"))
        code = process.code()
        if name == "killed":
            assert code == 9, process.text()
            process = Process(tmp_path, [*flags, "--out_dir", name, "--auto-resume"],
                              lambda: hook(False))
            code = process.code()
        newest = list_checkpoints(tmp_path / name / "checkpoints")[-1]
        state = torch.load(newest, weights_only=True)
        ends[name] = code, {key: state[key] for key in ("step", "position", "rollbacks", "model")}
    assert ends["whole"][0] == ends["killed"][0] == (1 if policy == "abort" else 0)
    assert bool(ends["whole"][1]["rollbacks"]) == (policy == "rollback")
    assert checkpoint.compare(ends["whole"][1], ends["killed"][1])[1] == []


# --- where a run begins ---


def test_auto_resume_passes_over_folders_that_hold_no_run(run, corpus, tmp_path):
    run("--max_steps", 4)
    (tmp_path / "runs/20250101").mkdir()
    (tmp_path / "runs/20250101/photo.jpg").touch()
    output = run("--auto-resume", "--max_steps", 6, "--data", corpus, bare=True)
    assert "holds no run" in output and "resume" in output
    assert list(column(tmp_path / "runs/001", "train/loss")) == [1, 4, 5, 6]
    assert os.listdir(tmp_path / "runs/20250101") == ["photo.jpg"]


def test_resume_takes_a_file(run, tmp_path):
    run("--out_dir", "r")
    assert "--auto_resume --out_dir r" in run("--resume", "r", expect=2)


# --- the screen is a sink like the others ---


def start(tmp_path, *flags, **how):
    command = [sys.executable, str(TRAIN), *TINY, *map(str, flags)]
    return subprocess.Popen(command, cwd=tmp_path, env=how.pop("env", environment()), **how)


def test_training_goes_on_when_the_screen_is_gone(tmp_path, corpus):
    flags = ["--data", corpus, "--log_interval", 1, "--max_steps", 30, "--no_tensorboard"]
    env = {**environment(), "PYTHONIOENCODING": "latin-1"}
    closed = start(tmp_path, *flags, "--out_dir", "closed", stdout=subprocess.PIPE, env=env,
                   stderr=subprocess.PIPE)
    with open("/dev/full", "w") as full:
        process = start(tmp_path, *flags, "--out_dir", "full", stdout=full, stderr=full)
    closed.stdout.readline()
    closed.stdout.close()
    errors = closed.stderr.read().decode()
    assert closed.wait(60) == 0 and "Traceback" not in errors, errors
    assert len(column(tmp_path / "closed", "train/loss")) == 30
    assert process.wait(60) == 0
    assert len(column(tmp_path / "full", "train/loss")) == 30


def test_a_closed_terminal_saves_like_sigterm(tmp_path, corpus):
    process = Process(tmp_path, [*TINY, "--data", corpus, "--max_steps", 100000, "--out_dir", "r",
                                 "--eval_interval", 0])
    process.wait_for(" | loss ")  # "step" is in the description of the run, too
    process.kill(signal.SIGHUP)
    assert process.code() == 128 + signal.SIGHUP
    assert list_checkpoints(tmp_path / "r/checkpoints")


def test_sigusr1_during_start_up_is_remembered(tmp_path, corpus):
    script = tmp_path / "early.py"
    script.write_text(
        "import os, signal, sys\n"
        "from steady.guard import process\n"
        "process.begin()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "from train import main\n"
        "process.leave(process.exit_code(main, sys.argv[1:]))\n"
    )
    flags = [*TINY, "--data", str(corpus), "--out_dir", "r", "--save_interval", "0"]
    done = subprocess.run([sys.executable, str(script), *flags], cwd=tmp_path, env=environment())
    assert done.returncode == 0
    assert [p.step for p in list_checkpoints(tmp_path / "r/checkpoints")]


def test_a_full_disk_is_called_so(tmp_path):
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("inline_container.cc:664] . unexpected pos") from None
    except RuntimeError as e:
        text = writer.disk_error(e, tmp_path)
    assert text.startswith(f"no space left on {tmp_path}") and "GB are free" in text


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_run_directory_that_goes_away_is_said_to_be_gone(run, tmp_path, monkeypatch, how):
    plain = train.Run.advance

    def take_away(run):
        if run.progress.step == 4:
            run.dir.writer.wait()
            shutil.rmtree("r") if how == "deleted" else Path("r").rename("elsewhere")

    after_updates(take_away, monkeypatch.setattr)
    flags = ["--out_dir", "r", "--save_interval", 2, "--eval_interval", 0, "--no_tensorboard"]
    printed = run(*flags, expect=1)
    assert "r/checkpoints is gone: was it moved or deleted" in printed
    if how == "moved":
        monkeypatch.setattr(train.Run, "advance", plain)
        run("--auto_resume", "--out_dir", "elsewhere", bare=True)
        assert list_checkpoints(tmp_path / "elsewhere/checkpoints")[-1].name == "step_00000012.pt"
