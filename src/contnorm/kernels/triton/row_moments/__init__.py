"""Norms made of the moments of rows, fused into a few kernels each by Triton: batch renorm and switchable norm.

A row is one sample and channel, with all its positions. Both norms are ``y = a * (x - m) + b`` with a table of each
for rows or channels, and both are told by the rows' moments alone: one pass over the data makes these, a launch on
small tables the rest, and one pass the output; backward likewise. In torch's operators either is a chain of dozens of
kernels, most of them on tables, and on a GPU each costs a microsecond whatever its size.

This file is the door: it says where the kernels can run and calls them. Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from contnorm.checks import moves_moments
from contnorm.kernels import chosen_kernel
from contnorm.kernels.double_backward import Again
from contnorm.kernels.triton import availability as triton_here
from contnorm.kernels.triton.availability import TYPES
from contnorm.kernels.triton.continual.eager import is_plain
from contnorm.kernels.triton.row_moments import launch
from contnorm.kernels.triton.row_moments.functions import Renorm, Switch
from contnorm.kernels.triton.row_moments.launch import Limits, Running

__all__ = ["renorm", "renorm_limits", "suits", "switch"]


def suits(
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    moments: tuple[Tensor | None, ...],
    numbers: tuple[float | Tensor, ...],
    kernel: str | None,
    caller: str,
    logits: tuple[Tensor, ...] = (),
) -> bool:
    """Whether to take the kernels: on CUDA unasked, elsewhere (in Triton's interpreter) where ``triton`` is asked for.

    Where torch has to look inside, or something is not as the kernels take it, the norm's own torch code goes on.

    Args:
        x: The input.
        parameters: Those of each channel.
        moments: The running ones.
        numbers: Momentum and limits, where they may be on the device.
        kernel: The one asked for; None reads ``CONTNORM_KERNEL``.
        caller: Whom an error message about an unknown kernel names.
        logits: Of the three moments that are mixed.
    """
    if not is_plain(x) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    chosen = chosen_kernel(kernel, caller)
    return (
        chosen in ("auto", "triton")
        and (x.is_cuda or (chosen == "triton" and x.device.type == "cpu"))
        and forward_ad._current_level < 0
        and triton_here.usable(x.device)
        and x.dtype in TYPES
        and launch.fits(x)
        and all(_is_plain_vector(t, x, x.shape[1]) for t in (*parameters, *moments) if t is not None)
        and all(_is_plain_vector(t, x, 3) for t in logits)
        and not any(t.requires_grad for t in moments if t is not None)
        and all(t.dim() == 0 and t.device == x.device for t in numbers if isinstance(t, Tensor))
    )


def _is_plain_vector(t: Tensor, x: Tensor, size: int) -> bool:
    """Whether a kernel can read it as it lies, and not past its end."""
    alike = t.shape == (size,) and t.device == x.device and t.dtype in TYPES
    return alike and type(t) in (Tensor, Parameter) and t.is_contiguous()


def switch(
    again: Again,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
) -> Tensor:
    """Switchable norm; of rows of more than one position.

    Args:
        again: The same in torch's operators, from x, the parameters, a mean and a variance of the batch branch (or
            None) and eps: for derivatives of derivatives.
        x: The input.
        running_mean: (C,), moved where ``by_batch``.
        running_var: (C,), likewise.
        parameters: Weight, bias, and both vectors of logits.
        by_batch: Whether the batch branch has the moments of the batch.
        momentum: The weight of this batch in the running moments.
        eps: Added to the variance.
    """
    running = _running(running_mean, running_var, momentum, by_batch)
    y: Tensor = Switch.apply(again, running, by_batch, float(eps), x, *parameters)  # type: ignore[no-untyped-call]
    return y


def renorm(
    again: Again,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None],
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    r_max: float | Tensor,
    d_max: float | Tensor,
) -> Tensor:
    """Batch renorm; arguments as above, and ``again`` takes each channel's mean, deviation, r and d."""
    running = _running(running_mean, running_var, momentum, by_batch)
    limits = Limits(*_on_device_or_not(r_max), *_on_device_or_not(d_max))
    given: tuple[Any, ...] = again, running, limits, by_batch, float(eps), x, *parameters
    y: Tensor = Renorm.apply(*given)  # type: ignore[no-untyped-call]
    return y


def _running(mean: Tensor | None, var: Tensor | None, momentum: float | Tensor, by_batch: bool) -> Running:
    return Running(mean, var, *_on_device_or_not(momentum), by_batch and moves_moments(mean, momentum))


def _on_device_or_not(number: float | Tensor) -> tuple[Tensor | None, float]:
    return (number, 0.0) if isinstance(number, Tensor) else (None, float(number))


def renorm_limits(
    counter: Tensor,
    kept: tuple[Tensor, Tensor],
    keep: bool,
    tops: tuple[float, float],
    ramps: tuple[tuple[float, float], tuple[float, float]],
    kernel: str | None,
    caller: str,
) -> tuple[Tensor, Tensor] | None:
    """The limits of r and d after the batches counted so far, by one launch; None where the kernels don't suit.

    Args:
        counter: The batches, 0-dim.
        kept: Where the limits in force are kept, 0-dim each.
        keep: Whether to put them there.
        tops: Where each ends.
        ramps: From which batch to which each rises.
        kernel: The one asked for; None reads ``CONTNORM_KERNEL``.
        caller: Whom an error message about an unknown kernel names.
    """
    if kept[0].dtype != torch.float32 or not suits(kept[0].view(1, 1), (), (), (counter, *kept), kernel, caller):
        return None
    found = kept if keep else (torch.empty_like(kept[0]), torch.empty_like(kept[1]))
    launch.renorm_limits(counter, found, tops, ramps)
    if keep:
        torch.autograd.graph.increment_version(list(kept))
    return found
