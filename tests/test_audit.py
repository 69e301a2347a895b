"""--audit finds what was altered in a run, and accuses none that was not; a run that was moved."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, in_clone, rows
from test_readme import copy_files

import data
import train
from steady.checkpoints.checkpoint import Checkpoint, list_checkpoints
from steady.checkpoints.sealed import write_checkpoint
from tools import audit

FLAGS = ["--save_interval", 3, "--keep_checkpoints", 9, "--eval_interval", 5, "--dropout", 0.1,
         "--log_interval", 2, "--ema", 0.9]


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

    def update(run, step_loss):
        if run.progress.step == 7:
            for p in run.model.parameters():
                p.grad *= torch.nan
        return plain(run, step_loss)

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
    *_, newest = list_checkpoints(copied / "checkpoints")
    reseal(newest, lambda state: state.update(max_steps=12))
    told = run("--audit", copied, "--segments", 9, bare=True, expect=2)
    assert "steps 10 to 12: not repeated" in told and "verified 4 of 5 segments" in told
    newest = newest.path
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    assert "step_00000012.pt: " in run("--audit", copied, "--segments", 9, bare=True, expect=1)
    for checkpoint in list_checkpoints(copied / "checkpoints")[1:]:
        checkpoint.delete()
    assert "two checkpoints" in run("--audit", copied, bare=True, expect=2)


@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_a_run_of_two_ranks_is_verified_on_two(run, way):
    run(*FLAGS, "--parallel", way, "--out_dir", "r", ranks=2)
    assert "verified 5 of 5" in run("--audit", "r", bare=True, ranks=2)
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


# --- a run that is moved ---------------------------------------------------------------------


def moved(state):
    state["machine"]["torch"] = "2.99"


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
    assert not audit.differences(*ends)[1]
    assert [row["step"] for row in rows(Path("other")) if "train/loss" in row] == [
        row["step"] for row in rows(Path("same")) if "train/loss" in row]

    reseal(newest, lambda state: state["trail"].mul_(1.001))
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
