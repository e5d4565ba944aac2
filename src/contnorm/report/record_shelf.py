"""Which records under some folders are those of a recipe's cells: the ones of the same settings, in any precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from contnorm.bench.config.defaults import settle
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Record, Store, distinct, fitting
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.diverged import with_lost
from contnorm.paper.precisions import HOWS, How, Seeds, computed, how_of, measured_cells
from contnorm.paper.recipe import Recipe
from contnorm.paper.selection import Selection, find_selection
from contnorm.paper.series import Measured

__all__ = ["Shelf", "Shelves", "measured_of"]


class Shelf:
    """Records by the settings that decide what is learned.

    Example:
        >>> Shelf([]).find(RunConfig())
        {}
    """

    def __init__(self, records: Iterable[Record], stores: Sequence[Store] = ()) -> None:
        self._stores = stores
        self._by_run: dict[str, dict[How, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for record in records:
            seeds = self._by_run[_run(record.config)][how_of(record.config)]
            seeds.setdefault(record.seed, record)  # of the same run in two folders, the first

    def find(self, config: RunConfig) -> Mapping[How, Seeds]:
        """The records of a run, by how they were computed and by seed."""
        return {how: dict(sorted(seeds.items())) for how, seeds in self._by_run.get(_run(config), {}).items()}

    def lost(self, config: RunConfig) -> Mapping[int, str]:
        """The seeds of a run that were lost, and how."""
        return {seed: why for store in reversed(self._stores) for seed, why in store.all_lost(config).items()}


class Shelves:
    """The records under some folders; those whose time counts lie in folders of their own.

    Attributes:
        records: All but those.
        timed: Those, by recipe, of the recipes that were asked for.
        problems: What is wrong with records that can't be read.
        lost: By the hash of a run, which of its seeds were lost, and how; but for those.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self.problems: list[str] = []
        self.timed: dict[str, list[Record]] = {}
        self.lost: dict[str, dict[int, str]] = {}
        self.records = self._read(roots, self.lost)
        self._shared = Shelf(self.records, [Store(root) for root in roots])

    def of(self, recipe: Recipe) -> Shelf:
        if not recipe.alone:
            return self._shared
        folders = [root / recipe.name for root in self._roots]
        if recipe.name not in self.timed:
            self.timed[recipe.name] = self._read(folders, {})
        return Shelf(self.timed[recipe.name], [Store(folder) for folder in folders])

    def selection(self, recipe: Recipe) -> Selection | None:
        """The learning rates chosen for a recipe: of the first of the folders that has some, else of the package."""
        return find_selection(recipe.name, [root / "selected" / f"{recipe.name}.toml" for root in self._roots])

    def _read(self, folders: Sequence[Path], lost: dict[str, dict[int, str]]) -> list[Record]:
        """The records, and among the ``lost`` the seeds that have one in none of the folders."""
        found = [Store(folder).readable() for folder in folders]
        self.problems += [problem for one in found for problem in one.problems]
        every = distinct([record for one in found for record in one.records], self.problems)
        records = fitting(every, self.problems)
        there = {(record.config.hash, record.seed) for record in records}
        for run, notes in (item for one in found for item in one.lost.items()):
            left = {seed: why for seed, why in notes.items() if (run, seed) not in there}
            if left:
                lost[run] = left | lost.get(run, {})
        return records


def measured_of(recipe: Recipe, shelf: Shelf) -> list[Measured]:
    """Every cell of a recipe with its records; none where it was not run."""
    configs = {cell: settle(cell.values, source_of(cell)) for cell in cells_of(recipe)}
    found = measured_cells(list(configs), [shelf.find(config) for config in configs.values()])
    return [with_lost(one, configs[one.cell], shelf.lost) for one in found]


@lru_cache(maxsize=4096)
def _run(config: RunConfig) -> str:
    """What tells runs apart; weights by their name, since a recipe can't know what is in the file that it names."""
    return computed(replace(config, model=replace(config.model, weights_hash=None)), HOWS[0]).hash
