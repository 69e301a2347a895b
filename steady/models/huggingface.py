"""Hugging Face models: loaded into our Transformer, or wrapped so that train.py can train them.

Llama, Mistral, Qwen2 and Qwen3 become the Transformer of model.py; other architectures, and
sequences longer than a sliding window, are trained through their own module in transformers
(steady/models/foreign.py).
"""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from steady.checkpoints.checkpoint import Checkpoint, find_checkpoint, join
from steady.checkpoints.state import copy_weights
from steady.models import lora
from steady.models.weights import reason, shorten, tensors_of, weight_files, with_mean_rows
from steady.options import ConfigError, fixed_options
from steady.ranks.parallel import Shards
from steady.tokens.files import sampled_hash
from steady.tokens.tokenizers import byte_tokenizer

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings")
# The defaults of a run that starts from existing weights.
FINE_TUNING = dict(seq_len=1024, batch_size=32, learning_rate=2e-5, optimizer="adamw",
                   lr_schedule="cosine")


def fetch(name: str, code: bool = False) -> Path:
    """The folder of a model, as `fetch_files`; that of its base for an adapter."""
    folder = fetch_files(name, code)
    if lora.is_adapter_folder(folder):
        return fetch(lora.read_config(folder)["base"], code)
    return folder


def tokenizer_folder(name: str) -> Path:
    """The folder with the tokenizer of a model; for an adapter its own, or else its base's."""
    folder = fetch_files(name)
    return folder if (folder / "tokenizer_config.json").exists() else fetch(name)


