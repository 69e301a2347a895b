"""What a command line, a file of options or a damaged run may hold: one line, or it goes on."""

import contextlib
import dataclasses
import gc
import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY, TRAIN, environment

import config
import train
from steady.checkpoints import writer
from steady.checkpoints.checkpoint import Checkpoint, list_checkpoints
from steady.checkpoints.sealed import write_checkpoint
from steady.guard.process import exit_code, leave
from steady.options import given_texts
from tools import verify
from tools.report import main as report_command


@pytest.fixture
def refused(run, tmp_path):
    """refused(*flags) → the one line that `python train.py` prints; nothing changes on disk."""

    def contents() -> dict:
        return {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}

    def refused(*flags, bare=False, config=None) -> str:
        if config is not None:
            (tmp_path / "c.yaml").write_bytes(config)
            flags = (*flags, "--config", "c.yaml")
        before = contents()
        printed = run(*flags, bare=bare, expect=2)
        assert printed.startswith("train.py: error: ") and printed.count("\n") == 1, printed
        assert contents() == before
        return printed

    return refused


@pytest.mark.parametrize("flags, said", [
    ("--micro_batch_size ²", "micro_batch_size ²: expected a number"),
    ("--micro_batch_size " + "9" * 5000, "micro_batch_size"),
    ("--num_workers ²", "num_workers ²: expected a number"),
    ("--num_workers 1000000", "num_workers 1000000: expected a number"),
    ("--data a:1/0", "a:1/0: no such file or folder"),
    ("--data a:nan", "a:nan: expected a weight"),
    ("--data a:inf", "a:inf: expected a weight"),
    ("--data a:-1", "a:-1: expected a weight"),
    ("--data a:1e400", "a:1e400: expected a weight"),
    ("--data a:1e-400", "a:1e-400: expected a weight"),
    ("--data a:1e999999999", "a:1e999999999: expected a weight"),
    ("--data ~nosuchuser/x", "~nosuchuser/x: no such user"),
    ("--val_data ~nosuchuser/x", "~nosuchuser/x: no such user"),
    ("--out_dir ~nosuchuser/x", "~nosuchuser/x: no such user"),
    ("--resume ~nosuchuser/x", "~nosuchuser/x: no such user"),
    ("--rope_scaling 0", "rope_scaling"),
    ("--rope_scaling nan", "finite"),
    ("--rope_scaling -1", "rope_scaling"),
    ("--rope_scaling 8 1 1 64", "rope_scaling"),
    ("--rope_scaling 8 4 1 64", "rope_scaling"),
    ("--rope_scaling 8 0 1 64", "rope_scaling"),
    ("--rope_scaling 8 1 4 0", "rope_scaling"),
    ("--rope_scaling 0 1 4 64", "rope_scaling"),
    ("--rope_theta 1e-300", "rope_theta"),
    ("--rope_theta 1e300", "rope_theta"),
    ("--d_model 1000000000000", "d_model"),
    ("--d_ff 1000000000000", "d_ff"),
    ("--d_ff 1000000 --d_model 1000000 --n_layer 1000", "GB"),
    ("--vocab_size 1000000000000", "vocab_size"),
    ("--seq_len 1000000000000", "seq_len"),
    ("--n_layer 1000000000", "n_layer"),
    ("--lora_rank 99999999999999999999", "at most 65536"),
    ("--batch_size 1000000000000000", "batch_size"),
    ("--max_steps 1" + "0" * 40, "max_steps"),
    ("--out_dir " + "x" * 300, "File name too long"),
    ("--resume " + "x" * 300, "File name too long"),
    ("--data " + "x" * 300, "File name too long"),
    ("--weight_decay inf", "finite"),
    ("--grad_clip inf", "finite"),
    ("--learning_rate nan", "finite"),
    ("--max_position -5", "at least 1"),
    ("--allow_change bogus", "allow_change bogus: expected"),
    ("--allow_change batch_siz", "did you mean batch_size"),
    ("--verify_resume -1", "verify_resume -1: expected at least 0"),
    ("--verify_resume -1 --check_checkpoints nowhere", "verify_resume"),
    ("--estimate -1", "estimate"),
    ("--check_checkpoints nowhere", "no such directory"),
    ("--check_checkpoints folder", "has no checkpoints"),
    ("--config folder", "--config folder: Is a directory"),
    ("--lr 1", "unknown option --lr\n"),
    ("--resume folder", "is a folder"),
    ("--eval_steps -1", "at least 0"),
    ("--resume \0", "null"),
    ("--out_dir a\0b", "null"),
    ("--n_head=--", "n_head --: expected a value"),
])
def test_a_bad_value_is_refused_in_one_line(refused, tmp_path, flags, said):
    (tmp_path / "folder").mkdir()
    assert said in refused(*flags.split(" "))


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.yaml"])
def test_a_folder_in_the_place_of_a_file_is_refused(refused, tmp_path, name):
    (tmp_path / "r" / name).mkdir(parents=True)
    flags = ["--overwrite"] if name != "lock" else []
    assert name in refused("--out_dir", "r", *flags)


