"""Models in safetensors files that say which norms they have: weights, and the norm spec in the metadata.

The keys of the file are those of the state dict, so a file of a model with continual norm has the keys of batch norm,
and any tool that reads safetensors can read it. The spec is in the metadata, under ``contnorm.norm_spec``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from contnorm import __version__
from contnorm.atomic_files import draft_of
from contnorm.convert.spec import apply_norm_spec, norm_spec, spec_differences

_SPEC = "contnorm.norm_spec"
_VERSION = "contnorm.version"


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model to a safetensors file, with its norm spec in the metadata.

    The file is replaced atomically. Tensors that the model has under several names are saved once, as
    ``safetensors.torch.save_model`` does. Needs safetensors.

    Args:
        model: The model; it is not changed.
        path: The file; its folder is created.

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
    import safetensors.torch

    with draft_of(Path(path)) as draft:
        safetensors.torch.save_model(model, str(draft), metadata=file_metadata(model))
        with draft.open("r+b") as file:
            sort_metadata(file)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Convert the norms of a model to those of a file of `save_model`, and load its weights.

    The model may be a newly built one with any norms; see `apply_norm_spec`. The weights are loaded strictly, into the
    tensors of the model on their device. If they do not fit, its norms are converted already. Needs safetensors.

    Args:
        model: The model, changed in place.
        path: The file.

    Returns:
        The model. If it is itself a norm layer, its replacement.

    Raises:
        ValueError: If the file has no norm spec, or one that does not fit the model.
        RuntimeError: If the weights do not fit the model.

    Example:
        >>> import tempfile, contnorm as cn
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> cn.save_model(cn.freeze_stats(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))), path)
        >>> model = cn.load_model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), path)
        >>> cn.summarize(model).rows[0].state  # frozen, as the saved model was
        'train, frozen'
    """
    import safetensors.torch

    spec = _stored_spec(Path(path))
    if spec is None:
        raise ValueError(
            f"load_model: {path} has no norm spec, so that the norms of its model are unknown. If they are those of "
            f"this model, load it with safetensors.torch.load_model(model, path)."
        )
    model = apply_norm_spec(model, spec)
    tensors = safetensors.torch.load_file(path)
    # All names of shared tensors, since batch norm takes a missing batch counter for one of an old release, and adds 0.
    state = model.state_dict()
    places = {_place(state[name]): tensor for name, tensor in tensors.items() if name in state}
    tensors |= {name: places[_place(value)] for name, value in state.items() if _place(value) in places}
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):  # layers with constant moments may have no counter
            tensors.setdefault(name, value)
    model.load_state_dict(tensors)
    return model


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
    """Return how the norms of a model differ from those in a file; empty if they do not, or the file has no spec."""
    spec = _stored_spec(path)
    return "" if spec is None else "; ".join(spec_differences(model, spec)[:3])


def _stored_spec(path: Path) -> dict[str, Any] | None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get(_SPEC)
    return None if stored is None else json.loads(stored)


def _place(tensor: Tensor) -> object:
    """Return what tensors have in common that are the same memory; no two tensors without memory have it."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
