"""Convolutions by Triton where a table of measurements says that it is faster than cuDNN, and the layer that uses them.

A table belongs to one GPU and to versions of torch and Triton; `python -m benchmarks.speed convolutions` measures one.
An entry names the direction (output, gradient of the input, gradient of the weight), the dtype and all sizes of a
convolution, and the tiles of its kernel. cuDNN computes everything else. Tables change the order of sums, so the
results of a run depend on its table in the last digits. A checkpoint contains the table of its run.

Triton and the device code (`contnorm.kernels.triton.convolution_device`) are imported at the first launch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.kernels.triton.launcher import (
    INTERPRETED,
    Launch,
    can_launch,
    can_use_kernels,
    is_plain,
    is_untraced,
    launch,
    on_device_of,
)

VARIABLE = "CONTNORM_CONVOLUTIONS"  # path of a file with tables of your own
FILE = Path(__file__).with_name("convolutions.json")

# --- launches on channels_last tensors, without autograd --------------------------------------------------------------

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

    rows: int  # rows of an output tile, at least 16
    columns: int
    depth: int  # terms of a sum that are loaded at a time
    splits: int  # parts of a sum
    warps: int
    stages: int  # stages of the software pipeline
    by_position: bool = False  # whether taps outside of the image are skipped
    reordered: bool = False  # taps before channels in the sum; for weight gradients, columns of several taps
    rounded: bool = False  # float32 to the nearest TF32 number, which the tensor cores would truncate
    prepared: bool = False  # a kernel of its own rounds the weight, mirrored for the gradient of the input; or the
    # input for that of the weight, with samples as the last dimension


def programs(direction: Direction, g: Geometry, t: Tiles) -> tuple[int, int]:
    """Return the number of programs of a kernel with one split: blocks of rows, and of columns.

    Example:
        >>> sizes = Geometry(20, 64, 16, 16, 64, kernel=3, stride=1, padding=1)
        >>> programs("forward", sizes, Tiles(128, 64, 32, 1, 4, 3))
        (40, 1)
    """
    if direction == "forward":
        positions = g.out_height * g.out_width
        rows = positions * _blocks(g.samples, t.rows) if t.by_position else _blocks(g.samples * positions, t.rows)
        return rows, _blocks(g.filters, t.columns)
    if direction == "input":
        fewer = _blocks(g.height, g.stride) * _blocks(g.width, g.stride)
        if t.by_position:
            rows = g.height * g.width * _blocks(g.samples, t.rows)
        else:
            rows = g.stride**2 * _blocks(g.samples * fewer, t.rows)
        return rows, _blocks(g.channels, t.columns)
    taps = g.kernel**2
    columns = _blocks(taps * g.channels, t.columns) if t.reordered else taps * _blocks(g.channels, t.columns)
    return _blocks(g.filters, t.rows), columns


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def is_aligned(g: Geometry, t: Tiles) -> bool:
    """Whether each step of a weight gradient has whole images or rows of the output, or lies in one row."""
    width, area = g.out_width, g.out_height * g.out_width
    in_rows = area % t.depth == 0 and (width % t.depth == 0 or t.depth % width == 0)
    return not t.by_position and (t.depth % area == 0 or in_rows)


def _constants(direction: Direction, g: Geometry, t: Tiles) -> dict[str, Any]:
    """Return the constants of a kernel. With ``EVEN``, no load needs to check channels and filters."""
    common = {
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "BM": t.rows,
        "BN": t.columns,
        "BK": t.depth,
        "ROUND": t.rounded and not INTERPRETED,
        "num_warps": t.warps,
        "num_stages": t.stages,
    }
    if direction == "weight":
        even = g.filters % t.rows == 0 and g.channels % t.columns == 0
        if t.prepared:
            return common | {"EVEN": even, "PITCH": _pitch(g, t)}
        order = {"BY_POSITION": t.by_position, "FLAT": t.reordered, "ALIGNED": is_aligned(g, t)}
        return common | {"EVEN": even, **order}
    order = {"BY_POSITION": t.by_position, "TAPS_FIRST": t.reordered}
    if direction == "input":
        return common | {"EVEN": g.filters % t.depth == 0 and g.channels % t.columns == 0, **order}
    order |= {"FLAT": g.channels < _FEW_CHANNELS and not t.by_position}
    order |= {"ROUND_WEIGHT": t.rounded and not INTERPRETED and not t.prepared}
    return common | {"EVEN": g.channels % t.depth == 0 and g.filters % t.columns == 0, **order}


def _pitch(g: Geometry, t: Tiles) -> int:
    """Return the samples of a prepared input, with zeros up to a multiple of the depth."""
    return _blocks(g.samples, t.depth) * t.depth


@cache
def _code() -> Any:
    return import_module("contnorm.kernels.triton.convolution_device")


@lru_cache(maxsize=1024)
def _launches(direction: Direction, g: Geometry, t: Tiles, size: int) -> tuple[Launch, Launch | None, tuple[int, ...]]:
    """Return the launch of the products, that of the addition of splits, and their sizes."""
    names = {"forward": "forward", "input": "input_gradient", "weight": "weight_gradient"}
    name = "weight_gradient_of_prepared" if direction == "weight" and t.prepared else names[direction]
    rows, columns = programs(direction, g, t)
    product = Launch(getattr(_code(), name), (rows * columns, t.splits), _constants(direction, g, t))
    splits = {"SPLITS": t.splits, "BLOCK": _REDUCE_BLOCK, "num_warps": 4}
    addition = Launch(_code().add_splits, (_blocks(size, _REDUCE_BLOCK),), splits) if t.splits > 1 else None
    sizes = g.samples, g.height, g.width, g.channels, g.out_height, g.out_width, g.filters, columns
    return product, addition, sizes


def _run(direction: Direction, a: Tensor, b: Tensor, out: Tensor, g: Geometry, t: Tiles) -> Tensor:
    product, addition, sizes = _launches(direction, g, t, out.numel())
    with on_device_of(a):
        if addition is None:
            product(a, b, out, *sizes)
        else:
            parts = torch.empty(t.splits * out.numel(), dtype=torch.float32, device=a.device)
            product(a, b, parts, *sizes)
            addition(parts, out, out.numel())
    return out


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _prepared(weight: Tensor, mirror: bool, rounded: bool) -> Tensor:
    """Return the weight rounded to TF32, mirrored if it is for the gradient of the input."""
    filters, channels, kernel, _ = weight.shape
    out = _empty(weight, *((channels, filters) if mirror else (filters, channels)), kernel, kernel)
    with on_device_of(weight):
        launch(
            _code().prepare_weight,
            (_blocks(filters, _PREPARE_BLOCK), _blocks(channels, _PREPARE_BLOCK), kernel**2),
            weight, out, filters, channels,
            TAPS=kernel**2, MIRROR=mirror, ROUND=rounded and not INTERPRETED, BLOCK=_PREPARE_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def convolve(x: Tensor, weight: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the output of the convolution; both tensors are channels_last."""
    if t.prepared:
        weight = _prepared(weight, False, t.rounded)
    return _run("forward", x, weight, _empty(x, g.samples, g.filters, g.out_height, g.out_width), g, t)


