"""Devices that are not there, and private parts of torch that a new one may take away."""

import ast
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, column, python, raising, tiny_config
from torch import nn

from steady import private
from steady.models import device as devices
from steady.options import ConfigError
from steady.ranks.ranks import gloo_group
from steady.watch import machine


@pytest.mark.parametrize("there, name, expected", [
    (None, "auto", "cpu"), ("mps", "auto", "mps"), ("mps", "cpu", "cpu"), ("xpu", "auto", "cpu"),
    (None, "cuda", None), (None, "mps", None), ("mps", "cuda", None)])
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
    empty, said = torch.empty, "Could not run 'aten::_fused_sdp_choice' with arguments from MPS"
    monkeypatch.setattr(torch, "_fused_sdp_choice", raising(NotImplementedError(said)))
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
    assert python("-c", program, folder=tmp_path, OMP_NUM_THREADS="2")[0].split()[-1] == "0"


# what torch documents in spite of its name, and what is not torch's
ALLOWED = ("_foreach_", "_version", "_replace", "_exit", "_actions", "_option_string_actions",
           "_step_supports", "_saved_")


def test_private_names_of_torch_are_in_one_file():
    for path in [*ROOT.glob("*.py"), *(ROOT / "steady").rglob("*.py")]:
        if path.name == "private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "sys")
                private_name = node.attr.startswith("_") and not node.attr.startswith("__")
                assert own or not private_name or node.attr.startswith(ALLOWED), (path, node.attr)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                private_names = [name for name in names if "._" in f".{name}"]
                assert set(private_names) <= {"__version__"}, (path, names)


def test_ranks_train_without_what_is_private(run, tmp_path):
    """ddp and zero3, with none of its functions for ranks and compilers."""
    def hook(rank):
        ddp, reducer = nn.parallel.DistributedDataParallel, dist.Reducer
        del ddp._set_ddp_runtime_logging_sample_rate, torch._fused_sdp_choice
        del reducer._push_all_rebuilt_params
        torch.autograd.__dict__.pop("_profiler_enabled", None)

    for way in ("ddp", "zero3"):
        told = run("--max_steps", 3, "--parallel", way, "--out_dir", way, ranks=2, hook=hook)
        assert "auto attention" in told
        assert max(column(tmp_path / way, "train/loss")) == 3


def test_one_process_goes_on_without_them(monkeypatch):
    import torch._dynamo.utils

    cpu = torch.device("cpu")
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    for name in ("auto", "math"):
        assert devices.attention_backend(tiny_config(attention=name), cpu, torch.float32) == name
    assert machine.compiler()
    monkeypatch.setattr(torch._dynamo.utils, "counters", {})
    assert machine.compiler() == {}
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")
    private.mark_dynamic(torch.zeros(3), 0)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    private.compile_deterministically()
