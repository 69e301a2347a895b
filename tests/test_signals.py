"""A signal is answered at once, in whatever it comes, and costs no step."""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, assert_same_end, before, column, rows, saved, steps, until, wait_for
from test_watchdog import at_step, hang_of, stuck

import data
import train
from steady.checkpoints import backup
from steady.guard.process import begin
from steady.models.evaluation import Means

FLAGS = ["--out_dir", "r", "--save_interval", 4, "--eval_interval", 6, "--eval_steps", 0,
         "--dropout", 0.1, "--no_compile"]
LONG = ["--out_dir", "run", "--max_steps", 100_000, "--save_interval", 4, "--eval_interval", 0,
        "--no_compile"]

# --- evaluations, samples, uploads -----------------------------------------------------------


def at_batch(n: int, act) -> list:
    """Call act() at batch number n of the evaluations; a list that counts them; for a hook."""
    batches = []

    def count(*_):
        batches.append(1)
        if len(batches) == n:
            act()

    before(Means, "add", count)
    return batches


def finish_and_compare(run, flags=(), ranks=1):
    """Resume, and compare the end, and the evaluations, with a run that was not disturbed."""
    run(*FLAGS, *flags, "--auto_resume", ranks=ranks)
    run(*FLAGS, *flags, "--out_dir", "whole", ranks=ranks)
    assert_same_end(Path("r"), Path("whole"), "evaluated_step", "best_loss")
    assert column(Path("r"), "val/loss") == column(Path("whole"), "val/loss")
    assert [row["step"] for row in rows(Path("r")) if "val/loss" in row] == [6, 12]


@pytest.mark.parametrize("ranks, flags", [
    (1, ["--ema", 0.9]), pytest.param(2, [], marks=pytest.mark.slow),
    pytest.param(2, ["--parallel", "zero3"], marks=pytest.mark.slow)])
def test_a_signal_in_an_evaluation_ends_it_and_costs_no_step(run, tmp_path, ranks, flags):
    def hook(rank):
        def stop():
            if rank == ranks - 1:  # the others hear of it
                signal.raise_signal(signal.SIGTERM)

        plain, batches = train.train, at_batch(2, stop)
        train.train = lambda *args: (plain(*args),
                                     Path(f"batches{rank}").write_text(str(len(batches))))

    printed = run(*FLAGS, *flags, ranks=ranks, hook=hook, expect=143)
    assert steps(tmp_path / "r") == [4, 6] and "stopped at step 6 by SIGTERM" in printed
    assert all(int((tmp_path / f"batches{rank}").read_text()) <= 3 for rank in range(ranks))
    assert not column(tmp_path / "r", "val/loss")
    finish_and_compare(run, flags, ranks)


@pytest.mark.parametrize("logged", [False, True])
def test_a_kill_in_an_evaluation_costs_no_step(run, tmp_path, logged):
    """Nor is an evaluation that is made again in the log twice."""
    def kill(*args):
        wait_for(tmp_path / "r/checkpoints/step_00000006.pt")
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(rank):
        if logged:
            train.keep_best = kill
        else:
            at_batch(2, kill)

    run(*FLAGS, hook=hook, expect=-9)
    assert steps(tmp_path / "r") == [4, 6] and bool(column(tmp_path / "r", "val/loss")) == logged
    finish_and_compare(run)


def test_the_last_evaluation_is_made_up_for_once(run, tmp_path):
    def hook(rank, at=0):
        at_batch(at, lambda: signal.raise_signal(signal.SIGTERM))
        plain = train.keep_best
        train.keep_best = lambda run, loss: plain(run, loss and loss + run.progress.step)  # worse

    flags = [*FLAGS, "--sample_interval", 0]  # before one it would be saved, too
    run(*flags, hook=lambda rank: hook(rank, 21), expect=143)
    printed = [run(*flags, "--auto_resume", hook=hook) for _ in range(2)]
    assert ["nothing to do" in each for each in printed] == [False, True]
    assert saved(tmp_path / "r").items() >= dict(evaluated_step=12, best_step=6, waited=1).items()
    assert (made := [row["step"] for row in rows(tmp_path / "r")]) == sorted(made)  # or none is cut


