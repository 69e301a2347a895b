"""Means of an evaluation; for --monitoring full: norms of weights and updates, and entropy."""

import math

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
        """Add values [B, T], 0 at ignored targets of `batch`; every rank adds the same names."""
        assert values.shape == batch.targets.shape, f"{name} {[*values.shape]}: not [B, T]"
        if name not in self.totals:
            self.totals[name] = torch.zeros(2, len(self.data.datasets), device=self.ranks.device)
        batch.add_by_dataset(self.totals[name], values)

    def row(self, samples: int, with_counts: bool) -> tuple[dict[str, float], str]:
        """(metrics, the same for the screen) over all ranks; no metrics if no target counted.

        samples: the number evaluated. with_counts: show the number of tokens behind each mean.
        """
        names = self.ranks.broadcast([*self.totals])  # KeyError on a rank without one of them
        table = torch.stack([self.totals[name] for name in names])
        if self.ranks.world_size > 1:
            dist.all_reduce(table)
        row, tokens, data = {}, {}, self.data  # tokens: the number behind each mean
        for name, (sums, counts) in zip(names, table.tolist(), strict=True):
            if not any(counts):
                return {}, "without a target that counts"
            row[name], tokens[name] = sum(sums) / sum(counts), sum(counts)
            if name == "val/loss":
                row["val/perplexity"] = math.exp(row[name]) if row[name] < 700 else math.inf
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


def copy_of_weights(shards) -> list[Tensor]:
    """This rank's parts of the trained weights, to compare with after an update."""
    return [p.detach().clone() for p in shards.parameters.values()]


def update_metrics(shards, before: list[Tensor]) -> dict[str, Tensor]:
    """The norm of the weights before an update, and the update's norm relative to it: no sync."""
    changes = torch._foreach_sub(before, [p.detach() for p in shards.parameters.values()])
    norm, changed = (shards.norms(each).float().norm() for each in (before, changes))
    return {"health/param_norm": norm, "health/update_ratio": changed / norm.clamp(min=1e-12)}


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
        documents = documents[part] if documents.ndim > 1 else documents.clamp(max=tokens.numel())
    model.eval()
    logp = model.forward(tokens, documents=documents).log_softmax(-1)
    model.train()
    entropy = -(logp.exp() * logp).sum(-1)
    return (entropy * weight).sum() / weight.sum().clamp(min=1)


def measure_output(run, batch):
    """Log the entropy of the model's output on `batch`, without a sync."""
    if run.measures(run.progress.step):
        counted = batch.targets != IGNORE
        real = counted.any()  # false if there are only dummy rows
        with run.ranks.autocast, gathered(run.model):
            entropy = output_entropy(run.model, batch.tokens, counted, batch.documents)
        run.monitor.log("health/output_entropy", entropy * real, real)
