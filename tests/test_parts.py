"""Checkpoints in parts: whole or absent, whatever happens to their files."""

import errno
import math
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, column, processes

from steady.checkpoints import checkpoint, writer
from steady.checkpoints.backup import Backup
from steady.checkpoints.checkpoint import Checkpoint, compare, latest_valid, list_checkpoints
from steady.checkpoints.run_dir import run_id
from steady.checkpoints.writer import WeightsNotFinite, Writer
from tools import verify

FLAGS = [*TINY, "--max_steps", 6, "--save_interval", 2, "--eval_interval", 3, "--grad_clip", 0,
         "--parallel", "zero3"]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of two ranks with checkpoints of steps 3, 4 and 6; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    for process in processes(folder, 2, [*FLAGS, "--data", corpus, "--out_dir", "r"]):
        assert process.code() == 0, process.text()
    return folder / "r"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_all_damage_is_found(copy):
    """A missing end, a file that is gone, a flipped bit, except where nobody reads it."""
    dice, folder = random.Random(0), copy / "checkpoints" / "step_00000006"
    assert Checkpoint(folder).find_damage() is None
    whole = Checkpoint(folder).state()
    for _ in range(60):
        path = dice.choice(files_of(folder))
        kept = path.read_bytes()
        at = dice.randrange(len(kept))
        flipped = bytes([kept[at] ^ 1 << dice.randrange(8)])
        damaged = dice.choice([kept[:at] + flipped + kept[at + 1 :], kept[:at], None])
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        if not Checkpoint(folder).find_damage():
            assert compare(Checkpoint(folder).state(), whole)[1] == [], path
            assert len(damaged) == len(kept)
        path.write_bytes(kept)
    assert Checkpoint(folder).find_damage() is None


def test_the_next_older_one_is_taken(run, copy):
    """Where a part is damaged or missing."""
    folder = copy / "checkpoints"
    part = files_of(folder / "step_00000006")[1]
    part.write_bytes(part.read_bytes()[:-1])
    files_of(folder / "step_00000004")[1].unlink()
    assert latest_valid(folder).name == "step_00000003"
    assert (folder / "step_00000006.corrupt").is_dir()
    told = run(*FLAGS, "--out_dir", "r", "--auto_resume", ranks=2)
    assert "step_00000003 at step 3" in told
    assert Checkpoint(folder / "step_00000006").find_damage() is None


