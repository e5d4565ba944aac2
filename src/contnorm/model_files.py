"""Models in safetensors files that say which norms they have: weights, and the norm spec in the metadata.

The keys of the file are those of the state dict, so a file of a model with continual norm has the keys of batch norm,
and any tool that reads safetensors can read it. The spec is in the metadata, under ``contnorm.norm_spec``.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from contnorm import __version__
from contnorm.atomic_files import draft_of
from contnorm.checks import check_model
from contnorm.convert.match import format_problems, other_norms
from contnorm.convert.spec_format import check_spec
from contnorm.model_norms import norm_spec, norms_applied

__all__ = ["differences_from_file", "file_metadata", "load_model", "save_model", "sort_metadata"]

_SPEC = "contnorm.norm_spec"
_VERSION = "contnorm.version"


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model to a safetensors file, with its norm spec in the metadata.

    The file is replaced atomically. Tensors that the model has under several names are saved once, as
    ``safetensors.torch.save_model`` does. Needs safetensors.

    Args:
        model: The model; it is not changed.
        path: The file; its folder is created.

    Raises:
        ValueError: If a norm layer is lazy, or the state dict has a value that is not a tensor.
        IsADirectoryError: If the path is that of a folder.

    Example:
        >>> import tempfile, torch, contnorm as cn
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), cn.ContinualNorm2d(8, num_groups=2)).eval()
        >>> cn.save_model(model, path)
        >>> loaded = cn.load_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), path).eval()
        >>> loaded[1]
        ContinualNorm2d(8, num_groups=2, eps=1e-05, momentum=0.1)
        >>> x = torch.randn(2, 3, 8, 8)
        >>> torch.equal(loaded(x), model(x))
        True
    """
    safetensors = _safetensors("save_model")
    check_model(model, "save_model")
    others = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"save_model: {others[0]!r} of the state dict is not a tensor, and a safetensors file has only tensors. "
            f'Use torch.save({{"model": model.state_dict(), "norms": contnorm.norm_spec(model)}}, path).'
        )
    if Path(path).is_dir():
        raise IsADirectoryError(
            f"save_model: {path} is a folder. Give a file, such as {Path(path, 'model.safetensors')}."
        )
    with draft_of(Path(path)) as draft:
        safetensors.save_model(model, str(draft), metadata=file_metadata(model))
        with draft.open("r+b") as file:
            sort_metadata(file)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Convert the norms of a model to those of a file of `save_model`, and load its weights.

    The model may be a newly built one with any norms; see `apply_norm_spec`. The weights are loaded strictly, into the
    tensors of the model on their device. If the file does not fit, the model is unchanged. Needs safetensors.

    Args:
        model: The model, changed in place.
        path: The file.

    Returns:
        The model. If it is itself a norm layer, its replacement.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a safetensors file, has no norm spec, or does not fit the model.

    Example:
        >>> import tempfile, contnorm as cn
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> cn.save_model(cn.freeze_stats(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))), path)
        >>> model = cn.load_model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), path)
        >>> cn.summarize(model).rows[0].state  # frozen, as the saved model was
        'train, frozen'
    """
    safetensors = _safetensors("load_model")
    check_model(model, "load_model")
    metadata, shapes = _read_header(Path(path))
    with norms_applied(model, _stored_spec(metadata, path)) as converted:
        state = converted.state_dict()
        names = _saved_names(state, shapes)
        problems = _misfits(state, shapes, names)
        if problems:
            raise ValueError(
                f"load_model: the weights in {path} do not fit {type(model).__name__}: {format_problems(problems)}. "
                f"The model is unchanged."
            )
    tensors = safetensors.load_file(path)
    # All names of shared tensors, since batch norm takes a missing batch counter for one of an old release, and adds 0.
    converted.load_state_dict({name: tensors[saved] for name, saved in names.items()}, strict=True)
    return converted


def file_metadata(model: nn.Module) -> dict[str, str]:
    """Return the metadata with which a safetensors file says which norms a model has.

    Example:
        >>> sorted(file_metadata(nn.Sequential(nn.BatchNorm2d(8))))
        ['contnorm.norm_spec', 'contnorm.version', 'format']
    """
    return {"format": "pt", _VERSION: __version__, _SPEC: json.dumps(norm_spec(model))}


def sort_metadata(file: BinaryIO) -> None:
    """Sort the metadata of a safetensors file in place, so that equal models give equal bytes.

    safetensors writes the metadata in an order that differs between calls. The header keeps its length: eight bytes
    with the length, then JSON, padded with spaces.

    Example:
        >>> import io, torch, safetensors.torch
        >>> file = io.BytesIO(safetensors.torch.save({"weight": torch.ones(2)}, {"b": "1", "a": "2", "c": "3"}))
        >>> sort_metadata(file)
        >>> file.getvalue()[8:].startswith(b'{"__metadata__":{"a":"2","b":"1","c":"3"},"weight":')
        True
    """
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    file.seek(8)
    file.write(content.ljust(size))


def differences_from_file(model: nn.Module, path: Path) -> str:
    """Return how the norms of a model differ from those in a file; empty if they do not, or the file has no spec.

    Raises:
        ValueError: If the spec is damaged.
    """
    metadata, _ = _read_header(path)
    if _SPEC not in metadata:
        return ""
    return format_problems(other_norms(model, check_spec(_stored_spec(metadata, path))))


def _safetensors(caller: str) -> Any:
    """Import safetensors, which the layers themselves do not need."""
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        message = f'contnorm.{caller} needs {error.name}. Install it with: pip install "contnorm[bench]"'
        raise ModuleNotFoundError(message, name=error.name) from error


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the metadata of a safetensors file, and the shapes of its tensors."""
    library = importlib.import_module("safetensors")
    if not path.exists():
        raise FileNotFoundError(f"load_model: there is no file {path}.")
    try:
        with library.safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, shapes
    except (library.SafetensorError, OSError) as error:
        detail = " ".join(str(error).split())
        raise ValueError(f"load_model: {path} can't be read as a safetensors file: {detail}") from error


