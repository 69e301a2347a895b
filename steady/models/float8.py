"""The linear layers of the blocks in float8: --float8, on an H100 and later.

The three products of a layer take e4m3 inputs and weights, and e5m2 gradients (arXiv:2209.05433).
Each tensor has one scale, from its own largest value, which stays on the device. Embedding, norms,
attention and head stay as they are, and so do the weights: in fp32, under the same names. Passes
without gradients (evaluation, samples) are those of bf16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steady.options import ConfigError
from steady.private import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which the kernels take sizes


def convert(model: nn.Module, cfg, device: torch.device, dtype: torch.dtype):
    """With --float8, make the blocks' linear layers Float8Linear in place. Raises ConfigError."""
    if not cfg.float8:
        return
    linear = {name: m for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear)}
    reason = unable(device)
    if cfg.model == "transformers":
        reason = "expected a model of our own, not one of transformers"
    elif dtype != torch.bfloat16:
        reason = f"expected --precision bf16 with it, not {dtype}"
    for name, m in linear.items():
        if m.in_features % MULTIPLE or m.out_features % MULTIPLE:
            reason = (f"expected widths that are multiples of {MULTIPLE}, not {m.in_features} and "
                      f"{m.out_features} as blocks.{name} has")
    if reason:
        raise ConfigError(f"--float8: {reason}")
    for module in linear.values():
        module.__class__ = Float8Linear


def unable(device: torch.device) -> str:
    """Why this device cannot multiply float8; empty if it can."""
    if device.type != "cuda":
        return f"expected a GPU from NVIDIA, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return (f"expected compute capability 8.9 or higher, not the {major}.{minor} of "
                f"{torch.cuda.get_device_name(device)}")
    return ""


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        rows = x.flatten(0, -2)
        surplus = -len(rows) % MULTIPLE
        y = Product.apply(F.pad(rows, (0, 0, 0, surplus)) if surplus else rows, self.weight)
        y = y[: len(rows)].unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Product(torch.autograd.Function):
    """x [M, K] @ weight.T [K, N] → bf16 [M, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x_scale, weight_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        x8 = to_float8(x, x_scale, E4M3)
        # The weight itself, not its float8 copy: it is there anyway, or gathered again by zero3.
        ctx.save_for_backward(x8, x_scale, weight, weight_scale)
        ctx.dtype = x.dtype
        weight8 = to_float8(weight, weight_scale, E4M3)
        return scaled_mm(x8, weight8.t(), x_scale, weight_scale, torch.bfloat16, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight, weight_scale = ctx.saved_tensors
        grad_scale = scale_of(grad, E5M2)
        grad8 = to_float8(grad, grad_scale, E5M2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight8 = to_float8(weight, weight_scale, E4M3)
            grad_x = scaled_mm(grad8, by_columns(weight8), grad_scale, weight_scale,
                               torch.bfloat16).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = scaled_mm(grad8.t().contiguous(), by_columns(x8), grad_scale, x_scale,
                                    weight.dtype)
        return grad_x, grad_weight


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What x is divided by so that it fills the range of `dtype`; fp32, without a dimension."""
    smallest = torch.finfo(torch.float32).tiny  # where all of x is 0
    return (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=smallest)


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`: rounded, not beyond its largest value; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def by_columns(x: Tensor) -> Tensor:
    """x [M, N] with its columns contiguous, as the kernels take the second factor."""
    return x.t().contiguous().t()
