"""Float8 layers: how exact their products are, that they learn as bf16 does, who is refused.

torch multiplies float8 on a CPU too, but 50 steps take minutes: a run is `emulated`.
"""

import pytest
import torch
from conftest import column, tiny_config
from torch import nn

import train
from steady.models import float8
from steady.models.float8 import E4M3, E5M2, Float8Linear, scale_of, to_float8
from steady.options import ConfigError

HALF = ["--precision", "bf16", "--float8"]


@pytest.fixture
def emulated(monkeypatch):
    """--float8 is allowed on a CPU, and its products are made of the same numbers in fp32."""

    def product(a, b, scale_a, scale_b, out_dtype, use_fast_accum=False):
        return (a.float() @ b.float() * (scale_a * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(float8, "unable", lambda device: "")


def layer(n_in: int, n_out: int, bias: bool = False) -> Float8Linear:
    made = nn.Linear(n_in, n_out, bias=bias)
    made.__class__ = Float8Linear
    return made


def rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of each element in float8: half a unit of its last place."""
    info = torch.finfo(dtype)
    return x.abs() * info.eps / 2 + scale_of(x, dtype) * info.smallest_normal * info.eps / 2


def within(found: torch.Tensor, a, a_dtype, b, b_dtype):
    """Whether `found` is a @ b, but for rounding: of a and b to float8, of it to bf16."""
    da, db = rounding(a, a_dtype), rounding(b, b_dtype)
    bound = da @ b.abs() + a.abs() @ db + da @ db
    exact = a @ b
    bound += (exact.abs() + bound) * torch.finfo(torch.bfloat16).eps + 1e-6
    return ((found.float() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [64, 21])  # 21 is padded to 32
def test_products_are_as_exact_as_float8(monkeypatch, rows):
    torch.manual_seed(0)
    plain = torch._scaled_mm

    def as_on_cuda(a, b, *scales, **how):
        assert not any(n % 16 for n in (*a.shape, *b.shape))
        assert a.is_contiguous() and b.t().is_contiguous()
        return plain(a, b, *scales, **how)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_cuda)
    linear, x = layer(48, 32), torch.randn(rows, 48, requires_grad=True)
    y = linear(x)
    grad = torch.randn(rows, 32).bfloat16()
    y.backward(grad)
    weight, grad = linear.weight.detach(), grad.float()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 == linear.weight.grad.dtype
    assert within(y, x.detach(), E4M3, weight.t(), E4M3)
    assert within(x.grad, grad, E5M2, weight, E4M3)
    assert within(linear.weight.grad, grad.t(), E5M2, x.detach(), E4M3)
    assert not torch.equal(y.float(), x @ weight.t())
    with torch.no_grad():  # evaluation and samples
        torch.testing.assert_close(linear(x), x @ weight.t())


def test_any_scale_and_what_is_not_finite():
    for size in (1e-30, 1.0, 1e30):  # gradients of a mean over many targets are tiny
        x = torch.randn(16, 16) * size
        again = to_float8(x, scale_of(x, E5M2), E5M2).float() * scale_of(x, E5M2)
        assert (again - x).abs().max() <= x.abs().max() / 8  # half a unit of two bits
    zeros = torch.zeros(16, 16)
    assert not to_float8(zeros, scale_of(zeros, E4M3), E4M3).float().any()
    for bad in (torch.inf, -torch.inf, torch.nan):  # an update with it must be skipped
        x = torch.ones(16, 16)
        x[0, 0] = bad
        assert to_float8(x, scale_of(x, E4M3), E4M3).float().isnan().any()
    assert not layer(16, 16)(x).isfinite().all()


def test_only_the_layers_of_the_blocks_and_no_names_change(emulated):
    cfg = tiny_config(float8=True, qkv_bias=True)
    model = train.Transformer(cfg)
    names = list(model.state_dict())
    float8.convert(model, cfg, torch.device("cpu"), torch.bfloat16)
    changed = [name for name, m in model.named_modules() if isinstance(m, Float8Linear)]
    parts = ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"]
    assert changed == [f"blocks.{i}.{part}" for i in range(2) for part in parts]
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_it_learns_as_bf16_does(run, emulated, tmp_path):
    flags = ["--max_steps", "50", "--log_interval", "10", "--save_interval", "25", "--precision",
             "bf16", "--eval_interval", "0"]
    run(*flags, "--out_dir", "bf16")
    run(*flags, "--out_dir", "float8", "--float8", "--activation_checkpointing", "full")
    expected, found = (column(tmp_path / name, "train/loss") for name in ("bf16", "float8"))
    assert found != expected
    assert [found[step] for step in expected] == pytest.approx(list(expected.values()), rel=0.03)
    checkpoint = "float8/checkpoints/step_00000050.pt"  # which any run can read
    run("--eval_only", "--resume", checkpoint, "--precision", "fp32", "--no_float8")


@pytest.mark.slow
def test_compiled_it_is_the_same(run, emulated, tmp_path):
    run(*HALF, "--out_dir", "eager")
    run(*HALF, "--out_dir", "compiled", "--compile")
    eager, compiled = (column(tmp_path / name, "train/loss") for name in ("eager", "compiled"))
    assert list(compiled.values()) == pytest.approx(list(eager.values()), rel=0.01)


@pytest.mark.slow
def test_it_is_one_graph(emulated):
    cfg = tiny_config(float8=True)
    model = train.Transformer(cfg)
    float8.convert(model, cfg, torch.device("cpu"), torch.bfloat16)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch._dynamo.explain(model)(tokens, tokens)
    assert found.graph_break_count == 0, found.break_reasons


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3"])
def test_on_several_ranks(run, emulated, tmp_path, way):
    run(*HALF, "--out_dir", "one")
    run(*HALF, "--out_dir", way, "--parallel", way, ranks=2)
    one, two = (column(tmp_path / name, "train/loss") for name in ("one", way))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=0.03)


def test_where_it_cannot_run_it_is_refused(run, emulated, monkeypatch):
    message = run("--float8", "--precision", "fp32", expect=2)
    assert "--float8: expected --precision bf16 with it" in message
    message = run(*HALF, "--d_ff", "72", expect=2)
    assert "multiples of 16, not 72 and 32 as blocks.1.mlp.down has" in message
    monkeypatch.undo()
    assert "--float8: expected a GPU from NVIDIA, not cpu" in run(*HALF, "--device", "cpu",
                                                                 expect=2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    cfg = tiny_config(float8=True)
    with pytest.raises(ConfigError, match="8.9 or higher, not the 8.0 of NVIDIA A100"):
        float8.convert(train.Transformer(cfg), cfg, torch.device("cuda"), torch.bfloat16)
    cfg.model = "transformers"
    with pytest.raises(ConfigError, match="a model of our own"):
        float8.convert(train.Transformer(cfg), cfg, torch.device("cpu"), torch.bfloat16)
