"""Weights in and out of the Hugging Face format.

    python train.py --init_from FOLDER_OR_HUB_ID          start from Llama, Mistral, Qwen2 or Qwen3
    python model.py export RUN_DIR_OR_CHECKPOINT OUT_DIR  what AutoModelForCausalLM loads

Other architectures are trained through transformers' own module (`Foreign`).
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import checkpoint
from config import Config, ConfigError
from model import Transformer, cross_entropies, sum_losses

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings")  # fmt: skip
# What a run has that starts from weights of others, unless it is told.
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
                "--trust_remote_code")  # fmt: skip
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def adopt(cfg: Config) -> Config:
    """cfg with the shape of the model in --init_from.

    Raises ConfigError where flags ask for another shape, and for code that is not trusted.
    """
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            fetch(cfg.init_from, cfg.trust_remote_code), trust_remote_code=cfg.trust_remote_code
        )
    except Exception as e:  # what is in a config.json can be wrong in many ways
        raise ConfigError(f"--init_from {cfg.init_from}: {reason(e)}") from None
    shape = native_shape(found)
    foreign = shape is None
    if foreign:
        if cfg.packing:
            raise ConfigError(f"--packing: not with a {found.model_type}, which is trained through "
                              "transformers' own module")  # fmt: skip
        heads = getattr(found, "num_attention_heads", None) or 1
        shape = dict(
            n_layer=found.num_hidden_layers, n_head=heads, n_kv_head=heads, d_ff=1,
            d_model=found.hidden_size, vocab_size=found.vocab_size,
            head_dim=found.hidden_size // heads,
            max_position=getattr(found, "max_position_embeddings", 1 << 60),
        )  # fmt: skip
    longest = shape["max_position"]
    default = Config()
    for name, value in shape.items():
        if getattr(cfg, name) not in (getattr(default, name), value):
            raise ConfigError(f"--{name} {getattr(cfg, name)}: {cfg.init_from} has {value}")
    if cfg.model not in ("default", "transformers"):
        raise ConfigError(f"--model {cfg.model}: the shape is that of --init_from")
    if cfg.seq_len and cfg.seq_len > longest:
        raise ConfigError(f"--seq_len {cfg.seq_len}: {cfg.init_from} sees at most {longest}")
    usual = FINE_TUNING | dict(seq_len=min(longest, FINE_TUNING["seq_len"]))
    usual = {name: value for name, value in usual.items() if getattr(cfg, name) is None}
    return replace(cfg, **shape, **usual, model="transformers" if foreign else "default")


def native_shape(found) -> dict | None:
    """The options of our Transformer for a transformers config; None where it is another kind.

    max_position: fewer than it has where attention sees a sliding window, which ours has not.
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
    )  # fmt: skip


def names(cfg: Config) -> dict[str, tuple[str, slice]]:
    """Hugging Face's name of each tensor → ours, and which rows of it."""
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    everything, vocabulary = slice(None), slice(cfg.vocab_size)  # ours has rows that only pad it
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
            out[f"{theirs}self_attn.{x}_norm.weight"] = (
                f"{ours}attention.{x}_norm.weight",
                everything,
            )
    return out


@torch.no_grad()
def load_weights(model: Transformer, folder: Path) -> list[str]:
    """Copy safetensors into the model, one tensor at a time; returns names that were left over.

    Raises ConfigError for a shape or a name that is not as expected.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: no .safetensors in there")
    todo, left = names(model.cfg), []
    ours = model.state_dict()
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if name not in todo:
                    left.append(name)
                    continue
                mine, rows = todo.pop(name)
                target, tensor = ours[mine][rows], tensors.get_tensor(name)
                if target.shape != tensor.shape:
                    raise ConfigError(f"{file}: {name} is {list(tensor.shape)}; expected "
                                      f"{list(target.shape)}")  # fmt: skip
                target.copy_(tensor)
    if todo:
        raise ConfigError(f"{folder}: has no {', '.join(list(todo)[:3])}"
                          f"{f' and {len(todo) - 3} more' if len(todo) > 3 else ''}")  # fmt: skip
    tied = model.cfg.tie_embeddings
    return [n for n in left if "rotary_emb" not in n and not (tied and n == "lm_head.weight")]


class Foreign(nn.Module):
    """A causal language model of transformers, behind what train.py needs of a model."""

    def __init__(self, cfg: Config):
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.cfg = cfg
        try:
            self.module = AutoModelForCausalLM.from_pretrained(
                fetch(cfg.init_from, cfg.trust_remote_code), dtype=torch.float32,
                trust_remote_code=cfg.trust_remote_code,
            )  # fmt: skip
        except (OSError, ValueError) as e:
            raise ConfigError(f"{cfg.init_from}: {reason(e)}") from None
        if cfg.activation_checkpointing == "full":
            self.module.gradient_checkpointing_enable()
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = cfg.dropout
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        # not as submodules: each weight would have two names
        self.__dict__["blocks"] = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
        self.__dict__["head"] = self.module.get_output_embeddings()

    def predict(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T] → fp32 logits [B, T, V]."""
        return self.module(tokens, use_cache=False).logits.float()

    def forward(self, tokens: Tensor, targets: Tensor, by_sequence: bool = False):
        return sum_losses(cross_entropies(self.predict(tokens), targets), targets, by_sequence)

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int,
                 top_p: float, stop: int | None) -> Tensor:  # fmt: skip
        """As `model.generate`."""
        how = dict(do_sample=temperature > 0, top_k=top_k or None, top_p=top_p, eos_token_id=stop)
        how |= dict(temperature=temperature) if temperature > 0 else {}
        most = getattr(self.module.config, "max_position_embeddings", 1 << 60)
        if tokens.shape[1] >= most:
            tokens = tokens[:, -(most // 2) :]
        return self.module.generate(
            tokens, max_new_tokens=min(max_new_tokens, most - tokens.shape[1]),
            attention_mask=torch.ones_like(tokens), pad_token_id=0, **how,
        )  # fmt: skip


def check_tokenizer(name: str, data):
    """Raise ConfigError where data is made with another tokenizer than a model's own."""
    from tokenizers import Tokenizer

    theirs, mine = fetch(name) / "tokenizer.json", None
    if data.tokenizer == "bytes":
        mine = byte_tokenizer().get_vocab()
    elif data.tokenizer_folder and (Path(data.tokenizer_folder) / "tokenizer.json").exists():
        mine = Tokenizer.from_file(f"{data.tokenizer_folder}/tokenizer.json").get_vocab()
    if mine and theirs.exists() and mine != Tokenizer.from_file(str(theirs)).get_vocab():
        raise ConfigError(f"--init_from {name}: its tokenizer is not that of --data, "
                          f"{data.tokenizer}; prepare it with python data.py ... --tokenizer "
                          f"{name}, or --allow_change tokenizer")  # fmt: skip


# --- out -------------------------------------------------------------------------------------


def read_state(source: Path) -> tuple[dict, Path | None, Path]:
    """(what a checkpoint holds, the directory of its run, its path) of a run or a file.

    Raises ConfigError where there is none that is whole.
    """
    path = source
    if source.is_dir():
        path = checkpoint.newest_whole(source / "checkpoints")  # which has read every byte
        if path is None:
            raise ConfigError(f"{source}: no checkpoint in there, and no config.json")
    elif source.exists():
        checkpoint.require_whole(source)
    else:
        raise ConfigError(f"{source}: no such file or folder")
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state, checkpoint.run_of(path), path


def config_of(state: dict, trust_remote_code: bool) -> Config:
    """That of a checkpoint, which has no say in what may be run here."""
    known = Config.__dataclass_fields__
    cfg = Config(**{name: value for name, value in state["config"].items() if name in known})
    return replace(cfg, trust_remote_code=trust_remote_code)


def export(source: Path, out: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> str:
    """Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer load.

    Raises ConfigError for one that is damaged or has weights that are not finite.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, GenerationConfig

    state, run_dir, path = read_state(source)
    cfg = config_of(state, trust_remote_code)
    bad = [n for n, t in state["model"].items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise ConfigError(f"{path}: weights that are not finite, first {bad[0]}; not exported")
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty")
    if cfg.qk_norm and cfg.qkv_bias:
        raise ConfigError(f"{path}: no family has both --qk_norm and --qkv_bias")
    out.mkdir(parents=True, exist_ok=True)
    end = state.get("end_of_text")
    if cfg.model == "transformers":
        model = Foreign(cfg)
        model.load_state_dict(state["model"])
        model.module.to(dtype).save_pretrained(out, max_shard_size="5GB")
    else:
        tensors = {theirs: state["model"][ours][rows].to(dtype, copy=True)
                   for theirs, (ours, rows) in names(cfg).items()}  # fmt: skip
        kind = "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"
        rope = dict(rope_type="default", rope_theta=cfg.rope_theta)
        if len(cfg.rope_scaling) == 1:
            rope |= dict(rope_type="linear", factor=cfg.rope_scaling[0])
        elif cfg.rope_scaling:
            *factors, original = cfg.rope_scaling
            rope |= dict(zip(LLAMA3_ROPE, [*factors, int(original)], strict=True))
            rope["rope_type"] = "llama3"
        found = AutoConfig.for_model(
            kind, vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
            num_key_value_heads=cfg.n_kv_head, head_dim=cfg.head_dim, rms_norm_eps=cfg.norm_eps,
            max_position_embeddings=cfg.max_position or cfg.seq_len, rope_parameters=rope,
            dtype=dtype, tie_word_embeddings=bool(cfg.tie_embeddings), bos_token_id=None,
            eos_token_id=end,
            architectures=[f"{kind.capitalize()}ForCausalLM"],
        )  # fmt: skip
        found.save_pretrained(out)
        GenerationConfig(eos_token_id=end, pad_token_id=end).save_pretrained(out)
        save_torch_state_dict(tensors, str(out), max_shard_size="5GB")
        for file in out.glob("*.safetensors"):  # made for this user alone, unlike other files
            file.chmod((out / "config.json").stat().st_mode)
    tokenizer = export_tokenizer(state["tokenizer"], run_dir, out)
    return f"{path} at step {state['step']} to {out}: {tokenizer}"


def export_tokenizer(name: str | None, run_dir: Path | None, out: Path) -> str:
    if name == "bytes":
        byte_tokenizer().save_pretrained(out)
    elif run_dir and (run_dir / "tokenizer").is_dir():
        shutil.copytree(run_dir / "tokenizer", out, dirs_exist_ok=True)
    else:
        return "without a tokenizer, for the run has none"
    return f"with the tokenizer {name}"


def byte_tokenizer():
    """The "bytes" tokenizer as one of transformers: a byte-level BPE without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()} | {"<|endoftext|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


# --- text from a model -----------------------------------------------------------------------


def open_model(source: Path, length: int, trust_remote_code: bool = False):
    """(model, tokenizer of transformers) of a run, a checkpoint, or a Hugging Face folder.

    length: tokens that it is to see at once, if it can.
    """
    from prepare import load_tokenizer

    if source.is_dir() and (source / "config.json").exists() or not source.exists():
        cfg = adopt(Config(init_from=str(source), trust_remote_code=trust_remote_code))
        folder = fetch(str(source))
        if cfg.model == "transformers":
            return Foreign(cfg), load_tokenizer(str(folder), needs_end=False)
        model = Transformer(replace(cfg, seq_len=min(cfg.max_position, length)))
        load_weights(model, folder)
        return model, load_tokenizer(str(folder), needs_end=False)
    state, run_dir, path = read_state(source)
    cfg = config_of(state, trust_remote_code)
    if cfg.max_position:  # what it has learned before
        cfg.seq_len = min(cfg.max_position, max(cfg.seq_len, length))
    model = Foreign(cfg) if cfg.model == "transformers" else Transformer(cfg)
    model.load_state_dict(state["model"])
    if state["tokenizer"] == "bytes":
        return model, byte_tokenizer()
    if not run_dir or not (run_dir / "tokenizer").is_dir():
        raise ConfigError(f"{path}: its run has no tokenizer, only token ids")
    return model, load_tokenizer(str(run_dir / "tokenizer"), needs_end=False)
