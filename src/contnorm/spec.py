"""The norm spec of a model, which says what its state dict does not, and conversion of a model to match a spec.

The state dicts of batch norm and of continual norm have the same keys and shapes, for any number of groups and either
order of the steps. `norm_spec` describes all norm layers of a model in plain JSON, to be stored with the weights;
`apply_norm_spec` converts the norm layers of a newly built model accordingly, so that the weights mean the same.

A spec is a dict of this form::

    {"format": "contnorm.norm_spec", "version": 2,
     "norms": {path: {"norm": "cn", "dim": 2, "num_features": 64, "options": {"eps": 1e-05, "num_groups": 8, ...},
                      "parameters": ["weight", "bias"], "running_moments": true, "constant": false, "frozen": false,
                      "normalize": null, "fixed": false, "synced": false, "has_act": false, "per_position": false}},
     "convolutions": {path: 1e-06}}

``convolutions`` are those with standardized weights, with the eps of the standardization. A layer that the model has at
several paths is described once, at the first. A layer that is not in the registry has ``"norm": null`` and its
``class``. Device, dtype, training mode and the kernel that computes a layer are not in a spec: like the process group
of synchronized layers, they are those of the model that it is applied to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor, nn

from contnorm import __version__
from contnorm.atomic_files import draft_of
from contnorm.convert import (
    NormInModel,
    build_layer,
    dim_of_convolutions,
    known_dim,
    norm_layers,
    replacement_obstacles,
    swap_modules,
)
from contnorm.detect import DetectedNorm, detect_norm, holds_moments
from contnorm.moments.freeze import StaleMoments, set_stale, set_stats_state, stale_moments, stats_state
from contnorm.norms.group import is_standardized, standardize, unstandardize
from contnorm.registry import Dim, find_norm

_SPEC, VERSION = "contnorm.norm_spec", 2  # the format, and the key in the metadata of a file
_STATE = ("frozen", "constant", "normalize", "fixed")  # keys that no layer has to be replaced for


def norm_spec(model: nn.Module) -> dict[str, Any]:
    """Describe all norm layers of a model in plain JSON: what decides their output and is not in the state dict.

    The spec contains the norm, dimension, channels and options of each layer (groups, eps, momentum and all others),
    what it normalizes with and whether its moments are frozen (`stats_mode`, `freeze_norms`), whether it is
    synchronized, and the convolutions with standardized weights. A layer of an unknown class is named with its class.

    Args:
        model: The model; it is not changed.

    Returns:
        A dict that ``json.dumps`` accepts, for `apply_norm_spec`.

    Example:
        >>> import contnorm as cn
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), cn.ContinualNorm2d(64, num_groups=8))
        >>> spec = cn.norm_spec(model)
        >>> spec["norms"]["1"]["norm"], spec["norms"]["1"]["options"]["num_groups"]
        ('cn', 8)
        >>> stock = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
        >>> cn.apply_norm_spec(stock, spec)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> cn.norm_spec(stock) == spec
        True
    """
    return {
        "format": _SPEC,
        "version": VERSION,
        "norms": {layer.name: _describe(layer.module, layer.detected) for layer in norm_layers(model)},
        "convolutions": {
            path: cast(Any, module).weight_eps for path, module in model.named_modules() if is_standardized(module)
        },
    }


def apply_norm_spec(model: nn.Module, spec: Mapping[str, Any]) -> nn.Module:
    """Convert the norm layers of a model to those that a spec describes, in place.

    Afterwards the model can load the weights that were saved with the spec. Layers that match already are not replaced;
    what they normalize with is set, and moments are frozen or released. As in `convert_norm`, parameters and moments of
    the replaced layers are kept as the same objects wherever both layers have them. The model needs the norm layers of
    the spec at the same paths, with the same channels, whichever norms they are.

    Args:
        model: The model, such as a newly built one with batch norm.
        spec: A spec of `norm_spec`, which may have been stored as JSON.

    Returns:
        The model. If it is itself a norm layer, its replacement.

    Raises:
        ValueError: If the spec is of another format or version, or does not fit the model. The message names what does
            not fit, and the model is unchanged.

    Example:
        >>> import contnorm as cn
        >>> spec = cn.norm_spec(cn.freeze_stats(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))))
        >>> model = cn.apply_norm_spec(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), spec)
        >>> cn.summarize(model).rows[0].state
        'train, frozen'
    """
    if (spec.get("format"), spec.get("version")) != (_SPEC, VERSION):
        raise ValueError(f"apply_norm_spec: expected a spec of contnorm.norm_spec of version {VERSION}.")
    layers, entries = {layer.name: layer for layer in norm_layers(model)}, spec["norms"]
    problem = f"apply_norm_spec: the spec does not fit {type(model).__name__}, which is unchanged:"
    if only_one := sorted(layers.keys() ^ entries.keys()):
        raise ValueError(f"{problem} {', '.join(map(repr, only_one[:5]))} are norm layers of only one of them.")
    obstacles, usual = replacement_obstacles(model), dim_of_convolutions(model)
    norms: dict[str, nn.Module] = {}
    for path, entry in entries.items():
        layer = layers[path]
        module, detected = layer.module, layer.detected
        norms[path] = module
        constant = getattr(detected, "constant", False)
        # A layer whose moments are constant by its class can't be released.
        if not _difference(entry, _describe(module, detected)) and (entry.get("constant") or not constant):
            continue
        reason = getattr(detected, "reason", "") or obstacles.get(module, "")
        if entry["norm"] is None or detected is None:
            reason = reason or f"{entry.get('class', type(module).__name__)} is not a registered norm"
        if not reason:
            norms[path] = _build(layer, entry, usual)
            reason = _difference(entry, _describe(norms[path], detect_norm(norms[path])))
        if reason:
            raise ValueError(f"{problem} {path!r} can't become the layer of the spec: {reason}.")
    for path, norm in norms.items():
        if not getattr(layers[path].detected, "constant", False) or norm is not layers[path].module:
            _set_state(norm, entries[path])
    for path, module in model.named_modules():
        if path in spec["convolutions"]:
            standardize(module, spec["convolutions"][path])
        else:
            unstandardize(module)
    return swap_modules(model, {layers[path].module: norm for path, norm in norms.items()})


def _build(layer: NormInModel, entry: Mapping[str, Any], usual: Dim | None) -> nn.Module:
    """Build the layer of a description, with the tensors of a layer of the model."""
    dim = None if entry["synced"] else known_dim(layer.detected.dim or entry["dim"] or usual)
    group = getattr(layer.module, "process_group", None)
    new = build_layer(layer, find_norm(entry["norm"])[0], entry["options"], dim, group)
    if entry["synced"]:
        vars(new)["_contnorm_dim"] = entry["dim"]
    return new


def _set_state(norm: nn.Module, entry: Mapping[str, Any]) -> None:
    """Set what a layer normalizes with, what is frozen in it, and of which input its moments are."""
    normalize = entry.get("normalize", "running" if entry.get("constant") else None)
    for part in norm.modules():
        if holds_moments(part):
            set_stats_state(part, normalize, not entry["frozen"])
    if entry.get("fixed"):
        for parameter in norm._parameters.values():
            if parameter is not None:
                parameter.requires_grad_(False)


def spec_differences(model: nn.Module, spec: Mapping[str, Any]) -> list[str]:
    """Return how the norm layers of a model differ from a spec; whether they are frozen does not matter.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
        >>> spec = norm_spec(model)
        >>> spec["norms"] = {"0": {**spec["norms"]["0"], "norm": "cn"}}
        >>> spec_differences(model, spec)
        ["'0': norm is 'cn' in the spec, and 'bn' here", "'1': missing"]
    """
    here, there = norm_spec(model)["norms"], spec["norms"]
    differences = []
    for path in {**there, **here}:
        difference = _difference(there[path], here[path]) if path in here and path in there else "missing"
        if difference:
            differences.append(f"{path!r}: {difference}")
    return differences


def _describe(module: nn.Module, detected: object) -> dict[str, Any]:
    """Describe a layer; ``detected`` is what `detect_norm` says about it."""
    holders = [part for part in module.modules() if holds_moments(part)]  # a user's norm may have layers inside
    states = {stats_state(part) for part in holders} or {(None, True)}
    normalize, frozen = next(iter(states))[0] if len(states) == 1 else None, not any(update for _, update in states)
    if not isinstance(detected, DetectedNorm):
        return {"norm": None, "class": type(module).__name__, "frozen": frozen, "normalize": normalize}
    constant = detected.constant or (normalize == "running" and frozen)
    tensors = {**module._parameters, **module._buffers} if detected.constant else module._parameters
    options = {name: value for name, value in detected.options.items() if name != "kernel"}
    if detected.constant:  # its class has none of these, and they are those of its conversion
        options = {"momentum": 0.1, "affine": True, "track_running_stats": True, **options}
    return {
        "norm": detected.norm,
        "dim": detected.dim,
        "num_features": detected.channels,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "parameters": [name for name in ("weight", "bias") if tensors.get(name) is not None],
        "running_moments": holds_moments(module),
        "constant": constant,
        "frozen": constant or frozen,
        "normalize": "running" if constant else normalize,
        "fixed": constant and not any(p is not None and p.requires_grad for p in module._parameters.values()),
        "synced": detected.synced,
        "has_act": detected.acts,
        "per_position": detected.per_position,
    }


def _difference(entry: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return the first difference that a layer can't have; a dimension that one of the two accepts is none."""
    for key, value in entry.items():
        other = actual.get(key)
        if key in _STATE or (key == "dim" and None in (value, other)) or value == other:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            wrong = next(name for name in {**value, **other} if value.get(name, ...) != other.get(name, ...))
            key, value, other = wrong, value.get(wrong), other.get(wrong)
        return f"{key} is {value!r} in the spec, and {other!r} here"
    return ""


