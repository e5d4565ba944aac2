"""The launches: from real tensors to real tensors, with no torch operator or autograd around them.

Triton and the device code are imported when first launched.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.fused import plan
from contnorm.kernels.fused.plan import Plan, Sizes, plan_evaluation, plan_pass
from contnorm.kernels.launching import launch as run

__all__ = [
    "Running",
    "backward",
    "channels_last",
    "dense",
    "evaluate",
    "forward",
    "gradients_like",
    "here",
    "in_layout",
    "like",
    "move_moments",
    "outputs_like",
    "sizes_of",
]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_MOMENTS_BLOCK = 256
_modules: dict[str, ModuleType] = {}


def _device_code(name: str) -> Any:
    if name not in _modules:
        _modules[name] = import_module(f"contnorm.kernels.fused.{name}")
    return _modules[name]


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


def outputs_like(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `forward` fills: output, batch mean, biased batch variance, and the tables for the backward pass."""
    n, c = x.shape[:2]
    return torch.empty_like(x), _scratch(x, c), _scratch(x, c), _scratch(x, 2 * n * (c + groups))


def gradients_like(x: Tensor, residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `backward` fills: gradients of x, weight, bias and residual, the last empty where it is not wanted."""
    c = x.shape[1]
    return torch.empty_like(x), _scratch(x, c), _scratch(x, c), torch.empty_like(x) if residual else x.new_empty(0)


def _scratch(x: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def dense(parameter: Tensor | None) -> Tensor | None:
    """A (C,) tensor that lies in one piece: it may have come in as a slice, or expanded."""
    return None if parameter is None else parameter.contiguous()


def here(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device if x.is_cuda and x.device.index != torch.cuda.current_device() else -1)


def _tile(p: Plan, sizes: Sizes) -> dict[str, Any]:
    return {
        "K": sizes.channels // sizes.groups,
        "KP": p.lanes,
        "BN": p.block_n,
        "BC": p.block_c,
        "BL": p.block_l,
        "LAST": sizes.last,
        "num_warps": p.warps,
    }


def _table_tile(p: Plan, sizes: Sizes) -> dict[str, Any]:
    return {
        "K": sizes.channels // sizes.groups,
        "KP": p.lanes,
        "BN": p.table_n,
        "BC": p.table_c,
        "SP": p.split_lanes,
        "num_warps": p.table_warps,
    }


def _table_programs(p: Plan, sizes: Sizes) -> tuple[int]:
    return (-(-sizes.groups * p.lanes // p.table_c),)


class Running(NamedTuple):
    """Running moments to be moved by the way, which spares a launch.

    Attributes:
        mean, var: (C,) buffers, contiguous.
        counter: Counted up by one.
        weight: The batch's weight, where it is on the device.
        momentum: The batch's weight, where it is not.
        factor: What makes the biased variance unbiased.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    counter: Tensor | None = None
    weight: Tensor | None = None
    momentum: float = 0.0
    factor: float = 1.0


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    groups: int,
    relu: bool,
    running: Running = Running(),  # noqa: B008 a tuple of nothing
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = in_layout(x)
    sizes = sizes_of(x, groups)
    y, mean, var, table = outputs_like(x, groups)
    if residual is not None:
        residual = like(residual, x)
    p = plan_pass(sizes, False, plan.LIMITS)
    code, grid, tile, shape = _device_code("forward"), (p.programs,), _tile(p, sizes), sizes[:3]
    given = x, dense(weight), dense(bias), residual, y
    kept = mean, var, table, *running
    with here(x):
        if p.way == "one":
            run(code.forward_one, grid, *given, *kept, *shape, eps, **tile, SINGLE=p.single, RELU=relu)
            return y, mean, var, table
        part = _scratch(x, 2 * p.splits * sizes.samples * sizes.channels)
        several = p.blocks, p.splits, p.span
        whole = p.way == "two"
        run(code.forward_rows, grid, x, part, *shape, *several, **tile, WHOLE=whole)
        if not whole:
            run(
                code.forward_tables,
                _table_programs(p, sizes),
                part,
                *kept,
                *shape,
                eps,
                p.splits,
                p.span,
                **_table_tile(p, sizes),
            )
            kept = mean, var, table, *Running()
        run(
            code.forward_apply,
            grid,
            *given,
            part,
            *kept,
            *shape,
            eps,
            *several,
            **tile,
            **_lanes_of_all(p),
            TABLES=whole,
            RELU=relu,
        )
    return y, mean, var, table


def _lanes_of_all(p: Plan) -> dict[str, int]:
    return {"SP": p.split_lanes, "NP": p.all_n}


def backward(
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
    x = in_layout(x)
    sizes = sizes_of(x, groups)
    masked = relu and residual
    dx, dweight, dbias, dresidual = gradients_like(x, masked)
    p = plan_pass(sizes, True, plan.LIMITS)
    code, grid, tile, shape = _device_code("backward"), (p.programs,), _tile(p, sizes), sizes[:3]
    weight, bias = dense(weight), dense(bias)
    saved = x, like(dy, x), None if y is None else like(y, x), weight, bias, mean, var, table
    written = dx, dresidual if masked else None, dweight, dbias
    with here(x):
        if p.way == "one":
            run(code.backward_one, grid, *saved, *written, *shape, eps, **tile, SINGLE=p.single, RELU=relu)
            return dx, dweight, dbias, dresidual
        part, slabs = _scratch(x, 2 * p.splits * sizes.samples * sizes.channels), None
        several = p.blocks, p.splits, p.span
        whole = p.way == "two"
        run(code.backward_rows, grid, *saved, part, *shape, eps, *several, **tile, WHOLE=whole, RELU=relu)
        if not whole:
            slabs = _scratch(x, 2 * sizes.samples * groups)
            run(
                code.backward_tables,
                _table_programs(p, sizes),
                part,
                slabs,
                weight,
                mean,
                var,
                table,
                dweight,
                dbias,
                *shape,
                eps,
                p.splits,
                **_table_tile(p, sizes),
            )
        run(
            code.backward_apply,
            grid,
            *saved,
            part,
            slabs,
            *written,
            *shape,
            eps,
            *several,
            **tile,
            **_lanes_of_all(p),
            TABLES=whole,
            RELU=relu,
        )
    return dx, dweight, dbias, dresidual


def evaluate(
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
    x = in_layout(x)
    sizes = sizes_of(x, groups)
    y = torch.empty_like(x)
    if residual is not None:
        residual = like(residual, x)
    p = plan_evaluation(sizes, plan.LIMITS)
    code, grid, tile, shape = _device_code("forward"), (p.programs,), _tile(p, sizes), sizes[:3]
    given = x, *map(dense, (mean, var, weight, bias)), residual, y
    with here(x):
        if p.way == "one":
            run(code.evaluate, grid, *given, *shape, eps, p.blocks, **tile, SINGLE=p.single, RELU=relu)
            return y
        part = _scratch(x, 2 * p.splits * sizes.samples * sizes.channels)
        several = p.blocks, p.splits, p.span
        run(code.forward_rows, grid, x, part, *shape, *several, **tile, WHOLE=True)
        run(code.evaluate_apply, grid, *given, part, *shape, eps, *several, **tile, SP=p.split_lanes, RELU=relu)
    return y


def move_moments(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    weight: Tensor | None,
    factor: float,
) -> None:
    c = mean.numel()
    with here(mean):
        run(
            _device_code("forward").move_moments,
            (-(-c // _MOMENTS_BLOCK),),
            running_mean,
            running_var,
            mean,
            var,
            weight,
            momentum,
            factor,
            c,
            BC=_MOMENTS_BLOCK,
            num_warps=4,
        )
