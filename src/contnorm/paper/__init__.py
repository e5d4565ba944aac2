"""The paper as data: recipes of runs for its tables and figures, and its published numbers.

`run_table` and `tune` execute runs and need torch; everything else does not.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

if TYPE_CHECKING:
    from contnorm.paper.claims import decide_claims
    from contnorm.paper.data_table import compare_data
    from contnorm.paper.lr_search import GridResult, TuneOptions, TuneResult, tune
    from contnorm.paper.published import PublishedComparison, compare_published
    from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
    from contnorm.paper.recipe_runs import TableError, TableInterrupted
    from contnorm.paper.run import RecipeStatus, TableOptions, TableResult, TableVariant, recipe_status, run_table
    from contnorm.paper.tables import lines_of


__all__ = [
    "GridResult",
    "PublishedComparison",
    "Recipe",
    "RecipeStatus",
    "TableError",
    "TableInterrupted",
    "TableOptions",
    "TableResult",
    "TableVariant",
    "TuneOptions",
    "TuneResult",
    "compare_data",
    "compare_published",
    "decide_claims",
    "find_recipe",
    "lines_of",
    "recipe_names",
    "recipe_status",
    "run_table",
    "tune",
]

_NAMES_BY_MODULE = {
    "contnorm.paper.claims": ("decide_claims",),
    "contnorm.paper.data_table": ("compare_data",),
    "contnorm.paper.lr_search": (
        "GridResult",
        "TuneOptions",
        "TuneResult",
        "tune",
    ),
    "contnorm.paper.published": (
        "PublishedComparison",
        "compare_published",
    ),
    "contnorm.paper.recipe": (
        "Recipe",
        "find_recipe",
        "recipe_names",
    ),
    "contnorm.paper.recipe_runs": (
        "TableError",
        "TableInterrupted",
    ),
    "contnorm.paper.run": (
        "RecipeStatus",
        "TableOptions",
        "TableResult",
        "TableVariant",
        "recipe_status",
        "run_table",
    ),
    "contnorm.paper.tables": ("lines_of",),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE, extra="bench")
