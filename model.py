"""A decoder-only Transformer of the Llama / Qwen family, its size, its FLOPs and its sampler.

train.py needs `model(tokens, targets) -> (sum of the losses, number of targets)` and nothing else;
any module that answers so can take this one's place. The model knows nothing of ranks, devices or
precision: train.py applies those from outside.

Shapes: B sequences, T tokens, C = d_model, H heads of width D, V vocabulary.
"""

import contextlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from config import IGNORE, Config, ConfigError, make_parser, option, read_flags

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def rope_table(cfg: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), each [seq_len, 1, D / 2].

    rope_scaling: [factor] divides all frequencies; [factor, low, high, original context] divides
    those whose wavelength is longer than original / low, and fewer and fewer up to original / high
    (Llama 3.1, arXiv:2407.21783).
    """
    length, head_dim, theta = cfg.seq_len, cfg.head_dim, cfg.rope_theta
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if len(cfg.rope_scaling) == 1:
        frequency = frequency / cfg.rope_scaling[0]
    elif cfg.rope_scaling:
        factor, low, high, original = cfg.rope_scaling
        turns = original * frequency / (2 * math.pi)  # in the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = torch.arange(length, dtype=torch.float32)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x [B, T, H, D] by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.RMSNorm):
    """Weight in the input's type: with another one torch leaves its fused kernel (autocast)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention; n_kv_head < n_head is grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.dropout = cfg.dropout
        # One matrix for queries, keys and values: one large product is faster than three.
        heads = cfg.n_head + 2 * cfg.n_kv_head
        self.qkv = nn.Linear(cfg.d_model, heads * cfg.head_dim, bias=bool(cfg.qkv_bias))
        self.out = nn.Linear(cfg.n_head * cfg.head_dim, cfg.d_model, bias=False)
        norm = RMSNorm if cfg.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (norm(cfg.head_dim, eps=cfg.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            self.qkv(x)
            .view(B, T, -1, self.head_dim)
            .split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        )
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)  # rotated in fp32, also under autocast
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B, H, T, D
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask,
            is_causal=mask is None and (cache is None or T > 1),
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.n_kv_head != self.n_head,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202), gate and up projections in one matrix."""

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
        self.attention_norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.attention = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.mlp = FeedForward(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, cache, mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        padded_vocab = -(-cfg.vocab_size // 64) * 64  # whole tiles for the matrix units
        self.embedding = nn.Embedding(padded_vocab, cfg.d_model)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.head = nn.Linear(cfg.d_model, padded_vocab, bias=False)
        cos, sin = rope_table(cfg)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight

    def init_weights(self):
        """Normal with GPT-2's 0.02; zero where a block writes to the residual stream.

        With zeros every block starts as the identity, as in modded-nanogpt.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)

    def hidden(self, tokens: Tensor, caches=None, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T] → the last layer's normalized output [B, T, C].

        documents [B, T]: numbers of the documents that stand one after another in a row; each is
        computed as if it stood alone.
        """
        start, mask = caches[0].length if caches else 0, None
        x = self.dropout(self.embedding(tokens))
        positions = slice(start, start + tokens.shape[1])
        if documents is not None:
            mask, positions = document_mask(documents)
        cos, sin = self.cos[positions], self.sin[positions]
        recompute = self.cfg.activation_checkpointing == "full" and self.training
        for i, block in enumerate(self.blocks):
            if recompute:
                x = checkpoint(block, x, cos, sin, None, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, caches[i] if caches else None, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., C] → fp32 logits [..., V], without the rows that only pad the matrix."""
        return self.head(hidden)[..., : self.cfg.vocab_size].float()

    def predict(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T] → fp32 logits [B, T, V]."""
        return self.logits(self.hidden(tokens, documents=documents))

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None,
                by_sequence: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        """tokens, targets [B, T] → (sum of cross-entropies in nats, number of real targets).

        A target of -100 is not counted. Returning sum and count lets the caller average over
        micro-batches and ranks of unequal length and still get the mean over all tokens.
        documents: as in `hidden`. by_sequence: both for each row, [B].
        """
        hidden = self.hidden(tokens, documents=documents)
        if torch.compiler.is_compiling():  # which fuses this by itself
            losses = cross_entropies(self.logits(hidden), targets)
        else:
            losses = LinearCrossEntropy.apply(
                hidden.flatten(0, 1), self.head.weight, targets.flatten(), self.cfg.vocab_size
            )
        return sum_losses(losses, targets, by_sequence)


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of hidden [N, C] @ weight.T [V_padded, C] with targets [N] → losses [N], fp32.

    As `cross_entropies` of the logits, to rounding, but all that it keeps of size [N, V] is one
    matrix in the type of the product: the logits, overwritten with their gradient a few rows at a
    time. The plain way has three or four, of fp32. A loss may have any weight in the sum that is
    differentiated.
    """

    cpu_chunk = 2**18  # logits

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        logits = F.linear(hidden, weight.detach())  # detached: autocast remembers no copy of it
        hidden, weight = hidden.to(logits.dtype), weight.to(logits.dtype)
        logits[:, vocab_size:] = -math.inf  # the rows that only pad the matrix
        counted = targets != IGNORE
        right = torch.where(counted, targets, 0)[:, None]
        losses = -logits.gather(1, right)[:, 0].float()
        # So much at a time stays in a core's cache, or gives a GPU enough to do.
        size = LinearCrossEntropy.cpu_chunk if hidden.device.type == "cpu" else 2**25
        rows = max(1, size // weight.shape[0])
        for some, loss in zip(logits.split(rows), losses.split(rows), strict=True):
            largest = some.amax(-1).float()
            p = some.softmax(-1, dtype=torch.float32)
            loss += largest - p.amax(-1).log()  # the logarithm of the sum of exponentials
            some.copy_(p)
        logits.scatter_add_(1, right, torch.full_like(right, -1.0, dtype=logits.dtype))
        ctx.save_for_backward(hidden, weight, logits, counted)
        return losses.where(counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight, grad_logits, counted = ctx.saved_tensors  # but for the factor `grad`
        grad = grad.where(counted, 0.0)[:, None].to(hidden.dtype)
        return (grad_logits @ weight) * grad, grad_logits.t() @ (hidden * grad), None, None


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, T, V], targets [B, T] → in nats [B * T], 0 where a target is not counted."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )


def sum_losses(losses: Tensor, targets: Tensor, by_sequence: bool) -> tuple[Tensor, Tensor]:
    """losses [B * T], targets [B, T] → what `Transformer.forward` returns."""
    losses, counts = losses.view_as(targets).sum(1), (targets != IGNORE).sum(1)
    return (losses, counts) if by_sequence else (losses.sum(), counts.sum())


def document_mask(documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents [B, T] → (which positions each may attend to [B, 1, T, T], its place in its own).

    A position attends to those up to itself in the same document.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (
        place[:, None] >= place[None, :]
    )
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    first = torch.where(begins, place, 0).cummax(1).values  # of the document, at each position
    return mask, place - first


@torch.no_grad()
def output_health(model: Transformer, tokens: Tensor, targets: Tensor,
                  documents: Tensor | None = None) -> dict[str, Tensor]:  # fmt: skip
    """Entropy in nats and mass of the likeliest token, means over at least 256 positions.

    A model that collapses shows here first. All [B, T], as in `forward`; where the loss does not
    count, neither do these.
    """
    rows = slice(max(1, 256 // tokens.shape[1]))
    model.eval()
    logits = model.predict(tokens[rows], None if documents is None else documents[rows])
    model.train()
    logp = logits.log_softmax(-1)
    weight = (targets[rows] != IGNORE).float()
    entropy, top1 = -(logp.exp() * logp).sum(-1), logp.amax(-1).exp()
    return {f"health/output_{name}": (values * weight).sum() / weight.sum().clamp(min=1)
            for name, values in (("entropy", entropy), ("top1", top1))}  # fmt: skip


# --- size and speed --------------------------------------------------------------------------


def flops_per_token(model: nn.Module, cfg: Config, length: float | None = None) -> int:
    """FLOPs of forward and backward for one token of a sequence of cfg.seq_len, or of `length`.

    6 N for the N weights of the matrix products, of which a lookup in the embedding is none, and
    12 H D T a layer for attention, not halved for causality (PaLM, arXiv:2204.02311, appendix B).
    """
    weights = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    weights += model.head.weight.numel()
    length = length or cfg.seq_len
    return 6 * weights + round(12 * cfg.n_layer * cfg.n_head * cfg.head_dim * length)


def set_attention_backend(name: str):
    """Allow the one named backend of scaled_dot_product_attention, or with auto all of them."""
    for backend, enable in {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }.items():
        enable(name in ("auto", backend))


def attention_backend(cfg: Config, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that this shape, device and type really get; asks the dispatcher itself.

    Raises ConfigError where the only one that is allowed cannot run.
    """
    B, D, T = 1, cfg.head_dim, cfg.seq_len
    mask = torch.ones(B, 1, T, T, dtype=torch.bool, device=device) if cfg.packing else None
    q = torch.empty(B, cfg.n_head, cfg.seq_len, D, device=device, dtype=dtype, requires_grad=True)
    kv = torch.empty(B, cfg.n_kv_head, cfg.seq_len, D, device=device, dtype=dtype)
    names = {
        SDPBackend.MATH.value: "math",
        SDPBackend.FLASH_ATTENTION.value: "flash",
        SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
        SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    }
    used = None
    with contextlib.suppress(RuntimeError):  # there is no backend left to choose from
        choice = torch._fused_sdp_choice(
            q, kv, kv, mask, dropout_p=cfg.dropout, is_causal=mask is None,
            enable_gqa=cfg.n_kv_head != cfg.n_head,
        )  # fmt: skip
        used = names.get(int(choice))
    if used is None or cfg.attention not in ("auto", used):
        packed = " with --packing" if cfg.packing else ""
        raise ConfigError(
            f"--attention {cfg.attention}: not available on {device.type} for {dtype} heads of "
            f"width {D}{packed}; expected one that is, or auto"
        )
    return used


# --- generation ------------------------------------------------------------------------------


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


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    top_p: float = 1.0,
    stop: int | None = None,
    on_token=lambda new: None,
) -> Tensor:
    """Continue tokens [B, T], T ≥ 1, by at most max_new_tokens; returns [B, T + new].

    temperature 0 takes the likeliest token; top_k 0 draws from the whole vocabulary, top_p from the
    fewest tokens that together are as likely. A row ends with `stop`, which fills what is left of
    it. on_token is called with each column of new ones, [B]. When the context (cfg.seq_len) is
    full, the older half of it is forgotten.
    """
    was_training, context = model.training, model.cfg.seq_len
    model.eval()
    if not isinstance(model, Transformer):
        tokens = model.generate(tokens, max_new_tokens, temperature, top_k, top_p, stop)
        model.train(was_training)
        return tokens
    start, caches = 0, None  # the model sees tokens[:, start:]
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        if tokens.shape[1] - start > context:
            start, caches = tokens.shape[1] - (context + 1) // 2, None
        if use_cache and caches is not None:
            unseen = tokens[:, -1:]
        else:
            unseen = tokens[:, start:]
            capacity = min(context, unseen.shape[1] + max_new_tokens)
            caches = [KVCache(capacity) for _ in model.blocks] if use_cache else None
        new = draw(model.logits(model.hidden(unseen, caches)[:, -1]), temperature, top_k, top_p,
                   generator)  # fmt: skip
        if stop is not None:
            new = new.masked_fill(ended[:, None], stop)
            ended |= new[:, 0] == stop
        tokens = torch.cat((tokens, new), dim=1)
        on_token(new[:, 0])
        if stop is not None and ended.all():
            break
    model.train(was_training)
    return tokens


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator) -> Tensor:
    """logits [B, V] → a token for each row, [B, 1]; arguments as in `generate`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k:
        kept = logits.topk(min(top_k, logits.shape[-1])).values
        logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        likeliest, order = probabilities.sort(descending=True)
        before = likeliest.cumsum(-1) - likeliest
        likeliest = likeliest.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(likeliest).scatter(1, order, likeliest)
    return torch.multinomial(probabilities, 1, generator=generator)


# --- python model.py -------------------------------------------------------------------------


@dataclass
class GenerateOptions:
    prompt: list[str] = option(["\n"], "what to continue; more than one are taken one by one")
    max_new_tokens: int = option(200, "tokens to write, at most")
    temperature: float = option(0.8, "0 takes the likeliest token, 1 draws as the model says")
    top_k: int = option(50, "draw from so many likeliest tokens; 0 from all")
    top_p: float = option(1.0, "draw from the fewest tokens that together are so likely")
    seed: int = option(0, "of the dice")
    n: int = option(1, "answers to each prompt, written together")
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "where to compute")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


@dataclass
class ExportOptions:
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "type of the weights in the files")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


USAGE = """generate RUN_DIR_OR_CHECKPOINT_OR_FOLDER --prompt TEXT [--option value ...]
       model.py export RUN_DIR_OR_CHECKPOINT OUT_DIR [--dtype bf16]"""


def write_text(source: str, options: GenerateOptions):
    """Print what the model of a run, a checkpoint or a Hugging Face folder makes of the prompts."""
    from convert import open_model

    for name, ok, expected in (
        ("max_new_tokens", options.max_new_tokens >= 1, "at least 1"),
        ("n", options.n >= 1, "at least 1"),
        ("temperature", options.temperature >= 0, "at least 0"),
        ("top_k", options.top_k >= 0, "at least 0"),
        ("top_p", 0 < options.top_p <= 1, "more than 0, at most 1"),
    ):
        if not ok:
            raise ConfigError(f"--{name} {getattr(options, name)}: expected {expected}")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not getattr(torch, device).is_available():
        raise ConfigError(f"--device {device}: torch {torch.__version__} finds none here")
    length = options.max_new_tokens + 4096  # what is seen at once
    model, tokenizer = open_model(Path(source), length, options.trust_remote_code)
    model.to(device).eval()
    torch.manual_seed(options.seed)
    stop = tokenizer.eos_token_id
    for prompt in options.prompt:
        if options.chat:
            if not tokenizer.chat_template:
                raise ConfigError(f"--chat: the tokenizer of {source} has no chat template")
            prompt = tokenizer.apply_chat_template(
                [dict(role="user", content=prompt)], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, add_special_tokens=not options.chat)["input_ids"] or [stop]
        if ids == [None]:
            raise ConfigError("--prompt: expected text: the tokenizer has no end-of-text to begin "
                              "with")  # fmt: skip
        written, shown = [], 0

        def stream(new, written=written):
            nonlocal shown
            written.append(int(new[0]))
            text = tokenizer.decode(written, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else in the middle of a character
                print(text[shown:], end="", flush=True)
                shown = len(text)

        one = options.n == 1
        if one and not options.chat:
            print(prompt, end="", flush=True)
        tokens = generate(
            model, torch.tensor([ids] * options.n, device=device), options.max_new_tokens,
            options.temperature, options.top_k, top_p=options.top_p, stop=stop,
            on_token=stream if one else lambda new: None,
        )  # fmt: skip
        texts = tokenizer.batch_decode(tokens[:, len(ids) :], skip_special_tokens=True)
        if one:
            print(texts[0][shown:])
        else:
            for i, text in enumerate(texts):
                print(f"--- {i + 1} of {options.n}\n{'' if options.chat else prompt}{text}")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    generates = argv[:1] != ["export"]
    about = "Let a model write, or export it to Hugging Face's format."
    parser = make_parser(GenerateOptions if generates else ExportOptions, "model.py", USAGE, about)
    parser.add_argument("command", choices=("generate", "export"))
    parser.add_argument("source", help="run directory, checkpoint or Hugging Face folder")
    if not generates:
        parser.add_argument("out", help="folder to make")
    try:
        given = vars(read_flags(parser, argv))
        source = given.pop("source")
        given.pop("command")
        if generates:
            write_text(source, GenerateOptions(**given))
        else:
            from convert import export

            trust = given["trust_remote_code"]
            print(export(Path(source), Path(given["out"]), DTYPES[given["dtype"]], trust))
    except ConfigError as e:
        print(f"model.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    import model  # the classes that other modules know are those of this name, not of __main__

    sys.exit(model.main(sys.argv[1:]))
