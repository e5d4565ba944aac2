"""Continual normalization (Pham et al., ICLR 2022): group norm without affine, then batch norm; and its three variants.

Differences from the authors' code: the layer can be constructed, ``affine`` and ``momentum=None`` are supported, the
batch counter is updated, and any number of groups that divides the number of channels is accepted. Unlike torch's group
norm followed by torch's batch norm, it is also accurate for inputs with a large mean, where these lose precision by
cancellation. See `kernels/pivot.py`.

`SyncContinualNorm` has batch moments over all processes. The group step normalizes each sample alone and needs no
communication. For the batch step, each process sends its count, mean and sum of squared deviations per channel, in
float64. They are merged weighted by count, so batches may have different sizes, and a process with an empty batch takes
part without changing the result.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import (
    check_batch,
    check_group_size,
    check_groups,
    check_input,
    check_residual,
    resolve_groups,
    statistics_dtype,
    updates_moments,
    widest,
)
from contnorm.kernels import Kernel, Order, analytic, check_order, reference, resolve_kernel
from contnorm.kernels import cpp as compiled
from contnorm.kernels.pivot import channel_pivot, per_channel, subtract_slab_pivot
from contnorm.kernels.reference import add_residual_and_relu, group_norm_in_layout
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton import eager
from contnorm.norms.base import (
    MomentNorm,
    apply_affine,
    channel_moments,
    check_arguments,
    empty_like_input,
    unbiased,
    update_moments,
)


def continual_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    num_groups: int | str = 32,
    *,
    order: Order = "gn_bn",
    tied: bool = False,
    relu: bool = False,
    residual: Tensor | None = None,
    num_batches: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    r"""Group normalization without affine, then batch normalization with it.

    .. math:: y = \gamma \, \mathrm{BN}_{1,0}(\mathrm{GN}_{1,0}(x; G)) + \beta

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), mean of the group-normalized signal (of the input for ``order="bn_gn"``), updated in place
            if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to both variances.
        num_groups: A divisor of C, or ``"auto"``.
        order: ``"gn_bn"`` is CN; ``"bn_gn"`` is the reverse order, with the affine parameters in the second step.
        tied: Whether to use the same weight and bias in both steps.
        relu: Whether to apply ReLU to the result, after the residual. The fused kernel does both in the same pass.
        residual: Tensor added to the result, with the input's shape. It is cast to the input's dtype.
        num_batches: A 0-dim counter, incremented by one if the batch was normalized with its own moments.
        kernel: The implementation; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.

    Example:
        >>> x = torch.tensor([[0.0, 2.0], [1.0, 9.0], [6.0, 5.0]])
        >>> continual_norm(x, None, None, training=True, eps=1e-12, num_groups=1)
        tensor([[-0.7071,  0.7071],
                [-0.7071,  0.7071],
                [ 1.4142, -1.4142]])
    """
    requested = resolve_kernel(kernel)
    closed_form = order == "gn_bn" and not tied  # CN alone has one: its variants are computed in two steps
    replay = eager.normalize
    if replay is not None and requested in ("auto", "triton") and closed_form and not torch.compiler.is_compiling():
        # An input of a known signature has passed all checks below before.
        replayed = replay(
            x, running_mean, running_var, weight, bias, training, momentum, eps, num_groups, relu, residual, num_batches
        )
        if replayed is not None:
            return replayed
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    check_order(order)
    residual = check_residual(residual, x)
    groups = resolve_groups(num_groups, x.shape[1], x.dim())
    if x.numel() == 0:
        return add_residual_and_relu(empty_like_input(x, weight, bias), residual, relu)
    check_group_size(x, groups)
    chosen = _select_kernel(requested, x, groups, closed_form, by_batch)
    module: Any = {"triton": fused, "cpp": compiled, "analytic": analytic}.get(chosen, reference)
    fuses = chosen in ("triton", "cpp")  # residual and ReLU, and the update of the running moments
    options: dict[str, Any] = {}
    if fuses:
        options = {"residual": residual, "relu": relu}
    elif module is reference:
        options = {"order": order, "tied": tied, "pivot": chosen == "pivoted"}
    y: Tensor
    if not by_batch:
        y = module.evaluate(x, running_mean, running_var, weight, bias, eps, groups, **options)
        return y if fuses else add_residual_and_relu(y, residual, relu)
    count = x.numel() // x.shape[1]
    if fuses and updates_moments(running_mean, momentum):
        options["running"] = module.moment_update(running_mean, running_var, num_batches, momentum, count)
    elif module is reference:
        options["moments"] = running_mean is not None
    y, moments = module.train(x, weight, bias, eps, groups, **options)
    if fuses and moments is None:
        return y  # the kernel has updated the running moments and the counter
    if moments is not None:
        var = unbiased(moments.var, count) if fuses else moments.var
        update_moments(running_mean, running_var, moments.mean, var, momentum)
    if num_batches is not None:
        num_batches.add_(1)
    return y if fuses else add_residual_and_relu(y, residual, relu)


def _select_kernel(chosen: Kernel, x: Tensor, groups: int, closed_form: bool, by_batch: bool) -> Kernel:
    """Select the implementation for this input: resolve ``auto``, and raise if ``triton`` or ``cpp`` cannot run."""
    if not closed_form:
        return "reference" if chosen == "reference" else "pivoted"
    if chosen in ("triton", "cpp"):
        reason = compiled.unsupported_reason(x) if chosen == "cpp" else fused.unsupported_reason(x, groups)
        if reason is not None:
            raise ValueError(f"kernel={chosen!r} can't be used here: {reason}. Use kernel='auto'.")
    if chosen != "auto":
        return chosen
    if x.is_cuda and fused.auto_selects(x, groups):
        return "triton"
    if compiled.auto_selects(x):
        return "cpp"
    return "pivoted" if by_batch and not torch.compiler.is_compiling() else "analytic"


class ContinualNormBase(MomentNorm):
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
    num_groups: int | str
    order: Order
    kernel: Kernel = "auto"  # not shown unless it is another one

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
        check_order(order)
        self.num_groups = check_groups(num_groups, num_features, self.ranks)
        self.order = order
        self.tied = tied
        self.kernel = resolve_kernel(kernel)

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)`` in one pass.

        The residual must have the input's shape; it is cast to the input's dtype, which the output has.

        Example:
            >>> layer = ContinualNorm2d(8, num_groups=2)
            >>> x, shortcut = torch.randn(2, 4, 8, 3, 3)
            >>> torch.equal(layer(x, shortcut, relu=True), torch.relu(layer(x) + shortcut))
            True
        """
        self._check(input)
        by_batch, updates = self._normalizes_with_batch(), self._updates_moments()
        needed = updates or not by_batch  # attribute lookup of buffers is slow, so look up only what is needed, once
        return continual_norm(
            input,
            self.running_mean if needed else None,
            self.running_var if needed else None,
            self.weight,
            self.bias,
            by_batch,
            self._weight_of_moving_batch() if updates else 0.0,
            self.eps,
            self.num_groups,
            order=self.order,
            tied=self.tied,
            relu=relu,
            residual=residual,
            num_batches=self.num_batches_tracked if updates else None,
            kernel=self.kernel,
        )

    @property
    def signal(self) -> str:
        if self.order == "bn_gn":
            return super().signal
        groups = resolve_groups(self.num_groups, self.num_features, max(self.ranks))
        size = self.num_features // groups
        return f"the input normalized in groups of {size} channels{', with weight and bias' * self.tied}"

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.order == "gn_bn":  # the moments are those of the group-normalized signal
            groups = resolve_groups(self.num_groups, self.num_features, x.dim())
            affine = (self.weight, self.bias) if self.tied else (None, None)
            weight, bias = (None if p is None else widest(p) for p in affine)
            x = F.group_norm(widest(x), groups, weight, bias, self.eps)
        return super().batch_moments(x)


