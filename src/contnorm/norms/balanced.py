"""Batch normalization with running moments of class-balanced batches: BN Tricks (BNT; Zhou et al., 2022).

This is our reading of a summary of the method, which has no public code: the two uses of a batch are kept apart.
Parameters are trained on batches of the stream and of the memory, normalized with batch moments, and these batches do
not update the running moments. The running moments are updated from class-balanced batches alone. Evaluation is that of
batch norm.

The class-balanced batch is an extra batch from the replay memory at every step (`contnorm.ReplayRequest`), in a pass
without gradients. Until the memory has samples, there is no such batch, and the training batches update the running
moments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.checks import check_number
from contnorm.norms.base import MomentNorm
from contnorm.norms.batch import batch_norm
from contnorm.tags import ReplayRequest, current_tags


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

    own_options: ClassVar[tuple[str, ...]] = ("balanced_size",)
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

    def _extra_fields(self) -> list[str]:
        return [] if self.balanced_size is None else [f"balanced_size={self.balanced_size}"]


class BalancedBatchNorm1d(BalancedBatchNormBase):
    """Batch normalization with class-balanced running moments, of (N, C) or (N, C, L) input.

    Example:
        >>> BalancedBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class BalancedBatchNorm2d(BalancedBatchNormBase):
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

    ranks: ClassVar[tuple[int, ...]] = (4,)


class BalancedBatchNorm3d(BalancedBatchNormBase):
    """Batch normalization with class-balanced running moments, of (N, C, D, H, W) input.

    Example:
        >>> BalancedBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
