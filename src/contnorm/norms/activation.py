"""Norms that contain an activation, and the activations of a network that they replace.

EvoNorm-S0 and filter response normalization are a norm and an activation in one formula. Such a layer takes the place
of a norm and of the activation that directly follows it. Where none follows, as before a residual sum, the layer is
built with ``apply_act=False``: it normalizes, has no parameter of the activation, and the network's own activation
after the sum remains.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.norms.base import NormLayer
from contnorm.norms.group import SampleNorm


class ActivationNorm(SampleNorm):
    """Base of norms that contain an activation.

    Attributes:
        apply_act: Whether the layer applies its activation. If not, ``act_parameter`` does not exist.
    """

    has_triton_kernels: ClassVar[bool] = False
    own_options: ClassVar[tuple[str, ...]] = ("apply_act",)
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
        value = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if apply_act else None
        self.register_parameter(self.act_parameter, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (parameter := self._parameters.get(self.act_parameter)) is not None:
            nn.init.constant_(parameter, self.act_initial)

    def remove_activation(self) -> None:
        """Make this a layer with ``apply_act=False``."""
        self.apply_act = False
        self.register_parameter(self.act_parameter, None)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.apply_act else ", apply_act=False")


# --- networks that call their norms with `normed_relu` --------------------------------------------------------------


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; a norm that contains an activation replaces the ReLU if there is no residual.

    Continual, group, instance and layer norm compute it in a fused kernel if one is available, unless they have forward
    hooks, which get the output of the norm.

    Example:
        >>> normed_relu(nn.Identity(), torch.tensor([-1.0, 1.0]), torch.tensor([3.0, -5.0]))
        tensor([2., 0.])
    """
    # Not if somebody has replaced its forward pass or looks at its output.
    is_plain = isinstance(norm, NormLayer) and "forward" not in vars(norm) and not norm._forward_hooks
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
        FilterResponseNorm2d(8, eps=1e-05, apply_act=False)
    """
    if isinstance(norm, ActivationNorm):
        norm.remove_activation()
    return norm
