"""Launches of the convolution kernels on channels_last tensors, without autograd.

Triton and the device code are imported at the first launch.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.triton.availability import INTERPRETED
from contnorm.kernels.triton.launcher import Launch, launch, on_device_of

__all__ = ["DIRECTIONS", "Direction", "Geometry", "Tiles", "convolve", "input_gradient", "programs", "weight_gradient"]

Direction = Literal["forward", "input", "weight"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "input", "weight")

_REDUCE_BLOCK = 1024
_PREPARE_BLOCK = 64
_FEW_CHANNELS = 16  # fewer than a step of a sum has


class Geometry(NamedTuple):
    """The sizes of a convolution with square kernel, equal stride and padding in both directions, and no groups."""

    samples: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int
    stride: int
    padding: int

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def mirrored(self) -> Geometry:
        """Sizes of the convolution with the mirrored weight, which computes the gradient of the input; for stride 1."""
        height, width, padding = self.out_height, self.out_width, self.kernel - 1 - self.padding
        return Geometry(self.samples, self.filters, height, width, self.channels, self.kernel, 1, padding)


class Tiles(NamedTuple):
    """How a kernel divides its work: the sizes of a tile, and the number of parts of each sum."""

    rows: int  # of an output tile, at least 16
    columns: int
    depth: int  # terms of a sum that are loaded at a time
    splits: int  # parts of a sum
    warps: int
    stages: int  # of the software pipeline
    by_position: bool = False  # whether taps outside of the image are skipped
    reordered: bool = False  # taps before channels in the sum; for weight gradients, columns of several taps
    rounded: bool = False  # float32 to the nearest TF32 number, which the tensor cores would truncate
    prepared: bool = False  # a kernel of its own rounds the weight, mirrored for the gradient of the input; or the
    # input for that of the weight, with samples as the last dimension


class _Launches(NamedTuple):
    product: Launch
    addition: Launch | None
    sizes: tuple[int, ...]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _grid(direction: Direction, g: Geometry, t: Tiles) -> tuple[int, int]:
    """Return the number of blocks of rows and columns."""
    if direction == "forward":
        positions = g.out_height * g.out_width
        rows = positions * _blocks(g.samples, t.rows) if t.by_position else _blocks(g.samples * positions, t.rows)
        return rows, _blocks(g.filters, t.columns)
    if direction == "input":
        fewer = _blocks(g.height, g.stride) * _blocks(g.width, g.stride)
        rows = (
            g.height * g.width * _blocks(g.samples, t.rows)
            if t.by_position
            else g.stride**2 * _blocks(g.samples * fewer, t.rows)
        )
        return rows, _blocks(g.channels, t.columns)
    taps = g.kernel**2
    columns = _blocks(taps * g.channels, t.columns) if t.reordered else taps * _blocks(g.channels, t.columns)
    return _blocks(g.filters, t.rows), columns


def programs(direction: Direction, g: Geometry, t: Tiles) -> int:
    """Return the number of programs of a kernel with one split.

    Example:
        >>> sizes = Geometry(20, 64, 16, 16, 64, kernel=3, stride=1, padding=1)
        >>> programs("forward", sizes, Tiles(128, 64, 32, 1, 4, 3))
        40
    """
    rows, columns = _grid(direction, g, t)
    return rows * columns


def _is_even(direction: Direction, g: Geometry, t: Tiles) -> bool:
    """Whether channels and filters are multiples of the tile, so that no load needs to check them."""
    if direction == "forward":
        return g.channels % t.depth == 0 and g.filters % t.columns == 0
    if direction == "input":
        return g.filters % t.depth == 0 and g.channels % t.columns == 0
    return g.filters % t.rows == 0 and g.channels % t.columns == 0


def _is_aligned(g: Geometry, t: Tiles) -> bool:
    """Whether each step of a weight gradient has whole images or rows of the output, or lies in one row."""
    width, area = g.out_width, g.out_height * g.out_width
    in_rows = area % t.depth == 0 and (width % t.depth == 0 or t.depth % width == 0)
    return not t.by_position and (t.depth % area == 0 or in_rows)


_KERNELS = {"forward": "forward", "input": "input_gradient", "weight": "weight_gradient"}


def _pitch(g: Geometry, t: Tiles) -> int:
    """Return the samples of a prepared input, with zeros up to a multiple of the depth."""
    return _blocks(g.samples, t.depth) * t.depth


@lru_cache(maxsize=1024)
def _launches(direction: Direction, g: Geometry, t: Tiles, size: int) -> _Launches:
    code = import_module("contnorm.kernels.triton.convolution.device")
    rows, columns = _grid(direction, g, t)
    constants: dict[str, Any] = {
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "BM": t.rows,
        "BN": t.columns,
        "BK": t.depth,
        "BY_POSITION": t.by_position,
        "FLAT" if direction == "weight" else "TAPS_FIRST": t.reordered,
        "EVEN": _is_even(direction, g, t),
        "ROUND": t.rounded and not INTERPRETED,
        "num_warps": t.warps,
        "num_stages": t.stages,
    }
    if direction == "weight":
        constants["ALIGNED"] = _is_aligned(g, t)
    if direction == "forward":
        constants["FLAT"] = g.channels < _FEW_CHANNELS and not t.by_position
        constants["ROUND_WEIGHT"] = constants["ROUND"] and not t.prepared
    name = _KERNELS[direction]
    if direction == "weight" and t.prepared:
        name = "weight_gradient_of_prepared"
        constants = {key: value for key, value in constants.items() if key not in ("BY_POSITION", "FLAT", "ALIGNED")}
        constants["PITCH"] = _pitch(g, t)
    product = Launch(getattr(code, name), (rows * columns, t.splits), constants)
    addition = None
    if t.splits > 1:
        addition = Launch(
            code.add_splits,
            (_blocks(size, _REDUCE_BLOCK),),
            {"SPLITS": t.splits, "BLOCK": _REDUCE_BLOCK, "num_warps": 4},
        )
    sizes = g.samples, g.height, g.width, g.channels, g.out_height, g.out_width, g.filters, columns
    return _Launches(product, addition, sizes)


def _run(direction: Direction, a: Tensor, b: Tensor, out: Tensor, g: Geometry, t: Tiles) -> Tensor:
    launches = _launches(direction, g, t, out.numel())
    with on_device_of(a):
        if launches.addition is None:
            launches.product(a, b, out, *launches.sizes)
        else:
            parts = torch.empty(t.splits * out.numel(), dtype=torch.float32, device=a.device)
            launches.product(a, b, parts, *launches.sizes)
            launches.addition(parts, out, out.numel())
    return out


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _prepared(weight: Tensor, mirror: bool, rounded: bool) -> Tensor:
    """Return the weight rounded to TF32, mirrored if it is for the gradient of the input."""
    filters, channels, kernel, _ = weight.shape
    out = _empty(weight, *((channels, filters) if mirror else (filters, channels)), kernel, kernel)
    with on_device_of(weight):
        launch(
            import_module("contnorm.kernels.triton.convolution.device").prepare_weight,
            (_blocks(filters, _PREPARE_BLOCK), _blocks(channels, _PREPARE_BLOCK), kernel**2),
            weight, out, filters, channels,
            TAPS=kernel**2, MIRROR=mirror, ROUND=rounded and not INTERPRETED, BLOCK=_PREPARE_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _prepared_input(x: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the input rounded to TF32, as (channels, positions, samples) with zeros after the samples."""
    positions, pitch = g.height * g.width, _pitch(g, t)
    out = torch.empty((g.channels, positions, pitch), dtype=x.dtype, device=x.device)
    with on_device_of(x):
        launch(
            import_module("contnorm.kernels.triton.convolution.device").prepare_input,
            (positions, _blocks(g.channels, _PREPARE_BLOCK), pitch // t.depth),
            x, out, g.samples, positions, g.channels,
            PITCH=pitch, ROUND=t.rounded and not INTERPRETED, BLOCK=_PREPARE_BLOCK, BK=t.depth, num_warps=4,
        )  # fmt: skip
    return out


def convolve(x: Tensor, weight: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the output of the convolution; both tensors are channels_last."""
    if t.prepared:
        weight = _prepared(weight, False, t.rounded)
    return _run("forward", x, weight, _empty(x, g.samples, g.filters, g.out_height, g.out_width), g, t)


def input_gradient(dy: Tensor, weight: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the gradient of the input; both tensors are channels_last. Tiles with a prepared weight need stride 1."""
    if t.prepared:
        out = _empty(dy, g.samples, g.channels, g.height, g.width)
        return _run("forward", dy, _prepared(weight, True, t.rounded), out, g.mirrored, t)
    return _run("input", dy, weight, _empty(dy, g.samples, g.channels, g.height, g.width), g, t)


def weight_gradient(dy: Tensor, x: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the gradient of the weight; both tensors are channels_last."""
    if t.prepared:
        x = _prepared_input(x, g, t)
    return _run("weight", dy, x, _empty(dy, g.filters, g.channels, g.kernel, g.kernel), g, t)
