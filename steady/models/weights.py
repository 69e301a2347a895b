"""The files with the weights of a model, as Hugging Face lays them out, read tensor by tensor."""

import json
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from steady.models.hub import reason
from steady.options import ConfigError

UNTIED = ("its config.json ties the head to the embedding, but the head has weights of its own; "
          "set tie_word_embeddings to false there")


def same_rows(a: tuple, b: tuple) -> bool:
    """Whether two matrices, each its shape and what gives its rows, are equal, in small parts."""
    (shape, rows), (other, others) = a, b
    return shape == other and all(
        torch.equal(rows[i : i + 4096].float(), others[i : i + 4096].float())
        for i in range(0, shape[0], 4096))


def shorten(names) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def with_mean_rows(tensor: Tensor, n: int) -> Tensor:
    """n rows: those of a tensor, then their mean."""
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat((tensor, mean.expand(n - len(tensor), -1)))


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
            files = [folder / name for name in json.loads(index.read_text())["weight_map"].values()]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{index}: not an index of weights") from None
        for file in files:
            if file.parent != folder or not file.exists():
                raise ConfigError(f"{index}: lists {file}; expected names of files beside it")
        return sorted(set(files))
    raise ConfigError(f"{folder}: no model.safetensors and no pytorch_model.bin in there")


def tensors_of(file: Path) -> list[tuple]:
    """(name, shape, what gives its rows for a slice) of each tensor in a file. Raises ConfigError.

    Only the rows that are asked for are read of safetensors.
    """
    try:
        if file.suffix == ".bin":
            state = torch.load(file, map_location="cpu", weights_only=True)
            return [(name, list(tensor.shape), tensor) for name, tensor in state.items()]
        opened = safetensors.safe_open(file, "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return [(name, rows.get_shape(), rows) for name, rows in slices.items()]
    except Exception as e:  # of safetensors, or of pickle, zipfile and torch
        raise ConfigError(f"{file}: cannot be read: {reason(e)}") from None
