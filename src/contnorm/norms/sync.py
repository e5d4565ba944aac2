"""Synchronized continual normalization: batch moments over all processes.

The group step normalizes each sample alone and needs no communication. For the batch step, each process sends its
count, mean and sum of squared deviations per channel, in float64. They are merged weighted by count, so batches may
have different sizes, and a process with an empty batch takes part without changing the result.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from contnorm.checks import check_batch, check_group_size, check_input, check_residual, resolve_groups, statistics_dtype
from contnorm.kernels.pivot import channel_pivot, per_channel, subtract_slab_pivot
from contnorm.kernels.reference import add_residual_and_relu, group_norm_in_layout
from contnorm.norms.base import apply_affine, channel_moments, update_moments
from contnorm.norms.continual import ContinualNormBase


class SyncContinualNorm(ContinualNormBase):
    """Continual normalization over the batches of all processes, for input of any rank.

    In training, outputs, gradients and running moments equal those of a single process that sees the whole batch. In
    evaluation, and without a process group, it computes the same as the unsynchronized layer. Use
    ``contnorm.convert_sync`` to convert a model.

    Its arguments are those of `ContinualNorm2d`. ``process_group`` are the processes whose batches are normalized
    together; None for all processes.

    Example:
        >>> SyncContinualNorm(64)(torch.randn(4, 64, 8, 8)).shape  # one process: no synchronization
        torch.Size([4, 64, 8, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)
    process_group: Any = None

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        single_process = (
            not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.process_group) == 1
        )
        if single_process or not self._normalizes_with_batch():
            return super().forward(input, residual, relu)
        x = input
        self._check(x)
        check_input(x)
        residual = check_residual(residual, x)
        groups = resolve_groups(self.num_groups, self.num_features, x.dim())
        check_group_size(x, groups)
        dtype = statistics_dtype(x)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        first = (weight, bias) if self.tied else (None, None)
        if self.order == "gn_bn":
            y = self._synced_batch_step(self._group_step(x.to(dtype), groups, *first), weight, bias)
        else:
            y = self._group_step(self._synced_batch_step(x.to(dtype), *first), groups, weight, bias)
        return add_residual_and_relu(y.to(x.dtype), residual, relu)

    def _group_step(self, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if x.numel() == 0:  # the operator does not accept an empty batch
            return apply_affine(x, weight, bias)
        return group_norm_in_layout(subtract_slab_pivot(x, groups), groups, weight, bias, self.eps)

    def _synced_batch_step(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        pivot = channel_pivot(x) if x.numel() else x.new_zeros(x.shape[1])
        shifted = x - per_channel(pivot, x.dim())
        total, mean, var = _merge_rows(_Gather.apply(_local_row(shifted, pivot), self.process_group))  # type: ignore[no-untyped-call]
        centred = shifted - per_channel((mean - pivot.double()).to(x.dtype), x.dim())
        y = centred * per_channel(torch.rsqrt(var + self.eps).to(x.dtype), x.dim())
        self._move_moments(x, total, mean, var)
        return apply_affine(y, weight, bias)

    def _move_moments(self, x: Tensor, total: Tensor, mean: Tensor, var: Tensor) -> None:
        # An empty batch, or a single value, may be part of a larger batch over all processes, and every process must
        # update its moments and counter in the same way. So the check uses the total count.
        if x.numel() <= x.shape[1]:
            values = int(total.item())
            if values == 0:
                return
            if values == 1:
                check_batch(x.new_empty(1, x.shape[1]), self.eps)
        if self._updates_moments():
            share = self._weight_of_moving_batch()
            update_moments(self.running_mean, self.running_var, mean, var * total / (total - 1).clamp_min(1), share)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)


def _local_row(shifted: Tensor, pivot: Tensor) -> Tensor:
    """Return count, means and sums of squared deviations of this process's batch: (1 + 2C,), float64."""
    channels = shifted.shape[1]
    if shifted.numel() == 0:
        # Connected to the input for autograd, because backward is a collective in which every process must take part.
        return pivot.new_zeros(1 + 2 * channels, dtype=torch.float64) + shifted.sum().double()
    mean, var = channel_moments(shifted)
    count = pivot.new_full((1,), shifted.numel() // channels, dtype=torch.float64)
    return torch.cat([count, mean.double() + pivot.double(), var.double() * count])


def _merge_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the rows of all processes into total count, mean and biased variance."""
    count, mean, squares = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
    total = count.sum()
    total_mean = (count * mean).sum(0) / total.clamp_min(1)
    var = (squares + count * (mean - total_mean).square()).sum(0) / total.clamp_min(1)
    return total.detach(), total_mean, var


class _Gather(torch.autograd.Function):
    """Gather the rows of all processes; in backward, sum the gradients of each row over all processes."""

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
