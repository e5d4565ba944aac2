"""The records of a recipe's cells: found by their settings in an index of the records of folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.record_sets import drop_finished
from contnorm.bench.records import DivergedRun, Record, Store, drop_duplicates, drop_inconsistent
from contnorm.bench.sequential import FIRST_SEED
from contnorm.bench.unfinished import unfinished_runs
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.measured import NUMERICS, MeasuredCell, Numerics, Seeds, measure_cells, numerics_of, with_numerics
from contnorm.paper.recipe import Recipe
from contnorm.paper.selection import Selection, find_selection

__all__ = ["RecordFolders", "RecordIndex", "cells_with_records"]

_Item = TypeVar("_Item")


class RecordIndex:
    """Index of records by all settings except the precision.

    Example:
        >>> RecordIndex([]).find(RunConfig())
        {}
    """

    def __init__(self, records: Iterable[Record], stores: Sequence[Store] = ()) -> None:
        self._stores = stores
        self._by_run: dict[str, dict[Numerics, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for one in records:
            seeds = self._by_run[_run_key(one.config)][numerics_of(one.config)]
            seeds.setdefault(one.seed, one)  # if two folders have the same run, the first one wins

    def find(self, config: RunConfig) -> Mapping[Numerics, Seeds]:
        """Records of a run, by precision and seed.

        A run that measures tasks ahead has the records of the same run without them if it has no others: the training
        is the same, and scores that need those tasks are missing or, as `fm_mammoth`, count them as zero.
        """
        found = self._by_run.get(_run_key(config))
        if found is None and config.evaluate.ahead:
            found = self._by_run.get(_run_key(replace(config, evaluate=replace(config.evaluate, ahead=False))))
        return {numerics: dict(sorted(seeds.items())) for numerics, seeds in (found or {}).items()}

    def diverged(self, config: RunConfig) -> Mapping[int, str]:
        """Diverged seeds of a run, and the reasons."""
        return {seed: why for store in reversed(self._stores) for seed, why in store.diverged_seeds(config).items()}


class RecordFolders:
    """The records under some folders. Timed runs are in a separate folder for each recipe.

    Attributes:
        roots: The folders.
        records: Records of all runs that are not timed.
        timed: Records of timed runs by recipe, for the recipes that `of` was called with.
        problems: Errors of records that can't be read.
        diverged: Diverged seeds by run hash, with the reasons; without those of timed runs.
        diverged_runs: The same runs, with their settings where these are known.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.problems: list[str] = []
        self.timed: dict[str, list[Record]] = {}
        self.diverged: dict[str, dict[int, str]] = {}
        self.diverged_runs: list[DivergedRun] = []
        self.records = self._read(roots, self.diverged)
        self._shared = RecordIndex(self.records, [Store(root) for root in roots])

    @property
    def unfinished(self) -> int:
        """Number of unfinished runs, running or stopped; without those of timed runs."""
        return sum(len(unfinished_runs(root)) for root in self.roots)

    def of(self, recipe: Recipe) -> RecordIndex:
        if not recipe.alone:
            return self._shared
        folders = [root / recipe.name for root in self.roots]
        if recipe.name not in self.timed:
            self.timed[recipe.name] = self._read(folders, {})
        return RecordIndex(self.timed[recipe.name], [Store(folder) for folder in folders])

    def selection(self, recipe: Recipe, *, refined: bool = False) -> Selection | None:
        """Learning rates chosen for a recipe: from the first folder that has some, otherwise from the package.

        ``refined`` prefers the package's selection from a refined grid, which fresh seeds use.
        """
        places = [root / "selected" / f"{recipe.name}.toml" for root in self.roots]
        return find_selection(recipe.name, places, refined=refined)

    def _read(self, folders: Sequence[Path], diverged: dict[str, dict[int, str]]) -> list[Record]:
        """Read all records; adds to ``diverged`` the diverged seeds that have a record in none of the folders."""
        contents = [Store(folder).load_all() for folder in folders]
        self.problems += [problem for content in contents for problem in content.problems]
        every = drop_duplicates([record for content in contents for record in content.records], self.problems)
        records = drop_inconsistent(every, self.problems)
        recorded = {(record.config.hash, record.seed) for record in records}
        if diverged is self.diverged:
            configs = {record.config.hash: record.config for record in records}
            runs = drop_finished([run for content in contents for run in content.diverged_runs], recorded)
            self.diverged_runs = [replace(run, config=run.config or configs.get(run.hash)) for run in runs]
        for run, notes in (item for content in contents for item in content.diverged.items()):
            unrecorded = {seed: why for seed, why in notes.items() if (run, seed) not in recorded}
            if unrecorded:
                diverged[run] = unrecorded | diverged.get(run, {})
        return records


def cells_with_records(recipe: Recipe, index: RecordIndex, *, fresh: bool = False) -> list[MeasuredCell]:
    """Every cell of a recipe with its records, which may be none.

    Args:
        recipe: The recipe.
        index: The records.
        fresh: Whether to use the fresh seeds, from 100 on, instead of the exploratory ones below.
    """
    configs = {cell: complete(cell.values, source_of(cell)) for cell in cells_of(recipe)}

    def find(config: RunConfig) -> dict[Numerics, Seeds]:
        return {numerics: _seeds(seeds, fresh) for numerics, seeds in index.find(config).items()}

    return measure_cells(configs, find, lambda config: _seeds(index.diverged(config), fresh))


def _seeds(by_seed: Mapping[int, _Item], fresh: bool) -> dict[int, _Item]:
    """The items of fresh or of exploratory seeds."""
    return {seed: item for seed, item in by_seed.items() if (seed >= FIRST_SEED) == fresh}


@lru_cache(maxsize=4096)
def _run_key(config: RunConfig) -> str:
    """Hash that identifies a run in any precision; ignores the hash of its weights, which a recipe does not have."""
    return with_numerics(replace(config, model=replace(config.model, weights_hash=None)), NUMERICS[0]).hash
