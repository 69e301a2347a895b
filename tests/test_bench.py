"""The benchmarks can be named and run, and what they find becomes a table."""

import importlib
import json

import pytest
from conftest import ROOT, python

from tests.bench import gpu
from tests.bench.__main__ import NAMES, ON_REQUEST, main
from tests.bench.common import Figure, compare, table


def test_every_benchmark_can_be_named(capsys):
    files = {p.stem for p in (ROOT / "tests/bench").glob("*.py")} - {"__init__", "__main__"}
    assert files - {"common", "planted"} == {*NAMES, *ON_REQUEST}
    for name in (*NAMES, *ON_REQUEST):
        assert callable(importlib.import_module(f"tests.bench.{name}").main)
    with pytest.raises(SystemExit) as refused:
        main(["nonsense"])
    assert refused.value.code == 2 and "expected one of training" in capsys.readouterr().err


def test_a_figure_of_two_series_has_their_ratios_and_medians():
    figure = compare("x", "y", [3.0, 8.0, 5.0], [1.0, 2.0, 5.0], "{:.1f} ms", ">= 1.5")
    assert figure.ratios == [3.0, 4.0, 1.0] and (figure.ours, figure.theirs) == ("5.0 ms", "2.0 ms")
    assert "≥ 1.5: met" in table([figure.row()])


@pytest.mark.timed
@pytest.mark.parametrize("name", ["slowdowns checkpoints", *NAMES,
                                  *(f"gpu --part {n}" for n in gpu.PROGRAMME)])
def test_every_benchmark_runs(name, tmp_path):
    printed, _ = python("-m", "tests.bench", *name.split(), "--quick", folder=tmp_path)
    assert printed.count("| what |") == len(name.partition(" --")[0].split())


@pytest.mark.slow
def test_whatever_happens_on_a_card_is_an_entry(tmp_path, monkeypatch, capsys):
    """The figures of a step before it failed are kept; a step without time left is skipped."""
    clock = [0.0]

    def attempt(command, limit, log):
        clock[0] += 245
        step, file = command[3:5]
        with open(file, "a") as out:
            print(json.dumps(vars(Figure(step, "sheet", [float("nan")]))), file=out)
            print(json.dumps("a note"), file=out)
        return "exit code -11: no output" if step == "peaks" else ""

    monkeypatch.setattr(gpu, "attempt", attempt)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setitem(gpu.PROGRAMME, 1, dict.fromkeys(["train.py", "peaks", "checks"]))
    monkeypatch.chdir(tmp_path)
    assert main(["gpu"]) == 0
    found = json.loads(next(tmp_path.glob("gpu-*-1.json")).read_text())
    assert found["outcomes"] == {"train.py": "245 s", "peaks": "exit code -11: no output",
                                 "checks": "skipped: no time left"}
    assert [figure["what"] for figure in found["figures"]] == ["train.py", "peaks"]
    assert found["notes"] == {"train.py": ["a note"], "peaks": ["a note"], "checks": []}
    assert found["commit"] and "torch" in found["environment"]
    assert "| peaks | sheet | nan |" in capsys.readouterr().out
