"""Batch normalization, batch normalization with moments of class-balanced batches, and batch renormalization.

**Batch normalization** is bit-exact with torch's, with input checks and a cumulative average on the device.

**BN Tricks** (BNT; Zhou et al., 2022), in our reading of a summary of the method, which has no public code: the two
uses of a batch are kept apart. Parameters are trained on batches of the stream and of the memory, normalized with batch
moments, and these batches do not update the running moments. The running moments are updated from class-balanced
batches alone. Evaluation is that of batch norm. The class-balanced batch is an extra batch from the replay memory at
every step (`contnorm.ReplayRequest`), in a pass without gradients. Until the memory has samples, there is no such
batch, and the training batches update the running moments.

**Batch renormalization** (BRN; Ioffe, 2017) is computed as defined in the continual normalization paper. Its formula
divides by ``sigma + eps``, not ``sqrt(sigma^2 + eps)``, and no gradient flows through r and d. The running average is
that of the biased *standard deviations*; its square is stored in ``running_var``. The defaults of the layers differ
from those of batch norm and follow the implementation that uses the paper's formula: ``eps=1e-3`` added to the standard
deviation, and ``momentum=0.01``. The limits increase with the batch counter: the limit of r from 1 to 3 between batches
5,000 and 40,000, the limit of d from 0 to 5 between batches 5,000 and 25,000. A short online run never reaches batch
5,000 and therefore trains with r = 1 and d = 0. ``total_steps`` scales the ramps to the length of the run (5-40 % and
5-25 % of it).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import check_number, statistics_dtype, updates_moments
from contnorm.kernels.pivot import channel_pivot, per_channel
from contnorm.kernels.reference import batch_step, in_statistics_dtype
from contnorm.norms.base import (
    MomentNorm,
    apply_affine,
    channel_moments,
    check_arguments,
    empty_like_input,
    keep_values,
    update_moments,
)
from contnorm.tags import ReplayRequest, current_tags


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalization: bit-exact with ``F.batch_norm``, with argument checks.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> batch_norm(x, training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not by_batch:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    if isinstance(momentum, Tensor) and running_mean is not None and running_var is not None:
        signal = x
        if weight is not None and weight.dtype != statistics_dtype(x):  # all parameters are in half precision
            signal, weight, bias = in_statistics_dtype(x, weight, bias)
        y, moments = batch_step(signal, weight, bias, eps, moments=True)
        assert moments is not None
        update_moments(running_mean, running_var, moments.mean, moments.var, momentum)
        return y.to(x.dtype)
    factor = 0.0 if isinstance(momentum, Tensor) else momentum  # it is a tensor here only without running moments
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)


class BatchNormBase(MomentNorm):
    """Batch normalization with an exponential moving average or, for ``momentum=None``, a cumulative average.

    Its 1d, 2d and 3d forms derive from torch's ``BatchNorm1d``, ``BatchNorm2d`` and ``BatchNorm3d``: what tools do with
    a batch norm, such as folding it into a convolution, is right for these layers.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize_with(batch_norm, input)


class BatchNorm1d(BatchNormBase, nn.BatchNorm1d, dim=1):  # type: ignore[misc]
    """Batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = BatchNorm1d(2, momentum=None)
        >>> for value in (1.0, 3.0):
        ...     _ = layer(torch.tensor([[0.0, 0.0], [value, value]]))
        >>> layer.running_mean  # the plain average of 0.5 and 1.5
        tensor([1., 1.])
    """


class BatchNorm2d(BatchNormBase, nn.BatchNorm2d, dim=2):  # type: ignore[misc]
    """Batch normalization of (N, C, H, W) input.

    Example:
        >>> BatchNorm2d(8)(torch.randn(4, 8, 5, 5)).shape
        torch.Size([4, 8, 5, 5])
    """


class BatchNorm3d(BatchNormBase, nn.BatchNorm3d, dim=3):  # type: ignore[misc]
    """Batch normalization of (N, C, D, H, W) input.

    Example:
        >>> BatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """


# --- class-balanced running moments ----------------------------------------------------------------------------------


