"""The fused kernels as custom torch operators, which support autograd, torch.compile, autocast and vmap.

`contnorm::continual_norm` is a pure function: it returns the output and the tables for its backward pass, starting with
the moments of the batch. `contnorm::update_moments_` updates the running moments. Double backward uses the formulas of
`analytic`, which torch can differentiate, and so does everything under functorch, where torch does not use the
operator's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contnorm.kernels import analytic
from contnorm.kernels.pivot import subtract_slab_pivot
from contnorm.kernels.reference import add_residual_and_relu
from contnorm.kernels.triton.continual import launch

__all__ = [
    "analytic_gradients",
    "backward_of_evaluation",
    "backward_of_training",
    "continual_norm",
    "continual_norm_backward",
    "continual_norm_eval",
    "gradients_of_training",
    "keep_for_evaluation",
    "keep_for_training",
    "plain_backward",
    "plain_evaluation",
    "plain_training",
    "update_moments_",
]

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
update_moments_ = torch.library.custom_op(
    "contnorm::update_moments_",
    launch.update_moments,
    mutates_args=("running_mean", "running_var"),
    schema="(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor var, float momentum, "
    "Tensor? weight, float factor) -> ()",
)


# --- fake implementations for the compiler ----------------------------------------------------------------------


@continual_norm.register_fake
def _(x: Tensor, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool) -> Any:
    return launch.outputs_like(launch.in_layout(x), groups)


@continual_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, table: Any,
    eps: float, groups: int, relu: bool, residual: bool,
) -> Any:  # fmt: skip
    *grads, dresidual = launch.gradients_like(launch.in_layout(x), relu and residual)
    return *grads, x.new_empty(0) if dresidual is None else dresidual


@continual_norm_eval.register_fake
def _(
    x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool
) -> Any:
    return torch.empty_like(launch.in_layout(x))


# --- derivatives ------------------------------------------------------------------------------------------------


def keep_for_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    y, table = output
    ctx.set_materialize_grads(False)
    ctx.residual = residual is not None
    # Without a residual, the sign of the output is recomputed from the tables: saving y would need as much memory as x.
    ctx.save_for_backward(x, y if ctx.relu and ctx.residual else None, weight, bias, table)


def backward_of_training(ctx: Any, dy: Tensor | None, *_: Any, run: Any = None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    x, y, weight, bias, table = ctx.saved_tensors
    settings = ctx.eps, ctx.groups, ctx.relu, ctx.residual
    run = run or continual_norm_backward
    return *gradients_of_training(dy, x, y, weight, bias, table, *settings, run=run), None, None, None


def gradients_of_training(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, table: Tensor,
    eps: float, groups: int, relu: bool, residual: bool, *, run: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weight, bias and residual, by ``run`` unless they have to be differentiable."""
    if torch.is_grad_enabled():  # double backward needs formulas that torch can differentiate
        grads = analytic_gradients(dy, x, y, weight, bias, eps, groups, relu)
    else:
        grads = run(dy, x, y, weight, bias, table, eps, groups, relu, residual)
    dx, dweight, dbias, dresidual = grads
    return dx, _typed(dweight, weight), _typed(dbias, bias), (dresidual if relu else dy) if residual else None


def _set_up_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[1])
    keep_for_training(ctx, inputs, output)


continual_norm.register_autograd(backward_of_training, setup_context=_set_up_training)


def _typed(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Cast the gradient of a parameter to the parameter's dtype; None if there is no parameter."""
    if parameter is None or gradient.dtype == parameter.dtype:
        return None if parameter is None else gradient
    return gradient.to(parameter.dtype)


def analytic_gradients(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the results of `continual_norm_backward` with torch operators."""
    shifted = subtract_slab_pivot(x, groups)
    stats = analytic.statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    wide = dy.to(shifted.dtype)
    if relu:
        sign = analytic.multiply_add(shifted, scale, offset, stats).detach() if y is None else y
        wide = wide.masked_fill(sign <= 0, 0.0)
    grads = analytic.gradients(shifted, wide, scale, stats, groups)
    return grads.x.to(x.dtype), grads.weight, grads.bias, wide.to(dy.dtype)


def keep_for_evaluation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    ctx.residual = residual is not None
    ctx.save_for_backward(x, mean, var, weight, bias, output if ctx.relu else None)


def backward_of_evaluation(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, mean, var, weight, bias, y = ctx.saved_tensors
    if y is not None:
        dy = dy.masked_fill(y <= 0, 0.0)
    dx, dweight, dbias = analytic.gradients_of_evaluation(x, dy, mean, var, weight, ctx.eps, ctx.groups)
    return (
        dx,
        None,
        None,
        _typed(dweight, weight),
        _typed(dbias, bias),
        dy if ctx.residual else None,
        None,
        None,
        None,
    )


continual_norm_eval.register_autograd(backward_of_evaluation, setup_context=keep_for_evaluation)


# --- vmap -------------------------------------------------------------------------------------------------------


def _register_loop_vmap(operator: Any) -> None:
    """Register a vmap rule that calls the operator for each member of the batch, since the kernels are not batched."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        members = [
            operator(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(members[0], Tensor):
            return torch.stack(members), 0
        return tuple(map(torch.stack, zip(*members, strict=True))), (0,) * len(members[0])

    operator.register_vmap(rule)


for _operator in (continual_norm, continual_norm_backward, continual_norm_eval):
    _register_loop_vmap(_operator)


# --- replacements in torch operators, for functorch and forward-mode AD -----------------------------------------


def plain_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, groups: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output and the moments of the batch with torch operators; torch derives the backward pass."""
    shifted = subtract_slab_pivot(x, groups)
    stats = analytic.statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    y = add_residual_and_relu(analytic.multiply_add(shifted, scale, offset, stats), residual, relu).to(x.dtype)
    return y, stats.mean.detach(), stats.var.detach()


def plain_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    table: Tensor, eps: float, groups: int, relu: bool, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return analytic_gradients(dy, x, y, weight, bias, eps, groups, relu)


def plain_evaluation(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, groups: int, relu: bool,
) -> Tensor:  # fmt: skip
    return add_residual_and_relu(analytic.evaluate(x, mean, var, weight, bias, eps, groups), residual, relu)
