"""Detect which norm a module is.

These layers are known:

- the layers of this package and of torch, and their subclasses with the same ``forward`` and ``train``;
- layers of a norm that was registered with `contnorm.register_norm`, by their class;
- timm's and torchvision's layers of the table below. Norm-then-activation layers such as timm's ``BatchNormAct2d``
  normalize, then call their ``drop`` and ``act``;
- constant batch norms, such as ``FrozenBatchNorm2d`` of torchvision, detectron2 and transformers: their moments and
  affine parameters are buffers, which are also used in training;
- classes that the caller declares with ``treat_as``.

torch's ``LayerNorm`` normalizes the last dimensions and is no norm over channels in dimension 1. Any other layer with
running moments is unsupported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from contnorm.norms.base import NormLayer
from contnorm.norms.continual import SyncContinualNorm
from contnorm.registry import DIMS, NORMS, NormInfo, find_norm, layer_parameters, norm_class

__all__ = ["DetectedNorm", "TreatAs", "UnsupportedNorm", "detect_norm", "drop_and_act", "holds_moments"]

TreatAs = Mapping[type[nn.Module], str]  # by class, the name of the norm that its layers compute


@dataclass(frozen=True)
class DetectedNorm:
    """Description of a norm layer, sufficient to build a replacement."""

    norm: str  # its name in the registry
    channels: int
    dim: int | None  # 1, 2, 3; None if the class accepts any rank
    options: dict[str, object] = field(default_factory=dict)  # eps, momentum, num_groups, ...
    synced: bool = False
    acts: bool = False  # it applies its submodules `drop` and `act` to the result
    constant: bool = False  # its moments and affine parameters are buffers that never change
    per_position: bool = False  # a layer norm of each position, not of each sample as the norm "ln" of the registry


@dataclass(frozen=True)
class UnsupportedNorm:
    """A norm layer that is not supported, because it is of an unknown class or does more than a known norm."""

    reason: str


Kind = tuple[str, int | None]  # the norm, and 1, 2, 3 or None for a class that accepts any rank

_TORCH: Mapping[type[nn.Module], Kind] = {
    nn.SyncBatchNorm: ("bn", None),
    nn.BatchNorm1d: ("bn", 1),
    nn.BatchNorm2d: ("bn", 2),
    nn.BatchNorm3d: ("bn", 3),
    nn.InstanceNorm1d: ("in", 1),
    nn.InstanceNorm2d: ("in", 2),
    nn.InstanceNorm3d: ("in", 3),
    nn.GroupNorm: ("gn", None),
}
# Layers of other libraries with a `forward` of their own that compute the norm of the class they derive from.
_SAME_AS_BASE = (
    "timm.layers.norm.GroupNorm",
    "timm.layers.norm.GroupNorm1",
    "timm.layers.norm_act.BatchNormAct2d",
    "timm.layers.norm_act.SyncBatchNormAct",
    "timm.layers.norm_act.GroupNormAct",
    "timm.layers.norm_act.GroupNorm1Act",
)
# Subclasses of torch's LayerNorm that normalize each position of (N, C, H, W) input over its channels.
_OF_POSITIONS = (
    "timm.layers.norm.LayerNorm2d",
    "timm.layers.norm.LayerNorm2dFp32",
    "timm.layers.norm_act.LayerNormAct2d",
    "timm.layers.norm_act.LayerNormAct2dFp32",
    "torchvision.models.convnext.LayerNorm2d",
)
_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "num_groups", "kernel", "r_max", "d_max", "total_steps")
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "r_limit", "d_limit"}


def detect_norm(module: nn.Module, treat_as: TreatAs = MappingProxyType({})) -> DetectedNorm | UnsupportedNorm | None:
    """Detect which norm a module is; None if it is not a norm over channels in dimension 1.

    Args:
        module: The module.
        treat_as: By class, the norm that layers of exactly this class compute.

    Example:
        >>> detect_norm(nn.BatchNorm2d(8)).norm, detect_norm(nn.Conv2d(3, 8, 3)) is None
        ('bn', True)
    """
    cls = type(module)
    registered = _registered_entry(module)
    if registered is not None:
        return _describe_registered(module, registered)
    own = _own_classes()
    base = next((c for c in cls.__mro__ if c in own or c in _TORCH), None)
    base = vars(cls).get("normalizes_as", base)  # our norm-then-activation classes, and stock layers
    kind = own.get(base) or _TORCH.get(base) if base is not None else None
    if cls in treat_as:
        norm = find_norm(treat_as[cls])[0].name
        return _describe(module, (norm, kind[1] if kind else None), per_position=isinstance(module, nn.LayerNorm))
    if "FrozenBatchNorm" in cls.__name__ and not module._parameters:
        return _describe(module, ("bn", 2), constant=True)
    if isinstance(module, nn.LayerNorm):
        return _describe(module, ("ln", 2), per_position=True) if _full_name(cls) in _OF_POSITIONS else None
    if base is None or kind is None:
        return _unknown(module)
    if isinstance(module, LazyModuleMixin):
        return UnsupportedNorm("it is lazy and has no channels yet; run a batch through the model first")
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return UnsupportedNorm("it is an instance norm with running statistics, which no norm of contnorm has")
    known = vars(cls).get("normalizes_as") is base or _full_name(cls) in _SAME_AS_BASE
    if not known and (reason := _change(module, base)):
        return UnsupportedNorm(f"{reason}; if it computes a known norm, give treat_as={{{cls.__name__}: {kind[0]!r}}}")
    return _describe(module, kind, synced=base in (nn.SyncBatchNorm, SyncContinualNorm))


@cache
def _own_classes() -> dict[type[nn.Module], Kind]:
    """Return the classes of this package, each with the first norm of the registry that is built from it."""
    classes: dict[type[nn.Module], Kind] = {SyncContinualNorm: ("cn", None)}
    for entry in NORMS.values():
        for dim in () if entry.layers else DIMS:
            classes.setdefault(cast(type[nn.Module], norm_class(entry, dim)), (entry.name, dim))
    return classes


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _unknown(module: nn.Module) -> UnsupportedNorm | None:
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    if isinstance(module, NormLayer) or {"running_mean", "running_var"} <= buffers:
        return UnsupportedNorm(
            "it keeps running moments but is of no known class; give treat_as={its class: a norm} if it computes one"
        )
    return None


def _change(module: nn.Module, base: type[nn.Module]) -> str:
    """Return what a module does otherwise than the class that it derives from; empty if it does the same."""
    changed = [name for name in ("forward", "train") if getattr(type(module), name) is not getattr(base, name)]
    if changed:
        return f"its class overrides {changed[0]} of {base.__name__}"
    return "its forward was replaced on the object" if "forward" in vars(module) else ""


def _describe(
    module: nn.Module, kind: Kind, *, synced: bool = False, constant: bool = False, per_position: bool = False
) -> DetectedNorm | UnsupportedNorm:
    acts = all(isinstance(getattr(module, name, None), nn.Module) for name in ("drop", "act"))
    known = _TENSORS | set(getattr(module, "own_tensors", ())) | ({"drop", "act"} if acts else set())
    unknown = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    if unknown:
        return UnsupportedNorm(f"it holds {', '.join(map(repr, unknown))}, which its norm does not have")
    channels = _channels(module)
    if channels is None:
        return UnsupportedNorm("its number of channels is unknown; store it as the attribute num_features")
    norm, dim = kind
    if isinstance(module, NormLayer) and norm in NORMS:
        norm = _variant(module, norm)
    if dim is None:
        dim = vars(module).get("_contnorm_dim")  # of the layer that a synchronized layer replaced
    return DetectedNorm(norm, channels, dim, _options_of(module, constant), synced, acts, constant, per_position)


def _variant(module: nn.Module, norm: str) -> str:
    """Return the norm among those of one class whose presets a layer has, such as the orders of continual norm."""
    entries = [entry for entry in NORMS.values() if entry.target == NORMS[norm].target and not entry.layers]
    fitting = [e for e in entries if all(getattr(module, name) == value for name, value in e.preset.items())]
    return max(fitting, key=lambda entry: len(entry.preset)).name


def _channels(module: nn.Module) -> int | None:
    """Return the number of channels of a layer, from its attributes or the shape of its tensors."""
    for name in ("num_features", "num_channels"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    for name in ("weight", "bias", "running_mean"):
        if isinstance(tensor := getattr(module, name, None), Tensor) and tensor.dim() == 1:
            return len(tensor)
    return int(module.normalized_shape[0]) if isinstance(module, nn.LayerNorm) else None


def _options_of(module: nn.Module, constant: bool) -> dict[str, object]:
    names: tuple[str, ...] = (*_OPTIONS, *getattr(module, "own_options", ()))
    if constant or isinstance(module, nn.LayerNorm):
        names = ("eps",)
    elif isinstance(module, _InstanceNorm):
        names = ("eps", "affine")
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if "affine" in options or isinstance(module, nn.LayerNorm):
        options["affine"] = _has_affine(module)
    if "kernel" not in vars(module):  # a class attribute is not the user's choice and must not bind the replacement
        options.pop("kernel", None)
    return options


def _has_affine(module: nn.Module) -> bool:
    return module._parameters.get("weight") is not None or module._parameters.get("bias") is not None


def _registered_entry(module: nn.Module) -> NormInfo | None:
    """Return the registered norm whose class a module has, or of which `create_norm` made it; None if there is none."""
    name = vars(module).get("_contnorm_norm")
    if isinstance(name, str) and name in NORMS and NORMS[name].layers:
        return NORMS[name]
    if type(module).__module__.partition(".")[0] in ("torch", "contnorm"):
        return None
    return next((entry for entry in NORMS.values() if type(module) in entry.layers.values()), None)


def _describe_registered(module: nn.Module, entry: NormInfo) -> DetectedNorm | UnsupportedNorm:
    channels = _channels(module)
    if channels is None:
        return UnsupportedNorm("its number of channels is unknown; store it as the attribute num_features")
    dim = vars(module).get("_contnorm_dim")
    if dim is None:
        dims = [d for d, factory in entry.layers.items() if type(module) is factory]
        dim = dims[0] if len(dims) == 1 else None
    factory = entry.layers[dim if dim is not None else min(entry.layers)]
    options: dict[str, object] = {}
    for name in layer_parameters(factory):
        value = getattr(module, name, ...)
        if value is None or isinstance(value, int | float | str | list | tuple):
            options[name] = value
    if "affine" in options:
        options["affine"] = _has_affine(module)
    return DetectedNorm(entry.name, channels, dim, options)


def drop_and_act(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook with which `convert_norm` keeps the activation of a norm-then-activation layer."""
    if args and output is args[0]:  # no norm at all; an activation in place must not change what the network reads
        output = output.clone()
    result: Tensor = cast(Any, module).act(cast(Any, module).drop(output))
    return result


def holds_moments(module: nn.Module) -> bool:
    """Whether a module has running moments. It may be a layer of any library.

    Example:
        >>> holds_moments(nn.BatchNorm2d(8)), holds_moments(nn.GroupNorm(2, 8))
        (True, False)
    """
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)
