"""What --compile would save is measured once, in a long run on a CPU, and does not disturb it."""

import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_monitor import Clock, make, rows, spend, step

import config
from steady.watch import advice

START = subprocess.Popen


def log_often(tmp_path, monkeypatch, program, received=(0, 0), **changes):
    """(the commands started, each of which `program` takes the place of, and the monitor)"""
    clock, started = Clock(monkeypatch), []

    def start(command, **how):
        started.append(command)
        clock.advance(50)
        return START([sys.executable, "-c", program], **how)

    monkeypatch.setattr(advice.subprocess, "Popen", start)
    m = make(tmp_path, **dict(max_steps=100_000, n_layer=6, data_mode="stream") | changes)
    m.ranks.micro_batch, m.ranks.stop = 5, SimpleNamespace(received=received)
    for n in range(1, 13):
        spend(m, clock, forward=60, backward=60)
        step(m, n)
    m.close()
    return started, m


def test_a_long_run_learns_once_what_compile_would_save(tmp_path, monkeypatch, capsys):
    found = [0.001, 0.004, 60]  # seconds: without blocks, with two, compiling
    started, m = log_often(tmp_path, monkeypatch, f"print({found})", data=["a.bin"] * 20_000)
    (command,) = started
    assert json.loads(command[3])["n_layer"] == 6 and command[4] == "5"
    assert len(command[3]) < 1 << 17  # what Linux takes
    # 99,996 steps of two micro-batches, each 10 ms shorter
    assert "step 4: --compile would save about 32 minutes of 3h20m\n" in capsys.readouterr().out
    assert not m.slowdowns.events
    assert m.goodput.seconds["startup"] > 50 and m.goodput.seconds["logging"] < 1
    assert all(row.get("perf/step_ms_p95", 120) == pytest.approx(120) for row in rows(tmp_path))


@pytest.mark.parametrize("changes", [
    dict(max_steps=50_000), dict(compile=False), dict(compile=True), dict(max_minutes=600.0),
    dict(lora_rank=8), dict(data_mode="packed"), dict(model="transformers"),
])
def test_others_do_not_measure(tmp_path, monkeypatch, changes):
    assert not log_often(tmp_path, monkeypatch, "", **changes)[0]


def test_nothing_is_measured_where_memory_may_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(advice.proc, "available_bytes", lambda: 1e6)
    assert not log_often(tmp_path, monkeypatch, "")[0]


@pytest.mark.parametrize("program, changes", [
    ("print([0.0005, 0.001, 60])", {}),  # saves less than 5 %
    ("raise SystemExit(1)", {}),
    ("print('a library')", {}),
    ("import time; time.sleep(999)", dict(received=(15, 0))),
    ("import time; time.sleep(999)", dict(hang_seconds=1)),
    pytest.param("#" * (1 << 20), {}, id="a process that cannot be started"),
])
def test_silent_where_little_is_saved_or_nothing_known(tmp_path, monkeypatch, capsys,
                                                       program, changes):
    assert len(log_often(tmp_path, monkeypatch, program, **changes)[0]) == 1
    assert "--compile" not in capsys.readouterr().out


PRINTS = """
import runpy, sys, time, model
class Small(model.Transformer):
    def __init__(self, cfg):
        print("a line of a model that was edited")
        {wait}
        super().__init__(cfg)
    def compile(self):
        pass
model.Transformer, sys.argv = Small, ["advice", '{options}', "1"]
runpy.run_module("tools.advice", run_name="__main__")
"""


def measuring(wait=""):
    cfg = config.resolve(config.parse(["--vocab_size", "32", "--d_model", "32", "--seq_len", "8"]))
    program = PRINTS.format(options=json.dumps(asdict(cfg)), wait=wait)
    return START([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE,
                 stdout=subprocess.PIPE)


def test_a_model_that_prints_is_measured():
    with measuring() as child:
        assert len(json.loads(child.stdout.readline())) == 3


def test_measuring_ends_with_the_training():
    child = measuring("time.sleep(999)")
    child.stdin.close()  # as where the training is killed
    assert child.wait(60) == 1


@pytest.mark.slow
def test_a_model_is_compiled_and_timed(monkeypatch):
    cfg = config.resolve(config.parse(["--vocab_size", "300", "--d_model", "32"]))
    cfg.data_mode, found, read = "stream", [], json.loads
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=1, micro_batch=4,
                            stop=SimpleNamespace(received=[0, 0]))
    monkeypatch.setattr(advice.json, "loads", lambda line: found.extend(read(line)) or [0, 0, 0])
    assert advice.compile_saving(cfg, ranks, 1000, 1e5) == 0
    head, with_two, compiling = found
    assert head and with_two and compiling > 0
