"""The benchmarks run, and say what they measured: in a tiny size, so that they do not rot."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment

from tests.bench.__main__ import NAMES, ON_REQUEST
from tests.bench.common import Figure, table, take_turns


def bench(*argv, expect=0) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.bench", *map(str, argv)], cwd=ROOT,
                          env=environment(), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_benchmark_can_be_named():
    files = {p.stem for p in (ROOT / "tests/bench").glob("*.py")} - {"__init__", "__main__"}
    assert files - {"common"} == {*NAMES, *ON_REQUEST}
    for name in files - {"common"}:
        assert callable(importlib.import_module(f"tests.bench.{name}").main)


def test_several_at_once_make_one_table_and_one_file(tmp_path):
    told = bench("loading", "gpu", "--quick", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["torch"] and found["device"] and found["quick"]
    what = [figure["what"] for figure in found["figures"]]
    assert any("gpt2-124m, muon, compiled: MFU" in w for w in what)  # of the GPU suite, on a CPU
    assert all(w in told for w in what)
    assert "expected one of training" in bench("nonsense", expect=2)


def test_the_fake_world_of_1024_is_no_slower():
    told = bench("scaling", "--quick")
    assert "| 1,024 | 24,576 |" in told and "computed" in told


def make_counter(base):
    count = base

    def step():
        nonlocal count
        count += 1

    return step


def test_kinds_take_turns_in_processes_of_their_own():
    found = take_turns({"a": (make_counter, 1), "b": (make_counter, 2)}, rounds=3, steps=2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3}


def test_a_figure_is_the_median_and_knows_its_aim():
    figure = Figure("x", "y", [1.0, 3.0, 2.0], ">= 1.5", "1 s", "2 s")
    assert figure.ratio == 2 and figure.met and "1 to 3" in figure.row()
    assert not Figure("x", "y", [2.0], "<= 1.5").met and Figure("x", "y", [2.0]).met is None
    lines = table([figure.row()]).splitlines()
    assert len({len(line) for line in lines}) == 1 and ">= 1.5: met" in lines[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ordinary_steps_do_not_synchronize():
    from tests.bench.gpu import Trial, synchronizations

    trial = Trial(torch.device("cuda"), ["--d_model", "128", "--d_ff", "256"], False, 4)
    trial.step()
    assert synchronizations(trial) == "none"
