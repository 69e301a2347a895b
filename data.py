"""Token files, the order in which they are read, and the loader.

The sample at global position g (0, 1, 2, … over the whole run) is a function of (seed, g) alone,
and step s trains on positions s * batch_size … (s + 1) * batch_size - 1. So a run resumes at any
step in constant time, with no loader state, and 1 or 8 processes see the same samples in the same
steps.

Another data source replaces `Mixture`: give it `batch(start, stop) -> tensor [stop - start, seq_len
+ 1]` that answers the same for the same positions, and everything said above stays true.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import sys
import sysconfig
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import DataLoader

from config import Config, ConfigError, parse, retry

# --- the order -------------------------------------------------------------------------------


def mix(x: np.ndarray) -> np.ndarray:
    """Hash each uint64 of x to a uint64 (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where permutation number `key` of 0 … n - 1 sends i; all uint64, no table, O(1) an element.

    A Feistel network on pairs (left, right) of Z_a x Z_b, which is a bijection for any round
    function. a * b exceeds n by less than sqrt(n) + 1, and a result that is not below n is sent
    round again ("cycle walking", Black and Rogaway 2002), so that few elements go twice.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    a, b = np.uint64(a), np.uint64(b)
    out, todo = i.copy(), np.arange(len(i))
    while len(todo):
        left, right = np.divmod(out[todo], b)
        for round in range(4):
            round_key = mix(key[todo] + np.uint64(2 * round))
            left = (left + mix(right ^ round_key) % a) % a
            right = (right + mix(left ^ ~round_key) % b) % b
        out[todo] = left * b + right
        todo = todo[out[todo] >= n]
    return out


def mixture_pattern(weights: list[Fraction]) -> np.ndarray:
    """The repeating order of datasets: dataset k fills a share of exactly weights[k] of it.

    The pattern is as short as the weights allow, at most 10,000 (where counts are rounded), and
    each dataset is spread evenly over it.
    """
    weights = [w / sum(weights) for w in weights]
    length = min(10_000, math.lcm(*(w.denominator for w in weights)))
    counts = [math.floor(w * length) for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda k: counts[k] - weights[k] * length)
    for k in by_remainder[: length - sum(counts)]:
        counts[k] += 1
    slots = [(Fraction(2 * i + 1, 2 * c), k) for k, c in enumerate(counts) for i in range(c)]
    return np.array([k for _, k in sorted(slots)])


# --- token files -----------------------------------------------------------------------------

GPT2_VOCAB = 50257  # what files without a sidecar hold, unless --vocab_size says otherwise
SHARD_MAGIC = {20240520: np.uint16, 20240801: np.uint32}  # llm.c, modded-nanogpt; llm.c's Llama 3
SHARD_HEADER_BYTES = 256 * 4


class TokenFile:
    """One memory-mapped file of token ids: ours, nanoGPT's, or a shard of llm.c's format.

    blocks[b] are the seq_len + 1 tokens of block b, the last of which is also the first of the
    next; where the file is shorter than one block there is none.

    Raises ConfigError where the file's size is not what its format says.
    """

    def __init__(self, path: Path, seq_len: int):
        self.path, self.seq_len = path, seq_len
        size = path.stat().st_size
        sidecar = Path(f"{path}.json")
        try:
            self.meta = json.loads(sidecar.read_text()) if sidecar.exists() else {}
        except ValueError as e:
            raise ConfigError(f"{sidecar}: not JSON: {e}") from None
        header = np.fromfile(path, np.int32, 3)
        self.dtype, self.offset = np.dtype(self.meta.get("dtype", "uint16")), 0
        if len(header) == 3 and int(header[0]) in SHARD_MAGIC:
            self.dtype = np.dtype(SHARD_MAGIC[int(header[0])])
            self.offset = SHARD_HEADER_BYTES
            self.meta["tokens"] = int(header[2])
        self.n_tokens, rest = divmod(size - self.offset, self.dtype.itemsize)
        expected = self.meta.get("tokens", self.n_tokens)
        if rest or self.n_tokens != expected or self.n_tokens <= 0:
            raise ConfigError(
                f"{path}: {size:,} bytes; expected {expected:,} tokens of {self.dtype.itemsize} "
                f"bytes after a header of {self.offset}: is the file whole?"
            )
        self.map()

    def map(self):
        mapped = np.memmap(self.path, self.dtype, "r", self.offset, (self.n_tokens,))
        self.tokens = np.asarray(mapped)  # indexing a memmap itself is several times slower
        self.blocks = np.empty((0, self.seq_len + 1), self.dtype)
        if self.n_tokens > self.seq_len:
            self.blocks = sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len]

    def __getstate__(self):  # a loader process that does not fork maps the file itself
        return {**self.__dict__, "tokens": None, "blocks": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.map()


def find_files(path: str, split: str, option: str = "--data") -> list[Path]:
    """The token files of `split` ("train" or "val") in a folder, or the one file that path is."""
    root = Path(path).expanduser()
    if root.is_dir():
        single = root / f"{split}.bin"
        return [single] if single.exists() else sorted(root.glob(f"*_{split}*.bin"))
    if not root.exists():
        raise ConfigError(f"{option} {path}: no such file or folder")
    if root.suffix != ".bin":
        raise ConfigError(f"{option} {path}: expected a file of token ids, which ends in .bin")
    return [root]


class Dataset:
    """One source of the mixture: blocks of seq_len + 1 tokens that overlap by one."""

    def __init__(self, name: str, files: list[Path], seq_len: int, weight: Fraction | None):
        self.name, self.seq_len = name, seq_len
        self.files = [retry(lambda file=file: TokenFile(file, seq_len)) for file in files]
        blocks = [len(file.blocks) for file in self.files]
        self.first_block = np.cumsum([0, *blocks])  # of each file, and the end
        self.n_blocks = int(self.first_block[-1])
        self.n_tokens = sum(file.n_tokens for file in self.files)
        self.dtype = np.result_type(*(file.dtype for file in self.files))
        self.weight = weight if weight is not None else Fraction(max(1, self.n_blocks))
        if not self.n_blocks:
            raise ConfigError(
                f"{files[0]}: {self.n_tokens:,} tokens; expected more than --seq_len {seq_len}"
            )

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Token ids [len(blocks), seq_len + 1]."""
        if len(self.files) == 1:
            return self.files[0].blocks[blocks]  # one copy of whole rows
        file_of_block = self.first_block.searchsorted(blocks, "right") - 1
        out = np.empty((len(blocks), self.seq_len + 1), self.dtype)
        for i in np.unique(file_of_block):
            mine = file_of_block == i
            out[mine] = self.files[i].blocks[blocks[mine] - self.first_block[i]]
        return out

    def find(self, block: int) -> tuple[Path, int]:
        """The file that a block is in, and where in it the block begins, in tokens."""
        i = int(self.first_block.searchsorted(block, "right")) - 1
        return self.files[i].path, int(block - self.first_block[i]) * self.seq_len


class Mixture:
    """The training data: all datasets in their proportions, in the order that `seed` gives."""

    WINDOW = 4096  # positions whose order is computed at once: 0.4 µs each, 2.4 µs in 64s

    def __init__(self, datasets: list[Dataset], seed: int, vocab_size: int | None = None):
        self.datasets, self.seed = datasets, seed
        self.seq_len = datasets[0].seq_len
        metas = [file.meta for d in datasets for file in d.files]
        data_vocab = max(meta.get("vocab_size", 0) for meta in metas)
        if any("vocab_size" not in meta for meta in metas):
            data_vocab = max(data_vocab, vocab_size or GPT2_VOCAB)
        self.vocab_size = vocab_size or data_vocab
        if data_vocab > self.vocab_size:
            raise ConfigError(
                f"--vocab_size {vocab_size}: the tokenizer of the data has {data_vocab} ids"
            )
        self.tokenizer = metas[0].get("tokenizer")
        self.end_of_text = metas[0].get("end_of_text")
        n_bytes = [meta.get("bytes") for meta in metas]
        self.bytes_per_token = None
        if all(n_bytes):
            self.bytes_per_token = sum(n_bytes) / sum(d.n_tokens for d in datasets)
        self.dtype = np.result_type(*(d.dtype for d in datasets))
        self.pattern = mixture_pattern([d.weight for d in datasets])
        self.rank_in_pattern = np.zeros_like(self.pattern)
        for k in range(len(datasets)):
            mine = self.pattern == k
            self.rank_in_pattern[mine] = np.arange(mine.sum())
        self._window = (None, None)

    @property
    def n_blocks(self) -> int:
        return sum(d.n_blocks for d in self.datasets)

    @property
    def n_tokens(self) -> int:
        return sum(d.n_tokens for d in self.datasets)

    def fingerprint(self) -> list[list]:
        """What must be unchanged for a run to continue on the same data, also if it has moved."""
        files = [file for d in self.datasets for file in d.files]
        return [[f.path.name, f.n_tokens, f.meta.get("checksum", "")] for f in files]

    def order(self, start: int, stop: int) -> np.ndarray:
        """[2, stop - start]: the dataset and the block of it at each global position."""
        windows = range(start // self.WINDOW, (stop - 1) // self.WINDOW + 1)
        found = [self._order_of_window(w) for w in windows]
        found = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        first = windows[0] * self.WINDOW
        return found[:, start - first : stop - first]

    def _order_of_window(self, window: int) -> np.ndarray:
        cached, found = self._window
        if cached != window:
            g = np.arange(window * self.WINDOW, (window + 1) * self.WINDOW, dtype=np.uint64)
            cycle, r = np.divmod(g, np.uint64(len(self.pattern)))
            source = self.pattern[r]
            block = np.empty_like(g)
            for k, dataset in enumerate(self.datasets):
                mine = np.flatnonzero(source == k)
                if not len(mine):
                    continue
                per_cycle = np.uint64((self.pattern == k).sum())
                index = cycle[mine] * per_cycle + self.rank_in_pattern[r[mine]].astype(np.uint64)
                epoch, i = np.divmod(index, np.uint64(dataset.n_blocks))
                key = mix(mix(np.uint64([self.seed]) + np.uint64(k << 32)) + epoch)
                block[mine] = permute(i, dataset.n_blocks, key)
            found = np.stack((source, block.astype(np.int64)))
            self._window = (window, found)
        return found

    def batch(self, start: int, stop: int) -> torch.Tensor:
        """Token ids [stop - start, seq_len + 1] of the samples at these positions.

        Ids stay 2 or 4 bytes wide, a quarter or half of what the model wants, until they are on
        its device. Raises ConfigError for an id that is not in the vocabulary.
        """
        source, block = self.order(start, stop)
        if len(self.datasets) == 1:
            out = self.datasets[0].read(block)
        else:
            out = np.empty((stop - start, self.seq_len + 1), self.dtype)
            for k in np.unique(source):
                mine = source == k
                out[mine] = self.datasets[k].read(block[mine])
        if out.max() >= self.vocab_size:
            row, column = np.argwhere(out >= self.vocab_size)[0]
            path, first = self.datasets[source[row]].find(block[row])
            raise ConfigError(
                f"{path}: token id {out[row, column]} at token {first + column:,}; expected ids "
                f"below --vocab_size {self.vocab_size}"
            )
        return torch.from_numpy(out)

    def __getitems__(self, positions: range) -> torch.Tensor:  # what DataLoader calls
        return retry(lambda: self.batch(positions.start, positions.stop))


def load_mixture(
    paths: list[str], split: str, seq_len: int, seed: int, vocab_size: int | None = None,
    option: str = "--data",
) -> Mixture | None:  # fmt: skip
    """The mixture of the PATH[:WEIGHT] sources that `option` names.

    The validation data beside --data may be missing: then this is None.
    """
    datasets, sources = [], [split_weight(spec) for spec in paths]
    if len({weight is None for _, weight in sources}) > 1:
        raise ConfigError(f"{option} {' '.join(paths)}: give every source a weight, or none")
    for path, weight in sources:
        optional = split == "val" and option == "--data"
        if optional and Path(path).is_file():
            continue  # a file to train on has nothing beside it
        files = find_files(stdlib() if path == "stdlib" else path, split, option)
        if files:
            name = "stdlib" if path == "stdlib" else Path(path).stem
            datasets.append(Dataset(name, files, seq_len, weight))
        elif not optional:
            raise ConfigError(f"{option} {path}: no {split}.bin and no *_{split}*.bin in there")
    return Mixture(datasets, seed, vocab_size) if datasets else None


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    path, _, weight = spec.rpartition(":")
    try:
        weight = Fraction(weight) if path else None
    except ValueError:
        return spec, None  # the colon belongs to the path
    if weight is not None and weight <= 0:
        raise ConfigError(f"--data {spec}: expected a weight above 0")
    return (path, weight) if path else (spec, None)


# --- the loader ------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may run on (a container or a job may have fewer than the machine)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def pick_workers(num_workers: str, device: torch.device, local_world_size: int) -> int:
    """Loader processes for this rank.

    auto is 0 on a CPU: a batch of 64 x 1,024 tokens takes 0.23 ms to read from the page cache and
    1.8 ms to get from another process, which also takes a core from the model. With CUDA it is
    up to 2, so that a page that must come from the disk does not hold up the launch of kernels.
    """
    if num_workers != "auto":
        return int(num_workers)
    return min(2, usable_cores() // local_world_size) if device.type == "cuda" else 0


def leave_signals_to_parent(worker: int):
    """Ctrl-C and SIGTERM reach the whole process group; the trainer decides when loaders end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch  # Mixture gives whole micro-batches


def loader(
    data: Mixture, cfg: Config, start_step: int, micro_batch: int, rank: int, world_size: int,
    device: torch.device, workers: int, offset: int = 0,
):  # fmt: skip
    """Micro-batches (tokens, targets), each [micro_batch, seq_len], on `device`.

    From step `start_step` to step cfg.max_steps - 1; step s takes the samples that begin with
    s * cfg.batch_size + offset. One micro-batch is always on its way to the device while the one
    before it is computed.
    """

    def positions():
        per_rank = cfg.batch_size // world_size
        for step in range(start_step, cfg.max_steps):
            first = step * cfg.batch_size + offset + rank * per_rank
            for start in range(first, first + per_rank, micro_batch):
                yield range(start, start + micro_batch)

    pin = cfg.pin_memory and device.type == "cuda"
    batches = DataLoader(
        data,
        batch_sampler=positions(),
        collate_fn=as_it_is,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=cfg.prefetch_factor if workers else None,
        worker_init_fn=leave_signals_to_parent,
        generator=torch.Generator(),  # else it draws a seed from the one that dropout uses
    )
    ahead = None
    for batch in batches:
        ready, ahead = ahead, split_targets(batch, device)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def eval_batches(
    data: Mixture, max_samples: int, micro_batch: int, rank: int, world_size: int,
    device: torch.device,
):  # fmt: skip
    """This rank's share of the first `max_samples` samples, or of one epoch where that is less.

    Every rank yields as many micro-batches of the same shape; what is over is masked.
    """
    n, stride = min(max_samples, data.n_blocks), micro_batch * world_size
    for start in range(0, n, stride):
        first = start + rank * micro_batch
        tokens, targets = split_targets(data.batch(first, first + micro_batch), device)
        if first + micro_batch > n:
            targets = targets.clone()
            targets[max(0, n - first) :] = -100
        yield tokens, targets


def split_targets(batch: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T + 1] → inputs and the tokens that follow them on `device`, [B, T] each, int64."""
    if device.type == "cuda":  # a quarter of the bytes cross the bus; the GPU widens them
        batch = batch.to(device, non_blocking=True)  # asynchronous where the batch is pinned
    batch = batch.long().to(device)
    return batch[:, :-1], batch[:, 1:].contiguous()


# --- text ------------------------------------------------------------------------------------

BYTES_END_OF_TEXT = 256  # the "bytes" tokenizer: ids 0 … 255 are bytes, 256 ends a document


def decode(tokenizer: str | None, ids: list[int]) -> str:
    """The text of token ids; the ids themselves where no tokenizer is known."""
    if tokenizer == "bytes":
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    if tokenizer is None:
        return " ".join(map(str, ids))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer).decode(ids)


def write_tokens(path: Path, documents: list[bytes]):
    """Byte-level token file of whole documents, and the sidecar that describes it."""
    end = np.array([BYTES_END_OF_TEXT], np.uint16)
    parts = [part for d in documents for part in (np.frombuffer(d, np.uint8).astype("u2"), end)]
    tokens = np.concatenate(parts)
    tokens.tofile(path)
    meta = dict(
        format=1, tokenizer="bytes", vocab_size=257, end_of_text=BYTES_END_OF_TEXT,
        dtype="uint16", tokens=len(tokens), bytes=sum(map(len, documents)),
        documents=len(documents), checksum=hashlib.sha256(tokens.tobytes()).hexdigest(),
    )  # fmt: skip
    Path(f"{path}.json").write_text(json.dumps(meta, indent=1) + "\n")


def stdlib() -> str:
    """Folder with the source of Python's standard library as bytes; made at the first call.

    Every machine that has Python has it, so that a first run needs no download. One file in
    twenty, picked by a hash of its name, is for validation.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steady"
    python = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    folder = cache / f"stdlib-{python}"
    if folder.exists():
        return str(folder)
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {"train": [], "val": []}
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - skip)
        for file in sorted(Path(directory) / name for name in names if name.endswith(".py")):
            digest = hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()
            documents["val" if digest[0] < 256 / 20 else "train"].append(file.read_bytes())
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache))
    for split, texts in documents.items():
        write_tokens(building / f"{split}.bin", texts)
    try:
        building.rename(folder)  # all of it appears at once, also when two processes do this
    except OSError:
        shutil.rmtree(building)
    return str(folder)


