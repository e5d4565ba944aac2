"""Continual normalization (Pham et al., ICLR 2022): group norm without affine, then batch norm; and its three variants.

Differences from the authors' code: the layer can be constructed, ``affine`` and ``momentum=None`` are supported, the
batch counter is updated, and any number of groups that divides the number of channels is accepted. Unlike torch's group
norm followed by torch's batch norm, it is also accurate for inputs with a large mean, where these lose precision by
cancellation. See `kernels/pivot.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import check_batch, check_group_size, check_residual, resolve_groups, updates_moments, widest
from contnorm.kernels import Kernel, Order, analytic, check_order, reference, resolve_kernel
from contnorm.kernels import cpp as compiled
from contnorm.kernels.reference import BatchMoments, add_residual_and_relu
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton import eager
from contnorm.norms.base import (
    MomentNorm,
    check_arguments,
    empty_like_input,
    unbiased,
    update_moments,
    uses_batch_moments,
)
from contnorm.norms.group import check_groups

Pair = tuple[Tensor | None, Tensor | None]  # running mean and variance, or weight and bias


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
    closed_form = order == "gn_bn" and not tied  # of CN alone: the variants are computed as two steps
    if requested in ("auto", "triton") and closed_form and not torch.compiler.is_compiling():
        # An input of a known signature has passed all checks below before.
        y = eager.normalize(
            x, running_mean, running_var, weight, bias, training, momentum, eps, num_groups, relu, residual, num_batches
        )
        if y is not None:
            return y
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps)
    check_order(order)
    residual = check_residual(residual, x)
    groups = resolve_groups(num_groups, x.shape[1], x.dim())
    if x.numel() == 0:
        return add_residual_and_relu(empty_like_input(x, weight, bias), residual, relu)
    check_group_size(x, groups)
    by_batch = uses_batch_moments(training, running_mean)
    if by_batch:
        check_batch(x, eps)
    chosen = _select_kernel(requested, x, groups, closed_form, by_batch)
    moments, affine = (running_mean, running_var), (weight, bias)
    if chosen in ("triton", "cpp"):
        module = compiled if chosen == "cpp" else fused
        return _run_fused(module, x, moments, affine, by_batch, momentum, eps, groups, relu, residual, num_batches)
    y = _run_operators(chosen, x, moments, affine, by_batch, momentum, eps, groups, {"order": order, "tied": tied})
    if by_batch and num_batches is not None:
        num_batches.add_(1)
    return add_residual_and_relu(y, residual, relu)


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
    if fused.auto_selects(x, groups):
        return "triton"
    return "cpp" if compiled.auto_selects(x) else "pivoted" if by_batch else "analytic"


def _run_fused(
    module: ModuleType,
    x: Tensor,
    moments: Pair,
    affine: Pair,
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    groups: int,
    relu: bool,
    residual: Tensor | None,
    num_batches: Tensor | None,
) -> Tensor:
    """Compute everything with Triton's or the C++ kernel, which in training may also update moments and counter."""
    mean, var = moments
    if not by_batch:
        evaluated: Tensor = module.evaluate(x, mean, var, *affine, eps, groups, residual, relu)
        return evaluated
    count = x.numel() // x.shape[1]
    moves = updates_moments(mean, momentum)
    running = module.moment_update(mean, var, num_batches, momentum, count) if moves else None
    y: Tensor
    y, batch_moments = module.train(x, *affine, eps, groups, residual, relu, running)
    if batch_moments is not None:
        update_moments(mean, var, batch_moments.mean, unbiased(batch_moments.var, count), momentum)
        if num_batches is not None:
            num_batches.add_(1)
    return y


def _run_operators(
    chosen: Kernel,
    x: Tensor,
    moments: Pair,
    affine: Pair,
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    groups: int,
    variant: dict[str, Any],
) -> Tensor:
    """Normalize with torch's operators, and update the running moments."""
    mean, var = moments
    batch: BatchMoments | None = None
    if not by_batch:
        assert mean is not None and var is not None
        if chosen == "analytic":
            return analytic.evaluate(x, mean, var, *affine, eps, groups)
        return reference.evaluate(x, mean, var, *affine, eps, groups, pivot=chosen != "reference", **variant)
    if chosen == "analytic":
        y, batch = analytic.train(x, *affine, eps, groups)
    else:
        pivot = chosen != "reference"
        y, batch = reference.train(x, *affine, eps, groups, pivot=pivot, moments=mean is not None, **variant)
    if batch is not None:
        update_moments(mean, var, batch.mean, batch.var, momentum)
    return y


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

    def _tracked_signal(self, x: Tensor) -> Tensor:
        if self.order == "bn_gn":
            return x
        groups = resolve_groups(self.num_groups, self.num_features, x.dim())
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


class ContinualNorm1d(ContinualNormBase):
    """Continual normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = ContinualNorm1d(100, num_groups=4)
        >>> layer(torch.randn(10, 100)).shape
        torch.Size([10, 100])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class ContinualNorm2d(ContinualNormBase):
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


class ContinualNorm3d(ContinualNormBase):
    """Continual normalization of (N, C, D, H, W) input.

    Example:
        >>> ContinualNorm3d(48, num_groups="auto").num_groups
        24
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
