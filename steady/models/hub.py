"""The files of a model, in a folder or on the Hugging Face hub."""

import json
from pathlib import Path

from steady.options import ConfigError


def fetch_files(name: str, code: bool = False, weights: bool = True) -> Path:
    """A folder, or its download from the hub, with Python if `code`. Raises ConfigError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    kinds = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else []),
             *(["*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=kinds))
        if weights and not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return folder
    except Exception as e:  # offline, no such model, no permission: each raises its own class
        raise ConfigError(f"no folder or hub model called {name} ({reason(e)})") from None


def reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return ("it comes with code, which would run on this machine: read it, then pass "
                "--trust_remote_code")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that a folder's index lists, or the only one. Raises ConfigError.

    Adapters, copies and other files in the folder are ignored.
    """
    for file in folder / "model.safetensors", folder / "pytorch_model.bin":
        index = file.with_name(file.name + ".index.json")
        if not index.exists():
            if file.exists():
                return [file]
            continue
        try:
            files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{index}: not an index of weights") from None
        for file in files:
            if file.parent != folder or not file.exists():
                raise ConfigError(f"{index}: lists {file}; expected names of files beside it")
        return sorted(files)
    raise ConfigError(f"{folder}: no model.safetensors and no pytorch_model.bin in there")


def tensors_of(file: Path) -> list[tuple]:
    """(name, shape, rows) of each tensor in a weight file. Raises ConfigError.

    Slicing `rows` reads these rows: of safetensors no others.
    """
    import torch  # takes a second, too long for data.py
    from safetensors import safe_open

    try:
        if file.suffix == ".bin":
            state = torch.load(file, map_location="cpu", weights_only=True)
            return [(name, list(tensor.shape), tensor) for name, tensor in state.items()]
        opened = safe_open(file, "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return [(name, rows.get_shape(), rows) for name, rows in slices.items()]
    except Exception as e:  # of safetensors, or of pickle, zipfile and torch
        raise ConfigError(f"{file}: cannot be read: {reason(e)}") from None


def shorten(names) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
