"""Continual normalization layers (Pham et al., ICLR 2022), including the paper's three variants.

Differences from the authors' code: the layer can be constructed, ``affine`` and ``momentum=None`` are supported, the
batch counter is updated, and any number of groups that divides the number of channels is accepted.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import resolve_groups, widest
from contnorm.functional import continual_norm
from contnorm.kernels import Kernel, Order, check_order, resolve_kernel
from contnorm.layers.base import MomentNorm, ReplacementGuard
from contnorm.layers.group import check_groups

__all__ = ["ContinualNorm1d", "ContinualNorm2d", "ContinualNorm3d"]


class ContinualNormBase(ReplacementGuard, MomentNorm):
    """Continual normalization: group norm without affine, then batch norm.

    In training mode, each sample is first normalized over groups of channels, then each channel over the batch. The
    running moments are those of the group-normalized signal. In evaluation mode, the first step is the same and the
    second uses the running moments. Arguments, buffers and state-dict keys are those of batch norm, so checkpoints of
    batch norm can be loaded.

    Args:
        num_features: Number of channels.
        eps: Value added to both variances.
        momentum: Weight of a batch in the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, evaluation also uses the batch.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        num_groups: Number of groups of channels, a divisor of ``num_features``. ``"auto"`` selects the largest divisor
            up to 32 that leaves at least 2 channels in a group (8 for (N, C) input), or else one group.
        order: ``"gn_bn"`` is CN; ``"bn_gn"`` reverses the two steps, with the affine parameters in the second.
        tied: Whether to use the same weight and bias in both steps.
        kernel: The implementation, resolved at construction; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.
    """

    has_triton_kernels: ClassVar[bool] = True
    sync_advice: ClassVar[str] = "Use contnorm.convert_sync(model), which keeps the group step."
    num_groups: int | str
    order: Order

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
        num_groups: int | str = 32,
        order: Order = "gn_bn",
        tied: bool = False,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        name = type(self).__name__
        check_order(order, name)
        self.num_groups = check_groups(num_groups, num_features, self.ranks, name)
        self.order = order
        self.tied = tied
        self.kernel = resolve_kernel(kernel, name)

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)`` in one pass.

        The residual must have the input's shape, dtype and device; under autocast it is cast to the input's dtype. The
        output always has the input's shape and dtype.

        Example:
            >>> layer = ContinualNorm2d(8, num_groups=2)
            >>> x, shortcut = torch.randn(2, 4, 8, 3, 3)
            >>> torch.equal(layer(x, shortcut, relu=True), torch.relu(layer(x) + shortcut))
            True
        """
        self._check(input)
        by_batch, moves = self._normalizes_with_batch(), self._updates_moments()
        needed = moves or not by_batch  # attribute lookup of buffers is slow, so look up only what is needed, once
        return continual_norm(
            input,
            self.running_mean if needed else None,
            self.running_var if needed else None,
            self.weight,
            self.bias,
            by_batch,
            self._weight_of_moving_batch() if moves else 0.0,
            self.eps,
            self.num_groups,
            order=self.order,
            tied=self.tied,
            relu=relu,
            residual=residual,
            num_batches=self.num_batches_tracked if moves else None,
            kernel=self.kernel,
            caller=type(self).__name__,
        )

    def _tracked_signal(self, x: Tensor) -> Tensor:
        if self.order == "bn_gn":
            return x
        groups = resolve_groups(self.num_groups, self.num_features, x.dim(), type(self).__name__)
        affine = (self.weight, self.bias) if self.tied else (None, None)
        weight, bias = (None if p is None else p.double() for p in affine)
        return F.group_norm(widest(x), groups, weight, bias, self.eps)

    def _extra_fields(self) -> list[str]:
        fields = [f"num_groups={self.num_groups}"]
        if self.order != "gn_bn":
            fields.append(f"order={self.order!r}")
        if self.tied:
            fields.append("tied=True")
        return fields


class ContinualNorm1d(ContinualNormBase, nn.BatchNorm1d):
    """Continual normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = ContinualNorm1d(100, num_groups=4)
        >>> layer(torch.randn(10, 100)).shape
        torch.Size([10, 100])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class ContinualNorm2d(ContinualNormBase, nn.BatchNorm2d):
    """Continual normalization of (N, C, H, W) input.

    Example:
        >>> layer = ContinualNorm2d(64, num_groups=8)
        >>> layer(torch.randn(10, 64, 4, 4)).std().round(decimals=1).item()
        1.0
        >>> layer
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> sorted(layer.state_dict()) == sorted(torch.nn.BatchNorm2d(64).state_dict())
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class ContinualNorm3d(ContinualNormBase, nn.BatchNorm3d):
    """Continual normalization of (N, C, D, H, W) input.

    Example:
        >>> ContinualNorm3d(48, num_groups="auto").num_groups
        24
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
