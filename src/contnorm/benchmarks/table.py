"""Writes measurements to a CSV file; every row has the device and the software versions."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.bench.engine.precision import device_name
from contnorm.bench.escape import escape_csv

__all__ = ["circumstances", "flat", "write_rows"]


def flat(row: Any) -> dict[str, Any]:
    """Flatten a row with its nested dataclasses into one dict; spreads of seconds become microseconds.

    Example:
        >>> from contnorm.benchmarks.step import StepCase, StepRow
        >>> from contnorm.benchmarks.timing import Spread
        >>> flat(StepRow(StepCase("cn", "pool", "tf32", 8), Spread(1e-3, 2e-3, 3e-3)))["p50_us"]
        2000.0
    """
    line: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name == "seconds" and dataclasses.is_dataclass(value):
            line |= {f"{name}_us": round(1e6 * v, 3) for name, v in vars(value).items()}
        elif dataclasses.is_dataclass(value):
            line |= flat(value)
        elif isinstance(value, tuple):
            line[field.name] = "x".join(map(str, value))
        else:
            line[field.name] = round(value, 4) if isinstance(value, float) else value
    return line


def circumstances(device: torch.device) -> dict[str, str]:
    """Device and software versions that a measurement depends on."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "contnorm": contnorm.__version__,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with the same fields to a CSV file."""
    lines = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows({name: escape_csv(value) for name, value in line.items()} for line in lines)
