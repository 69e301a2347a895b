"""The benchmarks can be named, and what they find becomes a table and a file."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment

from tests.bench import __main__ as bench_main
from tests.bench import gpu, startup
from tests.bench.__main__ import NAMES, ON_REQUEST, main
from tests.bench.common import Figure, compare, in_turns, table, take_turns

FASTER = Figure("a & b", "another's", [1.0, 3.0, 2.0], ">= 1.5", "1 s", "2 s")
LARGER = Figure("c", "another's", [2.0], "<= 1.5", "2 MB", "1 MB")


def bench(*argv) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.bench", *map(str, argv)], cwd=ROOT,
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_benchmark_can_be_named():
    files = {p.stem for p in (ROOT / "tests/bench").glob("*.py")} - {"__init__", "__main__"}
    files -= {"common", "planted"}
    assert files == {*NAMES, *ON_REQUEST}
    for name in files:
        assert callable(importlib.import_module(f"tests.bench.{name}").main)


def test_figures_become_a_table_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(startup, "main", lambda options: [FASTER, LARGER])
    assert main(["startup", "--json", str(tmp_path / "found.json")]) == 0
    told = capsys.readouterr().out
    assert "≥ 1.5: met" in told and "≤ 1.5: missed" in told
    found = json.loads((tmp_path / "found.json").read_text())["startup"]
    assert found["torch"] and found["device"] and found["commit"]
    assert [Figure(**figure) for figure in found["figures"]] == [FASTER, LARGER]


def test_a_record_replaces_only_that_of_its_benchmark(tmp_path, monkeypatch):
    """In the file of results and in the table of the page, which stay in the order of NAMES."""
    page, results = tmp_path / "page.md", tmp_path / "cpu.json"
    page.write_text(f"before\n\n{table([])}\n| old |\n\nafter\n")
    monkeypatch.setattr(bench_main, "PAGE", page)
    monkeypatch.setattr(bench_main, "RESULTS", results)
    for name, found in (("startup", FASTER), ("small", LARGER), ("startup", LARGER)):
        monkeypatch.setattr(importlib.import_module(f"tests.bench.{name}"), "main",
                            lambda options, found=found: [found])
        assert main([name, "--record"]) == 0
    assert list(json.loads(results.read_text())) == ["small", "startup"]
    assert page.read_text() == f"before\n\n{table([LARGER.row(), LARGER.row()])}\n\nafter\n"
    with pytest.raises(SystemExit):
        main(["small", "--record", "--quick"])


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["nonsense"])
    assert refused.value.code == 2 and "expected one of training" in capsys.readouterr().err


def test_a_figure_is_the_median_and_knows_its_aim():
    assert FASTER.ratio == 2 and FASTER.met and "1 to 3" in FASTER.row()
    assert not LARGER.met and Figure("x", "y", [2.0]).met is None
    figure = compare("x", "y", [3.0, 8.0, 5.0], [1.0, 2.0, 5.0], "{:.1f} ms")
    assert figure.ratios == [3.0, 4.0, 1.0] and (figure.ours, figure.theirs) == ("5.0 ms", "2.0 ms")
    assert len({line.count("|") for line in table([FASTER.row(), LARGER.row()]).splitlines()}) == 1


def test_measures_take_turns_in_alternating_order():
    calls = []
    found = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 3)
    assert calls == list("abbaab") and found == {"a": [1, 4, 5], "b": [2, 3, 6]}


def recorder(path):
    def make_steps(n: int):
        with open(path, "a") as file:
            file.write(f"{os.getpid()} {n}\n")

    return make_steps


@pytest.mark.slow
def test_steps_take_turns_in_processes_of_their_own(tmp_path):
    makers = {name: (recorder, tmp_path / "calls") for name in "ab"}
    found = take_turns(makers, rounds=3, steps=2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3}
    pids, steps = zip(*map(str.split, (tmp_path / "calls").read_text().splitlines()), strict=True)
    assert steps == ("1", "1", *"222222")
    assert len(set(pids)) == 2 and str(os.getpid()) not in pids
    assert ["ab"[pid != pids[0]] for pid in pids[2:]] == list("abbaab")


@pytest.mark.slow
def test_several_at_once_make_one_table_and_one_file(tmp_path):
    told = bench("slowdowns", "checkpoints", "--quick", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["checkpoints", "slowdowns"]
    assert all(f["what"] in told for record in found.values() for f in record["figures"])


@pytest.mark.timed
@pytest.mark.parametrize("name", [*NAMES, "operations",
                                  *(f"gpu --part {n}" for n in gpu.PROGRAMME)])
def test_every_benchmark_runs(name, tmp_path):
    bench(*name.split(), "--quick", "--json", tmp_path / "found.json")


def test_a_part_that_fails_says_why_in_a_line(tmp_path):
    def attempt(code: str, limit: float = 60) -> str:
        return gpu.attempt([sys.executable, "-c", code], limit, tmp_path / "log")

    assert attempt("print(1)") == ""
    assert attempt("print(1); raise MemoryError('no room')") == "exit code 1: MemoryError: no room"
    assert attempt("import os; os.kill(os.getpid(), 11)") == "exit code -11: no output"
    assert attempt("import time; time.sleep(99)", 0.2) == "not finished after 0 s"


def test_checks_are_read_also_where_pytest_did_not_finish():
    text = """collecting ... collected 5 items
