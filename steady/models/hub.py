"""Folders of models, local or from the Hugging Face hub, and the tensors in them."""

import json
import re
from pathlib import Path

from steady.options import ConfigError


def fetch_files(name: str, code: bool = False, weights: bool = True) -> Path:
    """A local folder, or its download from the hub, with *.py if `code`. Raises ConfigError."""
    folder = Path(name)
    is_run = (folder / "config.yaml").exists() and not (folder / "config.json").exists()
    if is_run or folder.is_file():
        raise ConfigError(f"{name}: a run or a file; expected a model, such as the folder that "
                          f"python model.py export {name} FOLDER makes of a run")
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    patterns += ["*.py"] * code + ["*.safetensors"] * weights
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as e:  # offline, no such model, no permission: each raises its own class
        raise ConfigError(f"no folder or hub model called {name} ({reason(e)})") from None


def reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return ("it comes with code, which would run on this machine: read it, then pass "
                "--trust_remote_code")
    return re.sub(r":\s*\n\s*", ": ", str(error).strip() or type(error).__name__).splitlines()[0]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that a folder's index lists, or the only one. Raises ConfigError."""
    names, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{index}: not an index of weights") from None
    files = sorted(folder / name for name in names)
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ConfigError(f"{folder}: expected its weights in {file}; --model transformers "
                              "reads other formats")
    return files


def tensors_of(files: list[Path]) -> dict:
    """Name → tensor in safetensors files, not read yet: slices read rows. Raises ConfigError."""
    from safetensors import safe_open

    found = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")
            found |= {name: opened.get_slice(name) for name in opened.keys()}
        except Exception as e:  # safetensors raises plain ones
            raise ConfigError(f"{file}: cannot be read: {reason(e)}") from None
    return found


def shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
