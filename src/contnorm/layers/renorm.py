"""Batch renormalization layers, with the current limits in buffers.

The defaults differ from those of batch norm and follow the implementation that uses the paper's formula: ``eps=1e-3``
added to the standard deviation, and ``momentum=0.01``. The limits increase with the batch counter: the limit of r from
1 to 3 between batches 5,000 and 40,000, the limit of d from 0 to 5 between batches 5,000 and 25,000. A short online run
never reaches batch 5,000 and therefore trains with r = 1 and d = 0. ``total_steps`` scales the ramps to the length of
the run (5-40 % and 5-25 % of it).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.checks import check_number
from contnorm.functional import batch_renorm
from contnorm.kernels import Kernel, resolve_kernel
from contnorm.kernels.triton.batch_renorm import renorm_limits
from contnorm.layers.base import MomentNorm, ReplacementGuard

__all__ = ["BatchRenorm1d", "BatchRenorm2d", "BatchRenorm3d"]

PUBLISHED_R_RAMP = (5_000, 40_000)
PUBLISHED_D_RAMP = (5_000, 25_000)
PUBLISHED_STEPS = 100_000  # the run length for which the published ramps are 5-40 % and 5-25 %


class BatchRenormBase(ReplacementGuard, MomentNorm):
    """Batch renormalization.

    Args:
        num_features: Number of channels.
        eps: Value added to the standard deviation.
        momentum: Weight of a batch in the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them there is no renormalization.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        r_max: Final value of the limit of r, which starts at 1.
        d_max: Final value of the limit of d, which starts at 0.
        total_steps: Number of batches of the run, to which the published ramps are scaled; None for no scaling.
        kernel: The implementation, resolved at construction; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.
    """

    has_triton_kernels: ClassVar[bool] = True
    r_limit: Tensor
    d_limit: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-3,
        momentum: float | None = 0.01,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        total_steps: int | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        name = type(self).__name__
        # They must be finite, because the ramps multiply them by zero at the start.
        check_number(r_max, 1, "r_max", name, finite=True)
        check_number(d_max, 0, "d_max", name, finite=True)
        if total_steps is not None and not total_steps >= 1:
            raise ValueError(f"{name}: total_steps={total_steps!r} must be 1 or more, or None for the published ramps.")
        self.r_max, self.d_max, self.total_steps = r_max, d_max, total_steps
        self.kernel = resolve_kernel(kernel, name)
        # The current limits. They follow from the batch counter, so they need not be in the checkpoint.
        self.register_buffer("r_limit", torch.ones((), device=device), persistent=False)
        self.register_buffer("d_limit", torch.zeros((), device=device), persistent=False)

    def _ramp(self, published: tuple[int, int]) -> Tensor:
        """Return the progress of a ramp at the current batch counter, from 0 to 1."""
        assert self.num_batches_tracked is not None
        start, end = self._scaled_ramp(published)
        return ((self.num_batches_tracked - start) / (end - start)).clamp(0, 1)

    def _scaled_ramp(self, published: tuple[int, int]) -> tuple[float, float]:
        return published[0] * self._ramp_scale(), published[1] * self._ramp_scale()

    def _ramp_scale(self) -> float:
        return 1.0 if self.total_steps is None else self.total_steps / PUBLISHED_STEPS

    def _limits(self) -> tuple[Tensor, Tensor]:
        """Return the limits of r and d for the current batch."""
        if self.num_batches_tracked is None:
            return self.r_limit, self.d_limit
        limits = renorm_limits(
            self.num_batches_tracked,
            (self.r_limit, self.d_limit),
            self._updates_moments(),
            (self.r_max, self.d_max),
            (self._scaled_ramp(PUBLISHED_R_RAMP), self._scaled_ramp(PUBLISHED_D_RAMP)),
            self.kernel,
            type(self).__name__,
        )
        if limits is not None:
            return limits
        r_limit = 1 + (self.r_max - 1) * self._ramp(PUBLISHED_R_RAMP)
        d_limit = self.d_max * self._ramp(PUBLISHED_D_RAMP)
        if self._updates_moments():
            self.r_limit.copy_(r_limit)
            self.d_limit.copy_(d_limit)
        return r_limit, d_limit

    def corrected_share(self) -> float:
        """Return the fraction of the counted batches in which r could differ from 1: those after the start of its ramp.

        Example:
            >>> layer = BatchRenorm1d(2, total_steps=20)  # the ramp begins at batch 1 of 20
            >>> for _ in range(8):
            ...     _ = layer(torch.randn(4, 2))
            >>> layer.corrected_share(), BatchRenorm1d(2).corrected_share()
            (0.75, 0.0)
        """
        seen = 0 if self.num_batches_tracked is None else int(self.num_batches_tracked)
        if not seen or self.r_max == 1:
            return 0.0
        # The limits of a batch depend on the batches counted before it: 0, 1, ...
        closed = math.floor(PUBLISHED_R_RAMP[0] * self._ramp_scale()) + 1
        return max(0, seen - closed) / seen

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize the input; with ``residual`` and ``relu``, compute ``relu(norm(input) + residual)``."""
        self._check(input)
        tracked = not self.training or self.track_running_stats
        by_batch = self._normalizes_with_batch()
        output = batch_renorm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            by_batch,
            self._weight_of_batch(),
            self.eps,
            *(self._limits() if by_batch else (self.r_limit, self.d_limit)),
            residual=residual,
            relu=relu,
            kernel=self.kernel,
            caller=type(self).__name__,
        )
        self._count(input)
        return output

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var

    def _extra_fields(self) -> list[str]:
        ramps = [] if self.total_steps is None else [f"total_steps={self.total_steps}"]
        return [f"r_max={self.r_max}", f"d_max={self.d_max}", *ramps]


class BatchRenorm1d(BatchRenormBase, nn.BatchNorm1d):
    """Batch renormalization of (N, C) or (N, C, L) input.

    Example:
        >>> BatchRenorm1d(8, total_steps=4250)
        BatchRenorm1d(8, r_max=3.0, d_max=5.0, total_steps=4250, eps=0.001, momentum=0.01)
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class BatchRenorm2d(BatchRenormBase, nn.BatchNorm2d):
    """Batch renormalization of (N, C, H, W) input.

    Example:
        >>> layer = BatchRenorm2d(8, total_steps=20)
        >>> for _ in range(6):
        ...     _ = layer(torch.randn(4, 8, 5, 5))
        >>> layer.r_limit  # with 20 steps, the ramp goes from batch 1 to 8; 5 batches were counted before the last
        tensor(2.1429)
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class BatchRenorm3d(BatchRenormBase, nn.BatchNorm3d):
    """Batch renormalization of (N, C, D, H, W) input.

    Example:
        >>> BatchRenorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
