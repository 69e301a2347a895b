"""Checkpoints in parts: whole or absent, whatever happens to their files."""

import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import after, before, column, finished_run, raising

from steady.checkpoints import checkpoint, writer
from steady.checkpoints.backup import Backup, run_id
from steady.checkpoints.checkpoint import Checkpoint, adopt_drafts, latest_valid, list_checkpoints
from steady.checkpoints.writer import Writer
from tools import verify

FLAGS = ["--max_steps", 6, "--save_interval", 2, "--eval_interval", 3, "--grad_clip", 0,
         "--parallel", "zero3"]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of two ranks with checkpoints of steps 3, 4 and 6; tests change copies of it."""
    return finished_run(tmp_path_factory.mktemp("finished"), corpus, *FLAGS, ranks=2)


def test_the_next_older_one_is_taken(run, copy):
    """Where a part is damaged, missing, or of another step; then the best is made again."""
    folder = copy / "checkpoints"
    os.truncate(folder / "step_00000006/rank_1_of_2.pt", 99)
    Checkpoint(folder / "step_00000003").link_as_best()
    os.replace(folder / "step_00000004/rank_1_of_2.pt", folder / "best/rank_1_of_2.pt")
    told = run("--check_checkpoints", "r", bare=True, expect=1)
    assert told.count(" valid") == 1 and told.count("INVALID") == 3
    assert latest_valid(folder).path.name == "step_00000003"
    assert all((folder / f"step_0000000{n}.set-aside").is_dir() for n in (4, 6))
    run("--out_dir", "r", "--auto_resume", "--max_steps", 3, bare=True)
    assert Checkpoint(folder / "best").find_damage() is None
    part = folder / "step_00000003/rank_1_of_2.pt"  # now of an earlier save of step 3
    torch.save(torch.load(part) | {"evaluated_step": 0}, part)
    assert "step_00000003 at step 3" in run(*FLAGS, "--out_dir", "r", "--auto_resume", ranks=2)
    part = folder / "step_00000006/rank_1_of_2.pt"  # now of another run
    torch.save(torch.load(part) | {"config": {}}, part)
    assert Checkpoint(part.parent).find_damage() == "missing or wrong: one config in all parts"


def test_a_checkpoint_that_is_deleted_as_it_is_read_has_a_newer_one(copy, monkeypatch):
    """As in a command on a run that goes on with --keep_checkpoints 1."""
    *_, older, newest = list_checkpoints(copy / "checkpoints")
    hidden = newest.path.rename(copy / "hidden")
    before(Checkpoint, "find_damage", lambda self: self == older and (
        shutil.rmtree(older.path), hidden.rename(newest.path)), monkeypatch.setattr)
    assert latest_valid(copy / "checkpoints", ours=False) == newest


def test_a_part_holds_only_the_rows_of_its_rank(finished):
    saved = Checkpoint(finished / "checkpoints" / "step_00000006")
    for name, tensor in saved.state()["model"].items():
        pieces = [state["model"][name] for state in saved.states()]
        assert torch.equal(torch.cat(pieces), tensor)
        assert len(pieces[0]) == -(-len(tensor) // 2)
    sizes = [path.stat().st_size for path in saved.files()]
    assert max(sizes) < 1.1 * min(sizes)


def write_parts(folder: Path, ranks, size: int = 2, number: int = 7):
    """Write the parts of these ranks of a checkpoint of step 1, with one weight."""
    for rank in ranks:
        saver = Writer(folder, 3, rank=rank, size=size, number=number)
        saver.write_files(folder / "step_00000001", 1, {"model": {"w": torch.full((2,), number)}})


def test_a_part_and_its_folder_are_synced(tmp_path, monkeypatch):
    calls, opened = [], len(os.listdir("/proc/self/fd"))
    before(os, "fsync", lambda descriptor: calls.append(
        os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))), monkeypatch.setattr)
    write_parts(tmp_path, (1, 0))
    draft = "step_00000001.tmp-7"
    parts = [name for rank in (1, 0) for name in (f"rank_{rank}_of_2.pt.tmp-{os.getpid()}", draft)]
    assert calls == [*parts, draft, tmp_path.name]  # a part may come after rank 0's
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_part_is_written_though_its_folder_gets_its_name_meanwhile(tmp_path, monkeypatch):
    """Rank 0 sees the last part before the rank that wrote it has synced the folder."""
    named = tmp_path / "step_00000001"
    after(os, "replace", lambda _, part: Path(part).parent.rename(named), monkeypatch.setattr)
    write_parts(tmp_path, (1,))
    assert (named / "rank_1_of_2.pt").is_file()


def test_a_folder_that_gets_its_name_meanwhile_is_whole_or_absent(tmp_path):
    """Other ranks look whether all parts are there while rank 0 renames their folder."""
    draft, named = tmp_path / "step_00000001.tmp-7", tmp_path / "step_00000001"
    draft.mkdir()
    (draft / "rank_0_of_1.pt").touch()

    def rename():
        for _ in range(2000):
            draft.rename(named)
            named.rename(draft)

    thread = threading.Thread(target=rename)
    thread.start()
    while thread.is_alive():
        assert Checkpoint(draft).files() in ([], [draft / "rank_0_of_1.pt"])


def test_a_rank_that_writes_nothing_leaves_the_old_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(writer, "PARTS_SECONDS", 0.1)
    write_parts(tmp_path, (1, 0))
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}
    with pytest.raises(OSError, match="not written, or not to a file system .* rank_1_of_2.pt"):
        write_parts(tmp_path, (0,), number=8)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == whole
    write_parts(tmp_path, (1,), number=8)  # its part comes late, and goes with the next save
    write_parts(tmp_path, (1, 0), number=9)  # the same step once more, as after an evaluation
    (path,) = tmp_path.iterdir()
    for part in Checkpoint(path).files():
        assert torch.load(part)["model"]["w"][0] == 9


def test_what_a_killed_process_left_is_named_if_whole_and_else_deleted(tmp_path, copy):
    """Also between the two renames that replace a folder."""
    folder = copy / "checkpoints"
    whole = folder / "step_00000006"
    shutil.copytree(whole, folder / "step_00000005.tmp-0")
    shutil.copytree(whole, folder / "step_00000005.tmp-123-4")
    (folder / "step_00000005.tmp-123-4" / "note").touch()
    shutil.copytree(whole, folder / "step_00000006.tmp-5-5")
    shutil.copytree(whole, folder / "step_00000008.tmp-5-5")
    (folder / "step_00000008.tmp-5-5/rank_0_of_2.pt").unlink()
    adopt_drafts(folder)
    assert {*os.listdir(folder)} == {"best", *(f"step_0000000{n}" for n in (3, 4, 5, 6))}
    assert (folder / "step_00000005/note").exists()


def test_weights_of_one_rank_that_are_not_finite_are_saved_by_none(run, tmp_path):
    def hook(rank):
        def spoil(writer, step, state, *_):
            if step == 2 and rank == 1:
                state["model"] = dict(state["model"], odd=torch.tensor([math.nan]))

        before(Writer, "save", spoil)

    told = run(*FLAGS, "--out_dir", "r", "--eval_interval", 0, ranks=2, hook=hook)
    assert told.count("step 2: the weights are not finite; not saved") == 2
    assert [each.step for each in list_checkpoints(tmp_path / "r/checkpoints")] == [4, 6]


@pytest.mark.slow
def test_a_disk_error_of_one_rank_passes(run):
    """Twice in a run: the others' parts are cleared away each time, and the next save is whole."""
    def hook(rank):
        fails = raising(OSError("no luck"))
        plain, writer.PARTS_SECONDS = writer.write_checkpoint, 1000  # nobody waits for what failed
        bad = ("step_00000001", "step_00000004") if rank == 1 else ()
        writer.write_checkpoint = lambda path, state: (
            fails if path.parent.name.startswith(bad or "-") else plain)(path, state)

    told = run(*FLAGS, "--save_interval", 1, "--keep_checkpoints", 9, "--eval_interval", 0,
               "--out_dir", "r", ranks=2, hook=hook)
    assert {*os.listdir("r/checkpoints")} == {f"step_0000000{n}" for n in (2, 3, 5, 6)}
    assert "the part of rank 1 could not be written (1 of 3): no luck" in told
    assert "rank_1_of_2.pt" in told


