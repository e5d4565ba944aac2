"""Instance-aware batch normalization (IABN; Gong et al., NOTE, NeurIPS 2022).

Each sample is normalized with the moments of the batch (in evaluation: the running moments), corrected by as much as
its own moments differ from them by more than ``k`` standard errors. As in the authors' code, both variances are
unbiased, gradients flow through all moments, and an input with one position per sample and channel, such as (N, C), has
no instance moments: it is normalized with the moments of the batch alone.

The paper trains the network with these layers and then adapts it at test time. Here they are trained as any other norm
and are not adapted: in evaluation, nothing is stored, and a sample's output depends on the sample alone. The default of
``k`` is that of the authors' scripts, 4; their class has 3.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from contnorm.checks import check_batch, check_number
from contnorm.norms.base import (
    MomentNorm,
    check_arguments,
    empty_like_input,
    unbiased,
    update_moments,
    uses_batch_moments,
)
from contnorm.norms.row_moments import has_one_position, normalize_rows, row_moments


def instance_aware_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    k: float = 4.0,
) -> Tensor:
    r"""Instance-aware batch normalization.

    .. math::
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad
        \mu = \mu_B + \mathrm{softshrink}\Big(\mu_I - \mu_B,\; k \sqrt{\tfrac{\sigma_B^2 + \epsilon}{P}}\Big), \quad
        \sigma^2 = \max\Big(0,\; \sigma_B^2 + \mathrm{softshrink}\Big(\sigma_I^2 - \sigma_B^2,\;
        k\,(\sigma_B^2 + \epsilon) \sqrt{\tfrac{2}{P - 1}}\Big)\Big)

    Here I stands for one sample and channel with P positions, and B for the batch or the running moments. The limits
    are k standard errors of the mean and of the variance of P independent normal values.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether B is the batch. Without running moments, it always is.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variances.
        k: Number of standard errors by which the moments of a sample may differ without effect. 0 gives instance
            normalization, and a large value batch normalization.

    Example:
        >>> x = torch.tensor([[[-1.0, 1.0]], [[99.0, 101.0]]])
        >>> mean, var = torch.zeros(1), torch.full((1,), 2.0)
        >>> instance_aware_batch_norm(x, mean, var, k=1.0, eps=1e-12)[1]  # the mean is 100 less one standard error
        tensor([[0.0000, 1.4142]])
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps)
    k = check_number(k, 0, "k")
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    rows = row_moments(x)
    if uses_batch_moments(training, running_mean):
        check_batch(x, eps)
        positions = math.prod(x.shape[2:])
        mean = rows.mean.mean(0)
        biased = (rows.var * ((positions - 1) / positions) + (rows.mean - mean).square()).mean(0)
        var = unbiased(biased, x.shape[0] * positions)
        update_moments(running_mean, running_var, mean, var, momentum)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.double(), running_var.double()
    if not has_one_position(x):
        positions = math.prod(x.shape[2:])
        mean_limit = k * torch.sqrt((var + eps) / positions)
        var_limit = k * (var + eps) * math.sqrt(2 / (positions - 1))
        mean, var = (
            mean + _softshrink(rows.mean - mean, mean_limit),
            (var + _softshrink(rows.var - var, var_limit)).clamp_min(0),
        )
    return normalize_rows(x, rows, mean, var, weight, bias, eps)


def _softshrink(x: Tensor, limit: Tensor) -> Tensor:
    """Move values towards zero by the limit, and those within the limit to zero.

    Example:
        >>> _softshrink(torch.tensor([-3.0, 0.5, 3.0]), torch.tensor(1.0))
        tensor([-2.,  0.,  2.])
    """
    return x - torch.maximum(torch.minimum(x, limit), -limit)


class InstanceAwareBatchNormBase(MomentNorm):
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
        self.k = check_number(k, 0, "k")

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize_with(instance_aware_batch_norm, input, k=self.k)

    def normalizing_variance(self, var: Tensor, count: float) -> Tensor:
        return unbiased(var, count)

    def _extra_fields(self) -> list[str]:
        return [f"k={self.k:g}"]


class InstanceAwareBatchNorm1d(InstanceAwareBatchNormBase):
    """Instance-aware batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> InstanceAwareBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class InstanceAwareBatchNorm2d(InstanceAwareBatchNormBase):
    """Instance-aware batch normalization of (N, C, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm2d(8, k=3)
        InstanceAwareBatchNorm2d(8, k=3, eps=1e-05, momentum=0.1)
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class InstanceAwareBatchNorm3d(InstanceAwareBatchNormBase):
    """Instance-aware batch normalization of (N, C, D, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