# --- models in safetensors files ------------------------------------------------------------------------------------

# The keys of a file are those of the state dict, so that any tool that reads safetensors can read it, and the file of a
# model with continual norm has the keys of batch norm. The spec is in the metadata.
_VERSION, _STALE, _ARCHITECTURE = "contnorm.version", "contnorm.stale_moments", "contnorm.architecture"


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model to a safetensors file, with its norm spec in the metadata.

    If the model has an attribute ``architecture``, a text that names its variant, it is stored, too, and `load_model`
    refuses a model that has another one: weights of many variants have the same names and shapes. Networks of the
    benchmark have it.

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
        ValueError: If the file has no norm spec, one that does not fit the model, or another architecture.
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

    spec, stale = (_stored(Path(path), key) for key in (_SPEC, _STALE))
    if spec is None:
        raise ValueError(
            f"load_model: {path} has no norm spec, so that the norms of its model are unknown. If they are those of "
            f"this model, load it with safetensors.torch.load_model(model, path)."
        )
    if difference := architecture_difference(model, Path(path)):
        raise ValueError(f"load_model: {path}: {difference}.")
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
    layers = list(stale or {})
    for name in spec["norms"]:
        mark = (stale or {}).get(name)
        set_stale(model.get_submodule(name), StaleMoments(**mark, layers=layers) if mark else None)
    return model