def test_a_part_holds_only_the_rows_of_its_rank(finished):
    folder = finished / "checkpoints" / "step_00000006"
    states = Checkpoint(folder).states()
    whole = Checkpoint(folder).state()
    for name, tensor in whole["model"].items():
        pieces = [state["model"][name] for state in states]
        assert torch.equal(torch.cat(pieces), tensor)
        assert len(pieces[0]) == -(-len(tensor) // 2)
    sizes = [path.stat().st_size for path in files_of(folder) if path.suffix == ".pt"]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_part_and_its_folder_are_synced(tmp_path, monkeypatch):
    calls, plain, folder = [], os.fsync, tmp_path / "step_00000001"

    def fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    part_of(1, 2, FakeNotes(), folder)
    assert ".tmp-" in calls[0] and calls[1:] == [str(folder), str(tmp_path)]


class FakeNotes(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def part_of(rank: int, size: int, notes, folder: Path, attempt="a", weight=1.0):
    """Write the part of this rank of a checkpoint, with one weight."""
    saver = Writer(folder.parent, 3, rank=rank, size=size, notes=notes, attempt=attempt)
    saver.write_files(folder, 1, dict(model={}, optimizers=[], weights_norm=torch.tensor(weight)))


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint(monkeypatch, tmp_path):
    """Its reason is reported; without one, it is named. The other parts are cleared away."""
    monkeypatch.setattr(writer, "PATIENCE", 0.1)
    folder, notes = tmp_path / "step_00000001", FakeNotes()
    for rank in (1, 0):
        part_of(rank, 2, notes, folder)
    before = files_of(folder)
    with pytest.raises(OSError, match="rank 1 has not written its part"):
        part_of(0, 2, notes, folder, "b")
    with pytest.raises(WeightsNotFinite):
        part_of(1, 2, notes, folder, "c", weight=math.nan)
    with pytest.raises(WeightsNotFinite):
        part_of(0, 2, notes, folder, "c")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_checkpoint", fails)
        with pytest.raises(OSError, match="no luck"):
            part_of(1, 2, notes, folder, "d")
    with pytest.raises(OSError, match="rank 1: no luck"):
        part_of(0, 2, notes, folder, "d")
    notes["e5-0 1"] = b"28: No space left on device"
    with pytest.raises(OSError, match="rank 1: No space") as error:
        part_of(0, 2, notes, folder, "e5")
    assert error.value.errno == errno.ENOSPC
    assert Checkpoint(folder).files() == before and not Checkpoint(folder).find_damage()
    for rank in (1, 0):  # the same step once more, as after an evaluation
        part_of(rank, 2, notes, folder, "e")
    assert len(files_of(folder)) == 2 and not set(before) & set(files_of(folder))
    notes["f-0 1"] = b""
    with pytest.raises(OSError, match="file system that all hosts share"):
        part_of(0, 2, notes, folder, "f")


def fails(path, state):
    raise OSError("no luck")


def test_the_newest_whole_save_of_a_folder_counts(copy):
    """A part of rank 0 alone is none; of two whole saves, one was killed before it was deleted."""
    checkpoint = Checkpoint(copy / "checkpoints" / "step_00000006")
    first = checkpoint.files()
    new = [checkpoint.path / f"rank_{rank}_of_2.f-9.pt" for rank in range(2)]
    for old, path in zip(first, new, strict=True):
        assert checkpoint.files() == first
        shutil.copy(old, path)
    assert checkpoint.files() == new
    checkpoint.clean(checkpoint.files())
    assert files_of(checkpoint.path) == new and checkpoint.find_damage() is None
    new[1].unlink()
    assert not checkpoint.exists()
    older, best = (checkpoint.path.with_name(name) for name in ("step_00000004", "best"))
    Checkpoint(older).link_as_best()
    assert [path.name for path in files_of(best)] == [path.name for path in files_of(older)]


def test_a_disk_error_of_one_rank_passes(run, tmp_path):
    """Twice in a run: the others' parts are cleared away each time, and the next save is whole."""
    def hook(rank):
        plain = writer.write_checkpoint
        bad = ("step_00000001", "step_00000004") if rank == 1 else ()
        writer.write_checkpoint = lambda path, state: (
            fails if path.parent.name in bad else plain)(path, state)

    told = run(*FLAGS, "--save_interval", 1, "--keep_checkpoints", 9, "--eval_interval", 0,
               "--out_dir", "r", ranks=2, hook=hook)
    names = sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir())
    assert names == [f"step_0000000{n}" for n in (2, 3, 5, 6)]
    assert "rank 1: no luck" in told


def test_a_backup_in_parts_can_be_resumed(run, tmp_path):
    url = f"file://{tmp_path}/disk2"
    run(*FLAGS, "--backup_to", url, "--out_dir", "r", "--keep_checkpoints", 1, ranks=2)
    mine = Checkpoint(tmp_path / "r/checkpoints/step_00000006")
    whole = mine.state()
    for part in mine.files():  # as where this step is saved again
        part.rename(part.with_name(re.sub(r"\.[0-9a-f-]+\.", ".0123-9.", part.name)))
    Backup(url, 1, tmp_path / "r", run_id(tmp_path / "r")).upload(mine)
    there = {path.name for path in (tmp_path / "disk2/checkpoints/step_00000006").iterdir()}
    assert there == {f"rank_{rank}_of_2.0123-9.pt" for rank in range(2)}
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    assert [path.name for path in (tmp_path / "disk2/checkpoints").iterdir()] == ["step_00000006"]
    output = run("--resume", url, "--out_dir", "new", "--max_steps", 8, "--keep_checkpoints", 3,
                 bare=True)
    assert "step_00000006 at step 6" in output
    assert list(column(tmp_path / "new", "train/loss"))[-1] == 8
    found = Checkpoint(tmp_path / "new/checkpoints/step_00000006").state()
    assert compare(whole["model"], found["model"])[1] == []


def test_commands_read_parts(run, copy):
    assert run("--check_checkpoints", "r", bare=True).count(" valid") == 4
    files_of(copy / "checkpoints" / "step_00000004")[1].unlink()
    assert run("--check_checkpoints", "r", bare=True).count(" valid") == 3
    for path in ("r/checkpoints/step_00000004", "r/checkpoints"):
        assert "nor a finished checkpoint" in run("--resume", path, bare=True, expect=2)
    part = files_of(copy / "checkpoints" / "step_00000006")[1]
    assert "not a checkpoint of this model" in run("--resume", part, "--out_dir", "r2", expect=2)
    run("--auto_resume", "--out_dir", "r", "--max_steps", 7, bare=True)
    names = [path.name for path in list_checkpoints(copy / "checkpoints")]
    assert names[-1] == "step_00000007.pt"
    run("--overwrite", "--out_dir", "r", "--max_steps", 3, "--save_interval", 3)
    left = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert left == ["best.pt", "step_00000003.pt"]


def test_a_file_takes_the_place_of_the_best_parts(copy):
    folder = copy / "checkpoints"
    assert (folder / "best").is_dir()
    saver = Writer(folder, 3)
    saver.save(6, dict(format=checkpoint.FORMAT, model={"w": torch.ones(2)}, best_loss=1.0), True)
    saver.wait()
    assert not (folder / "best").exists() and (folder / "best.pt").is_file()
    assert checkpoint.checkpoint_at(folder, 6).name == "step_00000006.pt"  # the newer one


def test_resume_is_verified_in_parts(run):
    def hook(rank):
        plain = verify.from_rank0  # which rank 1 reads late: it must still be there
        verify.from_rank0 = lambda *args: (time.sleep(0.5 * rank), plain(*args))[1]

    flags = ["--verify_resume", 2, "--parallel", "zero3", "--dropout", 0.1]
    assert " values same" in run(*flags, ranks=2, hook=hook)


