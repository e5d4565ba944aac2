"""Detect which norm a module is: a layer of this package, of torch, or a subclass of torch's in another library.

A subclass counts as the layer it derives from if it computes the same on random input (see `probe`). Two further kinds
of layers are supported:

- norm-then-activation layers (timm's ``BatchNormAct2d``): they normalize, then call ``drop`` and ``act``;
- constant batch norms (``FrozenBatchNorm2d`` of torchvision and detectron, timm's ``FrozenBatchNormAct2d``): their
  moments and affine parameters are buffers, which are also used in training.

Any other layer with running moments is unsupported and described by a `Stranger`.
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
    """Description of a norm layer, sufficient to build a replacement."""

    norm: str  # its name in the registry
    channels: int
    dim: int | None  # 1, 2, 3; None if the class accepts any rank
    options: dict[str, object] = field(default_factory=dict)  # eps, momentum, num_groups, ...
    synced: bool = False
    acts: bool = False  # it applies its submodules `drop` and `act` to the result
    constant: bool = False  # its moments and affine parameters are buffers that never change
    obeys_tracking: bool = True  # setting `track_running_stats` to False stops updates of its moments


@dataclass(frozen=True)
class Stranger:
    """A norm layer that is not supported, because it is of an unknown kind or does more than a known norm."""

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
    """Detect which norm a module is; None if it is not a norm over channels in dimension 1.

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
            return _describe(module, cls, norm, dim, synced=cls is nn.SyncBatchNorm)
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
    """Describe a layer with running moments that is not of torch's classes: a constant batch norm, or unsupported."""
    eps = getattr(module, "eps", None)
    reason = _unknown_members(module)
    if not isinstance(eps, float) or reason:
        return Stranger(reason or "it keeps running moments but is not a known norm")
    reasons = []
    for dim in (2, 1, 3):
        candidate = Recognized(
            "bn", _size(module, "running_mean"), dim, {"eps": eps}, acts=_has_drop_and_act(module), constant=True
        )
        reasons.append(_compare(module, candidate).reason)
        if not reasons[-1]:
            return candidate
    return Stranger(f"it keeps running moments but is not a known norm: taken for a constant batch norm, {reasons[0]}")


def _compare(module: nn.Module, candidate: Recognized) -> Outcome:
    return compare_with_norm(
        module,
        ExpectedNorm(
            candidate.norm, candidate.channels, candidate.dim, candidate.options, candidate.acts, candidate.constant
        ),
    )


def _recognize_ours(module: NormLayer) -> Recognized | Stranger:
    for spec in NORMS.values():
        for dim in (1, 2, 3, None):
            cls = SyncContinualNorm if dim is None else norm_class(spec, dim)
            if isinstance(module, cls):
                name = _variant(module) if isinstance(module, ContinualNormBase) else spec.name
                return _describe(module, cls, name, dim, synced=dim is None)
    return Stranger(f"{type(module).__name__} is a norm of its own kind")


def _variant(module: ContinualNormBase) -> str:
    names = {
        ("gn_bn", False): "cn",
        ("gn_bn", True): "cn_tied",
        ("bn_gn", False): "bn_gn",
        ("bn_gn", True): "bn_gn_tied",
    }
    return names[module.order, module.tied]


def _describe(
    module: nn.Module, cls: type[nn.Module], norm: str, dim: int | None, synced: bool
) -> Recognized | Stranger:
    """Describe a layer of a known class, or of a subclass that computes the same norm."""
    reason = _obstacle(module, cls)
    if reason:
        return Stranger(reason)
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    candidate = Recognized(norm, channels, dim, _options_of(module), synced=synced, acts=_has_drop_and_act(module))
    if type(module) is cls and candidate.acts == (drop_and_act in module._forward_hooks.values()):
        return candidate
    outcome = _compare(module, candidate)
    return Stranger(outcome.reason) if outcome.reason else replace(candidate, obeys_tracking=outcome.obeys_tracking)


# A subclass that overrides one of these changes more than its output, which a comparison of outputs would not show.
_METHODS = ("__call__", "train", "eval", "_load_from_state_dict", "_save_to_state_dict")


def _obstacle(module: nn.Module, cls: type[nn.Module]) -> str:
    """Return why a layer cannot be described by its class and attributes; empty if it can."""
    if is_parametrized(module):
        return "its parameters are computed by a parametrization; remove that first"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object; restore the method of the class first"
    changed = [m for m in _METHODS if getattr(type(module), m, None) is not getattr(cls, m, None)]
    if changed:
        return f"its class overrides {changed[0]}"
    return _unknown_members(module)


def _unknown_members(module: nn.Module) -> str:
    known = {"weight", "bias", "mean_weight", "var_weight", "running_mean", "running_var", "num_batches_tracked"}
    known |= {"r_limit", "d_limit"} | ({"drop", "act"} if _has_drop_and_act(module) else set())
    unknown = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    return f"it holds {', '.join(map(repr, unknown))}, which its norm does not have" if unknown else ""


def _has_drop_and_act(module: nn.Module) -> bool:
    return isinstance(getattr(module, "drop", None), nn.Module) and isinstance(getattr(module, "act", None), nn.Module)


def drop_and_act(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook with which `convert_norm` keeps the activation of a norm-then-activation layer."""
    result: Tensor = cast(Any, module).act(cast(Any, module).drop(output))
    return result


def _options_of(module: nn.Module) -> dict[str, object]:
    options = {name: getattr(module, name) for name in _OPTIONS if hasattr(module, name)}
    if "affine" in options:
        options["affine"] = module._parameters.get("weight") is not None or module._parameters.get("bias") is not None
    if isinstance(module, _InstanceNorm):
        options = {name: options[name] for name in ("eps", "affine")}
    if "kernel" not in vars(module):  # a class attribute is not the user's choice and must not bind the replacement
        options.pop("kernel", None)
    if hasattr(module, "_contnorm_tracked"):  # a layer of torch, frozen by moments/freeze.py
        options["track_running_stats"] = module._contnorm_tracked
    return options


def _size(module: nn.Module, buffer: str) -> int:
    return int(getattr(module, buffer).shape[0])


def holds_moments(module: nn.Module) -> bool:
    """Whether a module has running moments. It may be a layer of any library.

    Example:
        >>> holds_moments(nn.BatchNorm2d(8)), holds_moments(nn.GroupNorm(2, 8))
        (True, False)
    """
    return isinstance(getattr(module, "running_mean", None), Tensor)
