"""The `export` command: writes records as tables, or logs them to TensorBoard, W&B or MLflow. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contnorm import bench
from contnorm.cli.common import Where, console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_error, safe_text

__all__ = ["export"]


@examples(
    Example("Write a CSV table with one row per run and seed.", "contnorm export runs --to csv --out runs.csv"),
    Example("Write the runs with CN as JSON.", "contnorm export runs --to json --where norm=cn --out cn.json"),
)
def export(
    runs: Annotated[Path, typer.Argument(help="Runs folder, folder of archives, archive, or record.")],
    to: Annotated[str, typer.Option("--to", help="Format: csv, json, parquet, tensorboard, wandb or mlflow.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File of the table, or folder of logs. Default: named after the runs."),
    ] = None,
    where: Where = None,
    force: Annotated[bool, typer.Option("--force", help="Replace tables that have different content.")] = False,
) -> None:
    """Write records as tables, or log them to TensorBoard, W&B or MLflow."""
    content = bench.export(runs, to, out, where=where or (), force=force)
    for problem in content.problems:
        print_error(problem)
    counts = f"{len(content.records)} finished and {len(content.diverged)} diverged runs"
    console.print(safe_text(f"{counts} exported to {' and '.join(map(str, content.paths))}"), soft_wrap=True)
    raise typer.Exit(2 if content.problems else 0)
