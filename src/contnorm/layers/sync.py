"""Continual normalization whose batch moments are those of all processes together.

The group step is each sample's own and needs no one else. Of the batch step, each process sends its count, mean and
sum of squares per channel, in float64; the pieces are merged by their counts, so uneven batches weigh what they hold
and a process with an empty batch takes part without changing anything.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from contnorm.checks import check_batch, check_group_size, check_residual, resolve_groups, statistics_dtype
from contnorm.functional.batch import apply_affine, channel_moments, update_moments
from contnorm.kernels import Kernel, Order
from contnorm.kernels.activation import activated
from contnorm.kernels.layout import group_norm_in_layout
from contnorm.kernels.pivot import channel_pivot, less_slab_pivot, per_channel
from contnorm.layers.continual import ContinualNormBase

__all__ = ["SyncContinualNorm"]


class SyncContinualNorm(ContinualNormBase):
    """Continual normalization over the batches of all processes, for input of any rank.

    In training, outputs, gradients and running moments are those of one process that sees the whole batch; in
    evaluation, and without a process group, it is the plain layer. ``contnorm.convert_sync`` puts it in place.

    Args:
        num_features: Channels.
        eps: Added to both variances.
        momentum: The weight of a batch in the running moments; None for the plain average of all batches.
        affine: Whether to have weight and bias.
        track_running_stats: Whether to keep running moments.
        device: Where to put parameters and buffers.
        dtype: Their type.
        num_groups: Groups of channels, a divisor of ``num_features``, or ``"auto"``.
        order: ``"gn_bn"`` is CN; ``"bn_gn"`` does the steps the other way round.
        tied: Use the one pair of weight and bias in both steps.
        kernel: Which arithmetic the plain layer uses, where it is one.
        process_group: Whose batches count as one; None for all processes.

    Example:
        >>> SyncContinualNorm(64)(torch.randn(4, 64, 8, 8)).shape  # one process: the plain layer
        torch.Size([4, 64, 8, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)

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
        process_group: Any = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            num_groups=num_groups,
            order=order,
            tied=tied,
            kernel=kernel,
        )
        self.process_group = process_group

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.process_group) == 1
        if alone or not self._normalizes_with_batch():
            return super().forward(input, residual, relu)
        x, name = input, type(self).__name__
        self._check(x)
        residual = check_residual(residual, x, name)
        groups = resolve_groups(self.num_groups, self.num_features, x.dim(), name)
        check_group_size(x, groups, name)
        dtype = statistics_dtype(x)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        first = (weight, bias) if self.tied else (None, None)
        if self.order == "gn_bn":
            y = self._synced_batch_step(self._group_step(x.to(dtype), groups, *first), weight, bias)
        else:
            y = self._group_step(self._synced_batch_step(x.to(dtype), *first), groups, weight, bias)
        return activated(y.to(x.dtype), residual, relu)

    def _group_step(self, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if x.numel() == 0:  # the operator does not take an empty batch, and there is nothing to normalize
            return apply_affine(x, weight, bias)
        return group_norm_in_layout(less_slab_pivot(x, groups), groups, weight, bias, self.eps)

    def _synced_batch_step(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        pivot = channel_pivot(x) if x.numel() else x.new_zeros(x.shape[1])
        shifted = x - per_channel(pivot, x.dim())
        total, mean, var = _merged(_gather(_own_row(shifted, pivot), self.process_group))
        centred = shifted - per_channel((mean - pivot.double()).to(x.dtype), x.dim())
        y = centred * per_channel(torch.rsqrt(var + self.eps).to(x.dtype), x.dim())
        self._move_moments(x, total, mean, var)
        return apply_affine(y, weight, bias)

    def _move_moments(self, x: Tensor, total: Tensor, mean: Tensor, var: Tensor) -> None:
        # Nothing, or a single value, here may be part of a full batch elsewhere: all processes must count it alike.
        if x.numel() <= x.shape[1]:
            values = int(total.item())
            if values == 0:
                return
            if values == 1:
                check_batch(x.new_empty(1, x.shape[1]), self.eps, type(self).__name__)
        update_moments(*self._moments(), mean, var * total / (total - 1).clamp_min(1), self._weight_of_batch())
        self._count_one()


def _own_row(shifted: Tensor, pivot: Tensor) -> Tensor:
    """(1 + 2C,), float64: how many values each channel has here, their mean, and their sum of squares about it."""
    channels = shifted.shape[1]
    if shifted.numel() == 0:
        # Joined to the input all the same: backward is a collective too, and every process has to take part in it.
        return pivot.new_zeros(1 + 2 * channels, dtype=torch.float64) + shifted.sum().double()
    mean, var = channel_moments(shifted)
    count = pivot.new_full((1,), shifted.numel() // channels, dtype=torch.float64)
    return torch.cat([count, mean.double() + pivot.double(), var.double() * count])


def _merged(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total count, mean and biased variance, from one row a process."""
    count, mean, squares = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
    total = count.sum()
    whole = (count * mean).sum(0) / total.clamp_min(1)
    var = (squares + count * (mean - whole).square()).sum(0) / total.clamp_min(1)
    return total.detach(), whole, var


class _Gather(torch.autograd.Function):
    """All processes' rows, stacked; backward, each row gets the sum of what all processes want of it."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row.contiguous(), group=group)
        return torch.stack(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def _gather(row: Tensor, group: Any) -> Tensor:
    gathered: Tensor = _Gather.apply(row, group)  # type: ignore[no-untyped-call]
    return gathered
