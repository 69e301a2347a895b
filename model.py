"""A decoder-only Transformer of the Llama / Qwen family: its loss, its FLOPs, its sampler.

`model(tokens, targets, documents)` returns losses, or logits without targets. The model knows
nothing of ranks, devices or precision: train.py applies those from outside.

Shapes: B sequences, T tokens, C = d_model, H heads of width D, V vocabulary.
"""

if __name__ == "__main__":  # first: the imports below take seconds
    from steady.guard.process import start

    start("tools.generate:main")

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from config import Config
from steady.models import layers
from steady.tokens import packing


def rope_table(cfg: Config) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary embedding, each [seq_len, 1, D]: see `layers.rotate`.

    rope_scaling: [factor] divides all frequencies; [factor, low, high, original context] those with
    wavelengths above original / low, fading out until original / high (arXiv:2407.21783).
    """
    pairs = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / cfg.rope_theta ** (pairs / cfg.head_dim)
    if len(cfg.rope_scaling) == 1:
        frequency = frequency / cfg.rope_scaling[0]
    elif cfg.rope_scaling:
        factor, low, high, original = cfg.rope_scaling
        turns = original * frequency / (2 * math.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = torch.arange(cfg.seq_len, dtype=torch.float32)[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class Where(NamedTuple):
    """Each token's position in its document, and the tokens it may attend to."""

    cos: Tensor  # of each position's angle, [B or 1, T, 1, D]
    sin: Tensor
    mask: Tensor | None = None  # bool [B, 1, T, S], also causal; None: all earlier ones in the row
    boundaries: Tensor | None = None  # instead of a mask: steady.tokens.packing.boundaries


class Attention(nn.Module):
    """Causal self-attention; n_kv_head < n_head is grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.dropout, self.auto = cfg.dropout, cfg.attention == "auto"
        heads = cfg.n_head + 2 * cfg.n_kv_head  # one large matmul is faster than three
        self.qkv = nn.Linear(cfg.d_model, heads * cfg.head_dim, bias=bool(cfg.qkv_bias))
        self.out = nn.Linear(cfg.n_head * cfg.head_dim, cfg.d_model, bias=False)
        norm = layers.RMSNorm if cfg.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (norm(cfg.head_dim, eps=cfg.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, where: Where, cache=None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [B, T, heads, D]
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        if not (torch.compiler.is_compiling() or isinstance(self.q_norm, layers.RMSNorm)):
            v = v.clone()  # a view would keep q and k for the backward pass
        q = layers.rotate(self.q_norm(q), where.cos, where.sin).to(v.dtype)  # computed in fp32
        k = layers.rotate(self.k_norm(k), where.cos, where.sin).to(v.dtype)
        if where.boundaries is not None:
            if where.mask is not None:
                raise TypeError("got a mask and boundaries: expected takes_boundaries = False")
            return self.out(layers.attend_packed(q, k, v, where.boundaries).flatten(2))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D]
        if cache is not None:
            k, v = cache.append(k, v)
        # a mask is already causal; a single token after a cache attends to the whole cache
        causal = where.mask is None and (cache is None or q.shape[2] > 1)
        dropout = self.dropout if self.training else 0.0
        y = layers.attend(q, k, v, where.mask, causal=causal, dropout=dropout, auto=self.auto)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202), with the gate and up projections in one matrix."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.gate_up = nn.Linear(cfg.d_model, 2 * cfg.d_ff, bias=False)
        self.down = nn.Linear(cfg.d_ff, cfg.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.attention_norm = layers.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.attention = Attention(cfg)
        self.mlp_norm = layers.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.mlp = FeedForward(cfg)
        self.dropout = nn.Dropout(cfg.dropout)
        self.recomputed = cfg.activation_checkpointing != "none"

    def forward(self, x: Tensor, where: Where, cache=None) -> Tensor:
        with layers.compute_again(self.mlp.gate_up.weight):
            if self.training and self.recomputed:
                return checkpoint(self.compute, x, where, use_reentrant=False)
            return self.compute(x, where, cache)

    def compute(self, x: Tensor, where: Where, cache=None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), where, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    takes_boundaries = True  # for `documents`; without this a model gets numbers [B, T] instead

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        padded_vocab = -(-cfg.vocab_size // 64) * 64  # whole tiles for the matrix units
        self.embedding = nn.Embedding(padded_vocab, cfg.d_model)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = layers.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.head = layers.Head(cfg.d_model, padded_vocab, cfg.vocab_size)
        for name, values in zip(("cos", "sin"), rope_table(cfg), strict=True):
            self.register_buffer(name, values, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal with GPT-2's 0.02, and zero, as in modded-nanogpt, for matrices that write to the
        residual stream: every block starts as the identity. Sets every parameter and buffer.
        """
        for buffer, values in zip((self.cos, self.sin), rope_table(self.cfg), strict=True):
            buffer.copy_(values)
        second = self.head if self.cfg.tie_embeddings else None  # shares the embedding's weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and module is not second:
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, layers.RMSNorm):
                nn.init.ones_(module.weight)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        if second:
            second.weight = self.embedding.weight

    def hidden(self, tokens: Tensor, caches=None, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T] → the last layer's normalized output [B, T, C].

        documents, for packed rows: each token's document number [B, T], or `packing.boundaries`;
        each document is computed as if it stood alone. Not with caches.
        """
        start = caches[0].length if caches else 0
        x = self.dropout(self.embedding(tokens))
        where = self.where(documents, tokens.shape, start)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, where, cache)
        return self.norm(x)

    def where(self, documents: Tensor | None, shape: torch.Size, start: int = 0) -> Where:
        """The Where of tokens [B, T] from position `start` on. Change the attention mask here."""
        if documents is None:
            here = slice(start, start + shape[1])
            return Where(self.cos[here], self.sin[here])
        if documents.dtype == torch.bool:
            raise TypeError("documents: expected their numbers [B, T] or boundaries, not a mask")
        if documents.ndim == 1:
            here = packing.positions(documents, shape)
            return Where(self.cos[here], self.sin[here], boundaries=documents)
        mask, here = packing.document_mask(documents)
        return Where(self.cos[here], self.sin[here], mask)

    def forward(self, tokens: Tensor, targets: Tensor | None = None,
                documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]; with targets, losses [B, T] in nats, 0 where a target is IGNORE."""
        return self.head(self.hidden(tokens, documents=documents), targets)