def input_gradient(dy: Tensor, weight: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the gradient of the input; both tensors are channels_last. Tiles with a prepared weight need stride 1."""
    out = _empty(dy, g.samples, g.channels, g.height, g.width)
    if t.prepared:
        return _run("forward", dy, _prepared(weight, True, t.rounded), out, g.mirrored, t)
    return _run("input", dy, weight, out, g, t)


def weight_gradient(dy: Tensor, x: Tensor, g: Geometry, t: Tiles) -> Tensor:
    """Return the gradient of the weight; both tensors are channels_last.

    A prepared input is rounded to TF32, as (channels, positions, samples) with zeros after the samples.
    """
    if t.prepared:
        positions, pitch, prepared = g.height * g.width, _pitch(g, t), x
        x = torch.empty((g.channels, positions, pitch), dtype=x.dtype, device=x.device)
        with on_device_of(x):
            launch(
                _code().prepare_input,
                (positions, _blocks(g.channels, _PREPARE_BLOCK), pitch // t.depth),
                prepared, x, g.samples, positions, g.channels,
                PITCH=pitch, ROUND=t.rounded and not INTERPRETED, BLOCK=_PREPARE_BLOCK, BK=t.depth, num_warps=4,
            )  # fmt: skip
    return _run("weight", dy, x, _empty(dy, g.filters, g.channels, g.kernel, g.kernel), g, t)


# --- tables -----------------------------------------------------------------------------------------------------------

Key = tuple[Direction, str, Geometry]


class LayerTiles(NamedTuple):
    """The tiles of one convolution in each direction; None for cuDNN."""

    forward: Tiles | None = None
    input: Tiles | None = None
    weight: Tiles | None = None


_NO_TILES = LayerTiles()


@dataclass(frozen=True)
class ConvolutionTable:
    """The convolutions that Triton computes, with their tiles.

    Args:
        entries: Tiles by direction, name of the dtype, and sizes.

    Example:
        >>> sizes = Geometry(20, 64, 16, 16, 64, kernel=3, stride=1, padding=1)
        >>> table = ConvolutionTable({("forward", "float32", sizes): Tiles(128, 64, 32, 1, 4, 3)})
        >>> table.tiles("float32", sizes).forward.rows, table.tiles("bfloat16", sizes).forward
        (128, None)
        >>> ConvolutionTable.from_json(table.to_json()) == table
        True
    """

    entries: Mapping[Key, Tiles] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def tiles(self, dtype: str, geometry: Geometry) -> LayerTiles:
        """Return the tiles of a convolution; those that are not in the table are None."""
        return LayerTiles(*(self.entries.get((direction, dtype, geometry)) for direction in DIRECTIONS))

    def only(self, dtype: str) -> ConvolutionTable:
        """Return the entries of one dtype."""
        return ConvolutionTable({key: tiles for key, tiles in self.entries.items() if key[1] == dtype})

    def to_json(self) -> list[list[Any]]:
        """Return the entries as JSON values, in a fixed order."""
        return [[*key[:2], list(key[2]), list(tiles)] for key, tiles in sorted(self.entries.items())]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> ConvolutionTable:
        """Return the table that `to_json` has written."""
        return cls({(direction, dtype, Geometry(*sizes)): Tiles(*tiles) for direction, dtype, sizes, tiles in rows})

    @cached_property
    def digest(self) -> str:
        """Hash of the entries."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()[:12]


EMPTY = ConvolutionTable()

_table: ContextVar[ConvolutionTable] = ContextVar("convolution_table", default=EMPTY)


@contextmanager
def using_table(table: ConvolutionTable) -> Iterator[None]:
    """Context manager in which convolutions use a table."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)


def environment_of_table(device: torch.device) -> dict[str, str]:
    """Return what a table is valid for: the GPU, and the first two numbers of the versions of torch and Triton."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {package: ".".join(version(package).split(".")[:2]) for package in ("torch", "triton")}
    return {"gpu": name, **versions}


def table_for(device: torch.device) -> ConvolutionTable:
    """Return the table for a device and the installed versions; empty if there is none."""
    if not can_launch(device):
        return EMPTY
    environment = environment_of_table(device)
    return next((table for valid_for, table in read_tables() if valid_for == environment), EMPTY)


def read_tables() -> list[tuple[dict[str, str], ConvolutionTable]]:
    """Return all tables of the package, or of the file in ``CONTNORM_CONVOLUTIONS``, and what they are valid for."""
    content = json.loads(Path(os.environ.get(VARIABLE) or FILE).read_text(encoding="utf-8"))
    return [(item["environment"], ConvolutionTable.from_json(item["entries"])) for item in content]


# --- the layer --------------------------------------------------------------------------------------------------------


class Convolution(nn.Conv2d):
    """`nn.Conv2d` of which Triton computes what the table of `using_table` names.

    Example:
        >>> Convolution(3, 8, 3, padding=1, bias=False)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        table = _table.get()
        geometry = self.geometry(input) if table else None
        if geometry is None:
            return super().forward(input)
        kind = input.device.type
        is_cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else self.weight.dtype
        tiles = table.tiles(str(dtype).removeprefix("torch."), geometry)
        if tiles == _NO_TILES or not (is_cast or input.dtype == dtype) or not _suits(input, self.weight, dtype):
            return super().forward(input)
        y: Tensor = _Convolution.apply(input.to(dtype), self.weight.to(dtype), geometry, tiles)  # type: ignore[no-untyped-call]
        return y

    def geometry(self, input: Tensor) -> Geometry | None:
        """Return the sizes of the convolution; None if the kernels do not support them."""
        if self.bias is not None or self.padding_mode != "zeros" or not isinstance(self.padding, tuple):
            return None
        stride, padding, size = self.stride, self.padding, self.kernel_size
        square = stride[0] == stride[1] and padding[0] == padding[1] and size[0] == size[1]
        if not square or self.dilation != (1, 1) or self.groups != 1 or input.dim() != 4:
            return None
        samples, channels, height, width = input.shape
        return Geometry(samples, channels, height, width, self.out_channels, size[0], stride[0], padding[0])


def _suits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can replace cuDNN: channels_last, no tracing, and TF32 only if torch may use it."""
    precision: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return (
        (dtype == torch.bfloat16 or (dtype == torch.float32 and precision.fp32_precision == "tf32"))
        and x.dtype != torch.float64
        and can_launch(x.device)
        and is_plain(x)
        and is_untraced()
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry, tiles: LayerTiles) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.tiles = geometry, tiles
        if tiles.forward is None:
            return F.conv2d(x, weight, None, geometry.stride, geometry.padding)
        return convolve(x, weight, geometry, tiles.forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g, (need_x, need_weight, *_) = ctx.geometry, ctx.needs_input_grad
        # Torch's operator can be differentiated again.
        _, of_x, of_weight = ctx.tiles if can_use_kernels(dy) else _NO_TILES
        mask = [need_x and of_x is None, need_weight and of_weight is None, False]
        dx = dweight = None
        if any(mask):
            settings = [g.stride] * 2, [g.padding] * 2, [1, 1], False, [0, 0], 1
            dx, dweight, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *settings, mask)
        dense = dy.contiguous(memory_format=torch.channels_last)
        if need_x and of_x is not None:
            dx = input_gradient(dense, weight, g, of_x)
        if need_weight and of_weight is not None:
            dweight = weight_gradient(dense, x, g, of_weight)
        return dx, dweight, None, None
