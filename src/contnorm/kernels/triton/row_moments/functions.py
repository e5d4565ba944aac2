"""The launches under plain autograd functions.

Each is given, beside its arguments, the same norm in torch's operators (``again``): where a second derivative is
wanted, or something besides autograd looks on, the backward pass goes through that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contnorm.kernels.double_backward import Again, by_kernels, gradients_by_torch
from contnorm.kernels.triton.continual.launch import sizes_of
from contnorm.kernels.triton.row_moments import launch
from contnorm.kernels.triton.row_moments.launch import Limits, Running

__all__ = ["Renorm", "Switch"]


class Switch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, again: Again, running: Running, training: bool, eps: float, x: Tensor, *parameters: Any
    ) -> Tensor:
        y, table = launch.switch(x, *parameters, running, training, eps)  # type: ignore[call-arg]
        _say_moved(running)
        ctx.again, ctx.training, ctx.eps = again, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, table)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *given, table = ctx.saved_tensors
        if dy is None:
            return (None,) * 9
        if by_kernels(dy):
            grads = launch.switch_backward(dy, *given, table, ctx.training, ctx.eps)  # type: ignore[call-arg]
        else:
            n, c, *_ = sizes_of(given[0], 1)
            batch = (None, None) if ctx.training else table[2 * (n * c + n) :].split(c)
            grads = gradients_by_torch(
                lambda *new: ctx.again(*new, *batch, ctx.eps), dy, given, ctx.needs_input_grad[4:]
            )
        return None, None, None, None, *grads


class Renorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        again: Again,
        running: Running,
        limits: Limits,
        training: bool,
        eps: float,
        x: Tensor,
        *parameters: Any,
    ) -> Tensor:
        y, kept = launch.renorm(x, *parameters, running, limits, training, eps)  # type: ignore[call-arg]
        _say_moved(running)
        ctx.again, ctx.training, ctx.eps = again, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *given, kept = ctx.saved_tensors
        if dy is None:
            return (None,) * 8
        if by_kernels(dy):
            grads = launch.renorm_backward(dy, *given, kept, ctx.training, ctx.eps)  # type: ignore[call-arg]
        else:
            channels = kept.split(given[0].shape[1])
            again = lambda *new: ctx.again(*new, *channels, ctx.training, ctx.eps)  # noqa: E731 read once, below
            grads = gradients_by_torch(again, dy, given, ctx.needs_input_grad[5:])
        return None, None, None, None, None, *grads


def _say_moved(running: Running) -> None:
    """In place, and said so to autograd, as an operator would."""
    if running.moves:
        torch.autograd.graph.increment_version([t for t in running[:2] if t is not None])
