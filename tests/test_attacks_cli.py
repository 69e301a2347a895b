"""What a command line, a file of options or a damaged run may hold: one line, or it goes on."""

import contextlib
import gc
import io
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TINY, TRAIN, environment, raising

import config
import train
from steady.guard.process import exit_code, run_command, start
from steady.options import SYNONYMS
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
    # what is no value of its type
    ("--learning-rat=1", "unknown option --learning_rat (did you mean --learning_rate?)"),
    ("--q 1", "unknown option --q\n"),
    *((f"--{other} 1", f"(did you mean --{ours.split()[0]}?)") for other, ours in SYNONYMS.items()),
    ("--seed 1 a.yaml", "unexpected argument a.yaml"),
    ("--learning_rate", "--learning_rate: expected one argument"),
    ("--max_steps " + "9" * 5000, "error: --max_steps: invalid int value: '999"),
    ("--device tpu", "--device: invalid choice: 'tpu' (choose from"),
    pytest.param("--device cuda", "cuda", marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU")),
    ("--micro_batch_size 0", "at least 1"),
    ("--num_workers ²", "num_workers ²: expected a number"),
    ("--num_workers 1000000", "num_workers 1000000: expected a number"),
    # bounds
    ("--max_steps 0", "--max_steps 0: expected at least 1"),
    ("--dropout 1.5", "--dropout 1.5: expected at least 0 and below 1"),
    ("--trace 5 --preset max_throughput", "--trace 5: expected --monitoring light or full"),
    ("--trace 5 --log_interval 0", "--trace 5: expected --monitoring light or full, and --log_in"),
    ("--seed 99999999999999999999", "below 9223372036854775808"),
    ("--learning_rate nan", "--learning_rate nan: expected a finite number"),
    ("--rope_scaling 8 inf", "--rope_scaling inf: expected a finite number"),
    ("--rope_scaling 8 1", "one number, or four"),
    ("--rope_scaling 8 1 4 0", "rope_scaling"),
    ("--rope_scaling 8 4 1 64", "below the high one"),
    ("--rope_theta 1e-300", "rope_theta"),
    ("--d_model 1000000000000", "d_model"),
    ("--d_ff 1000000 --d_model 1000000 --n_layer 1000", "GB"),
    ("--lora_rank 99999999999999999999", "at most 65536"),
    ("--verify_resume -1 --check_checkpoints nowhere", "verify_resume -1: expected at least 0"),
    ("--config ", "--config '': expected a value"),  # as of "$CONFIG" that is not set
    # what does not go together
    ("--d_model 100 --n_head 3 --n_kv_head 3", "--n_head 3: expected a divisor of d_model 100"),
    ("--n_head 4 --n_kv_head 3", "divisor of n_head 4"),
    ("--head_dim 7", "--head_dim 7: expected an even number"),
    ("--warmup_steps 99 --max_steps 9", "--warmup_steps 99: expected at most max_steps 9"),
    ("--learning_rate 1e-3 --min_learning_rate 2e-3", "at most learning_rate 0.001"),
    ("--batch_size 10 --micro_batch_size 4 --data missing", "8 or 12"),
    ("--batch_size 2 --micro_batch_size 4", "nearest is 4"),
    ("--estimate 5 --vocab_size 9", "--batch_size 8: expected a multiple of 5"),
    ("--estimate 4 --shard_size 3", "--shard_size 3: expected a divisor of the 4 processes"),
    ("--auto_resume --overwrite", "cannot be combined"),
    ("--depth 0", "--depth 0: expected at least 1"),
    ("--depth 4 --model 1b", "not with --model 1b"),
    ("--depth 4 --init_from folder", "--depth 4: the shape is that of --init_from"),
    ("--model transformers", "--init_from"),
    ("--vocab_size 100", "257"),
    ("--attention cudnn", "cudnn"),
    ("--allow_change batch_siz", "did you mean batch_size"),
    # data
    ("--data a:1/0", "a:1/0: no such file or folder"),
    ("--data a:nan", "a:nan: expected a weight"),
    ("--data a:1e-400", "a:1e-400: expected a weight above 0"),
    ("--data a:1e999999999", "a:1e999999999: expected a weight"),
    ("--data file", "file: not token ids; expected a folder, or a file that ends in .bin"),
    ("--data ~nosuchuser/x", "~nosuchuser/x: no such file"),
    # paths
    ("--data " + "x" * 300, "File name too long"),
    ("--out_dir " + "x" * 300, "File name too long"),
    ("--resume " + "x" * 300, "File name too long"),
    ("--out_dir " + os.fsdecode(b"caf\xe9"), "UTF-8"),  # which torch cannot read
    ("--out_dir file", "file"),
    ("--out_dir file/run", "file is not a directory"),
    ("--resume file", "not a checkpoint"),
    ("--check_checkpoints nowhere", "no such directory"),
    ("--check_checkpoints folder", "has no checkpoints"),
    ("--config folder", "--config folder: is a folder"),
    ("--config missing", "--config missing: No such file")])
