"""Attention inside packed documents without a mask: by flash kernels, or by FlexAttention.

Imported only where it is used: torch's modules bring the compiler, which takes seconds.
"""

import inspect

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
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
    """Numbers of documents [B, T], rising in each row → where `packing.document_mask` holds.

    By blocks of 128 x 128 tokens: FlexAttention skips those where it nowhere does, and asks
    `attends` where it partly does. `create_block_mask` would make matrices of T x T.
    """
    def attends(b, head, q, k):
        return (documents[b, q] == documents[b, k]) & (q >= k)

    T, block = documents.shape[1], 128
    n = -(-T // block)
    k = torch.arange(n, device=documents.device)
    q, end = k[:, None], block * k + block
    first, last = documents[:, ::block], documents[:, (end - 1).clamp(max=T - 1)]
    some = (last[:, None, :] >= first[:, :, None]) & (k <= q)  # [B, n, n]: queries, keys
    every = (first[:, None, :] == last[:, :, None]) & (k < q) & (end[:, None] <= T)
    return BlockMask.from_kv_blocks(*counted(some & ~every), *counted(every), BLOCK_SIZE=block,
                                    mask_mod=attends, seq_lengths=(T, T))


def counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, n, n] → how many are true in each row [B, 1, n], and which, those first [B, 1, n, n]."""
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], which[:, None].int()