def test_a_cache_that_cannot_be_written_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert str(tmp_path / "cache") in refused("--data", "stdlib")


@pytest.mark.parametrize("text", [
    b"seed: 1\nseed: 2\n", b"\xff\xfe\x00", b"- 1\n", b"data: {a: b}\n", b"? [1]\n: 2\n",
    b"seed: !!binary x\n", b"out_dir: \"a\\0b\"\n", b"a: &a [*a]\n", b"[" * 5000, b"seed: *x\n",
    b"resume: " + b"x" * 300,
])
def test_a_bad_file_of_options_is_refused(refused, text):
    refused(config=text)


def test_config_yaml_is_read_back_whatever_the_command_line_held(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--note", "a\nseed: 5", "\udcff"])
    run("--out_dir", "r")
    assert "nothing to do" in run("--out_dir", "r", "--auto_resume", bare=True)


# --- evaluation ---


def test_the_evaluation_says_how_much_it_looked_at(run):
    printed = run("--out_dir", "r")
    assert "(16 of " in printed
    only = ["--out_dir", "r", "--auto_resume", "--eval_only"]
    assert "(16 of " in run(*only, bare=True)
    everything = run(*only, "--eval_steps", 0, bare=True)
    assert "validation loss" in everything and " of " not in everything
    huge = run(*only, "--eval_steps", 100000, bare=True)
    assert huge == everything


# --- damaged runs ---

ODD = ['7', '[1, 2]', '"step"', 'null', '{"step": "3"}', '{"step": null}', '{"step": true}',
       '{"step": 2, "perf/step_ms": "fast"}', '{"step": 2, "end": 5}', '{"step": -4}', 'not JSON',
       "[" * 100_000, '{"step": ' + "1" * 5000 + '}', '{"step": 1e999}',
       '{"step": 2, "anomaly": ["x"], "slowest": 4}', '{"step": 2, "slowest": [1.0, [3, "x"]]}']


def test_odd_lines_of_the_metrics_are_passed_over(run, tmp_path, capsys):
    run("--out_dir", "r", "--log_interval", 1, "--save_interval", 6)
    path = tmp_path / "r/metrics.jsonl"
    lines = path.read_text().splitlines()
    assert report_command(["r"]) == 0
    told = capsys.readouterr().out
    path.write_text("\n".join([*ODD, *lines[:3], *ODD, *lines[3:], *ODD]) + "\n")
    assert report_command(["r"]) == 0
    assert capsys.readouterr().out == told
    Checkpoint.named(tmp_path / "r/checkpoints", 12).path.unlink()
    run("--out_dir", "r", "--auto_resume", bare=True)
    assert report_command(["r"]) == 0


def test_a_list_with_a_valid_checksum_is_no_checkpoint(run, tmp_path):
    run("--out_dir", "r", "--save_interval", 6)
    newest = Checkpoint.named(tmp_path / "r/checkpoints", 12).path
    write_checkpoint(newest, [1, 2])
    assert "step_00000006.pt at step 6" in run("--out_dir", "r", "--auto_resume", bare=True)


# --- Ctrl-C ---


@pytest.mark.parametrize("script, seconds", [
    ("train.py", 0), ("train.py", 0.3), ("data.py", 0), ("model.py", 0), ("monitor.py", 0)])
def test_an_interrupt_while_importing_is_one_line(tmp_path, script, seconds):
    command = [sys.executable, "-X", "importtime", TRAIN.with_name(script)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                               env=environment())
    errors = ""
    for line in process.stderr:  # importing has begun
        if "import time:" in line and "pkgutil" in line:
            break
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGINT)
    errors = process.stderr.read()
    said = [line for line in errors.splitlines() if line and "import time:" not in line]
    assert process.wait() == 130
    assert len(said) == 1 and said[0].startswith("interrupted"), said


# --- streams and files that cannot be written to ---


def closed(*command):
    """The exit code of a command without standard input, output and error, as daemons have it."""
    def close():
        for number in range(3):
            os.close(number)

    return subprocess.run([sys.executable, *command], env=environment(), preexec_fn=close,
                          timeout=120).returncode


