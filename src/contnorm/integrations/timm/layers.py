"""Norm-and-activation layers: a norm of this package, a dropout and an activation in one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from contnorm.integrations.extras import missing_extra
from contnorm.norm_entry import accepted_options
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.adaptive import AdaptiveBalanceNorm2d
from contnorm.norms.balanced import BalancedBatchNorm2d
from contnorm.norms.base import NormLayer
from contnorm.norms.batch import BatchNorm2d
from contnorm.norms.continual import ContinualNorm2d
from contnorm.norms.evonorm import EvoNorm2d
from contnorm.norms.filter_response import FilterResponseNorm2d
from contnorm.norms.group import GroupNorm2d, InstanceNorm2d, LayerNorm2d
from contnorm.norms.instance_aware import InstanceAwareBatchNorm2d
from contnorm.norms.none import NoNorm2d
from contnorm.norms.renorm import BatchRenorm2d
from contnorm.norms.robust import RobustBatchNorm2d
from contnorm.norms.switchable import SwitchNorm2d
from contnorm.norms.task_balanced import TaskBalancedNorm2d

try:
    from timm.layers import BatchNormAct2d, create_act_layer
except ModuleNotFoundError as error:
    raise missing_extra("timm", error) from error

__all__ = [
    "ACT_CLASSES",
    "ACT_CLASS_OF",
    "AdaptiveBalanceNormAct2d",
    "BalancedBatchNormAct2d",
    "BatchRenormAct2d",
    "ContinualNormAct2d",
    "EvoNormAct2d",
    "FilterResponseNormAct2d",
    "GroupNormAct2d",
    "InstanceAwareBatchNormAct2d",
    "InstanceNormAct2d",
    "LayerNormAct2d",
    "NoNormAct2d",
    "RobustBatchNormAct2d",
    "SwitchNormAct2d",
    "TaskBalancedNormAct2d",
]

Activation = str | type[nn.Module] | Callable[..., nn.Module]


class _NormAct(NormLayer):
    """A norm, then a dropout, then an activation: the first base of a class whose second base is the norm.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance. Default: that of the norm.
        momentum: Weight of a batch in the running moments. Default: that of the norm. Norms without running moments
            ignore it.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Norms without running moments ignore it.
        apply_act: Whether to apply the activation.
        act_layer: The activation: a class, a function that creates it, or a name of timm's. None for no activation.
        act_kwargs: Arguments of the activation.
        inplace: Whether the activation overwrites the output of the norm.
        drop_layer: Class of the layer between norm and activation; None for none.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        **options: Arguments that only this norm has, such as ``num_groups``.
    """

    normalizes_as: ClassVar[type[nn.Module]]
    drop: nn.Module
    act: nn.Module

    def __init__(
        self,
        num_features: int,
        eps: float | EllipsisType = ...,
        momentum: float | EllipsisType | None = ...,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Activation | None = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "eps": eps,
            "momentum": momentum,
            "affine": affine,
            "track_running_stats": track_running_stats,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(num_features, **_accepted(type(self), self.normalizes_as, arguments, options))
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        act = create_act_layer(act_layer, **{"inplace": inplace, **(act_kwargs or {})}) if apply_act else None
        self.act = nn.Identity() if act is None else act

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def _accepted(
    cls: type[nn.Module], norm: type[nn.Module], arguments: Mapping[str, object], options: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a norm: those of batch norm that it has, and its own, which must exist."""
    allowed = accepted_options(norm)
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise TypeError(
            f"{cls.__name__}: unknown argument {unknown[0]!r}. Use the arguments of timm's BatchNormAct2d, or "
            f"{', '.join(allowed)}."
        )
    return {**{name: value for name, value in arguments.items() if name in allowed and value is not ...}, **options}


