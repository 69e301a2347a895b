"""Token files and their sidecars, read and written."""

import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from steady.options import ConfigError, expect_file

SHARD_MAGIC = {20240520: np.uint16, 20240801: np.uint32}  # llm.c, modded-nanogpt; llm.c's Llama 3
BYTES_END_OF_TEXT = 256  # the "bytes" tokenizer: ids 0 … 255 are bytes, 256 ends a document
WIDTH_SAMPLE = 1 << 15  # tokens of a file read to see how wide its ids are
CONVERT = "np.asarray(ids, np.uint32).tofile(PATH)"
GPT2_VOCAB = 50257  # assumed without a sidecar, unless --vocab_size says otherwise
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 4096  # read from each file to notice other content
MANY_FILES, FEW_BLOCKS = 16, 4  # blocks of each file if there are more files than this

IGNORE = -100  # a target that the loss ignores; torch's default

# --- finding ---------------------------------------------------------------------------------


def find_files(path: str, split: str, option: str = "--data") -> list[Path]:
    """The token files of `split` ("train" or "val") in a folder, or the file `path` itself.

    Raises ConfigError, naming `option`.
    """
    root = Path(os.path.expanduser(path))
    if root.is_dir():
        return sorted(root.glob(f"{split}.bin")) or sorted(root.glob(f"*_{split}*.bin"))
    if not root.exists() or root.suffix != ".bin":
        found = "not token ids" if root.exists() else "no such file or folder"
        raise ConfigError(f"{option} {path}: {found}; expected a folder, or a file that ends in "
                          ".bin, of token ids: python data.py makes them from text")
    return [root]


def find_sources(paths: list[str], split: str, option: str, later: dict | None = None) -> list:
    """(name, token files, weights) of each PATH[:WEIGHT] that `option` names, or a later stage.

    later: from `split_stages`. weights: {first position of a stage: its weight, None by size}. For
    --data, sources without validation data are left out, and stages make one. Raises ConfigError.
    """
    found, weights, stages = [], {}, {0: paths} | (later or {})
    for begin, specs in stages.items():
        flag = "--stage" if begin else option
        sources = [split_weight(spec, flag) for spec in specs]
        if len({weight is None for _, weight in sources}) > 1:
            raise ConfigError(f"{flag} {' '.join(specs)}: give every source a weight, or none")
        if len({os.path.abspath(os.path.expanduser(p)) for p, _ in sources}) < len(sources):
            raise ConfigError(f"{flag} {' '.join(specs)}: names a source twice; expected each once")
        for path, weight in sources:
            weights.setdefault(path, dict.fromkeys(stages, Fraction(0)))[begin] = weight
    beside = split == "val" and option == "--data"
    for path, of_stages in weights.items():
        if beside and Path(os.path.expanduser(path)).is_file():
            continue  # a training file has no validation data beside it
        flag = option if of_stages[0] != 0 else "--stage"
        files = find_files(stdlib(split) if path == "stdlib" else path, split, flag)
        if files:
            found.append((path, files, {0: None} if beside and later else of_stages))
        elif not beside:
            raise ConfigError(f"{flag} {path}: no {split}.bin, no *_{split}*.bin; see docs/data.md")
    names = [Path(os.path.abspath(path)).name.removesuffix(".bin") for path, *_ in found]
    if len(set(names)) < len(names):  # a/train.bin and b/train.bin
        return found
    return [(name, *rest) for name, (_, *rest) in zip(names, found, strict=True)]


def split_stages(words: list[str], max_steps: int, batch_size: int) -> dict[int, list[str]]:
    """Words of --stage → {first position: sources}, the last at each step. Raises ConfigError."""
    at = [i for i, w in enumerate(words) if re.fullmatch(r"[+-]?\d*\.?\d+", w)] + [len(words)]
    stages = [(float(words[i]), words[i + 1 : j]) for i, j in zip(at, at[1:], strict=False)]
    shares = [0.0, *(share for share, _ in stages), 1.0]
    if words[: at[0]] or shares != sorted({*shares}) or [] in [s for _, s in stages]:
        raise ConfigError(f"--stage {' '.join(words)}: expected rising shares of max_steps between "
                          "0 and 1, after each its sources: 0.8 PATH[:WEIGHT] ...")
    return {round(share * max_steps) * batch_size: sources for share, sources in stages}


