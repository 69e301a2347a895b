"""Causal language models of other architectures, trained through transformers' own module."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steady.models.hub import reason, shorten
from steady.models.huggingface import UNTIED, folders, merge_adapters
from steady.options import ConfigError
from steady.ranks.parallel import Shards


def load_module(folder: Path, trust: bool) -> nn.Module:
    """The module in a folder. Raises ConfigError if its weights do not fit."""
    from transformers import AutoModelForCausalLM

    try:
        module, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder}: {reason(e)}") from None
    for kind, problem in (("missing", "has no"), ("unexpected", "has no place for")):
        if names := sorted(found[f"{kind}_keys"]):
            raise ConfigError(f"{folder}: {problem} {shorten(names)}")
    loaded = len(list(module.parameters()))
    module.tie_weights()
    if len(list(module.parameters())) < loaded:
        raise ConfigError(f"{folder}: {UNTIED}")
    return module


class HFModel(nn.Module):
    """A causal language model of transformers behind the interface of our Transformer."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        folder = folders(cfg.init_from, cfg.trust_remote_code)[-1]
        self.module = load_module(folder, cfg.trust_remote_code)
        try:  # some, such as image models, need more than tokens
            with torch.no_grad():
                one, other = self(torch.tensor([[0, 1], [0, 2]]))[:, 0]
        except Exception as e:  # whatever its code raises
            raise ConfigError(f"{folder}: cannot be trained on text alone: {reason(e)}") from e
        if (one - other).abs().max() > 1e-3 * one.abs().max():  # more than by rounding
            raise ConfigError(f"{folder}: its tokens attend to later ones; expected a causal model")
        self.module.generation_config = type(self.module.generation_config)()  # may be invalid
        self.train()  # from_pretrained leaves it in evaluation mode
        if cfg.activation_checkpointing != "none":
            # transformers 5.23 warns of the older name
            enable = getattr(self.module, "activation_checkpointing_enable", None)
            (enable or self.module.gradient_checkpointing_enable)()
        for part in (*self.module.modules(), self.module.config):  # Falcon's code reads the latter
            for name, value in vars(part).copy().items():
                is_rate = isinstance(part, nn.Dropout) or "dropout" in name or "pdrop" in name
                if is_rate and type(value) in (int, float):
                    setattr(part, name, cfg.dropout)
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        vars(self).update(  # hidden from nn.Module, or each weight would have two names
            blocks=max(lists, key=lambda m: sum(p.numel() for p in m.parameters())),
            head=self.module.get_output_embeddings(), embedding=self.module.get_input_embeddings())
        merge_adapters(self, cfg.init_from, Shards())

    def forward(self, tokens: Tensor, targets: Tensor | None = None,
                documents: Tensor | None = None) -> Tensor:
        """As Transformer.forward, but `documents` is ignored: packing is refused."""
        logits = self.module(tokens, use_cache=False).logits.float()
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets).clone()  # fully_shard warns of a view

    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int,
                 top_p: float, stop: tuple[int, ...], on_token=None) -> Tensor:
        """As `generate` in model.py, but generation ends when the context is full."""
        how = dict(do_sample=False, num_beams=1, num_return_sequences=1)
        if temperature >= 1e-6:  # or logits / temperature would overflow
            how |= dict(do_sample=True, temperature=temperature, top_k=top_k or None, top_p=top_p)
        if on_token:
            how["stopping_criteria"] = [lambda ids, scores: torch.full_like(
                ids[:, 0], bool(on_token(ids[:, -1])), dtype=torch.bool)]
        context, unseen = self.cfg.max_position, tokens[:, :0]
        if tokens.shape[1] >= context:
            unseen, tokens = tokens[:, : -(context // 2)], tokens[:, -(context // 2) :]
        was_training = self.training
        self.eval()
        tokens = self.module.generate(
            tokens, max_new_tokens=min(max_new_tokens, context - tokens.shape[1]),
            attention_mask=torch.ones_like(tokens), eos_token_id=[*stop] or None,
            pad_token_id=stop[0] if stop else 0, **how)
        self.train(was_training)
        return torch.cat((unseen, tokens), dim=1)