class ContinualNormAct2d(_NormAct, ContinualNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Continual normalization and an activation, for the architectures of timm.

    The arguments are those of timm's ``BatchNormAct2d``, and ``num_groups``, ``order``, ``tied`` and ``kernel`` of
    `ContinualNorm2d`. The state-dict keys are those of batch norm.

    Example:
        >>> layer = ContinualNormAct2d(8, num_groups=4, act_layer="silu")
        >>> layer(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
        >>> list(layer.state_dict())
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """

    normalizes_as = ContinualNorm2d


class GroupNormAct2d(_NormAct, GroupNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Group normalization and an activation. The number of channels is the first argument, not that of groups."""

    normalizes_as = GroupNorm2d


class LayerNormAct2d(_NormAct, LayerNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Layer normalization of each sample over channels and positions, and an activation.

    It is not timm's ``LayerNormAct2d``, which normalizes each position over its channels.
    """

    normalizes_as = LayerNorm2d


class InstanceNormAct2d(_NormAct, InstanceNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Instance normalization and an activation."""

    normalizes_as = InstanceNorm2d


class BatchRenormAct2d(_NormAct, BatchRenorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Batch renormalization and an activation."""

    normalizes_as = BatchRenorm2d


class SwitchNormAct2d(_NormAct, SwitchNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Switchable normalization and an activation."""

    normalizes_as = SwitchNorm2d


class AdaptiveBalanceNormAct2d(_NormAct, AdaptiveBalanceNorm2d):
    """AdaB2N and an activation."""

    normalizes_as = AdaptiveBalanceNorm2d


class TaskBalancedNormAct2d(_NormAct, TaskBalancedNorm2d):
    """Task-balanced batch normalization and an activation."""

    normalizes_as = TaskBalancedNorm2d


class BalancedBatchNormAct2d(_NormAct, BalancedBatchNorm2d):
    """Batch normalization with class-balanced running moments, and an activation."""

    normalizes_as = BalancedBatchNorm2d


class InstanceAwareBatchNormAct2d(_NormAct, InstanceAwareBatchNorm2d):
    """Instance-aware batch normalization and an activation."""

    normalizes_as = InstanceAwareBatchNorm2d


class RobustBatchNormAct2d(_NormAct, RobustBatchNorm2d):
    """Robust batch normalization and an activation."""

    normalizes_as = RobustBatchNorm2d


class NoNormAct2d(_NormAct, NoNorm2d):
    """No normalization, and an activation that never overwrites its input, which the network may use elsewhere."""

    normalizes_as = NoNorm2d

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clone())


class _WithOwnActivation(ActivationNorm):
    """Base of the norms that contain their activation, with the arguments of timm's ``BatchNormAct2d``.

    ``act_layer``, ``act_kwargs`` and ``inplace`` are ignored, as in timm's EvoNorm layers: ``apply_act`` says whether
    the norm's own activation is applied.
    """

    normalizes_as: ClassVar[type[nn.Module]]

    def __init__(
        self,
        num_features: int,
        eps: float | EllipsisType = ...,
        momentum: float | EllipsisType | None = ...,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Activation | None = None,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if drop_layer is not None:
            raise TypeError(
                f"{type(self).__name__}: drop_layer can't be applied between the norm and its activation, which are "
                f"one formula. Use another norm, or no drop_layer."
            )
        arguments = {"eps": eps, "affine": affine, "apply_act": apply_act, "device": device, "dtype": dtype}
        super().__init__(num_features, **_accepted(type(self), self.normalizes_as, arguments, options))  # type: ignore[arg-type]


class EvoNormAct2d(_WithOwnActivation, EvoNorm2d):
    """EvoNorm-S0, which contains its activation."""

    normalizes_as = EvoNorm2d


class FilterResponseNormAct2d(_WithOwnActivation, FilterResponseNorm2d):
    """Filter response normalization with its thresholded linear unit."""

    normalizes_as = FilterResponseNorm2d


ACT_CLASSES: Mapping[type[nn.Module], type[nn.Module]] = {
    cls.normalizes_as: cls
    for cls in (
        ContinualNormAct2d,
        GroupNormAct2d,
        LayerNormAct2d,
        InstanceNormAct2d,
        BatchRenormAct2d,
        SwitchNormAct2d,
        AdaptiveBalanceNormAct2d,
        TaskBalancedNormAct2d,
        BalancedBatchNormAct2d,
        InstanceAwareBatchNormAct2d,
        RobustBatchNormAct2d,
        NoNormAct2d,
        EvoNormAct2d,
        FilterResponseNormAct2d,
    )
}
# timm's own, which its tools for batch norm know: the same function as ours.
ACT_CLASS_OF = {**ACT_CLASSES, BatchNorm2d: BatchNormAct2d}
