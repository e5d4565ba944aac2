"""Measure the speed of layers, steps, whole runs, start-up or convolutions, and write the rows to a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from contnorm.bench.data.registry import data_root
from contnorm.bench.engine.provenance import current_device
from contnorm.bench.engine.run import find_device
from contnorm.benchmarks.convolutions import NetworkShape, extended, measure_convolutions
from contnorm.benchmarks.eager import measure_eager_steps, measure_host
from contnorm.benchmarks.layers import measure_layers
from contnorm.benchmarks.runs import RUN_CASES, measure_runs
from contnorm.benchmarks.startup import measure_startup
from contnorm.benchmarks.step import measure_steps
from contnorm.benchmarks.timing import environment_of, flatten_row, write_rows
from contnorm.errors import UserError, check_count, unknown
from contnorm.kernels.triton.convolution.table import ConvolutionTable, environment_of_table, format_tables, read_tables

__all__ = ["KINDS", "describe_environment", "measure_speed"]

KINDS = ("layers", "host", "eager", "step", "run", "startup", "convolutions")


def describe_environment(device: str) -> dict[str, Any]:
    """Return the device and versions that a benchmark is measured with."""
    return environment_of(find_device(device))


def measure_speed(
    what: str,
    out: str | Path,
    *,
    device: str = "cpu",
    root: str | Path | None = None,
    max_steps: int | None = None,
    only: Sequence[str] = (),
    shape: NetworkShape | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a benchmark. Yields each row when it is measured; all rows so far are in the CSV file.

    Args:
        what: One of `KINDS`. ``convolutions`` also writes ``convolutions.json``: the tables in use, in which the
            measured convolutions have an entry if Triton is faster than cuDNN.
        out: Folder of the CSV file, which is named after the benchmark.
        device: ``"cpu"``, ``"cuda"``, or a GPU by its index, such as ``"cuda:1"``.
        root: Folder of data sets; None for the default one.
        max_steps: Stop each timed run after this many steps; for ``what="run"``.
        only: Words that a timed run must have, such as a strategy or a norm; for ``what="run"``.
        shape: Inputs of the network whose convolutions are measured; for ``what="convolutions"``.

    Example:
        >>> next(measure_speed("laps", "speed"))
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown benchmark 'laps'. ...
    """
    of_runs = {f"--only {' '.join(only)}": bool(only), f"--max-steps {max_steps}": max_steps is not None}
    for option, is_given in of_runs.items():
        if is_given and what != "run":
            raise UserError(f"{option} applies to the benchmark run, not to {what}. Leave it out, or use: speed run")
    if max_steps is not None:
        check_count(max_steps, "max_steps")
    if what not in KINDS:
        raise unknown("benchmark", what, KINDS)
    if shape is not None and what != "convolutions":
        raise UserError(f"stem, batch, image size and precision apply to the benchmark convolutions, not to {what}.")
    shape = shape or NetworkShape()
    shape.check()
    torch_device = find_device(device)
    environment = environment_of(torch_device)
    folder = data_root(None if root is None else Path(root))
    if what == "convolutions" and torch_device.type != "cuda":
        raise UserError(f"speed convolutions needs a GPU, and the device is {device}. Add: --device cuda")
    lines: list[dict[str, Any]] = []
    rows: list[Any] = []
    tables = read_tables() if what == "convolutions" else []
    for row in _rows(what, torch_device, folder, max_steps, only, shape):
        line = flatten_row(row)
        lines.append(line | environment)
        write_rows(Path(out) / f"{what}.csv", lines)  # after each row, so that an interrupt loses none
        rows.append(row)
        if what == "convolutions":
            text = format_tables(_with_rows(tables, environment_of_table(torch_device), rows))
            (Path(out) / "convolutions.json").write_text(text, encoding="utf-8")
        yield line
    if not lines:
        cases = ", ".join(f"{case.stream} {case.strategy} {case.norm}" for case in RUN_CASES)
        raise UserError(f"--only {' '.join(only)} matches no run. Available: {cases}.")


def _with_rows(
    tables: Sequence[tuple[dict[str, str], ConvolutionTable]], environment: dict[str, str], rows: Sequence[Any]
) -> list[tuple[dict[str, str], ConvolutionTable]]:
    """Return the tables, with the rows in that of the environment."""
    own = next((table for valid_for, table in tables if valid_for == environment), ConvolutionTable())
    others = [(valid_for, table) for valid_for, table in tables if valid_for != environment]
    return [*others, (environment, extended(own, rows))]


def _rows(
    what: str, device: torch.device, root: Path, max_steps: int | None, only: Sequence[str], shape: NetworkShape
) -> Iterator[Any]:
    with current_device(device):
        if what == "layers":
            yield from measure_layers(device)
        elif what == "step":
            yield from measure_steps(device)
        elif what == "host":
            yield from measure_host(device)
        elif what == "eager":
            yield from measure_eager_steps(device)
        elif what == "convolutions":
            yield from measure_convolutions(device, shape)
        elif what == "startup":
            yield from measure_startup(str(device), root)
        else:
            yield from measure_runs(str(device), root, max_steps, only)
