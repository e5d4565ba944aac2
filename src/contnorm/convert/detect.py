"""Detect which norm a module is: a layer of this package, of torch, or a subclass of torch's in another library.

A subclass of torch's ``BatchNorm2d`` may compute anything. It counts as the layer it derives from only if a copy of it
gives the same output, input gradient and running moments on random input, in training and evaluation
(`contnorm.convert.norm_comparison`). The layer itself and torch's random state are not changed. Three further kinds of
layers are supported:

- norm-then-activation layers (timm's ``BatchNormAct2d``): they normalize, then call ``drop`` and ``act``;
- constant batch norms (``FrozenBatchNorm2d`` of torchvision and detectron, timm's ``FrozenBatchNormAct2d``): their
  moments and affine parameters are buffers, which are also used in training;
- layer norms over the channels of each position of (N, C, H, W) input (``LayerNorm2d`` of timm and torchvision), which
  are subclasses of torch's ``LayerNorm``. Other layer norms normalize the last dimension and are not norms over
  dimension 1.

A layer of a norm that was registered with `register_norm` is detected by its class. Any other layer with running
moments is unsupported and described by a `UnsupportedNorm`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from contnorm.convert.detected import DetectedNorm, UnsupportedNorm
from contnorm.convert.norm_comparison import compare_with_norm
from contnorm.norm_entry import NormEntry, layer_parameters, norm_class
from contnorm.norms.base import NormLayer
from contnorm.norms.continual import ContinualNormBase
from contnorm.norms.stock import StockGroupNorm
from contnorm.norms.sync import SyncContinualNorm
from contnorm.registry import NORMS

__all__ = ["detect_norm", "drop_and_act", "holds_moments"]


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
    norm_class(spec, dim).__name__
    for spec in NORMS.values()
    if spec.name != "none" and not spec.layers
    for dim in (1, 2, 3)
}
_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "num_groups", "kernel", "r_max", "d_max", "total_steps")


def detect_norm(module: nn.Module) -> DetectedNorm | UnsupportedNorm | None:
    """Detect which norm a module is; None if it is not a norm over channels in dimension 1.

    Example:
        >>> detect_norm(nn.BatchNorm2d(8)).norm, detect_norm(nn.Conv2d(3, 8, 3)) is None
        ('bn', True)
    """
    registered = _registered_spec(module)
    if registered is not None:
        return _describe_registered(module, registered)
    if isinstance(module, NormLayer):
        return _detect_own_layer(module)
    for cls, norm, dim in _TORCH:
        if isinstance(module, cls):
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                return UnsupportedNorm("it is an instance norm with running statistics, which no norm of contnorm has")
            if cls is nn.SyncBatchNorm:
                dim = _recorded_dim(module)
            return _describe(module, cls, norm, dim, synced=cls is nn.SyncBatchNorm)
    if isinstance(module, torch.jit.ScriptModule) and (module.original_name in _NAMES or holds_moments(module)):
        return UnsupportedNorm("it is scripted or traced and can't be changed; convert the model first, then script it")
    if isinstance(module, LazyModuleMixin) and isinstance(module, _BatchNorm | _InstanceNorm):
        return UnsupportedNorm("it is lazy and has no channels yet; run a batch through the model first")
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return UnsupportedNorm("it is a batch or instance norm of an unknown class")
    return _detect_other_layer(module)


def _detect_other_layer(module: nn.Module) -> DetectedNorm | UnsupportedNorm | None:
    if isinstance(module, nn.LayerNorm):
        return _detect_layer_norm(module)
    return _detect_constant_norm(module) if _has_moment_buffers(module) else None


def _registered_spec(module: nn.Module) -> NormEntry | None:
    """Return the registered norm whose class a module has; None if there is none.

    A subclass of a registered class may compute anything, so the class must be the same.
    """
    name = vars(module).get("_contnorm_norm")  # made by `create_norm` or `convert_norm`
    if isinstance(name, str) and name in NORMS and NORMS[name].layers:
        return NORMS[name]
    if type(module).__module__.partition(".")[0] in ("torch", "contnorm"):
        return None
    return next((spec for spec in NORMS.values() if type(module) in spec.layers.values()), None)


def _describe_registered(module: nn.Module, spec: NormEntry) -> DetectedNorm | UnsupportedNorm:
    if is_parametrized(module):
        return UnsupportedNorm("its parameters are computed by a parametrization; remove that first")
    channels = _channels(module)
    if channels is None:
        return UnsupportedNorm("its number of channels is unknown; store it as the attribute num_features")
    dims = list(spec.layers)
    dim = dims[0] if len(dims) == 1 else vars(module).get("_contnorm_dim")
    if dim is None:
        of_class = [dim for dim, factory in spec.layers.items() if type(module) is factory]
        dim = of_class[0] if len(of_class) == 1 else None
    factory = spec.layers[dim if dim is not None else dims[0]]
    options = {name: getattr(module, name) for name in layer_parameters(factory) if hasattr(module, name)}
    plain: dict[str, object] = {
        name: value for name, value in options.items() if value is None or isinstance(value, int | float | str)
    }
    if "affine" in plain:
        plain["affine"] = module._parameters.get("weight") is not None or module._parameters.get("bias") is not None
    if hasattr(module, "_contnorm_tracked"):  # frozen by moments/freeze.py
        plain["track_running_stats"] = module._contnorm_tracked
    return DetectedNorm(spec.name, channels, dim, plain, obeys_tracking=False)


def _channels(module: nn.Module) -> int | None:
    """Return the number of channels of a layer, from its attributes or the shape of its tensors."""
    for name in ("num_features", "num_channels"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    for name in ("weight", "bias", "running_mean"):
        if isinstance(tensor := getattr(module, name, None), Tensor) and tensor.dim() == 1:
            return len(tensor)
    return None


def _has_moment_buffers(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
    return isinstance(mean, Tensor) and isinstance(var, Tensor) and mean.dim() == 1 and mean.shape == var.shape


def _detect_constant_norm(module: nn.Module) -> DetectedNorm | UnsupportedNorm:
    """Describe a layer with running moments that is not of torch's classes: a constant batch norm, or unsupported."""
    eps = getattr(module, "eps", None)
    reason = _unknown_members(module)
    if not isinstance(eps, float) or reason:
        return UnsupportedNorm(reason or "it keeps running moments but is not a known norm")
    reasons = []
    for dim in (2, 1, 3):
        candidate = DetectedNorm(
            "bn", _size(module, "running_mean"), dim, {"eps": eps}, acts=_has_drop_and_act(module), constant=True
        )
        reasons.append(compare_with_norm(module, candidate).reason)
        if not reasons[-1]:
            return candidate
    return UnsupportedNorm(
        f"it keeps running moments but is not a known norm: compared with a constant batch norm, {reasons[0]}"
    )


