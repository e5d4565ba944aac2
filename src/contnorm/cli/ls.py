"""The `ls` command: names and summaries of what is available. Needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from contnorm import bench
from contnorm.cli.common import console
from contnorm.cli.tables import safe_text
from contnorm.errors import unknown
from contnorm.paper.recipe import find_recipe, recipe_names

__all__ = ["ls"]


def ls(
    what: Annotated[
        str, typer.Argument(help="Kind to list: norms, streams, strategies, memories, models or tables; default: all.")
    ] = "",
) -> None:
    """List available norms, streams, strategies, memories, models and tables."""
    registries = {**bench.available(), "tables": {name: find_recipe(name).title for name in recipe_names()}}
    if what and what not in registries:
        raise unknown("listing", what, registries)
    for name, rows in registries.items():
        if what in ("", name):
            table = Table("name", "what it is", title=name, title_justify="left", box=None, pad_edge=False)
            for row in rows.items():
                table.add_row(*map(safe_text, row))
            console.print(table, "")
