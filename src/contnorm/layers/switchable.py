"""Switchable normalization layers.

As in the authors' code, there are two separate weight vectors whose logits start at 1, ``momentum=0.1`` is the weight
of a new batch, and the running moments, including the variance, start at zero.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.functional import switch_norm
from contnorm.functional.switchable import batch_moments
from contnorm.kernels import Kernel, resolve_kernel
from contnorm.layers.base import MomentNorm, ReplacementGuard

__all__ = ["SwitchNorm1d", "SwitchNorm2d", "SwitchNorm3d"]


class _SwitchNorm(ReplacementGuard, MomentNorm):
    """Switchable normalization.

    ``mean_weight`` and ``var_weight`` hold the logits of instance, layer and batch moments, in that order. Their
    softmax weights the moments, also with ``affine=False``. ``kernel`` selects the implementation and is resolved at
    construction; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.
    """

    has_triton_kernels: ClassVar[bool] = True
    own_tensors: ClassVar[tuple[str, ...]] = ("mean_weight", "var_weight")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.kernel = resolve_kernel(kernel, type(self).__name__)
        self.mean_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.var_weight = nn.Parameter(torch.ones(3, device=device, dtype=dtype))

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if self.running_var is not None:
            self.running_var.zero_()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in ("mean_weight", "var_weight"):
            if name in self._parameters:  # the constructor of the base class resets before they exist
                nn.init.ones_(getattr(self, name))

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        self._check(input)
        output = switch_norm(
            input,
            *self._moments(),
            self.weight,
            self.bias,
            self.mean_weight,
            self.var_weight,
            self._normalizes_with_batch(),
            self._weight_of_batch(),
            self.eps,
            residual=residual,
            relu=relu,
            kernel=self.kernel,
            caller=type(self).__name__,
        )
        self._count(input)
        return output

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return batch_moments(x)

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class SwitchNorm1d(_SwitchNorm, nn.BatchNorm1d):
    """Switchable normalization of (N, C) or (N, C, L) input; for (N, C) it mixes only layer and batch moments.

    Example:
        >>> SwitchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class SwitchNorm2d(_SwitchNorm, nn.BatchNorm2d):
    """Switchable normalization of (N, C, H, W) input.

    Example:
        >>> SwitchNorm2d(8).mean_weight.softmax(0).tolist()
        [0.333..., 0.333..., 0.333...]
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class SwitchNorm3d(_SwitchNorm, nn.BatchNorm3d):
    """Switchable normalization of (N, C, D, H, W) input.

    Example:
        >>> SwitchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
