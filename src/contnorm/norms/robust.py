"""Batch norms for data that shift: instance-aware, robust and hybrid batch normalization.

The papers of the first two replace the batch norms of a network, or train it with these layers, and adapt it at test
time. Here
they are trained as any other norm and are not adapted: in evaluation nothing is stored, so results do not depend on the
order or the composition of test batches.

**Instance-aware batch normalization** (IABN; Gong et al., NOTE, NeurIPS 2022): each sample is normalized with the
moments of the batch (in evaluation: the running moments), corrected by as much as its own moments differ from them by
more than ``k`` standard errors. As in the authors' code, both variances are unbiased, gradients flow through all
moments, and an input with one position per sample and channel, such as (N, C), has no instance moments: it is
normalized with the moments of the batch alone. The default of ``k`` is that of the authors' scripts, 4; their class has
3.

**Robust batch normalization** (RBN; Yuan et al., RoTTA, CVPR 2023): in training, an input is normalized with a mixture
of the running moments and those of the batch, and the mixture becomes the new running moments. As in the authors' code,
the variance is biased, and gradients flow through the moments of the batch with their weight in the mixture.

**Hybrid batch normalization** (HBN; Chen et al., ICML 2025) is for federated learning: in training, an input is
normalized with a mixture of global moments and those of the batch, whose share each channel learns. Evaluation has the
global moments. The server measures these in passes of their own. Here they are the running moments, which follow the
batches, or are frozen and re-estimated; see `HybridBatchNormBase`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_number, statistics_dtype, updates_moments, widest
from contnorm.kernels.pivot import channel_pivot, per_channel
from contnorm.norms.base import (
    MomentNorm,
    apply_affine,
    channel_moments,
    check_arguments,
    empty_like_input,
    has_one_position,
    keep_values,
    normalize_rows,
    row_moments,
    unbiased,
    update_moments,
)

# --- instance-aware batch normalization ------------------------------------------------------------------------------


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
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    k = check_number(k, 0, "k")
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    rows, positions = row_moments(x), math.prod(x.shape[2:])
    if by_batch:
        mean = rows.mean.mean(0)
        biased = (rows.var * ((positions - 1) / positions) + (rows.mean - mean).square()).mean(0)
        var = unbiased(biased, x.shape[0] * positions)
        update_moments(running_mean, running_var, mean, var, momentum)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = widest(running_mean), widest(running_var)
    if not has_one_position(x):
        mean_limit = k * torch.sqrt((var + eps) / positions)
        var_limit = k * (var + eps) * var.new_full((), 2 / (positions - 1)).sqrt()  # exporters keep the size variable
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


class InstanceAwareBatchNorm1d(InstanceAwareBatchNormBase, dim=1):
    """Instance-aware batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> InstanceAwareBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """


class InstanceAwareBatchNorm2d(InstanceAwareBatchNormBase, dim=2):
    """Instance-aware batch normalization of (N, C, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm2d(8, k=3)
        InstanceAwareBatchNorm2d(8, k=3.0, eps=1e-05, momentum=0.1)
    """


class InstanceAwareBatchNorm3d(InstanceAwareBatchNormBase, dim=3):
    """Instance-aware batch normalization of (N, C, D, H, W) input.

    Example:
        >>> InstanceAwareBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """


# --- robust batch normalization --------------------------------------------------------------------------------------


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
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    dtype = statistics_dtype(x)
    shifted = x.to(dtype)
    if by_batch:
        pivot = channel_pivot(x)
        shifted = shifted - per_channel(pivot, x.dim())
        mean, var = channel_moments(shifted)  # moments of the input minus the pivot
    if running_mean is not None and running_var is not None:
        old_mean, old_var = running_mean.to(dtype), running_var.to(dtype)
        share: Any = momentum
        if not by_batch:
            mean, var = old_mean, old_var
        elif updates_moments(running_mean, momentum):
            # Copies, since a tensor momentum depends on the counter, and both change below.
            if isinstance(momentum, Tensor):
                old_mean, old_var, share = keep_values(old_mean, old_var, momentum.to(dtype).expand_as(old_mean))
            else:
                old_mean, old_var = keep_values(old_mean, old_var)
            mean, var = torch.lerp(old_mean - pivot, mean, share), torch.lerp(old_var, var, share)
            if update:
                with torch.no_grad():
                    running_mean.copy_(mean + pivot)
                    running_var.copy_(var)
        else:  # a weight of 0 leaves the batch out, even if it has NaNs
            mean, var = old_mean - pivot, old_var
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

    mixes_moments: ClassVar[bool] = True

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


class RobustBatchNorm1d(RobustBatchNormBase, dim=1):
    """Robust batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> RobustBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """


class RobustBatchNorm2d(RobustBatchNormBase, dim=2):
    """Robust batch normalization of (N, C, H, W) input.

    Example:
        >>> layer = RobustBatchNorm2d(8)
        >>> x = torch.randn(4, 8, 5, 5)
        >>> torch.allclose(layer(x), layer.eval()(x), atol=1e-6)  # the stored moments normalized the batch
        True
    """


class RobustBatchNorm3d(RobustBatchNormBase, dim=3):
    """Robust batch normalization of (N, C, D, H, W) input.

    Example:
        >>> RobustBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """


# --- hybrid batch normalization --------------------------------------------------------------------------------------


def hybrid_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    distribution_factor: Tensor,
) -> Tensor:
    r"""Hybrid batch normalization.

    .. math::
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad
        \mu = (1 - a) \mu_r + a \mu_B, \quad \sigma^2 = (1 - a) \sigma_r^2 + a \sigma_B^2, \quad
        a = \mathrm{sigmoid}(\alpha)

    In evaluation, a is 0. The variance of the batch is biased here, and unbiased in the running variance.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``, after the normalization.
        running_var: (C,), updated in place if ``training``, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to mix the moments of the batch with the running ones. Without running moments, those of the
            batch are always used alone.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.
        distribution_factor: (C,), the logit :math:`\alpha` of the share of the batch.

    Example:
        >>> x, mean, var = torch.tensor([[6.0], [10.0]]), torch.zeros(1), torch.zeros(1)
        >>> hybrid_batch_norm(x, mean, var, training=True, eps=1e-12, distribution_factor=torch.zeros(1))  # 4 and 2
        tensor([[1.4142],
                [4.2426]])
        >>> mean, var  # a tenth of 8, and of the unbiased variance
        (tensor([0.8000]), tensor([0.8000]))
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias, distribution_factor)
    dtype = statistics_dtype(x)
    shifted, pivot = x.to(dtype), x.new_zeros((), dtype=dtype)
    if by_batch:
        pivot = channel_pivot(x)
        shifted = shifted - per_channel(pivot, x.dim())
        mean, var = channel_moments(shifted)  # moments of the input minus the pivot
    if running_mean is not None and running_var is not None:
        old_mean, old_var = keep_values(running_mean.to(dtype) - pivot, running_var.to(dtype))
        if not by_batch:
            mean, var = old_mean, old_var
        else:
            new_var = unbiased(var, x.numel() // x.shape[1])
            update_moments(running_mean, running_var, mean + pivot, new_var, momentum)
        # The factor takes part in every pass, as DistributedDataParallel requires of all parameters.
        share = torch.sigmoid(distribution_factor.to(dtype)) if by_batch else 0 * distribution_factor.to(dtype)
        mean, var = torch.lerp(old_mean, mean, share), torch.lerp(old_var, var, share)
    normalized = (shifted - per_channel(mean, x.dim())) * per_channel(torch.rsqrt(var + eps), x.dim())
    return apply_affine(normalized, weight, bias).to(x.dtype)


class HybridBatchNormBase(MomentNorm):
    """Hybrid batch normalization.

    In training, an input is normalized with ``(1 - a) * running + a * batch`` moments, where ``a`` is the sigmoid of
    ``distribution_factor``, a learned value for each channel that starts at 0 (``a = 0.5``). Evaluation is that of
    batch norm. Arguments and buffers are those of batch norm, and so are the values of the buffers.

    The running moments follow the training batches, after the normalization. To measure them apart from training, as
    the paper does in each round, freeze them and re-estimate them: ``stats_mode(model, update=False)``, and
    ``reestimate(model, batches, frozen="lift")`` whenever they should follow the weights.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: Weight of a batch in the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, it is batch norm of the batch in both modes.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
    """

    own_tensors: ClassVar[tuple[str, ...]] = ("distribution_factor",)
    mixes_moments: ClassVar[bool] = True
    distribution_factor: nn.Parameter

    def _add_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.distribution_factor = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set weight, bias, share of the batch and running moments to the initial values."""
        super().reset_parameters()
        nn.init.zeros_(self.distribution_factor)

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize_with(
            hybrid_batch_norm,
            input,
            running_mean=self.running_mean,
            running_var=self.running_var,
            distribution_factor=self.distribution_factor,
        )


class HybridBatchNorm1d(HybridBatchNormBase, dim=1):
    """Hybrid batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> HybridBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """


class HybridBatchNorm2d(HybridBatchNormBase, dim=2):
    """Hybrid batch normalization of (N, C, H, W) input.

    Example:
        >>> sorted(HybridBatchNorm2d(8).state_dict())
        ['bias', 'distribution_factor', 'num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """


class HybridBatchNorm3d(HybridBatchNormBase, dim=3):
    """Hybrid batch normalization of (N, C, D, H, W) input.

    Example:
        >>> HybridBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """
