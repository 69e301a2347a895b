"""Attention inside packed documents without a mask: by flash kernels, or by FlexAttention.

Imported only where it is used: torch's modules bring the compiler, which takes seconds.
"""

import inspect

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

flex = torch.compile(flex_attention)  # without, all scores are kept: [B, H, T, T]

# torch 2.11 takes fewer heads of keys and values without this argument
GQA = dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | BlockMask) -> Tensor:
    """q [B, T, H, D], k, v [B, T, H_kv, D] → [B, T, H, D].

    documents: `packing.boundaries`, for flash kernels, or `block_mask`, for one that Triton
    compiles. The longest document counts as T tokens: its length would be a sync, and recompile.
    """
    if isinstance(documents, BlockMask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex(q, k, v, block_mask=documents, enable_gqa=True).transpose(1, 2)
    T = q.shape[1]
    y = varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), documents, documents, T, T,
                    window_size=(-1, 0), **GQA)
    return y.view(q.shape)


def block_mask(documents: Tensor) -> BlockMask:
    """Numbers of documents [B, T] → where `packing.document_mask` holds, by blocks of tokens.

    FlexAttention skips a block where it nowhere does, and asks `attends` where it partly does.
    """
    def attends(b, head, q, k):
        return (documents[b, q] == documents[b, k]) & (q >= k)

    B, T = documents.shape
    return create_block_mask(attends, B, None, T, T, device=documents.device)
