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

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
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

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Filter = Choice | Iterable[Choice]
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
    known = _known_classes()
    base: Any = vars(cls).get("normalizes_as", next((c for c in cls.__mro__ if c in known), None))
    norm, dim = known.get(base, ("", None))
    full_name = f"{cls.__module__}.{cls.__qualname__}"
    if (made := NORMS.get(vars(module).get("_contnorm_norm", ""))) is not None and made.layers:  # by `create_norm`
        return _describe(module, made.name, registered=made)
    if cls.__module__.partition(".")[0] not in ("torch", "contnorm"):
        for entry in NORMS.values():
            if cls in entry.layers.values():
                return _describe(module, entry.name, registered=entry)
    if cls in treat_as:
        return _describe(module, find_norm(treat_as[cls])[0].name, dim, per_position=isinstance(module, nn.LayerNorm))
    if "FrozenBatchNorm" in cls.__name__ and not module._parameters:
        return _describe(module, "bn", 2, constant=True)
    if isinstance(module, nn.LayerNorm):
        return _describe(module, "ln", 2, per_position=True) if full_name in _OF_POSITIONS else None
    if not norm:
        buffers = {name for name, _ in module.named_buffers(recurse=False)}
        unknown = isinstance(module, NormLayer) or {"running_mean", "running_var"} <= buffers
        return UnsupportedNorm("it keeps running moments and is of no known class; see treat_as=") if unknown else None
    if isinstance(module, LazyModuleMixin):
        return UnsupportedNorm("it is lazy and has no channels yet; run a batch through the model first")
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return UnsupportedNorm("it is an instance norm with running statistics, which no norm of contnorm has")
    changed = [name for name in ("forward", "train") if getattr(cls, name) is not getattr(base, name)]
    same = vars(cls).get("normalizes_as") is base or full_name in _SAME_AS_BASE
    if not same and (changed or "forward" in vars(module)):
        return UnsupportedNorm(
            f"it overrides {(*changed, 'forward')[0]} of {base.__name__}; if it computes a known norm, give "
            f"treat_as={{{cls.__name__}: {norm!r}}}"
        )
    return _describe(module, norm, dim, synced=base in (nn.SyncBatchNorm, SyncContinualNorm))


@cache
def _known_classes() -> dict[Any, Kind]:
    """Return the classes of this package, each with the first norm of the registry built from it, and of torch."""
    classes: dict[Any, Kind] = {SyncContinualNorm: ("cn", None)}
    for entry in NORMS.values():
        for dim in () if entry.layers else DIMS:
            classes.setdefault(norm_class(entry, dim), (entry.name, dim))
    return {**_TORCH, **classes}


def _describe(
    module: nn.Module,
    norm: str,
    dim: int | None = None,
    *,
    registered: NormInfo | None = None,
    synced: bool = False,
    constant: bool = False,
    per_position: bool = False,
) -> DetectedNorm | UnsupportedNorm:
    acts = registered is None and all(isinstance(getattr(module, n, None), nn.Module) for n in ("drop", "act"))
    known = _TENSORS | set(getattr(module, "own_tensors", ())) | ({"drop", "act"} if acts else set())
    unknown = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    if unknown and registered is None:
        return UnsupportedNorm(f"it holds {', '.join(map(repr, unknown))}, which its norm does not have")
    sizes = [getattr(module, name, None) for name in ("num_features", "num_channels")]
    tensors = [getattr(module, name, None) for name in ("weight", "bias", "running_mean")]
    sizes += [len(tensor) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim() == 1]
    sizes += [module.normalized_shape[0]] if isinstance(module, nn.LayerNorm) else []
    channels = next((size for size in sizes if isinstance(size, int)), None)
    if channels is None:
        return UnsupportedNorm("its number of channels is unknown; store it as the attribute num_features")

    # Of the norms that one class computes, such as the orders of continual norm, the one whose presets the layer has.
    info = registered or NORMS[norm]
    family = [info] if info.layers else [entry for entry in NORMS.values() if entry.target == info.target]
    fitting = [e for e in family if all(getattr(module, name, value) == value for name, value in e.preset.items())]
    info = max(fitting, key=lambda entry: len(entry.preset)) if isinstance(module, NormLayer) else info
    dim = vars(module).get("_contnorm_dim", dim)  # also of the layer that a synchronized layer replaced
    if registered is not None and dim is None:
        dims = [d for d, factory in info.layers.items() if type(module) is factory]
        dim = dims[0] if len(dims) == 1 else None
    presets = {name for entry in family for name in entry.preset}
    options: dict[str, object] = {}
    for name in layer_parameters(norm_class(info, cast(Any, dim or max(info.layers or DIMS)))):
        value = getattr(module, name, ...)
        if name == "kernel" and name not in vars(module):  # an attribute of the class is not the user's choice
            continue
        if name not in presets and (value is None or isinstance(value, int | float | str | list | tuple)):
            options[name] = value
    if constant or per_position:
        options = {name: value for name, value in options.items() if name == "eps"}
    if "affine" in options or per_position:
        options["affine"] = any(module._parameters.get(name) is not None for name in ("weight", "bias"))
    return DetectedNorm(info.name, channels, dim, options, synced, acts, constant, per_position)


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


# --- selection of layers --------------------------------------------------------------------------------------------


def is_selected(name: str, module: nn.Module, only: Filter | None, skip: Filter | None) -> bool:
    """Whether a layer matches ``only`` (None for all layers) and does not match ``skip``.

    Example:
        >>> is_selected("layer1.bn", nn.BatchNorm2d(8), "layer1.*", skip=nn.GroupNorm)
        True
    """
    return _matches("*" if only is None else only, name, module) and not _matches(skip or (), name, module)


def check_names(filters: Iterable[Filter | None], names: Collection[str], caller: str) -> None:
    """Raise for a filter that names a layer that does not exist: misspelt, it would select other layers."""
    for filter_ in filters:
        for choice in [filter_] if isinstance(filter_, str) else filter_ if isinstance(filter_, Iterable) else ():
            if isinstance(choice, str) and choice not in names and not any(sign in choice for sign in "*?["):
                raise ValueError(f"{caller}: {choice!r} is no norm layer; '{choice}.*' are those inside of a module.")


def _matches(filter_: Filter, name: str, module: nn.Module) -> bool:
    if isinstance(filter_, str):
        return fnmatch.fnmatchcase(name, filter_)
    if isinstance(filter_, type):
        return isinstance(module, filter_)
    if callable(filter_):
        return filter_(name, module)
    return any(_matches(choice, name, module) for choice in filter_)