def fetch_files(name: str, code: bool = False, weights: bool = True) -> Path:
    """A folder, or its download from the hub, with Python if `code`. Raises ConfigError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import errors, snapshot_download

    kinds = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else []),
             *(["*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=kinds))
        if weights and not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return folder
    except Exception as e:  # offline, no such model, no permission: each raises its own class
        why = f" ({reason(e)})"
        if isinstance(e, errors.LocalEntryNotFoundError):
            why = " (the hub is offline)"
        elif isinstance(e, errors.HFValidationError):  # no name that the hub could have
            why = ""
        kinds = "folder, run" if weights else "folder"
        raise ConfigError(f"no {kinds} or hub model called {name}{why}") from None


# --- configuration ---------------------------------------------------------------------------


def config_from_hf(cfg):
    """cfg with the shape of the model in --init_from, and with the defaults of fine-tuning.

    Raises ConfigError if flags ask for another shape, and for code that is not trusted.
    """
    from transformers import AutoConfig

    checkpoint = own_checkpoint(cfg.init_from)
    if checkpoint:
        cfg = replace(cfg, init_from=str(checkpoint))
        return with_shape(cfg, shape_of_checkpoint(checkpoint, type(cfg)), "default")
    folder = fetch(cfg.init_from, cfg.trust_remote_code)
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as e:  # a config.json can be wrong in many ways
        raise ConfigError(f"--init_from {cfg.init_from}: {reason(e)}") from None
    quantized = getattr(found, "quantization_config", None)
    if quantized:
        method = dict(quantized).get("quant_method", "an unnamed method")
        raise ConfigError(f"--init_from {cfg.init_from}: its weights are quantized ({method}); "
                          "expected fp32, bf16 or fp16: take the original model, or dequantize it")
    shape = native_shape(found)
    windowed = shape and shape["max_position"] < min(cfg.seq_len or 0,
                                                     found.max_position_embeddings)
    foreign = shape is None or windowed or cfg.model == "transformers"
    if foreign:
        text = found.get_text_config()
        absent = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size")
                  if not isinstance(getattr(text, name, None), int)]
        if absent or getattr(found, "is_encoder_decoder", False):
            raise ConfigError(f"--init_from {cfg.init_from}: a {found.model_type} cannot be "
                              "trained here; expected a causal language model")
        if cfg.data_mode == "packed":
            longer = f" and a --seq_len above {shape['max_position']}" if windowed else ""
            why = f"not with a {found.model_type}{longer}"
            raise ConfigError(f"--data_mode packed: {why}, which is trained "
                              "through transformers' own module")
        heads = getattr(text, "num_attention_heads", None) or 1
        shape = dict(
            n_layer=text.num_hidden_layers, n_head=heads, n_kv_head=heads, d_ff=1,
            d_model=text.hidden_size, vocab_size=text.vocab_size,
            head_dim=text.hidden_size // heads,
            max_position=getattr(text, "max_position_embeddings", None) or 1 << 60,
        )
    return with_shape(cfg, shape, "transformers" if foreign else "default")


def with_shape(cfg, shape: dict, model: str):
    """cfg with the shape of --init_from; raises ConfigError if flags ask for another."""
    default = type(cfg)()
    for name, value in shape.items():
        if getattr(cfg, name) not in (getattr(default, name), value):
            raise ConfigError(f"--{name} {getattr(cfg, name)}: {cfg.init_from} has {value}")
    if cfg.model not in ("default", "transformers"):
        raise ConfigError(f"--model {cfg.model}: the shape is that of --init_from")
    longest = shape["max_position"]
    if cfg.seq_len and cfg.seq_len > longest:
        raise ConfigError(f"--seq_len {cfg.seq_len}: {cfg.init_from} has a context of {longest}")
    usual = FINE_TUNING | dict(seq_len=min(longest, FINE_TUNING["seq_len"]))
    usual |= dict(learning_rate=2e-4) if cfg.lora_rank else {}
    usual = {name: value for name, value in usual.items() if getattr(cfg, name) is None}
    return replace(cfg, **shape, **usual, model=model)


def native_shape(found) -> dict | None:
    """The options of our Transformer for a transformers config; None for another architecture.

    max_position: at most the sliding window of the model's attention, which ours does not have.
    """
    rope = getattr(found, "rope_parameters", None) or {}
    kind, scaling = rope.get("rope_type", "default"), []
    if kind == "linear":
        scaling = [rope["factor"]]
    elif kind == "llama3":
        scaling = [rope[name] for name in LLAMA3_ROPE]
    ours = found.model_type in NATIVE and kind in ("default", "linear", "llama3")
    biased = getattr(found, "attention_bias", False) or getattr(found, "mlp_bias", False)
    if not ours or biased or found.hidden_act != "silu":
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


@functools.cache  # of one start, which asks several times: verified once
def own_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint that --init_from names: itself, or the newest valid one of a run directory.

    None for a Hugging Face folder or name. Raises ConfigError where none is valid.
    """
    path = Path(name)
    if (path / "config.json").exists():
        return None
    checkpoint = find_checkpoint(path)
    if not checkpoint and (path / "checkpoints").is_dir():
        raise ConfigError(f"--init_from {name}: the run has no checkpoint")
    return checkpoint


def shape_of_checkpoint(checkpoint: Checkpoint, kind) -> dict:
    """The options that fix the model of a checkpoint of ours; kind: the class of options."""
    saved = checkpoint.states("meta")[0]["config"]
    if saved["model"] == "transformers":
        raise ConfigError(f"--init_from {checkpoint}: not one of our own architecture; expected a "
                          "folder that python model.py export has made of it")
    names = fixed_options(kind, "weights") + fixed_options(kind, "function")
    shape = {name: saved[name] for name in names
             if saved.get(name) is not None and not name.startswith("lora_")}
    return shape | dict(max_position=saved.get("max_position") or saved["seq_len"])


@torch.no_grad()
def load_initial(model: nn.Module, name: str, shards: Shards):
    """Load the weights of --init_from into our Transformer, an adapter merged into its base.

    Each rank reads the rows that it holds. Raises ConfigError.
    """
    checkpoint = own_checkpoint(name)
    if not checkpoint:
        load_weights(model, fetch(name), shards)
        return merge_adapter(model, name, shards)
    states = checkpoint.states(mmap=True)
    saved = states[0]["config"]
    if states[0].get("base"):
        load_initial(model, saved["init_from"], shards)
        return merge_checkpoint(model, join(states), checkpoint, shards)
    if model.cfg.vocab_size > saved["vocab_size"]:
        raise ConfigError(f"--resize_embeddings: {name} is a run; expected a folder that "
                          "python model.py export has made of it")
    tensors = shards.tensors_of(model).items()
    copy_weights(checkpoint, join(states, shards.rows)["model"],
                 {name: tensor for name, tensor in tensors if not lora.is_adapter(name)})


