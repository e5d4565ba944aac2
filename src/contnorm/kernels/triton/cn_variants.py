"""The paper's variants of continual norm on a GPU: a Triton kernel for the group step, torch's batch norm.

They are defined in `reference`, whose two operators with a pivot launch dozens of small kernels. Here each step is one
call, and one small kernel before the batch norm subtracts the pivot that makes it accurate at large means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.kernels import Order
from contnorm.kernels.reference import BatchMoments, batch_step, scaled_about_pivot, weight_or_ones
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton.availability import is_plain
from contnorm.kernels.triton.group_norm import ShiftedInput, batch_then_group_norm, group_step, subtract_channel_pivot

__all__ = ["auto_selects", "evaluate", "train", "unsupported_reason"]


def unsupported_reason(x: Tensor, num_groups: int) -> str | None:
    """Return why the kernel cannot run on this input; None if it can."""
    if not (is_plain(x) and fused.is_untraced()):  # checked first, because sizes may be symbolic under an exporter
        return (
            "for order='bn_gn' and tied=True it runs only in eager mode, not where torch compiles, exports, traces or "
            "transforms the layer"
        )
    return fused.unsupported_reason(x, num_groups)


def auto_selects(x: Tensor, num_groups: int) -> bool:
    """Whether ``auto`` selects the kernel: on CUDA, wherever it can run."""
    return x.is_cuda and unsupported_reason(x, num_groups) is None


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    order: Order,
    tied: bool,
    running: tuple[Tensor, Tensor] | None,
    momentum: float | Tensor,
) -> tuple[Tensor, BatchMoments | None]:
    """Normalize with the moments of the batch; return the output, and the moments of the batch or None.

    The moments are None without running moments, or if these have already been updated: torch's batch norm updates them
    itself if they are float32 and the momentum is a number.
    """
    fused.check_parameters(x, weight, bias, *(running or ()))
    wide_weight, wide_bias = _wide(weight), _wide(bias)
    first_weight, first_bias = (wide_weight, wide_bias) if tied else (None, None)
    batch_moments: BatchMoments | None
    if order == "gn_bn":
        # Batch norm cancels the bias of the first step, so its gradient there is zero and is not computed.
        added = None if first_bias is None else first_bias.detach()
        grouped = group_step(x, first_weight, added, eps, num_groups, torch.float32)
        y, batch_moments = _batch_step(grouped, wide_weight, wide_bias, eps, running, momentum, None)
        return y.to(x.dtype), batch_moments
    in_place = _updates_in_place(running, momentum)
    shifted = subtract_channel_pivot(x, running[0] if in_place and running is not None else None)
    normalized, batch_moments = _batch_step(shifted.signal, first_weight, first_bias, eps, running, momentum, shifted)
    return group_step(normalized, wide_weight, wide_bias, eps, num_groups, x.dtype), batch_moments


def _batch_step(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    momentum: float | Tensor,
    shifted: ShiftedInput | None,
) -> tuple[Tensor, BatchMoments | None]:
    """Batch norm of a signal from which a pivot may have been subtracted; the running mean is that without a pivot."""
    if running is None or not _updates_in_place(running, momentum):
        y, batch_moments = batch_step(x, weight, bias, eps, moments=running is not None)
        if batch_moments is not None and shifted is not None:
            batch_moments = BatchMoments(batch_moments.mean + shifted.pivot, batch_moments.var)
        return y, batch_moments
    mean, var = running
    weight = weight_or_ones(weight, bias)
    y = F.batch_norm(x, mean if shifted is None else shifted.about, var, weight, bias, True, float(momentum), eps)
    if shifted is not None:
        with torch.no_grad():
            torch.add(shifted.about, shifted.pivot, out=mean)
    return y, None


def _updates_in_place(running: tuple[Tensor, Tensor] | None, momentum: float | Tensor) -> bool:
    """Whether torch's batch norm can update the running moments: they are float32, and the momentum is a number."""
    return (
        running is not None
        and not isinstance(momentum, Tensor)
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in running)
    )


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    order: Order,
    tied: bool,
) -> Tensor:
    """Normalize with the given moments."""
    fused.check_parameters(x, mean, var, weight, bias)
    wide_weight, wide_bias = _wide(weight), _wide(bias)
    first_weight, first_bias = (wide_weight, wide_bias) if tied else (None, None)
    if order == "gn_bn":
        grouped = group_step(x, first_weight, first_bias, eps, num_groups, torch.float32)
        scale = weight_or_ones(wide_weight, wide_bias)
        return F.batch_norm(grouped, mean.float(), var.float(), scale, wide_bias, False, 0.0, eps).to(x.dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, mean, var, weight, bias)):
        normalized = scaled_about_pivot(x, mean, var, first_weight, first_bias, eps, num_groups)
        return group_step(normalized, wide_weight, wide_bias, eps, num_groups, x.dtype)
    return batch_then_group_norm(x, mean, var, weight, bias, eps, num_groups, tied)


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float()
