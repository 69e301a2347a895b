"""The whole program on CUDA, without a GPU: torch's CUDA build on a device that computes nothing.

It finds tensors on the wrong device, types that a kernel does not take, kernels that are missing,
and everything that makes host and device wait for each other, by step and line. It says nothing
of numbers and times. The cases are in tests/fakecuda/cases.py.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, environment
from fakecuda.build import build, cuda_python, variables

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not shutil.which("gcc") or not shutil.which("nm"), reason="needs gcc and nm")]


@pytest.fixture
def python() -> str:
    found = cuda_python()
    if not found:
        pytest.skip("no CUDA build of torch: STEADY_CUDA_PYTHON may name an interpreter with one")
    return found


def test_the_program_on_a_fake_device(python, tmp_path: Path):
    (tmp_path / "device").mkdir()
    build(python, tmp_path / "device")
    done = subprocess.run(
        [python, "-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider",
         f"--basetemp={tmp_path / 'cases'}", str(ROOT / "tests/fakecuda/cases.py")],
        env={**environment(), **variables(tmp_path / "device")}, cwd=ROOT, capture_output=True,
        text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
