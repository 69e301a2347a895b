"""Promises that hostile or unlucky use once broke: each test was seen to fail before."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import after_updates, assert_same_end, before, column, contents, poison, saved, steps
from fsspec.implementations.local import LocalFileSystem

import train
from steady.checkpoints import checkpoint, writer


def best(run_dir: Path) -> tuple[float, int]:
    state = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    return state["best_loss"], state["step"]


# --- files of others are left alone ---


def test_overwrite_moves_the_old_run_and_deletes_nothing(run, tmp_path, monkeypatch):
    run("--out_dir", "r")
    (tmp_path / "r/notes.txt").write_text("mine")
    before = contents(tmp_path / "r", "lock")
    run("--out_dir", "r", "--overwrite", "--max_steps", 4)
    assert contents(tmp_path / "r.old", "lock") == before
    (tmp_path / "r.old-2").touch()
    assert "r.old-3" in run("--out_dir", "r", "--overwrite", "--max_steps", 2)
    assert steps(tmp_path / "r.old-3") == [4] and steps(tmp_path / "r") == [2]
    monkeypatch.chdir(tmp_path / "r")
    run("--out_dir", ".", "--overwrite", "--max_steps", 3)
    assert steps(tmp_path / "r.old-4") == [2] and steps(tmp_path / "r") == [3]


def test_links_are_refused_before_anything_changes(run, tmp_path):
    """Through them a run would write to, or delete, what its lock does not cover."""
    run("--out_dir", "r", "--eval_interval", 4)
    names = ["lock", "metrics.jsonl", "checkpoints", "checkpoints/step_00000012.pt",
             "checkpoints/best.pt", "checkpoints/step_00000099"]
    for name in names:
        path, elsewhere = tmp_path / "r" / name, tmp_path / "elsewhere"
        if path.exists():
            path.rename(elsewhere)
        path.symlink_to(elsewhere)
        before = contents(tmp_path)
        for way in ("--overwrite", "--auto_resume"):
            assert f"{name}: is a link" in run("--out_dir", "r", way, "--max_steps", 14, expect=2)
        assert contents(tmp_path) == before
        path.unlink()
        if elsewhere.exists():
            elsewhere.rename(path)


def test_a_download_writes_only_the_files_of_a_run(run, tmp_path, monkeypatch):
    bucket, plain = tmp_path / "bucket", LocalFileSystem.find
    run("--out_dir", "r", "--backup_to", bucket.as_uri())
    (bucket / "lock").write_text("stolen")
    (bucket / "train.py").write_text("evil")
    keys = ["../escaped.txt", "tokenizer/../../x", "checkpoints/best/../../../x", "tokenizer/gone"]
    monkeypatch.setattr(LocalFileSystem, "find", lambda self, root: [  # as keys may be any text
        *plain(self, root), *(f"{root}/{key}" for key in keys)])
    assert "gone" in run("--resume", bucket.as_uri(), "--out_dir", "back", bare=True, expect=2)
    keys.pop()  # after a download that was cut off, the same command begins anew
    assert "nothing to do" in run("--resume", bucket.as_uri(), "--out_dir", "back", bare=True)
    found = contents(tmp_path / "back")
    assert {"config.yaml", "checkpoints/step_00000012.pt"} <= {*found} and "train.py" not in found
    assert found["lock"] != b"stolen" and not (tmp_path / "escaped.txt").exists()


# --- evaluations and the best weights ---


def test_an_evaluation_that_failed_is_made_up_for(run, tmp_path, monkeypatch):
    """And the save has the trained weights, whose place the averages had taken."""
    flags = ["--eval_interval", 4, "--ema", 0.5, "--out_dir"]
    run(*flags, "whole", "--save_interval", 4)
    plain = train.eval_batches

    for fails_at, save_interval in ((8, 4), (12, 0)):  # in the middle, and at the last step
        name = f"r{fails_at}"
        evaluations = iter(range(1, 10))

        def batches(*args, at=fails_at // 2, calls=evaluations):
            yield from plain(*args)
            if next(calls) == at:  # the second of its step, with the averages
                raise RuntimeError("broken data")

        monkeypatch.setattr(train, "eval_batches", batches)
        output = run(*flags, name, "--save_interval", save_interval, expect=1)
        assert f"saved the last completed step, {fails_at}" in output
        monkeypatch.setattr(train, "eval_batches", plain)
        run("--auto-resume", "--out_dir", name, bare=True)
        for metric in ("val/loss", "val/loss_ema"):
            assert column(tmp_path / name, metric) == column(tmp_path / "whole", metric)
        assert best(tmp_path / name) == best(tmp_path / "whole")
        assert_same_end(tmp_path / name, tmp_path / "whole")
        assert "nothing to do" in run("--auto-resume", "--out_dir", name, bare=True)


@pytest.mark.parametrize("module, name, code", [
    (checkpoint, "link", 9),  # killed before step 8 becomes the best
    (writer, "write_checkpoint", 0)])  # the save of step 8 fails
def test_best_agrees_with_best_loss_after_a_restart(run, tmp_path, module, name, code):
    """The loss falls at each evaluation: the newest is the best."""
    def hook(rank):
        def fail(path, other):
            if "00000008" in path.name:
                if code:
                    os._exit(code)
                raise OSError(28, "No space left on device")

        before(module, name, fail)

    run("--eval_interval", 4, "--save_interval", 6, "--learning_rate", 0.02, "--out_dir", "r",
        hook=hook, expect=code)
    if code:
        assert best(tmp_path / "r")[1] == 4  # the file is older than what step 8 says
        run("--auto-resume", "--out_dir", "r", "--max_steps", 8, "--warmup_steps", 2, bare=True)
        assert best(tmp_path / "r")[1] == 8
    newest = saved(tmp_path / "r")
    assert (newest["best_loss"], newest["best_step"]) == best(tmp_path / "r")


def test_the_best_of_a_finished_run(run, tmp_path, other_validation):
    """Nothing of it is lost with other validation data; if its weights are, it is not claimed."""
    run("--out_dir", "r", "--eval_interval", 4, "--learning_rate", "0.02")
    before = best(tmp_path / "r")
    told = run("--eval_only", "--resume", "r/checkpoints/best.pt", "--val_data", "other", bare=True)
    assert "anew" not in told
    run("--auto_resume", "--out_dir", "r", "--val_data", "other", bare=True)
    assert best(tmp_path / "r") == before
    path = tmp_path / "r/checkpoints/step_00000012.pt"
    path.with_name("best.pt").unlink()
    old = torch.load(path, weights_only=True)
    writer.write_checkpoint(path, old | dict(best_loss=0.5, best_step=8))
    told = run("--auto-resume", "--out_dir", "r", "--max_steps", 16, bare=True)
    assert "no best.pt of step 8; the best and --patience begin anew" in told
    loss, step = best(tmp_path / "r")
    assert step == 16 and loss == column(tmp_path / "r", "val/loss")[16] > 0.5


@pytest.mark.parametrize("flags, changed", [
    (["--val_data", "other"], "validation data"),
    ([], "validation data"),  # exchanged in place
    (["--eval_steps", 3], "eval_steps"),
    (["--ema", 0.9], "ema")])
def test_losses_of_something_else_are_not_compared(run, tmp_path, monkeypatch, corpus,
                                                   other_validation, flags, changed):
    """Each loss is above the best of before, yet the first of them is the best anew."""
    shutil.copytree(corpus, tmp_path / "data")
    monkeypatch.setattr(train, "evaluate", lambda run: run.progress.step / 100)
    common = ["--data", "data", "--out_dir", "r", "--eval_interval", 4, "--patience", 2]
    run(*common, "--max_steps", 4)
    again = ["--auto_resume", "--out_dir", "r", "--max_steps", 20]
    assert "anew" not in run(*again, "--max_steps", 5, bare=True)
    if not flags:
        shutil.copytree(other_validation, tmp_path / "data", dirs_exist_ok=True)
    told = run(*again, *flags, bare=True)
    assert told.count(f"{changed} changed since step 5: the best validation loss") == 1
    assert best(tmp_path / "r") == (0.08, 8)
    assert (tmp_path / "r/checkpoints/best.pt.set-aside").exists()
    end = saved(tmp_path / "r")
    assert (end["step"], end["best_step"], end["waited"]) == (16, 8, 2)  # patience ends it here
    assert "anew" not in run(*again, bare=True) and best(tmp_path / "r") == (0.08, 8)


# --- state that decides the trajectory ---


def test_a_kill_in_a_streak_of_non_finite_steps_changes_nothing(run, tmp_path):
    """Samples 64 to 159 are poison: from step 9 on. Killed after step 15, between two logs."""
    flags = ["--max_steps", 24, "--save_interval", 2, "--log_interval", 8, "--max_nonfinite", 6,
             "--on_nonfinite", "rollback", "--eval_interval", 0, "--keep_checkpoints", 20]

    def hook(code: int):
        def end(run):
            if code and run.progress.step == 15:
                run.dir.writer.wait()
                os._exit(code)

        poison(64, 160)
        after_updates(end)

    for name, code in (("whole", 0), ("killed", 9), ("killed", 0)):
        run(*flags, "--auto_resume", "--out_dir", name, hook=lambda rank, code=code: hook(code),
            expect=code)
    assert saved(tmp_path / "whole")["rollbacks"]
    assert_same_end(tmp_path / "whole", tmp_path / "killed", "rollbacks")


# --- the screen is a sink like the others ---


@pytest.mark.parametrize("closed", [True, False])  # or full
def test_training_goes_on_when_the_screen_is_gone(run, tmp_path, closed):
    def hook(rank):
        reader, screen = os.pipe() if closed else (os.dup(0), os.open("/dev/full", os.O_WRONLY))
        os.close(reader)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        sys.stdout = open(1, "w", encoding="latin-1", closefd=False)
        sys.stderr = open(2, "w", closefd=False)

    run("--log_interval", 1, "--max_steps", 30, "--out_dir", "r", hook=hook)
    assert len(column(tmp_path / "r", "train/loss")) == 30


@pytest.mark.parametrize("what", ["full pipe", "full disk"])
def test_a_screen_that_fails_for_a_moment_loses_only_that(run, what):
    """Until step 10 nothing can be written; a pipe that does not block has been full since then."""
    reader, pipe = os.pipe()

    def hook(rank):
        full = os.open("/dev/full", os.O_WRONLY)
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError):
            while what == "full pipe":
                os.write(pipe, bytes(4096))
        os.dup2(pipe if what == "full pipe" else full, 1)
        sys.stdout = open(1, "w", closefd=False)

        def works_again():
            os.dup2(pipe, 1)
            if what == "full pipe":
                os.read(reader, 1 << 20)

        after_updates(lambda run: run.progress.step == 10 and works_again())

    run("--log_interval", 1, "--max_steps", 20, "--out_dir", "r", hook=hook)
    lost, *lines = os.read(reader, 1 << 20).decode().splitlines()
    assert lost.startswith("[lost: ") and "[lost: " not in "".join(lines)
    steps = [line.split("/")[0] for line in lines if " lr " in line]
    assert steps == [f"step {step}" for step in range(10, 21)]


@pytest.mark.parametrize("place", ["options.yaml", "tokens/train.bin", "tokens/train.bin.json",
                                   "tokens/train.bin.docs", "tokens/train.bin.mask",
                                   "tokens/val.bin", "r/config.yaml", "r/metrics.jsonl", "r/lock"])
def test_a_fifo_is_refused_and_never_waited_for(run, start, tmp_path, corpus, place):
    shutil.copytree(corpus, tmp_path / "tokens")
    (tmp_path / "options.yaml").write_text("max_steps: 1\n")
    flags = ["--config", "options.yaml", "--data", "tokens", "--out_dir", "r"]
    if place.startswith("r/"):
        run(*flags)
        flags.append("--auto-resume")
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    (process,) = start(*flags)
    assert process.code(30) == 2, process.text()
    assert place in process.text() and "expected a file" in process.text()
    assert "Traceback" not in process.text()
