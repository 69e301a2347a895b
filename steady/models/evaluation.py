"""Means of an evaluation; with --monitoring full, norms of gradients, weights and updates, overall
and by layer, and the entropy of the output.
"""

import math
import re

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steady.ranks.parallel import gathered
from steady.tokens.files import IGNORE


class Means:
    """Sums of an evaluation's values over targets, kept on the device until `row` reads them."""

    def __init__(self, data, ranks):
        self.data, self.ranks = data, ranks
        self.totals = {}  # name → sums and counts [2, datasets]

    def add(self, name: str, values: Tensor, batch):
        """values: [B, T], 0 at ignored targets of `batch`; every rank adds the same names."""
        assert values.shape == batch.targets.shape, f"{name} {[*values.shape]}: not [B, T]"
        if name not in self.totals:
            shape = 2, len(self.data.datasets)
            self.totals[name] = torch.zeros(shape, device=self.ranks.device)
        batch.add_by_dataset(self.totals[name], values)

    def row(self, samples: int, with_counts: bool) -> tuple[dict[str, float], str]:
        """(metrics, the same for the screen) over all ranks; no metrics if no target counted.

        samples: the number evaluated. with_counts: show the number of tokens behind each mean.
        """
        table = torch.stack(tuple(self.totals.values()))
        if self.ranks.world_size > 1:
            dist.all_reduce(table)
        row, tokens, data = {}, {}, self.data  # tokens: the number behind each mean
        for name, (sums, counts) in zip(self.totals, table.tolist(), strict=True):
            if not any(counts):
                return {}, "without a target that counts"
            row[name], tokens[name] = sum(sums) / sum(counts), sum(counts)
            if name == "val/loss":
                loss = row[name]
                row["val/perplexity"] = math.inf if loss > 700 else math.exp(loss)
                if data.bytes_per_token:
                    n_bytes = np.dot(counts, data.bytes_per_token)
                    row["val/bits_per_byte"] = sum(sums) / math.log(2) / n_bytes
            for dataset, total, count in zip(data.datasets, sums, counts, strict=True):
                if count and len(data.datasets) > 1:
                    row[f"{name}/{dataset.name}"] = total / count
                    tokens[f"{name}/{dataset.name}"] = count
        shown = []
        for name, value in row.items():
            of = f" ({tokens[name]:,.0f} tokens)" if with_counts and name in tokens else ""
            shown.append(f"{name[len('val/') :]} {value:{'.4f' if value < 1e4 else '.4g'}}{of}")
        part = f" ({samples:,} of {data.n_samples:,} sequences)" if samples < data.n_samples else ""
        return row, " | ".join(shown) + part


class Update:
    """Norms before an optimizer step and, by `measure`, after it, without a sync.

    Keeps a copy of the weights in between.
    """

    def __init__(self, shards):
        trained = {name: p for name, p in shards.parameters.items() if p.grad is not None}
        self.names, self.weights = list(trained), [p.detach() for p in trained.values()]
        self.norms = shards.norms
        self.grads = self.norms([p.grad for p in trained.values()])
        self.before = [w.clone() for w in self.weights]

    def measure(self) -> dict[str, Tensor]:
        """Norms of gradients and weights, and the change as a share of the weights."""
        sizes = by_layer(self.names, self.norms(self.before))
        changes = by_layer(self.names, self.norms(torch._foreach_sub(self.before, self.weights)))
        found = {}
        for layer, grad in by_layer(self.names, self.grads).items():
            found[f"health/grad_norm{layer}"] = grad
            found[f"health/param_norm{layer}"] = sizes[layer]
            found[f"health/update_ratio{layer}"] = changes[layer] / sizes[layer].clamp(min=1e-12)
        return found


def by_layer(names: list[str], norms: Tensor) -> dict[str, Tensor]:
    """Norms over all tensors ("") and over each layer's ("/blocks.0"), on the device."""
    groups = {}
    for i, name in enumerate(names):
        layer = re.match(r"(.*?\.\d+)\.|[^.]*", name)
        groups.setdefault("/" + (layer[1] or layer[0]), []).append(i)
    norms = norms.float()
    each = norms.unbind()  # indexing with a list would copy the list to the device, a sync
    return {"": norms.norm()} | {group: torch.stack([each[i] for i in members]).norm()
                                 for group, members in groups.items()}


@torch.no_grad()
def output_entropy(model: nn.Module, tokens: Tensor, counted: Tensor,
                   documents: Tensor | None = None) -> Tensor:
    """Mean entropy of the output in nats, over about 128 positions: a collapse shows here first.

    counted [B, T]: bool, positions that the loss counts; tokens, documents: as in
    `Transformer.forward`.
    """
    part = slice(max(1, 128 // tokens.shape[1])), slice(128)
    tokens, weight = tokens[part], counted[part].float()
    if documents is not None:
        documents = (documents[part] if documents.ndim > 1
                     else documents.clamp(max=tokens.numel()))
    model.eval()
    logp = model.forward(tokens, documents=documents).log_softmax(-1)
    model.train()
    entropy = -(logp.exp() * logp).sum(-1)
    return (entropy * weight).sum() / weight.sum().clamp(min=1)


def measure_output(run, batch):
    """Log the entropy of the model's output on `batch`, without a sync."""
    if run.measures(run.progress.step):
        counted = batch.targets != IGNORE
        real = counted.any()  # false for dummy rows alone
        with run.ranks.autocast, gathered(run.model):
            entropy = output_entropy(run.model, batch.tokens, counted, batch.documents)
        run.monitor.log("health/output_entropy", entropy * real, real)
