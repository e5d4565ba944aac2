"""The `paper` command: runs the missing runs of a recipe and prints the results next to the published numbers.

`contnorm paper --list` lists the recipes, the data that each needs, and how many of its runs are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm import paper as api
from contnorm.bench.config.schema import check_seeds, field_of
from contnorm.bench.data.registry import ENVIRONMENT, data_root
from contnorm.bench.sequential import MARGIN, MAX_SEEDS
from contnorm.cli.common import console, print_error, print_lines, print_text, show_rows
from contnorm.cli.options import run_options, takes_options
from contnorm.errors import UserError
from contnorm.paper.cells import MeasuredCell
from contnorm.paper.claims import ClaimCase, ClaimResult, Evidence
from contnorm.paper.published import RUNS
from contnorm.paper.recipe import Recipe, score_title
from contnorm.paper.selection import TableVariant
from contnorm.paper.tables import (
    case_numbers,
    case_outcome_text,
    claim_title,
    forgetting_definitions,
    lines_of,
    named,
    no_interval_reason,
    not_run_text,
    paper_number,
    spread,
    table_remarks,
    verdict_text,
)

if TYPE_CHECKING:
    from contnorm.paper import TableOptions, TableResult

SHOWN = (
    "stream",
    "strategy",
    "buffer",
    "forward",
    "batch",
    "replay",
    "tasks",
    "setting",
    "labels",
)  # dimensions that have a column


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
    max_seeds: Annotated[int, typer.Option(help="Limit of fresh seeds for --until-decided.")] = MAX_SEEDS,
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
    raise typer.Exit(run_recipe(recipe, request, console))


def run_recipe(name: str, options: TableOptions, console: Console) -> int:
    """Run the missing runs of a recipe, print the results next to the published ones, and return the exit code."""
    recipe = api.find_recipe(name)
    print_text(f"{recipe.name}: {recipe.title}", console, "bold")
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
        print_lines([f"changed from the recipe: {' '.join(options.settings)}"], console)
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
        print_text("No run of this table is done.", console)
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


def show_table(recipe: Recipe, measured: Sequence[MeasuredCell], console: Console, verdicts: bool = True) -> None:
    """Print one row per score of a cell with records.

    Args:
        recipe: Recipe of the table.
        measured: All cells of the table.
        console: Terminal to print to.
        verdicts: False for runs that are not comparable with the paper's, such as smoke tests.
    """
    lines = [line for one in measured if one.records for line in lines_of(recipe, one)]
    shown = _dimensions(recipe, measured)
    heads = [*shown, "norm", "score", "seeds", "ours", "paper"]
    heads += ["difference", "95 % interval", "verdict"] if verdicts else []
    rows = []
    for line in lines:
        cells = [*_place(line.measured, shown), score_title(line.score), str(len(line.values)), spread(line.values)]
        cells.append(paper_number(line.published))
        rows.append(cells + (list(verdict_text(line.comparison)) if verdicts else []))
    show_rows(heads, rows, console, named=len(shown) + 1)
    console.print()
    notes = [*forgetting_definitions(list(recipe.scores.values())), *([recipe.note] if recipe.note else [])]
    notes += table_remarks(recipe, measured, lines if verdicts else [])
    if not verdicts:
        what = "A smoke test, or changed settings: not comparable with the paper"
        notes.append(f"{what}, so there are no verdicts on its numbers.")
    for text in notes:
        print_text(text, console)


def _dimensions(recipe: Recipe, measured: Sequence[MeasuredCell]) -> list[str]:
    """Columns that name a cell: stream, strategy, dimensions with values, and the learning rate if it varies."""
    recorded = [one for one in measured if one.records]
    places = [one.cell.place for one in recorded]
    shown = [key for key in SHOWN if key in ("stream", "strategy") or any(p[key] is not None for p in places)]
    selected = any("lr" in selected.settings.get("train", {}) for selected in recipe.selected)
    return [*shown, "lr"] if selected or len({_rate(one) for one in recorded}) > 1 else shown


def _rate(one: MeasuredCell) -> float | None:
    return next((record.config.train.lr for record in one.records.values()), None)


def _place(one: MeasuredCell, shown: Sequence[str]) -> list[str]:
    place = {**one.cell.place, "lr": _rate(one)}
    return [*("all" if place[key] is None else str(place[key]) for key in shown), one.cell.norm]


def show_curves(recipe: Recipe, measured: Sequence[MeasuredCell], console: Console) -> None:
    """Print one row per score of a cell: the mean over seeds after each task."""
    shown = _dimensions(recipe, measured)
    rows = []
    for one in measured:
        for score in recipe.scores.values():
            curves = list(one.curves(score).values())
            if curves:
                means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=False)]
                rows.append([*_place(one, shown), score_title(score), str(len(curves)), *means])
    tasks = max((len(row) for row in rows), default=0) - len(shown) - 3
    heads = [*shown, "norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    show_rows(heads, rows, console, named=len(shown) + 2)
    console.print()
    for text in [*([recipe.note] if recipe.note else []), *table_remarks(recipe, measured, [])]:
        print_text(text, console)


def show_claims(results: Sequence[ClaimResult], console: Console, *, complete: bool = True) -> None:
    """Print each claim with its outcome and evidence, case by case; ``complete`` is False if some cells are not run."""
    for result in results:
        console.print()
        print_text(claim_title(result, complete=complete), console)
        for case in result.cases:
            print_text(f"  {case.what}: {_case_text(case, result.evidence)}", console)
        if not result.cases:
            print_text("  none of its cells has a record", console)
        elif result.not_run:
            print_text(f"  {not_run_text(result)}", console)


def _case_text(case: ClaimCase, evidence: Evidence) -> str:
    mean, interval = case_numbers(case)
    first = f"{mean}, " if case.paired else ""
    if case.interval is None:
        return f"{first}{no_interval_reason(case)}: {case_outcome_text(case)}"
    kind = "" if case.is_ratio else "interval " if evidence == "staged" else "95 % interval "
    return f"{first}{kind}{interval}, {case.seeds} seeds: {case_outcome_text(case)}"
