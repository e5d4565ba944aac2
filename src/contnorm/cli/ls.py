"""The `ls` command: names, summaries and origins of what is available. Needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from contnorm import bench
from contnorm.bench.registries import Listing
from contnorm.cli.common import DataRoot, console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import safe_text
from contnorm.errors import unknown
from contnorm.paper.recipe import find_recipe, recipe_names

__all__ = ["ls"]

BUILT_IN = "contnorm"


@examples(
    Example("List the norms.", "contnorm ls norms"),
    Example("List all streams, with those of your own data sets.", "contnorm ls streams"),
)
def ls(
    what: Annotated[
        str,
        typer.Argument(
            help="Kind to list: norms, streams, strategies, memories, models, launchers or tables; default: all."
        ),
    ] = "",
    data_root: DataRoot = None,
) -> None:
    """List available norms, streams, strategies, memories, models, launchers and tables."""
    tables = {name: Listing(find_recipe(name).title, BUILT_IN) for name in recipe_names()}
    registries = {**bench.available(data_root), "tables": tables}
    if what and what not in registries:
        raise unknown("listing", what, registries)
    for name, rows in registries.items():
        if what in ("", name):
            console.print(_table(name, rows), "")


def _table(title: str, rows: dict[str, Listing]) -> Table:
    table = Table("name", "from", "what it is", title=title, title_justify="left", box=None, pad_edge=False)
    for name, row in rows.items():
        table.add_row(*map(safe_text, (name, row.origin, row.summary)))
    return table
