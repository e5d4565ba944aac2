"""EvoNorm-S0: a norm of each sample that contains its activation.

``y = x * sigmoid(v * x) / std(x) * weight + bias``, where ``std`` is the standard deviation of a group of channels of a
sample; ``v``, ``weight`` and ``bias`` are learned, one value per channel (Liu et al., Evolving
Normalization-Activation Layers, NeurIPS 2020). The output does not depend on the other samples of the batch.

Where no activation follows the norm that it replaces (``apply_act=False``), the layer computes
``x / std(x) * weight + bias``. The authors' ResNet code and timm's ``EvoNorm2dS0`` have an affine map without a
denominator there, and the authors use it in pre-activation networks only. In a post-activation network the residual
branch would then not be normalized at all. timm's ``EvoNorm2dS0a``, for such networks, keeps the denominator, as this
layer does.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import (
    check_eps,
    check_group_size,
    check_input,
    resolve_groups,
    statistics_dtype,
)
from contnorm.kernels.pivot import per_channel
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.base import empty_like_input
from contnorm.norms.group import check_groups


def evonorm_s0(
    x: Tensor,
    num_groups: int | str = 32,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    v: Tensor | None = None,
    eps: float = 1e-5,
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

    Example:
        >>> evonorm_s0(torch.tensor([[-1.0, 1.0, 4.0, 8.0]]), num_groups=2, eps=1e-12)
        tensor([[-1.,  1.,  2.,  4.]])
        >>> evonorm_s0(torch.tensor([[-1.0, 1.0]]), num_groups=1, v=torch.ones(2), eps=1e-12)
        tensor([[-0.2689,  0.7311]])
    """
    check_input(x, weight, bias, v)
    eps = check_eps(eps)
    groups = resolve_groups(num_groups, x.shape[1], x.dim())
    if x.numel() == 0:
        return empty_like_input(x, weight, bias, v)
    check_group_size(x, groups)
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


class _EvoNormS0(ActivationNorm):
    """EvoNorm-S0."""

    own_tensors: ClassVar[tuple[str, ...]] = ("v",)
    act_parameter: ClassVar[str] = "v"
    act_initial: ClassVar[float] = 1.0
    num_groups: int | str
    v: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_groups: int | str = 32,
        apply_act: bool = True,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype, apply_act=apply_act)
        self.num_groups = check_groups(num_groups, num_features, self.ranks)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return evonorm_s0(input, self.num_groups, self.weight, self.bias, self.v, self.eps)

    def extra_repr(self) -> str:
        channels, rest = super().extra_repr().split(", ", 1)
        return f"{channels}, num_groups={self.num_groups}, {rest}"


class EvoNorm1d(_EvoNormS0):
    """EvoNorm-S0 of (N, C) or (N, C, L) input.

    Example:
        >>> EvoNorm1d(2, num_groups=1, eps=1e-12)(torch.tensor([[-1.0, 1.0]]))
        tensor([[-0.2689,  0.7311]], grad_fn=<AddcmulBackward0>)
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class EvoNorm2d(_EvoNormS0):
    """EvoNorm-S0 of (N, C, H, W) input.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        affine: Whether there are ``weight`` and ``bias``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        num_groups: A divisor of the number of channels, or ``"auto"``.
        apply_act: Whether the layer contains the activation. False where no activation follows.

    Example:
        >>> EvoNorm2d(64)
        EvoNorm2d(64, num_groups=32, eps=1e-05)
        >>> EvoNorm2d(64, apply_act=False).v is None
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class EvoNorm3d(_EvoNormS0):
    """EvoNorm-S0 of (N, C, D, H, W) input.

    Example:
        >>> EvoNorm3d(64)(torch.randn(1, 64, 2, 3, 3)).shape
        torch.Size([1, 64, 2, 3, 3])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