class BalancedBatchNormBase(MomentNorm):
    """Batch normalization whose running moments are those of class-balanced batches.

    In training, every batch is normalized with its own moments. With tags (`contnorm.batch_tags`), the running moments
    are updated by the extra batch of a step (``is_extra``) and, in steps without one (``extra_size`` is 0), by the
    training batches. Without tags, as in a training loop that knows of no extra batch, every training batch updates
    them: the layer is then batch norm. Arguments, buffers and state-dict keys are those of batch norm.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: Weight of a batch in the running moments; None for a cumulative average over the batches that update
            them.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, it is batch norm of the batch in both modes.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        balanced_size: Samples in the class-balanced batch; None for as many as are replayed at a step.
    """

    needs_tags: ClassVar[bool] = True
    replay_request: ReplayRequest

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
        balanced_size: int | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if balanced_size is not None:
            check_number(balanced_size, 1, "balanced_size")
        self.replay_request = ReplayRequest(size=balanced_size, balance="class")

    @property
    def balanced_size(self) -> int | None:
        """Samples in the class-balanced batch; None for as many as are replayed at a step."""
        return self.replay_request.size

    def forward(self, input: Tensor) -> Tensor:
        updates = self._updates_moments()
        if updates and (tags := current_tags(input.shape[0])) is not None:
            updates = tags.is_extra or tags.extra_size == 0
        return self._normalize_with(batch_norm, input, updates)


class BalancedBatchNorm1d(BalancedBatchNormBase, dim=1):
    """Batch normalization with class-balanced running moments, of (N, C) or (N, C, L) input.

    Example:
        >>> BalancedBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """


class BalancedBatchNorm2d(BalancedBatchNormBase, dim=2):
    """Batch normalization with class-balanced running moments, of (N, C, H, W) input.

    Example:
        >>> from contnorm import BatchTags, batch_tags
        >>> layer, x = BalancedBatchNorm2d(8), torch.randn(4, 8, 5, 5)
        >>> tags = BatchTags(torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), extra_size=20)
        >>> with batch_tags(tags):
        ...     _ = layer(x)
        >>> layer.num_batches_tracked  # the step has a class-balanced batch, so this one does not count
        tensor(0)
    """


class BalancedBatchNorm3d(BalancedBatchNormBase, dim=3):
    """Batch normalization with class-balanced running moments, of (N, C, D, H, W) input.

    Example:
        >>> BalancedBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """


# --- batch renormalization -------------------------------------------------------------------------------------------


