"""Norm, rotary embedding, attention and loss, fast on CPU and GPU, eager and compiled.

The compiler gets the plain formulas and fuses them itself. Eager autograd makes many passes over
memory for them; the functions here, equal up to rounding, make fewer.
"""

import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from steady.tokens.files import IGNORE


def on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes x; `--estimate` replaces this, to imagine a GPU."""
    return x.device.type == "cpu"


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (arXiv:1910.07467); casts its weight, as CUDA's fused kernel takes one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        # also for --estimate: it keeps the same tensors as CUDA's kernel
        if x.device.type == "cpu" and self.weight.ndim == 1 and not torch.compiler.is_compiling():
            return NormOnCPU.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class NormOnCPU(Function):
    """x [..., C], weight [C] → x / sqrt(mean(x²) + eps) * weight, in fp32; eps None: 2**-23."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1] + (2**-23 if eps is None else eps)).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        grad, normal, wide = grad.float(), x.float() * scale, weight.float()
        product = grad * normal
        mean = (product @ wide)[..., None] / x.shape[-1]
        of_x = (grad * wide).addcmul_(normal, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [B, T, H, D] by its position's angle.

    cos, sin [B or 1, T, 1, D] (arXiv:2104.09864); the first half of the sines has a minus sign.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float,
           auto: bool) -> Tensor:
    """Attention of q [B, H, T, D] to k, v [B, H or fewer, S, D], scaled by 1 / sqrt(D).

    mask: bool [B or 1, 1, T, S]. By F.scaled_dot_product_attention; with auto, on a CPU in bf16,
    by matmuls of 256 rows with all their keys, as in Megatron-LM: 0.33 to 0.66 of the time (torch
    2.13, AVX512-BF16). Probabilities of long sequences are computed again in the backward pass.
    """
    (T, D), S = q.shape[-2:], k.shape[2]
    if not (auto and on_cpu(q) and q.dtype == torch.bfloat16 and T > 1):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal,
                                              enable_gqa=k.shape[1] != q.shape[1])
    if mask is None:
        mask = torch.ones(1, 1, T, S, dtype=torch.bool).tril(0 if causal else S)
    call, out = attend_by_products, []
    if T > 4 * D:
        call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=dropout > 0)
    for start in range(0, T, 256):
        rows, keys = slice(start, start + 256), slice(start + 256 if causal else None)
        out += [call(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask[:, :, rows, keys], dropout)]
    return torch.cat(out, 2) if len(out) > 1 else out[0]


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """As `attend`, for some rows and their keys at once; mask: bool [B or 1, 1, T, S]."""
    (B, H, T, D), (_, groups, S, _) = q.shape, k.shape
    bias = torch.zeros(()).where(mask, -1e30).to(q.dtype)  # -inf gives NaN in a row without keys
    bias = bias.repeat(1, 1, H // groups, 1).expand(B, groups, -1, S).flatten(0, 1)
    q, k, v = q.reshape(B * groups, -1, D), k.flatten(0, 1), v.flatten(0, 1)
    p = torch.baddbmm(bias, q, k.mT, alpha=D**-0.5).softmax(-1)
    return torch.bmm(F.dropout(p, dropout), v).view(B, H, T, D)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """Attention inside packed documents without a mask, by flash kernels: [B, T, H, D].

    q [B, T, H, D], k, v [B, T, H_kv, D]; boundaries: `packing.boundaries`. The longest document
    counts as T tokens: its real length would cost a sync, and recompile.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler: takes seconds

    T = q.shape[1]
    # torch 2.11 has no such argument, but accepts fewer heads of keys and values anyway
    gqa = dict(enable_gqa=True) if "enable_gqa" in varlen_attn.__kwdefaults__ else {}
    y = varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), boundaries, boundaries, T, T,
                    window_size=(-1, 0), **gqa)
    return y.view(q.shape)


@contextmanager
def compute_again(weight: Tensor):
    """Around a block with this weight, if it is large: the backward pass computes silu(x) and casts
    of large weights again, instead of keeping them. When compiling, the compiler decides.
    """
    if weight.numel() < 2**19 or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with saved_tensors_hooks(recipe, lambda follow: follow()):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def recipe(tensor: Tensor):
    """A function that returns the tensor: kept, or computed again if that pays."""
    node, kept, compute = tensor.grad_fn, tensor, lambda x: x
    name, dtype = node.name() if node else "", tensor.dtype
    if name == "SiluBackward0" and tensor.numel() >= 2**22:
        kept, compute = node._saved_self, F.silu
    elif name == "TBackward0" and tensor.numel() >= 2**19:  # F.linear transposes its weight
        cast = node.next_functions[0][0]
        if cast.name() == "ToCopyBackward0" and hasattr(cast.next_functions[0][0], "variable"):
            kept, compute = cast.next_functions[0][0].variable, lambda x: x.to(dtype).t()
    kept = kept.detach()  # or a node would hold its own output, and never be freed
    version = kept._version

    def follow() -> Tensor:
        if kept._version != version:  # torch skips this check for tensors with hooks
            raise RuntimeError("a tensor that the backward pass needs was changed in place")
        return compute(kept)

    return follow


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


class Head(nn.Linear):
    """hidden [..., C] → fp32 logits [..., V]; with targets [...], cross-entropies in nats [...].

    Both go through the module's call: --parallel zero3 gathers the weight in it.
    """

    always_called = True  # not only read for its weight, so it can be sharded and compiled alone

    def __init__(self, d_model: int, padded_vocab: int, vocab_size: int):
        super().__init__(d_model, padded_vocab, bias=False)
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None and not torch.compiler.is_compiling():
            return LinearCrossEntropy.apply(hidden, self.weight, targets, self.vocab_size)
        logits = super().forward(hidden)
        if targets is None:
            return logits[..., : self.vocab_size].to(torch.float32, copy=True)  # no view, for FSDP
        if on_cpu(logits):
            return cross_entropies(logits[..., : self.vocab_size].float(), targets)
        # masked, not cut: compiled for a GPU, rows that end within a tile are slow
        padding = torch.arange(logits.shape[-1], device=logits.device) >= self.vocab_size
        return cross_entropies(logits.float().masked_fill(padding, -math.inf), targets)


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, T, V], targets [B, T] → nats [B, T], 0 where a target is IGNORE."""
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")


class LinearCrossEntropy(Function):
    """Cross-entropy of hidden [..., C] @ weight.T [V_padded, C] with targets [...] → fp32 [...].

    Equals F.cross_entropy up to rounding, but keeps one tensor of size [..., V] in the dtype of the
    product: the logits, overwritten by their gradient a few rows at a time. The plain formula keeps
    three or four in fp32. The incoming gradient may differ from loss to loss.
    """

    cpu_chunk = 2**19  # logits at a time: 2 MB in fp32, to stay in the cache
    gpu_chunk = 2**25  # enough to keep a GPU busy
    rows = 2**13  # of the weight's gradient held in the dtype of the product at a time

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        shape, hidden, targets = targets.shape, hidden.flatten(0, -2), targets.flatten()
        logits = F.linear(hidden, weight.detach())  # detached: autocast must not cache its copy
        hidden = hidden.to(logits.dtype)
        logits[:, vocab_size:] = -math.inf  # the padding of the vocabulary
        counted = targets != IGNORE
        index, targets = torch.arange(len(logits), device=logits.device), targets.where(counted, 0)
        losses = -logits.gather(1, targets[:, None])[:, 0].float()  # unlike an index, refuses -1
        ctx.unit = 64.0 if logits.dtype == torch.float16 else 1.0  # fp16 is coarse below 6e-5
        in_cache = on_cpu(hidden)
        chunk = LinearCrossEntropy.cpu_chunk if in_cache else LinearCrossEntropy.gpu_chunk
        parts = (x.split(max(1, chunk // weight.shape[0])) for x in (logits, targets, losses))
        for some, target, loss in zip(*parts, strict=True):
            wide = some.float() if in_cache else some  # a CPU is slow in bf16
            largest = wide.amax(-1).float()
            p = wide.softmax(-1, dtype=torch.float32)
            loss += largest - p.amax(-1).log()  # log-sum-exp: the largest probability is e^0 / sum
            p[index[: len(p)], target] -= 1.0  # in fp32: bf16 rounds p to 1 from 0.998 on
            some.copy_(p * ctx.unit if ctx.unit > 1 else p)
        ctx.save_for_backward(hidden, weight, logits, counted)
        return losses.view(shape).where(counted.view(shape), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight, grad_logits, counted = ctx.saved_tensors  # grad_logits for a grad of 1
        grad, shape = grad.flatten().where(counted, 0.0)[:, None] / ctx.unit, grad.shape
        grad_hidden = grad_logits @ weight.to(grad_logits.dtype)
        grad_hidden = (grad_hidden * grad).unflatten(0, shape)  # scaled in fp32
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None
        grad_weight, hidden = torch.empty_like(weight), (hidden * grad).to(hidden.dtype)
        n = LinearCrossEntropy.rows
        parts = grad_weight.split(n), grad_logits.split(n, dim=1)
        for part, logits in zip(*parts, strict=True):
            part.copy_(logits.t() @ hidden)
        return grad_hidden, grad_weight, None, None
