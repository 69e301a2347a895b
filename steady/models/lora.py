"""LoRA: small trained factors beside frozen weights (arXiv:2106.09685), in the files of `peft`.

A linear layer W x becomes W x + alpha / rank * B A x. Our Transformer joins some of Hugging Face's
matrices, such as q, k and v. Each of these has its own A and B, so that they fit an export.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steady.models.hub import tensors_of
from steady.options import ConfigError

# Our name of a linear layer → (Hugging Face's name, rows) of its parts from top to bottom.
Parts = dict[str, list[tuple[str, range]]]
# Hugging Face's name of a layer → its A [rank, in] and B [rows, rank].
Pairs = dict[str, tuple[Tensor, Tensor]]

EVERYTHING = "all-linear"


class Adapter(nn.Module):
    """A forward hook that adds to the output of a linear layer.

    A [trained parts x rank, in] and B [their rows, rank] stack the factors of the trained parts.
    parts: (rows, trained or not) of each.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, parts: list[tuple[int, bool]]):
        super().__init__()
        self.rank, self.scale, self.parts = rank, scale, parts
        self.rows = [n for n, trained in parts if trained]
        how = dict(dtype=torch.float32, device=linear.weight.device)
        self.A = nn.Parameter(torch.empty(len(self.rows) * rank, linear.in_features, **how))
        self.B = nn.Parameter(torch.empty(sum(self.rows), rank, **how))

    def forward(self, linear: nn.Linear, inputs: tuple, output: Tensor) -> Tensor:
        low = F.linear(inputs[0], self.A).split(self.rank, dim=-1)
        pairs = zip(low, self.B.split(self.rows), strict=True)
        added = [F.linear(*next(pairs)) if trained else output.new_zeros(*output.shape[:-1], n)
                 for n, trained in self.parts]
        return output + self.scale * (torch.cat(added, dim=-1) if len(added) > 1 else added[0])


def adapt(model: nn.Module, parts: Parts, cfg, dtype: torch.dtype):
    """Freeze a model, hold its matrices in dtype, and give its linear layers adapters in fp32.

    Raises ConfigError for --lora_targets not in the model.
    """
    targets = find_targets(parts, cfg.lora_targets)
    for p in model.parameters():
        p.requires_grad_(False)
        if p.ndim > 1:
            p.data = p.data.to(dtype)
    if dtype != torch.float32:  # the residual stream stays in fp32, as without adapters
        model.embedding.register_forward_hook(lambda module, inputs, output: output.float())
    for name, each in parts.items():
        sizes = [(len(rows), theirs in targets) for theirs, rows in each]
        if any(trained for _, trained in sizes):
            linear = model.get_submodule(name)
            linear.lora = Adapter(linear, cfg.lora_rank, alpha_of(cfg) / cfg.lora_rank, sizes)
            linear.register_forward_hook(linear.lora)
    torch.manual_seed(cfg.seed)
    init_weights(model)


@torch.no_grad()
def init_weights(model: nn.Module):
    """A as in nn.Linear, B zero: at first the model equals its base."""
    for module in model.modules():
        if isinstance(module, Adapter):
            bound = module.A.shape[1] ** -0.5
            nn.init.uniform_(module.A, -bound, bound)
            nn.init.zeros_(module.B)


