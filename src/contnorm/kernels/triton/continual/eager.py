"""The fast lane: launches under a plain autograd function, where nothing but autograd looks on.

A torch operator written in Python costs some 60 microseconds a call, three times what the launch costs: twenty layers
would spend milliseconds a step on it. Compilers, functorch and dispatch modes need the operator; plain eager code, and
CUDA graphs captured from it, do not. Here the forward kernel itself moves the running moments, which spares a launch.

Torch looks at every argument and output of an autograd function, so settings travel as one tuple, and what only the
backward pass needs is no output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from contnorm.kernels.reference import BatchMoments
from contnorm.kernels.triton.continual import launch, operators

__all__ = ["evaluate", "is_plain", "train"]


def is_plain(x: Tensor) -> bool:
    """Whether the kernels can be launched on a tensor as it is, unseen by anything above them."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def train(given: tuple[Any, ...], running: launch.Running | None) -> tuple[Tensor, BatchMoments | None]:
    """The output; and the batch's moments, where there are no running ones that moved towards them already."""
    output: Any = _Training.apply(*given[:4], (given[4:], running))  # type: ignore[no-untyped-call]
    if running is not None:
        return output, None
    y, table = output
    return y, BatchMoments(*launch.moments_in(table, y.shape[1]))


def evaluate(*given: Any) -> Tensor:
    output: Tensor = _Evaluation.apply(*given[:6], given[6:])  # type: ignore[no-untyped-call]
    return output


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rest: Any
    ) -> Tensor | tuple[Tensor, ...]:
        settings, running = rest
        given = x, weight, bias, residual, *settings
        output = launch.forward(*given, running or launch.NOTHING)  # type: ignore[call-arg]
        operators.keep_for_training(ctx, given, output)
        if running is None:
            ctx.mark_non_differentiable(output[1])
            return output
        moved = [t for t in running[:3] if t is not None]
        torch.autograd.graph.increment_version(moved)  # in place, and said so to autograd, as an operator would
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        run: Any = None
        if dy is not None and torch._C._functorch.is_legacy_batchedtensor(dy):  # `is_grads_batched`
            run = operators.plain_backward
        elif dy is not None and is_plain(dy):
            run = launch.backward
        return operators.backward_of_training(ctx, dy, run=run)[:5]


class _Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *rest: Any) -> Tensor:
        given = *rest[:6], *rest[6]
        output = launch.evaluate(*given)
        operators.keep_for_evaluation(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return operators.backward_of_evaluation(ctx, dy)[:7]