class ContinualNorm1d(ContinualNormBase, dim=1):
    """Continual normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = ContinualNorm1d(100, num_groups=4)
        >>> layer(torch.randn(10, 100)).shape
        torch.Size([10, 100])
    """


class ContinualNorm2d(ContinualNormBase, dim=2):
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


class ContinualNorm3d(ContinualNormBase, dim=3):
    """Continual normalization of (N, C, D, H, W) input.

    Example:
        >>> ContinualNorm3d(48, num_groups="auto").num_groups
        24
    """


# --- synchronized continual normalization ----------------------------------------------------------------------------


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
        """Normalize with the moments of the batches of all processes, which also update the running moments."""
        channels = x.shape[1]
        pivot = channel_pivot(x) if x.numel() else x.new_zeros(channels)
        shifted = x - per_channel(pivot, x.dim())
        if x.numel():
            mean, var = channel_moments(shifted)
            count = mean.new_full((1,), x.numel() // channels, dtype=torch.float64)
            row = torch.cat([count, mean.double() + pivot.double(), var.double() * count])
        else:
            # Connected to the input for autograd: backward is a collective in which every process must take part.
            row = pivot.new_zeros(1 + 2 * channels, dtype=torch.float64) + shifted.sum().double()

        rows: Tensor = _Gather.apply(row, self.process_group)  # type: ignore[no-untyped-call]
        count, means, squares = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
        total = count.sum().detach()
        mean = (count * means).sum(0) / total.clamp_min(1)
        var = (squares + count * (means - mean).square()).sum(0) / total.clamp_min(1)
        centred = shifted - per_channel((mean - pivot.double()).to(x.dtype), x.dim())
        y = centred * per_channel(torch.rsqrt(var + self.eps).to(x.dtype), x.dim())

        # An empty batch, or a single value, may be part of a larger batch over all processes, and every process must
        # update its moments and counter in the same way. So the check uses the total count.
        values = int(total.item()) if x.numel() <= channels else x.numel() // channels
        if values == 1:
            check_batch(x.new_empty(1, channels), self.eps)
        if values and self._updates_moments():
            share = self._weight_of_moving_batch()
            update_moments(self.running_mean, self.running_var, mean, var * total / (total - 1).clamp_min(1), share)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return apply_affine(y, weight, bias)


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