# --- python data.py --------------------------------------------------------------------------


def show(run_dir: str, step: int):
    """Print the samples of update number `step` of a run, in the order of their positions."""
    if step < 1:
        raise ConfigError(f"step {step}: expected 1 or more, the number of an update")
    cfg = parse([], saved=f"{run_dir}/config.yaml")
    data = load_mixture(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.vocab_size)
    batch_size, offset = cfg.batch_size, 0
    with contextlib.suppress(OSError, ValueError), open(f"{run_dir}/metrics.jsonl") as file:
        for row in (json.loads(line) for line in file if '"order"' in line):
            if row["step"] < step:  # said where a process begins, for what it may have changed
                order = row["order"]
                data.seed, batch_size, offset = order["seed"], order["batch_size"], order["offset"]
    first = (step - 1) * batch_size + offset
    source, block = data.order(first, first + batch_size)
    tokens = data.batch(first, first + batch_size)
    for i in range(batch_size):
        dataset = data.datasets[source[i]]
        path, token = dataset.find(block[i])
        print(f"--- sample {first + i}: {dataset.name}, {path} from token {token:,}")
        print(decode(data.tokenizer, tokens[i].tolist()))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("data.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="print the samples that a run had in one step")
    shown.add_argument("run_dir")
    shown.add_argument("step", type=int, help="number of the update, from 1 on")
    args = parser.parse_args(argv)
    try:
        show(args.run_dir, args.step)
    except ConfigError as e:
        print(f"data.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main(sys.argv[1:]))
