"""Weights files: located by path or published name, identified by a hash of their content, read without running code.

A safetensors file contains only tensors. A torch file is a pickle, which could run code; it is read with
``torch.load(weights_only=True)`` and rejected if it contains more than tensors and plain values.
"""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contnorm.bench.config.schema import ModelConfig
from contnorm.errors import UserError, unknown, usable

__all__ = ["PUBLISHED", "bring_weights", "read_weights", "replaced_weights", "weights_hash"]

BASE = "https://download.pytorch.org/models/"
DIGITS = 8  # hex digits of the SHA-256 of a file; torchvision puts as many into file names

# Published weights by name and network. A file's name ends with the first digits of its SHA-256.
PUBLISHED: dict[str, dict[str, str]] = {
    "torchvision:IMAGENET1K_V1": {
        "resnet34": "resnet34-b627a593.pth",
        "resnet50": "resnet50-0676ba61.pth",
        "resnet101": "resnet101-63fe2227.pth",
    },
    "torchvision:IMAGENET1K_V2": {
        "resnet50": "resnet50-11ad3fa6.pth",
        "resnet101": "resnet101-cd907fc2.pth",
    },
}


def weights_hash(weights: str, model: str) -> str:
    """First digits of the SHA-256 of a weights file; known without the file for published weights.

    Example:
        >>> weights_hash("torchvision:IMAGENET1K_V2", "resnet101")
        'cd907fc2'
    """
    named = _published(weights, model)
    return _digits_in(named) if named else _hash_of(_existing_file(weights))


def replaced_weights(config: ModelConfig) -> str:
    """Error message if a run's weights changed since it started; empty if they are the same or the run has none.

    Example:
        >>> replaced_weights(ModelConfig("resnet34", weights="torchvision:IMAGENET1K_V1", weights_hash="01234567"))
        "weights 'torchvision:IMAGENET1K_V1' are not those the run was begun with (model.weights_hash was 01234567, ..."
    """
    if config.weights is None or config.weights_hash is None:
        return ""
    try:
        now = weights_hash(config.weights, config.name)
    except UserError as error:
        return str(error)
    if now == config.weights_hash:
        return ""
    return (
        f"weights {config.weights!r} are not those the run was begun with (model.weights_hash was "
        f"{config.weights_hash}, and is {now}), and others are another run. Put the file back as it was to go on."
    )


def bring_weights(weights: str, model: str) -> Path:
    """Path of a weights file; published weights are downloaded to torch's cache if they are not there yet."""
    named = _published(weights, model)
    if not named:
        return _existing_file(weights)
    path = Path(torch.hub.get_dir()) / "checkpoints" / named
    if not path.is_file():
        _fetch(named, path)
    if _hash_of(path) != _digits_in(named):
        raise UserError(f"{path}: is damaged (its SHA-256 should begin with {_digits_in(named)}). Remove it.")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a file; a file that contains code is rejected."""
    with usable(path, "it can't be read", "Let yourself read it."), path.open("rb") as file:
        header = file.read(9)[8:]  # safetensors: 8 bytes of length, then a JSON header
    content = _safetensors(path) if header == b"{" else _torch_file(path)
    for key in ("state_dict", "model_state_dict", "model"):  # a training checkpoint holds weights and other state
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {name: t for name, t in named if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise UserError(f"{path}: holds no named tensors. {SAVE}")
    odd = next((name for name, tensor in tensors.items() if not _is_plain(tensor)), None)
    if odd is not None:
        raise UserError(
            f"{path}: {odd} is no plain tensor, but {_kind(tensors[odd])}. Weights are dense, of 16 bits or more, and "
            f"with their values. {SAVE}"
        )
    return tensors


SAVE = "Save weights with safetensors.torch.save_file(model.state_dict(), path)."


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and not (tensor.is_floating_point() and tensor.element_size() < 2)


def _kind(tensor: Tensor) -> str:
    layout, kind = (str(attribute).removeprefix("torch.") for attribute in (tensor.layout, tensor.dtype))
    return f"{layout}, {kind}, on {tensor.device.type}"


def _published(weights: str, model: str) -> str | None:
    """File name of published weights; None if ``weights`` is a path."""
    if not weights.startswith("torchvision:"):
        return None
    known = [name for name, files in PUBLISHED.items() if model in files]
    if not known:
        available = ", ".join(sorted({model for files in PUBLISHED.values() for model in files}))
        raise UserError(f"weights {weights!r}: there are none of model {model!r}, only of {available}. Give a file.")
    if weights not in known:
        raise unknown(f"weights of {model}", weights, [*known, "path/to/file"])
    return PUBLISHED[weights][model]


def _existing_file(weights: str) -> Path:
    try:
        path = Path(weights).expanduser()
    except RuntimeError as error:  # "~name" of an unknown user
        raise UserError(f"weights {weights!r}: {error} Give the whole path.") from error
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        named = ", ".join(PUBLISHED)
        raise UserError(
            f"weights {weights!r}: {what}. Give a safetensors or torch file of weights, or a name: {named}."
        )
    return path


def _digits_in(name: str) -> str:
    return Path(name).stem.rpartition("-")[2]


def _hash_of(path: Path) -> str:
    with usable(path, "it can't be read", "Let yourself read it."):
        status = path.stat()
        return _hash_at(path.resolve(), status.st_size, status.st_mtime_ns)


@cache  # size and modification time are part of the key; every seed needs the hash
def _hash_at(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def _fetch(name: str, path: Path) -> None:
    url = BASE + name
    elsewhere = f"Bring {name} from elsewhere, and say where it is with --weights, or --set model.weights=FILE."
    with usable(path.parent, "weights can't be kept there", "Say with TORCH_HOME where else."):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path), _digits_in(name), progress=sys.stderr.isatty())
    except OSError as error:  # no network, no such file, or no space on disk
        raise UserError(f"{url}: could not be fetched ({error}). {elsewhere}") from error
    except RuntimeError as error:
        raise UserError(f"{url}: what came is not {name} ({error}), and was thrown away. {elsewhere}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is no safetensors file, or a damaged one ({error}).") from error


def _torch_file(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.load raises an error for the same cause afterwards
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        named = re.search(r"GLOBAL:? ([\w.]+)", str(error))
        if named is None:
            raise _no_weights(path) from error
        raise UserError(
            f"{path}: holds more than weights ({named[1]}), which could run code and is not loaded. {SAVE}"
        ) from error
    except Exception as error:  # an invalid or damaged pickle can raise any exception
        raise _no_weights(path) from error


def _no_weights(path: Path) -> UserError:
    return UserError(f"{path}: is no safetensors or torch file of weights, or a damaged one. {SAVE}")