def split_weight(spec: str, option: str = "--data") -> tuple[str, Fraction | None]:
    """"PATH:WEIGHT" → (path, weight); weight may be None."""
    path, _, text = spec.rpartition(":")
    try:  # as a Fraction, 1e999999999 would fill the memory
        weight = float(path and text)
    except ValueError:
        return str(Path(spec)), None  # the colon belongs to the path
    if not 1e-9 <= weight <= 1e9:  # also nan
        raise ConfigError(f"{option} {spec}: expected a weight above 0, from 1e-9 to 1e9")
    return str(Path(path)), Fraction(text.replace("_", ""))


# --- reading ---------------------------------------------------------------------------------


class TokenFile:
    """One memory-mapped file of token ids: ours, nanoGPT's, or a shard of llm.c's format.

    tokens [n_tokens]; mask [n_tokens], 0 for prompts, or None. Raises ConfigError.
    """

    def __init__(self, path: Path):
        for suffix in ("", ".json", ".docs", ".mask"):
            expect_file(f"{path}{suffix}")
        self.path, self.meta = path, read_sidecar(Path(f"{path}.json"))
        self.dtype, offset = np.dtype(self.meta.get("dtype", "uint16")), 0
        self.is_typed = "dtype" in self.meta
        header = np.fromfile(path, np.int32, 3)
        if len(header) == 3 and int(header[0]) in SHARD_MAGIC:
            self.dtype, offset = np.dtype(SHARD_MAGIC[int(header[0])]), 256 * 4  # 256 int32
            self.is_typed, self.meta["tokens"] = True, int(header[2])
        self.size = size = os.stat(path).st_size
        self.n_tokens, rest = divmod(size - offset, self.dtype.itemsize)
        expected = self.meta.get("tokens", max(1, self.n_tokens))
        if rest or self.n_tokens != expected or self.n_tokens <= 0:
            raise ConfigError(f"{path}: {size:,} bytes; expected {expected:,} {self.dtype} tokens "
                              f"after a header of {offset} bytes: is the file complete?")
        self.mapped = np.memmap(path, self.dtype, "r", offset)
        self.tokens = np.asarray(self.mapped)  # a memmap is slower
        if header[:2].tobytes().startswith(b"\x93NUMPY"):
            raise ConfigError(f"{path}: is an .npy file; expected its ids alone: {CONVERT}")
        start = self.tokens[:WIDTH_SAMPLE]  # in wider ids, every second uint16 is an upper half
        if not self.is_typed and len(start) >= 64 and start[1::2].max() <= 3 < start.max():
            self.refuse_type("every second id is below 4, as of ids of 4 or 8 bytes")
        self.mask, masked = None, Path(f"{path}.mask")
        if masked.exists():
            if (size := os.stat(masked).st_size) != self.n_tokens:
                raise ConfigError(f"{masked}: {size:,} bytes; expected one for each of the "
                                  f"{self.n_tokens:,} tokens of {path.name}")
            self.mask = np.asarray(np.memmap(masked, np.uint8, "r"))

    def __reduce__(self):  # loader processes that are not forked map the file again
        return TokenFile, (self.path,)

    def require_complete(self):
        """Raise ConfigError if the file was cut: reading beyond its end kills the process."""
        now = self.mapped.base.size()  # of the mapped file: another may have taken its place
        if now < self.size:
            raise ConfigError(f"{self.path}: was cut to {now:,} bytes while in use; "
                              f"expected {self.size:,}; restore it and use --auto_resume")

    def refuse_type(self, reason: str):
        raise ConfigError(f"{self.path}: read as uint16, as nothing states its type, but {reason}; "
                          f'name it in {self.path.name}.json: {{"dtype": "uint32"}} or "uint16"; '
                          f"ids of 8 bytes first become uint32: {CONVERT}")

    def fingerprint(self, n_files: int) -> list:
        """Name, tokens, checksum, and a hash of sampled content: the same wherever it lies."""
        files = {suffix: path for suffix in ("", ".docs", ".mask")
                 if (path := Path(f"{self.path}{suffix}")).exists()}
        sample = sampled_hash(files, FEW_BLOCKS if n_files > MANY_FILES else SAMPLE_BLOCKS)
        return [self.path.name, self.n_tokens, self.meta.get("checksum", ""), sample]

    def documents(self) -> np.ndarray:
        """The first token of each document, and the end: [documents + 1]. Raises ConfigError."""
        path = Path(f"{self.path}.docs")
        if not path.exists():
            raise ConfigError(f"{self.path}: has no document offsets ({path.name}); "
                              "make it with python data.py, or use --data_mode stream")
        at = np.fromfile(path, np.uint64).astype(np.int64)
        if len(at) < 2 or at[0] or at[-1] != self.n_tokens or (np.diff(at) < 0).any():
            raise ConfigError(f"{path}: does not belong to {self.path.name}: expected places from "
                              f"0 to {self.n_tokens:,}, each after the one before")
        return at


def sampled_hash(files: dict[str, Path], blocks: int = SAMPLE_BLOCKS) -> str:
    """A hash of the sizes of files, by name, and of blocks spread evenly over each."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files.items():
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{name}:{size};".encode())
            last = max(0, size - SAMPLE_BYTES)
            for place in sorted({last * i // (blocks - 1) for i in range(blocks)}):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
    return digest.hexdigest()


def read_sidecar(path: Path) -> dict:
    """The sidecar of a token file; {} if there is none. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        meta = json.loads(path.read_text("utf-8"))
        meta = {name: value for name, value in meta.items() if value is not None}
        most = dict(tokens=2**62, bytes=2**62, vocab_size=2**32)
        most["end_of_text"] = {"uint16": 2**16, "uint32": 2**32}[meta.get("dtype", "uint16")] - 1
        if not isinstance(meta.get("tokenizer", ""), str):
            raise ValueError("tokenizer is not a name")
        for name in most.keys() & meta.keys():
            if type(meta[name]) is not int or not 0 <= meta[name] <= most[name]:
                raise ValueError(f"{name} is not a whole number up to {most[name]:,}")
    except (ValueError, AttributeError, LookupError, TypeError, PermissionError) as e:
        raise ConfigError(f"{path}: expected an object of JSON as python data.py writes, with "
                          f"dtype uint16 or uint32: {e}") from None
    return meta


def tokenizer_hash(name: str | None) -> str:
    """The hash in "name@hash": a copy in another folder is the same tokenizer."""
    return (name or "").rpartition("@")[2]


def read_sidecars(files: list[TokenFile], vocab_size: int | None):
    """(vocabulary size, name of the tokenizer, its folder, end-of-text id) of files used together.

    vocab_size: as in the options, or None. Raises ConfigError if the files do not go together.
    """
    metas = [file.meta for file in files]
    of_data = max(meta.get("vocab_size", vocab_size or GPT2_VOCAB) for meta in metas)
    if vocab_size and of_data > vocab_size:
        raise ConfigError(f"--vocab_size {vocab_size}: the tokenizer of the data has {of_data} "
                          "ids; --resize_embeddings adds rows if --init_from has this tokenizer")
    for file in files:
        if not file.is_typed and (largest := vocab_size or of_data) > 1 << 16:
            file.refuse_type(f"the vocabulary has {largest:,} ids")
    named = {file.meta.get("tokenizer") or None: file.path for file in files}
    if len(set(map(tokenizer_hash, named))) > 1:
        listed = ", ".join(f"{path} {name or 'unknown'}" for name, path in named.items())
        raise ConfigError(f"sources with different tokenizers: {listed}; expected only one")
    name = next(iter(named))
    beside = (file.path.parent / "tokenizer" for file in files if name not in (None, "bytes"))
    folder = next((str(path) for path in beside if path.is_dir()), None)
    end_of_text = next((m["end_of_text"] for m in metas if "end_of_text" in m), None)
    return vocab_size or of_data, name, folder, end_of_text


