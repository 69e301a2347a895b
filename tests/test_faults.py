"""What must happen when things go wrong: each fault is provoked in a small run.

TABLE says which test covers which fault; one of the tests checks that they all exist.
"""

import ast
import contextlib
import errno
import io
import itertools
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    TINY,
    Process,
    column,
    environment,
    free_port,
    processes,
    rows,
    tiny_config,
    torchrun_sets,
    wait_for,
)
from torch import nn

import data
import train
from model import Transformer
from steady.checkpoints import checkpoint, retry, sealed, writer
from steady.checkpoints import run_dir as rundir
from steady.checkpoints.checkpoint import Checkpoint, compare, list_checkpoints
from steady.checkpoints.sealed import find_corruption
from steady.guard import faults, memory
from steady.guard.process import stop_with_torchrun
from steady.tokens.files import write_tokens
from steady.watch import sinks as telemetry
from tools import generate as generation
from tools import prepare

TABLE = {
    "kill -9, repeatedly": "test_killed_repeatedly",
    "killed between write, sync, rename and rotation": "test_killed_at_a_bad_moment",
    "power lost after a save": "test_a_checkpoint_reaches_the_disk_before_it_gets_its_name",
    "newest checkpoint cut short, flipped, zeroed": "test_a_damaged_checkpoint_is_set_aside",
    "any flipped bit": "test_every_flipped_bit_is_found",
    "every checkpoint bad": "test_never_starts_at_0_silently",
    "disk full while saving": "test_a_full_disk_while_saving",
    "disk full in metrics or TensorBoard": "test_a_full_disk_does_not_stop_training",
    "transient I/O error": "test_transient_errors_are_retried",
    "permanent error": "test_permanent_errors_are_not_retried",
    "output directory read-only or a file": "test_an_unwritable_directory_is_refused",
    "two runs in one directory": "test_one_writer_per_directory",
    "launcher killed": "test_orphaned_ranks_stop",
    "rank killed under torchrun": "test_a_restart_by_the_launcher_continues_its_own_run",
    "SIGTERM": "test_sigterm_saves_and_resumes_bit_for_bit",
    "SIGTERM to torchrun or one rank": "test_a_signal_to_one_rank_stops_all_at_one_step",
    "SIGTERM with loader workers": "test_loader_workers_do_not_die_first",
    "second Ctrl-C in a slow save": "test_a_second_ctrl_c_exits_at_once",
    "signal during a periodic save": "test_a_signal_during_a_save",
    "one rank dies": "test_a_rank_that_dies",
    "one rank raises": "test_a_rank_that_raises",
    "exception in forward": "test_an_exception_saves_the_last_step",
    "exception in optimizer.step": "test_half_an_update_is_not_saved",
    "non-finite gradient on one rank":
        "test_a_non_finite_loss_on_one_rank_is_skipped_and_reported",
    "non-finite for long": "test_rollback_skips_the_bad_samples",
    "NaN in the weights": "test_a_run_whose_weights_are_never_finite_ends",
    "out of memory": "test_out_of_memory_says_what_to_try",
    "data changed": "test_other_data_is_refused",
    "checkpoint of another format": "test_another_format_is_refused",
    "architecture changed": "test_a_checkpoint_of_another_model_is_refused",
    "compile or DDP switched": "test_compile_and_ranks_can_change_on_resume",
    "optimizer in another order": "test_optimizer_state_follows_the_names_of_its_parameters",
    "malicious pickle": "test_a_pickle_is_not_executed",
    "symbolic links, files of other programs": "test_other_files_are_left_alone",
    "start in a directory that holds a run": "test_run_directories",
    "one checkpoint kept and an early best": "test_the_newest_and_the_best_are_both_kept",
    "finished run": "test_kill_and_auto_resume_match_the_undisturbed_run_bit_for_bit",
    "clock jumps backwards": "test_a_clock_that_jumps_back",
    "code that comes with a model": "test_code_of_others_is_not_run_unless_it_is_trusted",
    "all targets of a micro-batch ignored": "test_documents_with_nothing_to_learn_are_no_nan",
    "a malformed line among many; not UTF-8": "test_a_bad_line_is_named_or_left_out_and_counted",
    "preparation interrupted": "test_what_is_interrupted_leaves_the_old_data_alone",
    "a token id that its type cannot hold": "test_an_id_never_wraps",
    "documents resumed on other ranks": "test_other_ranks_and_a_resume_see_the_same_samples",
    "a link in the place of a folder":
        "test_a_link_in_the_place_of_a_folder_is_never_written_through",
    "a backup of another run": "test_a_backup_of_another_run_is_refused",
    "a backup in the run itself": "test_a_backup_apart_from_the_run_is_expected",
    "only best.pt or damaged files left": "test_leftovers_of_a_run_are_not_started_over",
    "an optimizer that needs whole weights":
        "test_an_optimizer_that_needs_whole_weights_is_refused_at_the_start",
    "full disk at the first file": "test_a_disk_that_is_full_from_the_start_is_one_line",
}
FLAGS = [*TINY, "--eval_interval", "0", "--no_tensorboard"]


def test_the_table_names_tests_that_exist():
    names = {node.name for path in Path(__file__).parent.glob("test_*.py")
             for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.FunctionDef)}
    assert set(TABLE.values()) <= names


def final(run_dir: Path) -> dict:
    path = list_checkpoints(run_dir / "checkpoints")[-1]
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same_end(one: Path, two: Path):
    a, b = final(one), final(two)
    for key in ("step", "model", "optimizers", "scaler", "position"):
        assert compare(a[key], b[key], key)[1] == []


def steps(run_dir: Path) -> list[int]:
    return [p.step for p in list_checkpoints(run_dir / "checkpoints")]


def wait_for_step(run_dir: Path, step: int):
    """Until there is a checkpoint of this step or a later one."""
    for _ in range(6000):
        if any(found >= step for found in steps(run_dir)):
            return
        time.sleep(0.01)
    raise AssertionError(f"{run_dir} has no checkpoint of step {step}")


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of 12 steps with checkpoints of steps 4, 8 and 12; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    process = Process(folder, [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4])
    assert process.code() == 0, process.text()
    return folder / "r"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


# --- killed ---


@pytest.mark.parametrize("ranks, kills", [
    (1, 3),
    pytest.param(2, 2, marks=pytest.mark.slow),
])
def test_killed_repeatedly(corpus, tmp_path, ranks, kills):
    """At random moments, also during start-up and saves. No attempt can reach the end."""
    last = 24 * (kills + 1)
    flags = [*FLAGS, "--data", corpus, "--max_steps", last, "--save_interval", 3, "--dropout",
             "0.1", "--auto-resume"]
    for process in processes(tmp_path, ranks, [*flags, "--out_dir", "whole"]):
        assert process.code() == 0, process.text()
    dice, newest, killed = random.Random(ranks), 0, tmp_path / "killed_now"

    def start(bound: int):
        plain = train.learning_rate

        def learning_rate(step, cfg):
            while step >= bound and not killed.exists():
                time.sleep(0.01)
            return plain(step, cfg)

        train.learning_rate = learning_rate

    for attempt in range(1, kills + 1):
        killed.unlink(missing_ok=True)
        group = processes(tmp_path, ranks, [*flags, "--out_dir", "killed"],
                          lambda rank, bound=24 * attempt: start(bound))
        if dice.random() < 0.8:  # else while it starts
            group[0].wait_for("\nstep ")
        time.sleep(dice.uniform(0, 0.3))
        victim = dice.choice(group)
        victim.kill(signal.SIGKILL)
        killed.touch()
        for process in group:  # as torchrun does
            process.kill(signal.SIGTERM)
        codes = {process: process.code() for process in group}
        assert codes[victim] == -signal.SIGKILL and 0 not in codes.values(), group[0].text()
        found = steps(tmp_path / "killed")
        assert not found or found[-1] >= newest, "it has lost a checkpoint"
        newest = found[-1] if found else 0
        for process in group:
            process.log.unlink()
    for process in processes(tmp_path, ranks, [*flags, "--out_dir", "killed"]):
        assert process.code() == 0, process.text()
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    logged = list(column(tmp_path / "killed", "train/loss"))
    assert logged == sorted(set(logged)) and logged[-1] == last


@pytest.mark.parametrize("moment", ["write", "sync", "verify", "rename", "rotate"])
def test_killed_at_a_bad_moment(run, corpus, tmp_path, moment):
    def hook():
        def die_at(number, call, counts=lambda *args: True):
            calls = itertools.count(1)

            def wrapped(*args, **kwargs):
                if counts(*args) and next(calls) == number:
                    os._exit(9)
                return call(*args, **kwargs)

            return wrapped

        if moment == "write":
            file = sealed.ChecksummedFile
            file.write = die_at(30, file.write)
        elif moment == "verify":
            sealed.find_corruption = die_at(2, sealed.find_corruption)
        elif moment == "rotate":
            writer.rotate = die_at(2, writer.rotate)
        elif moment == "sync":
            os.fsync = die_at(4, os.fsync)
        else:
            os.replace = die_at(4, os.replace, lambda *paths: "step_" in str(paths))

    flags = [*FLAGS, "--data", corpus, "--save_interval", 2, "--keep_checkpoints", 1,
             "--out_dir", "r"]
    process = Process(tmp_path, flags, hook)
    assert process.code() == 9, process.text()
    left = list_checkpoints(tmp_path / "r" / "checkpoints")
    assert not any(map(Checkpoint.find_damage, left)) and (left or moment == "write")
    run(*FLAGS, "--auto-resume", "--out_dir", "r", bare=True)
    assert steps(tmp_path / "r") == [12]
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


def test_a_checkpoint_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """The order of the calls that matters when the power fails, which no test can provoke."""
    path, calls = tmp_path / "step_00000001.pt", []

    def record(owner, name, describe):
        plain = getattr(owner, name)

        def call(*args, **options):
            result = plain(*args, **options)
            calls.append(describe(*args))
            return result

        monkeypatch.setattr(owner, name, call)

    def synced(descriptor):
        status = os.fstat(descriptor)
        if os.path.samestat(status, os.stat(tmp_path)):
            return "sync the directory"
        return f"sync {status.st_size} bytes"

    record(torch, "save", lambda *args: "write")
    record(os, "fsync", synced)
    record(os, "posix_fadvise", lambda *args: "forget what is cached")
    record(sealed, "find_corruption", lambda draft: f"verify {draft.stat().st_size} bytes")
    record(os, "replace", lambda draft, to: f"rename to {to.name}")
    writer.write_checkpoint(path, {"weight": torch.arange(10_000)})
    size = f"{path.stat().st_size} bytes"
    assert calls == ["write", f"sync {size}", "forget what is cached", "forget what is cached",
                     f"verify {size}", f"rename to {path.name}", "sync the directory"]


# --- damaged files ---


def cut(size):
    def damage(path):
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return damage


def flip(path, position=None, bit=3):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut(0), cut(10), cut(20_000), cut(-1), cut(-20), flip, zero])
def test_a_damaged_checkpoint_is_set_aside(run, copy, finished, damage):
    damage(copy / "checkpoints/step_00000012.pt")
    output = run("--auto-resume", "--out_dir", "r", bare=True)
    assert "step_00000012.pt: " in output and "set aside as .corrupt" in output
    assert "step_00000008.pt at step 8" in output
    assert (copy / "checkpoints/step_00000012.pt.corrupt").exists()
    assert_same_end(finished, copy)


def test_every_flipped_bit_is_found(copy):
    path, dice = copy / "checkpoints/step_00000008.pt", random.Random(0)
    content = path.read_bytes()
    assert find_corruption(path) is None
    with zipfile.ZipFile(path) as archive:  # any zip tool still reads it
        assert archive.testzip() is None
    size = len(content)
    for position in [0, size - 1, size - 25, size - 30, *(dice.randrange(size) for _ in range(80))]:
        flip(path, position, dice.randrange(8))
        assert find_corruption(path), position
        path.write_bytes(content)


def test_never_starts_at_0_silently(run, copy):
    for path in (found.path for found in list_checkpoints(copy / "checkpoints")):
        flip(path)
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file() and p.name != "lock"}
    for _ in range(2):
        output = run("--auto-resume", "--out_dir", "r", bare=True, expect=2)
        assert "no checkpoint is valid" in output and "--overwrite" in output
    after = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file() and p.name != "lock"}
    assert before == after


@pytest.mark.parametrize("left", ["best.pt", "step_00000012.pt.corrupt"])
def test_leftovers_of_a_run_are_not_started_over(run, copy, left):
    folder = copy / "checkpoints"
    (folder / "step_00000012.pt").rename(folder / left)
    for path in (found.path for found in list_checkpoints(folder)):
        path.unlink()
    before = (copy / "metrics.jsonl").read_bytes()
    output = run("--auto-resume", "--out_dir", "r", bare=True, expect=2)
    assert left in output and "--overwrite" in output
    assert (copy / "metrics.jsonl").read_bytes() == before and os.listdir(folder) == [left]
    if left == "best.pt":
        command = ["--resume", "r/checkpoints/best.pt"]
        assert " ".join(command) in output
        run(*command, "--max_steps", 14, bare=True)
        assert steps(copy) == [12, 14] and list(column(copy, "train/loss"))[-3:] == [12, 13, 14]


@pytest.mark.parametrize("best", [12, 6])
def test_a_resume_reads_each_checkpoint_once(run, tmp_path, monkeypatch, best):
    """By checksum, and then from memory; best.pt may be another name of the newest one."""
    monkeypatch.setattr(train, "evaluate", lambda run: abs(run.progress.step - best) + 1.0)
    run("--out_dir", "r", "--eval_interval", 6, "--save_interval", 6, "--no_tensorboard")
    paths = [tmp_path / "r/checkpoints" / name for name in ("step_00000012.pt", "best.pt")]
    files = {path.stat().st_ino: path.stat().st_size - sealed.SEAL.size for path in paths}
    hashed, loaded, found = [], [], []
    crc32, load, plain = zlib.crc32, torch.load, train.train
    monkeypatch.setattr(zlib, "crc32", lambda data, *a: hashed.append(len(data)) or crc32(data, *a))
    monkeypatch.setattr(torch, "load", lambda path, **how: loaded.append(how) or load(path, **how))
    monkeypatch.setattr(train, "train", lambda *a: found.append(sum(hashed)) or plain(*a))
    run("--auto-resume", "--out_dir", "r", "--max_steps", 14, "--eval_interval", 0, bare=True)
    assert len(files) == (1 if best == 12 else 2) and found == [sum(files.values())]
    assert all(how.get("mmap") or how["map_location"] == "meta" for how in loaded)


def test_check_checkpoints_lists_them(run, copy):
    flip(copy / "checkpoints/step_00000008.pt")
    output = run("--check_checkpoints", "r", bare=True, expect=1)
    assert "step_00000008.pt" in output and output.count("INVALID: its checksum is wrong") == 1
    assert output.count(" valid") == 2 and "        12 " in output


def test_optimizer_state_follows_the_names_of_its_parameters(run, copy):
    """Not their order, which a fork may change; nor is what is held for others taken."""
    path = copy / "checkpoints/step_00000012.pt"
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20]
    state = torch.load(path, weights_only=True)
    shutil.copytree(copy, copy.parent / "same")
    for optimizer, names in zip(state["optimizers"], state["optimizer_names"], strict=True):
        names.reverse()
        last = len(names) - 1
        optimizer["state"] = {last - i: each for i, each in optimizer["state"].items()}
    writer.write_checkpoint(path, state)
    run(*flags, bare=True)
    run(*flags, "--out_dir", "same", bare=True)
    ends = [torch.load(folder / "checkpoints/step_00000020.pt", weights_only=True)
            for folder in (copy, copy.parent / "same")]
    assert not compare(ends[0]["model"], ends[1]["model"])[1]
    state["optimizer_names"][1][0] = "another"
    writer.write_checkpoint(path, state)
    for newer in list_checkpoints(copy / "checkpoints")[-1:0:-1]:
        if newer.path != path:
            newer.delete()
    assert "other parameters" in run(*flags, bare=True, expect=2)


def test_an_option_that_is_newer_than_the_checkpoint_was_off(run, copy):
    path = copy / "checkpoints/step_00000012.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["norm_eps"]
    writer.write_checkpoint(path, state)
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 14]
    assert "norm_eps 1e-06 -> 0.1" in run(*flags, "--norm_eps", 0.1, bare=True, expect=2)
    run(*flags, bare=True)


def test_another_format_is_refused(run, copy):
    path = copy / "checkpoints/step_00000012.pt"
    state = torch.load(path, weights_only=True)
    writer.write_checkpoint(path, {"format": checkpoint.FORMAT + 1, "weights": state["model"]})
    assert Checkpoint(path).find_damage() is None  # or it would be set aside
    output = run("--auto-resume", "--out_dir", "r", "--max_steps", 20, bare=True, expect=2)
    assert f"format {checkpoint.FORMAT + 1}; this version reads {checkpoint.FORMAT}" in output


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_executed(run, copy, tmp_path):
    """Not even in a file whose checksum is valid."""
    evil = {"format": checkpoint.FORMAT, "step": Evil(tmp_path / "touched")}
    writer.write_checkpoint(tmp_path / "sealed.pt", evil)
    torch.save(evil, tmp_path / "saved.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(evil) * 100)
    for name in ("sealed.pt", "saved.pt", "pickle.pt"):
        output = run("--resume", tmp_path / name, "--out_dir", "new", expect=2)
        assert "not a checkpoint that can be read" in output
    assert not (tmp_path / "touched").exists() and not (tmp_path / "new").exists()


def test_other_files_are_left_alone(run, copy, tmp_path):
    folder, outside = copy / "checkpoints", tmp_path / "outside.pt"
    outside.write_text("not ours")
    others = [
        folder / "step_9.backup",
        folder / "step_00000001.pt.tmp-notes",
        folder / "step_1.pt",
    ]
    for path in others:
        path.write_text("not ours")
    (folder / "step_00000099.pt").symlink_to(outside)
    (folder / "step_00000001.pt").symlink_to(outside)
    (folder / "step_00000003.pt.tmp-123").write_text("left by a save that was killed")
    run("--auto-resume", "--out_dir", "r", "--max_steps", 20, "--keep_checkpoints", 1, bare=True)
    assert steps(copy) == [20] and outside.read_text() == "not ours"
    assert all(path.exists() for path in others)
    assert (folder / "step_00000099.pt").is_symlink() and (folder / "step_00000001.pt").is_symlink()
    assert not (folder / "step_00000003.pt.tmp-123").exists()


def test_the_newest_and_the_best_are_both_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda run: float(run.progress.step))
    run("--out_dir", "r", "--keep_checkpoints", 1, "--eval_interval", 2, "--save_interval", 2)
    folder = tmp_path / "r" / "checkpoints"
    assert steps(tmp_path / "r") == [12]
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["step"] == 2 and find_corruption(folder / "best.pt") is None
    assert final(tmp_path / "r")["best_loss"] == 2


def test_the_best_is_copied_where_there_are_no_hard_links(run, tmp_path, monkeypatch):
    def fail(*args):
        raise PermissionError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", fail)
    run("--out_dir", "r", "--eval_interval", 6, "--save_interval", 0)
    best = tmp_path / "r/checkpoints/best.pt"
    assert best.stat().st_nlink == 1 and find_corruption(best) is None


def test_milestones_are_kept(run, tmp_path):
    run("--out_dir", "r", "--keep_checkpoints", 2, "--save_interval", 1, "--keep_every", 5)
    assert steps(tmp_path / "r") == [5, 10, 11, 12]


# --- the disk ---


