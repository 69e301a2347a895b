"""The files with the weights of a model, as Hugging Face lays them out, read tensor by tensor."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from steady.options import ConfigError


def reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return ("it comes with code, which would run on this machine: read it, then pass "
                "--trust_remote_code")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def with_mean_rows(read, n: int):
    """Reads as `read`, but n rows: those beyond its own are their mean."""
    def rows(wanted: slice) -> Tensor:
        old = read(slice(None))
        mean = old.float().mean(0, keepdim=True).to(old.dtype)
        return torch.cat((old, mean.expand(n - len(old), -1)))[wanted]

    return rows


def shorten(names) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a model: those that the index lists, or the only one.

    Other files in the folder, such as adapters and copies, are not read. Raises ConfigError.
    """
    for file in folder / "model.safetensors", folder / "pytorch_model.bin":
        index = file.with_name(file.name + ".index.json")
        if not index.exists():
            if file.exists():
                return [file]
            continue
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index}: not an index of weights") from None
        for name in names:
            if name != Path(name).name or "\\" in name:
                raise ConfigError(f"{index}: lists {name}; expected names of files beside it")
            if not (folder / name).exists():
                raise ConfigError(f"{index}: lists {name}, which is missing")
        return [folder / name for name in names]
    raise ConfigError(f"{folder}: no model.safetensors and no pytorch_model.bin in there")


def tensors_of(file: Path) -> Iterator[tuple]:
    """(name, shape, function that reads rows) of each tensor in a safetensors or torch file."""
    if file.suffix == ".bin":
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:  # of pickle, zipfile and torch
            raise ConfigError(f"{file}: cannot be read: {reason(e)}") from None
        for name in list(state):
            yield name, list(state[name].shape), lambda rows, name=name: state.pop(name)[rows]
        return
    import safetensors

    try:
        opened = safetensors.safe_open(file, "pt")
    except (OSError, safetensors.SafetensorError) as e:
        raise ConfigError(f"{file}: cannot be read: {reason(e)}") from None
    with opened as tensors:
        for name in tensors.keys():
            tensor = tensors.get_slice(name)
            yield name, tensor.get_shape(), lambda rows, tensor=tensor: tensor[rows]
