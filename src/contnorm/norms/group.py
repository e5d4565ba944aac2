"""Group, instance and layer normalization, and group normalization after convolutions with standardized weights.

The layers have the number of channels as first argument, as in batch norm. Differences from torch's classes:
``GroupNorm*(num_features, num_groups=...)`` instead of ``GroupNorm(groups, channels)``; instance norm has affine
parameters by default and no running statistics; layer norm normalizes over channels and positions, with one weight and
bias per channel. The functions use torch's operator, except for channels_last input on CUDA, for which a Triton kernel
is used: torch's operator copies such an input to the contiguous layout, and its output back.

**Weight standardization** (Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization, 2019) uses each filter of a convolution with zero mean and unit variance over its input channels and
positions: ``(w - mean(w)) / sqrt(var(w) + eps)``, with the biased variance. The parameter itself is not standardized,
so optimizers and state dicts do not change. The convolutions whose output is normalized are standardized, linear layers
are not. eps is in the square root, 1e-6, as in timm's ``StdConv2d``. The authors' code divides by the unbiased standard
deviation plus 1e-5 instead. For a filter of 27 or more weights the two differ by less than 2 percent in scale, which
the group norm removes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import check_eps, check_group_size, check_groups, check_input, check_residual, resolve_groups
from contnorm.kernels import resolve_kernel
from contnorm.kernels.convolution import Convolution
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
    copied = x.is_cuda and not x.is_contiguous() and channels_last(x)  # torch's operator copies
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


# --- weight standardization ------------------------------------------------------------------------------------------


def standardized_weight(weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Standardize each filter of a convolution's weight to zero mean and unit variance.

    Example:
        >>> standardized_weight(torch.tensor([[[0.0, 2.0]], [[5.0, 9.0]]]), eps=1e-12)
        tensor([[[-1.,  1.]],
        <BLANKLINE>
                [[-1.,  1.]]])
    """
    if weight.is_contiguous():
        return F.layer_norm(weight, weight.shape[1:], eps=eps)
    last = weight.movedim(1, -1)  # no copy of a channels_last weight, and a result in the same layout
    return F.layer_norm(last, last.shape[1:], eps=eps).movedim(-1, 1)


class _Standardized:
    """The forward pass of the classes below."""

    weight_eps: float

    def forward(self: Any, input: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(input, standardized_weight(self.weight, self.weight_eps), self.bias)
        return y


class _StandardizedConv1d(_Standardized, nn.Conv1d):
    pass


class _StandardizedConv2d(_Standardized, nn.Conv2d):
    pass


class _StandardizedConv3d(_Standardized, nn.Conv3d):
    pass


class _StandardizedConvolution(_Standardized, Convolution):
    pass  # made for the networks of the bench


# By the class of a convolution: the class with standardized weights.
_STANDARDIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: _StandardizedConv1d,
    nn.Conv2d: _StandardizedConv2d,
    nn.Conv3d: _StandardizedConv3d,
    Convolution: _StandardizedConvolution,
}
_PLAIN = {standardized: plain for plain, standardized in _STANDARDIZED.items()}


def is_standardized(module: nn.Module) -> bool:
    """Whether a module is a convolution with standardized weights.

    Example:
        >>> is_standardized(nn.Conv2d(3, 8, 3)), is_standardized(standardize(nn.Conv2d(3, 8, 3)))
        (False, True)
    """
    return type(module) in _PLAIN


def standardize(convolution: nn.Module, eps: float = 1e-6) -> nn.Module:
    """Standardize the weights of a convolution, in place: it remains the same object, with the same parameters.

    Raises:
        ValueError: If it is not a convolution of torch, or its filters have one weight.

    Example:
        >>> conv = standardize(nn.Conv2d(3, 8, 3))
        >>> conv.weight.requires_grad, is_standardized(conv), is_standardized(unstandardize(conv))
        (True, True, False)
    """
    check_standardizable(convolution)
    convolution.__class__ = _STANDARDIZED.get(type(convolution), type(convolution))
    vars(convolution)["weight_eps"] = check_eps(eps)
    return convolution


def standardize_convolutions(model: nn.Module, eps: float = 1e-6) -> nn.Module:
    """Standardize the weights of all convolutions of a network, in place.

    Raises:
        ValueError: If one of them can't be standardized; then none is.

    Example:
        >>> model = standardize_convolutions(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)))
        >>> [is_standardized(convolution) for convolution in model]
        [True, True]
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    for convolution in convolutions:
        check_standardizable(convolution)
    for convolution in convolutions:
        standardize(convolution, eps)
    return model


def check_standardizable(convolution: nn.Module) -> None:
    """Raise a ``ValueError`` if the weights of a module can't be standardized."""
    kind = type(convolution)
    if kind not in _STANDARDIZED and kind not in _PLAIN:
        raise ValueError(f"a {kind.__name__} can't be standardized, only Conv1d, Conv2d and Conv3d of torch.")
    weight = convolution._parameters.get("weight")
    if weight is None or weight[0].numel() < 2:
        raise ValueError(f"the filters of a {kind.__name__} have one weight, which always standardizes to zero.")


def unstandardize(convolution: nn.Module) -> nn.Module:
    """Use the weights of a convolution as they are, in place; any other module is returned as it is.

    Example:
        >>> unstandardize(standardize(nn.Conv2d(3, 8, 3)))
        Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    """
    if is_standardized(convolution):
        convolution.__class__ = _PLAIN[type(convolution)]
        del convolution.weight_eps
    return convolution


class WSGroupNorm(GroupNormBase):
    """Group normalization after convolutions with standardized weights. The layer itself is a group norm."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_groups: int | str = 32,
        weight_eps: float = 1e-6,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype, num_groups=num_groups)
        self.weight_eps = check_eps(weight_eps)


class WSGroupNorm1d(WSGroupNorm, dim=1):
    """Group normalization of (N, C) or (N, C, L) input after convolutions with standardized weights.

    Example:
        >>> WSGroupNorm1d(4, num_groups=2, eps=1e-12)(torch.tensor([[0.0, 2.0, 5.0, 7.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """


class WSGroupNorm2d(WSGroupNorm, dim=2):
    """Group normalization of (N, C, H, W) input after convolutions with standardized weights.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance of a group.
        affine: Whether there are ``weight`` and ``bias``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        num_groups: A divisor of the number of channels, or ``"auto"``.
        weight_eps: Value added to the variance of a filter's weights.

    Example:
        >>> WSGroupNorm2d(64)
        WSGroupNorm2d(64, num_groups=32, eps=1e-05)
    """


class WSGroupNorm3d(WSGroupNorm, dim=3):
    """Group normalization of (N, C, D, H, W) input after convolutions with standardized weights.

    Example:
        >>> WSGroupNorm3d(64)(torch.randn(1, 64, 2, 3, 3)).shape
        torch.Size([1, 64, 2, 3, 3])
    """