def test_a_backup_has_the_parts_of_the_newest_save_alone(copy, tmp_path):
    """Of the same step, which another number of ranks had saved before."""
    disk, saved = tmp_path / "disk2", Checkpoint(copy / "checkpoints/step_00000006")
    backup = Backup(f"file://{disk}", copy, None)
    backup.upload(saved)
    assert [*backup.sent][-1].endswith("rank_1_of_2.pt")  # after the logs, whose rows it needs
    for rank in (1, 0):
        os.replace(saved.path / f"rank_{rank}_of_2.pt", saved.path / f"rank_{rank}_of_3.pt")
    shutil.copy(saved.path / "rank_1_of_3.pt", saved.path / "rank_2_of_3.pt")
    backup.upload(saved)
    there = disk / "checkpoints/step_00000006/rank_0_of_3.pt"
    uploaded = there.stat().st_mtime_ns
    backup.upload(saved)  # as at the end of a run
    assert there.stat().st_mtime_ns == uploaded  # no second time
    (saved.path / "rank_2_of_3.pt").unlink()  # the next save is replacing or deleting it
    backup.upload(saved)
    assert Checkpoint(disk / "checkpoints/step_00000006").find_damage() is None


@pytest.mark.slow
def test_a_backup_in_parts_can_be_resumed(run, tmp_path):
    url = f"file://{tmp_path}/disk2"
    run(*FLAGS, "--backup_to", url, "--out_dir", "r", "--keep_checkpoints", 1, ranks=2)
    whole = Checkpoint(tmp_path / "r/checkpoints/step_00000006").state()["model"]
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    assert {*os.listdir(tmp_path / "disk2/checkpoints")} == {"best", "step_00000006"}
    output = run("--resume", url, "--out_dir", "new", "--max_steps", 8, "--keep_checkpoints", 3,
                 bare=True)
    assert "step_00000006 at step 6" in output
    assert list(column(tmp_path / "new", "train/loss"))[-1] == 8
    found = Checkpoint(tmp_path / "new/checkpoints/step_00000006").state()["model"]
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


