"""Norms that contain an activation, EvoNorm-S0 and filter response normalization; and layers that take a norm's place.

They are a norm and an activation in one formula, of each sample alone. Such a layer takes the place of a norm and of
the activation that directly follows it. Where none follows, as before a residual sum, the layer is built with
``apply_act=False``: it normalizes, has no parameter of the activation, and the network's own activation after the sum
remains.

**EvoNorm-S0** (Liu et al., Evolving Normalization-Activation Layers, NeurIPS 2020) is
``y = x * sigmoid(v * x) / std(x) * weight + bias``, where ``std`` is the standard deviation of a group of channels of a
sample; ``v``, ``weight`` and ``bias`` are learned, one value per channel. With ``apply_act=False`` it is
``x / std(x) * weight + bias``. The authors' ResNet code and timm's ``EvoNorm2dS0`` have an affine map without a
denominator there, and the authors use it in pre-activation networks only. In a post-activation network the residual
branch would then not be normalized at all. timm's ``EvoNorm2dS0a``, for such networks, keeps the denominator, as this
layer does.

**Filter response normalization** (Singh and Krishnan, Filter Response Normalization Layer, CVPR 2020), with the
thresholded linear unit as its activation, is ``y = max(x / sqrt(mean(x^2) + eps) * weight + bias, tau)``, where the
mean of squares is that of one channel of one sample; ``weight``, ``bias`` and ``tau`` are learned, one value per
channel. With ``apply_act=False`` it has no threshold, as in timm's ``FilterResponseNormTlu2d``. After a residual sum
the network's ReLU remains; the paper defines the layer for pre-activation networks, which have none there. For one
position per channel the paper learns eps, since only the sign of the input would remain. That is not implemented: such
input raises an error.

**Layers without moments** take the place of a norm: dynamic tanh, and the identity of the norm ``none``.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import (
    check_eps,
    check_group_size,
    check_groups,
    check_input,
    check_number,
    resolve_groups,
    statistics_dtype,
)
from contnorm.kernels.pivot import per_channel
from contnorm.norms.base import NormLayer, apply_affine, empty_like_input, has_one_position


class ActivationNorm(NormLayer):
    """Base of norms that contain an activation.

    Attributes:
        apply_act: Whether the layer applies its activation. If not, ``act_parameter`` does not exist.
    """

    act_parameter: ClassVar[str]  # name of the activation's parameter, with one value per channel
    act_initial: ClassVar[float]  # its initial value
    apply_act: bool

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        apply_act: bool = True,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        self.apply_act = apply_act
        value = torch.full((num_features,), self.act_initial, device=device, dtype=dtype) if apply_act else None
        self.register_parameter(self.act_parameter, None if value is None else nn.Parameter(value))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (parameter := self._parameters.get(self.act_parameter)) is not None:
            nn.init.constant_(parameter, self.act_initial)

    def remove_activation(self) -> None:
        """Make this a layer with ``apply_act=False``."""
        self.apply_act = False
        self.register_parameter(self.act_parameter, None)


# --- EvoNorm-S0 ------------------------------------------------------------------------------------------------------


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


class EvoNorm1d(_EvoNormS0, dim=1):
    """EvoNorm-S0 of (N, C) or (N, C, L) input.

    Example:
        >>> EvoNorm1d(2, num_groups=1, eps=1e-12)(torch.tensor([[-1.0, 1.0]]))
        tensor([[-0.2689,  0.7311]], grad_fn=<AddcmulBackward0>)
    """


class EvoNorm2d(_EvoNormS0, dim=2):
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


class EvoNorm3d(_EvoNormS0, dim=3):
    """EvoNorm-S0 of (N, C, D, H, W) input.

    Example:
        >>> EvoNorm3d(64)(torch.randn(1, 64, 2, 3, 3)).shape
        torch.Size([1, 64, 2, 3, 3])
    """


# --- filter response normalization -----------------------------------------------------------------------------------


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
    if x.numel() and has_one_position(x):
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


class FilterResponseNorm1d(_FilterResponseNorm, dim=1):
    """Filter response normalization of (N, C, L) input. An (N, C) input has one value per channel and raises an error.

    Example:
        >>> FilterResponseNorm1d(1, eps=1e-12)(torch.tensor([[[-1.0, 7.0]]])).tolist()
        [[[0.0, 1.399999976158142]]]
    """


class FilterResponseNorm2d(_FilterResponseNorm, dim=2):
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


class FilterResponseNorm3d(_FilterResponseNorm, dim=3):
    """Filter response normalization of (N, C, D, H, W) input.

    Example:
        >>> FilterResponseNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """


# --- networks that call their norms with `normed_relu` ---------------------------------------------------------------


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; a norm that contains an activation replaces the ReLU if there is no residual.

    Continual, group, instance and layer norm compute it in a fused kernel if one is available, unless they have forward
    hooks, which get the output of the norm.

    Example:
        >>> normed_relu(nn.Identity(), torch.tensor([-1.0, 1.0]), torch.tensor([3.0, -5.0]))
        tensor([2., 0.])
    """
    # Not if somebody has replaced its forward pass or looks at its output.
    is_plain = isinstance(norm, NormLayer) and "forward" not in norm.__dict__ and not norm._forward_hooks
    if is_plain and cast(NormLayer, norm).fuses_relu:
        fused: Tensor = norm(x, residual=residual, relu=True)  # by keyword: a pre-hook may replace what is positional
        return fused
    y: Tensor = norm(x)
    if residual is None:
        return y if isinstance(norm, ActivationNorm) and norm.apply_act else F.relu(y)
    return F.relu(y + residual)


