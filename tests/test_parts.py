"""Checkpoints in parts: whole or absent, whatever happens to their files."""

import errno
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, column, processes

from steady.checkpoints import checkpoint, parts, sealed, writer
from steady.checkpoints.checkpoint import Checkpoint, compare, latest_valid, list_checkpoints
from steady.checkpoints.writer import Missing, PartWriter, WeightsNotFinite, Writer

FLAGS = [*TINY, "--max_steps", 6, "--save_interval", 2, "--eval_interval", 3, "--grad_clip", 0,
         "--no_tensorboard", "--parallel", "zero3"]


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


def damage(path: Path, dice: random.Random):
    """Flip a bit, cut the end, zero a page, or take the file away."""
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    kind = dice.choice(["flip"] * 5 + ["cut", "zeros", "missing"])
    if kind == "flip":
        content[at] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        content = content[:at]
    elif kind == "zeros":
        end = min(len(content), at + 4096)
        content[at:end] = bytes(end - at)
        content[at - 1] ^= 1  # also where there were zeros already
    path.unlink()
    if kind != "missing":
        path.write_bytes(content)


def test_all_damage_is_found(copy):
    dice, folder = random.Random(0), copy / "checkpoints" / "step_00000006"
    assert Checkpoint(folder).find_damage() is None
    for _ in range(60):
        path = dice.choice(files_of(folder))
        kept = path.read_bytes()
        damage(path, dice)
        assert Checkpoint(folder).find_damage(), path
        path.write_bytes(kept)
    assert Checkpoint(folder).find_damage() is None


def test_the_next_older_one_is_taken(corpus, copy, tmp_path):
    """Where a part is damaged or missing."""
    folder = copy / "checkpoints"
    part = files_of(folder / "step_00000006")[1]
    part.write_bytes(part.read_bytes()[:-1])
    files_of(folder / "step_00000004")[1].unlink()
    assert latest_valid(folder).name == "step_00000003"
    assert (folder / "step_00000006.corrupt").is_dir()
    for process in processes(tmp_path, 2, [*FLAGS, "--data", corpus, "--out_dir", "r",
                                           "--auto_resume"]):
        assert process.code() == 0, process.text()
    assert "step_00000003 at step 3" in (tmp_path / "log0.txt").read_text()
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
    PartWriter(0, 1, FakeNotes(), "a").write(folder, dict(model={}, optimizers=[]))
    assert ".tmp-" in calls[0] and calls[1:] == [str(folder), str(tmp_path)]


class FakeNotes(dict):
    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint(copy, monkeypatch, tmp_path):
    """Its reason is reported; without one, it is named. The other parts are cleared away."""
    monkeypatch.setattr(writer, "PATIENCE", 0.1)
    folder, notes = tmp_path / "step_00000001", FakeNotes()
    state = dict(model={}, optimizers=[])
    for rank in (1, 0):
        PartWriter(rank, 2, notes, "a").write(folder, state)
    before = set(files_of(folder))
    with pytest.raises(Missing, match="rank 1 has not written its part"):
        PartWriter(0, 2, notes, "b").write(folder, state)

    def fails(path, state):
        if "rank_1" in path.name:
            raise OSError(writer.NOT_FINITE)
        sealed.write_checkpoint(path, state)

    monkeypatch.setattr(writer, "write_checkpoint", fails)
    for key, finite in (("c", False), ("f", True)):
        with pytest.raises(OSError, match=writer.NOT_FINITE):
            PartWriter(1, 2, notes, key).write(folder, state, finite)
        with pytest.raises(Missing, match=f"rank 1: {writer.NOT_FINITE}") as error:
            PartWriter(0, 2, notes, key).write(folder, state)
        assert isinstance(error.value, WeightsNotFinite) == (not finite)  # by type, not by text
    monkeypatch.setattr(writer, "write_checkpoint", sealed.write_checkpoint)
    assert set(parts.listed(folder)) == before and not Checkpoint(folder).find_damage()
    for rank in (1, 0):  # the same step once more, as after an evaluation
        PartWriter(rank, 2, notes, "e").write(folder, state)
    assert len(files_of(folder)) == 2 and not before & set(files_of(folder))
    notes["d-0 1"] = "{}"
    with pytest.raises(Missing, match="file system that all hosts share"):
        PartWriter(0, 2, notes, "d").write(folder, state)


def test_the_newest_whole_save_of_a_folder_counts(copy):
    """A part of rank 0 alone is none; of two whole saves, one was killed before it was deleted."""
    folder = copy / "checkpoints" / "step_00000006"
    first = parts.listed(folder)
    for number, name in enumerate(("rank_0_of_2.f-9.pt", "rank_1_of_2.f-9.pt")):
        assert parts.listed(folder) == first
        shutil.copy(first[number], folder / name)
    newest = parts.listed(folder)
    assert [path.name for path in newest] == ["rank_0_of_2.f-9.pt", "rank_1_of_2.f-9.pt"]
    parts.remove_strays(folder)
    assert files_of(folder) == newest and Checkpoint(folder).find_damage() is None
    newest[1].unlink()
    assert not Checkpoint(folder).exists()
    older, best = folder.with_name("step_00000004"), folder.with_name("best")
    assert len(files_of(best)) == 2
    parts.link_folder(older, best)
    assert [path.name for path in files_of(best)] == [path.name for path in files_of(older)]


