"""Base classes of the norm layers: input checks and running moments."""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from inspect import signature
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from contnorm.checks import (
    check_batch_weight,
    check_eps,
    check_features,
    check_input,
    check_moments,
    check_momentum,
    check_parameters,
    updates_moments,
    widest,
)
from contnorm.kernels import Kernel
from contnorm.kernels.pivot import per_channel

__all__ = [
    "ANY_RANK",
    "BATCH_NORM_IN_EVALUATION",
    "MomentNorm",
    "NormLayer",
    "ReplacementGuard",
    "apply_affine",
    "channel_moments",
    "channels_of",
    "check_arguments",
    "empty_like_input",
    "keep_values",
    "unbiased",
    "update_moments",
    "uses_batch_moments",
]


ANY_RANK = (2, 3, 4, 5)


def uses_batch_moments(training: bool, running_mean: Tensor | None) -> bool:
    """Whether to normalize with the batch, as in torch: in training, and in evaluation without running moments."""
    return training or running_mean is None


def update_moments(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float | Tensor
) -> None:
    """Update the running moments in place; with a momentum of 0 they do not change, even if the batch has NaNs."""
    if running_mean is None or running_var is None or not updates_moments(running_mean, momentum):
        return
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, var)):
            weight = momentum.to(new.dtype) if isinstance(momentum, Tensor) else momentum
            running.copy_(torch.lerp(running.to(new.dtype), new.detach(), weight))


