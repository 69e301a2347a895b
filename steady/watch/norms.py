"""--monitor full: norms of gradients and weights, how much an update changes them, the output.

Norms are overall and by layer.
"""

import re

import torch
from torch import Tensor, nn


class Update:
    """Norms before an optimizer step and, by `measure`, after it, without syncing with the device.

    A copy of the weights is kept until then.
    """

    def __init__(self, shards):
        trained = {name: p for name, p in shards.parameters.items() if p.grad is not None}
        self.names, self.weights = list(trained), [p.detach() for p in trained.values()]
        self.norms = shards.norms
        self.grads = self.norms([p.grad for p in trained.values()])
        self.before = [w.clone() for w in self.weights]

    def measure(self) -> dict[str, Tensor]:
        """Norms of gradients and weights, and of the change as a share of the weights."""
        sizes = by_layer(self.names, self.norms(self.before))
        changes = by_layer(self.names, self.norms(torch._foreach_sub(self.before, self.weights)))
        found = {}
        for layer, grad in by_layer(self.names, self.grads).items():
            found[f"health/grad_norm{layer}"] = grad
            found[f"health/param_norm{layer}"] = sizes[layer]
            found[f"health/update_ratio{layer}"] = changes[layer] / sizes[layer].clamp(min=1e-12)
        return found


def by_layer(names: list[str], norms: Tensor) -> dict[str, Tensor]:
    """Norms over all tensors ("") and over those of each layer ("/blocks.0"), on the device."""
    groups = {}
    for i, name in enumerate(names):
        layer = re.match(r"(.*?\.\d+)\.|[^.]*", name)
        groups.setdefault("/" + (layer[1] or layer[0]), []).append(i)
    norms = norms.float()
    each = norms.unbind()  # indexing with a list would copy it to the device and wait for that
    return {"": norms.norm()} | {group: torch.stack([each[i] for i in members]).norm()
                                 for group, members in groups.items()}


@torch.no_grad()
def output_health(model: nn.Module, tokens: Tensor, counted: Tensor,
                  documents: Tensor | None = None) -> dict[str, Tensor]:
    """Mean entropy in nats and probability of the likeliest token, over about 256 positions.

    A collapsing model shows here first. counted [B, T]: whether the loss counts a position; tokens
    and documents as in `Transformer.forward`.
    """
    rows = slice(max(1, 256 // tokens.shape[1]))
    if documents is not None:
        count = tokens[rows].numel()
        documents = documents[rows] if documents.ndim > 1 else documents.clamp(max=count)
    model.eval()
    logits = model.predict(tokens[rows], documents)
    model.train()
    logp = logits.log_softmax(-1)
    weight = counted[rows].float()
    count = weight.sum().clamp(min=1)
    entropy, top1 = -(logp.exp() * logp).sum(-1), logp.amax(-1).exp()
    return {
        "health/output_entropy": (entropy * weight).sum() / count,
        "health/output_top1": (top1 * weight).sum() / count,
    }
