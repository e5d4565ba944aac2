"""Switchable normalization (Luo et al., 2019): a learned mixture of instance, layer and batch moments.

As in the authors' code, there are two separate weight vectors, one for the means and one for the variances, whose
logits start at 1, ``momentum=0.1`` is the weight of a new batch, and the running moments, including the variance, start
at zero. The instance variance is unbiased, and the layer and batch variances are computed from it. If the input has one
position, as (N, C) input does, an instance has no variance, and only layer and batch moments are mixed.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_batch, check_residual
from contnorm.kernels.reference import add_residual_and_relu
from contnorm.norms.base import (
    MomentNorm,
    check_arguments,
    empty_like_input,
    update_moments,
    uses_batch_moments,
)
from contnorm.norms.row_moments import RowMoments, has_one_position, normalize_rows, row_moments


def switch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    r"""Switchable normalization.

    .. math::
        y = \gamma \frac{x - \sum_k w_k \mu_k}{\sqrt{\sum_k w'_k \sigma^2_k + \epsilon}} + \beta,
        \quad k \in \{\mathrm{IN}, \mathrm{LN}, \mathrm{BN}\}

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), of the batch branch, updated in place if ``training``.
        running_var: (C,), of the batch branch, updated in place if ``training``.
        weight: (C,) or None.
        bias: (C,) or None.
        mean_weight: (3,), logits of the mixture of means: instance, layer, batch.
        var_weight: (3,), logits of the mixture of variances.
        training: Whether the batch branch uses the moments of the batch. Without running moments, it always does.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the mixed variance.
        residual: Tensor added to the result, with the input's shape. It is cast to the input's dtype.
        relu: Whether to apply ReLU to the result, after the residual.

    Example:
        >>> x, only_batch = torch.tensor([[0.0, 5.0], [2.0, 9.0]]), torch.tensor([0.0, -99.0, 99.0])
        >>> switch_norm(x, None, None, None, None, only_batch, only_batch, training=True, eps=1e-12)
        tensor([[-1., -1.],
                [ 1.,  1.]])
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps)
    residual = check_residual(residual, x)
    if x.numel() == 0:
        return add_residual_and_relu(empty_like_input(x, weight, bias, mean_weight, var_weight), residual, relu)
    by_batch = uses_batch_moments(training, running_mean)
    if by_batch:
        check_batch(x, eps)
    row_stats = row_moments(x)
    if by_batch:
        batch_mean, batch_var = _batch_branch(row_stats)
        update_moments(running_mean, running_var, batch_mean, batch_var, momentum)
    else:
        assert running_mean is not None and running_var is not None
        batch_mean, batch_var = running_mean.double(), running_var.double()

    layer_mean = row_stats.mean.mean(1, keepdim=True)
    layer_var = (row_stats.var + (row_stats.mean - layer_mean).square()).mean(1, keepdim=True)
    single = has_one_position(x)
    mean = _mixed(mean_weight, row_stats.mean, layer_mean, batch_mean, single)
    var = _mixed(var_weight, row_stats.var, layer_var, batch_var, single)
    return add_residual_and_relu(normalize_rows(x, row_stats, mean, var, weight, bias, eps), residual, relu)


def _batch_branch(rows: RowMoments) -> tuple[Tensor, Tensor]:
    mean = rows.mean.mean(0)
    return mean, (rows.var + (rows.mean - mean).square()).mean(0)


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of the batch branch for an input, (C,) each, in float64.

    Example:
        >>> mean, var = batch_moments(torch.tensor([[0.0], [2.0]]))
        >>> mean.item(), var.item()
        (1.0, 1.0)
    """
    return _batch_branch(row_moments(x))


def _mixed(logits: Tensor, instance: Tensor, layer: Tensor, batch: Tensor, single: bool) -> Tensor:
    """Return the weighted sum of the moments, (N, C)."""
    share = torch.softmax((logits[1:] if single else logits).double(), 0)
    mixed = share[-2] * layer + share[-1] * batch
    return mixed if single else mixed + share[0] * instance


class _SwitchNorm(MomentNorm):
    """Switchable normalization.

    ``mean_weight`` and ``var_weight`` hold the logits of instance, layer and batch moments, in that order. Their
    softmax weights the moments, also with ``affine=False``.
    """

    own_tensors: ClassVar[tuple[str, ...]] = ("mean_weight", "var_weight")
    initial_var: ClassVar[float] = 0.0

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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.mean_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.var_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in ("mean_weight", "var_weight"):
            if name in self._parameters:  # the constructor of the base class resets before they exist
                nn.init.ones_(getattr(self, name))

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        return self._normalize_with(
            switch_norm,
            input,
            mean_weight=self.mean_weight,
            var_weight=self.var_weight,
            residual=residual,
            relu=relu,
        )

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return batch_moments(x)

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class SwitchNorm1d(_SwitchNorm):
    """Switchable normalization of (N, C) or (N, C, L) input; for (N, C) it mixes only layer and batch moments.

    Example:
        >>> SwitchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class SwitchNorm2d(_SwitchNorm):
    """Switchable normalization of (N, C, H, W) input.

    Example:
        >>> SwitchNorm2d(8).mean_weight.softmax(0).tolist()
        [0.333..., 0.333..., 0.333...]
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class SwitchNorm3d(_SwitchNorm):
    """Switchable normalization of (N, C, D, H, W) input.

    Example:
        >>> SwitchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
