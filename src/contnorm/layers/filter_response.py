"""Filter response normalization layers, with the thresholded linear unit as their activation.

``y = max(x / sqrt(mean(x^2) + eps) * weight + bias, tau)``, where the mean of squares is that of one channel of one
sample; ``weight``, ``bias`` and ``tau`` are learned, one value per channel (Singh and Krishnan, Filter Response
Normalization Layer, CVPR 2020). The output does not depend on the other samples of the batch.

Where no activation follows the norm that it replaces (``apply_act=False``), the layer has no threshold, as in timm's
``FilterResponseNormTlu2d``. After a residual sum the network's ReLU remains; the paper defines the layer for
pre-activation networks, which have none there. For one position per channel the paper learns eps, since only the sign
of the input would remain. That is not implemented: such input raises an error.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from contnorm.functional import filter_response_norm
from contnorm.layers.activation import ActivationNorm

__all__ = ["FilterResponseNorm1d", "FilterResponseNorm2d", "FilterResponseNorm3d"]


class _FilterResponseNorm(ActivationNorm):
    """Filter response normalization."""

    own_tensors: ClassVar[tuple[str, ...]] = ("tau",)
    act_parameter: ClassVar[str] = "tau"
    act_initial: ClassVar[float] = 0.0
    tau: nn.Parameter | None

    def _normalize(self, x: Tensor) -> Tensor:
        return filter_response_norm(x, self.weight, self.bias, self.tau, self.eps, caller=type(self).__name__)


class FilterResponseNorm1d(_FilterResponseNorm):
    """Filter response normalization of (N, C, L) input. An (N, C) input has one value per channel and raises an error.

    Example:
        >>> FilterResponseNorm1d(1, eps=1e-12)(torch.tensor([[[-1.0, 7.0]]])).tolist()
        [[[0.0, 1.399999976158142]]]
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class FilterResponseNorm2d(_FilterResponseNorm):
    """Filter response normalization of (N, C, H, W) input.

    Args:
        num_features: Number of channels.
        eps: Value added to the mean of squares.
        affine: Whether there are ``weight`` and ``bias``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        apply_act: Whether the layer contains the thresholded linear unit. False where no activation follows.

    Example:
        >>> FilterResponseNorm2d(64)
        FilterResponseNorm2d(64, eps=1e-05)
        >>> FilterResponseNorm2d(64, apply_act=False).tau is None
        True
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class FilterResponseNorm3d(_FilterResponseNorm):
    """Filter response normalization of (N, C, D, H, W) input.

    Example:
        >>> FilterResponseNorm3d(3)(torch.randn(1, 3, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 4, 4])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
