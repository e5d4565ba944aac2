"""The `power` command: seeds that a difference between two runs needs, from the spread of records. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contnorm.bench.power_analysis import DIFFERENCES, PowerTable, format_seeds
from contnorm.bench.power_analysis import power as power_table
from contnorm.bench.records import Store
from contnorm.bench.sequential import MARGIN, MAX_SEEDS
from contnorm.bench.stats import POWER
from contnorm.cli.common import RunsFolder, Where, console, is_explicit
from contnorm.cli.compare import TwoRuns, different_samples, select_run, split_sides
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_error, print_text, show_rows
from contnorm.errors import UserError

__all__ = ["power"]

HEADS = ("difference", "seeds, one test", "seeds, in stages")


@examples(
    Example("Show how many seeds a comparison of two norms needs.", "contnorm power norm=bn norm=cn"),
    Example(
        "The seeds for a difference of half a point, decided with nine other comparisons.",
        "contnorm power norm=bn norm=cn --difference 0.5 --cases 10",
    ),
)
def power(
    context: typer.Context,
    sides: TwoRuns,
    runs: RunsFolder = Path("runs"),
    where: Where = None,
    score: Annotated[str | None, typer.Option(help="Score, such as fm; default: acc.")] = None,
    difference: Annotated[
        list[float] | None, typer.Option(help="True difference in points; repeatable. Default: 0.25, 0.5, 1 and 2.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Largest difference in points that counts as equivalent.")] = MARGIN,
    cases: Annotated[int, typer.Option(help="Number of comparisons that are decided together.")] = 1,
    max_seeds: Annotated[int, typer.Option("--max-seeds", help="Largest number of seeds allowed.")] = MAX_SEEDS,
    probability: Annotated[float, typer.Option("--power", help="Probability of detecting the difference.")] = POWER,
) -> None:
    """Show how many seeds a difference between two runs needs, from the spread of recorded seeds."""
    root, first, second = split_sides("power", sides, runs, is_explicit(context, "runs"))
    store = Store(root)
    a, b = (select_run(text, store, where or ()) for text in (first, second))
    for problem in dict.fromkeys([*a.problems, *b.problems]):
        print_error(problem)
    different = different_samples(a.records, b.records)
    if different:
        raise UserError(f"A and B did not use the same samples ({different}), so their seeds are not pairs.")
    table = power_table(
        a.records,
        b.records,
        score,
        differences=difference or DIFFERENCES,
        margin=margin,
        cases=cases,
        max_seeds=max_seeds,
        power=probability,
    )
    _show(table)


def _show(table: PowerTable) -> None:
    print_text(table.summary, console)
    console.print()
    rows = [(f"{row.difference:g}", format_seeds(row.fixed), format_seeds(row.staged)) for row in table.rows]
    show_rows(HEADS, rows, console)
    console.print()
    level = f"{100 * table.alpha:g} %" + (f" over {table.cases} comparisons" if table.cases > 1 else "")
    print_text(
        f"Seeds with which the difference is detected with a probability of {100 * table.power:g} %, at an error rate "
        f"of {level}: by one paired t test at the end, or with looks at 16, 24, 32, ... and 128 seeds.",
        console,
    )
    print_text(f"Equivalence: {table.reach}.", console)
