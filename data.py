"""The data that the loop trains on: the mixture of datasets, generated samples, the loader.

The sample at global position g (0, 1, 2, … over the whole run) is a function of (seed, g) alone,
and each step takes the next batch_size positions. So a run resumes at any step in constant time,
with no loader state, and 1 or 8 processes see the same samples in the same steps.

A sample is a block of one long stream (`Stream`), a document, or several packed into a row
(`Documents`). Generated data is a class of `Samples`, whose `batch` depends on its arguments alone.
"""

if __name__ == "__main__":  # first: the imports below take seconds
    from steady.guard.process import start

    start("tools.prepare:main")

import hashlib
import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_convert

from config import Config
from steady.checkpoints.disk import retry
from steady.guard.memory import to_shared_memory
from steady.guard.process import FORK, leave_to_parent
from steady.options import ConfigError, Failed
from steady.private import mark_dynamic
from steady.ranks.ranks import Ranks
from steady.tokens.documents import Dataset, Documents, Stream
from steady.tokens.files import IGNORE, find_sources, read_sidecars, split_stages, tokenizer_hash
from steady.tokens.order import Order
from steady.tokens.packing import boundaries
from steady.tokens.tokenizers import decode

# --- samples ---------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A micro-batch of B sequences of T tokens."""

    tokens: torch.Tensor  # [B, T]; [B, T + 1] if targets is None: each target is the next token
    targets: torch.Tensor | None = None  # [B, T], IGNORE for positions without a loss
    documents: torch.Tensor | None = None  # [B, T]: each token's document, or packing.boundaries
    source: torch.Tensor | None = None  # [B]: index of the row's dataset, if there are several

    def to(self, device: torch.device, rows: int | None = None) -> "Batch":
        """The batch on `device`, ids as int64 [B, T], floats unchanged; asynchronous if pinned.

        rows: the number of real rows; the dummy rows after them get IGNORE as targets.
        """
        on = device if device.type == "cuda" else "cpu"  # ids cross the bus narrow, then widen
        batch = Batch(*(x if x is None else x.to(on, non_blocking=True) for x in self))
        ids = [x if x is None or x.is_floating_point() else x.long()
               for x in (batch.tokens, batch.targets, batch.source)]
        tokens, targets, source, documents = (
            x if x is None else x.to(device) for x in (*ids, batch.documents))
        if documents is not None and documents.ndim == 1:  # compiled once for any number
            mark_dynamic(documents, 0)
        if targets is None:
            tokens, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        if rows is not None and rows < len(targets):
            targets = targets.clone()  # with B = 1 they are a view of the tokens
            targets[max(0, rows) :] = IGNORE
        return batch._replace(tokens=tokens, targets=targets, documents=documents, source=source)

    def add_by_dataset(self, totals: torch.Tensor, losses: torch.Tensor):
        """Add losses [B, T] and target counts to totals [2, datasets], by dataset of each row."""
        counts = (self.targets != IGNORE).sum(1)
        values = torch.stack((losses.sum(1), counts)).to(totals.dtype)  # [2, B]
        if self.source is None:
            totals += values.sum(1, keepdim=True)
        else:
            totals.index_add_(1, self.source, values)


# --- the mixture -----------------------------------------------------------------------------


