"""Kernel launches on plain tensors, without torch operators or autograd.

Triton and the device code are imported at the first launch.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.moment_update import NO_UPDATE, MomentUpdate
from contnorm.kernels.triton.continual import plan
from contnorm.kernels.triton.continual.plan import LaunchLimits, LaunchPlan, Sizes, plan_evaluation, plan_training
from contnorm.kernels.triton.launcher import Launch, has_clusters, on_device_of

__all__ = [
    "backward",
    "channels_last",
    "dense",
    "evaluate",
    "forward",
    "gradients_like",
    "in_layout",
    "like",
    "moments_in",
    "outputs_like",
    "sizes_of",
    "update_moments",
]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_MOMENTS_BLOCK = 256


def channels_last(x: Tensor) -> bool:
    """Whether a tensor is in channels_last layout."""
    if x.dim() == 3:
        return x.transpose(1, 2).is_contiguous()
    return x.dim() > 3 and x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def in_layout(x: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or channels_last(x) else x.contiguous()


def like(other: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the layout of x, which is contiguous or channels_last."""
    if x.is_contiguous():
        return other.contiguous()
    return other if channels_last(other) else other.movedim(1, -1).contiguous().movedim(-1, 1)


def sizes_of(x: Tensor, groups: int) -> Sizes:
    shape = x.shape
    n, c = shape[0], shape[1]
    length = x.numel() // (n * c)
    return Sizes(n, c, length, groups, length == 1 or not x.is_contiguous(), x.element_size())


