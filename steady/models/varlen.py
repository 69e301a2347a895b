"""Attention inside packed documents without a mask, by flash kernels.

Imported only where it is used: torch's module brings the compiler, which takes seconds.
"""

import inspect

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 takes fewer heads of keys and values without this argument
GQA = dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """q [B, T, H, D], k, v [B, T, H_kv, D] → [B, T, H, D].

    documents: `packing.boundaries`. The longest counts as T tokens: its length would be a sync, and
    recompile.
    """
    T = q.shape[1]
    y = varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), documents, documents, T, T,
                    window_size=(-1, 0), **GQA)
    return y.view(q.shape)
