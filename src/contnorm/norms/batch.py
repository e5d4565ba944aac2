"""Batch normalization layers: bit-exact with torch's, with input checks and a cumulative average on the device."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import (
    check_batch,
    statistics_dtype,
)
from contnorm.kernels.reference import batch_step, in_statistics_dtype
from contnorm.norms.base import (
    MomentNorm,
    check_arguments,
    empty_like_input,
    update_moments,
    uses_batch_moments,
)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalization: bit-exact with ``F.batch_norm``, with argument checks.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> batch_norm(x, training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not uses_batch_moments(training, running_mean):
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    check_batch(x, eps)
    if isinstance(momentum, Tensor) and running_mean is not None and running_var is not None:
        signal = x
        if weight is not None and weight.dtype != statistics_dtype(x):  # all parameters are in half precision
            signal, weight, bias = in_statistics_dtype(x, weight, bias)
        y, moments = batch_step(signal, weight, bias, eps, moments=True)
        assert moments is not None
        update_moments(running_mean, running_var, moments.mean, moments.var, momentum)
        return y.to(x.dtype)
    factor = 0.0 if isinstance(momentum, Tensor) else momentum  # it is a tensor here only without running moments
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)


class BatchNormBase(MomentNorm):
    """Batch normalization with an exponential moving average or, for ``momentum=None``, a cumulative average.

    Its 1d, 2d and 3d forms derive from torch's ``BatchNorm1d``, ``BatchNorm2d`` and ``BatchNorm3d``: what tools do with
    a batch norm, such as folding it into a convolution, is right for these layers.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize_with(batch_norm, input)


class BatchNorm1d(BatchNormBase, nn.BatchNorm1d):  # type: ignore[misc]
    """Batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = BatchNorm1d(2, momentum=None)
        >>> for value in (1.0, 3.0):
        ...     _ = layer(torch.tensor([[0.0, 0.0], [value, value]]))
        >>> layer.running_mean  # the plain average of 0.5 and 1.5
        tensor([1., 1.])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNorm2d(BatchNormBase, nn.BatchNorm2d):  # type: ignore[misc]
    """Batch normalization of (N, C, H, W) input.

    Example:
        >>> BatchNorm2d(8)(torch.randn(4, 8, 5, 5)).shape
        torch.Size([4, 8, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class BatchNorm3d(BatchNormBase, nn.BatchNorm3d):  # type: ignore[misc]
    """Batch normalization of (N, C, D, H, W) input.

    Example:
        >>> BatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
