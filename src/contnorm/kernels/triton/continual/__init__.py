"""Continual normalization fused into one to three Triton kernels, with the memory traffic of batch norm.

The formulas are those of `analytic`; ``docs/concepts/one-pass.md`` describes the mapping to a GPU. This module is the
entry point: it checks where the kernels can run, and calls them. Triton is imported only at the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from contnorm.kernels.moment_update import MomentUpdate, moment_update
from contnorm.kernels.reference import BatchMoments
from contnorm.kernels.triton.availability import COMPILER, INSTALLED, INTERPRETED, TYPES, is_plain
from contnorm.kernels.triton.continual import eager, launch, operators, plan

__all__ = [
    "auto_selects",
    "check_parameters",
    "evaluate",
    "is_untraced",
    "moment_update",
    "train",
    "unsupported_reason",
]


def unsupported_reason(x: Tensor, num_groups: int) -> str | None:
    """Return why the kernels cannot run on this input; None if they can."""
    if not INSTALLED:
        return "Triton is not installed"
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return f"it needs CUDA (or Triton's interpreter, TRITON_INTERPRET=1), and the input is on {x.device}"
    if not (COMPILER or INTERPRETED):
        return "Triton needs a C compiler, and there is no gcc, no clang and no CC in the environment"
    if x.dtype not in TYPES:
        return f"it computes moments in float32, and the input is {x.dtype}"
    samples, channels = x.shape[0], x.shape[1]
    if not plan.fits(samples, channels, x.numel() // (samples * channels), num_groups):
        return f"an input of shape {tuple(x.shape)} in {num_groups} groups is too large for it"
    return None


def auto_selects(x: Tensor, num_groups: int) -> bool:
    """Whether ``auto`` selects the kernels: on CUDA, if no exporter, tracer or transform is active."""
    return x.is_cuda and is_untraced() and unsupported_reason(x, num_groups) is None


def is_untraced() -> bool:
    """Whether no exporter, tracer or transform is active, which would have to trace into the kernels."""
    return (
        not torch.compiler.is_exporting()  # an exported program should not need custom operators
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not _transformed()
    )


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
    running: MomentUpdate | None = None,
) -> tuple[Tensor, BatchMoments | None]:
    """Normalize with the moments of the batch, add the residual (of the input's shape, dtype and device), apply ReLU.

    Returns the output, and the moments of the batch (with the biased variance), or None if ``running`` was given: its
    moments have then been updated.
    """
    check_parameters(x, weight, bias, *(() if running is None else running[:2]))
    args = x, weight, bias, residual, eps, num_groups, relu
    transformed = _transformed()
    if not transformed and is_plain(x):
        return eager.train(args, running)
    if transformed:
        y, mean, var = operators.plain_training(*args)
        return y, BatchMoments(mean, var)
    y, table = operators.continual_norm(*args)
    mean, var = launch.moments_in(table, x.shape[1])
    if running is None:
        return y, BatchMoments(mean, var)
    _update(running, mean, var)
    return y, None


def _update(running: MomentUpdate, mean: Tensor, var: Tensor) -> None:
    """Update the running moments outside the forward operator, which is a pure function."""
    operators.update_moments_(running.mean, running.var, mean, var, running.momentum, running.weight, running.factor)
    if running.counter is not None:
        running.counter.add_(1)


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalize with the given moments, add the residual, apply ReLU."""
    check_parameters(x, mean, var, weight, bias)
    run: Any = operators.continual_norm_eval
    if _transformed():
        run = operators.plain_evaluation
    elif is_plain(x):
        run = eager.evaluate
    y: Tensor = run(x, mean, var, weight, bias, residual, eps, num_groups, relu)
    return y


def check_parameters(x: Tensor, *channels: Tensor | None) -> None:
    """Check shape and device of parameters and moments, because a kernel would read out of bounds otherwise."""
    shape, device = x.shape[1:2], x.device
    for each in channels:
        if each is not None and (each.shape != shape or each.device != device):
            raise RuntimeError(
                f"continual_norm: an input of shape {tuple(x.shape)} on {x.device} needs parameters and moments of "
                f"shape ({x.shape[1]},) on the same device, got {tuple(each.shape)} on {each.device}. "
                f"Move the layer with layer.to(x.device)."
            )


def _transformed() -> bool:
    """Whether functorch or forward-mode AD is active; neither can trace into the operators."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
