"""Which device a run takes, and what is said about one that is not there. None of them is used."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_config

from steady.models import device as devices
from steady.options import ConfigError
from steady.ranks.ranks import gloo_group


@pytest.mark.parametrize("there, name, expected", [
    (None, "auto", "cpu"), ("mps", "auto", "mps"), ("mps", "cpu", "cpu"), ("xpu", "auto", "cpu"),
    (None, "cuda", None), (None, "mps", None), ("mps", "cuda", None),
])
def test_the_device_that_torch_finds(monkeypatch, there, name, expected):
    found = there and torch.device(there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    if expected:
        assert devices.pick_device(name, 0).type == expected
    else:
        with pytest.raises(ConfigError, match=f"--device {name}: torch .* finds no such device"):
            devices.pick_device(name, 0)


def test_attention_where_torch_has_nothing_to_choose_from(monkeypatch):
    """As on mps: torch registers no such operation there."""
    empty = torch.empty

    def no_choice(*args, **options):
        raise NotImplementedError("Could not run 'aten::_fused_sdp_choice' with arguments from MPS")

    monkeypatch.setattr(torch, "_fused_sdp_choice", no_choice)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how))
    mps = torch.device("mps")
    assert devices.attention_backend(tiny_config(), mps, torch.float32) == "math"
    with pytest.raises(ConfigError, match="flash: not available on mps"):
        devices.attention_backend(tiny_config(attention="flash"), mps, torch.float32)


def test_several_processes_need_cpus_or_nvidia():
    with pytest.raises(ConfigError, match="--device mps: expected one process, not 2"):
        gloo_group(2, torch.device("mps"))


@pytest.mark.slow
def test_tiny_numbers_take_no_longer_on_any_thread(tmp_path):
    """Set before the first parallel operation, or only one of the threads has it."""
    program = ("import torch, train; torch.set_num_threads(2); train.set_up(train.config.resolve("
               "train.Config(out_dir='run'))); "
               "print(int((torch.full((10**6,), 1e-38) * 0.5).count_nonzero()))")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "0"
