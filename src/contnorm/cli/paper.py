"""The `paper` command: runs the missing runs of a recipe and prints the results next to the published numbers.

`contnorm paper --list` lists the recipes, the data that each needs, and how many of its runs are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from contnorm import bench
from contnorm import paper as api
from contnorm.bench.config.sources import check_seeds
from contnorm.bench.data.registry import ENVIRONMENT, data_root
from contnorm.bench.sequential import MARGIN, MAX_SEEDS
from contnorm.cli.common import (
    DEVICE_HELP,
    MAX_STEPS_HELP,
    PRECISION_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    Lanes,
    MemoryMoments,
    RunsFolder,
    console,
    importing_torch,
)
from contnorm.cli.examples import Example, examples
from contnorm.cli.options import Address, Devices, LauncherName, LauncherSettings, find_launcher
from contnorm.cli.paper_tables import show_claims, show_curves, show_table
from contnorm.cli.tables import needed_width, print_error, print_indented, print_text, safe_text
from contnorm.errors import UserError
from contnorm.paper.published import RUNS
from contnorm.paper.tables import named

if TYPE_CHECKING:
    from contnorm.paper import TableOptions, TableResult
    from contnorm.paper.selection import TableVariant

__all__ = ["paper", "run_recipe", "show_recipes"]

LEAST_DATA_WIDTH = 24  # minimum width of the data column of `--list`


@examples(
    Example("List the tables and figures, and the data that they need.", "contnorm paper --list"),
    Example(
        "Reproduce the rows of CN in Table 2, on a GPU.", "contnorm paper table2 --only norm=cn --device cuda", "data"
    ),
)
def paper(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: table1 ... table14, figure1 ... figure3, panel, or a TOML file.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and how many runs of each are done.")] = False,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds, counted from 0; default: 5, as in the paper.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Restrict to matching cells, such as norm=cn or buffer=500; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=THREADS_HELP)] = 1,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    max_steps: Annotated[int | None, typer.Option(help=MAX_STEPS_HELP)] = None,
    lr: Annotated[
        str, typer.Option(help="Learning rates: one (the recipe's), best (per norm, from `contnorm tune`) or both.")
    ] = "both",
    selected: Annotated[
        Path | None, typer.Option(help="File of learning rates written by `contnorm tune --out`.")
    ] = None,
    memory_moments: MemoryMoments = False,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe setting as key=value; disables the verdicts. Repeatable."),
    ] = None,
    devices: Devices = None,
    launcher: LauncherName = None,
    address: Address = None,
    launcher_set: LauncherSettings = None,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided", help="Add seeds from 100 on in stages, until each case of each claim is decided."
        ),
    ] = False,
    margin: Annotated[float, typer.Option(help="Largest difference in points that counts as equivalent.")] = MARGIN,
    max_seeds: Annotated[
        int | None,
        typer.Option(help=f"Most seeds that --until-decided adds; default: {MAX_SEEDS}.", show_default=False),
    ] = None,
) -> None:
    """Reproduce a table or figure of the paper: run what is missing, compare with the published numbers."""
    check_seeds(RUNS if seeds is None else seeds)
    if max_seeds is not None and not until_decided:
        raise UserError(f"--max-seeds {max_seeds}: is the limit of --until-decided. Add that option, or use --seeds.")
    with importing_torch(device, in_workers=bool(devices or launcher)):
        where = find_launcher(launcher, address, launcher_set)
        options = bench.RunOptions(
            device, lanes, threads, False, allow_missing, where, devices, memory_moments=memory_moments
        )
    if list_ or not recipe:
        show_recipes(RUNS if seeds is None else seeds, data_root, runs, console, recipe)
        return
    request = api.TableOptions(
        seeds, only or [], options, max_steps, precision, data_root, runs, lr, selected, set_ or [],
        until_decided, margin, MAX_SEEDS if max_seeds is None else max_seeds,
    )  # fmt: skip
    raise typer.Exit(run_recipe(recipe, request, console))


def run_recipe(name: str, options: TableOptions, console: Console) -> int:
    """Run the missing runs of a recipe, print the results next to the published ones, and return the exit code."""
    recipe = api.find_recipe(name)
    console.print(safe_text(f"{recipe.name}: {recipe.title}"), style="bold")
    if not recipe.runs:
        print_text(recipe.note, console)
        return 0
    try:
        result = api.run_table(recipe, options, console=console)
    except (UserError, bench.RunInterrupted) as error:
        with suppress(UserError):  # nothing is recorded, or the options are wrong
            _show_result(api.read_table(recipe, options), options, console)
        if isinstance(error, bench.RunInterrupted):
            return 128 + error.signal
        raise
    _show_result(result, options, console)
    return 0


def _show_result(result: TableResult, options: TableOptions, console: Console) -> None:
    for problem in result.problems:
        print_error(problem)
    if options.settings:
        console.print(safe_text(f"changed from the recipe: {' '.join(options.settings)}"), soft_wrap=True)
    for line in result.notes:
        print_text(line, console)
    for variant in result.variants:
        _show_variant(variant, console, result.modified, options)
    for line in result.missing_data:
        print_error(line)


def _show_variant(variant: TableVariant, console: Console, modified: bool, options: TableOptions) -> None:
    if variant.title:
        console.print()
        print_text(f"{variant.title}:", console, style="bold")
    if any(one.records for one in variant.cells):
        if variant.recipe.kind == "curves":
            show_curves(variant.recipe, variant.cells, console)
        else:
            show_table(variant.recipe, variant.cells, console, verdicts=not modified)
    if variant.unchosen:
        print_text(f"Left out: the {variant.unchosen} cells for which no learning rate was chosen.", console)
    if len(variant.missing) == len(variant.cells):
        console.print(safe_text("No run of this table is done."))
        return
    if variant.missing:
        print_text(f"Not run: {named(variant.missing)}.", console)
    if modified and not options.until_decided:
        return
    if modified:
        print_text("The claims are decided for these runs, not for those of the recipe.", console)
    if options.only and variant.rule is not None:
        print_text("The claims are decided by all recorded cells, also those that --only leaves out.", console)
    show_claims(variant.claims, console, complete=not (variant.missing or options.only))


def show_recipes(seeds: int, folder: Path | None, runs: Path, console: Console, only: str = "") -> None:
    """Print one line per recipe: name and title, the data it needs and where that is, runs done and in total.

    Args:
        seeds: Number of seeds of each run.
        folder: Folder of data sets; None for the default one.
        runs: Folder of records.
        console: Terminal to print to.
        only: Name or file of a single recipe; empty for all of the paper's.
    """
    root = data_root(folder)
    console.print(safe_text(f"Data: {root} (set --data-root or {ENVIRONMENT} for another folder). Runs: {runs}."))
    recipes = api.recipe_status([only] if only else [], seeds=seeds, data=folder, runs=runs)
    rows = [(one.name, one.done, one.title, one.data) for one in recipes]
    table = _table(rows, ("recipe", "runs done", "title"))
    if needed_width(table, console) + LEAST_DATA_WIDTH <= console.width:
        console.print(_table(rows, ("recipe", "runs done", "title", "data")))
        return
    for name, done, *rest in rows:
        console.print(safe_text(f"{name}  {done}"))
        for line in rest:
            print_indented(line, console)


def _table(rows: Sequence[tuple[str, ...]], heads: Sequence[str]) -> Table:
    """Table of the columns in ``heads``; only the data column may wrap."""
    table = Table(*(Column(head, no_wrap=head != "data") for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(safe_text, row[: len(heads)]))
    return table
