"""Which device a run takes, and what is said about one that is not there. None of them is used."""

import pytest
import torch
from conftest import tiny_config

from steady.models import device as devices
from steady.options import ConfigError
from steady.ranks.ranks import join_ranks


def pick(monkeypatch, there: str | None, name: str, built: str | None = None) -> str:
    """The type of the device, where torch finds the accelerator `there`."""

    def current_accelerator(check_available=False):
        found = there if check_available else there or built
        return torch.device(found) if found else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    return devices.pick_device(name, 0).type


@pytest.mark.parametrize("there, name, expected", [
    (None, "auto", "cpu"), ("mps", "auto", "mps"), ("xpu", "auto", "xpu"), ("xpu", "xpu", "xpu"),
    ("mps", "cpu", "cpu"), ("hpu", "auto", "cpu"),  # of which nothing is known here
])
def test_the_device_that_torch_finds(monkeypatch, there, name, expected):
    assert pick(monkeypatch, there, name) == expected


@pytest.mark.parametrize("there, name, built, said", [
    (None, "xpu", None, "cpu alone"), (None, "mps", "cuda", "cuda"), ("xpu", "cuda", None, "xpu"),
    (None, "cuda", "cuda", "cuda"),
])
def test_a_device_that_is_not_there_is_refused(monkeypatch, there, name, built, said):
    with pytest.raises(ConfigError) as refused:
        pick(monkeypatch, there, name, built)
    text = str(refused.value)
    assert text.startswith(f"--device {name}: torch ") and f"built for {said}, finds none" in text


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


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_several_processes_need_cpus_or_nvidia(name):
    with pytest.raises(ConfigError, match=f"--device {name}: expected one process, not 2"):
        join_ranks(None, 0, 2, torch.device(name), 60)
