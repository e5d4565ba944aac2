"""The paper as data: recipes of runs for its tables and figures, and its published numbers.

`run_table`, `read_table` and `tune` need torch; everything else does not. Public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.paper.lr_search import TuneOptions, TuneResult, tune
    from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
    from contnorm.paper.run import TableOptions, TableResult, read_table, recipe_status, run_table

__all__ = [
    "Recipe", "TableOptions", "TableResult", "TuneOptions", "TuneResult", "find_recipe", "read_table",
    "recipe_names", "recipe_status", "run_table", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"Recipe": "recipe", "find_recipe": "recipe", "recipe_names": "recipe"}.get(name)
    module = module or ("lr_search" if name.lower().startswith("tune") else "run")
    return getattr(import_module(f"contnorm.paper.{module}"), name)


def __dir__() -> list[str]:
    return __all__
