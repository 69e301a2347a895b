"""The whole program on CUDA, without a GPU: torch's CUDA build on a device that computes nothing.

It finds tensors on the wrong device, types that a kernel does not take, kernels that are missing,
and everything that makes host and device wait for each other, by step and line. It says nothing
of numbers and times. The cases are in tests/fakecuda/cases.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

FOLDER = ROOT / "tests/fakecuda"


def cuda_python() -> str | None:
    """An interpreter with a CUDA build of torch, which need not find a GPU; None without one."""
    for python in filter(None, (os.environ.get("STEADY_CUDA_PYTHON"), sys.executable)):
        asked = subprocess.run([python, "-c", "import torch; print(torch.version.cuda)"],
                               capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.strip() != "None":
            return python
    return None


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("gcc")
                    or not shutil.which("nm"), reason="needs gcc and nm on Linux")
def test_the_program_on_a_fake_device(tmp_path: Path):
    python = cuda_python()
    if not python:
        pytest.skip("no CUDA build of torch: STEADY_CUDA_PYTHON may name an interpreter with one")
    (tmp_path / "device").mkdir()
    command = [python, str(FOLDER / "build.py"), str(tmp_path / "device")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    paths = [str(tmp_path / "device"), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = dict(LD_PRELOAD=str(tmp_path / "device/device.so"),
                     LD_LIBRARY_PATH=os.pathsep.join(filter(None, paths)))
    done = subprocess.run(
        [python, "-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider",
         f"--basetemp={tmp_path / 'cases'}", str(FOLDER / "cases.py")],
        env={**environment(), **variables}, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
