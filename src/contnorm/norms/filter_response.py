"""Filter response normalization, with the thresholded linear unit as their activation.

``y = max(x / sqrt(mean(x^2) + eps) * weight + bias, tau)``, where the mean of squares is that of one channel of one
sample; ``weight``, ``bias`` and ``tau`` are learned, one value per channel (Singh and Krishnan, Filter Response
Normalization Layer, CVPR 2020). The output does not depend on the other samples of the batch.

Where no activation follows the norm that it replaces (``apply_act=False``), the layer has no threshold, as in timm's
``FilterResponseNormTlu2d``. After a residual sum the network's ReLU remains; the paper defines the layer for
pre-activation networks, which have none there. For one position per channel the paper learns eps, since only the sign
of the input would remain. That is not implemented: such input raises an error.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_eps, check_input, statistics_dtype
from contnorm.kernels.pivot import per_channel
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.base import empty_like_input


def filter_response_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    tau: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Filter response normalization: ``max(x / sqrt(mean(x^2) + eps) * weight + bias, tau)``.

    The mean of squares is that of one channel of one sample over its positions. The mean is not subtracted.

    Args:
        x: Input of shape (N, C, *) with more than one position.
        weight: (C,) or None.
        bias: (C,) or None.
        tau: (C,), the threshold of the thresholded linear unit; None for no activation.
        eps: Value added to the mean of squares.

    Example:
        >>> filter_response_norm(torch.tensor([[[-1.0, 7.0]]]), eps=1e-12)
        tensor([[[-0.2000,  1.4000]]])
        >>> filter_response_norm(torch.tensor([[[-1.0, 7.0]]]), tau=torch.zeros(1), eps=1e-12)
        tensor([[[0.0000, 1.4000]]])
    """
    check_input(x, weight, bias, tau)
    eps = check_eps(eps)
    if x.numel() and x.numel() == x.shape[0] * x.shape[1]:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has one value per channel, of which only the sign would "
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


class _FilterResponseNorm(ActivationNorm):
    """Filter response normalization."""

    own_tensors: ClassVar[tuple[str, ...]] = ("tau",)
    act_parameter: ClassVar[str] = "tau"
    act_initial: ClassVar[float] = 0.0
    tau: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return filter_response_norm(input, self.weight, self.bias, self.tau, self.eps)


class FilterResponseNorm1d(_FilterResponseNorm):
    """Filter response normalization of (N, C, L) input. An (N, C) input has one value per channel and raises an error.

    Example:
        >>> FilterResponseNorm1d(1, eps=1e-12)(torch.tensor([[[-1.0, 7.0]]])).tolist()
        [[[0.0, 1.399999976158142]]]
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class FilterResponseNorm2d(_FilterResponseNorm):
    """Filter response normalization of (N, C, H, W) input.

    Args:
        num_features: Number of channels.
        eps: Value added to the mean of squares.
        affine: Whether there are ``weight`` and ``bias``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        apply_act: Whether the layer contains the thresholded linear unit. False where no activation follows.

    Example:
        >>> FilterResponseNorm2d(64)
        FilterResponseNorm2d(64, eps=1e-05)
        >>> FilterResponseNorm2d(64, apply_act=False).tau is None
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class FilterResponseNorm3d(_FilterResponseNorm):
    """Filter response normalization of (N, C, D, H, W) input.

    Example:
        >>> FilterResponseNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
