"""Which records are those of a recipe's cells: the ones of the same settings, however they were computed.

Precision is no part of what a table says, so runs in float32 and in TF32 both serve; one recipe takes as many as it can
from the same precision, since pairs are best made of runs that were computed alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from contnorm.comparison.measured import Measured, baseline_of
from contnorm.config import RunConfig
from contnorm.engine.settling import settle, source_of
from contnorm.recipes.grid import Cell, cells_of
from contnorm.recipes.recipe import Recipe
from contnorm.recipes.selection import Selection, find_selection
from contnorm.results import Record, Store

__all__ = ["Shelf", "Shelves", "measured_of"]

How = tuple[str, bool]  # precision, deterministic
Seeds = Mapping[int, Record]


class Shelf:
    """Records by the settings that decide what is learned.

    Example:
        >>> Shelf([]).find(RunConfig())
        {}
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_run: dict[str, dict[How, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for record in records:
            seeds = self._by_run[_run(record.config)][_how(record.config)]
            seeds.setdefault(record.seed, record)  # of the same run in two folders, the first

    def find(self, config: RunConfig) -> Mapping[How, Seeds]:
        """The records of a run, by how they were computed and by seed."""
        return self._by_run.get(_run(config), {})


class Shelves:
    """The records under some folders; those whose time counts lie in folders of their own.

    Attributes:
        records: All but those.
        timed: Those, by recipe, of the recipes that were asked for.
        problems: What is wrong with records that can't be read.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self.problems: list[str] = []
        self.timed: dict[str, list[Record]] = {}
        self.records = self._read(roots)
        self._shared = Shelf(self.records)

    def of(self, recipe: Recipe) -> Shelf:
        if not recipe.alone:
            return self._shared
        if recipe.name not in self.timed:
            self.timed[recipe.name] = self._read([root / recipe.name for root in self._roots])
        return Shelf(self.timed[recipe.name])

    def selection(self, recipe: Recipe) -> Selection | None:
        """The learning rates chosen for a recipe: of the first of the folders that has some, else of the package."""
        return find_selection(recipe.name, [root / "selected" / f"{recipe.name}.toml" for root in self._roots])

    def _read(self, folders: Sequence[Path]) -> list[Record]:
        found = [Store(folder).readable() for folder in folders]
        self.problems += [problem for one in found for problem in one.problems]
        return [record for one in found for record in one.records]


def measured_of(recipe: Recipe, shelf: Shelf) -> list[Measured]:
    """Every cell of a recipe with its records; none where it was not run."""
    cells = cells_of(recipe)
    runs = [shelf.find(settle(cell.values, source_of(cell))) for cell in cells]
    counted = Counter({how: sum(len(run[how]) for run in runs if how in run) for run in runs for how in run})
    order = [how for how, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
    records: dict[Cell, Seeds] = {cell: _first(run, order) for cell, run in zip(cells, runs, strict=True)}
    bases = {cell: baseline_of(cell, cells) for cell in cells}
    return [
        Measured(cell, found, None if (base := bases[cell]) is None else records[base])
        for cell, found in records.items()
    ]


def _first(run: Mapping[How, Seeds], order: Sequence[How]) -> Seeds:
    return next((dict(sorted(run[how].items())) for how in order if how in run), {})


def _how(config: RunConfig) -> How:
    return config.train.precision, config.train.deterministic


def _run(config: RunConfig) -> str:
    """What tells runs apart; weights by their name, since a recipe can't know what is in the file that it names."""
    usual = RunConfig().train
    train = replace(config.train, precision=usual.precision, deterministic=usual.deterministic)
    return replace(config, train=train, model=replace(config.model, weights_hash=None)).hash
