"""Convolutions of a training step by cuDNN and by Triton, and the table of those at which Triton is faster.

All seeds run at the same time, each on its own CUDA stream in one graph, as in training: a kernel that is fast on an
empty GPU may be slow there. Each seed has its own tensors, and more of them than the cache of the GPU can hold.

The search has two rounds. The first measures tiles of several shapes, each with the numbers of splits that give the GPU
enough programs. The second changes the pipeline, the order and the splits of the three best.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step import StepCase, step_config
from benchmarks.timing import Percentiles, captured, replayed
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.models.networks import ResNet18
from contnorm.kernels.convolution import (
    DIRECTIONS,
    Convolution,
    ConvolutionTable,
    Direction,
    Geometry,
    Key,
    Tiles,
    convolve,
    input_gradient,
    programs,
    weight_gradient,
)
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead

SEEDS, LAYERS = 8, 5  # CUDA streams, and layers of each, which have their own weights
STEMS = ("pool", "plain")
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
PROGRAMS = (200, 450, 1000)  # of all seeds together; an H200 has 132 multiprocessors
MARGIN = 0.95  # Triton must be faster than cuDNN by 5 %, which is more than the noise of a measurement

# Rows, columns and depth of a tile, and warps. The depth is for 4-byte values, and twice as much for 2-byte values.
_PRODUCT = (
    (128, 64, 32, 4),
    (128, 64, 32, 8),
    (64, 64, 32, 4),
    (64, 64, 32, 2),
    (64, 64, 64, 4),
    (128, 128, 32, 8),
    (64, 128, 32, 4),
    (64, 128, 32, 2),
    (32, 64, 64, 4),
    (32, 128, 32, 4),
    (256, 64, 32, 8),
    (64, 32, 64, 2),
    (128, 256, 32, 8),
    (256, 128, 32, 8),
)
_BY_POSITION = ((32, 64, 64, 4), (32, 128, 32, 4), (32, 128, 64, 4), (32, 64, 32, 2), (32, 32, 64, 2))
_WEIGHT = (
    (64, 64, 32, 4),
    (64, 64, 32, 2),
    (64, 64, 64, 4),
    (64, 64, 16, 2),
    (128, 64, 32, 4),
    (64, 128, 32, 4),
    (64, 128, 32, 2),
    (128, 64, 32, 2),
    (128, 128, 32, 8),
    (32, 128, 32, 4),
    (128, 128, 32, 4),
)
_FEW_CHANNELS = ((64, 32, 32, 4), (64, 32, 32, 2), (64, 32, 64, 4), (64, 32, 128, 4), (64, 32, 64, 2))


class NetworkShape(NamedTuple):
    """The inputs of ResNet-18 whose convolutions are measured; the default is that of the steps.

    Attributes:
        stem: ``"pool"``, or ``"plain"`` for no max-pool after the first convolution.
        batch: Images of a forward pass: of the stream and the memory together, if they share one.
        size: Height and width of an image.
        precisions: Of the training: ``"tf32"`` and ``"bf16"``.
    """

    stem: str = "pool"
    batch: int = 20
    size: int = 32
    precisions: tuple[str, ...] = tuple(DTYPES)


DEFAULT_SHAPE = NetworkShape()


@dataclass(frozen=True)
class ConvolutionRow:
    """Time of one convolution of all seeds, in microseconds: by cuDNN, and by the best tiles of Triton."""

    precision: str
    direction: Direction
    geometry: Geometry
    cudnn_us: float
    triton_us: float
    tiles: Tiles

    @property
    def is_faster(self) -> bool:
        """Whether Triton is faster by more than the noise of a measurement."""
        return self.triton_us < MARGIN * self.cudnn_us

    @property
    def key(self) -> Key:
        """Key of the entry in a table."""
        return self.direction, str(DTYPES[self.precision]).removeprefix("torch."), self.geometry


def extended(table: ConvolutionTable, rows: Sequence[ConvolutionRow]) -> ConvolutionTable:
    """Return a table in which measured convolutions have an entry if Triton is faster, and none otherwise.

    Example:
        >>> sizes, tiles = Geometry(20, 64, 16, 16, 64, kernel=3, stride=1, padding=1), Tiles(64, 64, 32, 1, 4, 3)
        >>> faster = extended(ConvolutionTable(), [ConvolutionRow("tf32", "forward", sizes, 49.0, 31.0, tiles)])
        >>> faster.tiles("float32", sizes).forward == tiles
        True
        >>> bool(extended(faster, [ConvolutionRow("tf32", "forward", sizes, 49.0, 49.0, tiles)]))
        False
    """
    measured = {row.key for row in rows}
    entries = {key: tiles for key, tiles in table.entries.items() if key not in measured}
    return ConvolutionTable(entries | {row.key: row.tiles for row in rows if row.is_faster})


def format_tables(tables: Sequence[tuple[Mapping[str, str], ConvolutionTable]]) -> str:
    """Return the content of a file with tables, one entry per line."""
    items = []
    for environment, table in tables:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in table.to_json())
        items.append(f'{{"environment": {json.dumps(dict(environment))}, "entries": [\n{rows}\n]}}')
    return "[" + ",\n".join(items) + "]\n"


def geometries(shape: NetworkShape = DEFAULT_SHAPE) -> list[Geometry]:
    """Return the distinct convolutions of ResNet-18, in the order of the forward pass.

    Example:
        >>> geometries()[0]
        Geometry(samples=20, channels=3, height=32, width=32, filters=64, kernel=3, stride=1, padding=1)
        >>> len(geometries())
        11
    """
    model = ResNet18(3, 10, 64, nn.BatchNorm2d, "pool" if shape.stem == "pool" else "plain")
    sizes: dict[Geometry, None] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Convolution)
        geometry = module.geometry(inputs[0])
        if geometry is not None:
            sizes[geometry] = None

    for module in model.modules():
        if isinstance(module, Convolution):
            module.register_forward_pre_hook(note)
    with torch.device("meta"):
        model.to("meta").eval()(torch.empty(shape.batch, 3, shape.size, shape.size))
    return list(sizes)


def measure_convolutions(device: torch.device, shape: NetworkShape = DEFAULT_SHAPE) -> Iterator[ConvolutionRow]:
    """Measure the convolutions of ResNet-18 in each direction; needs a GPU."""
    for precision in shape.precisions:
        with numerics(step_config(StepCase("bn", "pool", precision, SEEDS)).train):
            for geometry in geometries(shape):
                tensors = _Tensors(geometry, DTYPES[precision], device)
                for direction in DIRECTIONS:
                    if direction == "input" and geometry.channels <= 3:
                        continue  # of images: not needed
                    yield _measure(precision, direction, tensors)


class _Tensors:
    """Inputs, weights and gradients of the output, for each seed and layer."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry, self.dtype = geometry, dtype
        g, generator = geometry, torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=device)
            return values.to(dtype).contiguous(memory_format=torch.channels_last)

        def layers(*shape: int) -> list[list[Tensor]]:
            return [[noise(*shape) for _ in range(LAYERS)] for _ in range(SEEDS)]

        self.x = layers(g.samples, g.channels, g.height, g.width)
        self.weight = layers(g.filters, g.channels, g.kernel, g.kernel)
        self.dy = [noise(g.samples, g.filters, g.out_height, g.out_width) for _ in range(SEEDS)]

    def call(self, direction: Direction, tiles: Tiles | None, seed: int, layer: int) -> Tensor:
        """Compute a convolution of a seed, by cuDNN without tiles.

        What the layer before has just written is in the cache, and the same for all layers here; weights, and the
        saved inputs of the backward pass, are not.
        """
        g, dy = self.geometry, self.dy[seed]
        x, weight = self.x[seed][layer if direction == "weight" else 0], self.weight[seed][layer]
        if tiles is None and direction == "forward":
            return F.conv2d(x, weight, None, g.stride, g.padding)
        if tiles is None:
            sizes = [g.stride] * 2, [g.padding] * 2, [1, 1], False, [0, 0], 1
            mask = [direction == "input", direction == "weight", False]
            gradients: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
                dy, x, weight, None, *sizes, mask
            )
            return next(gradient for gradient in gradients if gradient is not None)
        if direction == "forward":
            return convolve(x, weight, g, tiles)
        return input_gradient(dy, weight, g, tiles) if direction == "input" else weight_gradient(dy, x, g, tiles)


def _measure(precision: str, direction: Direction, tensors: _Tensors) -> ConvolutionRow:
    times: dict[Tiles, float] = {}

    def measure_all(several: Sequence[Tiles]) -> None:
        fresh = [tiles for tiles in dict.fromkeys(several) if tiles not in times]
        if can_compile_ahead():
            with compiling_ahead():
                for tiles in fresh:
                    tensors.call(direction, tiles, 0, 0)
        for tiles in fresh:
            times[tiles] = _time(direction, tensors, tiles)

    measure_all(_candidates(direction, tensors))
    best = sorted(times, key=lambda tiles: times[tiles])[:3]
    measure_all([near for tiles in best for near in _neighbours(direction, tensors.geometry, tiles)])
    tiles = min(times, key=lambda tiles: times[tiles])
    cudnn = _time(direction, tensors, None)
    return ConvolutionRow(precision, direction, tensors.geometry, cudnn, times[tiles], tiles)


def _time(direction: Direction, tensors: _Tensors, tiles: Tiles | None) -> float:
    """Return microseconds of one layer of all seeds; infinity if the tile does not fit into shared memory."""
    streams = _streams()

    def step() -> None:
        main = torch.cuda.current_stream()
        for seed, stream in enumerate(streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for layer in range(LAYERS):
                    tensors.call(direction, tiles, seed, layer)
        for stream in streams:
            main.wait_stream(stream)

    try:
        graph = captured(step, 1)
    except Exception as error:  # Triton's, of a module that is not imported here
        if type(error).__name__ != "OutOfResources":
            raise
        return float("inf")
    return 1e6 * Percentiles.of(replayed(graph, 15)).p50 / LAYERS


_all_streams: list[torch.cuda.Stream] = []


def _streams() -> list[torch.cuda.Stream]:
    while len(_all_streams) < SEEDS:
        _all_streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return _all_streams


def _candidates(direction: Direction, tensors: _Tensors) -> list[Tiles]:
    """Return the tiles of the first round."""
    g, deeper = tensors.geometry, 4 // tensors.dtype.itemsize
    few = g.channels < 16
    if few and direction != "weight":
        return [Tiles(rows, 64, 32, 1, 4, 2, rounded=deeper == 1) for rows in (32, 64, 128)]
    shapes = (_FEW_CHANNELS if few else _WEIGHT) if direction == "weight" else _PRODUCT
    found = [Tiles(rows, columns, deeper * depth, 1, warps, 3) for rows, columns, depth, warps in shapes]
    if direction == "weight":
        if few:
            found = [tiles._replace(reordered=True) for tiles in found]
        elif g.out_height <= 4 and g.kernel > 1:
            found += [tiles._replace(by_position=True) for tiles in found]
        if g.channels == 64 and g.kernel > 1:
            found += [Tiles(64, 128, deeper * 32, 1, warps, 3, reordered=True) for warps in (2, 4)]
    elif g.out_height <= 4 and g.stride == 1:
        found += [
            Tiles(rows, columns, deeper * depth, 1, warps, 3, True) for rows, columns, depth, warps in _BY_POSITION
        ]
    widths = {"forward": g.filters, "input": g.channels, "weight": max(32, g.channels)}
    if tensors.dtype == torch.float32:
        found = [tiles._replace(rounded=True) for tiles in found]
        if _can_prepare(direction, g):
            found += [
                tiles._replace(prepared=True) for tiles in found if tiles.warps >= 4 and _is_plain(direction, tiles)
            ]
    return [
        split
        for tiles in found
        if tiles.columns <= widths[direction] or tiles.reordered
        for split in _with_splits(direction, g, tiles)
    ]


def _can_prepare(direction: Direction, g: Geometry) -> bool:
    """Whether a kernel of its own can prepare an operand; for kernels of 1x1, that is as much work as the product."""
    return g.kernel > 1 and g.channels >= 16 and (direction != "input" or g.stride == 1)


def _is_plain(direction: Direction, tiles: Tiles) -> bool:
    """Whether the tiles have no options that a prepared input does not have."""
    return direction != "weight" or not (tiles.by_position or tiles.reordered)


def _with_splits(direction: Direction, g: Geometry, tiles: Tiles) -> list[Tiles]:
    """Return the tiles with those numbers of splits that give the GPU enough programs."""
    number, steps = SEEDS * math.prod(programs(direction, g, tiles)), _steps(direction, g, tiles)
    most = max(1, steps // 3)
    splits = {min(most, max(1, round(goal / number))) for goal in PROGRAMS} | ({1} if number >= 100 else set())
    return [tiles._replace(splits=count) for count in sorted(splits)]


def _steps(direction: Direction, g: Geometry, tiles: Tiles) -> int:
    terms = {
        "forward": g.kernel**2 * g.channels,
        "input": -(-(g.kernel**2) // g.stride) * g.filters,
        "weight": g.samples * g.out_height * g.out_width,
    }
    return -(-terms[direction] // tiles.depth)


def _neighbours(direction: Direction, g: Geometry, tiles: Tiles) -> list[Tiles]:
    """Return the tiles of the second round, near good ones of the first."""
    near = [tiles._replace(stages=stages) for stages in (1, 2, 4, 5)]
    near += [tiles._replace(splits=max(1, round(tiles.splits * factor))) for factor in (0.5, 2)]
    if direction != "weight":
        near += [tiles._replace(reordered=True), tiles._replace(reordered=True, stages=1)]
    elif not tiles.reordered and not tiles.prepared and g.kernel > 1:
        near.append(tiles._replace(by_position=not tiles.by_position))
    return near