def flops_per_token(model: nn.Module, cfg: Config, length: float | None = None) -> int:
    """FLOPs of forward and backward for one token of a sequence of `length` (default: seq_len).

    6 N for N weights in matrix products, 4 N if frozen, and 12 H D T per layer for attention, not
    halved for causality (PaLM, arXiv:2204.02311, appendix B).
    """
    weights = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    products = sum((6 if p.requires_grad else 4) * p.numel() for p in [*weights, model.head.weight])
    return products + round(12 * cfg.n_layer * cfg.n_head * cfg.head_dim * (length or cfg.seq_len))


@torch.no_grad()
# without cuDNN's: keys grow by one, and it would make a new plan for each length
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def generate(model: nn.Module, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, stop: tuple[int, ...] = (),
             on_token=None) -> Tensor:
    """Continue tokens [B, T], T ≥ 1, by at most max_new_tokens; returns [B, T + new].

    temperature 0 takes the likeliest token; top_k 0 samples from all; top_p keeps the fewest tokens
    that reach this probability together. A row ends with any id of `stop`, and is padded with the
    first. on_token gets each new column [B]; returning true ends generation. A full context
    (cfg.seq_len) drops its older half.
    """
    if not isinstance(model, Transformer):  # an HFModel
        return model.generate(tokens, max_new_tokens, temperature, top_k, top_p, stop, on_token)
    was_training, context = model.training, model.cfg.seq_len
    model.eval()
    start, caches, caches_work = 0, None, None  # the model sees tokens[:, start:]
    ended, stops = torch.zeros_like(tokens[:, 0], dtype=torch.bool), tokens.new_tensor(stop)
    for _ in range(max_new_tokens):
        if tokens.shape[1] - start > context:
            start, caches = tokens.shape[1] - (context + 1) // 2, None
        if begins_anew := caches is None:
            capacity = min(context, tokens.shape[1] - start + max_new_tokens)
            caches = [layers.KVCache(capacity) for _ in model.blocks]
        unseen = tokens[:, start + caches[0].length :]
        logits = model.head(model.hidden(unseen, caches)[:, -1])
        if caches_work is None and not begins_anew:  # once: a fork's layer may not use its cache
            without = model.head(model.hidden(tokens[:, start:])[:, -1])
            caches_work = bool(((without - logits).std(-1) <= 0.1 * without.std(-1)).all())
            logits = without
        if caches_work is False or not all(cache.length for cache in caches):
            caches = None  # compute all positions again
        new = sample_token(logits, temperature, top_k, top_p)
        if stop:
            new = new.masked_fill(ended[:, None], stop[0])
            ended |= torch.isin(new[:, 0], stops)
        tokens = torch.cat((tokens, new), dim=1)
        if on_token and on_token(new[:, 0]) or stop and ended.all():
            break
    model.train(was_training)
    return tokens


def sample_token(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """logits [B, V] → a token for each row, [B, 1]; arguments as in `generate`."""
    if temperature < 1e-6:  # else the division below would overflow
        return logits.argmax(-1, keepdim=True)
    if top_k:
        kept = logits.topk(min(top_k, logits.shape[-1])).values
        logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        likeliest, order = probabilities.sort(descending=True)
        likeliest = likeliest.masked_fill(likeliest.cumsum(-1) - likeliest >= top_p, 0.0)
        probabilities = torch.zeros_like(likeliest).scatter(1, order, likeliest)
    return torch.multinomial(probabilities, 1)
