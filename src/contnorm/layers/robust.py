"""Robust batch normalization layers (RBN), from the test-time adaptation method RoTTA.

RoTTA replaces the batch norms of a trained network by these layers. Passes in training mode, over its memory bank,
normalize with a mixture of stored and batch moments and store it; predictions are made in evaluation mode with the
stored moments. Both are what the layers here do, so nothing is stored in evaluation, and results do not depend on the
order or the composition of test batches. The difference is the use: here a network is trained with them from the
beginning, on the batches of the stream and of the replay memory.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from contnorm.functional import robust_batch_norm
from contnorm.layers.base import BATCH_NORM_IN_EVALUATION, MomentNorm, ReplacementGuard

__all__ = ["RobustBatchNorm1d", "RobustBatchNorm2d", "RobustBatchNorm3d"]


class RobustBatchNormBase(ReplacementGuard, MomentNorm):
    """Robust batch normalization.

    In training, an input is normalized with ``(1 - momentum) * running + momentum * batch`` moments, which then become
    the running moments. Evaluation is that of batch norm. Arguments, buffers and state-dict keys are those of batch
    norm; the stored variance is biased. Frozen moments are mixed with those of the batch, but not replaced.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: Weight of a batch in the moments that normalize it and in the running moments (RoTTA's alpha); None
            for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them, it is batch norm of the batch in both modes.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
    """

    fold_advice: ClassVar[str] = BATCH_NORM_IN_EVALUATION

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.05,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        mixes = self._normalizes_with_batch() and self.running_mean is not None
        output = robust_batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self._normalizes_with_batch(),
            self._weight_of_moving_batch() if mixes else 0.0,
            self.eps,
            update=self._updates_moments(),
            caller=type(self).__name__,
        )
        self._count(input)
        return output

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var


class RobustBatchNorm1d(RobustBatchNormBase, nn.BatchNorm1d):
    """Robust batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> RobustBatchNorm1d(8)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class RobustBatchNorm2d(RobustBatchNormBase, nn.BatchNorm2d):
    """Robust batch normalization of (N, C, H, W) input.

    Example:
        >>> layer = RobustBatchNorm2d(8)
        >>> x = torch.randn(4, 8, 5, 5)
        >>> torch.allclose(layer(x), layer.eval()(x), atol=1e-6)  # the stored moments normalized the batch
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class RobustBatchNorm3d(RobustBatchNormBase, nn.BatchNorm3d):
    """Robust batch normalization of (N, C, D, H, W) input.

    Example:
        >>> RobustBatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
