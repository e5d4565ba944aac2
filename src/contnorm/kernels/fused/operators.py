"""The fused kernels as torch operators, so that autograd, compiled graphs, autocast and vmap know them.

`contnorm::continual_norm` is a pure function: it gives the output, the batch's moments and the tables that its backward
pass reads; running moments are moved by `contnorm::update_moments_`. A derivative of the derivative, and any vmap, goes
through the formulas of `analytic`, which torch can differentiate and batch.

The kernels themselves are imported when first launched: this module needs no Triton.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels import analytic
from contnorm.kernels.activation import activated
from contnorm.kernels.fused import plan
from contnorm.kernels.fused.plan import Plan, Sizes, plan_evaluation, plan_pass
from contnorm.kernels.pivot import less_slab_pivot

__all__ = [
    "continual_norm",
    "continual_norm_backward",
    "continual_norm_eval",
    "in_layout",
    "sizes_of",
    "update_moments_",
]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_modules: dict[str, ModuleType] = {}


def _device_code(name: str) -> Any:
    if name not in _modules:
        _modules[name] = import_module(f"contnorm.kernels.fused.{name}")
    return _modules[name]


# --- layouts ----------------------------------------------------------------------------------------------------


def channels_last(x: Tensor) -> bool:
    """Whether channels lie next to each other, samples and positions in order."""
    if x.dim() == 3:
        return x.transpose(1, 2).is_contiguous()
    return x.dim() > 3 and x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def in_layout(x: Tensor) -> Tensor:
    """The tensor itself where its order of memory is one of the two the kernels know, else a contiguous copy."""
    return x if x.is_contiguous() or channels_last(x) else x.contiguous()


def like(other: Tensor, x: Tensor) -> Tensor:
    """A tensor in the layout of x, which is in one of the two."""
    if x.is_contiguous():
        return other.contiguous()
    return other if channels_last(other) else other.movedim(1, -1).contiguous().movedim(-1, 1)


def sizes_of(x: Tensor, groups: int) -> Sizes:
    n, c = x.shape[:2]
    length = x.numel() // (n * c)
    return Sizes(n, c, length, groups, length == 1 or not x.is_contiguous(), x.element_size())


# --- launches ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("contnorm::continual_norm", mutates_args=())
def continual_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, groups: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, batch mean (C,), biased batch variance (C,), and the tables for the backward pass."""
    x = in_layout(x)
    sizes = sizes_of(x, groups)
    n, c, length, *_ = sizes
    y, mean, var, table = _outputs(x, groups)
    if residual is not None:
        residual = like(residual, x)
    p = plan_pass(sizes, False, plan.LIMITS)
    code = _device_code("forward")
    tile = {"K": c // groups, "KP": p.lanes, "BN": p.block_n, "BC": p.block_c, "BL": p.block_l, "LAST": sizes.last}
    if p.way == "one":
        code.forward_one[(p.programs,)](
            x, weight, bias, residual, y, mean, var, table, n, c, length, eps,
            **tile, SINGLE=p.single, RELU=relu, num_warps=p.warps,
        )  # fmt: skip
        return y, mean, var, table
    part = _scratch(x, 2 * p.splits * n * c)
    several = p.blocks, p.splits, p.span
    whole = p.way == "two"
    code.forward_rows[(p.programs,)](x, part, n, c, length, *several, **tile, WHOLE=whole, num_warps=p.warps)
    if not whole:
        code.forward_tables[(_table_programs(p, groups),)](
            part, mean, var, table, n, c, length, eps, p.splits, p.span,
            K=c // groups, KP=p.lanes, BN=p.table_n, BC=p.table_c, SP=p.split_lanes, num_warps=p.table_warps,
        )  # fmt: skip
    code.forward_apply[(p.programs,)](
        x, weight, bias, residual, y, part, mean, var, table, n, c, length, eps, *several,
        **tile, SP=p.split_lanes, TABLES=whole, RELU=relu, num_warps=p.warps,
    )  # fmt: skip
    return y, mean, var, table


@torch.library.custom_op("contnorm::continual_norm_backward", mutates_args=())
def continual_norm_backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    table: Tensor,
    eps: float,
    groups: int,
    relu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, and of the residual where that is not dy itself (else an empty tensor)."""
    x = in_layout(x)
    dy = like(dy, x)
    if y is not None:
        y = like(y, x)
    sizes = sizes_of(x, groups)
    n, c, length, *_ = sizes
    dx, dweight, dbias, dresidual = _gradients(x, relu and residual)
    p = plan_pass(sizes, True, plan.LIMITS)
    code = _device_code("backward")
    tile = {"K": c // groups, "KP": p.lanes, "BN": p.block_n, "BC": p.block_c, "BL": p.block_l, "LAST": sizes.last}
    saved = x, dy, y, weight, bias, mean, var, table
    written = dx, dresidual if relu and residual else None, dweight, dbias
    if p.way == "one":
        code.backward_one[(p.programs,)](
            *saved, *written, n, c, length, eps, **tile, SINGLE=p.single, RELU=relu, num_warps=p.warps
        )
        return dx, dweight, dbias, dresidual
    part = _scratch(x, 2 * p.splits * n * c)
    several = p.blocks, p.splits, p.span
    whole = p.way == "two"
    slabs = None
    code.backward_rows[(p.programs,)](
        *saved, part, n, c, length, eps, *several, **tile, WHOLE=whole, RELU=relu, num_warps=p.warps
    )
    if not whole:
        slabs = _scratch(x, 2 * n * groups)
        code.backward_tables[(_table_programs(p, groups),)](
            part, slabs, weight, mean, var, table, dweight, dbias, n, c, length, eps, p.splits,
            K=c // groups, KP=p.lanes, BN=p.table_n, BC=p.table_c, SP=p.split_lanes, num_warps=p.table_warps,
        )  # fmt: skip
    code.backward_apply[(p.programs,)](
        *saved, part, slabs, *written, n, c, length, eps, *several,
        **tile, SP=p.split_lanes, TABLES=whole, RELU=relu, num_warps=p.warps,
    )  # fmt: skip
    return dx, dweight, dbias, dresidual


@torch.library.custom_op("contnorm::continual_norm_eval", mutates_args=())
def continual_norm_eval(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    groups: int,
    relu: bool,
) -> Tensor:
    """The output with given moments."""
    x = in_layout(x)
    sizes = sizes_of(x, groups)
    y = torch.empty_like(x)
    if residual is not None:
        residual = like(residual, x)
    p = plan_evaluation(sizes, plan.LIMITS)
    _device_code("forward").evaluate[(p.programs,)](
        x, mean, var, weight, bias, residual, y, *sizes[:3], eps, p.blocks,
        K=sizes.channels // groups, KP=p.lanes, BN=p.block_n, BC=p.block_c, BL=p.block_l,
        LAST=sizes.last, SINGLE=p.single, RELU=relu, num_warps=p.warps,
    )  # fmt: skip
    return y


@torch.library.custom_op("contnorm::update_moments_", mutates_args=("running_mean", "running_var"))
def update_moments_(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    weight: Tensor | None,
    factor: float,
) -> None:
    """Both running moments in one launch; ``weight``, on the device, takes the place of ``momentum``."""
    c, block = mean.numel(), 256
    _device_code("forward").move_moments[(-(-c // block),)](
        running_mean, running_var, mean, var, weight, momentum, factor, c, BC=block, num_warps=4
    )


def _table_programs(p: Plan, groups: int) -> int:
    return -(-groups * p.lanes // p.table_c)


def _scratch(x: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def _outputs(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, c = x.shape[:2]
    return torch.empty_like(x), _scratch(x, c), _scratch(x, c), _scratch(x, 2 * n * (c + groups))


def _gradients(x: Tensor, residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c = x.shape[1]
    dresidual = torch.empty_like(x) if residual else x.new_empty(0)
    return torch.empty_like(x), _scratch(x, c), _scratch(x, c), dresidual


# --- what the compiler sees -------------------------------------------------------------------------------------


@continual_norm.register_fake
def _(x: Tensor, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool) -> Any:
    return _outputs(in_layout(x), groups)


@continual_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, mean: Any, var: Any, table: Any,
    eps: float, groups: int, relu: bool, residual: bool,
) -> Any:  # fmt: skip
    return _gradients(in_layout(x), relu and residual)


@continual_norm_eval.register_fake
def _(
    x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, eps: float, groups: int, relu: bool
) -> Any:
    return torch.empty_like(in_layout(x))


# --- derivatives ------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    y, mean, var, table = output
    ctx.mark_non_differentiable(mean, var, table)
    ctx.set_materialize_grads(False)
    ctx.residual = residual is not None
    # Without a residual the sign of the output is found again from the tables: saving it would cost as much as x.
    ctx.save_for_backward(x, y if ctx.relu and ctx.residual else None, weight, bias, mean, var, table)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    x, y, weight, bias, mean, var, table = ctx.saved_tensors
    if torch.is_grad_enabled():  # a second derivative is wanted: the formulas that torch can differentiate
        grads = analytic_gradients(dy, x, y, weight, bias, ctx.eps, ctx.groups, ctx.relu)
    else:
        grads = continual_norm_backward(
            dy, x, y, weight, bias, mean, var, table, ctx.eps, ctx.groups, ctx.relu, ctx.residual
        )
    dx, dweight, dbias, dresidual = grads
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
        (dresidual if ctx.relu else dy) if ctx.residual else None,
        None,
        None,
        None,
    )


continual_norm.register_autograd(_backward, setup_context=_keep)


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
    """What `continual_norm_backward` gives, in torch's operators."""
    shifted = less_slab_pivot(x, groups)
    found = analytic.statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    wide = dy.to(shifted.dtype)
    if relu:
        sign = analytic.multiply_add(shifted, scale, offset, found).detach() if y is None else y
        wide = wide.masked_fill(sign <= 0, 0.0)
    grads = analytic.gradients(shifted, wide, scale, found, groups)
    return grads.x.to(x.dtype), grads.weight, grads.bias, wide.to(dy.dtype)


def _keep_evaluation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    ctx.residual = residual is not None
    ctx.save_for_backward(x, mean, var, weight, bias, output if ctx.relu else None)


def _backward_of_evaluation(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, mean, var, weight, bias, y = ctx.saved_tensors
    if y is not None:
        dy = dy.masked_fill(y <= 0, 0.0)
    dx, dweight, dbias = analytic.gradients_of_evaluation(x, dy, mean, var, weight, ctx.eps, ctx.groups)
    return (
        dx,
        None,
        None,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
        dy if ctx.residual else None,
        None,
        None,
        None,
    )


continual_norm_eval.register_autograd(_backward_of_evaluation, setup_context=_keep_evaluation)


# --- vmap -------------------------------------------------------------------------------------------------------


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, groups: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `continual_norm` gives, in torch's operators."""
    shifted = less_slab_pivot(x, groups)
    found = analytic.statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    y = activated(analytic.multiply_add(shifted, scale, offset, found), residual, relu).to(x.dtype)
    width = x.shape[1] // groups
    slabs = (t[:, ::width].flatten() for t in (found.group_mean, found.group_rstd))
    table = torch.cat([found.row_mean.flatten(), found.row_square.flatten(), *slabs])
    return y, found.mean, found.var, table


@continual_norm.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    return torch.vmap(_plain, in_dims, randomness=info.randomness)(*args), (0, 0, 0, 0)


def _plain_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor, var: Tensor, table: Tensor, eps: float, groups: int, relu: bool, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dweight, dbias, dresidual = analytic_gradients(dy, x, y, weight, bias, eps, groups, relu)
    return dx, dweight, dbias, dresidual if relu and residual else x.new_empty(0)


@continual_norm_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    return torch.vmap(_plain_backward, in_dims, randomness=info.randomness)(*args), (0, 0, 0, 0)


def _plain_evaluation(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, groups: int, relu: bool,
) -> Tensor:  # fmt: skip
    return activated(analytic.evaluate(x, mean, var, weight, bias, eps, groups), residual, relu)


@continual_norm_eval.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    return torch.vmap(_plain_evaluation, in_dims, randomness=info.randomness)(*args), 0
