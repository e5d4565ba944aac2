"""The fast lane: launches under a plain autograd function, where nothing but autograd looks on.

A torch operator written in Python costs some 60 microseconds a call, three times what the launch costs: twenty layers
would spend milliseconds a step on it. Compilers, functorch and dispatch modes need the operator; plain eager code, and
CUDA graphs captured from it, do not. Here the forward kernel itself moves the running moments, which spares a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from contnorm.kernels.fused import launch, operators

__all__ = ["Evaluation", "Training", "is_plain"]


def is_plain(x: Tensor) -> bool:
    """Whether the kernels can be launched on a tensor as it is, unseen by anything above them."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class Training(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: launch.Running, *given: Any) -> tuple[Tensor, ...]:
        output: tuple[Tensor, ...] = launch.forward(*given, running)  # type: ignore[call-arg]
        moved = [t for t in running[:3] if t is not None]
        torch.autograd.graph.increment_version(moved)  # in place, and said so to autograd, as an operator would
        operators.keep_for_training(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        run: Any = None
        if dy is not None and torch._C._functorch.is_legacy_batchedtensor(dy):  # `is_grads_batched`
            run = operators.plain_backward
        elif dy is not None and is_plain(dy):
            run = launch.backward
        return None, *operators.backward_of_training(ctx, dy, run=run)


class Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        output = launch.evaluate(*given)
        operators.keep_for_evaluation(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return operators.backward_of_evaluation(ctx, dy)
