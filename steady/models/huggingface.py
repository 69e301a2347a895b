"""Hugging Face models: loaded into our Transformer, and written from it.

Llama, Mistral, Qwen2 and Qwen3 become the Transformer of model.py; other architectures are trained
through their own module in transformers (steady/models/foreign.py).
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from steady.models import lora
from steady.models.hub import fetch_files, reason, shorten, tensors_of, weight_files
from steady.options import ConfigError, reading_paths
from steady.ranks.parallel import Shards
from steady.tokens.files import sampled_hash
from steady.tokens.tokenizers import byte_tokenizer, load_tokenizer, read_json

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
# Our name of an option → its name in a configuration of transformers.
OPTIONS = dict(
    n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads",
    head_dim="head_dim", d_model="hidden_size", d_ff="intermediate_size", vocab_size="vocab_size",
    norm_eps="rms_norm_eps", max_position="max_position_embeddings",
    tie_embeddings="tie_word_embeddings")
# rope_type → names of the numbers in our rope_scaling.
ROPE = dict(default=(), linear=("factor",), llama3=(
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
# Defaults of a run from existing weights.
FINE_TUNING = dict(seq_len=1024, batch_size=32, learning_rate=2e-5, optimizer="adamw",
                   lr_schedule="cosine")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIED = ("its config.json ties the head to the embedding, but the head has weights of its own; "
          "set tie_word_embeddings to false there")


# --- folders ---------------------------------------------------------------------------------


def folders(name: str, code: bool = False, weights: bool = True) -> list[Path]:
    """A model's folder; for an adapter its own folder, then its base's. Raises ConfigError."""
    found = [fetch_files(name, code, weights)]
    while lora.is_adapter_folder(found[-1]):
        base = fetch_files(lora.read_config(found[-1])[0], code, weights)
        if base in found:
            raise ConfigError(f"{base}: an adapter whose base is itself; expected a model")
        found.append(base)
    return found


def tokenizer_folder(name: str) -> Path:
    """The folder with the tokenizer of a model; an adapter may have one, else it is the base's."""
    *adapters, folder = folders(name)
    return next((f for f in adapters if (f / "tokenizer_config.json").exists()), folder)


# --- configuration ---------------------------------------------------------------------------


def config_from_hf(cfg):
    """cfg with the shape of --init_from and the defaults of fine-tuning.

    Raises ConfigError if flags ask for another shape, and for untrusted code.
    """
    if cfg.depth or cfg.model not in ("default", "transformers"):
        flag = f"--depth {cfg.depth}" if cfg.depth else f"--model {cfg.model}"
        raise ConfigError(f"{flag}: the shape is that of --init_from")
    found = read_config(cfg)
    try:
        shape = native_shape(found)
    except (ValueError, TypeError, LookupError, ArithmeticError) as e:
        raise ConfigError(f"--init_from {cfg.init_from}: its config.json has an invalid value, or "
                          f"transformers is older than 5: {reason(e)}") from None
    if shape is None or cfg.model == "transformers":
        shape = foreign_shape(found, cfg)
    default, longest = type(cfg)(), shape["max_position"]
    for name, value in shape.items():
        if getattr(cfg, name) not in (getattr(default, name), value):
            raise ConfigError(f"--{name} {getattr(cfg, name)}: {cfg.init_from} has {value}")
    if cfg.seq_len and cfg.seq_len > longest:
        raise ConfigError(f"--seq_len {cfg.seq_len}: {cfg.init_from} has a context of {longest}; "
                          "beyond a sliding window, pass --model transformers")
    usual = FINE_TUNING | dict(seq_len=min(longest, FINE_TUNING["seq_len"]))
    if cfg.lora_rank:
        usual["learning_rate"] = 2e-4
    return replace(cfg, **shape, **{k: v for k, v in usual.items() if getattr(cfg, k) is None})


def read_config(cfg):
    """The transformers configuration of --init_from. Raises ConfigError."""
    from transformers import AutoConfig

    folder = folders(cfg.init_from, cfg.trust_remote_code)[-1]
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as e:  # a config.json can be wrong in many ways
        raise ConfigError(f"--init_from {cfg.init_from}: {reason(e)}") from None
    if quantized := getattr(found, "quantization_config", None):
        method = dict(quantized).get("quant_method", "unnamed")
        raise ConfigError(f"--init_from {cfg.init_from}: its weights are quantized ({method}); "
                          "expected fp32, bf16 or fp16")
    return found


def native_shape(found) -> dict | None:
    """Our Transformer's options for a transformers configuration; None for other architectures.

    max_position is at most the sliding window of the model: our attention has none.
    """
    rope = getattr(found, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    odd = (getattr(found, "attention_bias", False) or getattr(found, "mlp_bias", False)
           or not getattr(found, "is_causal", True))  # as of gte-Qwen2, made for embeddings
    if found.model_type not in NATIVE or kind not in ROPE or odd or found.hidden_act != "silu":
        return None
    shape = {mine: getattr(found, theirs, None) for mine, theirs in OPTIONS.items()}
    return shape | dict(
        model="default", head_dim=shape["head_dim"] or found.hidden_size // shape["n_head"],
        tie_embeddings=bool(shape["tie_embeddings"]),
        max_position=min(shape["max_position"], getattr(found, "sliding_window", None) or 1 << 60),
        rope_theta=float(rope["rope_theta"]),  # transformers 4 keeps it elsewhere
        rope_scaling=[float(rope[name]) for name in ROPE[kind]],
        qkv_bias=found.model_type == "qwen2", qk_norm=found.model_type == "qwen3")


def foreign_shape(found, cfg) -> dict:
    """The options of a model trained through transformers' own module. Raises ConfigError."""
    text = found.get_text_config()
    n_layer, width, heads, kv, vocab, longest = (getattr(text, OPTIONS[name], None) for name in (
        "n_layer", "d_model", "n_head", "n_kv_head", "vocab_size", "max_position"))
    if not (n_layer and width and vocab) or getattr(found, "is_encoder_decoder", False):
        raise ConfigError(f"--init_from {cfg.init_from}: architecture {found.model_type}: expected "
                          f"one of {', '.join(NATIVE)}, or another causal language model")
    ours = "resize_embeddings", "tie_embeddings", "rope_scaling", "qkv_bias", "qk_norm"
    given = [name for name in ours if getattr(cfg, name)]  # its own config.json decides
    if given or cfg.data_mode == "packed":
        raise ConfigError(f"--{given[0] if given else 'data_mode packed'}: not with a "
                          f"{found.model_type} trained through transformers' own module")
    heads = heads or 1
    return dict(model="transformers", n_layer=n_layer, n_head=heads, n_kv_head=kv or heads, d_ff=1,
                d_model=width, vocab_size=vocab, head_dim=width // heads,
                max_position=longest or 1 << 60)


def check_tokenizer(name: str, data):
    """Raise ConfigError if the data was made with another tokenizer than the model's."""
    theirs = vocabulary(tokenizer_folder(name))
    mine = vocabulary(Path(data.tokenizer_folder)) if data.tokenizer_folder else {}
    if data.tokenizer == "bytes":
        mine = byte_tokenizer().get_vocab()
    if mine and not theirs.items() <= mine.items():  # added tokens are fine
        raise ConfigError(f"--init_from {name}: its tokenizer is not {data.tokenizer}, as --data "
                          f"has; prepare it with python data.py ... --tokenizer {name}, or "
                          "--allow_change tokenizer")


def vocabulary(folder: Path) -> dict[str, int]:
    """{token: id} of a tokenizer; {} without one. Raises ConfigError if it cannot be read."""
    files = [*folder.glob("tokenizer.*"), *folder.glob("vocab.*"), *folder.glob("*.model")]
    return load_tokenizer(str(folder)).get_vocab() if files else {}


# --- weights ---------------------------------------------------------------------------------


def hf_key_map(cfg) -> dict[str, tuple[str, slice]]:
    """Hugging Face's name of each tensor → our name and the rows in our tensor."""
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    everything, vocabulary = slice(None), slice(cfg.vocab_size)  # ours pads the vocabulary
    out = {EMBEDDING: ("embedding.weight", vocabulary),
           "model.norm.weight": ("norm.weight", everything)}
    if not cfg.tie_embeddings:
        out[HEAD] = ("head.weight", vocabulary)
    block = {
        "self_attn.q_proj": ("attention.qkv", slice(q)),
        "self_attn.k_proj": ("attention.qkv", slice(q, q + kv)),
        "self_attn.v_proj": ("attention.qkv", slice(q + kv, q + 2 * kv)),
        "self_attn.o_proj": ("attention.out", everything),
        "mlp.gate_proj": ("mlp.gate_up", slice(cfg.d_ff)),
        "mlp.up_proj": ("mlp.gate_up", slice(cfg.d_ff, 2 * cfg.d_ff)),
        "mlp.down_proj": ("mlp.down", everything),
        "input_layernorm": ("attention_norm", everything),
        "post_attention_layernorm": ("mlp_norm", everything),
    }
    if cfg.qk_norm:
        block["self_attn.q_norm"] = "attention.q_norm", everything
        block["self_attn.k_norm"] = "attention.k_norm", everything
    for i in range(cfg.n_layer):
        for theirs, (ours, rows) in block.items():
            biased = cfg.qkv_bias and ours == "attention.qkv"
            for kind in ("weight", "bias") if biased else ("weight",):
                out[f"model.layers.{i}.{theirs}.{kind}"] = f"blocks.{i}.{ours}.{kind}", rows
    return out


@torch.no_grad()
def load_initial(model: nn.Module, name: str, shards: Shards):
    """Load the weights of --init_from into our Transformer, adapters merged into their base.

    One tensor at a time; each rank reads its own rows. Raises ConfigError for missing and surplus
    tensors and for unexpected shapes.
    """
    cfg, wanted, folder = model.cfg, hf_key_map(model.cfg), folders(name)[-1]
    found = tensors_of(weight_files(folder))
    if missing := [theirs for theirs in wanted if theirs not in found]:
        raise ConfigError(f"{folder}: has no {shorten(missing)}")
    if cfg.tie_embeddings and HEAD in found:  # older programs save it all the same
        if not torch.equal(found.pop(HEAD)[:], found[EMBEDDING][:]):
            raise ConfigError(f"{folder}: {UNTIED}")
    unused = [each for each in found if each not in wanted and not each.endswith(".inv_freq")]
    if unused:
        raise ConfigError(f"{folder}: its config.json has no place for {shorten(unused)}")
    shapes, held = model.state_dict(), shards.tensors_of(model)
    for theirs, (ours, place) in wanted.items():
        rows, shape, n = found[theirs], found[theirs].get_shape(), len(shapes[ours])
        begin, end, _ = place.indices(n)
        expected = [end - begin, *shapes[ours].shape[1:]]
        if cfg.resize_embeddings and theirs in (EMBEDDING, HEAD):
            rows, shape = rows[:], expected
            mean = rows.float().mean(0, keepdim=True).to(rows.dtype)  # for the added rows
            rows = torch.cat((rows, mean.expand(expected[0] - len(rows), -1)))
        if shape != expected:
            raise ConfigError(f"{folder}: {theirs} is {shape}; expected {expected}")
        mine = shards.rows(n)
        first, last = max(begin, mine.start), min(end, mine.stop)
        if first < last:
            part = held[ours][first - mine.start : last - mine.start]
            part.copy_(rows[first - begin : last - begin])
    merge_adapters(model, name, shards)


# --- export ----------------------------------------------------------------------------------


def save_weights(state: dict, cfg, out: Path, dtype: torch.dtype):
    """Write our Transformer's state dict under the names of Hugging Face."""
    from huggingface_hub import save_torch_state_dict
    ends = {ours: rows.stop for ours, rows in hf_key_map(cfg).values()}  # None: all of its rows
    if missing := sorted(ends.keys() - state.keys()):
        raise ConfigError(f"a changed model, without {shorten(missing)}: unknown to transformers")
    if odd := [name for name, x in sorted(state.items()) if name != "head.weight"  # also if tied
               and ends.get(name, 0) not in (None, cfg.vocab_size, *x.shape[:1])]:
        print(f"warning: a changed model: {shorten(odd)} differ from the parameters of Hugging "
              "Face's architecture: other programs will misread it", file=sys.stderr, flush=True)
    tensors = {theirs: state[ours][rows].to(dtype, copy=True)
               for theirs, (ours, rows) in hf_key_map(cfg).items()}
    save_torch_state_dict(tensors, str(out), max_shard_size="5GB")


def save_config(cfg, source: Path | None, out: Path, dtype: torch.dtype, ends: list[int]):
    """Write the config.json and generation_config.json of an export, for transformers 4 and 5.

    source: the folder of --init_from, if any; its files change only as training requires.
    """
    found, generation = ({} if source is None else read_json(source / name)
                         for name in ("config.json", "generation_config.json"))
    foreign = cfg.model == "transformers"
    made = read_json(out / "config.json") if foreign else config_json(cfg)
    if not found or foreign and made.get("architectures") != found.get("architectures"):
        found = made  # the module may be only the text part of the model
    if not foreign:
        found["vocab_size"] = cfg.vocab_size  # larger after --resize_embeddings
    if cfg.trust_remote_code and source:
        for file in source.glob("*.py"):
            shutil.copyfile(file, out / file.name)
    if not any(out.glob("*.py")):
        found.pop("auto_map", None)
    for part in filter(None, (found, found.get("text_config"))):
        part["dtype"] = part["torch_dtype"] = str(dtype).removeprefix("torch.")
        part |= {name: value for name, value in old_rope(part).items() if name not in part}
    for name in ("bos_token_id", "pad_token_id"):
        if name in found:
            generation.setdefault(name, found[name])
    if ends:
        found["eos_token_id"] = generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        if generation.get("pad_token_id") is None:
            generation["pad_token_id"] = ends[0]
    for name, content in (("config.json", found), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for file in out.glob("*.safetensors"):  # written with mode 600
        file.chmod((out / "config.json").stat().st_mode)


def config_json(cfg) -> dict:
    """The config.json of our Transformer."""
    kind = "qwen2" if cfg.qkv_bias else "llama"
    kind = "qwen3" if cfg.qk_norm else kind
    scaled = next(name for name, values in ROPE.items() if len(values) == len(cfg.rope_scaling))
    rope = dict(zip(ROPE[scaled], cfg.rope_scaling, strict=True))
    rope |= dict(rope_type=scaled, rope_theta=cfg.rope_theta)
    if scaled == "llama3":
        rope["original_max_position_embeddings"] = int(cfg.rope_scaling[-1])
    shape = {theirs: getattr(cfg, ours) for ours, theirs in OPTIONS.items()}
    shape["max_position_embeddings"] = cfg.max_position or cfg.seq_len
    return dict(shape, model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"],
                hidden_act="silu", rope_parameters=rope, bos_token_id=None, eos_token_id=None)


def old_rope(found: dict) -> dict:
    """A configuration's rope_parameters under the names that transformers 4 reads."""
    rope = found.get("rope_parameters") or {}
    local = rope.get("sliding_attention")  # Gemma 3 has two kinds of layers
    rope = dict(rope.get("full_attention") or rope)
    old = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if local:
        old["rope_local_base_freq"] = local["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = rope
    return old


# --- adapters --------------------------------------------------------------------------------


def linear_parts(model: nn.Module) -> lora.Parts:
    """The linear layers in the blocks of our Transformer or of a foreign model."""
    in_blocks, parts = {*model.blocks.modules()}, {}
    linears = {f"{name}.weight": module.out_features for name, module in model.named_modules()
               if isinstance(module, nn.Linear) and module in in_blocks}
    names = {name.removeprefix("module."): (name, slice(None)) for name in linears}
    if model.cfg.model != "transformers":
        names = hf_key_map(model.cfg)
    for theirs, (ours, rows) in names.items():
        if ours in linears:
            place = theirs.removesuffix(".weight"), range(*rows.indices(linears[ours]))
            parts.setdefault(ours.removesuffix(".weight"), []).append(place)
    return parts


def adapt(model: nn.Module, cfg, dtype: torch.dtype) -> nn.Module:
    """The model; with --lora_rank, adapted, its base's hash as `lora_base`. Raises ConfigError."""
    if cfg.lora_rank:
        lora.adapt(model, linear_parts(model), cfg, dtype)
        model.lora_base = fingerprint(cfg.init_from)
    return model


@reading_paths()
def fingerprint(name: str) -> str:
    """A sampled hash of the weight files of --init_from, and the scales of adapters."""
    *adapters, folder = folders(name)
    found = sampled_hash({file.name: file for file in weight_files(folder)})
    for folder in reversed(adapters):
        weights = {lora.WEIGHTS: folder / lora.WEIGHTS}
        found += f" + {lora.read_config(folder)[1]} {sampled_hash(weights)}"
    return found


def merge_adapters(model: nn.Module, name: str, shards: Shards):
    """Merge the adapters of --init_from, if any, into the model's weights."""
    for folder in reversed(folders(name)[:-1]):
        lora.merge(shards.tensors_of(model), shards, linear_parts(model), lora.read_pairs(folder),
                   lora.read_config(folder)[1])
