"""What an evaluation finds: means over the counted targets, of all the data and of each dataset."""

import math

import numpy as np
import torch
import torch.distributed as dist


class Means:
    """Sums of values over targets, kept on the device until `row` reads them."""

    def __init__(self, data, ranks):
        self.data, self.ranks = data, ranks
        self.totals = {}  # name → sums and counts [2, datasets]

    def add(self, name: str, values: torch.Tensor, batch):
        """values: [B, T], 0 where the target of `batch` does not count; on every rank alike."""
        if name not in self.totals:
            shape = 2, len(self.data.datasets)
            self.totals[name] = torch.zeros(shape, device=self.ranks.device)
        batch.add_by_dataset(self.totals[name], values)

    def row(self, samples: int, with_counts: bool) -> tuple[dict[str, float], str]:
        """(metrics, the same for the screen) over all ranks; without any if no target counted.

        samples: how many were evaluated. with_counts: show how many tokens each mean is of.
        """
        table = torch.stack(tuple(self.totals.values()))
        if self.ranks.world_size > 1:
            dist.all_reduce(table)
        row, tokens, data = {}, {}, self.data  # tokens: how many each value is the mean of
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