def outputs_like(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Allocate the results of `forward`: the output, and one table for the backward pass, batch moments first."""
    shape = x.shape
    n, c = shape[0], shape[1]
    return torch.empty_like(x), _scratch(x, 2 * (c + n * (c + groups)))


def moments_in(table: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of the batch, (C,) each."""
    return table[:channels], table[channels : 2 * channels]


def gradients_like(x: Tensor, residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocate the results of `backward`: gradients of x, weight, bias and, if ``residual``, the residual."""
    dweight = _scratch(x, x.shape[1])
    return torch.empty_like(x), dweight, torch.empty_like(dweight), torch.empty_like(x) if residual else None


def _scratch(x: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def dense(parameter: Tensor | None) -> Tensor | None:
    """Return a contiguous (C,) tensor; the parameter may be a slice or expanded."""
    return None if parameter is None else parameter.contiguous()


class Launches(NamedTuple):
    """The launches of a pass, in order, and their size arguments; all are determined by the input sizes."""

    rows: Launch | None  # the first, if there are several
    tables: Launch | None
    last: Launch  # the last or only launch
    shape: tuple[int, int, int]
    parts: int  # number of values that the first launch writes for the others
    several: tuple[int, int, int]  # blocks, splits, span
    members: int = 0  # number of programs that share a block of channels in `cluster`; 0 in other plans


@lru_cache(maxsize=4096)
def _training(sizes: Sizes, backward: bool, relu: bool, limits: LaunchLimits, clusters: bool) -> Launches:
    name = "backward" if backward else "forward"
    if (p := plan_training(sizes, backward, limits)).launches == "cluster":
        return _clusters(p, sizes, f"{name}_cluster", relu, clusters, 2 * p.members * sizes.channels)
    p, code = plan_training(sizes, backward, limits), import_module(f"contnorm.kernels.triton.continual.{name}")
    if p.launches == "one":
        constants = _tile(p, sizes) | {"SINGLE": p.single, "RELU": relu}
        return _launches(p, sizes, None, None, Launch(getattr(code, f"{name}_one"), (p.programs,), constants))
    whole = p.launches == "two"
    by_rows = _tile(p, sizes) | _loop(p) | {"WHOLE": whole} | ({"RELU": relu} if backward else {})
    by_tiles = _tile(p, sizes) | _loop(p) | {"SP": p.split_lanes, "NP": p.all_n, "TABLES": whole, "RELU": relu}
    by_tables = _table_tile(p, sizes) | ({"SINGLE": p.table_n >= sizes.samples} if backward else {})
    return _launches(
        p,
        sizes,
        Launch(getattr(code, f"{name}_rows"), (p.programs,), by_rows),
        None if whole else Launch(getattr(code, f"{name}_tables"), _table_programs(p, sizes), by_tables),
        Launch(getattr(code, f"{name}_apply"), (p.programs,), by_tiles | {"REVERSE": p.reverse}),
    )


@lru_cache(maxsize=4096)
def _evaluation(sizes: Sizes, relu: bool, limits: LaunchLimits, clusters: bool) -> Launches:
    if (p := plan_evaluation(sizes, limits)).launches == "cluster":
        parts = 2 * p.members * sizes.samples * sizes.channels
        return _clusters(p, sizes, "evaluate_cluster", relu, clusters, parts, _loop(p))
    code = import_module("contnorm.kernels.triton.continual.forward")
    if p.launches == "one":
        constants = _tile(p, sizes) | {"SINGLE": p.single, "RELU": relu}
        return _launches(p, sizes, None, None, Launch(code.evaluate, (p.programs,), constants))
    by_rows = _tile(p, sizes) | _loop(p) | {"WHOLE": True}
    by_tiles = _tile(p, sizes) | _loop(p) | {"SP": p.split_lanes, "RELU": relu, "REVERSE": p.reverse}
    return _launches(
        p,
        sizes,
        Launch(code.forward_rows, (p.programs,), by_rows),
        None,
        Launch(code.evaluate_apply, (p.programs,), by_tiles),
    )


def _clusters(
    p: LaunchPlan,
    sizes: Sizes,
    name: str,
    relu: bool,
    clusters: bool,
    parts: int,
    loop: dict[str, Any] | None = None,
) -> Launches:
    """Return one launch in clusters or, where the device has none, one up to the barrier and one from there."""
    kernel = getattr(import_module("contnorm.kernels.triton.continual.cluster"), name)
    constants = _tile(p, sizes) | {"MP": plan.power(p.members), "CHUNKS": p.chunks, "RELU": relu} | (loop or {})
    first = None
    if clusters or p.members == 1:
        last = Launch(kernel, (p.programs,), constants | {"PHASE": 0}, cluster=p.members)
    else:
        first, last = (Launch(kernel, (p.programs,), constants | {"PHASE": phase}) for phase in (1, 2))
    return Launches(first, None, last, sizes[:3], parts, (p.blocks, p.splits, p.span), p.members)


def _launches(p: LaunchPlan, sizes: Sizes, rows: Launch | None, tables: Launch | None, last: Launch) -> Launches:
    parts = 2 * p.splits * sizes.samples * sizes.channels
    return Launches(rows, tables, last, sizes[:3], parts, (p.blocks, p.splits, p.span))


def _tile(p: LaunchPlan, sizes: Sizes) -> dict[str, Any]:
    return {
        "K": sizes.channels // sizes.groups,
        "KP": p.lanes,
        "BN": p.block_n,
        "BC": p.block_c,
        "BL": p.block_l,
        "LAST": sizes.last,
        "num_warps": p.warps,
    }


def _loop(p: LaunchPlan) -> dict[str, Any]:
    """Return the constants of a loop over chunks; `tiles` explains them."""
    return {"FULL": p.full, "STAGES": p.stages}


def _table_tile(p: LaunchPlan, sizes: Sizes) -> dict[str, Any]:
    return {
        "K": sizes.channels // sizes.groups,
        "KP": p.lanes,
        "BN": p.table_n,
        "BC": p.table_c,
        "SP": p.split_lanes,
        "num_warps": p.table_warps,
    }


def _table_programs(p: LaunchPlan, sizes: Sizes) -> tuple[int]:
    return (-(-sizes.groups * p.lanes // p.table_c),)


def _together(first: Launch | None, last: Launch, *args: Any) -> None:
    """Launch the kernel of a cluster plan: once, or up to its barrier and from there."""
    if first is not None:
        first(*args)
    last(*args)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    groups: int,
    relu: bool,
    running: MomentUpdate = NO_UPDATE,
) -> tuple[Tensor, Tensor]:
    x = in_layout(x)
    y, table = outputs_like(x, groups)
    if residual is not None:
        residual = like(residual, x)
    rows, tables, last, shape, parts, several, members = _training(
        sizes_of(x, groups), False, relu, plan.LIMITS, has_clusters(x)
    )
    args = x, dense(weight), dense(bias), residual, y
    with on_device_of(x):
        if members:
            _together(rows, last, *args, _scratch(x, parts), table, *running, *shape, eps, members)
            return y, table
        if rows is None:
            last(*args, table, *running, *shape, eps)
            return y, table
        part = _scratch(x, parts)
        rows(x, part, *shape, *several)
        if tables is not None:
            tables(part, table, *running, *shape, eps, *several[1:])
            running = NO_UPDATE
        last(*args, part, table, *running, *shape, eps, *several)
    return y, table


def backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    table: Tensor,
    eps: float,
    groups: int,
    relu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x = in_layout(x)
    dx, dweight, dbias, dresidual = gradients_like(x, relu and residual)
    rows, tables, last, shape, parts, several, members = _training(
        sizes_of(x, groups), True, relu, plan.LIMITS, has_clusters(x)
    )
    weight, bias = dense(weight), dense(bias)
    saved = x, like(dy, x), None if y is None else like(y, x), weight, bias, table
    written = dx, dresidual, dweight, dbias
    with on_device_of(x):
        if members:
            between = None if rows is None else _scratch(x, 2 * x.shape[0] * x.shape[1])
            _together(rows, last, *saved, _scratch(x, parts), between, *written, *shape, eps, members)
            return dx, dweight, dbias, dresidual
        if rows is None:
            last(*saved, *written, *shape, eps)
            return dx, dweight, dbias, dresidual
        part, slabs = _scratch(x, parts), None
        rows(*saved, part, *shape, eps, *several)
        if tables is not None:
            slabs = _scratch(x, 2 * x.shape[0] * groups)
            tables(part, slabs, weight, table, dweight, dbias, *shape, eps, several[1])
        last(*saved, part, slabs, *written, *shape, eps, *several)
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
    y = torch.empty_like(x)
    if residual is not None:
        residual = like(residual, x)
    rows, _, last, shape, parts, several, members = _evaluation(sizes_of(x, groups), relu, plan.LIMITS, has_clusters(x))
    args = x, *map(dense, (mean, var, weight, bias)), residual, y
    with on_device_of(x):
        if members:
            _together(rows, last, *args, _scratch(x, parts), *shape, eps, several[0], members, several[2])
            return y
        if rows is None:
            last(*args, *shape, eps, several[0])
            return y
        part = _scratch(x, parts)
        rows(x, part, *shape, *several)
        last(*args, part, *shape, eps, *several)
    return y


def update_moments(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    weight: Tensor | None,
    factor: float,
) -> None:
    c = mean.numel()
    with on_device_of(mean):
        _moments_launch(c)(running_mean, running_var, mean, var, weight, momentum, factor, c)


@lru_cache(maxsize=4096)
def _moments_launch(channels: int) -> Launch:
    kernel = import_module("contnorm.kernels.triton.continual.forward").update_moments
    return Launch(kernel, (-(-channels // _MOMENTS_BLOCK),), {"BC": _MOMENTS_BLOCK, "num_warps": 4})
