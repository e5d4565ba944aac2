"""What norm a module is, whoever wrote it: ours, torch's, or a subclass of torch's in another library.

A subclass that only renames or configures torch's layer is that layer. One that brings a forward of its own does
something besides normalizing, which is known here or makes the layer a stranger:

- norm-then-activation layers (timm's ``BatchNormAct2d`` and its kin): they normalize, then call ``drop`` and ``act``;
- ``FrozenBatchNorm2d`` (torchvision, detectron): batch norm whose moments and affine are constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from contnorm.catalog import NORMS
from contnorm.factory import norm_class
from contnorm.layers.base import NormLayer
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import StockGroupNorm
from contnorm.layers.sync import SyncContinualNorm

__all__ = ["Recognized", "Stranger", "holds_moments", "recognize"]


@dataclass(frozen=True)
class Recognized:
    """A norm layer, described so that any other can be built in its place."""

    norm: str  # its name in the catalog
    channels: int
    dim: int | None  # 1, 2, 3; None where the class takes any rank
    options: dict[str, object] = field(default_factory=dict)  # eps, momentum, num_groups, ...
    synced: bool = False
    acts: bool = False  # it also calls its own `drop` and `act` on the result
    constant: bool = False  # its moments and affine are buffers that never change


@dataclass(frozen=True)
class Stranger:
    """A layer that normalizes and does something unknown besides."""

    reason: str


_TORCH: tuple[tuple[type[nn.Module], str, int | None], ...] = (
    (nn.SyncBatchNorm, "bn", None),
    (nn.BatchNorm1d, "bn", 1),
    (nn.BatchNorm2d, "bn", 2),
    (nn.BatchNorm3d, "bn", 3),
    (nn.InstanceNorm1d, "in", 1),
    (nn.InstanceNorm2d, "in", 2),
    (nn.InstanceNorm3d, "in", 3),
    (StockGroupNorm, "gn", None),
    (nn.GroupNorm, "gn", None),
)
_NAMES = {cls.__name__ for cls, _, _ in _TORCH}
_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "num_groups", "kernel", "r_max", "d_max", "total_steps")


def recognize(module: nn.Module) -> Recognized | Stranger | None:
    """What norm a module is; None where it is none that works over channels in dimension 1.

    Example:
        >>> recognize(nn.BatchNorm2d(8)).norm, recognize(nn.Conv2d(3, 8, 3)) is None
        ('bn', True)
    """
    if isinstance(module, NormLayer):
        return _recognize_ours(module)
    if type(module).__name__ == "FrozenBatchNorm2d" and "running_mean" in module._buffers:
        return Recognized("bn", _size(module, "running_mean"), 2, {"eps": module.eps}, constant=True)
    for cls, norm, dim in _TORCH:
        if isinstance(module, cls):
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                return Stranger("it evaluates with running statistics of instances, which no norm here keeps")
            return _described(module, cls, norm, dim, synced=cls is nn.SyncBatchNorm)
    if isinstance(module, torch.jit.ScriptModule) and module.original_name in _NAMES:
        return Stranger("it is scripted or traced and can't be changed; do this first, and script the model then")
    if isinstance(module, LazyModuleMixin) and isinstance(module, _BatchNorm | _InstanceNorm):
        return Stranger("it does not know its channels before it has seen a batch; run one through the model first")
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return Stranger(f"{type(module).__name__} computes a norm in its own way")
    return None


def _recognize_ours(module: NormLayer) -> Recognized | Stranger:
    for spec in NORMS.values():
        for dim in (1, 2, 3, None):
            cls = SyncContinualNorm if dim is None else norm_class(spec, dim)
            if isinstance(module, cls):
                name = _variant(module) if isinstance(module, ContinualNormBase) else spec.name
                return _described(module, cls, name, dim, synced=dim is None)
    return Stranger(f"{type(module).__name__} is a norm of its own kind")


def _variant(module: ContinualNormBase) -> str:
    names = {
        ("gn_bn", False): "cn",
        ("gn_bn", True): "cn_tied",
        ("bn_gn", False): "bn_gn",
        ("bn_gn", True): "bn_gn_tied",
    }
    return names[module.order, module.tied]


def _described(
    module: nn.Module, cls: type[nn.Module], norm: str, dim: int | None, synced: bool
) -> Recognized | Stranger:
    """A layer of a known class, or of a subclass that changes nothing, or nothing unknown."""
    reason = _peculiar(module, cls)
    if reason:
        return Stranger(reason)
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    return Recognized(norm, channels, dim, _options_of(module), synced=synced, acts=_acts(module))


_METHODS = ("forward", "__call__", "train", "eval", "_check_input_dim", "_load_from_state_dict", "_save_to_state_dict")


def _peculiar(module: nn.Module, cls: type[nn.Module]) -> str:
    """What a layer does that its class does not, in words; empty where there is nothing."""
    name = type(module).__name__
    if is_parametrized(module):
        return "its parameters are computed by a parametrization; remove that first"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object; put the class's own back first"
    acts = _acts(module)
    changed = [m for m in _METHODS if getattr(type(module), m, None) is not getattr(cls, m, None)]
    if [method for method in changed if not (acts and method == "forward")]:
        return f"{name} does something of its own in {changed[0]}"
    known = {"weight", "bias", "mean_weight", "var_weight", "running_mean", "running_var", "num_batches_tracked"}
    known |= {"r_limit", "d_limit"} | ({"drop", "act"} if acts else set())
    more = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    if more:
        return f"{name} holds {', '.join(map(repr, more))} besides what its norm needs"
    return ""


def _acts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "drop", None), nn.Module) and isinstance(getattr(module, "act", None), nn.Module)


def _options_of(module: nn.Module) -> dict[str, object]:
    found = {name: getattr(module, name) for name in _OPTIONS if hasattr(module, name)}
    if "affine" in found:
        found["affine"] = module._parameters.get("weight") is not None or module._parameters.get("bias") is not None
    if isinstance(module, _InstanceNorm):
        found = {name: found[name] for name in ("eps", "affine")}
    if "kernel" not in vars(module):  # a norm that has one kernel did not choose it, and its successor may
        found.pop("kernel", None)
    if hasattr(module, "_contnorm_tracked"):  # torch's layer, frozen by us: see freezing.py
        found["track_running_stats"] = module._contnorm_tracked
    return found


def _size(module: nn.Module, buffer: str) -> int:
    return int(getattr(module, buffer).shape[0])


def holds_moments(module: nn.Module) -> bool:
    """Whether a module keeps running moments, whoever wrote it.

    Example:
        >>> holds_moments(nn.BatchNorm2d(8)), holds_moments(nn.GroupNorm(2, 8))
        (True, False)
    """
    return isinstance(getattr(module, "running_mean", None), Tensor)
