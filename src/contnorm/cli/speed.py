"""The `speed` command: prints each measurement as it is made and writes all of them to a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from contnorm.bench.api.execution import find_device
from contnorm.bench.data.registry import data_root
from contnorm.benchmarks.layers import measure_layers
from contnorm.benchmarks.runs import RUN_CASES, measure_runs
from contnorm.benchmarks.step import measure_eager_step, measure_steps
from contnorm.benchmarks.timing import environment_of, flatten_row, write_rows
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, unknown

__all__ = ["KINDS", "speed"]

KINDS = ("layers", "step", "run")
WIDTHS = {"shape": 15, "layer": 11, "stream": 14}


def speed(
    what: str,
    device: str,
    root: Path | None,
    out: Path,
    max_steps: int | None,
    console: Console,
    only: Sequence[str] = (),
) -> None:
    """Run a benchmark, print each row when it is measured, and write all rows to ``out``.

    Args:
        what: One of `KINDS`.
        device: ``"cpu"`` or ``"cuda"``.
        root: Folder of data sets; None for the default one.
        out: Folder of the CSV file.
        max_steps: Stop each timed run after so many steps; for ``what="run"``.
        console: Terminal to print to.
        only: Words that a timed run must have, such as a strategy or a norm; for ``what="run"``.
    """
    if only and what != "run":
        raise UserError(
            f"--only {' '.join(only)} applies to the benchmark run, not to {what}. Leave it out, or use: speed run"
        )
    if what not in KINDS:
        raise unknown("benchmark", what, KINDS)
    torch_device = find_device(device)
    environment = environment_of(torch_device)
    console.print(safe_text(", ".join(f"{key} {value}" for key, value in environment.items())))
    lines: list[dict[str, Any]] = []
    for row in _rows(what, torch_device, data_root(root), max_steps, only):
        line = flatten_row(row)
        if not lines:
            console.print(safe_text(_aligned({name: name for name in line})), soft_wrap=True)
        console.print(safe_text(_aligned(line)), soft_wrap=True)
        lines.append(line | environment)
        write_rows(out / f"{what}.csv", lines)  # after each row, so that an interrupt loses none
    if not lines:
        raise UserError(f"--only {' '.join(only)} matches no run. Available: {_cases_in_words()}.")
    console.print(safe_text(f"{len(lines)} rows in {out / f'{what}.csv'}"))


def _cases_in_words() -> str:
    return ", ".join(f"{case.stream} {case.strategy} {case.norm}" for case in RUN_CASES)


def _rows(what: str, device: torch.device, root: Path, max_steps: int | None, only: Sequence[str]) -> Iterator[Any]:
    if what == "layers":
        yield from measure_layers(device)
    elif what == "step":
        yield from (measure_eager_step(device, norm) for norm in ("bn", "cn"))
        yield from measure_steps(device)
    else:
        yield from measure_runs(device.type, root, max_steps, only)


def _aligned(line: dict[str, Any]) -> str:
    return "  ".join(f"{value!s:>{max(len(name), WIDTHS.get(name, 8))}}" for name, value in line.items())
