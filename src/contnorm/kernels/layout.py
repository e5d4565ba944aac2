"""Torch's group norm with an output in the memory layout of its input, which on CUDA the operator does not keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["backward_would_crash", "beside_bias", "group_norm_in_layout"]


def group_norm_in_layout(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.group_norm`` whose output is channels_last where the input is.

    Example:
        >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
        >>> group_norm_in_layout(x, 2, None, None, 1e-5).is_contiguous(memory_format=torch.channels_last)
        True
    """
    signal = x.contiguous() if backward_would_crash(x, weight, bias) else x
    y = F.group_norm(signal, num_groups, beside_bias(weight, bias), bias, eps)
    if x.dim() > 3 and x.stride(1) == 1 and not x.is_contiguous():
        return y.movedim(1, -1).contiguous().movedim(-1, 1)  # no copy if it already has that layout
    return y


def backward_would_crash(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the backward pass of torch's group norm would crash the process, if the input is channels_last.

    On a CPU it writes a gradient of x even if x requires none. A contiguous input avoids the crash.
    """
    if x.device.type != "cpu" or x.requires_grad or not torch.is_grad_enabled():
        return False
    return any(p is not None and p.requires_grad for p in parameters)


def beside_bias(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return the weight, or ones if there is only a bias, with which the backward passes of torch's norms fail."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight
