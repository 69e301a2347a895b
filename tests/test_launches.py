"""Launches, their restarts and their orphans: as torchrun makes them, on one host."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import TINY, TRAIN, before, column, environment, free_port, python, wait_for
from test_huggingface import FAMILIES, save_random

import train
from steady.checkpoints import writer
from steady.guard import neighbours
from steady.ranks.ranks import LAUNCHERS
from steady.tokens.files import write_tokens
from steady.watch import proc

FLAGS = [*TINY, "--log_interval", 1, "--eval_interval", 0]
slow = pytest.mark.slow


def test_a_restart_that_would_begin_anew_is_refused(run, tmp_path):
    def hook(rank):  # as torchrun does
        os.environ |= dict(TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT="1")

    run(*FLAGS, "--max_steps", 4, "--out_dir", "old")
    flags = [*FLAGS, "--max_steps", 6, "--out_dir", "old"]
    for more in (["--overwrite"], ["--resume", "old/checkpoints/step_00000004.pt"]):
        told = run(*flags, *more, hook=hook, expect=2)
        assert "continues it only with --auto_resume --out_dir" in told
    assert "at step 4" in run(*flags, "--auto_resume", hook=hook)
    assert list(column(tmp_path / "old", "train/loss")) == list(range(1, 7))


@pytest.mark.parametrize("source, out_dir", [("link.pt", "new"), ("best.pt", "old")])
def test_a_run_that_starts_from_a_checkpoint_never_starts_at_0(run, tmp_path, source, out_dir):
    """Also where it is killed before it has saved one of its own."""
    def hook(rank):
        writer.write_checkpoint = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

    run(*FLAGS, "--max_steps", 4, "--eval_interval", 4, "--out_dir", "old")
    folder = tmp_path / "old/checkpoints"
    (folder / "link.pt").symlink_to(folder / "best.pt")
    if source == "best.pt":
        (folder / "step_00000004.pt").unlink()
    flags = [*FLAGS, "--max_steps", 8, "--save_interval", 3, "--out_dir", out_dir]
    run(*flags, "--resume", folder / source, hook=hook, expect=-9)
    if out_dir == "new":
        shutil.rmtree(tmp_path / "old")  # nothing of it is needed
    told = run(*flags, "--auto-resume")
    assert list(column(tmp_path / out_dir, "train/loss"))[-4:] == [5, 6, 7, 8]
    assert "at step 4" in told


def torchrun(folder, script, *flags, options) -> subprocess.Popen:
    """Start it in a session of its own; what it and its ranks print goes to folder/log."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--", script, *flags]
    with open(folder / "log", "a") as log:
        return subprocess.Popen([*map(str, command)], cwd=folder, env=environment(), stdout=log,
                                stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.parametrize("texts, said, code", [
    ([], "py: error: --data d.bin: no such", -9), ([b"old "], "py: error: --data: rank 1, on ", 1),
    ([b"new "], "py: error: --init_from: rank 1, on ", 1)])
def test_a_rank_that_fails_alone_says_why(run, start, tmp_path, texts, said, code):
    """As on a host without the data, or with others; what all have in common is said once."""
    for host, on_host, kind in ("0", [b"new "], "llama"), ("1", texts, "qwen3"):
        save_random(tmp_path / host / "m", FAMILIES[kind]())
        for text in on_host:
            write_tokens(tmp_path / host / "d.bin", [text * 400])
    group = start("--data", "d.bin", "--init_from", "m", "--seq_len", 32, "--out_dir",
                  tmp_path / "r", bare=True, ranks=2, hook=lambda rank: os.chdir(str(rank)))
    assert group[1].code() == 2
    if code == -9:  # rank 0 still waits for it, else it notices
        group[0].kill(signal.SIGKILL)
    assert group[0].code() == code
    assert said in group[1].text()
    assert run("--resume", "none", ranks=2, expect=2).count("--resume none: no such file") == 1


# Rank 1 waits for ever, and rank 0 for it, or also by itself; each leaves its process id.
WAITS = """
import os, sys, threading, time
def wait(*args):
    time.sleep(1000)
rank, where = os.environ["RANK"], sys.argv.pop(1)
from steady.guard import process
threading.Thread(target=process.stop_with_torchrun, args=[os.getppid()], daemon=True).start()
open("pid" + rank, "w").write(str(os.getpid()))
if where == "import":
    wait()
import conftest, train
from steady.ranks import ranks
if where == "meet" and rank == "1":
    ranks.meet = wait
if where == "data" and rank == "1":
    train.load_data = wait
train.process.run(train.main)
"""


@slow
@pytest.mark.parametrize("where, seconds", [("import", 0), ("meet", 4), ("data", 4)])
def test_orphans_leave_and_the_next_launch_never_meets_them(corpus, tmp_path, where, seconds):
    (tmp_path / "waits.py").write_text(WAITS)
    options = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    flags = [*FLAGS, "--data", corpus, "--max_steps", 4, "--hang_seconds", 60]
    launch = torchrun(tmp_path, "waits.py", where, *flags, options=options)
    for rank in (0, 1):
        wait_for(tmp_path / f"pid{rank}")
    time.sleep(seconds)
    launch.kill()
    launch.wait()
    again = torchrun(tmp_path, TRAIN, *flags, "--out_dir", "again", options=options)
    assert again.wait(100) == 0, (tmp_path / "log").read_text()
    assert list(column(tmp_path / "again", "train/loss")) == [1, 2, 3, 4]
    for rank in (0, 1):
        state = proc.stat_fields((tmp_path / f"pid{rank}").read_text())
        assert not state or state[0] == "Z"


def test_a_launch_with_the_same_port_does_not_end_the_first(start, tmp_path):
    """Without torchrun: its rank 0 cannot listen there, but rank 1 reaches the first's store."""
    def waits(rank):  # in its first step, for the second launch to end
        before(train, "learning_rate", lambda *_: wait_for(tmp_path / "ended"))

    flags, both = [*FLAGS, "--max_steps", 40, "--out_dir"], dict(ranks=2, port=free_port())
    first = start(*flags, "a", hook=waits, **both)
    wait_for(tmp_path / "a/metrics.jsonl")
    second = start(*flags, "b", **both)
    assert second[0].code() == 1
    second[1].kill(signal.SIGKILL)  # it would wait for its rank 0
    time.sleep(1.5)  # in which the watchdogs of the first look at their notes
    (tmp_path / "ended").touch()
    assert [process.code() for process in first] == [0, 0], first[0].text()


@pytest.mark.parametrize("name, launcher", LAUNCHERS.items())
def test_tasks_without_torchrun_are_refused(run, tmp_path, monkeypatch, name, launcher):
    monkeypatch.setenv(name, "2")
    told = run("--max_steps", 2, expect=2)
    assert f"{name}=2" in told and launcher in told and not any(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it
    run("--max_steps", 2, "--eval_interval", 0)


SPIN = """
import os, threading, time
import torch
from steady.guard import neighbours
def worked():  # nanoseconds
    return sum(int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in tasks)
def spun():  # by threads that wait for the next operation
    began = worked()
    for _ in range(30):
        tensor.add_(1)
        time.sleep(0.02)
    return worked() - began
tensor = torch.zeros(100_000)
tensor.add_(1)
tasks = os.listdir("/proc/self/task")
alone = spun()
neighbours.crowded, there = lambda seconds: not time.sleep(0.01) and there, True
team = threading.Thread(target=neighbours.wait_with_team)
team.start()
time.sleep(0.2)
crowded, threads = spun(), len(os.listdir("/proc/self/task"))
there = False
team.join()
time.sleep(0.5)
left = len(os.listdir("/proc/self/task"))
print(crowded / alone, spun() / alone, threads - len(tasks), left - len(tasks))
"""
OTHERS = """
import atexit, itertools, runpy, sys, time
from steady.guard import neighbours
answers, made, plain = itertools.cycle([True, True, False]), [], neighbours.wait_with_team
neighbours.crowded = lambda seconds: not time.sleep(0.02) and next(answers)
neighbours.wait_with_team = lambda: made.append(1) or plain()
atexit.register(lambda: print("teams", len(made)))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(proc.usable_cores() < 2, reason="never spins")
def test_a_second_team_stops_openmp_from_spinning_and_leaves_without_a_trace():
    printed, _ = python("-c", SPIN, OMP_NUM_THREADS="2", GOMP_SPINCOUNT="300000")
    crowded, after, started, left = map(float, printed.split())
    assert crowded < 0.5 < after
    assert started == os.cpu_count() + 1 and left == 0


def test_no_second_team_where_libgomp_would_end_the_process(monkeypatch):
    """It may not start a thread: the limit on them counts all processes of the user."""
    rounds, made = iter([True]), []
    monkeypatch.setattr(neighbours, "crowded", lambda seconds: next(rounds))
    monkeypatch.setattr(neighbours, "wait_with_team", lambda: made.append(1))
    monkeypatch.setattr(proc, "soft_limit", lambda name: 5)
    with pytest.raises(StopIteration):
        neighbours.make_room()
    assert not made


@pytest.mark.slow
def test_neighbours_that_come_and_go_change_no_loss(corpus, tmp_path):
    flags = [*FLAGS, "--data", corpus, "--max_steps", 40]
    losses = []
    for code, workers in ([], 0), (["-c", OTHERS], 0), (["-c", OTHERS], 2):
        out = tmp_path / str(len(losses))
        printed, _ = python(*code, TRAIN, *flags, "--num_workers", workers, "--out_dir", out,
                            folder=tmp_path, OMP_NUM_THREADS="2")
        losses.append(column(out, "train/loss"))
        assert not code or int(printed.split("teams")[1]) > 1
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 40
