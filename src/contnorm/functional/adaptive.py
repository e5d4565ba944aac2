"""Batch normalization in which samples have different weights, as in AdaB2N (Lyu et al., NeurIPS 2023).

Notation: w is the weight of a sample, m and v are the mean and biased variance of one channel of one sample over its
positions. The moments of a channel are μ = Σ w m and σ² = Σ w (v + (m - μ)²), sums over the samples. With equal weights
1/N, they are those of batch norm. The running variance is the moving average of σ² itself, without Bessel's correction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contnorm.checks import check_batch, statistics_dtype
from contnorm.functional.batch import (
    batch_norm,
    channel_moments,
    check_arguments,
    empty_like_input,
    update_moments,
    uses_batch_moments,
)
from contnorm.kernels.pivot import per_channel

__all__ = ["Balanced", "balance_step", "balanced_batch_norm", "task_balanced_weights"]


class Balanced(NamedTuple):
    """The output and the moments that it was normalized with, which have gradients."""

    output: Tensor
    mean: Tensor  # (C,)
    var: Tensor  # (C,), biased


def balanced_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    sample_weight: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    caller: str = "balanced_batch_norm",
) -> Tensor:
    """Batch normalization with weighted samples.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the biased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        sample_weight: (N,), used if ``training``; None for equal weights. They are not scaled to a sum of 1.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.
        caller: The function or layer that error messages name.

    Example:
        >>> x = torch.tensor([[0.0], [4.0]])
        >>> balanced_batch_norm(x, sample_weight=torch.tensor([0.5, 0.5]), training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
        >>> balanced_batch_norm(x, sample_weight=torch.tensor([0.8, 0.2]), training=True, eps=1e-12)
        tensor([[-0.5000],
                [ 2.0000]])
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps, caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not uses_batch_moments(training, running_mean):
        return batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps, caller=caller)
    check_batch(x, eps, caller)
    _check_sample_weight(x, sample_weight, caller)
    balanced = balance_step(x, weight, bias, sample_weight, eps)
    update_moments(running_mean, running_var, balanced.mean, balanced.var, momentum)
    return balanced.output


def _check_sample_weight(x: Tensor, sample_weight: Tensor | None, caller: str) -> None:
    if sample_weight is not None and sample_weight.shape != (x.shape[0],):
        raise ValueError(
            f"{caller}: sample_weight has shape {tuple(sample_weight.shape)}, but an input of shape {tuple(x.shape)} "
            f"needs ({x.shape[0]},): one weight per sample."
        )


def balance_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, sample_weight: Tensor | None, eps: float
) -> Balanced:
    """Normalize with the weighted moments of the batch. Arguments are not checked."""
    dtype, rank = statistics_dtype(x), x.dim()
    wide = x.to(dtype)
    mean, var = channel_moments(wide) if sample_weight is None else _weighted_moments(wide, sample_weight.to(dtype))
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.to(dtype)
    centred, scale = wide - per_channel(mean, rank), per_channel(scale, rank)
    y = centred * scale if bias is None else torch.addcmul(per_channel(bias.to(dtype), rank), centred, scale)
    return Balanced(y.to(x.dtype), mean, var)


def _weighted_moments(x: Tensor, sample_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and variance of each channel, from the moments of each sample."""
    share = sample_weight.unsqueeze(1)  # products and sums, since autocast would round a matrix product
    if x.dim() == 2:
        mean = (share * x).sum(0)
        return mean, (share * (x - mean).square()).sum(0)
    row_var, row_mean = torch.var_mean(x, dim=tuple(range(2, x.dim())), correction=0)
    mean = (share * row_mean).sum(0)
    return mean, (share * (row_var + (row_mean - mean).square())).sum(0)


def task_balanced_weights(task: Tensor, phi: Tensor, started: Tensor, renormalize: bool = False) -> Tensor:
    """Return the weight of each sample in AdaB2N: (exp(φ_t) + n_t) / (n_t Σ_s (exp(φ_s) + n_s)), t its task.

    n_t is the number of samples of task t in the batch; the sum is over the tasks that have started. A task without a
    sample in the batch takes its share exp(φ_s) of the sum, so that the weights of the samples then add up to less than
    1, as in the released code.

    Args:
        task: (N,) int64, the task of each sample.
        phi: (T,), learned.
        started: (T,), 1 for the tasks up to the current one, 0 for later ones.
        renormalize: Whether to divide the weights by their sum.

    Example:
        >>> started = torch.tensor([1, 1, 0])
        >>> task_balanced_weights(torch.tensor([1, 1, 1, 0]), torch.zeros(3), started)  # 4 / 18 and 2 / 6
        tensor([0.2222, 0.2222, 0.2222, 0.3333])
        >>> task_balanced_weights(torch.tensor([1, 1]), torch.zeros(3), started)  # task 0 has 1 / 4 of the weight
        tensor([0.3750, 0.3750])
    """
    member = task.unsqueeze(1) == torch.arange(len(phi), device=task.device)  # (N, T)
    count = member.sum(0)
    concentration = phi.exp() * started + count
    share = concentration / (concentration.sum() * count.clamp(min=1))
    sample_weight = (member * share).sum(1)
    return sample_weight / sample_weight.sum() if renormalize else sample_weight
