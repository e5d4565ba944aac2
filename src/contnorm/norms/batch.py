"""Batch normalization, and batch normalization with running moments of class-balanced batches.

Batch normalization is bit-exact with torch's, with input checks and a cumulative average on the device.

The second is BN Tricks (BNT; Zhou et al., 2022), in our reading of a summary of the method, which has no public code:
the two uses of a batch are kept apart. Parameters are trained on batches of the stream and of the memory, normalized
with batch moments, and these batches do not update the running moments. The running moments are updated from
class-balanced batches alone. Evaluation is that of batch norm. The class-balanced batch is an extra batch from the
replay memory at every step (`contnorm.ReplayRequest`), in a pass without gradients. Until the memory has samples, there
is no such batch, and the training batches update the running moments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import check_number, statistics_dtype
from contnorm.kernels.reference import batch_step, in_statistics_dtype
from contnorm.norms.base import MomentNorm, check_arguments, empty_like_input, update_moments
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
        if updates and (tags := current_tags(len(input))) is not None:
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
