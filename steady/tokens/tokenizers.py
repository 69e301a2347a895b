"""Tokenizers: loaded, made, copied into folders, and used to decode."""

import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

from steady.options import ConfigError
from steady.tokens.files import BYTES_END_OF_TEXT

MADE = "steady-files.json"  # marks a tokenizer folder that we made
GENERIC = "TokenizersBackend"  # class of transformers 5 for all that tokenizer.json describes
SETTINGS = "tokenizer_config.json"
OWN = ("*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template.*")  # its files


def load_tokenizer(name: str):
    """The tokenizer of transformers in a folder. Raises ConfigError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # a special class, such as Qwen2's, may not encode as its tokenizer.json says
    kind = PreTrainedTokenizerFast if Path(name, "tokenizer.json").exists() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(name)
        tokenizer("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic in Rust is not even an Exception
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"tokenizer {name}: cannot be loaded: {reason}") from e
    if tokenizer.is_fast:  # tokenizer.json may have them, left from its training
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        if hasattr(tokenizer.backend_tokenizer.model, "dropout"):  # of merges: random ids
            tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


loaded_tokenizer = lru_cache(load_tokenizer)


def decode(name: str | None, ids: list[int]) -> str:
    """The text of token ids. name: "bytes", a tokenizer's folder, or None for the ids as text."""
    if name == "bytes":
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    if name is None:
        return " ".join(map(str, ids))
    return loaded_tokenizer(name).decode(ids, clean_up_tokenization_spaces=False)


def text_start(tokenizer) -> list[int]:
    """The tokens before every text, even an empty one, such as Llama's bos."""
    return os.path.commonprefix([tokenizer(text)["input_ids"] for text in ("", "a")])


def end_of_text_ids(folder: Path) -> list[int]:
    """All ids that end a text according to the model's own files, if any."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids := [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]:
            return ids
    return []


def read_json(file: Path) -> dict:
    """The object in a JSON file; {} if there is none."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def byte_level_bpe(model, split_words: bool = True):
    """A tokenizer of transformers around a `model` of the tokenizers library.

    split_words: whether to split text into words first, so that no token spans two.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>",
                                   clean_up_tokenization_spaces=False)


def byte_tokenizer():
    """The "bytes" tokenizer for transformers: a byte-level BPE without merges."""
    from tokenizers import models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocab["<|endoftext|>"] = BYTES_END_OF_TEXT
    return byte_level_bpe(models.BPE(vocab, []), split_words=False)


def keep_tokenizer(source: Path, target: Path):
    """Copy the tokenizer files of a model, and add those that it lacks. Raises ConfigError."""
    load_tokenizer(str(source)).save_pretrained(target)
    made, own = read_json(target / SETTINGS), read_json(source / SETTINGS)
    for file in {file for pattern in OWN for file in source.glob(pattern)}:
        if file.name != "tokenizer.json" or not own.get("fix_mistral_regex"):  # else: as fixed
            shutil.copyfile(file, target / file.name)
    changes = {} if "tokenizer_class" in own else made | own  # else config.json decides
    if made["tokenizer_class"] == GENERIC:
        changes["tokenizer_class"] = GENERIC
    serve_version_4(target, changes)


def serve_version_4(folder: Path, changes: dict | None = None):
    """Make a tokenizer that transformers 5 has saved load in version 4, too."""
    found = read_json(folder / SETTINGS) | (changes or {})
    if found.get("tokenizer_class") == GENERIC:
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := found.get("extra_special_tokens"), list):
        known = found.get("additional_special_tokens") or []
        found["additional_special_tokens"] = known + [each for each in extra if each not in known]
        del found["extra_special_tokens"]
    for name in ("backend", "is_local", "local_files_only"):  # how it was loaded
        found.pop(name, None)
    (folder / SETTINGS).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")


def copy_tokenizer(source: Path, target: Path):
    """Copy a tokenizer's folder, replacing one that we made; raises ConfigError for another."""
    files = [p for p in source.iterdir() if p.is_file() and p.name != MADE]
    if all((target / p.name).is_file() and (target / p.name).read_bytes() == p.read_bytes()
           for p in files):
        return  # identical, whoever made it
    delete_tokenizer(target)
    target.mkdir(parents=True)
    (target / MADE).touch()  # first: if killed later, the folder is known to be ours
    shutil.copytree(source, target, dirs_exist_ok=True)


def delete_tokenizer(folder: Path):
    """Delete a tokenizer folder that we made; raises ConfigError for another."""
    require_ours(folder)
    shutil.rmtree(folder, ignore_errors=True)


def require_ours(folder: Path):
    """Raise ConfigError for a tokenizer folder, or a link to one, that we have not made."""
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.is_symlink() or folder.exists() and not empty and not (folder / MADE).exists():
        raise ConfigError(f"{folder}: was not made by this program (no {MADE} in it); move it "
                          "away, or choose another folder")
