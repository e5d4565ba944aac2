"""Measure the speed of layers, steps, whole runs, start-up or convolutions, and write the rows to a CSV file.

    python -m benchmarks.speed layers
    python -m benchmarks.speed step --device cuda
    python -m benchmarks.speed convolutions --device cuda --stem plain --batch 32 --precision tf32

Rows are printed and written when they are measured, to ``speed/layers.csv`` and so on. ``convolutions`` also writes
``speed/convolutions.json``: the tables in use, in which the measured convolutions have an entry if Triton is faster
than cuDNN. Run from the root of the repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.convolutions import STEMS, NetworkShape, extended, format_tables, measure_convolutions
from benchmarks.eager import measure_eager_steps, measure_host
from benchmarks.layers import measure_layers
from benchmarks.runs import measure_runs
from benchmarks.startup import measure_startup
from benchmarks.step import measure_steps
from benchmarks.timing import environment_of, flatten_row, write_rows
from contnorm.bench.data.registry import data_root
from contnorm.kernels.convolution import ConvolutionTable, environment_of_table, read_tables

KINDS = ("layers", "host", "eager", "step", "run", "startup", "convolutions")


def rows_of(options: argparse.Namespace, device: torch.device) -> Iterator[Any]:
    root = data_root(options.data_root)
    match options.what:
        case "layers":
            return measure_layers(device)
        case "host":
            return measure_host(device)
        case "eager":
            return measure_eager_steps(device)
        case "step":
            return measure_steps(device)
        case "run":
            return measure_runs(str(device), root, options.max_steps, options.only)
        case "startup":
            return measure_startup(str(device), root)
        case _:
            shape = NetworkShape(options.stem, options.batch, options.image_size, tuple(options.precision))
            return measure_convolutions(device, shape)


def measure(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    environment = environment_of(device)
    print(environment)
    tables = read_tables() if options.what == "convolutions" else []
    rows: list[Any] = []
    for row in rows_of(options, device):
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in flatten_row(row).items()), flush=True)
        write_rows(options.out / f"{options.what}.csv", [flatten_row(each) | environment for each in rows])
        if options.what == "convolutions":
            text = format_tables(with_rows(tables, environment_of_table(device), rows))
            (options.out / "convolutions.json").write_text(text)


def with_rows(
    tables: Sequence[tuple[dict[str, str], ConvolutionTable]], environment: dict[str, str], rows: Sequence[Any]
) -> list[tuple[dict[str, str], ConvolutionTable]]:
    """Return the tables, with the rows in that of the environment."""
    own = next((table for valid_for, table in tables if valid_for == environment), ConvolutionTable())
    others = [(valid_for, table) for valid_for, table in tables if valid_for != environment]
    return [*others, (environment, extended(own, rows))]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or a GPU by its index, such as cuda:1")
    parser.add_argument("--out", type=Path, default=Path("speed"), help="folder of the CSV files")
    parser.add_argument("--data-root", type=Path, help="folder of data sets")
    parser.add_argument("--max-steps", type=int, help="run: stop each timed run after N steps (smoke test)")
    parser.add_argument("--only", nargs="*", default=(), help="run: only those with these words, such as er and cn")
    parser.add_argument("--stem", choices=STEMS, default="pool", help="convolutions: stem of ResNet-18")
    parser.add_argument("--batch", type=int, default=20, help="convolutions: images of a forward pass")
    parser.add_argument("--image-size", type=int, default=32, help="convolutions: height and width of images")
    parser.add_argument("--precision", nargs="*", default=("tf32", "bf16"), choices=("tf32", "bf16"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    measure(parse())
