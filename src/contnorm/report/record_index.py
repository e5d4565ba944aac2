"""Index of the records under some folders; finds those of a recipe's cells by their settings, in any precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Record, Store, drop_duplicates, drop_inconsistent
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.measured import NUMERICS, MeasuredCell, Numerics, Seeds, measure_cells, numerics_of, with_numerics
from contnorm.paper.recipe import Recipe
from contnorm.paper.selection import Selection, find_selection

__all__ = ["RecordFolders", "RecordIndex", "cells_with_records"]


class RecordIndex:
    """Index of records by all settings except the precision.

    Example:
        >>> RecordIndex([]).find(RunConfig())
        {}
    """

    def __init__(self, records: Iterable[Record], stores: Sequence[Store] = ()) -> None:
        self._stores = stores
        self._by_run: dict[str, dict[Numerics, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for record in records:
            seeds = self._by_run[_run(record.config)][numerics_of(record.config)]
            seeds.setdefault(record.seed, record)  # if two folders have the same run, the first one wins

    def find(self, config: RunConfig) -> Mapping[Numerics, Seeds]:
        """Records of a run, by precision and seed."""
        return {numerics: dict(sorted(seeds.items())) for numerics, seeds in self._by_run.get(_run(config), {}).items()}

    def diverged(self, config: RunConfig) -> Mapping[int, str]:
        """Diverged seeds of a run, and the reasons."""
        return {seed: why for store in reversed(self._stores) for seed, why in store.diverged_seeds(config).items()}


class RecordFolders:
    """The records under some folders. Timed runs are in a separate folder for each recipe.

    Attributes:
        records: Records of all runs that are not timed.
        timed: Records of timed runs by recipe, for the recipes that `of` was called with.
        problems: Errors of records that can't be read.
        diverged: Diverged seeds by run hash, with the reasons; without those of timed runs.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self.problems: list[str] = []
        self.timed: dict[str, list[Record]] = {}
        self.diverged: dict[str, dict[int, str]] = {}
        self.records = self._read(roots, self.diverged)
        self._shared = RecordIndex(self.records, [Store(root) for root in roots])

    def of(self, recipe: Recipe) -> RecordIndex:
        if not recipe.alone:
            return self._shared
        folders = [root / recipe.name for root in self._roots]
        if recipe.name not in self.timed:
            self.timed[recipe.name] = self._read(folders, {})
        return RecordIndex(self.timed[recipe.name], [Store(folder) for folder in folders])

    def selection(self, recipe: Recipe) -> Selection | None:
        """Learning rates chosen for a recipe: from the first folder that has some, otherwise from the package."""
        return find_selection(recipe.name, [root / "selected" / f"{recipe.name}.toml" for root in self._roots])

    def _read(self, folders: Sequence[Path], diverged: dict[str, dict[int, str]]) -> list[Record]:
        """Read all records; adds to ``diverged`` the diverged seeds that have a record in none of the folders."""
        contents = [Store(folder).load_all() for folder in folders]
        self.problems += [problem for content in contents for problem in content.problems]
        every = drop_duplicates([record for content in contents for record in content.records], self.problems)
        records = drop_inconsistent(every, self.problems)
        recorded = {(record.config.hash, record.seed) for record in records}
        for run, notes in (item for content in contents for item in content.diverged.items()):
            unrecorded = {seed: why for seed, why in notes.items() if (run, seed) not in recorded}
            if unrecorded:
                diverged[run] = unrecorded | diverged.get(run, {})
        return records


def cells_with_records(recipe: Recipe, index: RecordIndex) -> list[MeasuredCell]:
    """Every cell of a recipe with its records, which may be none."""
    configs = {cell: complete(cell.values, source_of(cell)) for cell in cells_of(recipe)}
    return measure_cells(configs, index.find, index.diverged)


@lru_cache(maxsize=4096)
def _run(config: RunConfig) -> str:
    """Hash that identifies a run in any precision; ignores the hash of its weights, which a recipe does not have."""
    return with_numerics(replace(config, model=replace(config.model, weights_hash=None)), NUMERICS[0]).hash