def check_tokenizer(name: str, data):
    """Raise ConfigError if the data was made with another tokenizer than the model's own."""
    from tokenizers import Tokenizer

    def vocabulary(tokenizer: str | None, folder) -> dict | None:
        if tokenizer == "bytes":
            return byte_tokenizer().get_vocab()
        file = folder and Path(folder) / "tokenizer.json"
        return Tokenizer.from_file(str(file)).get_vocab() if file and file.exists() else None

    checkpoint, wanted = own_checkpoint(name), name
    if checkpoint:
        kind, run_dir = checkpoint.states("meta")[0]["tokenizer"], checkpoint.run_dir
        theirs = vocabulary(kind, run_dir and run_dir / "tokenizer")
        wanted = kind if kind == "bytes" else run_dir and run_dir / "tokenizer"
    else:
        theirs = vocabulary(None, tokenizer_folder(name))
    mine = vocabulary(data.tokenizer, data.tokenizer_folder)
    if mine and theirs and not theirs.items() <= mine.items():  # which may have added some
        raise ConfigError(f"--init_from {name}: its tokenizer is not that of --data, "
                          f"{data.tokenizer}; prepare it with python data.py ... --tokenizer "
                          f"{wanted}, or --allow_change tokenizer")


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
def load_weights(model: nn.Module, folder: Path, shards: Shards | None = None):
    """Copy the weights in a folder into our Transformer, one tensor at a time.

    shards: which rows of each this rank holds (default: all), and reads. Raises ConfigError for a
    shape that is not as expected, for missing tensors, and for tensors that our model has no place
    for.
    """
    missing, unused = hf_key_map(model.cfg), []
    shards = shards or Shards()
    shapes, ours = model.state_dict(), shards.tensors_of(model)
    for file in weight_files(folder):
        for name, shape, read in tensors_of(file):
            if name not in missing:
                unused.append(name)
                continue
            mine, place = missing.pop(name)
            start, stop, _ = place.indices(len(shapes[mine]))
            expected = [stop - start, *shapes[mine].shape[1:]]
            if model.cfg.resize_embeddings and place.stop == model.cfg.vocab_size:
                shape, read = expected, with_mean_rows(read, expected[0])
            if shape != expected:
                raise ConfigError(f"{file}: {name} is {shape}; expected {expected}")
            held = shards.rows(len(shapes[mine]))
            first, last = max(start, held.start), min(stop, held.stop)
            if first < last:
                tensor = read(slice(first - start, last - start))
                ours[mine][first - held.start : last - held.start].copy_(tensor)
    if missing:
        raise ConfigError(f"{folder}: has no {shorten(missing)}")
    tied = model.cfg.tie_embeddings
    unused = [name for name in unused if not name.endswith("rotary_emb.inv_freq")
              and not (tied and name == "lm_head.weight")]
    if unused:
        raise ConfigError(f"{folder}: its config.json has no place for {shorten(unused)}")