def test_a_part_that_was_not_written_is_not_claimed(monkeypatch, tmp_path, capsys):
    """By the rescue of a rank whose disk is full."""
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(writer, "write_checkpoint", full)
    monkeypatch.setattr(writer, "retry", lambda call: call())
    own = PartWriter(1, 2, {}, "e")
    own.notes = SimpleNamespace(set=lambda *_: None)
    own.hurry = True
    saver = Writer(tmp_path, keep=1, parts=own)
    saver.write(6, {"weights_norm": torch.ones(())}, None, is_best=False)
    assert own.newest is None and "part of rank 1 could not be written" in capsys.readouterr().out


def test_a_disk_error_of_one_rank_passes(corpus, tmp_path):
    """Twice in a run: the others' parts are cleared away each time, and the next save is whole."""
    def hook(rank):
        plain = writer.write_checkpoint

        def write(path, state):
            if rank == 1 and path.parent.name in ("step_00000001", "step_00000004"):
                raise OSError("no space left")
            return plain(path, state)

        writer.write_checkpoint = write

    flags = [*FLAGS, "--data", corpus, "--save_interval", 1, "--keep_checkpoints", 9,
             "--eval_interval", 0, "--out_dir", "r"]
    group = processes(tmp_path, 2, flags, hook)
    assert [process.code() for process in group] == [0, 0], group[1].text()
    names = sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir())
    assert names == [f"step_0000000{n}" for n in (2, 3, 5, 6)]
    assert "rank 1: no space left" in group[0].text()


def test_a_backup_in_parts_can_be_resumed(run, tmp_path, corpus):
    url = f"file://{tmp_path}/disk2"
    flags = [*FLAGS, "--data", corpus, "--backup_to", url]
    for process in processes(tmp_path, 2, [*flags, "--out_dir", "r", "--keep_checkpoints", 1]):
        assert process.code() == 0, process.text()
    whole = Checkpoint(tmp_path / "r/checkpoints/step_00000006").state()
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    assert [path.name for path in (tmp_path / "disk2/checkpoints").iterdir()] == ["step_00000006"]
    output = run("--resume", url, "--out_dir", "new", "--max_steps", 8, "--keep_checkpoints", 3,
                 bare=True)
    assert "step_00000006 at step 6" in output
    assert list(column(tmp_path / "new", "train/loss"))[-1] == 8
    found = Checkpoint(tmp_path / "new/checkpoints/step_00000006").state()
    assert compare(whole["model"], found["model"])[1] == []
    one = f"{url}/checkpoints/step_00000006"
    assert "at step 6" in run("--resume", one, "--out_dir", "n", "--max_steps", 7, bare=True)


def test_commands_read_parts(run, copy, tmp_path):
    assert run("--check_checkpoints", "r", bare=True).count(" valid") == 4
    part = files_of(copy / "checkpoints" / "step_00000004")[1]
    part.unlink()
    assert run("--check_checkpoints", "r", bare=True).count(" valid") == 3
    told = run("--resume", "r/checkpoints/step_00000004", bare=True, expect=2)
    assert "is a folder, but no finished checkpoint" in told
    part = files_of(copy / "checkpoints" / "step_00000006")[1]
    for command in (["--resume", part], ["--init_from", part]):
        assert "expected its folder" in run(*command, bare=True, expect=2)
    told = run("--resume", "r/checkpoints", bare=True, expect=2)
    assert "is a folder, but no finished checkpoint" in told
    run("--auto_resume", "--out_dir", "r", "--max_steps", 7, bare=True)
    names = [path.name for path in list_checkpoints(copy / "checkpoints")]
    assert names[-1] == "step_00000007.pt"
    run("--overwrite", "--out_dir", "r", "--max_steps", 3, "--save_interval", 3)
    left = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert left == ["best.pt", "step_00000003.pt"]


def test_resume_is_verified_in_parts(corpus, tmp_path):
    flags = [*TINY, "--data", corpus, "--verify_resume", 2, "--parallel", "zero3", "--dropout", 0.1]
    for process in processes(tmp_path, 2, flags):
        assert process.code() == 0, process.text()
    assert "verify_resume: identical" in (tmp_path / "log0.txt").read_text()


def test_a_file_takes_the_place_of_the_best_parts(copy):
    folder = copy / "checkpoints"
    assert (folder / "best").is_dir()
    writer = Writer(folder, 3)
    writer.save(6, dict(format=checkpoint.FORMAT, model={"w": torch.ones(2)}, best_loss=1.0), True)
    writer.wait()
    assert not (folder / "best").exists() and (folder / "best.pt").is_file()
    assert checkpoint.checkpoint_at(folder, 6).name == "step_00000006.pt"  # the newer one
