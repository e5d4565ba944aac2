"""What norm a module is, whoever wrote it: ours, torch's, or a subclass of torch's in another library.

A subclass is the layer it derives from if it computes the same on random input (see `probe`). Two kinds may do more:

- norm-then-activation layers (timm's ``BatchNormAct2d``): they normalize, then call ``drop`` and ``act``;
- constant batch norms (``FrozenBatchNorm2d`` of torchvision and detectron, timm's ``FrozenBatchNormAct2d``): their
  moments and affine are buffers, used in training too.

Anything else with running moments is a `Stranger`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from contnorm.convert.probe import ExpectedNorm, Outcome, compare_with_norm
from contnorm.factory import norm_class
from contnorm.layers.base import NormLayer
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import StockGroupNorm
from contnorm.layers.sync import SyncContinualNorm
from contnorm.registry import NORMS

__all__ = ["Recognized", "Stranger", "drop_and_act", "holds_moments", "recognize"]


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
    obeys_tracking: bool = True  # setting `track_running_stats` to False holds its moments still


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
_NAMES = {cls.__name__ for cls, _, _ in _TORCH} | {
    norm_class(spec, dim).__name__ for spec in NORMS.values() if spec.name != "none" for dim in (1, 2, 3)
}
_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "num_groups", "kernel", "r_max", "d_max", "total_steps")


def recognize(module: nn.Module) -> Recognized | Stranger | None:
    """What norm a module is; None where it is none that works over channels in dimension 1.

    Example:
        >>> recognize(nn.BatchNorm2d(8)).norm, recognize(nn.Conv2d(3, 8, 3)) is None
        ('bn', True)
    """
    if isinstance(module, NormLayer):
        return _recognize_ours(module)
    for cls, norm, dim in _TORCH:
        if isinstance(module, cls):
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                return Stranger("it evaluates with running statistics of instances, which no norm here keeps")
            return _described(module, cls, norm, dim, synced=cls is nn.SyncBatchNorm)
    if isinstance(module, torch.jit.ScriptModule) and (module.original_name in _NAMES or holds_moments(module)):
        return Stranger("it is scripted or traced and can't be changed; do this first, and script the model then")
    if isinstance(module, LazyModuleMixin) and isinstance(module, _BatchNorm | _InstanceNorm):
        return Stranger("it does not know its channels before it has seen a batch; run one through the model first")
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return Stranger("it is a batch or instance norm of an unknown class")
    return _recognize_constant(module) if _has_moment_buffers(module) else None


def _has_moment_buffers(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
    return isinstance(mean, Tensor) and isinstance(var, Tensor) and mean.dim() == 1 and mean.shape == var.shape


def _recognize_constant(module: nn.Module) -> Recognized | Stranger:
    """A layer outside torch's classes that has running moments: batch norm with constant moments, or a stranger."""
    eps = getattr(module, "eps", None)
    reason = _more_tensors(module)
    if not isinstance(eps, float) or reason:
        return Stranger(reason or "it keeps running moments but is not a known norm")
    reasons = []
    for dim in (2, 1, 3):
        found = Recognized("bn", _size(module, "running_mean"), dim, {"eps": eps}, acts=_acts(module), constant=True)
        reasons.append(_compare(module, found).reason)
        if not reasons[-1]:
            return found
    return Stranger(f"it keeps running moments but is not a known norm: taken for a constant batch norm, {reasons[0]}")


def _compare(module: nn.Module, found: Recognized) -> Outcome:
    return compare_with_norm(
        module, ExpectedNorm(found.norm, found.channels, found.dim, found.options, found.acts, found.constant)
    )


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
    reason = _obstacle(module, cls)
    if reason:
        return Stranger(reason)
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    found = Recognized(norm, channels, dim, _options_of(module), synced=synced, acts=_acts(module))
    if type(module) is cls and found.acts == (drop_and_act in module._forward_hooks.values()):
        return found
    outcome = _compare(module, found)
    return Stranger(outcome.reason) if outcome.reason else replace(found, obeys_tracking=outcome.obeys_tracking)


# Overriding one of these changes more than what is computed; a comparison of outputs would not show it.
_METHODS = ("__call__", "train", "eval", "_load_from_state_dict", "_save_to_state_dict")


def _obstacle(module: nn.Module, cls: type[nn.Module]) -> str:
    """Why a layer can't be described by its class and attributes; empty where it can."""
    if is_parametrized(module):
        return "its parameters are computed by a parametrization; remove that first"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object; restore the method of the class first"
    changed = [m for m in _METHODS if getattr(type(module), m, None) is not getattr(cls, m, None)]
    if changed:
        return f"its class overrides {changed[0]}"
    return _more_tensors(module)


def _more_tensors(module: nn.Module) -> str:
    known = {"weight", "bias", "mean_weight", "var_weight", "running_mean", "running_var", "num_batches_tracked"}
    known |= {"r_limit", "d_limit"} | ({"drop", "act"} if _acts(module) else set())
    more = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    return f"it holds {', '.join(map(repr, more))}, which its norm does not have" if more else ""


def _acts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "drop", None), nn.Module) and isinstance(getattr(module, "act", None), nn.Module)


def drop_and_act(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The forward hook by which `convert_norm` keeps the activation of a norm-then-activation layer."""
    result: Tensor = cast(Any, module).act(cast(Any, module).drop(output))
    return result


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