def save_weights(state: dict, cfg, out: Path, dtype: torch.dtype, end_of_text: list[int],
                 sampling: dict):
    """Write our Transformer's state dict with the config.json that describes it.

    sampling: for generation_config.json.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, GenerationConfig

    ends = end_of_text if len(end_of_text) > 1 else next(iter(end_of_text), None)
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
        eos_token_id=ends, architectures=[f"{kind.capitalize()}ForCausalLM"],
    ).save_pretrained(out)
    pad = next(iter(end_of_text), None)
    GenerationConfig(eos_token_id=ends, pad_token_id=pad, **sampling).save_pretrained(out)
    save_torch_state_dict(tensors, str(out), max_shard_size="5GB")
    for file in out.glob("*.safetensors"):  # made readable for this user alone, unlike the others
        file.chmod((out / "config.json").stat().st_mode)


# --- adapters --------------------------------------------------------------------------------


def linear_parts(model: nn.Module) -> lora.Parts:
    """The linear layers in the blocks of our Transformer or of a foreign model."""
    if model.cfg.model == "transformers":
        blocks = {id(module) for module in model.blocks.modules()}
        return {name: [(name.removeprefix("module."), range(module.out_features))]
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and id(module) in blocks}
    parts, linears = {}, dict(model.named_modules())
    for theirs, (name, rows) in hf_key_map(model.cfg).items():
        ours = name.removesuffix(".weight")
        if name.startswith("blocks.") and isinstance(linears.get(ours), nn.Linear):
            place = range(*rows.indices(linears[ours].out_features))
            parts.setdefault(ours, []).append((theirs.removesuffix(".weight"), place))
    return parts


def adapt(model: nn.Module, cfg, dtype: torch.dtype) -> nn.Module:
    """The model, with adapters beside its frozen weights if there is a --lora_rank.

    Its `base` is then the fingerprint of these weights. Raises ConfigError.
    """
    if cfg.lora_rank:
        lora.adapt(model, linear_parts(model), cfg, dtype)
        model.base = fingerprint(cfg.init_from)
    return model


def fingerprint(name: str) -> str:
    """Sampled hash of the files with the weights that --init_from names; scales of adapters."""
    checkpoint = own_checkpoint(name)
    if not checkpoint and lora.is_adapter_folder(fetch_files(name)):
        file, found = fetch_files(name) / lora.WEIGHTS, lora.read_config(fetch_files(name))
        return f"{fingerprint(found['base'])} + {found['scale']} {sampled_hash({file.name: file})}"
    files = checkpoint.files() if checkpoint else weight_files(fetch(name))
    return sampled_hash({file.name: file for file in files})


def merge_adapter(model: nn.Module, name: str, shards: Shards):
    """Merge the adapter that --init_from names, if it is one, into the weights of its base."""
    folder = fetch_files(name)
    if lora.is_adapter_folder(folder):
        base = lora.read_config(folder)
        merge_adapter(model, base["base"], shards)
        lora.merge(shards.tensors_of(model), shards, linear_parts(model), lora.read_pairs(folder),
                   base["scale"], str(folder))


def merge_checkpoint(model: nn.Module, state: dict, path: Checkpoint, shards: Shards):
    """Merge the adapters in a checkpoint into the weights of their base. Raises ConfigError."""
    saved = SimpleNamespace(**state["config"])
    if fingerprint(saved.init_from) != state["base"]:
        raise ConfigError(f"{path}: adapts other weights than {saved.init_from} now has")
    parts = linear_parts(model)
    lora.merge(shards.tensors_of(model), shards, parts, lora.pairs_of(state["model"], parts, saved),
               lora.alpha_of(saved) / saved.lora_rank, str(path))


# --- what a run keeps ------------------------------------------------------------------------

KEPT = "hf"  # folder of a run directory: the configuration of its model, if it was not ours


def keep_config(cfg, run_dir: Path, resumed_from: Checkpoint | None):
    """Copy the configuration of --init_from into a run directory, which then works without it."""
    kept, checkpoint = run_dir / KEPT, resumed_from or own_checkpoint(cfg.init_from)
    if resumed_from and (kept / "config.json").exists():
        return
    if checkpoint:
        source = checkpoint.run_dir and checkpoint.run_dir / KEPT
    else:
        source = fetch(cfg.init_from, cfg.trust_remote_code)
    if not source or not (source / "config.json").exists():
        return
    kept.mkdir(exist_ok=True)
    code = source.glob("*.py") if cfg.trust_remote_code else ()
    for file in (source / "config.json", source / "generation_config.json", *code):
        if file.exists():
            shutil.copyfile(file, kept / file.name)
