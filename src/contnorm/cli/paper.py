"""The `paper` command: runs the missing runs of a recipe and prints the results next to the published numbers.

`contnorm paper --list` lists the recipes, the data that each needs, and how many of its runs are done.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm import paper as api
from contnorm.bench.config.schema import field_of
from contnorm.bench.data.registry import ENVIRONMENT, data_root
from contnorm.bench.rng import check_seeds
from contnorm.bench.sequential import LAST_LOOK, MARGIN
from contnorm.cli.common import console, print_error, print_lines, print_text, show_rows
from contnorm.cli.options import run_options, takes_options
from contnorm.errors import UserError
from contnorm.paper.recipe import RUNS
from contnorm.paper.tables import forgetting_definitions
from contnorm.report.paper import Section, tables_of

if TYPE_CHECKING:
    from contnorm.paper import TableOptions, TableResult


@takes_options(
    "device", "lanes", "threads", "memory_moments", "data_root", "allow_missing", "runs", "devices", "launcher",
    "launcher_set",
)  # fmt: skip
def paper(
    execution: dict[str, Any],
    recipe: Annotated[
        str, typer.Argument(help="Recipe: table1 ... table14, figure1 ... figure3, panel, or a TOML file.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and how many runs of each are done.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, counted from 0; default: 5, as in the paper.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Restrict to matching cells, such as norm=cn or buffer=500; repeatable.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help=str(field_of("train.precision").description))] = None,
    max_steps: Annotated[int | None, typer.Option(help=str(field_of("train.max_steps").description))] = None,
    lr: Annotated[
        str, typer.Option(help="Learning rates: one (the recipe's), best (per norm, from `contnorm tune`) or both.")
    ] = "both",
    selected: Annotated[
        Path | None, typer.Option(help="File of learning rates written by `contnorm tune --out`.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe setting as key=value; disables the verdicts. Repeatable."),
    ] = None,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="Run fresh seeds, from 100 on, until each claim is decided."),
    ] = False,
    margin: Annotated[float, typer.Option(help="Largest difference in points that counts as equivalent.")] = MARGIN,
    max_seeds: Annotated[int, typer.Option(help="Limit of fresh seeds for --until-decided.")] = LAST_LOOK,
) -> None:
    """Reproduce a table or figure of the paper: run what is missing, compare with the published numbers.

    Examples:
        # List the tables and figures, and the data that they need.
        contnorm paper --list
        # Reproduce the rows of CN in Table 2, on a GPU. Needs the data set.
        contnorm paper table2 --only norm=cn --device cuda
    """
    check_seeds(RUNS if seeds is None else seeds)
    runs, root = execution["runs"], execution["data_root"]
    if list_ or not recipe:
        show_recipes(RUNS if seeds is None else seeds, root, runs, console, recipe)
        return
    options = run_options(execution)
    request = api.TableOptions(
        seeds, only or [], options, max_steps, precision, root, runs, lr, selected, set_ or [], until_decided, margin,
        max_seeds,
    )  # fmt: skip
    run_recipe(recipe, request, console)


def run_recipe(name: str, options: TableOptions, console: Console) -> None:
    """Run the missing runs of a recipe, and print the results next to the published ones."""
    recipe = api.find_recipe(name)
    print_text(f"{recipe.name}: {recipe.title}", console, "bold")
    if not recipe.runs:
        print_text(recipe.note, console)
        return
    try:
        result = api.run_table(recipe, options, console=console)
    except (UserError, bench.RunInterrupted):
        with suppress(UserError):  # nothing is recorded, or the options are wrong
            _show_result(api.read_table(recipe, options), options, console)
        raise
    _show_result(result, options, console)


def _show_result(result: TableResult, options: TableOptions, console: Console) -> None:
    for problem in result.problems:
        print_error(problem)
    if options.settings:
        print_lines([f"changed from the recipe: {' '.join(options.settings)}"], console)
    for line in result.notes:
        print_text(line, console)
    modified, section = result.modified, Section(result.recipe, result.variants, "")
    notes = [result.recipe.note, *forgetting_definitions(list(result.recipe.scores.values()))]
    if modified:
        what = "A smoke test, or changed settings: not comparable with the paper"
        notes.append(f"{what}, so there are no verdicts on its numbers.")
    if modified and options.until_decided:
        notes.append("The claims are decided for these runs, not for those of the recipe.")
    if options.only and any(variant.rule for variant in result.variants):
        notes.append("The claims are decided by all recorded cells, also those that --only leaves out.")
    for line in filter(None, notes):
        print_text(line, console)
    for variant in result.variants:
        if not variant.run:
            print_text(f"No run of this table is done ({variant.title.lower()}).", console)
            continue
        claims = not modified or options.until_decided
        for table in tables_of(section, variant, judged=not modified, claims=claims):
            console.print()
            print_text(table.title, console, "bold")
            if table.rows:
                show_rows(table.heads, table.rows, console, wrap_last=table.heads[-1] in ("verdict", "outcome"))
            for line in table.notes:
                print_text(line, console)
    for line in result.missing_data:
        print_error(line)


def show_recipes(seeds: int, folder: Path | None, runs: Path, console: Console, only: str = "") -> None:
    """Print one row per recipe: name and title, the data it needs and where that is, runs done and in total.

    Args:
        seeds: Number of seeds of each run.
        folder: Folder of data sets; None for the default one.
        runs: Folder of records.
        console: Terminal to print to.
        only: Name or file of a single recipe; empty for all of the paper's.
    """
    root = data_root(folder)
    print_lines([f"Data: {root} (set --data-root or {ENVIRONMENT} for another folder). Runs: {runs}."], console)
    recipes = api.recipe_status([only] if only else [], seeds=seeds, data=folder, runs=runs)
    rows = [(one.name, one.done, one.title, one.data) for one in recipes]
    show_rows(("recipe", "runs done", "title", "data"), rows, console, named=2, wrap_last=True)
