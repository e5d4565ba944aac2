"""EvoNorm-S0: normalization by the standard deviation of a group, and an activation, in one formula."""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.checks import (
    check_eps,
    check_group_size,
    check_input,
    check_parameters,
    resolve_groups,
    statistics_dtype,
)
from contnorm.functional.batch import ANY_RANK, channels_of, empty_like_input
from contnorm.kernels.pivot import per_channel

__all__ = ["evonorm_s0"]


def evonorm_s0(
    x: Tensor,
    num_groups: int | str = 32,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    v: Tensor | None = None,
    eps: float = 1e-5,
    *,
    caller: str = "evonorm_s0",
) -> Tensor:
    """EvoNorm-S0: ``x * sigmoid(v * x) / std * weight + bias``.

    ``std`` is the standard deviation (biased, with eps added to the variance) of a group of channels of a sample. The
    mean is not subtracted.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        num_groups: A divisor of C, or ``"auto"``.
        weight: (C,) or None.
        bias: (C,) or None.
        v: (C,), the slope of the sigmoid; None for no activation, ``x / std * weight + bias``.
        eps: Value added to the variance.
        caller: The function or layer that error messages name.

    Example:
        >>> evonorm_s0(torch.tensor([[-1.0, 1.0, 4.0, 8.0]]), num_groups=2, eps=1e-12)
        tensor([[-1.,  1.,  2.,  4.]])
        >>> evonorm_s0(torch.tensor([[-1.0, 1.0]]), num_groups=1, v=torch.ones(2), eps=1e-12)
        tensor([[-0.2689,  0.7311]])
    """
    check_input(x, ANY_RANK, channels_of(None, weight), caller)
    eps = check_eps(eps, caller)
    check_parameters(x, weight, bias, caller)
    groups = resolve_groups(num_groups, x.shape[1], x.dim(), caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias, v)
    check_group_size(x, groups, caller)
    wide, rank = x.to(statistics_dtype(x)), x.dim()
    scale = torch.rsqrt(_group_variance(wide, groups) + eps)  # (N, C): the affine scale costs no pass over the input
    if weight is not None:
        scale = scale * weight.to(wide.dtype)
    y = wide if v is None else wide * torch.sigmoid(wide * per_channel(v.to(wide.dtype), rank))
    if bias is None:
        return (y * per_channel(scale, rank)).to(x.dtype)
    return torch.addcmul(per_channel(bias.to(wide.dtype), rank), y, per_channel(scale, rank)).to(x.dtype)


def _group_variance(x: Tensor, num_groups: int) -> Tensor:
    """Return the biased variance of each group of channels of a sample, repeated over its channels: (N, C)."""
    n, c = x.shape[:2]
    if x.is_contiguous():
        var = x.reshape(n, num_groups, -1).var(2, correction=0)
    else:  # a reshape would copy a channels_last input: the variance within channels, and that of their means
        within, mean = torch.var_mean(x.flatten(2) if x.dim() > 2 else x.unsqueeze(2), 2, correction=0)
        var = within.reshape(n, num_groups, -1).mean(2) + mean.reshape(n, num_groups, -1).var(2, correction=0)
    return var.unsqueeze(2).expand(n, num_groups, c // num_groups).reshape(n, c)