def kept(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors to save in a checkpoint: the adapters' of a --lora_rank, else all."""
    return {n: x for n, x in tensors.items() if not rank or n.endswith((".lora.A", ".lora.B"))}


def alpha_of(cfg) -> float:
    return cfg.lora_alpha or 2.0 * cfg.lora_rank


def find_targets(parts: Parts, targets: list[str]) -> set[str]:
    """Hugging Face's names of layers that end in one of `targets`. Raises ConfigError."""
    names, found = [theirs for each in parts.values() for theirs, _ in each], set()
    for target in targets:
        matching = [n for n in names if target == EVERYTHING or f".{n}".endswith(f".{target}")]
        if not matching:
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ConfigError(f"--lora_targets {target}: expected {EVERYTHING}, or linear layers "
                              f"of the blocks: {' '.join(kinds) or 'this model has none'}")
        found.update(matching)
    return found


# --- in Hugging Face's names -----------------------------------------------------------------


def pairs_of(state: dict[str, Tensor], parts: Parts, cfg) -> Pairs:
    """The adapters among the tensors of a checkpoint. Raises ConfigError if a fork's have more."""
    if odd := [name for name in state if ".lora." in name and name[-2:] not in (".A", ".B")]:
        raise ConfigError(f"a changed adapter, with {odd[0]}: only A and B can be merged")
    targets, found = find_targets(parts, cfg.lora_targets), {}
    for name, each in parts.items():
        if mine := [(theirs, len(rows)) for theirs, rows in each if theirs in targets]:
            a = state[f"{name}.lora.A"].split(cfg.lora_rank)
            b = state[f"{name}.lora.B"].split([n for _, n in mine])
            found |= {theirs: pair for (theirs, _), *pair in zip(mine, a, b, strict=True)}
    return found


@torch.no_grad()
def merge(tensors: dict[str, Tensor], shards, parts: Parts, pairs: Pairs, scale: float):
    """Add scale * B A to this rank's rows of the weights in `tensors`. Raises ConfigError."""
    if unknown := pairs.keys() - {theirs for each in parts.values() for theirs, _ in each}:
        raise ConfigError(f"an adapter of {min(unknown)}; expected linear layers of the blocks")
    for ours, each in parts.items():
        weight, held = tensors[f"{ours}.weight"], shards.rows(each[-1][1].stop)
        for theirs, rows in each:
            if theirs not in pairs:
                continue
            a, b = (t.to(weight.device, torch.float32) for t in pairs[theirs])
            shape = [len(rows), weight.shape[1]]
            if a.ndim != 2 or b.ndim != 2 or [len(b), a.shape[1]] != shape or b.shape[1] != len(a):
                raise ConfigError(f"the adapter of {theirs} is {list(b.shape)} x {list(a.shape)}; "
                                  f"expected a product of {shape}")
            first, last = max(rows.start, held.start), min(rows.stop, held.stop)
            if first < last:
                some = weight[first - held.start : last - held.start]
                some.copy_(some.float() + scale * (b[first - rows.start : last - rows.start] @ a))


# --- files of peft ---------------------------------------------------------------------------

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # begins all names in WEIGHTS
# Settings of unsupported variants: with them the weights mean something else.
UNREAD = ("bias", "use_dora", "use_qalora", "modules_to_save", "rank_pattern", "alpha_pattern",
          "layer_replication", "target_parameters", "trainable_token_indices", "lora_bias",
          "alora_invocation_tokens", "revision")


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def read_config(folder: Path) -> tuple[str, float]:
    """The name of an adapter's base, and its scale. Raises ConfigError unless it is plain LoRA."""
    try:
        found = json.loads((folder / CONFIG).read_text())
        base, rank = str(found["base_model_name_or_path"]), int(found["r"])
        scale = float(found["lora_alpha"]) / (rank**0.5 if found.get("use_rslora") else rank)
        odd = [name for name in UNREAD if (found.get(name) or "none") not in ("none", "main")]
        if (found.get("init_lora_weights") or True) not in (True, "gaussian", "eva", "orthogonal"):
            odd.append("init_lora_weights")  # others, as PiSSA's, change the base's weights, too
        if odd or found["peft_type"] != "LORA":
            raise ValueError(f"{found['peft_type']} {' '.join(odd)}")
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as e:
        raise ConfigError(f"{folder / CONFIG}: expected a LoRA adapter with the name of its base, "
                          f"without biases or variants: {type(e).__name__}: {e}") from None
    return base, scale


def read_pairs(folder: Path) -> Pairs:
    """The adapters in a folder. Raises ConfigError."""
    tensors = {name.removeprefix(PREFIX): tensor[...]
               for name, tensor in tensors_of([folder / WEIGHTS]).items()}
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    names = {layer: [f"{layer}.lora_{kind}.weight" for kind in "AB"] for layer in layers}
    if odd := tensors.keys() ^ {name for pair in names.values() for name in pair}:
        raise ConfigError(f"{folder / WEIGHTS}: {min(odd)}: expected names in pairs that end in "
                          "lora_A.weight and lora_B.weight")
    return {layer: (tensors[a], tensors[b]) for layer, (a, b) in names.items()}


def save(out: Path, pairs: Pairs, cfg, dtype: torch.dtype):
    """Write an adapter as peft loads it on the exported base."""
    import safetensors.torch

    tensors = {f"{PREFIX}{name}.lora_{kind}.weight": tensor.to(dtype).contiguous()
               for name, pair in pairs.items() for kind, tensor in zip("AB", pair, strict=True)}
    safetensors.torch.save_file(tensors, out / WEIGHTS, metadata=dict(format="pt"))
    base = Path(cfg.init_from)
    found = dict(peft_type="LORA", task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=alpha_of(cfg),
                 target_modules=sorted(pairs), bias="none", lora_dropout=0.0, inference_mode=True,
                 base_model_name_or_path=str(base.absolute()) if base.exists() else cfg.init_from)
    (out / CONFIG).write_text(json.dumps(found, indent=2) + "\n")
    (out / WEIGHTS).chmod((out / CONFIG).stat().st_mode)  # written with mode 600