def linear_norm(norm: nn.Module) -> nn.Module:
    """Return a new norm for a position without an activation; one that contains an activation loses it.

    Example:
        >>> from contnorm import create_norm
        >>> linear_norm(create_norm("frn", 8))
        FilterResponseNorm2d(8, apply_act=False, eps=1e-05)
    """
    if isinstance(norm, ActivationNorm):
        norm.remove_activation()
    return norm


# --- layers that do not normalize -----------------------------------------------------------------------------------


class _NoNorm(NormLayer):
    """Returns its input unchanged. It checks the input as the norms do, and can be converted back to any norm."""

    def __init__(
        self, num_features: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.num_features = num_features

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        check_input(input)
        return input


class NoNorm1d(_NoNorm, dim=1):
    """No normalization of (N, C) or (N, C, L) input.

    Example:
        >>> NoNorm1d(2)(torch.tensor([[1.0, 5.0]]))
        tensor([[1., 5.]])
    """


class NoNorm2d(_NoNorm, dim=2):
    """No normalization of (N, C, H, W) input.

    Example:
        >>> NoNorm2d(3)(torch.ones(2, 3, 4, 4)).sum().item()
        96.0
    """


class NoNorm3d(_NoNorm, dim=3):
    """No normalization of (N, C, D, H, W) input.

    Example:
        >>> NoNorm3d(3)(torch.ones(2, 3, 2, 2, 2)).sum().item()
        48.0
    """


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Dynamic tanh: ``tanh(alpha * x) * weight + bias``, without any moments.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        alpha: One value, or (C,).
        weight: (C,) or None.
        bias: (C,) or None.

    Example:
        >>> dynamic_tanh(torch.tensor([[0.0, 2.0, -100.0]]), torch.tensor([0.5]))
        tensor([[ 0.0000,  0.7616, -1.0000]])
    """
    check_input(x, *((alpha,) if alpha.numel() > 1 else ()), weight, bias)
    wide = x.to(statistics_dtype(x))
    slope = per_channel(alpha.to(wide.dtype).expand(x.shape[1]), x.dim())
    return apply_affine(torch.tanh(slope * wide), weight, bias).to(x.dtype)


class DynamicTanhBase(NormLayer):
    """Dynamic tanh (DyT; Zhu et al., Transformers without Normalization, CVPR 2025), for networks built with it.

    ``tanh(alpha * x) * weight + bias`` takes the place of a norm, with one learned ``alpha`` for the layer. It has no
    moments: an output depends on its own input alone, and training and evaluation are the same. Keys and shapes of the
    state dict are those of the authors' layer. In this package channels are dimension 1.

    Args:
        num_features: Number of channels.
        affine: Whether the layer has weight and bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        alpha_init: Initial value of ``alpha``.
    """

    own_tensors: ClassVar[tuple[str, ...]] = ("alpha",)

    def __init__(
        self,
        num_features: int,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        alpha_init: float = 0.5,
    ) -> None:
        super().__init__(num_features, affine=affine, device=device, dtype=dtype)
        self.alpha_init = check_number(alpha_init, 0, "alpha_init")
        self.alpha = nn.Parameter(torch.full((1,), self.alpha_init, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_init)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        return dynamic_tanh(input, self.alpha, self.weight, self.bias)


class DynamicTanh1d(DynamicTanhBase, dim=1):
    """Dynamic tanh of (N, C) or (N, C, L) input.

    Example:
        >>> DynamicTanh1d(2)(torch.tensor([[0.0, 2.0]])).tolist()
        [[0.0, 0.7615941762924194]]
    """


class DynamicTanh2d(DynamicTanhBase, dim=2):
    """Dynamic tanh of (N, C, H, W) input.

    Example:
        >>> DynamicTanh2d(8, alpha_init=1)
        DynamicTanh2d(8, alpha_init=1.0)
    """


class DynamicTanh3d(DynamicTanhBase, dim=3):
    """Dynamic tanh of (N, C, D, H, W) input.

    Example:
        >>> DynamicTanh3d(3)(torch.ones(2, 3, 2, 2, 2)).shape
        torch.Size([2, 3, 2, 2, 2])
    """