@pytest.mark.slow
@pytest.mark.parametrize("ranks, flags", [(2, []), (2, ["--parallel", "zero3"])])
def test_a_signal_in_a_sample_cuts_it_short(run, tmp_path, ranks, flags):
    def hook(rank):
        plain = train.generate

        def generate(model, prompt, n, *args, **how):
            signal.raise_signal(signal.SIGTERM)
            return plain(model, prompt, 1_000_000, *args, **how)

        train.generate = generate

    run(*FLAGS, "--sample_interval", 5, *flags, ranks=ranks, hook=hook, expect=143)
    assert steps(tmp_path / "r") in ([4, 5], [4, 5, 6])
    assert not any("sample" in row for row in rows(tmp_path / "r"))
    finish_and_compare(run, flags, ranks)


def test_a_signal_in_the_last_upload_ends_it(run, tmp_path):
    def hook(rank):
        def close(self, asked):
            self.thread.join()
            backup.Backup.upload = upload

        def upload(self, checkpoint):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

        before(backup.Backup, "close", close)

    printed = run(*FLAGS, "--backup_to", f"file://{tmp_path}/b", hook=hook, expect=143)
    assert "warning: stopped before the backup of " in printed and steps(tmp_path / "r")[-1] == 12


# --- a training thread that is stuck ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["sleep", "file", "C"])
def test_the_first_ctrl_c_is_answered_before_the_step_ends(start, tmp_path, kind):
    (process,) = start(*LONG, hook=lambda rank: at_step(7, lambda: stuck(kind)))
    wait_for(tmp_path / "stuck")
    process.kill(signal.SIGINT)
    process.wait_for("stopping after this step; Ctrl-C again ends it at once")
    process.kill(signal.SIGINT)
    assert process.code(4) == 130


def test_the_watchdog_writes_its_files_where_nobody_reads_the_screen(start, tmp_path):
    def hang():
        reader, full = os.pipe()
        fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4096)
        os.write(full, bytes(4096))
        os.dup2(full, 1)
        os.dup2(full, 2)
        time.sleep(1000)

    (process,) = start(*LONG, "--hang_seconds", 2, hook=lambda rank: at_step(7, hang))
    stacks = tmp_path / "run/stacks/rank_0.txt"
    assert until(lambda: stacks.exists() and "test_signals.py" in stacks.read_text(), 60)
    process.kill(signal.SIGKILL)
    assert process.code() == -9
    assert (hang_of(tmp_path)["step"], hang_of(tmp_path)["hang_code"]) == (6, "stuck")


# --- a small /dev/shm, process 1 -------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 6])
def test_a_batch_that_finds_no_room_in_dev_shm_ends_the_run_with_a_line(start, tmp_path, step):
    """Of 1 MB, in a user namespace and a mount namespace of its own, if those are allowed."""
    def hook(rank):
        libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
        if libc.unshare(0x10000000 | 0x20000):
            os._exit(75)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        if libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
            os._exit(75)
        def fill(mixture, start, stop):
            if start >= step * 8:  # again at each batch, for the room that came back
                with contextlib.suppress(OSError), open("/dev/shm/full", "ab", 0) as file:
                    while file.write(bytes(1 << 12)):
                        pass

        before(data.Mixture, "batch", fill)

    (process,) = start(*LONG, "--num_workers", 1, hook=hook)
    code = process.code(60)
    if code == 75:
        pytest.skip("no user namespaces here")
    assert code == 1 and "in /dev/shm" in process.text() and "Traceback" not in process.text()
    found = steps(tmp_path / "run")  # room may come back while batches in flight are used
    assert found == [4, found[-1]] and 5 <= found[-1] if step else found == []


def test_process_1_answers_sigterm_while_it_starts(tmp_path):
    script = ("import sys, time; sys.path.insert(0, sys.argv[1])\n"
              "from steady.guard.process import begin\n"
              "begin(); open('begun', 'w'); time.sleep(100)")
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child",
         sys.executable, "-c", script, ROOT], cwd=tmp_path)
    until(lambda: (tmp_path / "begun").exists() or process.poll() is not None)
    if process.poll() is not None:
        pytest.skip("no user namespaces here")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text()), signal.SIGTERM)
    assert process.wait(30) == 143


def test_ctrl_c_ends_the_search_for_rank_0(start, tmp_path):
    def hook(rank):
        if rank == 0:
            time.sleep(1000)
        begin()
        before(train, "meet", lambda *_: Path("begun").touch())

    missing, searching = start(ranks=2, hook=hook)
    wait_for(tmp_path / "begun")
    missing.kill(signal.SIGKILL)
    searching.kill(signal.SIGINT)
    assert searching.code(30) == -signal.SIGINT and missing.code() == -signal.SIGKILL
