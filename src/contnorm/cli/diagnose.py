"""The `diagnose` command: measures the cross-task normalization effect of a finished run or of a user's network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm import bench, diagnosis
from contnorm.bench.config.defaults import run_names
from contnorm.bench.config.sources import check_seed
from contnorm.bench.data.registry import DIGITS
from contnorm.bench.records import Store
from contnorm.bench.selection import has_operator
from contnorm.cli.common import (
    DEVICE_HELP,
    AllowMissing,
    DataRoot,
    RunsFolder,
    console,
    importing_torch,
    is_explicit,
)
from contnorm.cli.compare import select_run
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_text, safe_text
from contnorm.errors import UserError, usable

if TYPE_CHECKING:
    from contnorm.diagnosis import Diagnosis, RunDiagnosis

__all__ = ["diagnose", "show_diagnosis", "show_run_diagnosis"]

ENDINGS = (".svg", ".png", ".pdf")


@examples(
    Example("Measure how much forgetting the running moments of a run cause.", "contnorm diagnose norm=bn"),
    Example("Compare two norms, and draw a figure.", "contnorm diagnose norm=bn --beside norm=cn --out diagnosis.svg"),
)
def diagnose(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(help="Run made with --keep-weights: a selection (norm=cn), a path, or a prefix of its hash."),
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Seed to diagnose; default: all with weights.")] = None,
    model: Annotated[str | None, typer.Option(help="Network to diagnose instead of a run: file.py:make.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of --model: a safetensors file.")] = None,
    stream: Annotated[str | None, typer.Option(help="Stream of tasks for --model; see `contnorm ls streams`.")] = None,
    norm: Annotated[str, typer.Option(help="Norm passed to the function that --model names.")] = "bn",
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
    external = (model, weights, stream)
    if bool(run) == any(external) or (any(external) and not all(external)):
        raise UserError("diagnose: name a run, or for a network of your own use --model, --weights and --stream.")
    if seed is not None:
        check_seed(seed)
    if run and is_explicit(context, "norm"):
        raise UserError(f"--norm {norm}: is for a network of your own, with --model. A run's norm is in its record.")
    with importing_torch(device):
        options = bench.RunOptions(device, 1, threads, allow_missing=allow_missing)
    if out is not None and out.suffix not in ENDINGS:  # checked before the measurement, which takes long
        raise UserError(f"-o {out}: the name of a figure must end in {', '.join(ENDINGS)}.")
    if model and weights and stream:
        if other:
            raise UserError("--beside compares two runs. For a network of your own, use contnorm.diagnose in Python.")
        measured = diagnosis.diagnose_weights(
            model, weights, stream, norm=norm, seed=seed or 0, root=data_root, options=options
        )
        show_diagnosis(f"{weights} on {stream}", measured, "", out, console)
        return
    of_run = diagnosis.diagnose_run(
        _selected(run, runs),
        seed=seed,
        other=None if other is None else _selected(other, runs),
        runs=runs,
        root=data_root,
        options=options,
    )
    show_run_diagnosis(of_run, out, console)


def _selected(text: str, runs: Path) -> str:
    """Hash of the run that a selection such as ``norm=cn`` selects; a path or a hash is returned unchanged."""
    if not has_operator(text) or Path(text).exists():
        return text
    return select_run(text, Store(runs), ()).records[0].hash


def show_run_diagnosis(of_run: RunDiagnosis, out: Path | None, console: Console) -> None:
    """Print the diagnosis of a run, and its comparison with a second run if there is one."""
    config = of_run.record.config
    digits = f" on {run_names(config)[0]}" if config.stream.source == DIGITS else ""
    seeds = sorted(of_run.by_seed or [of_run.record.seed])
    title = f"{config.hash} seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}{digits}"
    show_diagnosis(title, of_run.diagnosis, of_run.comparison, out, console)


def show_diagnosis(title: str, measured: Diagnosis, comparison: str, out: Path | None, console: Console) -> None:
    """Print the table and the summary of a diagnosis, and draw a figure if there is a file for it."""
    console.print(safe_text(title), "", soft_wrap=True, sep="\n")
    console.print(f"{measured.table()}\n", soft_wrap=True, markup=False, highlight=False)
    print_text(measured.sentence, console)
    if comparison:
        console.print()
        print_text(comparison, console)
    if out is not None:
        with usable(out, "the figure can't be written", "Use -o for another file."):
            out.parent.mkdir(parents=True, exist_ok=True)
            measured.draw(out)
        console.print(safe_text(f"Figure written to {out}"), soft_wrap=True)