tests/test_gpu.py::test_a[fp32-2] PASSED [ 20%]
tests/test_gpu.py::test_a[fp16-2] FAILED [ 40%]
tests/test_gpu.py::test_b SKIPPED (needs a GPU) [ 60%]
tests/test_gpu.py::test_c """
    names = ("test_a[fp32-2]", "test_a[fp16-2]", "test_b", "test_c")
    results = ("PASSED", "FAILED", "SKIPPED", "")
    assert gpu.read_checks(text) == [(f"test_gpu.py::{name}", result)
                                     for name, result in zip(names, results, strict=True)]
    assert gpu.read_checks("No module named pytest") == []


def test_whatever_happens_on_a_card_is_an_entry(tmp_path, monkeypatch):
    clock, kept = [0.0], []

    def attempt(command, limit, log, look, **variables):
        clock[0] += 100
        name, file = command[3:5]
        if name == "interrupted":
            raise KeyboardInterrupt
        if name != "silent":
            figure = Figure(f"{name}, adamw, compiled: MFU", "sheet", [float("nan")])
            with open(file, "w") as out:
                for line in ({"failure": f"{name}: OutOfMemoryError: 9 GB"}, vars(figure)):
                    print(json.dumps(line), file=out, flush=True)
                    look()
        return "exit code -11: no output" if name in ("killed", "silent") else ""

    monkeypatch.setattr(gpu, "attempt", attempt)
    monkeypatch.setattr(gpu.time, "time", lambda: clock[0])
    names = ["silent", "killed", "finite", "interrupted", "never"]
    figures, notes = gpu.measure(torch.device("cpu"), True, names, 1000, lambda figures, notes: (
        kept.append((len(figures), len(notes["failures"])))))
    assert kept[:4] == [(0, 0), (0, 1), (0, 2), (1, 2)]  # after each line
    assert [f.what.split(",")[0] for f in figures] == ["killed", "finite"]
    assert notes["parts"] == {
        "silent": "exit code -11: no output", "killed": "exit code -11: no output",
        "finite": "100 s", "interrupted": "interrupted", "never": "skipped: the time is used up"}
    assert notes["failures"] == [
        "silent: exit code -11: no output", "killed: OutOfMemoryError: 9 GB",
        "killed: exit code -11: no output", "finite: OutOfMemoryError: 9 GB",
        "interrupted: interrupted"]
    figures.append(Figure("checks", "all", [0.5], ours="1 passed of 2"))
    lines = gpu.in_short(figures, notes, "a card", "gpu-a-card.json")
    assert "a card; torch" in lines[0] and "checks: 1 passed of 2" in lines[0]
    assert lines[2] == "failures: 5, parts skipped: 1; attached: gpu-a-card.json"


@pytest.mark.slow
def test_of_a_gpu_one_file_and_three_lines(tmp_path, monkeypatch, capsys):
    names = ["train.py", "checks", "gpt2-124m, muon"]
    for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"):  # which --quick sets
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(gpu.PROGRAMME, 1, {name: gpu.PROGRAMME[1][name] for name in names})
    assert main(["gpu", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["gpu"]
    assert list(found["parts"]) == names and not found["failures"]
    assert "step 60" in found["printed"]["train.py"][0]
    assert "gpt2-124m, muon, compiled: MFU" in told and "checks: pytest -m gpu" in told
    assert told.splitlines()[-3:] == found["in_short"]
