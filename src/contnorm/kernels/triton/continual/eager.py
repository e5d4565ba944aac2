"""The fused kernels in eager mode, as plain autograd functions.

A custom torch operator in Python costs about 60 microseconds per call, three times as much as the launch: with twenty
layers that is milliseconds per step. Compilers, functorch and dispatch modes need the operator; eager code, and CUDA
graphs captured from it, do not. Here the forward kernel itself updates the running moments, which saves a launch. Torch
processes every argument and output of an autograd function. To reduce this overhead, settings are passed as one tuple,
and tensors that only the backward pass needs are not outputs.

If there is a C++ compiler, most calls do not get here: `replay` repeats the launches of an earlier call without Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contnorm.kernels.moment_update import NO_UPDATE, MomentUpdate
from contnorm.kernels.reference import BatchMoments
from contnorm.kernels.triton.availability import is_plain
from contnorm.kernels.triton.continual import launch, operators, replay

__all__ = ["evaluate", "gradients", "train"]


def train(args: tuple[Any, ...], running: MomentUpdate | None) -> tuple[Tensor, BatchMoments | None]:
    """Return the output, and the moments of the batch, or None if ``running`` was given and has been updated."""
    output: Any = _Training.apply(*args[:4], (args[4:], running))  # type: ignore[no-untyped-call]
    if running is not None:
        return output, None
    y, table = output
    return y, BatchMoments(*launch.moments_in(table, y.shape[1]))


def evaluate(*args: Any) -> Tensor:
    output: Tensor = _Evaluation.apply(*args[:6], args[6:])  # type: ignore[no-untyped-call]
    return output


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rest: Any
    ) -> Tensor | tuple[Tensor, ...]:
        settings, running = rest
        args = x, weight, bias, residual, *settings
        output = replay.recorded_training(args, running or NO_UPDATE)
        operators.keep_for_training(ctx, args, output)
        if running is None:
            ctx.mark_non_differentiable(output[1])
            return output
        updated = [t for t in running[:3] if t is not None]
        torch.autograd.graph.increment_version(updated)  # tells autograd of the in-place update, as an operator does
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        run = None if dy is None else _backward_for(dy)
        return operators.backward_of_training(ctx, dy, run=run)[:5]


def gradients(dy: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and residual, for a forward pass that was replayed."""
    return operators.gradients_of_training(dy, *saved, run=_backward_for(dy))


def _backward_for(dy: Tensor) -> Any:
    """Return the function that computes the gradients: the kernels, or what a transform of the gradient needs."""
    if torch._C._functorch.is_legacy_batchedtensor(dy):  # `is_grads_batched`
        return operators.plain_backward
    return replay.recorded_backward if is_plain(dy) else operators.continual_norm_backward


class _Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *rest: Any) -> Tensor:
        args = *rest[:6], *rest[6]
        output = replay.recorded_evaluation(args)
        operators.keep_for_evaluation(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return operators.backward_of_evaluation(ctx, dy)[:7]


replay.gradients_in_python = gradients
