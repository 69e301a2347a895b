"""Norm, rotary embedding and attention, each in the way that is fast where it runs.

The compiler is given the plain formulas, which it fuses by itself. Outside of it, autograd makes
many passes over memory of them; the functions here, equal up to rounding, make fewer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


def on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes x. `--estimate`, which imagines a GPU, says no."""
    return x.device.type == "cpu"


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (arXiv:1910.07467) with its weight cast to the input's dtype.

    Mixed dtypes, as under autocast, would fall off torch's fused kernel, which CUDA alone has.
    """

    def forward(self, x: Tensor) -> Tensor:
        # where a GPU is only imagined as well: it keeps what CUDA's kernel keeps
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return NormOnCPU.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class NormOnCPU(Function):
    """x [..., C], weight [C] → x / sqrt(mean(x²) + eps) * weight, in fp32 inside."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        grad, normal, wide = grad.float(), x.float() * scale, weight.float()
        product = grad * normal
        mean = (product @ wide)[..., None] / x.shape[-1]
        of_x = (grad * wide).addcmul_(normal, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [B, T, H, D] by its position's angle.

    cos, sin [B or 1, T, 1, D / 2] (arXiv:2104.09864).
    """
    if not torch.compiler.is_compiling():
        return Rotation.apply(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Rotation(Function):
    """`rotate`; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return turn(grad, *ctx.saved_tensors, -1).to(ctx.dtype), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate forward (sign 1) or back (-1), straight into the halves of what is returned."""
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    (a, b), (c, d) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=sign)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
    """F.scaled_dot_product_attention of q [B, H, T, D], k and v [B, H or fewer, S, D].

    On a CPU, forward and backward take 1.05 to 8 times as long in bf16 as in fp32 up to T x D of
    2^14, and 0.5 to 0.9 beyond (torch 2.13, AMX, one thread): so few are computed in fp32.
    """
    small = on_cpu(q) and q.requires_grad and q.shape[-2] * q.shape[-1] <= 2**14
    if not small or q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, **how)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **how)
    return y.to(q.dtype)


class KVCache:
    """Keys and values of one layer for up to `capacity` positions."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.k = self.v = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [B, H_kv, T, D]; returns all so far. Causal masking needs T = 1 or length 0."""
        B, H, T, D = k.shape
        if self.k is None:
            self.k, self.v = (x.new_empty(B, H, self.capacity, D) for x in (k, v))
        end = self.length + T
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]