def test_closed_streams_are_opened_on_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("main.py").write_text(
        "def run(argv):\n"
        "    import sys\n"
        "    with open('file', 'w') as file:\n"
        "        print('out', flush=True)\n"
        "        print('error', file=sys.stderr)\n"
        "        file.write(f'{file.fileno() > 2} {sys.stdin.read()!r}')\n"
        "    return 7\n")
    code = "import sys; sys.path[0] = '.'; from steady.guard import process as p; "
    assert closed("-c", code + "p.start('main:run')") == 7
    assert Path("file").read_text() == "True ''"


@pytest.mark.slow  # interpreters that import torch
def test_with_closed_streams_it_trains_and_reports(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert closed(TRAIN, *TINY, "--data", corpus, "--out_dir", "r") == 0
    assert list_checkpoints(tmp_path / "r/checkpoints")
    assert closed(TRAIN, *TINY, "--data", corpus, "--out_dir", "r") == 2
    assert closed(TRAIN.with_name("monitor.py"), "r", "--html", "page.html") == 0
    assert Path("page.html").stat().st_size > 10**4


def write_metrics(run_dir):
    Path(run_dir).mkdir(parents=True)
    Path(run_dir, "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "folder", "full disk"])
def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    write_metrics("r")
    page, target = Path("page.html"), Path("target.html")
    if kind == "pipe":
        os.mkfifo(page)
    elif kind == "folder":
        page.mkdir()
    elif kind == "full disk":
        assert report_command(["r", "--html", "page.html"]) == 0
        before, write = page.read_bytes(), Path.write_text

        def full(path, text, *rest):
            write(path, text[:999], *rest)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
    else:
        if kind == "link":
            target.write_text("<!doctype html>")
        page.symlink_to(target)
    files = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert report_command(["r", "--html", "page.html"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == files
    if kind == "full disk":
        assert page.read_bytes() == before
    if kind == "link":
        assert target.read_text() == "<!doctype html>"


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_metrics("runs/001")
    assert report_command(["runs/007"]) == 2
    told = "monitor.py: error: runs/007: no such run; runs here: runs/001\n"
    assert capsys.readouterr().err == told


# --- errors that are not the user's ---


@pytest.mark.parametrize("error, call", [
    ("OverflowError", lambda: math.exp(1000)),
    ("FileNotFoundError", lambda: open("vocabulary.json")),
    ("MemoryError", lambda: bytearray(1 << 60)),
])
def test_an_error_of_own_code_in_set_up_keeps_its_traceback(run, monkeypatch, error, call):
    given_texts.clear()  # by other tests
    monkeypatch.setattr(train, "make_optimizers", lambda *_: call())
    told = run("--out_dir", "r", expect=1)
    assert told.startswith(f"train.py: failed: {error}: ") and "Traceback" in told


def test_an_error_of_another_library_keeps_its_traceback(monkeypatch, capsys):
    """It may speak of a lost connection: of its own, not of that to another rank."""
    class ReadError(Exception):
        pass

    def main(argv):
        raise ReadError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code(main, []) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_path_that_looks_like_a_message_changes_nothing(run, tmp_path, monkeypatch):
    def fail(path, state):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(writer, "write_checkpoint", fail)
    told = run("--out_dir", f"g {writer.NOT_FINITE}", "--save_interval", 2, expect=1)
    assert "3 checkpoints in a row could not be written" in told


def test_nothing_is_frozen_at_the_end_of_a_process():
    """Or C++ objects that triton keeps are called leaked, in tens of lines."""
    gc.freeze()
    with pytest.raises(SystemExit):
        leave(0)
    assert gc.get_freeze_count() == 0


# --- anything at all ---

TEXTS = ["", " ", "²", "٣", "-1", "0", "1", "3", "1.5", "1e400", "-inf", "nan", "10" * 30, "a:b:c",
         "x" * 5000, "é\n\t", "\udcff", "~nosuchuser", "0:1/0", "--", "-", "true", "null", "[",
         "../..", "file:///nowhere", "nowhere://x", "1_0", "0x10", "\0", "/dev/null"]
# Options that would need a device, compile, load a package, or write somewhere else.
NOT_TRIED = {"device", "compile", "wandb", "backup_to", "trust_remote_code", "init_from", "help"}


def odd_flags(draw: random.Random) -> list[str]:
    """Up to three options of the parser, with values that may be of a wrong type or range."""
    actions = [a for a in config.train_parser()._actions if a.dest not in NOT_TRIED]
    flags = []
    for action in draw.sample(actions, draw.randint(1, 3)):
        flag = draw.choice(action.option_strings)
        choices = [*TEXTS, *map(str, action.choices or []), repr(draw.uniform(-1e6, 1e6))]
        values = draw.choices(choices, k=draw.choice([0, 1, 1, 1, 2, 4]))
        flags += [flag, *values] if draw.random() < 0.5 else [f"{flag}={' '.join(values)}"]
    return flags


def odd_yaml(draw: random.Random) -> bytes:
    """Lines of options, some of them twice; or bytes of any kind."""
    if draw.random() < 0.3:
        return draw.randbytes(draw.randint(0, 200))
    names = [f.name for f in dataclasses.fields(config.Config) if f.name not in NOT_TRIED]
    lines = [f"{name}: {draw.choice([*TEXTS, '[1, x]', '{a: b}', '&a [*a]', '!!int x'])}"
             for name in draw.choices(names, k=draw.randint(1, 3))]
    return "\n".join(lines * draw.choice([1, 1, 2])).encode(errors="surrogateescape")


def spoiled(draw: random.Random, data: bytes) -> bytes:
    """Cut short, with other bytes in the middle, or something else altogether."""
    way = draw.randrange(4)
    if way == 0:
        return data[: draw.randrange(len(data))]
    if way == 1:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(8) + data[at + 8 :]
    if way == 2:
        return draw.randbytes(draw.randint(0, 3000))
    others = [b"", b"[]", b"7", b"null", b'{"tokens": "x"}', b'{"dtype": []}', b"[" * 9999]
    return draw.choice(others)


@pytest.mark.slow
def test_nothing_that_is_given_ends_in_a_traceback(run, corpus, tmp_path, monkeypatch):
    """300 inputs: odd flags, odd files of options, spoiled token files and checkpoints."""
    draw = random.Random(20)
    run("--out_dir", "whole", "--save_interval", 6)
    monkeypatch.setattr(train, "train_with_recovery", lambda run: "")
    monkeypatch.setattr(train, "show_sample", lambda run, title: None)
    monkeypatch.setattr(verify, "verify_resume", lambda *_: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of stdlib, made once
    kinds = ["flags", "flags", "flags", "yaml", "tokens", "checkpoint"]
    for number in range(300):
        shutil.rmtree("r", ignore_errors=True)
        kind, flags = kinds[number % len(kinds)], [*TINY, "--data", str(corpus), "--out_dir", "r"]
        if kind == "flags":
            flags += odd_flags(draw)
        elif kind == "yaml":
            Path("c.yaml").write_bytes(odd_yaml(draw))
            flags += ["--config", "c.yaml"]
        elif kind == "tokens":
            shutil.rmtree("spoiled", ignore_errors=True)
            shutil.copytree(corpus, "spoiled")
            file = draw.choice(sorted(Path("spoiled").iterdir()))
            file.write_bytes(spoiled(draw, file.read_bytes()))
            mode = draw.choice(["auto", "documents", "stream"])
            flags = [*TINY, "--data", "spoiled", "--out_dir", "r", "--data_mode", mode]
        else:
            shutil.copytree("whole", "r")
            file = draw.choice([p for p in sorted(Path("r").rglob("*")) if p.is_file()])
            file.write_bytes(spoiled(draw, file.read_bytes() or b"0"))
            flags = ["--auto_resume", "--out_dir", "r", *draw.choice([[], ["--max_steps", "20"]])]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                code = exit_code(train.main, flags)
            except SystemExit as e:
                code = e.code
        printed = output.getvalue()
        case = f"number {number}, {kind}: {flags[-6:]!r}: {code}\n{printed[-3000:]}"
        assert "Traceback" not in printed, case
        assert code in (0, 2) or code == 1 and "INVALID" in printed, case
        errors = [line for line in printed.splitlines() if line.startswith("train.py: error")]
        assert len(errors) == (code == 2), case


@pytest.mark.parametrize("command", [
    ["data.py", "--help"], pytest.param(["monitor.py", "r"], marks=pytest.mark.slow)])
def test_a_reader_that_has_read_enough_is_no_error(run, tmp_path, command):
    run("--out_dir", "r")
    script, *flags = command
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, TRAIN.parent / script, *flags], cwd=tmp_path,
                          stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("variables, said", [
    ("WORLD_SIZE=two", "WORLD_SIZE=two in the environment: expected a number of at least 1"),
    ("WORLD_SIZE=0", "WORLD_SIZE=0 in the environment: expected"),
    ("RANK=-1", "RANK=-1 in the environment: expected"),
    ("RANK=3", "RANK=3 in the environment: expected less than WORLD_SIZE, 1"),
    ("LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0 in the environment: expected"),
    ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT=x in the environment: expected"),
    ("WORLD_SIZE=2", "WORLD_SIZE=2 in the environment, and no MASTER_ADDR"),
    ("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=x", "MASTER_PORT=x in the environment"),
])
def test_odd_variables_of_a_cloud(refused, monkeypatch, variables, said):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert said in refused()


def test_empty_variables_are_none(run, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "")
    run("--max_steps", 2)
