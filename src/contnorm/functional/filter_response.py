"""Filter response normalization with the thresholded linear unit."""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.checks import check_eps, check_input, check_parameters, statistics_dtype
from contnorm.functional.batch import ANY_RANK, channels_of, empty_like_input
from contnorm.kernels.pivot import per_channel

__all__ = ["filter_response_norm"]


def filter_response_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    tau: Tensor | None = None,
    eps: float = 1e-5,
    *,
    caller: str = "filter_response_norm",
) -> Tensor:
    """Filter response normalization: ``max(x / sqrt(mean(x^2) + eps) * weight + bias, tau)``.

    The mean of squares is that of one channel of one sample over its positions. The mean is not subtracted.

    Args:
        x: Input of shape (N, C, *) with more than one position.
        weight: (C,) or None.
        bias: (C,) or None.
        tau: (C,), the threshold of the thresholded linear unit; None for no activation.
        eps: Value added to the mean of squares.
        caller: The function or layer that error messages name.

    Example:
        >>> filter_response_norm(torch.tensor([[[-1.0, 7.0]]]), eps=1e-12)
        tensor([[[-0.2000,  1.4000]]])
        >>> filter_response_norm(torch.tensor([[[-1.0, 7.0]]]), tau=torch.zeros(1), eps=1e-12)
        tensor([[[0.0000, 1.4000]]])
    """
    check_input(x, ANY_RANK, channels_of(None, weight), caller)
    eps = check_eps(eps, caller)
    check_parameters(x, weight, bias, caller)
    if x.numel() and x.numel() == x.shape[0] * x.shape[1]:
        raise ValueError(
            f"{caller}: an input of shape {tuple(x.shape)} has one value per channel, of which only the sign would "
            f"remain. Give it more than one position, or use another norm, such as evonorm_s0 or gn."
        )
    if x.numel() == 0:
        return empty_like_input(x, weight, bias, tau)
    wide, rank = x.to(statistics_dtype(x)), x.dim()
    scale = torch.rsqrt(wide.square().mean(tuple(range(2, rank))) + eps)  # (N, C)
    if weight is not None:
        scale = scale * weight.to(wide.dtype)
    if bias is None:
        y = wide * per_channel(scale, rank)
    else:
        y = torch.addcmul(per_channel(bias.to(wide.dtype), rank), wide, per_channel(scale, rank))
    return (y if tau is None else torch.maximum(y, per_channel(tau.to(wide.dtype), rank))).to(x.dtype)