def test_a_bad_value_is_refused_in_one_line(refused, tmp_path, flags, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert said in refused(*flags.split(" "))


def test_a_folder_in_the_place_of_a_file_is_refused_or_moved_away(refused, run, tmp_path):
    (tmp_path / "r/lock").mkdir(parents=True)
    assert "lock" in refused("--out_dir", "r")
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name / name).mkdir(parents=True)
        run("--out_dir", name, "--overwrite", "--max_steps", 2)
        assert (tmp_path / f"{name}.old" / name).is_dir()


def test_a_cache_that_cannot_be_written_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert str(tmp_path / "cache") in refused("--data", "stdlib")


@pytest.mark.parametrize("text, said", [
    (b"learning_rat: 1", "unknown option learning_rat (did you mean learning_rate?)"),
    (b"max_steps: 3.5", "--max_steps: invalid int value: '3.5'"),
    (b"compile: maybe", "--compile maybe: expected true or false"),
    (b"preset: debug", "preset is for the command line"),
    (b"seed: 1\n\tmax_steps: 5", "not YAML: while scanning for the next token found character "
     "'\\t' that cannot start any token in \"c.yaml\", line 2"),
    *((text, "not YAML") for text in (b"\xff\xfe\x00", b"seed: *x\n", b"[1, 2]: 3\n", b"[" * 5000,
                                      b"data: &a [*a]\n")),
    (b"seed: 1\nmax_steps: 2\nseed: 3\n", "line 3: seed is given twice"),
    (b"monitoring: full\nmonitor: light\n", "monitoring is given twice, also as monitor"),
    (b"- 1\n- 2", "`name: value`"),
    (b"data: {a: b}\n", "data must be a value, or a list if"),
    (b"max_steps: [1, 2]\n", "max_steps must be a value"),
    (b"seed: !!binary x\n", "--seed: invalid int value: 'x'")])
def test_a_bad_file_of_options_is_refused(refused, text, said):
    printed = refused(config=text)
    assert said in printed and "c.yaml" in printed


def test_the_evaluation_says_how_much_it_looked_at(run):
    assert "(16 of " in run("--out_dir", "r")
    only = ["--out_dir", "r", "--auto_resume", "--eval_only"]
    assert "(16 of " in run(*only, bare=True)
    everything = run(*only, "--eval_steps", 0, bare=True)
    assert "validation loss" in everything and " of " not in everything
    assert run(*only, "--eval_steps", 100000, bare=True) == everything


ODD = ['7', '[1, 2]', '"step"', 'null', '{"step": "3"}', '{"step": null}', '{"step": true}',
       '{"step": 2, "perf/step_ms": "fast"}', '{"step": 2, "end": 5}', '{"step": -4}', 'not JSON',
       "[" * 100_000, '{"step": ' + "1" * 5000 + '}', '{"step": 1e999}',
       '{"step": 2, "anomaly": ["x"], "slowest": 4}', '{"step": 2, "slowest": [1.0, [3, "x"]]}']


