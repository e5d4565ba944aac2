"""Identity layers that take the place of a norm and keep its number of channels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.checks import check_input
from contnorm.norms.base import NormLayer


class _NoNorm(NormLayer):
    """Returns its input unchanged. It checks the input as the norms do, and can be converted back to any norm."""

    def __init__(
        self, num_features: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        check_input(input)
        return input

    def extra_repr(self) -> str:
        return f"{self.num_features}"


class NoNorm1d(_NoNorm):
    """No normalization of (N, C) or (N, C, L) input.

    Example:
        >>> NoNorm1d(2)(torch.tensor([[1.0, 5.0]]))
        tensor([[1., 5.]])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class NoNorm2d(_NoNorm):
    """No normalization of (N, C, H, W) input.

    Example:
        >>> NoNorm2d(3)(torch.ones(2, 3, 4, 4)).sum().item()
        96.0
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class NoNorm3d(_NoNorm):
    """No normalization of (N, C, D, H, W) input.

    Example:
        >>> NoNorm3d(3)(torch.ones(2, 3, 2, 2, 2)).sum().item()
        48.0
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