class Samples:
    """Data without files: n_samples of seq_len tokens. A subclass defines `batch`."""

    mode, row_lengths_vary, has_prompts = "stream", False, False
    tokenizer = tokenizer_folder = end_of_text = bytes_per_token = None
    boundaries = False  # whether `rows` returns them instead of document numbers
    details = ""  # shown at the start of a run
    GROUP_STEPS = 32  # documents of so many steps are sorted by length, to save padding

    def __init__(self, name: str, n_samples: int, seq_len: int, vocab_size: int, seed: int):
        self.name, self.n_samples, self.seq_len = name, n_samples, seq_len
        self.vocab_size, self.n_tokens = vocab_size, n_samples * seq_len
        self.datasets, self.weights = [self], {0: 1}
        self.fingerprint = [[name, self.n_tokens, "", ""]]  # a run continues only if it is equal
        self.document_lengths = np.array([seq_len])
        self.order = Order([n_samples], [1], seed)

    def batch(self, start: int, stop: int) -> Batch:
        """The samples at positions start … stop - 1, on the host."""
        raise NotImplementedError

    def count_tokens(self, start: int, n: int) -> int:
        """Tokens in the n samples from position `start` on, without padding."""
        return n * self.seq_len

    @staticmethod
    def share(start, n, rank, world_size):
        """(begin, end) of a rank's share of the n positions from `start` on; also of arrays."""
        return start + n * rank // world_size, start + n * (rank + 1) // world_size

    def typical_length(self) -> float:
        """Mean length of the sequence that a token is in; attention's FLOPs are linear in it."""
        each = [(d.document_lengths, float(d.weights[0] / d.n_samples)) for d in self.datasets]
        squares = sum(weight * (lengths**2).sum() for lengths, weight in each)
        return squares / sum(weight * lengths.sum() for lengths, weight in each)

    def group_by_length(self, steps: int, batch_size: int):
        """From now on, batch documents of similar lengths, to save padding."""
        if steps and self.row_lengths_vary and self.mode != "stream":
            self.order.group_by_length(steps, batch_size, partial(self.per_sample, "lengths"))

    def rows(self, start: int, stop: int, end: int) -> Batch:
        """As `batch`, but from position `end` on, rows are dummies: copies of the sample before."""
        first = min(start, end - 1)
        batch = self.batch(first, min(stop, end))
        if stop > end:
            rows = np.minimum(np.arange(start, stop), end - 1) - first
            batch = Batch(*(x if x is None else torch.from_numpy(x.numpy()[rows]) for x in batch))
        if self.boundaries:
            batch = batch._replace(documents=boundaries(batch.documents))
        return batch

    def __getitems__(self, positions: tuple) -> Batch | Exception:  # called by DataLoader
        try:
            return to_shared_memory(retry(lambda: self.rows(*positions)))
        except (ConfigError, Failed) as e:
            return e  # raised from a loader process, it would come with a traceback around it

    def prompt(self) -> torch.Tensor:
        """Ids [1, n] to sample from: the first prompt, else the beginning of a document."""
        batch = self.batch(0, 1)
        if batch.targets is None:  # a stream: a document begins after an end-of-text
            begin = batch.tokens[:, :1] if self.end_of_text is None else [[self.end_of_text]]
            return torch.as_tensor(begin).long()
        counted = (batch.targets[0] != IGNORE).nonzero()
        return batch.tokens[:, : int(counted[0]) + 1 if len(counted) else 1].long()

    def answer(self, ids: list[int], n: int) -> str:
        """The text of the ids that a model wrote after a prompt of n."""
        if not self.has_prompts:
            return self.decode(ids[int(ids[0] == self.end_of_text) :])
        answer = [*itertools.takewhile(lambda i: i != self.end_of_text, ids[n:])]
        return f"{self.decode(ids[:n])}\n→ {self.decode(answer)}"

    def decode(self, ids: list[int]) -> str:
        return decode("bytes" if self.tokenizer == "bytes" else self.tokenizer_folder, ids)


class Mixture(Samples):
    """All datasets in their proportions, in the order given by `seed`. Raises ConfigError."""

    ROUND = 8  # padded rows have a multiple of this length, for matrix units

    def __init__(self, datasets: list[Dataset], seed: int, vocab_size: int | None = None):
        self.datasets, self.seq_len = datasets, datasets[0].seq_len
        self.mode, self.row_lengths_vary = datasets[0].mode, datasets[0].row_lengths_vary
        self.has_prompts = any(d.has_prompts for d in datasets)
        self.n_samples = sum(d.n_samples for d in datasets)
        self.n_tokens = sum(d.n_tokens for d in datasets)
        files = [file for d in datasets for file in d.files]
        about = read_sidecars(files, vocab_size)
        self.vocab_size, self.tokenizer, self.tokenizer_folder, self.end_of_text = about
        if all(file.meta.get("bytes") for file in files) and not self.has_prompts:
            # a begin-of-text has no bytes, and in a document of its own nothing predicts it
            begun = [sum(f.meta["documents"] for f in d.files
                         if f.meta.get("prefix") and d.mode != "stream") for d in datasets]
            self.bytes_per_token = [sum(f.meta["bytes"] for f in d.files) / (d.n_tokens - n)
                                    for d, n in zip(datasets, begun, strict=True)]
        self.fingerprint = [retry(partial(file.fingerprint, len(files))) for file in files]
        stages = [(begin, [d.weights[begin] for d in datasets]) for begin in datasets[0].weights]
        self.order = Order([d.n_samples for d in datasets], stages[0][1], seed, stages[1:])

    def per_sample(self, what: str, source: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """The "lengths" or "targets" of these samples: documents, or rows of several."""
        out = np.empty(len(source), np.int64)
        for k in np.unique(source):
            mine = source == k
            out[mine] = getattr(self.datasets[k], what)[sample[mine]]
        return out

    def count_tokens(self, start: int, n: int) -> int:
        if self.mode == "stream":
            return super().count_tokens(start, n)
        return int(self.per_sample("lengths", *self.order(start, start + n)).sum())

    def batch(self, start: int, stop: int) -> Batch:
        """As Samples.batch, with ids of 2 or 4 bytes. Raises ConfigError if an id is too large."""
        source, sample = self.order(start, stop)
        length = self.seq_len
        if self.row_lengths_vary:
            longest = int(self.per_sample("lengths", source, sample).max())
            length = min(-(-longest // self.ROUND) * self.ROUND, length)
        read = [self.datasets[k].read(sample[source == k], length, self.end_of_text or 0)
                for k in np.unique(source)]
        back = np.argsort(np.argsort(source, kind="stable"))  # in the order of positions
        tokens, targets, documents = (
            None if parts[0] is None else np.concatenate(parts)[back]
            for parts in zip(*read, strict=True))
        for ids, shift in ((tokens, 0), (targets, 1)):  # a target is the next token
            if ids is not None and ids.max() >= self.vocab_size:
                row, place = np.argwhere(ids >= self.vocab_size)[0]
                path, index = self.datasets[source[row]].find(sample[row], place)
                raise ConfigError(f"{path}: token id {ids[row, place]} at token {index + shift:,}; "
                                  f"expected ids below --vocab_size {self.vocab_size}")
        arrays = tokens, targets, documents, source if len(self.datasets) > 1 else None
        return Batch(*(None if a is None else torch.from_numpy(a) for a in arrays))


def load_mixture(paths: list[str], split: str, seq_len: int, seed: int,
                 vocab_size: int | None = None, option: str = "--data",
                 mode: str = "auto", later: dict | None = None) -> Mixture | None:
    """The mixture of the PATH[:WEIGHT] sources that `option` names; None if --data has no
    validation data beside it. mode: as --data_mode; later: from `split_stages`. Raises ConfigError.
    """
    if not (sources := find_sources(paths, split, option, later)):
        return None
    prompts = any(Path(f"{file}.mask").exists() for _, files, _ in sources for file in files)
    make = Stream
    if mode in ("documents", "packed") or mode == "auto" and prompts:
        make = partial(Documents, packing=mode == "packed")
    datasets = [retry(partial(make, *source, seq_len)) for source in sources]
    return Mixture(datasets, seed, vocab_size)


def load_data(cfg: Config) -> tuple[Mixture, Mixture | None]:
    """Training and validation data; sets cfg.vocab_size and cfg.data_mode. Raises ConfigError."""
    val_option = "--val_data" if cfg.val_data else "--data"
    later = split_stages(cfg.stage, cfg.max_steps, cfg.batch_size)

    def load(paths: list[str], split: str, option: str, seed: int) -> Mixture | None:
        return load_mixture(
            paths, split, cfg.seq_len, seed, None if cfg.resize_embeddings else cfg.vocab_size,
            option, cfg.data_mode, later if option == "--data" else None)

    if cfg.eval_only:  # the training data need not be there
        if (train_data := load(cfg.val_data or cfg.data, "val", val_option, 0)) is None:
            raise ConfigError("--eval_only: no validation data; name some with --val_data")
    else:
        train_data = load(cfg.data, "train", "--data", cfg.seed)
        train_data.group_by_length(train_data.GROUP_STEPS, cfg.batch_size)
    cfg.vocab_size = max(cfg.vocab_size or 0, train_data.vocab_size)
    if train_data.mode != "stream":  # else "auto" stays, to find prompts in validation data alone
        cfg.data_mode = train_data.mode
    cfg.max_steps = cfg.max_steps or -(-cfg.epochs * train_data.n_samples // cfg.batch_size)
    val_data = train_data if cfg.eval_only else load(cfg.val_data or cfg.data, "val", val_option, 0)
    if val_data:
        if val_data.mode != train_data.mode:  # by auto; in a stream, prompts would count
            raise ConfigError(f"{val_option}: validation data with prompts, training data without; "
                              "expected --data_mode documents, or stream to count prompts")
        if tokenizer_hash(val_data.tokenizer) != tokenizer_hash(train_data.tokenizer):
            raise ConfigError(f"{val_option}: its tokenizer is {val_data.tokenizer or 'unknown'}, "
                              f"but --data has {train_data.tokenizer or 'unknown'}")
        if val_data.vocab_size > cfg.vocab_size:  # as when a fork adds an id
            raise ConfigError(f"{val_option}: has ids below {val_data.vocab_size}, --data only "
                              f"below {cfg.vocab_size}")
        n, order = eval_samples(cfg, val_data), val_data.order
        stages = [(begin, [each.weights[0] for each in val_data.datasets]) for begin in (0, n)]
        if n == val_data.n_samples:  # all: one set after another, whatever the weights
            only = np.identity(len(order.sizes), int).tolist()
            stages = [(sum(order.sizes[:k]), weights) for k, weights in enumerate(only)]
        val_data.order = Order(order.sizes, stages[0][1], order.seed, stages[1:])
        val_data.group_by_length(1, n)  # in one window of n: the samples stay the same
        counted = val_data.mode == "stream" or val_data.per_sample("targets", *val_data.order(0, n))
        if not np.any(counted) and (cfg.eval_interval or cfg.eval_only):
            raise ConfigError(f"{val_option}: none of the {n} sequences of an evaluation has a "
                              "target that counts; expected a larger --eval_steps")
    elif cfg.patience:
        raise ConfigError("--patience: no validation data; name some with --val_data")
    cfg.data_mode = train_data.mode  # no longer auto
    return train_data, val_data


def eval_samples(cfg: Config, data: Mixture) -> int:
    """The number of samples in one evaluation, at most all of them; 0 eval_steps means all."""
    return min(cfg.eval_steps * cfg.batch_size or data.n_samples, data.n_samples)


def what_is_evaluated(cfg: Config, data: Mixture | None) -> dict:
    """The data and options behind a validation loss: losses compare only if these are equal."""
    if data is None or cfg.eval_only:
        return {}
    n = eval_samples(cfg, data)  # a full evaluation ignores the weights
    weights = [each.weights[0] if n < data.n_samples else each.n_samples for each in data.datasets]
    files = repr((data.fingerprint, [*map(str, weights)]))
    return {"validation data": hashlib.blake2b(files.encode(), digest_size=8).hexdigest(),
            "eval_steps": n, "seq_len": cfg.seq_len, "ema": cfg.ema > 0}


# --- the loader ------------------------------------------------------------------------------


def loader(data: Mixture, cfg: Config, position: int, steps: int, ranks: Ranks):
    """Yields this rank's micro-batches of the next `steps` steps, from sample `position` on.

    One is always on its way to the device while the one before it is computed.
    """
    n = cfg.batch_size

    def positions():
        for step in range(steps):
            begin, end = data.share(position + step * n, n, ranks.rank, ranks.world_size)
            largest_share = -(-n // ranks.world_size)  # all ranks yield as many micro-batches
            for start in range(begin, begin + largest_share, ranks.micro_batch):
                yield start, start + ranks.micro_batch, end

    batches = DataLoader(
        data, batch_sampler=positions(), num_workers=ranks.workers, worker_init_fn=leave_to_parent,
        collate_fn=default_convert,  # nothing to collate: Mixture returns whole micro-batches
        pin_memory=cfg.pin_memory and ranks.device.type == "cuda",
        prefetch_factor=cfg.prefetch_factor if ranks.workers else None,
        multiprocessing_context=FORK if ranks.workers else None,
        generator=torch.Generator())  # the default would use up dropout's random numbers
    ahead = []
    for (start, _, end), batch in zip(positions(), batches, strict=True):
        if isinstance(batch, Exception):
            raise batch
        ahead.append(batch.to(ranks.device, end - start))
        if len(ahead) > 1:
            yield ahead.pop(0)
    yield from ahead


def eval_batches(data: Mixture, n: int, ranks: Ranks):
    """This rank's micro-batches of the first n samples, as many on all ranks; dummies masked."""
    for start in range(0, n, ranks.micro_batch * ranks.world_size):
        first = start + ranks.rank * ranks.micro_batch
        yield data.rows(first, first + ranks.micro_batch, n).to(ranks.device, n - first)