def keep_values(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of tensors of one shape that a compiled backward pass does not compute again.

    It may recompute values of the forward pass from buffers of a layer, such as the running moments and the counter of
    batches, which have changed by then. It does not recompute a concatenation.
    """
    return torch.stack(tensors).unbind()


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel, (C,) each."""
    var, mean = torch.var_mean(x, dim=[i for i in range(x.dim()) if i != 1], correction=0)
    return mean, var


def unbiased(var: Tensor, count: float) -> Tensor:
    """Convert a biased variance of ``count`` values to the unbiased one; for a single value, return it unchanged."""
    return var * (count / (count - 1)) if count > 1 else var


def apply_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply each channel by the weight and add the bias, if they are not None."""
    if weight is not None:
        x = x * per_channel(weight.to(x.dtype), x.dim())
    return x if bias is None else x + per_channel(bias.to(x.dtype), x.dim())


def empty_like_input(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return the output for an empty batch, connected to the parameters so that their gradients are zeros."""
    y = x.clone()
    for parameter in parameters:
        if parameter is not None:
            y = y + parameter.sum().to(x.dtype)
    return y


def check_arguments(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
    eps: float,
    caller: str,
) -> tuple[float | Tensor, float]:
    """Check the arguments that all norms with running moments have; return momentum and eps."""
    check_input(x, ANY_RANK, channels_of(running_mean, weight), caller)
    eps = check_eps(eps, caller)
    momentum = check_batch_weight(momentum, caller)
    check_moments(running_mean, running_var, caller)
    check_parameters(x, weight, bias, caller)
    return momentum, eps


def channels_of(running_mean: Tensor | None, weight: Tensor | None) -> int | None:
    """Return the number of channels of the running moments, or else of the weight; None if both are None."""
    vector = running_mean if running_mean is not None else weight
    return None if vector is None or vector.dim() == 0 else vector.shape[0]


class NormLayer(nn.Module):
    """Base of all norm layers: a layer over (N, C, *) that checks its input.

    ``ranks`` lists the input ranks that a class accepts; ``num_features`` is its number of channels.
    ``has_triton_kernels`` tells whether the layer uses Triton kernels of this package on a GPU, which are compiled
    before their first run. ``own_options`` names constructor arguments that only this norm has, and ``own_tensors`` its
    parameters and buffers that batch norm does not have. Conversion keeps both if the old and the new layer have them.
    ``fuses_relu`` tells whether ``forward`` also takes a residual and whether to apply ReLU; it is read from the
    signature, since a subclass may have a ``forward`` of its own.
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)
    has_triton_kernels: ClassVar[bool] = False
    own_options: ClassVar[tuple[str, ...]] = ()
    own_tensors: ClassVar[tuple[str, ...]] = ()
    # The norm of a class that only applies its submodules `drop` and `act` after it, or has other arguments.
    normalizes_as: ClassVar[type[nn.Module]]
    num_features: int
    kernel: Kernel = "auto"  # the implementation, for norms with several
    fuses_relu: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.fuses_relu = {"residual", "relu"} <= signature(cls.forward).parameters.keys()

    def _check(self, x: Tensor) -> None:
        check_input(x, self.ranks, self.num_features, type(self).__name__)


class MomentNorm(NormLayer, _BatchNorm):
    """Base of the norms with running moments: batch norm's arguments, buffers and state-dict keys.

    It derives from torch's ``_BatchNorm``, and its 1d, 2d and 3d forms from torch's ``BatchNorm1d``, ``BatchNorm2d``
    and ``BatchNorm3d``, so that tools that search for batch norms (such as ``swa_utils.update_bn``) find it. Training
    and evaluation mode have the same meaning as in torch. There are two further states: ``stats_frozen`` (running
    moments are not updated; set by ``freeze_stats``) and ``use_running`` (training mode also normalizes with the
    running moments, as torchvision's FrozenBatchNorm2d does). Unlike in torch, ``momentum=None`` does not synchronize
    with the host.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    stats_frozen: bool = False
    use_running: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_features(num_features, name)
        eps = check_eps(eps, name)
        check_momentum(momentum, name)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        self._check(input)

    def reset_running_stats(self) -> None:
        if self.stats_frozen:
            raise RuntimeError(
                f"{type(self).__name__}: its running moments are frozen and can't be reset. "
                f"Call contnorm.freeze_stats(model, False) first."
            )
        super().reset_running_stats()

    def _normalizes_with_batch(self) -> bool:
        return (self.training and not self.use_running) or self.running_mean is None

    def _updates_moments(self) -> bool:
        return (
            self.training
            and self.track_running_stats
            and not self.stats_frozen
            and not self.use_running
            and self.running_mean is not None
        )

    def _weight_of_batch(self) -> float | Tensor:
        """Return the weight of the current batch in the running moments; 0 if they are not updated."""
        return self._weight_of_moving_batch() if self._updates_moments() else 0.0

    def _weight_of_moving_batch(self) -> float | Tensor:
        if self.momentum is None:
            if self.num_batches_tracked is None:
                raise ValueError(
                    f"{type(self).__name__}: momentum=None averages over the batches counted in num_batches_tracked, "
                    f"which is None. Give a momentum, or call reset_running_stats() on a layer that has the counter."
                )
            return (self.num_batches_tracked + 1).to(torch.float64).reciprocal()
        return self.momentum

    def _count(self, x: Tensor) -> None:
        """Count a batch after its forward; empty batches, and batches that raised an error, are not counted."""
        if x.numel():
            self._count_one()

    def _count_one(self) -> None:
        if self._updates_moments() and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    def _moments(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the buffers for the functional form; None if they are neither used nor updated."""
        if self._normalizes_with_batch() and not self._updates_moments():
            return None, None
        return self.running_mean, self.running_var

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and biased variance that an input adds to the running moments, (C,) each, in float64.

        On a device without float64 they are in float32.
        """
        return channel_moments(widest(self._tracked_signal(x)))

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        """Return the value of ``running_var`` for data of this biased variance and count: the unbiased variance."""
        return unbiased(var, count)

    def normalizing_variance(self, var: Tensor, count: float) -> Tensor:
        """Return the variance that training normalizes data of this biased variance and count with: the biased one."""
        return var

    def _tracked_signal(self, x: Tensor) -> Tensor:
        """Return the signal whose moments the buffers track."""
        return x

    def extra_repr(self) -> str:
        kernel = [] if self.kernel == "auto" else [f"kernel={self.kernel!r}"]
        fields = [
            f"{self.num_features}",
            *self._extra_fields(),
            *kernel,
            f"eps={self.eps}",
            f"momentum={self.momentum}",
        ]
        usual = {"affine": True, "track_running_stats": True, "stats_frozen": False, "use_running": False}
        fields += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) is not value]
        return ", ".join(fields)

    def _extra_fields(self) -> list[str]:
        return []


# Advice of layers that can be folded into a convolution once they are converted.
BATCH_NORM_IN_EVALUATION = "In evaluation it is batch norm: use contnorm.convert_norm(model, 'bn') first."


class ReplacementGuard:
    """Raises an error when a tool that supports only batch norm replaces a layer or folds it into a convolution.

    Such tools select layers by ``isinstance(module, _BatchNorm)`` and would silently drop the part of the layer that
    is not batch norm. All of them read ``eps``, so this property inspects the function that reads it. It raises if
    that is such a function of a known library (``torch.nn.utils.fusion.fuse_conv_bn_eval``, timm's
    ``convert_splitbn_model``), or a function of any module with an unambiguous name (``fuse_conv_and_bn``,
    ``_fuse_bn_tensor``), since these are copied between projects. A function of other code with a similar name
    (``merge_models``, ``convert_my_bn``) may have a valid reason to read ``eps``: it gets the value, with a warning.
    For all other readers ``eps`` is a plain attribute.
    """

    sync_advice: ClassVar[str] = "It has no synchronised form: convert it to 'bn' or 'cn' first."
    fold_advice: ClassVar[str] = (
        "Keep the layer: it is not a constant scale and shift that another layer could take over."
    )
    _eps: float

    @property
    def eps(self) -> float:
        value = self._eps
        # A compiled forward reads `eps` too, and the compiler cannot trace access to the calling frame.
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            if _may_replace(frame.f_code.co_name):
                self._check_reader(frame)
        return value

    @eps.setter
    def eps(self, value: float) -> None:
        # Not stored under the name of the property: torch 2.11's compiler resolves `__dict__["eps"]` to the property.
        self._eps = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state of a layer; layers pickled by version 0.1 have ``eps`` as a plain attribute."""
        if "eps" in state:
            state = {**state, "_eps": state["eps"]}
            del state["eps"]
        super().__setstate__(state)  # type: ignore[misc]

    def _check_reader(self, frame: FrameType) -> None:
        caller, package = frame.f_code.co_name, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _KNOWN_LIBRARIES or _FOLDS.fullmatch(caller):
            raise TypeError(
                f"{caller} would treat {type(self).__name__} as a plain batch norm and drop the rest of it. "
                f"{self._advice(caller)}"
            )
        if frame.f_locals.get("self") is not self:  # methods of a subclass may have any name
            warnings.warn(
                f"{caller} reads eps of a {type(self).__name__}. If it replaces the layer or folds it into another, "
                f"the result is wrong: the layer is more than a batch norm. {self._advice(caller)}",
                stacklevel=3,
            )

    def _advice(self, caller: str) -> str:
        if "sync" in caller.lower():
            return self.sync_advice
        if caller == "adapt_model_from_string":
            return "Build the pruned model with its own norm, then use contnorm.convert_norm."
        if "freeze" in caller or "frozen" in caller:
            return "Use contnorm.freeze_stats(model), and requires_grad_(False) for weight and bias."
        return self.fold_advice


# Top-level packages whose functions with such names are known to replace or fold every batch norm.
_KNOWN_LIBRARIES = frozenset(
    (
        "apex",
        "avalanche",
        "brevitas",
        "detectron2",
        "fvcore",
        "mmcv",
        "mmdet",
        "mmengine",
        "mmpretrain",
        "mmseg",
        "nncf",
        "timm",
        "torch",
        "torchao",
        "torchvision",
        "transformers",
        "ultralytics",
    )
)
_MAY_REPLACE = re.compile(
    r"_*(?:(?:fuse|fold|absorb|merge)(?:_\w*)?|(?:convert|freeze|replace|revert)_\w*(?:bn|batch_?norm)\w*"
    r"|adapt_model_from_string)",  # timm's, which rebuilds the layers of a pruned model
    re.IGNORECASE,
)
_FOLDS = re.compile(
    r"_*(?:fuse|fold|absorb|merge)_(?:conv|linear|fc)\d*d?_?(?:and_)?_?(?:bn|batch_?norm)\w*|_*fuse_bn_tensor"
    r"|convert_sync_batchnorm",
    re.IGNORECASE,
)


@cache
def _may_replace(function: str) -> bool:
    """Whether the name of a function suggests that it replaces batch norms or folds them into other layers.

    Example:
        >>> [_may_replace(name) for name in ("fuse_conv_bn_eval", "fuse", "convert_splitbn_model")]
        [True, True, True]
        >>> [_may_replace(name) for name in ("forward", "fused_forward", "convert_model", "extra_repr")]
        [False, False, False, False]
    """
    return _MAY_REPLACE.fullmatch(function) is not None