def file_metadata(model: nn.Module) -> dict[str, str]:
    """Return the metadata with which a safetensors file says which norms a model has.

    Example:
        >>> sorted(file_metadata(nn.Sequential(nn.BatchNorm2d(8))))
        ['contnorm.norm_spec', 'contnorm.version', 'format']
    """
    marks = {name: mark for name, module in model.named_modules() if (mark := stale_moments(module))}
    stale = {name: {"signal": mark.signal, "batches": mark.batches} for name, mark in marks.items()}
    stored: dict[str, Any] = {_SPEC: norm_spec(model), **({_STALE: stale} if stale else {})}
    if isinstance(getattr(model, "architecture", None), str):
        stored[_ARCHITECTURE] = model.architecture
    return {"format": "pt", _VERSION: __version__, **{key: json.dumps(value) for key, value in stored.items()}}


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
    """Return how a model differs from what a file says; empty if it does not, or the file says nothing."""
    spec = _stored(path, _SPEC)
    norms = "" if spec is None else "; ".join(spec_differences(model, spec)[:3])
    return architecture_difference(model, path) or norms


def architecture_difference(model: nn.Module, path: Path) -> str:
    """Return how the architecture of a model differs from that in a file; empty if one of them has no name."""
    there, here = _stored(path, _ARCHITECTURE), getattr(model, "architecture", None)
    if there is None or not isinstance(here, str) or there == here:
        return ""
    return f"the weights are of {there!r}, and the model is {here!r}"


def _stored(path: Path, key: str) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get(key)
    return None if stored is None else json.loads(stored)


def _place(tensor: Tensor) -> object:
    """Return what tensors have in common that are the same memory; no two tensors without memory have it."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
