"""Robust batch normalization (RBN; Yuan et al., RoTTA, CVPR 2023).

In training, an input is normalized with a mixture of the running moments and those of the batch, and the mixture
becomes the new running moments. As in the authors' code, the variance is biased, and gradients flow through the moments
of the batch with their weight in the mixture.

RoTTA replaces the batch norms of a trained network by these layers, for passes over its memory bank at test time. Here
a network is trained with them from the beginning, on the batches of the stream and of the replay memory. Nothing is
stored in evaluation, so results do not depend on the order or the composition of test batches.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from contnorm.checks import check_batch, statistics_dtype
from contnorm.kernels.pivot import channel_pivot, per_channel
from contnorm.norms.base import (
    MomentNorm,
    apply_affine,
    channel_moments,
    check_arguments,
    empty_like_input,
    keep_values,
    uses_batch_moments,
)


def robust_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.05,
    eps: float = 1e-5,
    *,
    update: bool = True,
) -> Tensor:
    r"""Robust batch normalization.

    .. math::
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad
        \mu = (1 - m) \mu_r + m \mu_B, \quad \sigma^2 = (1 - m) \sigma_r^2 + m \sigma_B^2

    In training, :math:`\mu` and :math:`\sigma^2` are then stored as the running moments. In evaluation, m is 0.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the biased variance.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to mix the moments of the batch with the running ones. Without running moments, those of the
            batch are always used alone.
        momentum: The weight m of this batch, in the moments that normalize it and in the running moments. A 0-dim
            tensor stays on the device.
        eps: Value added to the variance.
        update: Whether to store the mixture.

    Example:
        >>> x, mean, var = torch.tensor([[6.0], [10.0]]), torch.zeros(1), torch.zeros(1)
        >>> robust_batch_norm(x, mean, var, training=True, momentum=0.25, eps=1e-12)  # mean 2, variance 1
        tensor([[4.],
                [8.]])
        >>> mean, var
        (tensor([2.]), tensor([1.]))
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    dtype = statistics_dtype(x)
    if not uses_batch_moments(training, running_mean):
        assert running_mean is not None and running_var is not None
        return _normalize(x, x.to(dtype), running_mean.to(dtype), running_var.to(dtype), weight, bias, eps)
    check_batch(x, eps)
    pivot = channel_pivot(x)
    shifted = x.to(dtype) - per_channel(pivot, x.dim())
    mean, var = channel_moments(shifted)  # of the input minus the pivot
    if running_mean is not None and running_var is not None:
        # Copies, since a tensor momentum depends on the counter, and both change below.
        share: Any = momentum
        if isinstance(momentum, Tensor):
            share = momentum.to(dtype).expand_as(running_mean)
            old_mean, old_var, share = keep_values(running_mean.to(dtype), running_var.to(dtype), share)
        else:
            old_mean, old_var = keep_values(running_mean.to(dtype), running_var.to(dtype))
        if isinstance(momentum, Tensor) or momentum != 0:
            mean, var = torch.lerp(old_mean - pivot, mean, share), torch.lerp(old_var, var, share)
            if update:
                with torch.no_grad():
                    running_mean.copy_(mean + pivot)
                    running_var.copy_(var)
        else:  # a weight of 0 leaves the batch out, even if it has NaNs
            mean, var = old_mean - pivot, old_var
    return _normalize(x, shifted, mean, var, weight, bias, eps)


def _normalize(
    x: Tensor, shifted: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    normalized = (shifted - per_channel(mean, x.dim())) * per_channel(torch.rsqrt(var + eps), x.dim())
    return apply_affine(normalized, weight, bias).to(x.dtype)


class RobustBatchNormBase(MomentNorm):
    """Robust batch normalization.

    In training, an input is normalized with ``(1 - momentum) * running + momentum * batch`` moments, which then become
    the running moments. Evaluation is that of batch norm. Arguments, buffers and state-dict keys are those of batch
    norm; the stored variance is biased. Frozen moments are mixed with those of the batch, but not replaced.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: Weight of a batch in the moments that normalize it and in the running moments (RoTTA's alpha); None
            for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, it is batch norm of the batch in both modes.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.05,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        mixes = self._normalizes_with_batch() and self.running_mean is not None
        return self._normalize_with(
            robust_batch_norm,
            input,
            running_mean=self.running_mean,
            running_var=self.running_var,
            momentum=self._weight_of_moving_batch() if mixes else 0.0,
            update=self._updates_moments(),
        )

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class RobustBatchNorm1d(RobustBatchNormBase):
    """Robust batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> RobustBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class RobustBatchNorm2d(RobustBatchNormBase):
    """Robust batch normalization of (N, C, H, W) input.

    Example:
        >>> layer = RobustBatchNorm2d(8)
        >>> x = torch.randn(4, 8, 5, 5)
        >>> torch.allclose(layer(x), layer.eval()(x), atol=1e-6)  # the stored moments normalized the batch
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class RobustBatchNorm3d(RobustBatchNormBase):
    """Robust batch normalization of (N, C, D, H, W) input.

    Example:
        >>> RobustBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
