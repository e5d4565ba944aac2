"""Norms built from torch's layers only, as timed in the paper: without fused kernels and without checks.

Continual norm is two layers: group norm without affine parameters, then batch norm. Torch has no switchable norm, so
the one of this package is used, restricted to torch operators.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from contnorm.kernels.reference import backward_would_crash, group_norm_in_layout
from contnorm.norms.switchable import SwitchNorm1d, SwitchNorm2d, SwitchNorm3d

STOCK_NORMS = ("none", "bn", "gn", "sn", "cn")
BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SWITCHABLE = {1: SwitchNorm1d, 2: SwitchNorm2d, 3: SwitchNorm3d}


class StockGroupNorm(nn.GroupNorm):
    """Torch's group norm that also accepts, on a CPU, a channels_last input that requires no gradient.

    For such an input, torch's backward pass crashes the process.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
        >>> StockGroupNorm(2, 4)(x).sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        if backward_would_crash(input, self.weight, self.bias):
            return group_norm_in_layout(input, self.num_groups, self.weight, self.bias, self.eps)
        return super().forward(input)


def stock_norm(name: str, num_features: int, dim: Literal[1, 2, 3], num_groups: int, momentum: float) -> nn.Module:
    """Create one of the norms in `STOCK_NORMS`, with torch's defaults for all other options.

    Example:
        >>> [type(layer).__name__ for layer in stock_norm("cn", 64, 2, 32, 0.1)]
        ['GroupNorm', 'BatchNorm2d']
    """
    if name == "bn":
        return BATCH[dim](num_features, momentum=momentum)
    if name == "gn":
        return StockGroupNorm(num_groups, num_features)
    if name == "cn":
        first = nn.GroupNorm(num_groups, num_features, affine=False)
        return nn.Sequential(first, BATCH[dim](num_features, momentum=momentum))
    if name == "sn":
        return SWITCHABLE[dim](num_features, momentum=momentum)
    if name == "none":
        return nn.Identity()
    raise ValueError(
        f"norm.layers='stock': torch has no layers for norm {name!r}. Use one of {', '.join(STOCK_NORMS)}."
    )