# --- writing ---------------------------------------------------------------------------------


class TokenWriter:
    """Writes a token file, its sidecar, .docs and .mask, piece by piece."""

    def __init__(self, path: Path, vocab_size: int, **meta):
        self.path = path
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.meta = dict(format=1, vocab_size=vocab_size, **meta)
        self.tokens = self.bytes = self.documents = 0  # written
        self.sha = hashlib.sha256()
        self.file, self.docs, self.mask = open(path, "wb"), open(f"{path}.docs", "wb"), None
        self.docs.write(np.uint64(0).tobytes())

    def add(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None, n_bytes: int):
        """Write ids [n], made of n_bytes of text.

        ends: indices in ids after the last token of a document; mask [n]: 0 for tokens that the
        loss ignores, or None. Raises ConfigError for an id outside the vocabulary.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.meta["vocab_size"]:
            raise ConfigError(f"{self.path}: token ids from {ids.min()} to {ids.max()}; "
                              f"expected ids below {self.meta['vocab_size']}")
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.sha.update(raw)
        if mask is not None and self.mask is None:  # the first: all tokens so far count
            self.mask = open(f"{self.path}.mask", "wb")
            for start in range(0, self.tokens, 1 << 18):  # there may be billions
                self.mask.write(b"\1" * min(1 << 18, self.tokens - start))
        if self.mask:
            self.mask.write(np.ones(len(ids), np.uint8) if mask is None else mask.tobytes())
        self.docs.write((self.tokens + ends).astype(np.uint64).tobytes())
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.documents += len(ends)

    def close(self):
        """Write the sidecar, or delete files without a token."""
        for file in filter(None, (self.file, self.docs, self.mask)):
            file.close()
        if not self.tokens:
            os.remove(self.path)
            os.remove(f"{self.path}.docs")
            return
        meta = dict(self.meta, dtype=str(self.dtype), tokens=self.tokens, bytes=self.bytes,
                    documents=self.documents, checksum=self.sha.hexdigest())
        Path(f"{self.path}.json").write_text(json.dumps(meta, indent=1) + "\n")


def write_tokens(path: Path, documents: list[bytes]):
    """Write documents as a file of bytes, each with its end-of-text."""
    writer = TokenWriter(path, 257, tokenizer="bytes", end_of_text=BYTES_END_OF_TEXT)
    for document in documents:
        ids = np.append(np.frombuffer(document, np.uint8).astype(np.uint16), BYTES_END_OF_TEXT)
        writer.add(ids, np.array([len(ids)]), None, len(document))
    writer.close()


def share_of(text: bytes, digest=hashlib.blake2b) -> float:
    """A hash from 0 to 1: below val_fraction, the text is for validation."""
    return int.from_bytes(digest(text).digest()[:8], "big") / 2**64


def stdlib(split: str) -> str:
    """A folder with the source of Python's standard library as bytes, made on first use.

    Every machine with Python has it, so a first run needs no download. One file in twenty, picked
    by a hash of its name, is for validation.
    """
    home = os.path.expanduser("~")  # stays ~ for a user without HOME and account: /~ is refused
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("/", home, ".cache")) / "steady"
    folder = cache / f"stdlib-2-{sys.implementation.name}-{sys.version.split()[0]}"
    if (folder / f"{split}.bin").exists():
        return str(folder)
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {"train": [], "val": []}
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - skip)
        for file in sorted(Path(directory) / name for name in names if name.endswith(".py")):
            name = file.relative_to(root).as_posix().encode()
            part = "val" if share_of(name, hashlib.sha256) < 13 / 256 else "train"
            documents[part].append(file.read_bytes())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as draft:
            for part, texts in documents.items():
                write_tokens(Path(draft, f"{part}.bin"), texts)
            for file in sorted(Path(draft).iterdir(), reverse=True):  # .bin after its sidecars
                os.replace(file, folder / file.name)
    except OSError as e:
        raise ConfigError(f"{cache}: cannot hold the default data ({e.strerror}); name a folder "
                          "in XDG_CACHE_HOME, or your data with --data") from None
    return str(folder)
