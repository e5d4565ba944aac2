"""The `diagnose` command: measures the cross-task normalization effect of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench, diagnosis
from contnorm.bench.config.defaults import run_names
from contnorm.bench.data.registry import DIGITS
from contnorm.bench.records import Store
from contnorm.bench.selection import has_operator
from contnorm.cli.common import collection_paused, console, print_lines, print_text
from contnorm.cli.options import takes_options
from contnorm.cli.records import select_run

if TYPE_CHECKING:
    from contnorm.diagnosis import RunDiagnosis


@takes_options("device", "threads", "data_root", "allow_missing", "runs")
def diagnose(
    execution: dict[str, Any],
    run: Annotated[
        str,
        typer.Argument(help="Run made with --keep-weights: a selection (norm=cn), a path, or a prefix of its hash."),
    ],
    seed: Annotated[int | None, typer.Option(help="Seed to diagnose; default: all with weights.")] = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--beside", help="Second run that differs only in its norm: compare how much accuracy is recovered."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Figure to write: .svg, .png or .pdf.")] = None,
) -> None:
    """Measure the cross-task normalization effect: forgetting caused by the running moments alone.

    Examples:
        # Measure how much forgetting the running moments of a run cause.
        contnorm diagnose norm=bn
        # Compare two norms, and draw a figure.
        contnorm diagnose norm=bn --beside norm=cn --out diagnosis.svg
    """
    runs, root = execution.pop("runs"), execution.pop("data_root")
    names = [
        select_run(text, Store(runs), ()).records[0].hash if has_operator(text) and not Path(text).exists() else text
        for text in (run, other)
        if text is not None
    ]
    with collection_paused():
        options = bench.RunOptions(lanes=1, **{name: value for name, value in execution.items() if value is not None})
        second = names[1] if other is not None else None
        of_run = diagnosis.diagnose_run(names[0], seed=seed, other=second, runs=runs, root=root, options=options)
    show_run_diagnosis(of_run, out, console)


def show_run_diagnosis(of_run: RunDiagnosis, out: Path | None, console: Console) -> None:
    """Print the tables and the summary of a diagnosis, its comparison if there is one, and draw a figure to a file."""
    config = of_run.record.config
    digits = f" on {run_names(config)[0]}" if config.stream.source == DIGITS else ""
    seeds = f"seed{'' if len(of_run.by_seed) == 1 else 's'} {', '.join(map(str, sorted(of_run.by_seed)))}"
    print_lines([f"{config.hash} {seeds}{digits}", ""], console)
    console.print(f"{of_run.diagnosis.table()}\n", soft_wrap=True, markup=False, highlight=False)
    print_text(of_run.diagnosis.sentence, console)
    if of_run.comparison:
        console.print()
        print_text(of_run.comparison, console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        of_run.diagnosis.draw(out)
        print_lines([f"Figure written to {out}"], console)