def _stored_spec(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> Any:
    if _SPEC not in metadata:
        raise ValueError(
            f"load_model: {path} has no norm spec, so that the norms of its model are unknown. If they are those of "
            f"this model, load it with safetensors.torch.load_model(model, path)."
        )
    try:
        spec = json.loads(metadata[_SPEC])
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"load_model: the norm spec in {path} is damaged: {error}.") from error
    if not isinstance(spec, dict):
        raise ValueError(f"load_model: the norm spec in {path} is damaged: it is {type(spec).__name__}, not a dict.")
    return spec


def _saved_names(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the name in the file of each tensor of a state dict: a shared tensor is saved under one of its names."""
    places = {_place(state[name]): name for name in shapes if name in state}
    names = {name: name if name in shapes else places.get(_place(value)) for name, value in state.items()}
    return {name: saved for name, saved in names.items() if saved is not None}


def _misfits(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return what strict loading would refuse, and tensors without data: names, and reasons."""
    problems = []
    for name, value in state.items():
        if name not in names:
            if not name.endswith("num_batches_tracked"):  # layers with constant moments may have no counter
                problems.append((name, "in the model, and not in the file"))
        elif shapes[names[name]] != tuple(value.shape):
            shape = shapes[names[name]]
            problems.append((name, f"of shape {shape} in the file, and {tuple(value.shape)} in the model"))
        elif value.is_meta:
            problems.append((name, "on the meta device, without data; call model.to_empty(device=...) first"))
    return problems + [(name, "in the file, and not in the model") for name in shapes if name not in state]


def _place(tensor: Tensor) -> object:
    """Return what tensors have in common that are the same memory; no two tensors without memory have it."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