def batch_renorm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.01,
    eps: float = 1e-3,
    r_max: float | Tensor = 1.0,
    d_max: float | Tensor = 0.0,
) -> Tensor:
    r"""Batch renormalization.

    .. math::
        y = \gamma \left( r \, \frac{x - \mu_B}{\sigma_B + \epsilon} + d \right) + \beta, \quad
        r = \mathrm{clip}_{[1/r_{max}, r_{max}]} \frac{\sigma_B}{\sigma_r}, \quad
        d = \mathrm{clip}_{[-d_{max}, d_{max}]} \frac{\mu_B - \mu_r}{\sigma_r}

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), the square of the averaged standard deviation, updated in place if ``training``.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the standard deviation.
        r_max: The limit of r; 1 disables the correction of the standard deviation.
        d_max: The limit of d; 0 disables the correction of the mean.

    Example:
        >>> x, mean, var = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0]), torch.tensor([4.0])
        >>> batch_renorm(x, mean, var, training=True, eps=1e-12, r_max=3.0, d_max=5.0)  # = (x - 0) / 2
        tensor([[0.],
                [1.]])
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    for name, limit, least in (("r_max", r_max, 1), ("d_max", d_max, 0)):
        if not isinstance(limit, Tensor):
            check_number(limit, least, name)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    dtype, rank = statistics_dtype(x), x.dim()
    if not by_batch:
        assert running_mean is not None and running_var is not None
        rstd = 1 / (running_var.to(dtype).sqrt() + eps)
        centred = x.to(dtype) - per_channel(running_mean.to(dtype), rank)
        return apply_affine(centred * per_channel(rstd, rank), weight, bias).to(x.dtype)

    pivot = channel_pivot(x)
    shifted = x.to(dtype) - per_channel(pivot, rank)
    mean, var = channel_moments(shifted)
    # A channel of dead inputs has a variance of zero, whose square root would have an infinite gradient.
    varies = var != 0  # True for NaN, so that NaNs stay visible
    std = torch.where(varies, var, 1.0).sqrt() * varies
    normalized = (shifted - per_channel(mean, rank)) * per_channel(1 / (std + eps), rank)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_std = running_var.to(dtype).sqrt()
            old_std = running_std.clamp_min(torch.finfo(dtype).tiny)  # zero gives the limits
            r_limit, d_limit = (torch.as_tensor(limit, dtype=dtype, device=x.device) for limit in (r_max, d_max))
            ratio = (std / old_std).clamp(1 / r_limit, r_limit)
            offset = ((mean - (running_mean.to(dtype) - pivot)) / old_std).clamp(-d_limit, d_limit)
            r, d = keep_values(ratio, offset)
        normalized = normalized * per_channel(r, rank) + per_channel(d, rank)
        if updates_moments(running_mean, momentum):
            with torch.no_grad():
                update_moments(running_mean, running_std, mean + pivot, std, momentum)
                running_var.copy_(running_std.square())
    return apply_affine(normalized, weight, bias).to(x.dtype)


PUBLISHED_STEPS = 100_000  # the run length for which the published ramps are 5-40 % and 5-25 %


class BatchRenormBase(MomentNorm):
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
    """

    mixes_moments: ClassVar[bool] = True
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
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        # They must be finite, because the ramps multiply them by zero at the start.
        check_number(r_max, 1, "r_max")
        check_number(d_max, 0, "d_max")
        if total_steps is not None:
            check_number(total_steps, 1, "total_steps")
        self.r_max, self.d_max, self.total_steps = r_max, d_max, total_steps
        # The current limits. They follow from the batch counter, so they need not be in the checkpoint.
        self.register_buffer("r_limit", torch.ones((), device=device), persistent=False)
        self.register_buffer("d_limit", torch.zeros((), device=device), persistent=False)

    def _ramps(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the first and last batch of the ramps of r and d."""
        scale = 1.0 if self.total_steps is None else self.total_steps / PUBLISHED_STEPS
        return (5_000 * scale, 40_000 * scale), (5_000 * scale, 25_000 * scale)

    def _limits(self) -> tuple[Tensor, Tensor]:
        """Return the limits of r and d for the current batch."""
        if self.num_batches_tracked is None:
            return self.r_limit, self.d_limit
        counter = self.num_batches_tracked
        r_ramp, d_ramp = (((counter - start) / (end - start)).clamp(0, 1) for start, end in self._ramps())
        r_limit, d_limit = 1 + (self.r_max - 1) * r_ramp, self.d_max * d_ramp
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
        closed = math.floor(self._ramps()[0][0]) + 1
        return max(0, seen - closed) / seen

    def forward(self, input: Tensor) -> Tensor:
        tracked = not self.training or self.track_running_stats  # frozen moments also limit r and d
        r_max, d_max = self._limits() if self._normalizes_with_batch() else (1.0, 0.0)
        return self._normalize_with(
            batch_renorm,
            input,
            running_mean=self.running_mean if tracked else None,
            running_var=self.running_var if tracked else None,
            r_max=r_max,
            d_max=d_max,
        )

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class BatchRenorm1d(BatchRenormBase, dim=1):
    """Batch renormalization of (N, C) or (N, C, L) input.

    Example:
        >>> BatchRenorm1d(8, total_steps=4250)
        BatchRenorm1d(8, total_steps=4250, eps=0.001, momentum=0.01)
    """


class BatchRenorm2d(BatchRenormBase, dim=2):
    """Batch renormalization of (N, C, H, W) input.

    Example:
        >>> layer = BatchRenorm2d(8, total_steps=20)
        >>> for _ in range(6):
        ...     _ = layer(torch.randn(4, 8, 5, 5))
        >>> layer.r_limit  # with 20 steps, the ramp goes from batch 1 to 8; 5 batches were counted before the last
        tensor(2.1429)
    """


class BatchRenorm3d(BatchRenormBase, dim=3):
    """Batch renormalization of (N, C, D, H, W) input.

    Example:
        >>> BatchRenorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """
