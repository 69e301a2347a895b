"""--audit finds what was altered in a run, and accuses none that was not; a run that was moved."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, after_updates, in_clone, poison, rows
from test_readme import copy_files

import data
import train
from steady.checkpoints import writer
from steady.checkpoints.checkpoint import Checkpoint, list_checkpoints
from steady.checkpoints.sealed import write_checkpoint
from steady.watch.clock import Goodput
from steady.watch.sinks import Sinks
from tools import audit

FLAGS = ["--save_interval", 3, "--keep_checkpoints", 9, "--eval_interval", 5, "--dropout", 0.1,
         "--log_interval", 2, "--ema", 0.9, "--sample_interval", 0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus) -> Path:
    """A folder with a run `r` and its data."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(corpus, folder / "tokens")
    process = in_clone(copy_files(folder / "clone"), [*TINY, *FLAGS, "--data", folder / "tokens",
                                                      "--out_dir", folder / "r"])
    assert process.code() == 0, process.text()
    return folder


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of the run, whose data is in `tokens` beside it."""
    shutil.copytree(trained / "r", tmp_path / "r")
    shutil.copytree(trained / "tokens", tmp_path / "tokens")
    for checkpoint in list_checkpoints(tmp_path / "r/checkpoints"):
        reseal(checkpoint, lambda state: state["config"].update(data=[str(tmp_path / "tokens")]))
    return tmp_path / "r"


def reseal(checkpoint: Checkpoint, change):
    state = checkpoint.state()
    change(state)
    write_checkpoint(checkpoint.path, state)


def alter_weight(run_dir: Path, draw: random.Random):
    def change(state):
        weight = draw.choice([w for w in state["model"].values() if w.ndim == 2]).view(-1)
        weight[draw.randrange(len(weight))] += 1e-6

    reseal(draw.choice(list_checkpoints(run_dir / "checkpoints")[1:]), change)


def alter_rate(run_dir: Path, draw: random.Random):
    def change(state):
        draw.choice(state["optimizers"])["param_groups"][0]["lr"] *= 1.0001

    reseal(draw.choice(list_checkpoints(run_dir / "checkpoints")[1:]), change)


def alter_row(run_dir: Path, draw: random.Random):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    at = draw.choice([i for i, line in enumerate(lines) if (row := json.loads(line))["step"] > 4
                      and "train/loss" in row])
    row = json.loads(lines[at])
    row[draw.choice(["train/loss", "train/learning_rate"])] *= 1.000001
    lines[at] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def exchange_sample(run_dir: Path, draw: random.Random):
    """A token of the samples of a step from 4 on."""
    mixture = data.load_mixture([str(run_dir.parent / "tokens")], "train", 32, 1337)
    _, block = mixture.order(3 * 8, 12 * 8)
    tokens = np.memmap(run_dir.parent / "tokens/train.bin", np.uint16, "r+")
    tokens[int(draw.choice(list(block))) * 32 + draw.randrange(1, 32)] ^= 1


@pytest.mark.parametrize("alter", [alter_weight, alter_rate, alter_row, exchange_sample])
def test_what_was_altered_is_found(run, copied, alter):
    alter(copied, random.Random(0))
    told = run("--audit", copied, "--segments", 9, bare=True, expect=1)
    assert re.search(r"^steps \d+ to \d+: .+ differs", told, re.M)


def test_a_skipped_update_is_found(run, monkeypatch):
    plain = train.update

    def update(run, sums):
        if run.progress.step == 7:
            for p in run.model.parameters():
                p.grad *= torch.nan
        return plain(run, sums)

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", update)
        run(*FLAGS, "--out_dir", "r")
    told = run("--audit", "r", "--segments", 9, bare=True, expect=1)
    assert re.search("^steps 6 to 9: .*differs", told, re.M) and "verified 4 of 5" in told


def test_a_sound_run_is_verified_and_left_alone(run, copied):
    def contents() -> dict:
        return {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}

    before = contents()
    told = run("--audit", copied, bare=True)
    assert "verified 5 of 5 segments, 9 steps" in told and contents() == before
    told = run("--audit", copied, "--segments", 1, bare=True)
    assert "verified 1 of 5 segments" in told
    newest = list_checkpoints(copied / "checkpoints")[-1].path
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    assert "step_00000012.pt: " in run("--audit", copied, "--segments", 9, bare=True, expect=1)
    for checkpoint in list_checkpoints(copied / "checkpoints")[1:]:
        checkpoint.delete()
    assert "two checkpoints" in run("--audit", copied, bare=True, expect=2)


@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_a_run_of_two_ranks_is_verified_on_two(run, way):
    """Also if the run goes on, and has deleted its oldest checkpoint by the time rank 1 looks."""
    def hook(rank):
        plain = audit.list_checkpoints
        audit.list_checkpoints = lambda folder: plain(folder)[rank:]

    run(*FLAGS, "--parallel", way, "--out_dir", "r", ranks=2)
    assert "verified 5 of 5" in run("--audit", "r", bare=True, ranks=2, hook=hook)
    assert "--nproc_per_node=2" in run("--audit", "r", bare=True, expect=2)


def test_rounding_of_another_machine_is_no_fault(run, copied):
    """Which is what differs between the checkpoints' note of it and this one."""
    def change(state):
        state["machine"]["torch"] = "2.99"
        state["model"]["head.weight"] *= 1 + 1e-5

    for checkpoint in list_checkpoints(copied / "checkpoints"):
        reseal(checkpoint, change)
    told = run("--audit", copied, bare=True, expect=2)
    assert "rounding, as this machine differs: torch 2.99 -> " in told


