"""Kernel launches on plain tensors, without torch operators or autograd.

Triton and the device code are imported at the first launch.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.reference import NO_UPDATE, MomentUpdate
from contnorm.kernels.triton import plan
from contnorm.kernels.triton.launcher import Launch, dense, has_clusters, in_layout, like, on_device_of
from contnorm.kernels.triton.plan import LaunchLimits, LaunchPlan, Sizes


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


class Launches(NamedTuple):
    """The launches of a pass, in order, and their size arguments; all are determined by the input sizes."""

    rows: Launch | None  # the first, if there are several
    tables: Launch | None
    last: Launch  # the last or only launch
    shape: tuple[int, int, int]
    parts: int  # number of values that the first launch writes for the others
    several: tuple[int, int, int]  # blocks, splits, span
    members: int = 0  # number of programs that share a block of channels in `cluster`; 0 in other plans


def _code(module: str) -> Any:
    return import_module(f"contnorm.kernels.triton.{module}")


@lru_cache(maxsize=4096)
def _training(sizes: Sizes, backward: bool, relu: bool, limits: LaunchLimits, clusters: bool) -> Launches:
    name, p = "backward" if backward else "forward", plan.plan_training(sizes, backward, limits)
    code, programs, tile = _code(name), (p.programs,), _tile(p, sizes)
    if p.launches == "cluster":
        return _clusters(p, sizes, getattr(code, f"{name}_cluster"), relu, clusters, 2 * p.members * sizes.channels)
    if p.launches == "one":
        last = Launch(getattr(code, f"{name}_one"), programs, tile | {"SINGLE": p.single, "RELU": relu})
        return _launches(p, sizes, None, None, last)
    whole, tables = p.launches == "two", None
    tile |= _loop(p)
    rows = Launch(
        getattr(code, f"{name}_rows"), programs, tile | {"WHOLE": whole} | ({"RELU": relu} if backward else {})
    )
    if not whole:
        blocks = -(-sizes.groups * p.lanes // p.table_c)
        constants = {
            "K": sizes.channels // sizes.groups,
            "KP": p.lanes,
            "BN": p.table_n,
            "BC": p.table_c,
            "SP": p.split_lanes,
            "num_warps": p.table_warps,
        }
        constants |= {"SINGLE": p.table_n >= sizes.samples} if backward else {}
        tables = Launch(getattr(code, f"{name}_tables"), (blocks,), constants)
    tile |= {"SP": p.split_lanes, "NP": p.all_n, "TABLES": whole, "RELU": relu, "REVERSE": p.reverse}
    return _launches(p, sizes, rows, tables, Launch(getattr(code, f"{name}_apply"), programs, tile))


@lru_cache(maxsize=4096)
def _evaluation(sizes: Sizes, relu: bool, limits: LaunchLimits, clusters: bool) -> Launches:
    p, code = plan.plan_evaluation(sizes, limits), _code("forward")
    programs, tile = (p.programs,), _tile(p, sizes)
    if p.launches == "cluster":
        parts = 2 * p.members * sizes.samples * sizes.channels
        return _clusters(p, sizes, code.evaluate_cluster, relu, clusters, parts, _loop(p))
    if p.launches == "one":
        last = Launch(code.evaluate, programs, tile | {"SINGLE": p.single, "RELU": relu})
        return _launches(p, sizes, None, None, last)
    tile |= _loop(p)
    rows = Launch(code.forward_rows, programs, tile | {"WHOLE": True})
    tile |= {"SP": p.split_lanes, "RELU": relu, "REVERSE": p.reverse}
    return _launches(p, sizes, rows, None, Launch(code.evaluate_apply, programs, tile))


def _clusters(
    p: LaunchPlan,
    sizes: Sizes,
    kernel: Any,
    relu: bool,
    clusters: bool,
    parts: int,
    loop: dict[str, Any] | None = None,
) -> Launches:
    """Return one launch in clusters or, where the device has none, one up to the barrier and one from there."""
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
    rows, tables, last, shape, parts, several, members = _training(
        sizes_of(x, groups), False, relu, plan.LIMITS, has_clusters(x)
    )
    args = x, dense(weight), dense(bias), like(residual, x), y
    with on_device_of(x):
        if members:
            given = *args, _scratch(x, parts), table, *running, *shape, eps, members
            if rows is not None:
                rows(*given)
            last(*given)
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
    saved = x, like(dy, x), like(y, x), weight, bias, table
    written = dx, dresidual, dweight, dbias
    with on_device_of(x):
        if members:
            between = None if rows is None else _scratch(x, 2 * x.shape[0] * x.shape[1])
            given = *saved, _scratch(x, parts), between, *written, *shape, eps, members
            if rows is not None:
                rows(*given)
            last(*given)
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
    rows, _, last, shape, parts, several, members = _evaluation(sizes_of(x, groups), relu, plan.LIMITS, has_clusters(x))
    args = x, *map(dense, (mean, var, weight, bias)), like(residual, x), y
    with on_device_of(x):
        if members:
            given = *args, _scratch(x, parts), *shape, eps, several[0], members, several[2]
            if rows is not None:
                rows(*given)
            last(*given)
            return y
        if rows is None:
            last(*args, *shape, eps, several[0])
            return y
        part = _scratch(x, parts)
        rows(x, part, *shape, *several)
        last(*args, part, *shape, eps, *several)
    return y
