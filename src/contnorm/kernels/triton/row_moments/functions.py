"""Autograd functions around the launches.

In addition to its arguments, each gets the same norm in torch operators (``again``). The backward pass uses it for
double backward, and if vmap or a dispatch mode is active.
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
        _mark_updated(running)
        ctx.again, ctx.training, ctx.eps = again, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, table)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *inputs, table = ctx.saved_tensors
        if dy is None:
            return (None,) * 9
        if by_kernels(dy):
            grads = launch.switch_backward(dy, *inputs, table, ctx.training, ctx.eps)  # type: ignore[call-arg]
        else:
            n, c, *_ = sizes_of(inputs[0], 1)
            batch = (None, None) if ctx.training else table[2 * (n * c + n) :].split(c)
            grads = gradients_by_torch(
                lambda *new: ctx.again(*new, *batch, ctx.eps), dy, inputs, ctx.needs_input_grad[4:]
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
        y, saved = launch.renorm(x, *parameters, running, limits, training, eps)  # type: ignore[call-arg]
        _mark_updated(running)
        ctx.again, ctx.training, ctx.eps = again, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *inputs, saved = ctx.saved_tensors
        if dy is None:
            return (None,) * 8
        if by_kernels(dy):
            grads = launch.renorm_backward(dy, *inputs, saved, ctx.training, ctx.eps)  # type: ignore[call-arg]
        else:
            channels = saved.split(inputs[0].shape[1])
            again = lambda *new: ctx.again(*new, *channels, ctx.training, ctx.eps)  # noqa: E731 read once, below
            grads = gradients_by_torch(again, dy, inputs, ctx.needs_input_grad[5:])
        return None, None, None, None, None, *grads


def _mark_updated(running: Running) -> None:
    """Tell autograd that the running moments were updated in place, as an operator does."""
    if running.moves:
        torch.autograd.graph.increment_version([t for t in running[:2] if t is not None])
