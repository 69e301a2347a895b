"""What the README says is so: its commands run as they are written, its patches apply and train."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Process, column, environment

import config
import model
import prepare

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def clone(tmp_path) -> Path:
    """The files of the repository in a folder of their own."""
    for name in ("checkpoint", "config", "convert", "data", "model", "monitor", "prepare", "train"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    return tmp_path


def test_commands_run_as_written(clone):
    """The default run, though only a tenth of its steps, then to resume it, then two processes."""
    env = {**os.environ, "XDG_CACHE_HOME": str(clone / "cache")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env.pop("PYTHONPATH", None)
    printed = []
    for command in blocks("sh"):
        command = command.replace("python train.py\n", "python train.py --max_steps 100\n")
        done = subprocess.run(
            command, shell=True, cwd=clone, env=env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert len(printed) == 3
    # 2.65 here; the standard library differs between versions of Python.
    assert column(clone / "runs/001", "val/bits_per_byte")[100] < 2.9
    assert "step 100/100" in printed[0] and "goodput" in printed[0]
    assert len(printed[0].split("sample  of what it writes:")[1].strip()) > 100
    assert "nothing to do" in printed[1]
    assert "2 x cpu" in printed[2] or "2 x cuda" in printed[2]
    assert column(clone / "runs/002", "train/loss")[60] < 2.6


CHANGES = ["optimizer", "block", "data source", "metric"]


@pytest.fixture(scope="module")
def unpatched(corpus, tmp_path_factory) -> dict[int, float]:
    """The losses of the program as it is."""
    folder = tmp_path_factory.mktemp("unpatched")
    process = Process(folder, [*TINY, "--log_interval", 1, "--data", corpus, "--out_dir", "r"])
    assert process.code() == 0, process.text()
    return column(folder / "r", "train/loss")


@pytest.mark.parametrize("patch, changed", list(zip(blocks("diff"), CHANGES, strict=True)),
                         ids=CHANGES)  # fmt: skip
def test_patches_apply_and_train(clone, corpus, unpatched, patch, changed):
    applied = subprocess.run(["git", "apply", "-"], cwd=clone, input=patch, text=True,
                             capture_output=True)  # fmt: skip
    assert applied.returncode == 0, applied.stderr
    command = [sys.executable, "train.py", *TINY, "--log_interval", "1", "--data", str(corpus),
               "--out_dir", "after"]  # fmt: skip
    done = subprocess.run(command, cwd=clone, env={**environment(), "PYTHONPATH": ""},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = column(clone / "after", "train/loss")
    assert after[12] < after[1]
    if changed == "metric":
        assert after == unpatched  # it looks on and changes nothing
        assert len(column(clone / "after", "health/head_norm")) == 12
    else:
        assert after != unpatched


def test_options_and_files_it_names_exist():
    fields = {f.name for f in config.dataclasses.fields(config.Config)}
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z_-]*[a-z])", README)}
    for options in (prepare.Options, model.GenerateOptions, model.ExportOptions):
        fields |= {f.name for f in config.dataclasses.fields(options)}
    known = fields | {"nproc_per_node", "max_restarts", "help"}
    known |= {"signal", "requeue", "open_mode"}  # of sbatch
    for script in ("monitor.py", "tests/bench/__main__.py"):
        known |= set(re.findall(r"\"--(\w+)\"", (ROOT / script).read_text()))
    assert flags - known == set()
    for name in re.findall(r"`((?:tests/)?[\w/]+\.py)`|\]\((\w+\.md)\)", README):
        assert (ROOT / "".join(name)).exists(), name


def test_the_map_of_the_house_has_the_right_sizes():
    for name, lines in re.findall(r"^\| `(\w+\.py)` .* \| (\d+) \|$", README, re.MULTILINE):
        actual = len((ROOT / name).read_text().splitlines())
        assert abs(actual - int(lines)) <= 20, f"{name} has {actual} lines, README says {lines}"
