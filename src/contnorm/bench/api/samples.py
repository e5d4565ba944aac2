"""Samples of data sets of other libraries as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["sample_array"]


def sample_array(x: Any) -> np.ndarray:
    """Return a sample as an array; the channels of an image (as of Pillow) come first.

    Example:
        >>> sample_array([1, 2]).tolist()
        [1, 2]
    """
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    array = np.asarray(x)
    return array.transpose(2, 0, 1) if hasattr(x, "getbands") and array.ndim == 3 else array
