"""Group, instance and layer normalization with channels as first argument, so that each can stand where BN stood.

Differs from torch's classes: ``GroupNorm*(num_features, num_groups=...)`` instead of ``GroupNorm(groups, channels)``;
instance norm has an affine by default and no running statistics; layer norm spans channels and positions, with one
weight and bias per channel.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_eps, check_features, resolve_groups
from contnorm.functional import group_norm, instance_norm, layer_norm
from contnorm.layers.base import NormLayer

__all__ = [
    "GroupNorm1d",
    "GroupNorm2d",
    "GroupNorm3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm1d",
    "LayerNorm2d",
    "LayerNorm3d",
]


class _SampleNorm(NormLayer):
    """A norm of each sample by itself: weight and bias per channel, the same in training and evaluation."""

    own_kernels: ClassVar[bool] = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.num_features = check_features(num_features, name)
        self.eps = check_eps(eps, name)
        self.affine = affine
        for parameter in ("weight", "bias"):
            value = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if affine else None
            self.register_parameter(parameter, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        shown = f"{self.num_features}, eps={self.eps}"
        return shown if self.affine else f"{shown}, affine=False"


class _GroupNorm(_SampleNorm):
    """Group normalization."""

    num_groups: int | str

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_groups: int | str = 32,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        self.num_groups = settled_groups(num_groups, num_features, self.ranks, type(self).__name__)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, caller=type(self).__name__)

    def extra_repr(self) -> str:
        channels, rest = super().extra_repr().split(", ", 1)
        return f"{channels}, num_groups={self.num_groups}, {rest}"


def settled_groups(num_groups: int | str, channels: int, ranks: tuple[int, ...], caller: str) -> int | str:
    """Check the groups when a layer is built; ``"auto"`` stays open where the rank of the input decides it."""
    found = {resolve_groups(num_groups, channels, rank, caller) for rank in ranks}
    return found.pop() if len(found) == 1 else num_groups


class _InstanceNorm(_SampleNorm):
    """Instance normalization."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return instance_norm(input, self.weight, self.bias, self.eps, caller=type(self).__name__)


class _LayerNorm(_SampleNorm):
    """Layer normalization over channels and positions."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return layer_norm(input, self.weight, self.bias, self.eps, caller=type(self).__name__)


class GroupNorm1d(_GroupNorm):
    """Group normalization of (N, C) or (N, C, L) input.

    Example:
        >>> GroupNorm1d(4, num_groups=2, eps=1e-12)(torch.tensor([[0.0, 2.0, 5.0, 7.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class GroupNorm2d(_GroupNorm):
    """Group normalization of (N, C, H, W) input.

    Example:
        >>> GroupNorm2d(64)
        GroupNorm2d(64, num_groups=32, eps=1e-05)
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class GroupNorm3d(_GroupNorm):
    """Group normalization of (N, C, D, H, W) input.

    Example:
        >>> GroupNorm3d(64)(torch.randn(1, 64, 2, 3, 3)).shape
        torch.Size([1, 64, 2, 3, 3])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)


class InstanceNorm1d(_InstanceNorm):
    """Instance normalization of (N, C, L) input; an (N, C) input has one value per instance and is refused.

    Example:
        >>> InstanceNorm1d(1, eps=1e-12)(torch.tensor([[[0.0, 2.0]]])).tolist()
        [[[-1.0, 1.0]]]
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """Instance normalization of (N, C, H, W) input.

    Example:
        >>> InstanceNorm2d(3)(torch.randn(1, 3, 4, 4)).shape
        torch.Size([1, 3, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class InstanceNorm3d(_InstanceNorm):
    """Instance normalization of (N, C, D, H, W) input.

    Example:
        >>> InstanceNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)


class LayerNorm1d(_LayerNorm):
    """Layer normalization of (N, C) or (N, C, L) input over all but the samples.

    Example:
        >>> LayerNorm1d(2, eps=1e-12)(torch.tensor([[0.0, 2.0]])).tolist()
        [[-1.0, 1.0]]
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class LayerNorm2d(_LayerNorm):
    """Layer normalization of (N, C, H, W) input over all but the samples.

    Example:
        >>> LayerNorm2d(3)(torch.randn(1, 3, 4, 4)).shape
        torch.Size([1, 3, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class LayerNorm3d(_LayerNorm):
    """Layer normalization of (N, C, D, H, W) input over all but the samples.

    Example:
        >>> LayerNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
