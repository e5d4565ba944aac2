"""Group, instance and layer normalization layers with the number of channels as first argument, as in batch norm.

Differences from torch's classes: ``GroupNorm*(num_features, num_groups=...)`` instead of
``GroupNorm(groups, channels)``; instance norm has affine parameters by default and no running statistics; layer norm
normalizes over channels and positions, with one weight and bias per channel.

The functions use torch's operator, except for channels_last input on CUDA, for which a Triton kernel is used: torch's
operator copies such an input to the contiguous layout, and its output back.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.checks import check_eps, check_group_size, check_input, check_residual, resolve_groups
from contnorm.kernels import resolve_kernel
from contnorm.kernels.reference import add_residual_and_relu, group_norm_in_layout, in_statistics_dtype
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton.group_norm import group_step
from contnorm.kernels.triton.launcher import channels_last, is_plain
from contnorm.norms.base import NormLayer, empty_like_input


def group_norm(
    x: Tensor,
    num_groups: int | str = 32,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Group normalization: ``F.group_norm`` whose output has the input's memory layout and, also under autocast, dtype.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        num_groups: A divisor of C, or ``"auto"``.
        weight: (C,) or None.
        bias: (C,) or None.
        eps: Value added to the variance.
        residual: Tensor added to the result, with the input's shape. It is cast to the input's dtype.
        relu: Whether to apply ReLU to the result, after the residual. The Triton kernel does both in the same pass.

    Example:
        >>> group_norm(torch.tensor([[0.0, 2.0, 5.0, 7.0]]), num_groups=2, eps=1e-12)
        tensor([[-1.,  1., -1.,  1.]])
    """
    check_input(x, weight, bias)
    eps = check_eps(eps)
    residual = check_residual(residual, x)
    groups = resolve_groups(num_groups, x.shape[1], x.dim())
    if x.numel() == 0:
        return add_residual_and_relu(empty_like_input(x, weight, bias), residual, relu)
    check_group_size(x, groups)
    copied = x.is_cuda and not x.is_contiguous() and channels_last(x)  # by torch's operator
    if copied and is_plain(x) and fused.auto_selects(x, groups) and resolve_kernel(None) in ("auto", "triton"):
        return group_step(x, weight, bias, eps, groups, residual, relu)
    signal = x
    if weight is not None and weight.dtype != x.dtype:
        # Half-precision input with float32 weights is supported on CPU but not on CUDA, so all are cast to float32.
        signal, weight, bias = in_statistics_dtype(x, weight, bias)
    y = group_norm_in_layout(signal, groups, weight, bias, eps).to(x.dtype)
    return add_residual_and_relu(y, residual, relu)


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Instance normalization: normalizes each channel of each sample alone, so it needs more than one position.

    ``residual`` and ``relu`` are as in `group_norm`.

    Example:
        >>> instance_norm(torch.tensor([[[0.0, 2.0], [5.0, 5.5]]]), eps=1e-12)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    if x.numel() and x.numel() == x.shape[0] * x.shape[1]:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has one value per instance, which always normalizes to "
            f"zero. Give it more than one position, or use group or layer normalization."
        )
    return group_norm(x, x.shape[1], weight, bias, eps, residual=residual, relu=relu)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Layer normalization over channels and positions; weight and bias are per channel.

    ``residual`` and ``relu`` are as in `group_norm`.

    Example:
        >>> layer_norm(torch.tensor([[0.0, 2.0]]), eps=1e-12)
        tensor([[-1.,  1.]])
    """
    return group_norm(x, 1, weight, bias, eps, residual=residual, relu=relu)


class GroupNormBase(NormLayer):
    """Group normalization."""

    has_triton_kernels: ClassVar[bool] = True
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
        self.num_groups = check_groups(num_groups, num_features, self.ranks)

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        self._check(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, residual=residual, relu=relu)


def check_groups(num_groups: int | str, channels: int, ranks: tuple[int, ...]) -> int | str:
    """Check the number of groups at construction; ``"auto"`` is kept if it depends on the rank of the input."""
    resolved = {resolve_groups(num_groups, channels, rank) for rank in ranks}
    return resolved.pop() if len(resolved) == 1 else num_groups


class _InstanceNorm(NormLayer):
    """Instance normalization."""

    has_triton_kernels: ClassVar[bool] = True

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        self._check(input)
        return instance_norm(input, self.weight, self.bias, self.eps, residual=residual, relu=relu)


class _LayerNorm(NormLayer):
    """Layer normalization over channels and positions."""

    has_triton_kernels: ClassVar[bool] = True

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        self._check(input)
        return layer_norm(input, self.weight, self.bias, self.eps, residual=residual, relu=relu)


class GroupNorm1d(GroupNormBase, dim=1):
    """Group normalization of (N, C) or (N, C, L) input.

    Example:
        >>> GroupNorm1d(4, num_groups=2, eps=1e-12)(torch.tensor([[0.0, 2.0, 5.0, 7.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """


class GroupNorm2d(GroupNormBase, dim=2):
    """Group normalization of (N, C, H, W) input.

    Example:
        >>> GroupNorm2d(64)
        GroupNorm2d(64, num_groups=32, eps=1e-05)
    """


class GroupNorm3d(GroupNormBase, dim=3):
    """Group normalization of (N, C, D, H, W) input.

    Example:
        >>> GroupNorm3d(64)(torch.randn(1, 64, 2, 3, 3)).shape
        torch.Size([1, 64, 2, 3, 3])
    """


class InstanceNorm1d(_InstanceNorm, dim=1):
    """Instance normalization of (N, C, L) input. An (N, C) input has one value per instance and raises an error.

    Example:
        >>> InstanceNorm1d(1, eps=1e-12)(torch.tensor([[[0.0, 2.0]]])).tolist()
        [[[-1.0, 1.0]]]
    """


class InstanceNorm2d(_InstanceNorm, dim=2):
    """Instance normalization of (N, C, H, W) input.

    Example:
        >>> InstanceNorm2d(3)(torch.randn(1, 3, 4, 4)).shape
        torch.Size([1, 3, 4, 4])
    """


class InstanceNorm3d(_InstanceNorm, dim=3):
    """Instance normalization of (N, C, D, H, W) input.

    Example:
        >>> InstanceNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """


class LayerNorm1d(_LayerNorm, dim=1):
    """Layer normalization of (N, C) or (N, C, L) input over all dimensions but the first.

    Example:
        >>> LayerNorm1d(2, eps=1e-12)(torch.tensor([[0.0, 2.0]])).tolist()
        [[-1.0, 1.0]]
    """


class LayerNorm2d(_LayerNorm, dim=2):
    """Layer normalization of (N, C, H, W) input over all dimensions but the first.

    Example:
        >>> LayerNorm2d(3)(torch.randn(1, 3, 4, 4)).shape
        torch.Size([1, 3, 4, 4])
    """


class LayerNorm3d(_LayerNorm, dim=3):
    """Layer normalization of (N, C, D, H, W) input over all dimensions but the first.

    Example:
        >>> LayerNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """
