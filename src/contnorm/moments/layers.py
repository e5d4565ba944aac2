"""The running moments of layers: which layers have them, what an input adds to them, and how they are written."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from contnorm.checks import in_float64, widest
from contnorm.convert.detect import DetectedNorm, UnsupportedNorm, detect_norm, holds_moments
from contnorm.moments.freeze import is_frozen
from contnorm.norms.base import MomentNorm, channel_moments, unbiased
from contnorm.registry import NORMS

__all__ = [
    "Frozen",
    "NonFiniteMomentsError",
    "batch_moments",
    "keeps_moments",
    "moment_buffers",
    "moment_layers",
    "normalizing_variance",
    "stored_variance",
    "write_finite_moments",
    "write_moments",
]

Frozen = Literal["raise", "lift", "keep"]


class NonFiniteMomentsError(ValueError):
    """The moments of the data at a layer are NaN or infinite.

    Attributes:
        layer: The layer's name in the model.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"reestimate: the moments of the data at layer {layer!r} are NaN or infinite. The model is "
            f"unchanged. Check the batches and the model's weights for values that are not finite or overflow."
        )
        self.layer = layer

    def __reduce__(self) -> tuple[type[NonFiniteMomentsError], tuple[str]]:
        return type(self), (self.layer,)


def moment_layers(model: nn.Module, frozen: Frozen = "raise") -> dict[str, nn.Module]:
    """Return the norm layers whose running moments `reestimate` sets, by name.

    Args:
        model: The model.
        frozen: What to do with layers whose moments are frozen: raise an error, or include (``"lift"``) or leave out
            (``"keep"``) the layers.

    Raises:
        ValueError: For a layer whose moments are frozen or cannot be estimated, and for an unknown layer with buffers
            ``running_mean`` and ``running_var``.

    Example:
        >>> list(moment_layers(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))))
        ['1']
    """
    layers = {}
    for name, module in model.named_modules():
        detected = detect_norm(module)
        if detected is None or isinstance(module, _InstanceNorm) or not _has_changing_moments(module, detected):
            continue
        if reason := _obstacle(module, detected):
            raise ValueError(
                f"reestimate: layer {name!r} ({type(module).__name__}): its moments can't be computed from its input: "
                f"{reason}. Fix that, or replace the layer with another norm."
            )
        if is_frozen(module) and frozen == "raise":
            raise ValueError(
                f"reestimate: layer {name!r} ({type(module).__name__}): its moments are frozen. Call "
                f"contnorm.freeze_stats(model, False) first; reestimate also takes frozen='lift' to set them too and "
                f"frozen='keep' to leave them."
            )
        if frozen != "keep" or not is_frozen(module):
            layers[name] = module
    return layers


def _has_changing_moments(module: nn.Module, detected: DetectedNorm | UnsupportedNorm) -> bool:
    if isinstance(detected, UnsupportedNorm):
        return True
    return NORMS[detected.norm].keeps_moments and not detected.constant and not getattr(module, "use_running", False)


def _obstacle(module: nn.Module, detected: DetectedNorm | UnsupportedNorm) -> str:
    if isinstance(detected, UnsupportedNorm):
        return detected.reason
    if NORMS[detected.norm].layers and not (_defines_batch_moments(module) or type(module) in _TORCH_CLASSES):
        return "its class does not define batch_moments(x), the mean and biased variance that an input adds to them"
    if not holds_moments(module):
        return "it has none and normalizes with the batch; convert it with track_running_stats=True"
    return ""


def keeps_moments(model: nn.Module) -> bool:
    """Whether any norm of the model has running moments.

    Example:
        >>> keeps_moments(nn.Sequential(nn.BatchNorm1d(4))), keeps_moments(nn.GroupNorm(2, 4))
        (True, False)
    """
    norms = (detect_norm(module) for module in model.modules())
    return any(isinstance(norm, DetectedNorm) and NORMS[norm.norm].keeps_moments for norm in norms)


_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _defines_batch_moments(layer: nn.Module) -> bool:
    """Whether a layer computes its own batch moments: those of this package, and registered ones that define it."""
    return callable(getattr(layer, "batch_moments", None))


def batch_moments(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance that an input adds to a layer's moments, in float64."""
    mean, var = layer.batch_moments(x) if _defines_batch_moments(layer) else channel_moments(widest(x))
    return in_float64(mean), in_float64(var)  # pooled in float64, on the CPU for a device without it


def stored_variance(layer: Any, var: Tensor, count: float) -> Tensor:
    """Return the value of ``running_var`` for data of this biased variance and count."""
    if _defines_batch_moments(layer) and hasattr(layer, "stored_variance"):
        stored: Tensor = layer.stored_variance(var, count)
        return stored
    return unbiased(var, count)


def normalizing_variance(layer: nn.Module, var: Tensor, count: float) -> Tensor:
    """Return the variance that a training-mode forward over the data normalizes with; the biased one in most norms."""
    return layer.normalizing_variance(var, count) if isinstance(layer, MomentNorm) else var


def moment_buffers(layer: nn.Module) -> tuple[Tensor, Tensor]:
    mean, var = layer._buffers["running_mean"], layer._buffers["running_var"]
    assert mean is not None and var is not None
    return mean, var


def write_moments(layers: dict[str, nn.Module], values: dict[str, tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for name, moments in values.items():
            for buffer, value in zip(moment_buffers(layers[name]), moments, strict=True):
                buffer.copy_(value.to(buffer.dtype))


def write_finite_moments(layers: dict[str, nn.Module], values: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Write moments, and raise NonFiniteMomentsError if a buffer then has NaN or infinite values."""
    write_moments(layers, values)
    for name in values:  # checked after the write, because a float64 moment may overflow the buffer's dtype
        if not all(bool(buffer.isfinite().all()) for buffer in moment_buffers(layers[name])):
            raise NonFiniteMomentsError(name)
