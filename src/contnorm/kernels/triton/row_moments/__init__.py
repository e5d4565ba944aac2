"""Triton kernels of norms that are computed from the moments of rows: batch renorm and switchable norm.

A row is one sample and channel, with all its positions. Both norms are ``y = a * (x - m) + b``, with tables a, m and b
per row or channel that depend only on the moments of the rows. One pass over the data computes the moments, a launch on
small tables computes a, m and b, and a second pass writes the output. Backward works likewise. In torch operators,
either norm launches dozens of kernels, most of them on small tables, and each costs a microsecond whatever its size.

This module is the entry point: it checks where the kernels can run, and calls them. Triton is imported at the first
launch.
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
    """Whether to use the kernels: on CUDA by default, elsewhere (in Triton's interpreter) with ``kernel="triton"``.

    If torch has to trace the norm, or the kernels do not support an argument, the caller uses torch operators.

    Args:
        x: The input.
        parameters: The parameters per channel.
        moments: The running moments.
        numbers: Momentum and limits, which may be tensors.
        kernel: The requested implementation; None reads ``CONTNORM_KERNEL``.
        caller: The function or layer that an error message about an unknown kernel names.
        logits: The logits of the three mixed moments.
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
    """Whether a kernel can read a vector directly: it has the right size, device and dtype, and is contiguous."""
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
    """Switchable norm of rows with more than one position.

    Args:
        again: The same function in torch operators, for double backward. Its arguments are x, the parameters, mean and
            variance of the batch branch (or None), and eps.
        x: The input.
        running_mean: (C,), updated if ``by_batch``.
        running_var: (C,), updated if ``by_batch``.
        parameters: Weight, bias, and both vectors of logits.
        by_batch: Whether the batch branch uses the moments of the batch.
        momentum: Weight of this batch in the running moments.
        eps: Value added to the variance.
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
    """Batch renorm; arguments as for `switch`, but ``again`` takes mean, standard deviation, r and d per channel."""
    running = _running(running_mean, running_var, momentum, by_batch)
    limits = Limits(*_on_device_or_not(r_max), *_on_device_or_not(d_max))
    args: tuple[Any, ...] = again, running, limits, by_batch, float(eps), x, *parameters
    y: Tensor = Renorm.apply(*args)  # type: ignore[no-untyped-call]
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
    """Compute the current limits of r and d in one launch; None if the kernels cannot be used.

    Args:
        counter: The batch counter, 0-dim.
        kept: The buffers of the current limits, 0-dim each.
        keep: Whether to write the limits to these buffers.
        tops: The final value of each limit.
        ramps: The first and last batch of the ramp of each limit.
        kernel: The requested implementation; None reads ``CONTNORM_KERNEL``.
        caller: The function or layer that an error message about an unknown kernel names.
    """
    if kept[0].dtype != torch.float32 or not suits(kept[0].view(1, 1), (), (), (counter, *kept), kernel, caller):
        return None
    limits = kept if keep else (torch.empty_like(kept[0]), torch.empty_like(kept[1]))
    launch.renorm_limits(counter, limits, tops, ramps)
    if keep:
        torch.autograd.graph.increment_version(list(kept))
    return limits
