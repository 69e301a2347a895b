"""What steady uses of torch's private parts, taken away one by one, as a new torch may."""

import ast
import sys

import torch
import torch.distributed as dist
from conftest import ROOT, column, tiny_config
from torch import nn

from steady import private
from steady.models.device import attention_backend
from steady.watch import machine

CPU = torch.device("cpu")
# what torch documents in spite of its name, and what is not torch's
ALLOWED = ("_foreach_", "_version", "_replace", "_exit", "_actions", "_option_string_actions",
           "_step_supports", "_saved_")


def test_private_names_of_torch_are_in_one_file():
    files = [*ROOT.glob("*.py"), *(ROOT / "steady").rglob("*.py")]
    for path in files:
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

    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert attention_backend(tiny_config(), CPU, torch.float32) == "auto"
    assert attention_backend(tiny_config(attention="math"), CPU, torch.float32) == "math"
    assert machine.compiler()
    monkeypatch.setattr(torch._dynamo.utils, "counters", {})
    assert machine.compiler() == {}
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")
    private.mark_dynamic(torch.zeros(3), 0)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    private.compile_deterministically()
