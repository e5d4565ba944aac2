"""Instance-aware batch normalization layers (IABN), from the test-time adaptation method NOTE.

The paper trains the network with these layers and then adapts it at test time. Here they are trained as any other norm
and are not adapted: in evaluation, nothing is stored, and a sample's output depends on the sample alone. The default of
``k`` is that of the authors' scripts, 4; their class has 3.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_number
from contnorm.functional import instance_aware_batch_norm
from contnorm.functional.batch import unbiased
from contnorm.layers.base import MomentNorm, ReplacementGuard

__all__ = ["InstanceAwareBatchNorm1d", "InstanceAwareBatchNorm2d", "InstanceAwareBatchNorm3d"]


class InstanceAwareBatchNormBase(ReplacementGuard, MomentNorm):
    """Instance-aware batch normalization.

    A sample is normalized with the moments of the batch, or in evaluation with the running moments, unless its own
    moments differ from them by more than ``k`` standard errors; then with its own, less ``k`` standard errors. Running
    moments, arguments, buffers and state-dict keys are those of batch norm. For (N, C) input, which has one position
    and so no instance moments, it is batch norm with the unbiased variance. The formula is in
    `contnorm.functional.instance_aware_batch_norm`.

    Args:
        num_features: Number of channels.
        eps: Value added to the variances.
        momentum: Weight of a batch in the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, evaluation also uses the batch.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        k: Number of standard errors by which the moments of a sample may differ without effect.
    """

    own_options: ClassVar[tuple[str, ...]] = ("k",)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        k: float = 4.0,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.k = check_number(k, 0, "k", type(self).__name__, finite=True)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        output = instance_aware_batch_norm(
            input,
            *self._moments(),
            self.weight,
            self.bias,
            self._normalizes_with_batch(),
            self._weight_of_batch(),
            self.eps,
            self.k,
            caller=type(self).__name__,
        )
        self._count(input)
        return output

    def normalizing_variance(self, var: Tensor, count: float) -> Tensor:
        return unbiased(var, count)

    def _extra_fields(self) -> list[str]:
        return [f"k={self.k:g}"]


class InstanceAwareBatchNorm1d(InstanceAwareBatchNormBase, nn.BatchNorm1d):
    """Instance-aware batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> InstanceAwareBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class InstanceAwareBatchNorm2d(InstanceAwareBatchNormBase, nn.BatchNorm2d):
    """Instance-aware batch normalization of (N, C, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm2d(8, k=3)
        InstanceAwareBatchNorm2d(8, k=3, eps=1e-05, momentum=0.1)
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class InstanceAwareBatchNorm3d(InstanceAwareBatchNormBase, nn.BatchNorm3d):
    """Instance-aware batch normalization of (N, C, D, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