def _detect_layer_norm(module: nn.LayerNorm) -> DetectedNorm | UnsupportedNorm | None:
    """Describe a layer norm over the channels of each position; None if it normalizes other dimensions."""
    if type(module).forward is nn.LayerNorm.forward or len(module.normalized_shape) != 1:
        return None
    affine = module.weight is not None or module.bias is not None
    options: dict[str, object] = {"eps": module.eps, "affine": affine, "per_position": True}
    candidate = DetectedNorm("ln", module.normalized_shape[0], 2, options, acts=_has_drop_and_act(module))
    if compare_with_norm(module, candidate).reason:
        return None
    reason = _obstacle(module, nn.LayerNorm)
    return UnsupportedNorm(reason) if reason else candidate


def _detect_own_layer(module: NormLayer) -> DetectedNorm | UnsupportedNorm:
    for spec in NORMS.values():
        if spec.layers:
            continue
        for dim in (1, 2, 3, None):
            cls = SyncContinualNorm if dim is None else cast(type[nn.Module], norm_class(spec, dim))
            if isinstance(module, cls):
                name = _variant(module) if isinstance(module, ContinualNormBase) else spec.name
                synced = dim is None
                return _describe(module, cls, name, _recorded_dim(module) if synced else dim, synced)
    return UnsupportedNorm(f"the class {type(module).__name__} is not in the registry of norms")


def _recorded_dim(module: nn.Module) -> int | None:
    """Return the dimension of the layer that a synchronized layer replaced; None if it is unknown."""
    dim: int | None = vars(module).get("_contnorm_dim")
    return dim


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
) -> DetectedNorm | UnsupportedNorm:
    """Describe a layer of a known class, or of a subclass that computes the same norm."""
    reason = _obstacle(module, cls)
    if reason:
        return UnsupportedNorm(reason)
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    candidate = DetectedNorm(norm, channels, dim, _options_of(module), synced=synced, acts=_has_drop_and_act(module))
    if type(module) is cls and candidate.acts == (drop_and_act in module._forward_hooks.values()):
        return candidate
    if (
        vars(type(module)).get("normalizes_as") is cls
    ):  # our norm-then-activation classes; their subclasses are compared
        return candidate
    result = compare_with_norm(module, candidate)
    return UnsupportedNorm(result.reason) if result.reason else replace(candidate, obeys_tracking=result.obeys_tracking)


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
    known |= set(module.own_tensors) if isinstance(module, NormLayer) else set()
    unknown = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    return f"it holds {', '.join(map(repr, unknown))}, which its norm does not have" if unknown else ""


def _has_drop_and_act(module: nn.Module) -> bool:
    return isinstance(getattr(module, "drop", None), nn.Module) and isinstance(getattr(module, "act", None), nn.Module)


def drop_and_act(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook with which `convert_norm` keeps the activation of a norm-then-activation layer."""
    if args and output is args[0]:  # no norm at all; an activation in place must not change what the network reads
        output = output.clone()
    result: Tensor = cast(Any, module).act(cast(Any, module).drop(output))
    return result


def _options_of(module: nn.Module) -> dict[str, object]:
    names = (*_OPTIONS, *module.own_options) if isinstance(module, NormLayer) else _OPTIONS
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
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
