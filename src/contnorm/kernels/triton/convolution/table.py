"""Which convolutions Triton computes: a table for each GPU, measured by `python -m benchmarks.speed convolutions`.

An entry names the direction (output, gradient of the input, gradient of the weight), the dtype and all sizes of a
convolution, and the tiles of its kernel. Everything that is not in the table is computed by cuDNN: other sizes, other
GPUs, other versions of torch and Triton. Tables change the order of sums, so the results of a run depend on its table
in the last digits. A checkpoint contains the table of its run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contnorm.errors import UserError
from contnorm.kernels.triton.availability import can_launch
from contnorm.kernels.triton.convolution.launch import DIRECTIONS, Direction, Geometry, Tiles

__all__ = [
    "EMPTY",
    "VARIABLE",
    "ConvolutionTable",
    "Key",
    "LayerTiles",
    "current_table",
    "environment_of_table",
    "format_tables",
    "read_tables",
    "table_for",
    "using_table",
]

VARIABLE = "CONTNORM_CONVOLUTIONS"  # path of a file with tables of your own
FILE = Path(__file__).with_name("tables.json")

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

    @cached_property
    def _by_layer(self) -> dict[tuple[str, Geometry], LayerTiles]:
        layers: dict[tuple[str, Geometry], LayerTiles] = {}
        for (direction, dtype, geometry), tiles in self.entries.items():
            layers[dtype, geometry] = layers.get((dtype, geometry), _NO_TILES)._replace(**{direction: tiles})
        return layers

    def tiles(self, dtype: str, geometry: Geometry) -> LayerTiles:
        """Return the tiles of a convolution; those that are not in the table are None."""
        return self._by_layer.get((dtype, geometry), _NO_TILES)

    def only(self, dtype: str) -> ConvolutionTable:
        """Return the entries of one dtype."""
        return ConvolutionTable({key: tiles for key, tiles in self.entries.items() if key[1] == dtype})

    def to_json(self) -> list[list[Any]]:
        """Return the entries as JSON values, in a fixed order."""
        return [[*key[:2], list(key[2]), list(tiles)] for key, tiles in sorted(self.entries.items())]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> ConvolutionTable:
        """Return the table that `to_json` has written.

        Raises:
            ValueError: If the values are not those of a table.
        """
        try:
            entries = {_key(*row[:3]): _tiles(row[3]) for row in rows}
        except (TypeError, IndexError) as error:
            raise ValueError(f"is not a table of convolutions ({error})") from error
        return cls(entries)

    @cached_property
    def digest(self) -> str:
        """Hash of the entries."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()[:12]


def _key(direction: Direction, dtype: str, geometry: Sequence[int]) -> Key:
    if direction not in DIRECTIONS:
        raise ValueError(f"has the direction {direction!r}, which is not one of {', '.join(DIRECTIONS)}")
    if not all(type(size) is int for size in geometry):
        raise ValueError(f"has the sizes {geometry!r}, which are not integers")
    return direction, dtype, Geometry(*geometry)


def _tiles(values: Sequence[Any]) -> Tiles:
    """Return tiles, checked: a kernel with no parts of a sum, for example, would leave its output as it was."""
    tiles = Tiles(*values)
    numbers, flags = tiles[:6], tiles[6:]
    if not (all(type(number) is int and number >= 1 for number in numbers) and all(type(f) is bool for f in flags)):
        raise ValueError(f"has the tiles {values!r}, which are not six positive integers, then true or false")
    return tiles


EMPTY = ConvolutionTable()

_table: ContextVar[ConvolutionTable] = ContextVar("convolution_table", default=EMPTY)


def current_table() -> ConvolutionTable:
    """Return the table in use; empty outside of `using_table`."""
    return _table.get()


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
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"gpu": name, "torch": _minor(torch.__version__), "triton": _minor(triton)}


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])


def table_for(device: torch.device) -> ConvolutionTable:
    """Return the table for a device and the installed versions; empty if there is none.

    Raises:
        UserError: If the environment variable ``CONTNORM_CONVOLUTIONS`` names a file that has no tables.
    """
    if not can_launch(device):
        return EMPTY
    environment = environment_of_table(device)
    return next((table for valid_for, table in read_tables() if valid_for == environment), EMPTY)


def read_tables() -> list[tuple[dict[str, str], ConvolutionTable]]:
    """Return all tables of the package, or those of the file in ``CONTNORM_CONVOLUTIONS``, and what they are valid for.

    Raises:
        UserError: If the file has no tables.
    """
    return _read(os.environ.get(VARIABLE) or str(FILE))


@cache
def _read(path: str) -> list[tuple[dict[str, str], ConvolutionTable]]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return [(item["environment"], ConvolutionTable.from_json(item["entries"])) for item in content]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: has no tables of convolutions ({error}). Set {VARIABLE} to a file that "
            f"`python -m benchmarks.speed convolutions` has written, or unset it."
        ) from error


def format_tables(tables: Sequence[tuple[Mapping[str, str], ConvolutionTable]]) -> str:
    """Return the content of a file with tables, one entry per line.

    Example:
        >>> sizes = Geometry(20, 64, 16, 16, 64, kernel=3, stride=1, padding=1)
        >>> table = ConvolutionTable({("forward", "float32", sizes): Tiles(128, 64, 32, 1, 4, 3)})
        >>> text = format_tables([({"gpu": "NVIDIA H200"}, table)])
        >>> json.loads(text)[0]["entries"][0][:3]
        ['forward', 'float32', [20, 64, 16, 16, 64, 3, 1, 1]]
    """
    items = []
    for environment, table in tables:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in table.to_json())
        items.append(f'{{"environment": {json.dumps(dict(environment))}, "entries": [\n{rows}\n]}}')
    return "[" + ",\n".join(items) + "]\n"
