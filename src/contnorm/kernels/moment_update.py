"""An update of running moments by the kernel that normalizes the batch, which saves a pass or a launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["NO_UPDATE", "MomentUpdate", "moment_update"]


class MomentUpdate(NamedTuple):
    """Running moments, and how a batch changes them.

    Attributes:
        mean, var: (C,) buffers, contiguous.
        counter: Batch counter, incremented by one.
        weight: The weight of the batch, if it is a tensor on the device.
        momentum: The weight of the batch, if it is a number.
        factor: The factor from the biased to the unbiased variance.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    counter: Tensor | None = None
    weight: Tensor | None = None
    momentum: float = 0.0
    factor: float = 1.0


NO_UPDATE = MomentUpdate()


def moment_update(
    mean: Tensor | None, var: Tensor | None, counter: Tensor | None, momentum: float | Tensor, count: int
) -> MomentUpdate | None:
    """Describe the update of running moments by a batch of ``count`` values per channel; None if no kernel can do it.

    The moments must be contiguous. A counter, and a momentum that is a tensor, must be 0-dim and on their device.

    Example:
        >>> import torch
        >>> moment_update(torch.zeros(3), torch.ones(3), None, 0.1, count=5).factor
        1.25
    """
    if mean is None or var is None or not (mean.is_contiguous() and var.is_contiguous()):
        return None
    if counter is not None and (counter.device != mean.device or counter.dim() != 0):
        return None
    if isinstance(momentum, Tensor):
        on_device = momentum.device == mean.device and momentum.dim() == 0
        return MomentUpdate(mean, var, counter, momentum, 0.0, count / (count - 1)) if on_device else None
    return MomentUpdate(mean, var, counter, None, float(momentum), count / (count - 1))
