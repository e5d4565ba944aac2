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

from contnorm.checks import widest
from contnorm.norms.base import (
    MomentNorm,
    RowMoments,
    check_arguments,
    empty_like_input,
    has_one_position,
    normalize_rows,
    row_moments,
    update_moments,
)


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

    Example:
        >>> x, only_batch = torch.tensor([[0.0, 5.0], [2.0, 9.0]]), torch.tensor([0.0, -99.0, 99.0])
        >>> switch_norm(x, None, None, None, None, only_batch, only_batch, training=True, eps=1e-12)
        tensor([[-1., -1.],
                [ 1.,  1.]])
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias, mean_weight, var_weight)
    rows = row_moments(x)
    if by_batch:
        batch_mean, batch_var = _batch_branch(rows)
        update_moments(running_mean, running_var, batch_mean, batch_var, momentum)
    else:
        assert running_mean is not None and running_var is not None
        batch_mean, batch_var = widest(running_mean), widest(running_var)
    layer_mean = rows.mean.mean(1, keepdim=True)
    layer_var = (rows.var + (rows.mean - layer_mean).square()).mean(1, keepdim=True)
    single = has_one_position(x)
    mean = _mixed(mean_weight, rows.mean, layer_mean, batch_mean, single)
    var = _mixed(var_weight, rows.var, layer_var, batch_var, single)
    return normalize_rows(x, rows, mean, var, weight, bias, eps)


def _batch_branch(rows: RowMoments) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of the batch, (C,) each, in float64."""
    mean = rows.mean.mean(0)
    return mean, (rows.var + (rows.mean - mean).square()).mean(0)


def _mixed(logits: Tensor, instance: Tensor, layer: Tensor, batch: Tensor, single: bool) -> Tensor:
    """Return the weighted sum of the moments, (N, C)."""
    share = torch.softmax(widest(logits[1:] if single else logits), 0)
    mixed = share[-2] * layer + share[-1] * batch
    return mixed if single else mixed + share[0] * instance


class _SwitchNorm(MomentNorm):
    """Switchable normalization.

    ``mean_weight`` and ``var_weight`` hold the logits of instance, layer and batch moments, in that order. Their
    softmax weights the moments, also with ``affine=False``.
    """

    own_tensors: ClassVar[tuple[str, ...]] = ("mean_weight", "var_weight")
    initial_var: ClassVar[float] = 0.0
    mean_weight: nn.Parameter
    var_weight: nn.Parameter

    def _add_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        for name in self.own_tensors:
            self.register_parameter(name, nn.Parameter(torch.empty(3, device=device, dtype=dtype)))

    def reset_parameters(self) -> None:
        """Set weight, bias, mixture weights and running moments to the initial values."""
        super().reset_parameters()
        nn.init.ones_(self.mean_weight)
        nn.init.ones_(self.var_weight)

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize_with(switch_norm, input, mean_weight=self.mean_weight, var_weight=self.var_weight)

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _batch_branch(row_moments(x))

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class SwitchNorm1d(_SwitchNorm, dim=1):
    """Switchable normalization of (N, C) or (N, C, L) input; for (N, C) it mixes only layer and batch moments.

    Example:
        >>> SwitchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """


class SwitchNorm2d(_SwitchNorm, dim=2):
    """Switchable normalization of (N, C, H, W) input.

    Example:
        >>> SwitchNorm2d(8).mean_weight.softmax(0).tolist()
        [0.333..., 0.333..., 0.333...]
    """


class SwitchNorm3d(_SwitchNorm, dim=3):
    """Switchable normalization of (N, C, D, H, W) input.

    Example:
        >>> SwitchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """
