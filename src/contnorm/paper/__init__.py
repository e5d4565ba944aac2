"""The paper as data: recipes of runs for its tables and figures, and its published numbers.

`run_table`, `read_table` and `tune` need torch; everything else does not. Public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
    from contnorm.paper.run import TableOptions, TableResult, TableVariant, read_table, recipe_status, run_table
    from contnorm.paper.tune import TuneOptions, TuneResult, tune

_NAMES = {
    "recipe": ("Recipe", "find_recipe", "recipe_names"),
    "run": ("TableOptions", "TableResult", "TableVariant", "read_table", "recipe_status", "run_table"),
    "tune": ("TuneOptions", "TuneResult", "tune"),
}
__all__ = [*_NAMES["recipe"], *_NAMES["run"], *_NAMES["tune"]]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"contnorm.paper.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
