"""What steady uses of torch's private parts, taken away one by one, as a new torch may."""

import ast
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, TINY, column, processes, tiny_config
from torch import nn

from steady import private
from steady.models.device import attention_backend
from steady.options import ConfigError

CPU = torch.device("cpu")
# what torch documents in spite of its name, and what is not torch's
ALLOWED = ("_foreach_", "_replace", "_exit", "_actions", "_option_string_actions", "_step_supports")


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
                assert not any("._" in f".{name}" for name in names), (path, names)


def test_a_newer_torch_is_mentioned(monkeypatch):
    assert not private.untested()
    for version, newer in (("2.11.0", False), ("2.15.1+cu132", False), ("2.16.0a0+git12", True),
                           ("3.0.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert bool(private.untested()) == newer
        assert (version in private.untested()) == newer


def test_ranks_train_without_what_is_private(corpus, tmp_path):
    """ddp and zero3, with none of its functions for ranks and compilers."""
    def hook(rank):
        ddp, reducer = nn.parallel.DistributedDataParallel, dist.Reducer
        del ddp._set_ddp_runtime_logging_sample_rate, torch._fused_sdp_choice
        del reducer._push_all_rebuilt_params
        dist.__dict__.pop("set_timeout", None)
        dist.distributed_c10d.__dict__.pop("_set_pg_timeout", None)
        torch.autograd.__dict__.pop("_profiler_enabled", None)

    flags = [*TINY, "--data", corpus, "--max_steps", 3]
    for way in ("ddp", "zero3"):
        group = processes(tmp_path, 2, [*flags, "--parallel", way, "--out_dir", way], hook)
        assert [process.code() for process in group] == [0, 0], group[0].text()
        assert "auto attention" in group[0].text()
        assert max(column(tmp_path / way, "train/loss")) == 3


def test_attention_without_a_choice_is_as_asked_for(monkeypatch):
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert attention_backend(tiny_config(), CPU, torch.float32) == "auto"
    assert attention_backend(tiny_config(attention="math"), CPU, torch.float32) == "math"


def test_fp16_on_several_ranks_needs_the_scaler():
    with pytest.raises(ConfigError) as refused:
        private.found_inf_flags(object(), None)
    assert "--precision fp16" in str(refused.value)


def test_auto_needs_groups_that_do_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules,
                        "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(ConfigError) as refused:
        private.use_fake_backend()
    assert "--micro_batch_size auto" in str(refused.value)


def test_no_flight_record(monkeypatch):
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json", raising=False)
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", raising=False)
    assert private.flight_record() == []


def test_compilations_and_profilers_are_unknown(monkeypatch):
    import torch._dynamo.utils

    assert private.compilations() is not None
    monkeypatch.delitem(torch._dynamo.utils.counters, "stats")
    monkeypatch.setattr(torch._dynamo.utils, "counters", {})
    assert private.compilations() is None
    with torch.profiler.profile():
        assert private.is_profiling()
        monkeypatch.delattr(torch.autograd, "_profiler_enabled")
        assert not private.is_profiling()


def test_float8_products_without_the_private_one(monkeypatch):
    a, one = torch.eye(16).to(torch.float8_e4m3fn), torch.ones(())
    given = {}

    def public(a, b, *scales, **options):
        given.update(scales=scales, **options)
        return a.float() @ b.float()

    monkeypatch.delattr(torch, "_scaled_mm")
    monkeypatch.setattr(F, "scaled_mm", public)
    assert private.scaled_mm(a, a.t(), one, one, torch.float32, fast=True).sum() == 16
    whole = F.ScalingType.TensorWise
    assert given["scales"] == (one, whole, one, whole) and given["use_fast_accum"]


def test_marks_and_determinism_do_nothing(monkeypatch):
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")
    private.mark_dynamic(torch.zeros(3), 0)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    private.compile_deterministically()