def test_a_full_disk_while_saving(run, corpus, tmp_path):
    """Training continues, until too many saves in a row have failed."""

    def hook():
        plain, calls = writer.write_checkpoint, [0]

        def limited(*args):
            calls[0] += 1
            size = 10_000 if 2 <= calls[0] <= 3 or calls[0] >= 5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                plain(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

        writer.write_checkpoint = limited

    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 40, "--save_interval", 2]
    process = Process(tmp_path, flags, hook)
    assert process.code() == 1, process.text()
    output = process.text()
    assert "Traceback" not in output
    assert "could not be written: no space left on r/checkpoints" in output.splitlines()[-1]
    assert "step 4: the checkpoint could not be written (1 of 3)" in output
    assert "3 checkpoints in a row could not be written" in output
    assert steps(tmp_path / "r") == [2, 8]  # the 4th save succeeded and reset the count
    assert not list((tmp_path / "r" / "checkpoints").glob("*.tmp-*"))


@contextlib.contextmanager
def largest_file(size: int):
    """No file may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_in_tensorboard_is_one_line(run, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has its own
    plain = train.train
    monkeypatch.setattr(train, "train", largest_file(100)(plain))
    output = run("--out_dir", "r", "--save_interval", 0, "--eval_interval", 0)
    for sink in ("TensorBoard", "metrics.jsonl"):
        assert output.count(f"warning: {sink} disabled after a write error") == 1
    assert "Traceback" not in output


@pytest.mark.parametrize("name, limit", [("--out_dir r", 0), ("r/config.yaml", 400)])
def test_a_disk_that_is_full_from_the_start_is_one_line(run, name, limit):
    with largest_file(limit):  # the lock is smaller than 400 bytes
        output = run("--out_dir", "r", expect=2)
    assert output.splitlines()[-1].startswith(f"train.py: error: {name}: ")
    assert "Traceback" not in output and not Path("r/config.yaml").exists()


def test_a_step_that_an_evaluation_saves_too_fails_once(run, tmp_path, monkeypatch):
    """The loss falls at each evaluation, so each step is saved as the best and as due."""
    plain_write, plain_save, tried = writer.write_checkpoint, writer.Writer.save, []

    def write(path, state):
        tried.append(path)
        if Checkpoint(path).step < 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain_write(path, state)

    def save(self, *args):
        plain_save(self, *args)
        self.wait()  # or the second may find the first one still under way

    monkeypatch.setattr(writer, "write_checkpoint", write)
    monkeypatch.setattr(writer.Writer, "save", save)
    output = run("--out_dir", "r", "--save_interval", 4, "--eval_interval", 4,
                 "--learning_rate", "0.02")
    assert len(tried) == 5 and "(2 of 3)" in output and "(3 of 3)" not in output
    assert steps(tmp_path / "r") == [12]


def failing(number: int, times: int):
    """(a torch.save whose first calls fail, list of its calls)."""
    plain, calls = torch.save, []

    def save(*args):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return plain(*args)

    return save, calls


def test_transient_errors_are_retried(run, tmp_path, monkeypatch):
    save, calls = failing(errno.EIO, 2)
    slept = []
    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(retry.time, "sleep", slept.append)
    output = run("--out_dir", "r", "--save_interval", 6, "--num_workers", 0)
    assert output.count("tried again") == 2 and steps(tmp_path / "r") == [6, 12] and len(calls) == 4
    waits = [s for s in slept if s >= 0.5]
    assert 0.5 <= waits[0] <= 0.75 and 1 <= waits[1] <= 1.5
    assert max(column(tmp_path / "r", "health/retries").values()) >= 2


def test_permanent_errors_are_not_retried(run, tmp_path, monkeypatch):
    save, calls = failing(errno.EACCES, 1)
    monkeypatch.setattr(torch, "save", save)
    output = run("--out_dir", "r", "--save_interval", 6)
    assert "tried again" not in output and "could not be written (1 of 3): [Errno 13]" in output
    assert steps(tmp_path / "r") == [12]


def test_reading_data_is_retried(run, tmp_path, monkeypatch):
    plain, calls = data.Mixture.batch, itertools.count(1)

    def batch(self, *args):
        if next(calls) in (5, 6):
            raise OSError(errno.EIO, "the disk had a hiccup")
        return plain(self, *args)

    run("--out_dir", "whole")
    monkeypatch.setattr(data.Mixture, "batch", batch)
    monkeypatch.setattr(retry.time, "sleep", lambda s: None)
    assert run("--out_dir", "r").count("hiccup; tried again") == 2
    assert_same_end(tmp_path / "whole", tmp_path / "r")


def test_an_unwritable_directory_is_refused(run, tmp_path, monkeypatch):
    place = tmp_path / "read-only"
    place.mkdir()
    plain = os.access  # root may write anywhere, so this fault is simulated
    monkeypatch.setattr(os, "access", lambda p, mode: str(p) != str(place) and plain(p, mode))
    output = run("--out_dir", place / "r", expect=2)
    assert f"{place} is not writable" in output and not list(place.iterdir())
    (tmp_path / "file").touch()
    assert "is a file; expected a directory" in run("--out_dir", "file", expect=2)


def test_run_files_are_not_world_writable(run, tmp_path):
    before = os.umask(0)
    try:
        run("--out_dir", "r")
    finally:
        os.umask(before)
    for path in (tmp_path / "r").rglob("*"):
        assert not path.stat().st_mode & 0o002, path


# --- other processes ---


def test_one_writer_per_directory(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 100_000,
             "--save_interval", 10]
    process = Process(tmp_path, flags)
    wait_for_step(tmp_path / "r", 10)
    for flag in ("--auto-resume", "--overwrite"):
        output = run("--out_dir", "r", flag, expect=2)
        assert f"process {process.pid} on {socket.gethostname()} is writing there" in output
    process.kill(signal.SIGKILL)
    process.code()
    run("--auto-resume", "--out_dir", "r", "--max_steps", 200, bare=True)  # the lock is gone


@pytest.mark.parametrize("flag", [["--auto-resume"], pytest.param([], marks=pytest.mark.slow)])
def test_a_run_that_began_and_ended_meanwhile_is_kept(run, corpus, tmp_path, monkeypatch, flag):
    """While the second builds its model, the directory is not locked."""
    plain = train.make_optimizers

    def make_optimizers(*args):
        train.make_optimizers = plain  # before the fork, which would make another one
        other = Process(tmp_path, [*FLAGS, "--data", corpus, "--out_dir", "r"])
        assert other.code() == 0, other.text()
        return plain(*args)

    monkeypatch.setattr(train, "make_optimizers", make_optimizers)
    output = run("--out_dir", "r", *flag, expect=2)
    assert "--out_dir r: another run has written there since this one started" in output
    assert steps(tmp_path / "r")[-1] == 12 and column(tmp_path / "r", "train/loss")[12]


def test_who_only_reads_renames_nothing(run, tmp_path):
    """The run may belong to another process, or be read-only."""
    run("--out_dir", "r", "--save_interval", 6)
    newest = tmp_path / "r/checkpoints/step_00000012.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    output = run("--out_dir", "r", "--auto-resume", "--eval_only")
    assert "step_00000012.pt: " in output and "passed over" in output and "step 6: valid" in output
    assert generation.checkpoint_of(tmp_path / "r").name == "step_00000006.pt"
    assert steps(tmp_path / "r") == [6, 12]


def test_orphaned_ranks_stop(corpus, tmp_path):
    """A rank whose launcher is killed saves and stops by itself."""
    launcher = os.fork()
    if not launcher:
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
        Process(tmp_path, [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 100_000],
                stop_with_torchrun)
        time.sleep(1000)
    wait_for_step(tmp_path / "r", 100)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    for _ in range(3000):
        if "stopped at step" in (tmp_path / "log.txt").read_text():
            break
        time.sleep(0.01)
    step = steps(tmp_path / "r")[-1]
    assert f"stopped at step {step} by SIGTERM" in (tmp_path / "log.txt").read_text()


# --- signals ---


def at_step(monkeypatch, step: int, do):
    """Call `do` in a run just before the update after `step`, once."""
    plain, done = train.learning_rate, []

    def learning_rate(at, cfg):
        if at == step and not done:
            done.append(do())
        return plain(at, cfg)

    monkeypatch.setattr(train, "learning_rate", learning_rate)


def test_sigterm_saves_and_resumes_bit_for_bit(run, tmp_path, monkeypatch):
    run("--out_dir", "whole", "--dropout", "0.1")
    handler = signal.getsignal(signal.SIGTERM)
    at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    output = run("--out_dir", "r", "--dropout", "0.1", expect=143)
    assert steps(tmp_path / "r") == [6]
    assert "stopped at step 6 by SIGTERM; --auto_resume" in output and "sample" not in output
    assert signal.getsignal(signal.SIGTERM) is handler
    run("--auto-resume", "--out_dir", "r", bare=True)
    assert_same_end(tmp_path / "whole", tmp_path / "r")


def test_sigusr1_saves_and_goes_on(run, tmp_path, monkeypatch):
    at_step(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    run("--out_dir", "r", "--save_interval", 0, "--eval_interval", 0)
    assert steps(tmp_path / "r") == [6]


def test_a_signal_to_one_rank_stops_all_at_one_step(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--save_interval", 40]
    group = processes(tmp_path, 2, flags)
    wait_for_step(tmp_path / "r", 40)
    group[1].kill(signal.SIGTERM)
    assert [process.code() for process in group] == [143, 143], group[0].text() + group[1].text()
    step = steps(tmp_path / "r")[-1]
    assert f"stopped at step {step} by SIGTERM" in group[0].text()


def test_a_restart_by_the_launcher_continues_its_own_run(run, corpus, tmp_path):
    """Two attempts of one launch; the run of another is newer."""
    flags = [*FLAGS, "--data", corpus, "--max_steps", 60, "--save_interval", 5]

    def attempt(number: int, bound: int):
        def hook():
            torchrun_sets(number)
            plain = train.learning_rate
            train.learning_rate = lambda step, cfg: (
                plain(step, cfg) if step < bound else time.sleep(1000)
            )

        return Process(tmp_path, flags, hook)

    first = attempt(0, bound=23)
    wait_for_step(tmp_path / "runs/001", 20)
    first.kill(signal.SIGKILL)
    first.code()
    run("--max_steps", 2)
    second = attempt(1, bound=60)
    assert second.code() == 0, second.text()
    assert "resume  runs/001/checkpoints/step_00000020.pt at step 20" in second.text()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["001", "002"]
    assert steps(tmp_path / "runs/001")[-1] == 60 and steps(tmp_path / "runs/002") == [2]


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(corpus, tmp_path):
    """Under the real torchrun, which starts all ranks again after the kill -9 of one."""
    flags = [*map(str, FLAGS), "--data", str(corpus), "--max_steps", "60", "--save_interval", "5"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                "--max_restarts", "2", "--master_port", str(free_port())]
    script = tmp_path / "slow.py"  # the first attempt waits to be killed
    script.write_text(
        "import os, sys, time\n"
        "import conftest, train\n"
        "plain = train.learning_rate\n"
        "def slow(step, cfg):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if step == 23 and first and os.environ['RANK'] == '1':\n"
        "        open('pid.tmp', 'w').write(str(os.getpid()))\n"
        "        os.rename('pid.tmp', 'pid')\n"
        "        time.sleep(60)\n"
        "    return plain(step, cfg)\n"
        "train.learning_rate = slow\n"
        "conftest.main(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [*launcher, str(script), *flags], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    wait_for(tmp_path / "pid")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "resume  runs/001/checkpoints/step_000000" in output
    for whole in processes(tmp_path, 2, [*flags, "--out_dir", "whole"]):
        assert whole.code() == 0, whole.text()
    assert_same_end(tmp_path / "whole", tmp_path / "runs/001")


def test_loader_workers_do_not_die_first(run, corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--num_workers", 2,
             "--save_interval", 20]
    process = Process(tmp_path, flags)
    wait_for_step(tmp_path / "r", 20)
    os.killpg(process.pid, signal.SIGTERM)  # its loader processes receive it too
    assert process.code() == 143, process.text()
    assert "stopped at step" in process.text() and "Traceback" not in process.text()


def slow_save(started: Path, received: Path, until=lambda: False):
    """Make the save of step 8 wait for `until()`; leave marks when it starts, and for signals."""
    save, handle = writer.write_checkpoint, faults.Stop.handle

    def write(path, state):
        if "step_00000008" in path.name:
            started.touch()
            while not until():
                time.sleep(0.01)
        save(path, state)

    def mark(self, *args):
        handle(self, *args)
        received.touch()

    writer.write_checkpoint, faults.Stop.handle = write, mark


def test_a_second_ctrl_c_exits_at_once(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4, "--max_steps", 100]
    started, received = tmp_path / "started", tmp_path / "received"
    process = Process(tmp_path, flags, lambda: slow_save(started, received))
    wait_for(started)
    process.kill(signal.SIGINT)
    wait_for(received)
    time.sleep(0.2)
    assert os.waitpid(process.pid, os.WNOHANG)[0] == 0  # still waiting for the save
    process.kill(signal.SIGINT)
    assert process.code() == 130
    assert steps(tmp_path / "r") == [4]
    assert find_corruption(tmp_path / "r/checkpoints/step_00000004.pt") is None


def test_a_signal_during_a_save(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--save_interval", 4, "--max_steps", 20]
    started, received, inside = (tmp_path / name for name in ("started", "received", "inside"))

    def hook():
        plain = train.learning_rate

        def learning_rate(step, cfg):
            if step == 8:
                inside.touch()
                wait_for(received)
            return plain(step, cfg)

        train.learning_rate = learning_rate
        slow_save(started, received, until=received.exists)

    process = Process(tmp_path, flags, hook)
    wait_for(started)
    wait_for(inside)
    process.kill(signal.SIGTERM)
    assert process.code() == 143, process.text()
    assert steps(tmp_path / "r") == [4, 8, 9]  # including the one that was in progress
    found = list_checkpoints(tmp_path / "r" / "checkpoints")
    assert not any(map(Checkpoint.find_damage, found))


# --- ranks ---


def test_a_rank_that_dies(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--max_steps", 5000, "--save_interval", 40]
    group = processes(tmp_path, 2, flags)
    wait_for_step(tmp_path / "r", 40)
    group[1].kill(signal.SIGKILL)
    assert group[0].code() == 1 and group[1].code() == -9
    output = group[0].text()
    noticed = "train.py: failed: another rank is gone"
    if "no progress: rank 1" in output:  # gloo did not: it misses one in fifty
        noticed = "no progress: rank 1 (host"
    assert noticed in output and "Traceback" not in output
    assert f"saved the last completed step, {steps(tmp_path / 'r')[-1]}" in output


@pytest.mark.parametrize("error", [
    ValueError("bad luck"),
    RuntimeError("GET http://host: Connection reset by peer"),  # of a fork's own connection
])
def test_a_rank_that_raises(corpus, tmp_path, error):
    def hook(rank):
        plain = train.learning_rate

        def learning_rate(step, cfg):
            if step == 3 and rank == 1:
                raise error
            return plain(step, cfg)

        train.learning_rate = learning_rate

    group = processes(tmp_path, 2, [*FLAGS, "--data", corpus, "--out_dir", "r"], hook)
    assert [process.code() for process in group] == [1, 1]
    output = group[1].text()
    said = f"train.py: failed: {type(error).__name__}: {error}"
    assert output.index(said) < output.index("Traceback")
    assert "Traceback" not in group[0].text()
    assert steps(tmp_path / "r") == [3]


@pytest.mark.parametrize("backend", [
    "eager",
    pytest.param("inductor", marks=pytest.mark.slow),
])
def test_compile_and_ranks_can_change_on_resume(run, corpus, tmp_path, monkeypatch, backend):
    """1 rank, 2 ranks, 1 rank compiled, 1 rank: the same samples, so the same losses."""
    monkeypatch.setattr(Transformer, "compile", partialmethod(nn.Module.compile, backend=backend))
    flags = [*FLAGS, "--data", corpus, "--log_interval", 1, "--lr_schedule", "constant",
             "--optimizer", "adamw"]
    run(*flags, "--out_dir", "whole", "--max_steps", 20)
    flags += ["--out_dir", "r", "--auto-resume", "--max_steps"]
    run(*flags, 5)
    for process in processes(tmp_path, 2, [*flags, 10]):
        assert process.code() == 0, process.text()
    assert "compile on" in run(*flags, 15, "--compile")
    run(*flags, 20, "--no_compile")
    one, two = (column(tmp_path / name, "train/loss") for name in ("whole", "r"))
    assert list(one) == list(two)
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-4)
    model = Transformer(tiny_config())
    names = list(model.state_dict())
    model.compile()
    assert list(model.state_dict()) == names


# --- exceptions ---


def test_an_exception_saves_the_last_step(run, tmp_path, monkeypatch):
    for error, code, said in ((ValueError("bad luck"), 1, "failed: ValueError: bad luck"),
                              (KeyboardInterrupt(), 130, "interrupted")):

        def fail(error=error):
            raise error

        with monkeypatch.context() as patch:
            at_step(patch, 5, fail)
            output = run("--out_dir", f"r{code}", expect=code)
        assert said in output and "saved the last completed step, 5" in output
        run("--auto-resume", "--out_dir", f"r{code}", bare=True)
    run("--out_dir", "whole")
    assert_same_end(tmp_path / "whole", tmp_path / "r1")
    assert_same_end(tmp_path / "whole", tmp_path / "r130")


def test_half_an_update_is_not_saved(run, tmp_path, monkeypatch):
    calls, plain = itertools.count(1), torch.optim.AdamW.step

    def step(self, *args):
        if next(calls) == 6:
            raise ValueError("bad luck")
        return plain(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    output = run("--out_dir", "r", "--save_interval", 4, expect=1)
    assert steps(tmp_path / "r") == [4] and "saved the last" not in output


def test_out_of_memory_says_what_to_try(run, tmp_path, monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    at_step(monkeypatch, 5, fail)
    output = run("--out_dir", "r", expect=1)
    assert "out of memory: Tried to allocate 20.00 GiB; try --micro_batch_size 4; the" in output
    assert steps(tmp_path / "r") == [5]


def test_after_unequal_shares_any_smaller_micro_batch_is_advised():
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=4, micro_batch=4)
    advice = memory.memory_advice(ranks, 14, RuntimeError("can't allocate memory"))
    assert "try --micro_batch_size 2; the" in advice
    ranks.world_size = 2  # shares of 7
    assert "try --micro_batch_size 1; the" in memory.memory_advice(ranks, 14, RuntimeError("no"))


def test_the_micro_batch_that_fits_is_found(run, tmp_path, monkeypatch):
    plain = Transformer.forward

    def forward(self, tokens, *rest):
        if len(tokens) > 5:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")
        return plain(self, tokens, *rest)

    run("--out_dir", "whole", "--log_interval", 1)
    monkeypatch.setattr(Transformer, "forward", forward)
    output = run("--out_dir", "r", "--micro_batch_size", "auto", "--log_interval", 1)
    assert "1 x 2 micro-batches of 4" in output
    one, two = (column(tmp_path / name, "train/loss") for name in ("whole", "r"))
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-4)


# --- not finite ---


def poison(monkeypatch, first: int, last: int):
    """Make the loss of every batch with a sample from first … last - 1 not finite."""
    forward, batch = Transformer.forward, data.Mixture.batch

    def bad_batch(self, start, stop):
        out = batch(self, start, stop)
        return data.Batch(torch.full_like(out.tokens, 7)) if start < last and stop > first else out

    def bad_forward(self, tokens, *rest):
        losses = forward(self, tokens, *rest)
        return losses * math.nan if (tokens == 7).all() else losses

    monkeypatch.setattr(data.Mixture, "batch", bad_batch)
    monkeypatch.setattr(Transformer, "forward", bad_forward)


BAD = ["--max_steps", 40, "--save_interval", 10, "--eval_interval", 0, "--log_interval", 5,
       "--max_nonfinite", 5]


@pytest.mark.parametrize("monitor", ["light", "off"])
def test_rollback_skips_the_bad_samples(run, tmp_path, monkeypatch, monitor):
    poison(monkeypatch, 160, 240)  # of steps 21 to 30
    output = run("--out_dir", "r", *BAD, "--on_nonfinite", "rollback", "--monitor", monitor)
    assert "warning: 5 steps in a row, up to step 25, had a loss or gradient that was not" in output
    assert "step_00000020.pt, continuing at sample 200" in output
    assert "step_00000020.pt, continuing at sample 240" in output
    assert list(column(tmp_path / "r", "train/loss")) == [1, *range(5, 21, 5), 21, 25, 30, 35, 40]
    assert all(v is not None for v in column(tmp_path / "r", "train/loss").values())
    state = final(tmp_path / "r")
    assert state["step"] == 40 and state["position"] == 40 * 8 + 80
    shown = {}
    for step in (20, 21):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert prepare.main(["show", str(tmp_path / "r"), str(step)]) == 0
        shown[step] = output.getvalue()
    assert "152" in shown[20] and "240" in shown[21]


def test_rollback_gives_up(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 10**9)
    output = run("--out_dir", "r", *BAD, "--on_nonfinite", "rollback", expect=1)
    assert output.count("; rolled back to ") == 3 and "failed: 5 steps in a row" in output


def test_abort(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 240)
    output = run("--out_dir", "r", *BAD, "--on_nonfinite", "abort", expect=1)
    assert "train.py: failed: 5 steps in a row, up to step 25, had" in output
    assert "Traceback" not in output and steps(tmp_path / "r")[-1] <= 25


def test_skip_goes_on(run, tmp_path, monkeypatch):
    poison(monkeypatch, 160, 240)
    output = run("--out_dir", "r", *BAD)
    assert "finite again; 10 steps from step 21 on were not" in output
    assert final(tmp_path / "r")["position"] == 320


def test_skipping_to_the_end_is_said_without_logs_too(run, tmp_path, monkeypatch):
    poison(monkeypatch, 8, 10**9)
    output = run("--log_interval", 0)
    assert output.count("warning: the last 11 steps had a loss or gradient that was not") == 1


def spoil_weights(monkeypatch, at: int, times: int):
    """A weight becomes infinite just before the update after step `at`, the first so many times."""
    running, left, main, plain = [], [times], train.train, train.learning_rate

    def learning_rate(step, cfg):
        if step == at and left[0]:
            left[0] -= 1
            with torch.no_grad():
                running[0].model.blocks[1].mlp.down.weight[0, 0] = math.inf
        return plain(step, cfg)

    monkeypatch.setattr(train, "train", lambda *a: running.append(a[0]) or main(*a))
    monkeypatch.setattr(train, "learning_rate", learning_rate)


def test_a_run_goes_back_where_its_weights_are_not_finite(run, tmp_path, monkeypatch):
    """At its end; before that they are not saved."""
    spoil_weights(monkeypatch, 5, times=1)
    output = run("--out_dir", "r", "--save_interval", 2, "--eval_interval", 4)
    assert "step 6: the weights are not finite; not saved" in output
    assert output.count("; rolled back to ") == 1
    assert "step_00000004.pt, continuing at sample 96" in output
    state = final(tmp_path / "r")
    assert state["step"] == 12 and state["position"] == 96 + 64
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_whose_weights_are_never_finite_ends(run, tmp_path, monkeypatch, policy):
    spoil_weights(monkeypatch, 5, times=100)
    output = run("--out_dir", "r", "--save_interval", 2, "--eval_interval", 4, "--max_nonfinite", 3,
                 "--on_nonfinite", policy, expect=1)
    assert output.count("; rolled back to ") == 3
    assert output.count("the weights are not finite at") == 4
    assert steps(tmp_path / "r") == [2, 4] and "Traceback" not in output
    assert torch.load(tmp_path / "r/checkpoints/best.pt", weights_only=True)["step"] == 4


TOO_FAST = ["--learning_rate", 1e30, "--optimizer", "adamw", "--grad_clip", 0]


@pytest.mark.parametrize("flags", [
    [], ["--on_nonfinite", "abort"], ["--log_interval", 0], ["--max_steps", 2],
    ["--max_nonfinite", 2, "--max_steps", 500],
])
def test_a_learning_rate_that_ends_the_weights_ends_the_run(run, tmp_path, flags):
    output = run("--out_dir", "r", *TOO_FAST, *flags, expect=1)
    assert output.splitlines()[-1].startswith("train.py: failed: the weights are not finite at")
    assert steps(tmp_path / "r") == [] and "step   8/500" not in output


@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3"])
def test_so_it_does_on_all_ranks(run, tmp_path, way):
    output = run("--out_dir", "r", *TOO_FAST, "--parallel", way, ranks=2, expect=1)
    assert output.count("train.py: failed: the weights are not finite at step 12") == 1


# --- changes on resume ---


def test_other_data_is_refused(run, copy, corpus, tmp_path):
    other = Path(shutil.copytree(corpus, tmp_path / "other"))
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20, "--data", other]
    run(*flags[:-1], other, "--max_steps", 13, bare=True)  # data may move
    os.truncate(other / "train.bin", (other / "train.bin").stat().st_size - 2)
    assert "train.bin" in run(*flags, bare=True, expect=2)
    write_tokens(other / "train.bin", [b"something else " * 1000])
    output = run(*flags, bare=True, expect=2)
    assert "data has changed: train.bin (15,001 tokens)" in output
    assert "--allow_change data" in output
    assert "at step 13" in run(*flags, "--allow_change", "data", bare=True)


def test_changes_are_listed_and_refused(run, copy):
    flags = ["--auto-resume", "--out_dir", "r", "--max_steps", 20, "--seed", 7, "--batch_size", 4]
    output = run(*flags, bare=True, expect=2)
    assert "seed 1337 -> 7, batch_size 8 -> 4" in output
    assert "--allow_change seed batch_size" in output
    assert "batch_size" in run(*flags, "--allow_change", "seed", bare=True, expect=2)
    run(*flags, "--allow_change", "seed", "batch_size", bare=True)
    assert final(copy)["position"] == 12 * 8 + 8 * 4  # no sample twice, none skipped


def test_a_longer_run_says_how_its_schedule_changes(run, copy):
    output = run("--auto-resume", "--out_dir", "r", "--max_steps", 24, bare=True)
    assert "max_steps 12 -> 24: the schedule has its new length; the learning rate goes" in output


def test_resuming_a_long_run_reads_only_its_tail(run, copy, tmp_path):
    """Old rows are neither read nor rewritten; rows of steps to be made again are dropped."""
    path = copy / "metrics.jsonl"
    own = path.read_text()
    past = [f'{{"step": {i // 100_000}, "train/loss": 1.0}}\n' for i in range(300_000)]
    path.write_text("".join(past) + own + '{"step": 13, "lost": 1}\n{"step": 14, "torn')
    inode = path.stat().st_ino
    file, kept, dropped = telemetry.open_metrics(path, 12)
    file.close()
    assert len(kept) < 20_000 and kept[-1]["step"] == 12
    assert [row["step"] for row in dropped] == [13]
    assert path.read_text() == "".join(past) + own and path.stat().st_ino == inode


def test_a_clock_that_jumps_back(run, tmp_path, monkeypatch):
    hours = itertools.count(0)
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() - 3600 * next(hours))
    run("--out_dir", "r", "--save_interval", 4)
    monkeypatch.undo()
    values = [v for row in rows(tmp_path / "r") for k, v in row.items()
              if k.startswith(("perf/", "goodput/")) and isinstance(v, (int, float))]
    assert values and min(values) >= 0


# --- backups ---


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket on a local server that speaks S3."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in dict(ACCESS_KEY_ID="x", SECRET_ACCESS_KEY="x", DEFAULT_REGION="us-east-1",
                            ENDPOINT_URL=f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(f"AWS_{name}", value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket/run"
    server.stop()


@pytest.mark.parametrize("scheme", [
    "file", "memory", pytest.param("s3", marks=pytest.mark.slow),
])
def test_a_backup_can_be_resumed(run, tmp_path, request, scheme):
    url = {"file": f"file://{tmp_path}/disk2", "memory": f"memory://{tmp_path.name}"}.get(scheme)
    url = url or request.getfixturevalue("s3")
    run("--out_dir", "r", "--backup_to", url, "--save_interval", 2)
    shutil.rmtree(tmp_path / "r")  # the machine is lost
    output = run("--resume", url, "--out_dir", "new", "--max_steps", 20, bare=True)
    assert "step_00000012.pt at step 12" in output
    one = f"{url}/checkpoints/step_00000020.pt"  # the new run keeps backing up there
    assert "at step 20" in run("--resume", one, "--out_dir", "n", "--max_steps", 21, bare=True)
    logged = list(column(tmp_path / "new", "train/loss"))
    assert logged[:3] == [1, 4, 8] and logged[-1] == 20  # its history came along
    assert "error: --resume" in run("--resume", f"{url}/none", expect=2)
    output = run("--backup_to", "nothing://there", "--out_dir", "refused", expect=2)
    assert "error: --backup_to nothing://there" in output and not (tmp_path / "refused").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "lock"}


@pytest.fixture
def backed_up(run, tmp_path) -> str:
    """The URL of the backup of a run in the directory `a`, of 8 steps."""
    url = f"file://{tmp_path}/disk2"
    run("--out_dir", "a", "--backup_to", url, "--max_steps", 8,
        "--save_interval", 4)
    return url


def test_a_backup_of_another_run_is_refused(run, tmp_path, monkeypatch, backed_up):
    before = contents(tmp_path)
    for flags in (["--out_dir", "b"], ["--out_dir", "b", "--auto-resume"], [],
                  ["--out_dir", "a", "--overwrite"],
                  ["--out_dir", "b", "--resume", "a/checkpoints/step_00000004.pt"]):
        output = run(*flags, "--backup_to", backed_up, expect=2)
        assert f"--backup_to {backed_up}: holds another run" in output
        assert f"--resume {backed_up}" in output and contents(tmp_path) == before
    shutil.move(tmp_path / "a/checkpoints", tmp_path / "moved")  # and there is no other copy
    assert "holds another run" in run("--out_dir", "a", "--auto-resume", bare=True, expect=2)
    monkeypatch.setattr(rundir, "check_backup", lambda *given: None)  # as if both began at once
    output = run("--out_dir", "b", "--backup_to", backed_up)
    assert f"warning: no backup to {backed_up}" in output and steps(tmp_path / "b")
    run("--out_dir", "a", "--auto-resume", bare=True)
    assert contents(tmp_path / "disk2").items() <= before.items()


@pytest.mark.parametrize("place", ["a", "a/checkpoints/x", ".", "link", "runs/7"])
def test_a_backup_apart_from_the_run_is_expected(run, copy, tmp_path, place):
    copy.rename(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = contents(tmp_path)
    flags = [] if place == "runs/7" else ["--out_dir", "a", "--auto-resume"]
    for url in (place, f"file://{tmp_path}/{place}", f"local://{tmp_path}/x/../{place}"):
        output = run(*flags, "--backup_to", url, expect=2)
        assert f"--backup_to {url}: overlaps the run" in output
    assert contents(tmp_path) == before


def test_a_run_goes_on_with_its_own_backup(run, tmp_path, backed_up):
    for older in (tmp_path / "a/config.yaml", tmp_path / "disk2/config.yaml"):  # without a name
        older.write_text(re.sub("# run: .*\n", "", older.read_text()))
    run("--auto-resume", "--out_dir", "a", "--max_steps", 12, bare=True)
    assert steps(tmp_path / "disk2") == [4, 8, 12]
    run("--resume", "a/checkpoints/step_00000004.pt", "--max_steps", 6, "--keep_checkpoints", 1,
        bare=True)
    assert steps(tmp_path / "disk2") == [6]  # those of the steps that it went back from are aside
    assert {path.name for path in (tmp_path / "disk2/checkpoints").glob("*.set-aside")} == {
        "step_00000008.pt.set-aside", "step_00000012.pt.set-aside"}
    run("--resume", backed_up, "--out_dir", "b", "--max_steps", 8, bare=True)
    assert steps(tmp_path / "disk2") == [8]


def test_a_failing_backup_does_not_stop_training(run, tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    def fail(*args, **kwargs):
        raise PermissionError(13, "no")

    monkeypatch.setattr(LocalFileSystem, "put_file", fail)
    monkeypatch.setattr(retry.time, "sleep", lambda s: None)
    output = run("--out_dir", "r", "--backup_to", f"file://{tmp_path}/b", "--save_interval", 4)
    assert "no backup to file://" in output and "step 12/12" in output


# --- verify_resume ---


def test_verify_resume(run, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    flags = ["--patience", 1, "--eval_interval", 1, "--learning_rate", 1]  # ends no part of it
    flags += ["--auto_resume", "--dropout", "0.1"]  # it starts afresh all the same
    assert "verify_resume: identical, " in run("--verify_resume", 4, *flags)
    plain = train.seed_everything  # below, as if dropout did not resume
    count = itertools.count()
    monkeypatch.setattr(train, "seed_everything", lambda *a: plain(next(count), *a[1:]))
    output = run("--verify_resume", 4, "--dropout", "0.1", expect=1)
    assert "verify_resume: differs after 4 + 4 steps: model." in output
    assert not list((tmp_path / "temporary").glob("steady-verify-*"))


def test_verify_resume_on_two_ranks(corpus, tmp_path):
    for process in processes(tmp_path, 2, [*FLAGS, "--data", corpus, "--verify_resume", 3]):
        assert process.code() == 0, process.text()
    assert "verify_resume: identical" in (tmp_path / "log0.txt").read_text()