def test_a_run_with_odd_contents_is_reported_and_continued(run, tmp_path, monkeypatch, tool):
    """Odd flags, and odd lines of metrics.jsonl."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--note", "a\nseed: 5", "\udcff"])
    run("--out_dir", "r", "--log_interval", 1, "--save_interval", 6)
    path = tmp_path / "r/metrics.jsonl"
    lines = path.read_text().splitlines()
    told = tool(report_command, "r").out
    path.write_text("\n".join([*ODD, *lines[:3], *ODD, *lines[3:], *ODD]) + "\n")
    assert tool(report_command, "r").out == told
    (tmp_path / "r/checkpoints/step_00000012.pt").unlink()
    run("--out_dir", "r", "--auto_resume", bare=True)
    tool(report_command, "r")


@pytest.mark.parametrize("script, seconds", [
    ("train.py", 0.3), ("data.py", 0), ("model.py", 0), ("monitor.py", 0)])
def test_an_interrupt_while_importing_is_one_line(tmp_path, script, seconds):
    command = [sys.executable, "-X", "importtime", TRAIN.with_name(script)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                               env=environment())
    for line in process.stderr:  # importing has begun
        if "import time:" in line and "pkgutil" in line:
            break
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGINT)
    errors = process.stderr.read()
    said = [line for line in errors.splitlines() if line and "import time:" not in line]
    assert process.wait() == 130
    assert len(said) == 1 and said[0].startswith("interrupted"), said


def test_an_interrupt_that_nobody_reads_of_has_its_code():
    code = ("import os; from steady.guard import process; reader, writer = os.pipe(); "
            "os.dup2(writer, 2); os.close(reader); process.end_at_once(2, None)")
    assert subprocess.run([sys.executable, "-c", code], cwd=TRAIN.parent).returncode == 130


# --- streams and files that cannot be written to ---


def test_closed_streams_are_opened_on_nothing(tmp_path):
    """Of a command without standard input, output and error, as daemons start it."""
    (tmp_path / "main.py").write_text(
        "def run(argv):\n"
        "    import sys\n"
        "    with open('file', 'w') as file:\n"
        "        print('out', flush=True)\n"
        "        print('error', file=sys.stderr)\n"
        "        file.write(f'{file.fileno() > 2} {sys.stdin.read()!r}')\n"
        "    return 7\n")
    code = ("import sys; sys.path[0] = '.'; from steady.guard import process; "
            "process.start('main:run')")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=tmp_path,
                          preexec_fn=lambda: os.closerange(0, 3), timeout=120)
    assert done.returncode == 7 and (tmp_path / "file").read_text() == "True ''"


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "other file", "full disk"])
def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch, tool, kind):
    monkeypatch.chdir(tmp_path)
    page, other, write = Path("page.html"), Path("other.html"), Path.write_text
    Path("r").mkdir()
    Path("r/metrics.jsonl").write_text('{"step": 1}\n')
    other.write_text("<!doctype html>")
    {"pipe": lambda: os.mkfifo(page), "folder": page.mkdir, "full disk": page.touch,
     "link": lambda: page.symlink_to(other),
     "other file": lambda: page.write_text("no page at all.")}[kind]()

    def full(path, text, *rest):
        write(path, text[:999], *rest)
        raise OSError(28, "No space left on device")

    if kind == "full disk":
        monkeypatch.setattr(Path, "write_text", full)
    files = sorted(tmp_path.iterdir())
    assert tool(report_command, "r", "--html", "page.html", expect=2).err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == files and other.read_text() == "<!doctype html>"
    assert not page.is_file() or page.stat().st_size in (0, len("<!doctype html>"))
    assert tool(report_command, "r", "--html", "none/page.html", expect=2).err.count("\n") == 1
    assert tool(report_command, "r/7", expect=2).err == (
        "monitor.py: error: r/7: no such run, there is no metrics.jsonl in it\n")


# --- errors that are not the user's ---


@pytest.mark.parametrize("error, call", [
    ("OverflowError", lambda: math.exp(1000)),
    ("FileNotFoundError", lambda: open("vocabulary.json")),
    ("MemoryError", lambda: bytearray(1 << 60))])
def test_an_error_of_own_code_in_set_up_keeps_its_traceback(run, monkeypatch, error, call):
    monkeypatch.setattr(train, "make_optimizers", lambda *_: call())
    told = run("--out_dir", "r", expect=1)
    assert told.startswith(f"train.py: failed: {error}: ") and "Traceback" in told


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("error, ranks, lost", [
    (RuntimeError(f"{GLOO} [10.0.0.1]:2\nmore"), 2, True),
    (dist.DistBackendError("Broken pipe"), 2, True),
    (dist.DistBackendError("Broken pipe"), 1, False),
    (RuntimeError("Connection reset by peer"), 2, False),  # its own, of another library
    (ValueError(GLOO), 2, False)])
def test_an_error_says_whether_another_rank_is_gone(monkeypatch, capsys, error, ranks, lost):
    """Which has the traceback that matters; any other error keeps its own."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert exit_code(raising(error), []) == 1
    told = capsys.readouterr().err
    if lost:
        assert told == f"train.py: failed: another rank is gone: {str(error).splitlines()[0]}\n"
    else:
        assert told.startswith(f"train.py: failed: {type(error).__name__}: {error}\nTraceback")


def test_nothing_is_frozen_at_the_end_of_a_command_and_no_loader_is_waited_for(monkeypatch):
    """Or C++ objects that triton keeps are called leaked, in tens of lines."""
    loader = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    loader.start()
    monkeypatch.setattr("steady.guard.process.begin", gc.freeze)  # as a run of `try`
    with pytest.raises(SystemExit):
        start("builtins:len")
    assert gc.get_freeze_count() == 0
    loader.join(10)
    assert loader.exitcode == -signal.SIGKILL  # it ignores SIGTERM


# --- anything at all ---

TEXTS = ["", " ", "²", "٣", "-1", "0", "1", "3", "1.5", "1e400", "-inf", "nan", "10" * 30, "a:b:c",
         "x" * 5000, "é\n\t", "\udcff", "~nosuchuser", "0:1/0", "-", "true", "null", "[",
         "../..", "file:///nowhere", "nowhere://x", "1_0", "0x10", "/dev/null", "[1, x]", "{a: b}",
         "&a [*a]", "!!int x"]
# Options that would need a device, compile, load a package, or write somewhere else.
NOT_TRIED = {"device", "compile", "wandb", "backup_to", "trust_remote_code", "init_from", "help",
             "help_all"}


@pytest.mark.slow
def test_no_option_ends_in_a_traceback(run, corpus, tmp_path, monkeypatch):
    """200 times up to three options of a wrong type or range, as flags or in a file."""
    draw = random.Random(20)
    actions = [a for a in config.train_parser()._actions if a.dest not in NOT_TRIED]
    monkeypatch.setattr(train, "train_with_recovery", lambda run: "")
    monkeypatch.setattr(train, "show_sample", lambda run, title: None)
    monkeypatch.setattr(verify, "verify_resume", lambda *_: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of stdlib, made once
    for number in range(200):
        shutil.rmtree("r", ignore_errors=True)
        flags, lines = [], []
        for action in draw.choices(actions, k=draw.randint(1, 3)):
            choices = [*TEXTS, *map(str, action.choices or []), repr(draw.uniform(-1e6, 1e6))]
            values = draw.choices(choices, k=draw.choice([0, 1, 1, 1, 2, 4]))
            flag = draw.choice(action.option_strings)
            flags += [flag, *values] if draw.random() < 0.5 else [f"{flag}={' '.join(values)}"]
            lines.append(f"{action.dest}: {' '.join(values)}\n".encode(errors="surrogateescape"))
        if number % 4 == 0:
            Path("c.yaml").write_bytes(b"".join(lines) if number % 3 else draw.randbytes(number))
            flags = ["--config", "c.yaml"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = exit_code(train.main, [*TINY, "--data", str(corpus), "--out_dir", "r", *flags])
        printed = output.getvalue()
        case = f"number {number}: {flags!r}: {code}\n{printed[-3000:]}"
        assert code in (0, 2) and "Traceback" not in printed, case
        assert len(re.findall("^train.py: error", printed, re.M)) == (code == 2), case


def test_a_reader_that_has_read_enough_changes_no_exit_code_and_no_page(tmp_path):
    """Of `monitor.py compare A B | head` 0 would mean that B is better."""
    code = ("import sys; from steady.guard.process import run_command\n"
            "sys.exit(run_command('monitor.py', lambda argv: print('verdict') or 3, []))")
    (tmp_path / "metrics.jsonl").touch()
    page = tmp_path / "page.html"
    reader, writer = os.pipe()
    os.close(reader)
    for command, expected in ((["data.py", "--help"], 0), (["-c", code], 3),
                              (["monitor.py", tmp_path, "--html", page], 0)):
        done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE,
                              text=True, timeout=120, cwd=TRAIN.parent,
                              env=environment() | {"PYTHONUNBUFFERED": ""})
        assert done.returncode == expected and ("--html" in command or not done.stderr), command
    os.close(writer)
    assert page.exists()


def test_a_screen_without_some_characters(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert run_command("data.py", lambda argv: print("naïve"), []) == 0
    assert screen.buffer.getvalue() == b"na?ve\n"


@pytest.mark.parametrize("variables, said", [
    ("WORLD_SIZE=two", "WORLD_SIZE=two in the environment: expected a number from 1 to 65535"),
    ("RANK=3", "RANK=3 in the environment: expected a number from 0 to 0,"),
    ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT=x in the environment: expected"),
    ("WORLD_SIZE=2", "WORLD_SIZE=2 in the environment, and no MASTER_ADDR"),
    ("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=", "and no MASTER_ADDR or no MASTER_PORT;"),
    ("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999", "expected a number from 1 to 65535")])
def test_odd_variables_of_a_cloud(refused, monkeypatch, variables, said):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert said in refused()


def test_empty_variables_are_none(run, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "")
    run("--max_steps", 2)
