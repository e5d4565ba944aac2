"""Batch normalization layers: bit-exact with torch's, with input checks and a cumulative average on the device."""

from __future__ import annotations

from types import FrameType
from typing import ClassVar

from torch import Tensor, nn

from contnorm.functional import batch_norm
from contnorm.layers.base import MomentNorm, ReplacementGuard

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]


class _BatchNormBase(ReplacementGuard, MomentNorm):
    """Batch normalization with an exponential moving average or, for ``momentum=None``, a cumulative average.

    Tools that fold or replace batch norms may do so, except where a conversion gave the layer the activation ``act`` of
    a norm-then-activation layer, which they would drop.
    """

    sync_advice: ClassVar[str] = "Use contnorm.convert_sync(model), which keeps the activation."
    fold_advice: ClassVar[str] = "It also applies an activation, its submodule 'act', which would be lost."

    def _check_reader(self, frame: FrameType) -> None:
        if "act" in self._modules:
            super()._check_reader(frame)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        output = batch_norm(
            input,
            *self._moments(),
            self.weight,
            self.bias,
            self._normalizes_with_batch(),
            self._weight_of_batch(),
            self.eps,
            caller=type(self).__name__,
        )
        self._count(input)
        return output


class BatchNorm1d(_BatchNormBase, nn.BatchNorm1d):
    """Batch normalization of (N, C) or (N, C, L) input.

    Example:
        >>> layer = BatchNorm1d(2, momentum=None)
        >>> for value in (1.0, 3.0):
        ...     _ = layer(torch.tensor([[0.0, 0.0], [value, value]]))
        >>> layer.running_mean  # the plain average of 0.5 and 1.5
        tensor([1., 1.])
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNorm2d(_BatchNormBase, nn.BatchNorm2d):
    """Batch normalization of (N, C, H, W) input.

    Example:
        >>> BatchNorm2d(8)(torch.randn(4, 8, 5, 5)).shape
        torch.Size([4, 8, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class BatchNorm3d(_BatchNormBase, nn.BatchNorm3d):
    """Batch normalization of (N, C, D, H, W) input.

    Example:
        >>> BatchNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
