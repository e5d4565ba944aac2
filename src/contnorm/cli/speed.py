"""The `speed` command: prints each measurement as it is made and writes all of them to a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from contnorm import benchmarks
from contnorm.cli.common import DEVICE_HELP, DataRoot, console, importing_torch
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import safe_text

__all__ = ["speed"]

WIDTHS = {"shape": 15, "layer": 11, "stream": 14, "command": 30, "until": 10}


@examples(
    Example("Time single layers on the CPU.", "contnorm speed layers"),
    Example("Time whole training steps on a GPU.", "contnorm speed step --device cuda", "gpu"),
    Example(
        "Find the convolutions at which Triton is faster than cuDNN.",
        "contnorm speed convolutions --device cuda",
        "gpu",
    ),
    Example(
        "The same for batches of 32 and the plain stem.",
        "contnorm speed convolutions --device cuda --stem plain --batch 32 --precision tf32",
        "gpu",
    ),
)
def speed(
    what: Annotated[
        str, typer.Argument(help="Benchmark: layers, host, eager, step, run, startup or convolutions.")
    ] = "layers",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the CSV files to write.")] = Path("speed"),
    max_steps: Annotated[
        int | None, typer.Option(help="Stop each timed run after N steps (smoke test); for `run` only.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Time only runs with this strategy, norm or stream; repeatable; for `run` only."),
    ] = None,
    stem: Annotated[str | None, typer.Option(help="Stem of ResNet-18: pool or plain; for `convolutions` only.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images of a forward pass (default 20); for `convolutions` only.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Height and width of images (default 32); for `convolutions` only.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="tf32 or bf16 (default both); repeatable; for `convolutions` only.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Measure the speed of layers, training steps, whole runs or start-up, compared with torch's own layers."""
    with importing_torch(device):
        environment = benchmarks.describe_environment(device)
    rows = 0
    shape = _network_shape(stem, batch, image_size, tuple(precision or ()))
    for line in benchmarks.measure_speed(
        what, out, device=device, root=data_root, max_steps=max_steps, only=only or (), shape=shape
    ):
        if not rows:
            console.print(safe_text(", ".join(f"{key} {value}" for key, value in environment.items())))
            console.print(safe_text(_aligned({name: name for name in line})), soft_wrap=True)
        console.print(safe_text(_aligned(line)), soft_wrap=True)
        rows += 1
    console.print(safe_text(f"{rows} rows in {out / f'{what}.csv'}"))


def _network_shape(
    stem: str | None, batch: int | None, size: int | None, precisions: tuple[str, ...]
) -> benchmarks.NetworkShape | None:
    """Return the shape that the options describe; None without any."""
    options = {"stem": stem, "batch": batch, "size": size, "precisions": precisions or None}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return benchmarks.NetworkShape(**chosen) if chosen else None


def _aligned(line: dict[str, Any]) -> str:
    return "  ".join(f"{value!s:>{max(len(name), WIDTHS.get(name, 8))}}" for name, value in line.items())
