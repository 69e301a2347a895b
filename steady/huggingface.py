"""Models of transformers: their configuration and weights in our model, or behind our contract.

Llama, Mistral, Qwen2 and Qwen3 become the Transformer of model.py; other architectures are trained
through transformers' own module (`HFModel`).
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steady.cli import ConfigError
from steady.tokens import byte_tokenizer

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings")
# The defaults of a run that starts from existing weights.
FINE_TUNING = dict(seq_len=1024, batch_size=32, learning_rate=2e-5)


def fetch(name: str, code: bool = False) -> Path:
    """The folder of a model: `name` itself, or from the hub, with code only if it is trusted."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=kinds))
    except Exception as e:  # offline, no such model, no permission: each has a class of its own
        raise ConfigError(f"{name}: no such folder, and not from the hub: {reason(e)}") from None


def reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return ("it needs code of its own, which runs on this machine: read it, and then give "
                "--trust_remote_code")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- configuration ---------------------------------------------------------------------------


def config_from_hf(cfg):
    """cfg with the shape of the model in --init_from, and with the defaults of fine-tuning.

    Raises ConfigError if flags ask for another shape, and for code that is not trusted.
    """
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            fetch(cfg.init_from, cfg.trust_remote_code), trust_remote_code=cfg.trust_remote_code
        )
    except Exception as e:  # a config.json can be wrong in many ways
        raise ConfigError(f"--init_from {cfg.init_from}: {reason(e)}") from None
    shape = native_shape(found)
    foreign = shape is None
    if foreign:
        if cfg.packing:
            raise ConfigError(f"--packing: not with a {found.model_type}, which is trained through "
                              "transformers' own module")
        heads = getattr(found, "num_attention_heads", None) or 1
        shape = dict(
            n_layer=found.num_hidden_layers, n_head=heads, n_kv_head=heads, d_ff=1,
            d_model=found.hidden_size, vocab_size=found.vocab_size,
            head_dim=found.hidden_size // heads,
            max_position=getattr(found, "max_position_embeddings", 1 << 60),
        )
    default = type(cfg)()
    for name, value in shape.items():
        if getattr(cfg, name) not in (getattr(default, name), value):
            raise ConfigError(f"--{name} {getattr(cfg, name)}: {cfg.init_from} has {value}")
    if cfg.model not in ("default", "transformers"):
        raise ConfigError(f"--model {cfg.model}: the shape is that of --init_from")
    longest = shape["max_position"]
    if cfg.seq_len and cfg.seq_len > longest:
        raise ConfigError(f"--seq_len {cfg.seq_len}: {cfg.init_from} sees at most {longest}")
    usual = FINE_TUNING | dict(seq_len=min(longest, FINE_TUNING["seq_len"]))
    usual = {name: value for name, value in usual.items() if getattr(cfg, name) is None}
    return replace(cfg, **shape, **usual, model="transformers" if foreign else "default")


def native_shape(found) -> dict | None:
    """The options of our Transformer for a transformers config; None for another architecture.

    max_position: less than the model's where its attention has a sliding window, which ours lacks.
    """
    rope = getattr(found, "rope_parameters", None) or {}
    kind, scaling = rope.get("rope_type", "default"), []
    if kind == "linear":
        scaling = [rope["factor"]]
    elif kind == "llama3":
        scaling = [rope[name] for name in LLAMA3_ROPE]
    ours = found.model_type in NATIVE and kind in ("default", "linear", "llama3")
    odd = getattr(found, "attention_bias", False) or getattr(found, "mlp_bias", False)
    if not ours or odd or found.hidden_act != "silu":
        return None
    heads, window = found.num_attention_heads, getattr(found, "sliding_window", None)
    return dict(
        n_layer=found.num_hidden_layers, n_head=heads, n_kv_head=found.num_key_value_heads,
        head_dim=getattr(found, "head_dim", None) or found.hidden_size // heads,
        d_model=found.hidden_size, d_ff=found.intermediate_size, vocab_size=found.vocab_size,
        norm_eps=found.rms_norm_eps, rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=[float(x) for x in scaling], tie_embeddings=bool(found.tie_word_embeddings),
        qkv_bias=found.model_type == "qwen2", qk_norm=found.model_type == "qwen3",
        max_position=min(found.max_position_embeddings, window or 1 << 60),
    )


def check_tokenizer(name: str, data):
    """Raise ConfigError if the data was made with another tokenizer than the model's own."""
    from tokenizers import Tokenizer

    theirs, mine = fetch(name) / "tokenizer.json", None
    if data.tokenizer == "bytes":
        mine = byte_tokenizer().get_vocab()
    elif data.tokenizer_folder and (Path(data.tokenizer_folder) / "tokenizer.json").exists():
        mine = Tokenizer.from_file(f"{data.tokenizer_folder}/tokenizer.json").get_vocab()
    if mine and theirs.exists() and mine != Tokenizer.from_file(str(theirs)).get_vocab():
        raise ConfigError(f"--init_from {name}: its tokenizer is not that of --data, "
                          f"{data.tokenizer}; prepare it with python data.py ... --tokenizer "
                          f"{name}, or --allow_change tokenizer")


# --- weights ---------------------------------------------------------------------------------


def hf_key_map(cfg) -> dict[str, tuple[str, slice]]:
    """Hugging Face's name of each tensor → our name, and which of its rows."""
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    everything, vocabulary = slice(None), slice(cfg.vocab_size)  # ours pads the vocabulary
    out = {
        "model.embed_tokens.weight": ("embedding.weight", vocabulary),
        "model.norm.weight": ("norm.weight", everything),
    }
    if not cfg.tie_embeddings:
        out["lm_head.weight"] = ("head.weight", vocabulary)
    for i in range(cfg.n_layer):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        out |= {
            f"{theirs}input_layernorm.weight": (f"{ours}attention_norm.weight", everything),
            f"{theirs}post_attention_layernorm.weight": (f"{ours}mlp_norm.weight", everything),
            f"{theirs}self_attn.o_proj.weight": (f"{ours}attention.out.weight", everything),
            f"{theirs}mlp.down_proj.weight": (f"{ours}mlp.down.weight", everything),
        }
        rows = {"q": slice(q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
        for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
            for x, which in rows.items():
                out[f"{theirs}self_attn.{x}_proj.{kind}"] = f"{ours}attention.qkv.{kind}", which
        halves = {"gate": slice(cfg.d_ff), "up": slice(cfg.d_ff, 2 * cfg.d_ff)}
        for x, which in halves.items():
            out[f"{theirs}mlp.{x}_proj.weight"] = f"{ours}mlp.gate_up.weight", which
        for x in "qk" if cfg.qk_norm else "":
            name = f"{ours}attention.{x}_norm.weight"
            out[f"{theirs}self_attn.{x}_norm.weight"] = name, everything
    return out


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> list[str]:
    """Copy safetensors into our Transformer, one tensor at a time; returns names left over.

    Raises ConfigError for a shape or a name that is not as expected.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no .safetensors in there")
    missing, left = hf_key_map(model.cfg), []
    ours = model.state_dict()
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if name not in missing:
                    left.append(name)
                    continue
                mine, rows = missing.pop(name)
                target, tensor = ours[mine][rows], tensors.get_tensor(name)
                if target.shape != tensor.shape:
                    raise ConfigError(f"{file}: {name} is {list(tensor.shape)}; expected "
                                      f"{list(target.shape)}")
                target.copy_(tensor)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{folder}: has no {', '.join(list(missing)[:3])}{more}")
    tied = model.cfg.tie_embeddings
    return [n for n in left if "rotary_emb" not in n and not (tied and n == "lm_head.weight")]


def save_weights(state: dict, cfg, out: Path, dtype: torch.dtype, end_of_text: int | None):
    """Write our Transformer's state dict with the config.json that describes it."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, GenerationConfig

    tensors = {theirs: state[ours][rows].to(dtype, copy=True)
               for theirs, (ours, rows) in hf_key_map(cfg).items()}
    kind = "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"
    rope = dict(rope_type="default", rope_theta=cfg.rope_theta)
    if len(cfg.rope_scaling) == 1:
        rope |= dict(rope_type="linear", factor=cfg.rope_scaling[0])
    elif cfg.rope_scaling:
        *factors, original = cfg.rope_scaling
        rope |= dict(zip(LLAMA3_ROPE, [*factors, int(original)], strict=True))
        rope["rope_type"] = "llama3"
    AutoConfig.for_model(
        kind, vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head, head_dim=cfg.head_dim, rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=cfg.max_position or cfg.seq_len, rope_parameters=rope,
        dtype=dtype, tie_word_embeddings=bool(cfg.tie_embeddings), bos_token_id=None,
        eos_token_id=end_of_text, architectures=[f"{kind.capitalize()}ForCausalLM"],
    ).save_pretrained(out)
    GenerationConfig(eos_token_id=end_of_text, pad_token_id=end_of_text).save_pretrained(out)
    save_torch_state_dict(tensors, str(out), max_shard_size="5GB")
    for file in out.glob("*.safetensors"):  # made readable for this user alone, unlike the others
        file.chmod((out / "config.json").stat().st_mode)


# --- other architectures ---------------------------------------------------------------------


class HFModel(nn.Module):
    """A causal language model of transformers, behind what train.py needs of a model."""

    def __init__(self, cfg):
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.cfg = cfg
        try:
            self.module = AutoModelForCausalLM.from_pretrained(
                fetch(cfg.init_from, cfg.trust_remote_code), dtype=torch.float32,
                trust_remote_code=cfg.trust_remote_code,
            )
        except (OSError, ValueError) as e:
            raise ConfigError(f"{cfg.init_from}: {reason(e)}") from None
        if cfg.activation_checkpointing == "full":
            self.module.gradient_checkpointing_enable()
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = cfg.dropout
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        # set past nn.Module, or each weight would have two names
        self.__dict__["blocks"] = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
        self.__dict__["head"] = self.module.get_output_embeddings()

    def predict(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T] → fp32 logits [B, T, V]."""
        return self.module(tokens, use_cache=False).logits.float()

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens, targets [B, T] → cross-entropies in nats [B, T], 0 where a target is -100."""
        logits = self.predict(tokens).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int,
                 top_p: float, stop: int | None) -> Tensor:
        """As `generate` in model.py."""
        how = dict(do_sample=temperature > 0, top_k=top_k or None, top_p=top_p, eos_token_id=stop)
        how |= dict(temperature=temperature) if temperature > 0 else {}
        most = getattr(self.module.config, "max_position_embeddings", 1 << 60)
        if tokens.shape[1] >= most:
            tokens = tokens[:, -(most // 2) :]
        was_training = self.training
        self.eval()
        tokens = self.module.generate(
            tokens, max_new_tokens=min(max_new_tokens, most - tokens.shape[1]),
            attention_mask=torch.ones_like(tokens), pad_token_id=0, **how,
        )
        self.train(was_training)
        return tokens
