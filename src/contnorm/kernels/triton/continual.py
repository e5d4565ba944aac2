"""Continual normalization fused into one to three Triton kernels, with the memory traffic of batch norm.

The formulas are those of `analytic`; ``docs/concepts/one-pass.md`` describes the mapping to a GPU. This module checks
where the kernels can run, and has the three ways to call them:

- In eager mode, and in CUDA graphs captured from it, autograd functions launch them directly (`eager`).
- `torch.compile` and dispatch modes need torch operators. `contnorm::continual_norm` is a pure function: it returns the
  output and the tables for its backward pass, starting with the moments of the batch.
- Under functorch and forward-mode AD, torch operators compute the same formulas (`analytic`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contnorm.kernels import analytic, reference
from contnorm.kernels.reference import BatchMoments, MomentUpdate
from contnorm.kernels.triton import eager, launch, launcher, plan
from contnorm.kernels.triton.launcher import (
    check_parameters,
    in_layout,
    is_batched,
    is_plain,
    is_transformed,
    is_untraced,
)

moment_update = reference.moment_update  # the interface of all kernels; the C++ kernel supports less


def unsupported_reason(x: Tensor, num_groups: int) -> str | None:
    """Return why the kernels cannot run on this input; None if they can."""
    if not launcher.INSTALLED:
        return "it needs Triton, and torch 2.11 or newer"
    if not (x.is_cuda or (launcher.INTERPRETED and x.device.type == "cpu")):
        return f"it needs CUDA (or Triton's interpreter, TRITON_INTERPRET=1), and the input is on {x.device}"
    if not (launcher.COMPILER or launcher.INTERPRETED):
        return "Triton needs a C compiler, and there is no gcc, no clang and no CC in the environment"
    if x.dtype not in launcher.TYPES:
        return f"it computes moments in float32, and the input is {x.dtype}"
    samples, channels = x.shape[0], x.shape[1]
    if not plan.fits(samples, channels, x.numel() // (samples * channels), num_groups):
        return f"an input of shape {tuple(x.shape)} in {num_groups} groups is too large for it"
    return None


def auto_selects(x: Tensor, num_groups: int) -> bool:
    """Whether ``auto`` selects the kernels: on CUDA, if no exporter, tracer or transform is active."""
    return x.is_cuda and is_untraced() and unsupported_reason(x, num_groups) is None


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

    Returns the output, and the moments of the batch (with the biased variance), or None if a kernel has updated the
    moments of ``running``.
    """
    check_parameters(x, weight, bias, *(() if running is None else running[:2]))
    args = x, weight, bias, residual, eps, num_groups, relu
    if is_transformed():
        y, mean, var = analytic.plain_training(*args)
        return y, BatchMoments(mean, var)
    if is_plain(x):
        return eager.train(args, running)
    y, table = continual_norm(*args)
    return y, BatchMoments(*launch.moments_in(table, x.shape[1]))


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
    run: Any = analytic.plain_evaluation if is_transformed() else eager.evaluate if is_plain(x) else continual_norm_eval
    y: Tensor = run(x, mean, var, weight, bias, residual, eps, num_groups, relu)
    return y


# --- torch operators ---------------------------------------------------------------------------------------------

_PARAMETERS = "Tensor? weight, Tensor? bias"
_SETTINGS = "float eps, int groups, bool relu"
continual_norm = torch.library.custom_op(
    "contnorm::continual_norm",
    launch.forward,
    mutates_args=(),
    schema=f"(Tensor x, {_PARAMETERS}, Tensor? residual, {_SETTINGS}) -> (Tensor, Tensor)",
)


def _backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Replace a missing residual gradient by an empty tensor, because an operator must return tensors."""
    *grads, dresidual = launch.backward(dy, x, *rest)
    return *grads, x.new_empty(0) if dresidual is None else dresidual


continual_norm_backward = torch.library.custom_op(
    "contnorm::continual_norm_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor? y, {_PARAMETERS}, Tensor table, {_SETTINGS}, bool residual) "
    f"-> (Tensor, Tensor, Tensor, Tensor)",
)
continual_norm_eval = torch.library.custom_op(
    "contnorm::continual_norm_eval",
    launch.evaluate,
    mutates_args=(),
    schema=f"(Tensor x, Tensor mean, Tensor var, {_PARAMETERS}, Tensor? residual, {_SETTINGS}) -> Tensor",
)


@continual_norm.register_fake
def _(x: Tensor, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool) -> Any:
    return launch.outputs_like(in_layout(x), groups)


@continual_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, table: Any,
    eps: float, groups: int, relu: bool, residual: bool,
) -> Any:  # fmt: skip
    *grads, dresidual = launch.gradients_like(in_layout(x), relu and residual)
    return *grads, x.new_empty(0) if dresidual is None else dresidual


@continual_norm_eval.register_fake
def _(
    x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool
) -> Any:
    return torch.empty_like(in_layout(x))


def _set_up_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[1])
    eager.keep_for_training(ctx, inputs, output)


def _backward_of_training(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    differentiable = torch.is_grad_enabled() or is_transformed() or is_batched(dy)
    run = None if differentiable else continual_norm_backward
    saved = *ctx.saved_tensors, ctx.eps, ctx.groups, ctx.relu, ctx.residual
    return *eager.gradients(run, dy, *saved), None, None, None


def _backward_of_evaluation(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return *analytic.backward_of_evaluation(ctx, dy), None, None, None


continual_norm.register_autograd(_backward_of_training, setup_context=_set_up_training)
continual_norm_eval.register_autograd(_backward_of_evaluation, setup_context=analytic.keep_for_evaluation)