HISTORY = ["--save_interval", 3, "--keep_checkpoints", 9, "--log_interval", 2, "--out_dir", "r"]


def another_batch_size(run, monkeypatch):
    run(*HISTORY, "--max_steps", 6)
    run("--auto_resume", "--out_dir", "r", "--max_steps", 12, "--batch_size", 4, "--allow_change",
        "batch_size", bare=True)


def rolled_back(run, monkeypatch):
    monkeypatch.setattr(data.Mixture, "batch", data.Mixture.batch)
    monkeypatch.setattr(train.Transformer, "forward", train.Transformer.forward)
    poison(7 * 8, 10 * 8)
    told = run(*HISTORY, "--max_nonfinite", 2, "--on_nonfinite", "rollback", "--log_interval", 1)
    assert "rolled back" in told


def evaluated_later(run, monkeypatch):
    """The checkpoint at step 6 is saved again, as the best, with the options of a longer run."""
    run(*HISTORY, "--max_steps", 6, "--eval_interval", 0)
    run("--auto_resume", "--out_dir", "r", "--max_steps", 12, "--eval_interval", 3, bare=True)


def failed_in_an_evaluation(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("of a fork")

    with monkeypatch.context() as patch:
        patch.setattr(train.Means, "add", fail)
        run(*HISTORY, "--eval_interval", 5, expect=1)
    run("--auto_resume", "--out_dir", "r", bare=True)


def failed_in_a_step(run, monkeypatch):
    """So that the learning rate in the checkpoint is that of the next step."""
    def forward(self, *args):
        if fails and self.training and next(steps) == 7:
            raise RuntimeError("of a fork")
        return plain(self, *args)

    plain, steps, fails = train.Transformer.forward, itertools.count(), [True]
    with monkeypatch.context() as patch:
        patch.setattr(train.Transformer, "forward", forward)
        run(*HISTORY, expect=1)
    assert list_checkpoints(Path("r/checkpoints"))[-1].step == 7
    run("--auto_resume", "--out_dir", "r", bare=True)


def with_a_backup(run, monkeypatch):
    run(*HISTORY, "--backup_to", f"file://{Path('backup').absolute()}")


@pytest.mark.parametrize("happened", [
    another_batch_size, rolled_back, evaluated_later, failed_in_an_evaluation, failed_in_a_step,
    with_a_backup])
def test_a_run_to_which_something_happened_is_verified(run, monkeypatch, happened):
    happened(run, monkeypatch)
    pairs = len(list_checkpoints(Path("r/checkpoints"))) - 1
    assert f"verified {pairs} of {pairs} segments" in run("--audit", "r", bare=True)


def resumed_in_between(run, monkeypatch):
    keep = ["--keep_checkpoints", 1, "--keep_every", 6]
    run(*HISTORY, *keep, "--overwrite", "--max_steps", 9, "--lr_schedule", "cosine")
    run("--auto_resume", "--out_dir", "r", "--max_steps", 15, bare=True)


def deleted_meanwhile(run, monkeypatch):
    """As by the run, which goes on."""
    plain = Checkpoint.find_damage
    monkeypatch.setattr(Checkpoint, "find_damage", lambda self: self.delete() or plain(self))


def on_a_full_disk(run, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_checkpoint", fail)


def without_room_for_logs(run, monkeypatch):
    def use(self, name, do):
        self.open.pop(name, None)

    monkeypatch.setattr(Sinks, "use", use)


def made_with_an_option_that_is_gone(run, monkeypatch):
    for checkpoint in list_checkpoints(Path("r/checkpoints")):
        reseal(checkpoint, lambda state: state["config"].update(float8=True))


@pytest.mark.parametrize("happened, told", [
    (made_with_an_option_that_is_gone, "made by a version of this program that has other options"),
    (resumed_in_between, "it cannot be told, as another process went on at step 9"),
    (deleted_meanwhile, "is gone: the run goes on"),
    (on_a_full_disk, "made again are not there: .* no space left"),
    (without_room_for_logs, "metrics.jsonl could not be written")])
def test_what_cannot_be_told_is_no_accusation(run, copied, monkeypatch, happened, told):
    happened(run, monkeypatch)
    assert re.search(told, run("--audit", "r", bare=True, expect=2))


def test_an_audit_that_is_interrupted_leaves_nothing(run, copied, monkeypatch, tmp_path):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with monkeypatch.context() as patch:
        after_updates(lambda run: os.kill(os.getpid(), signal.SIGTERM), patch.setattr)
        run("--audit", "r", bare=True, expect=143)
    assert not list(tmp_path.glob("temporary/*"))


# --- a run that is moved ---------------------------------------------------------------------


def moved(state):
    state["machine"]["torch"] = "2.99"
    del state["config"]["half_residual"]  # as of a version without it


def test_a_resume_on_another_machine_repeats_some_steps(run, copied):
    """And is the same run afterwards; on the machine of before nothing is repeated."""
    *_, newest = list_checkpoints(copied / "checkpoints")
    newest.delete()
    shutil.copytree(copied, "same")
    assert "continues" not in run("--auto_resume", "--out_dir", "same", bare=True)
    *_, newest = list_checkpoints(copied / "checkpoints")
    reseal(newest, moved)
    shutil.copytree(copied, "other")
    told = run("--auto_resume", "--out_dir", "other", bare=True)
    assert "continues exactly: steps 10 to 10 have the same losses here; changed: torch 2.99 -> " \
        in told
    ends = [Checkpoint.named(Path(name) / "checkpoints", 12).state() for name in ("same", "other")]
    assert not audit.compare(*({n: end[n] for n in audit.COMPARED} for end in ends))[1]
    assert [row["step"] for row in rows(Path("other")) if "train/loss" in row] == [
        row["step"] for row in rows(Path("same")) if "train/loss" in row]

    reseal(newest, lambda state: state["trail_of_all"].mul_(1.001))
    told = run("--auto_resume", "--out_dir", copied, bare=True)
    assert "differs by 0.001 from step 10 on, of steps 10 to 10 repeated here" in told


def test_two_ranks_continue_a_run_of_one(run):
    """Where they drop the same units, which is none."""
    run("--save_interval", 6, "--out_dir", "r", "--log_interval", 1)
    told = run("--auto_resume", "--out_dir", "r", "--max_steps", 13, bare=True, ranks=2)
    found = re.search(r"(continues exactly: |differs by (\S+) from step .*)steps 7 to 11 ", told)
    assert found and float(found[2] or 0) < 1e-4 and "changed: ranks 1 -> 2" in told
    told = run("--auto_resume", "--out_dir", "r", "--max_steps", 14, "--dropout", 0.1, bare=True)
    assert "here; changed" not in told


def test_the_run_that_another_continues_may_delete_the_checkpoint(run, copied, monkeypatch):
    def open_run_dir(run):
        plain(run)
        run.dir.resumed_from.delete()

    plain, (*_, newest, _) = train.open_run_dir, list_checkpoints(copied / "checkpoints")
    reseal(newest, moved)
    monkeypatch.setattr(train, "open_run_dir", open_run_dir)
    assert "continues exactly: steps 10 to 10" in run("--resume", newest, "--out_dir", "b")


# --- what repeated steps must not change -------------------------------------------------------


STATE = (*audit.COMPARED, "evaluated_step", "waited", "best_loss", "best_step", "max_steps",
         "trail_of_all", "trail_from")


def of_another_batch_size(state):
    state["config"]["batch_size"] = 16


def of_another_optimizer(state):
    state["optimizer_names"][0].append("x")


def with_an_earlier_end(state):
    state["max_steps"] = 7


def that_has_waited_long(state):
    state["waited"] = 5


@pytest.mark.parametrize("flags, change", [
    (["--ema", 0.9, "--skip_spikes", 5, "--eval_interval", 4, "--dropout", 0.1], None),
    (["--precision", "fp16"], None),
    ([], of_another_batch_size),
    ([], of_another_optimizer),
    (["--lr_schedule", "plateau", "--patience", 9], with_an_earlier_end),
    (["--eval_interval", 3, "--patience", 2], that_has_waited_long)])
def test_repeated_steps_change_nothing(run, flags, change):
    """Whatever the earlier checkpoint is like."""
    run(*HISTORY, *flags, "--max_steps", 6)
    assert_same_on_another_machine(run, flags, change)


def assert_same_on_another_machine(run, flags=(), change=None) -> str:
    """To step 12; returns what the second one told. Each has begun 1,000 s after the one before."""
    for name in ("same", "other"):
        Goodput.accounted -= 1000
        shutil.copytree("r", name)
        checkpoints = list_checkpoints(Path(name) / "checkpoints")
        if change:
            reseal(checkpoints[0], change)
        if name == "other":
            reseal(checkpoints[-1], moved)
        told = run("--auto_resume", "--out_dir", name, "--max_steps", 12, *flags, bare=True)
    ends = [Checkpoint.named(Path(name) / "checkpoints", 12).state() for name in ("same", "other")]
    assert audit.compare(*({n: end[n] for n in STATE} for end in ends))[1] == []
    startup = [[row["perf/startup_s"] for row in rows(Path(name)) if "perf/startup_s" in row][-1]
               for name in ("same", "other")]
    assert min(startup) > 1000  # also where steps were repeated meanwhile
    return told


@pytest.mark.parametrize("fails", ["by an error", "with gradients that are not finite"])
def test_repeated_steps_that_fail_do_not_keep_a_run_from_going_on(run, monkeypatch, fails):
    def update(run, sums):
        if not run.dir.writer and fails == "by an error":
            raise RuntimeError("of a fork")
        if not run.dir.writer:
            for p in run.model.parameters():
                p.grad *= torch.nan
        return plain(run, sums)

    plain = train.update
    run(*HISTORY, "--max_steps", 6, "--max_nonfinite", 1, "--on_nonfinite", "abort",
        "--log_interval", 1)
    monkeypatch.setattr(train, "update", update)
    assert "steps could not be repeated" in assert_same_on_another_machine(run)


def test_the_best_stays_what_was_found_at_the_start(run):
    """Of a run whose best.pt is lost."""
    run(*HISTORY, "--max_steps", 6, "--eval_interval", 3)
    Path("r/checkpoints/best.pt").unlink()
    for checkpoint in list_checkpoints(Path("r/checkpoints")):
        reseal(checkpoint, lambda state: state.update(best_step=5))
    assert_same_on_another_machine(run, ["--eval_interval", 0])
    assert Checkpoint(Path("other/checkpoints/step_00000012.pt")).state()["best_step"] == 0