def test_commands_read_parts(run, copy):
    assert run("--check_checkpoints", "r", bare=True).count(" valid") == 4
    for path in ("r/checkpoints/none", "r/checkpoints"):
        told = run("--resume", path, bare=True, expect=2)
        assert "nor a finished checkpoint" in told and "RUN; to tune: --init_from" in told
    part = copy / "checkpoints/step_00000006/rank_1_of_2.pt"
    assert "not a checkpoint of this model" in run("--resume", part, "--out_dir", "r2", expect=2)
    run("--auto_resume", "--out_dir", "r", "--max_steps", 7, bare=True)
    assert list_checkpoints(copy / "checkpoints")[-1].path.name == "step_00000007.pt"
    run("--overwrite", "--out_dir", "r", "--max_steps", 3, "--save_interval", 3)
    assert sorted(os.listdir(copy / "checkpoints")) == ["best.pt", "step_00000003.pt"]


def test_a_file_takes_the_place_of_parts_and_the_best_parts(copy):
    folder = copy / "checkpoints"
    assert (folder / "best").is_dir()
    saver = Writer(folder, 3, run_id=run_id(copy))
    saver.save(6, dict(format=checkpoint.FORMAT, model={"w": torch.ones(2)}, best_loss=1.0), True)
    saver.wait()
    assert not (folder / "best").exists() and (folder / "best.pt").is_file()
    assert list_checkpoints(folder)[-1].path.name == "step_00000006.pt"
    assert not (folder / "step_00000006").exists()


@pytest.mark.slow
def test_resume_is_verified_in_parts(run):
    """And every rank knows that the ends differ."""
    def late(rank):  # rank 1 reads it late: it must still be there
        before(verify, "from_rank0", lambda *_: time.sleep(0.5 * rank))

    def differ(rank):
        verify.checkpoints.compare = lambda *ends: (3, ["model.head"])
        before(verify.dist, "barrier", lambda: print(f"rank {rank} leaves"))

    flags = ["--verify_resume", 2, "--parallel", "zero3", "--dropout", 0.1]
    assert " values same" in run(*flags, ranks=2, hook=late)
    told = run(*flags, ranks=2, expect=1, hook=differ)
    assert told.count("1 of 3 values differ, as model.head") == 1
    assert "rank 0 leaves" in told[told.index("values differ") :]  # torchrun then ends all
