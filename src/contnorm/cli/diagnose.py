"""The `diagnose` command: measures the cross-task normalization effect of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm import bench, diagnosis
from contnorm.bench.config.defaults import run_names
from contnorm.bench.data.registry import DIGITS
from contnorm.bench.records import Store
from contnorm.bench.selection import has_operator
from contnorm.cli.common import DEVICE_HELP, AllowMissing, DataRoot, RunsFolder, console, importing_torch
from contnorm.cli.compare import select_run
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_text, safe_text

if TYPE_CHECKING:
    from contnorm.diagnosis import RunDiagnosis

__all__ = ["diagnose", "show_run_diagnosis"]


@examples(
    Example("Measure how much forgetting the running moments of a run cause.", "contnorm diagnose norm=bn"),
    Example("Compare two norms, and draw a figure.", "contnorm diagnose norm=bn --beside norm=cn --out diagnosis.svg"),
)
def diagnose(
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
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Measure the cross-task normalization effect: forgetting caused by the running moments alone."""
    with importing_torch(device):
        options = bench.RunOptions(device, 1, threads, allow_missing=allow_missing)
    first, second = (None if text is None else _selected(text, runs) for text in (run, other))
    assert first is not None
    of_run = diagnosis.diagnose_run(first, seed=seed, other=second, runs=runs, root=data_root, options=options)
    show_run_diagnosis(of_run, out, console)


def _selected(text: str, runs: Path) -> str:
    """Hash of the run that a selection such as ``norm=cn`` selects; a path or a hash is returned unchanged."""
    if not has_operator(text) or Path(text).exists():
        return text
    return select_run(text, Store(runs), ()).records[0].hash


def show_run_diagnosis(of_run: RunDiagnosis, out: Path | None, console: Console) -> None:
    """Print the tables and the summary of a diagnosis, its comparison if there is one, and draw a figure to a file."""
    config = of_run.record.config
    digits = f" on {run_names(config)[0]}" if config.stream.source == DIGITS else ""
    seeds = f"seed{'' if len(of_run.by_seed) == 1 else 's'} {', '.join(map(str, sorted(of_run.by_seed)))}"
    console.print(safe_text(f"{config.hash} {seeds}{digits}"), "", soft_wrap=True, sep="\n")
    console.print(f"{of_run.diagnosis.table()}\n", soft_wrap=True, markup=False, highlight=False)
    print_text(of_run.diagnosis.sentence, console)
    if of_run.comparison:
        console.print()
        print_text(of_run.comparison, console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        of_run.diagnosis.draw(out)
        console.print(safe_text(f"Figure written to {out}"), soft_wrap=True)
