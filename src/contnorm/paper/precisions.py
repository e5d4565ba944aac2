"""Records of one run in several precisions: which count in a table, and what a reader is told of it.

Precision is no part of what a table says, so runs in float32 and in TF32 both serve. One cell never mixes them, and a
table takes as many as it can from the same precision, since pairs are best made of runs that were computed alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from itertools import product

from contnorm.bench.config.schema import PRECISIONS, RunConfig, TrainConfig
from contnorm.bench.records import Record
from contnorm.paper.cells import Cell
from contnorm.paper.series import Measured, baseline_of

__all__ = ["HOWS", "How", "Seeds", "computed", "how_of", "how_words", "measured_cells", "precision_remarks", "taken"]

How = tuple[str, bool]  # precision, deterministic
Seeds = Mapping[int, Record]
HOWS: tuple[How, ...] = tuple(product(PRECISIONS, (True, False)))  # the more exact first


def how_of(config: RunConfig) -> How:
    return config.train.precision, config.train.deterministic


def computed(config: RunConfig, how: How) -> RunConfig:
    """The same run in another precision.

    Example:
        >>> computed(RunConfig(), ("tf32", True)).train.precision
        'tf32'
    """
    precision, deterministic = how
    return replace(config, train=replace(config.train, precision=precision, deterministic=deterministic))  # type: ignore[arg-type]


def how_words(how: How) -> str:
    """As it is told.

    Example:
        >>> how_words(("tf32", True)), how_words(("fp32", False))
        ('tf32', 'fp32, not deterministic')
    """
    return how[0] if how[1] else f"{how[0]}, not deterministic"


def taken(runs: Sequence[Mapping[How, Sized]]) -> list[How | None]:
    """For each run of a table which of its precisions counts: the one most of the table has; None where it has none.

    Example:
        >>> tf32, fp32 = ("tf32", True), ("fp32", True)
        >>> taken([{tf32: {0, 1, 2}}, {tf32: {0, 1, 2}, fp32: {0, 1, 2, 3}}, {fp32: {0}}, {}])
        [('tf32', True), ('tf32', True), ('fp32', True), None]
    """
    counted: Counter[How] = Counter()
    for run in runs:
        counted.update({how: len(seeds) for how, seeds in run.items()})
    order = sorted(counted, key=lambda how: (-counted[how], HOWS.index(how)))
    return [next((how for how in order if run.get(how)), None) for run in runs]


def measured_cells(cells: Sequence[Cell], runs: Sequence[Mapping[How, Seeds]]) -> list[Measured]:
    """Every cell with those of its run's records that count; none where it was not run.

    The run beside which its time is set is of the same precision: another would be faster or slower by that alone.
    """
    by_cell = dict(zip(cells, runs, strict=True))
    return [_measured(cell, by_cell, how) for cell, how in zip(cells, taken(runs), strict=True)]


def _measured(cell: Cell, runs: Mapping[Cell, Mapping[How, Seeds]], how: How | None) -> Measured:
    if how is None:
        return Measured(cell, {})
    base = baseline_of(cell, list(runs))
    records = runs[cell][how]
    left = {how_words(other): len(seeds) for other, seeds in runs[cell].items() if other != how and seeds}
    return Measured(cell, records, None if base is None else runs[base].get(how, {}), left)


def precision_remarks(measured: Sequence[Measured]) -> list[str]:
    """Which cells are not in the precision of the recipe, and which of their records are left out."""
    there = [one for one in measured if one.records]
    apart: dict[tuple[How, How], list[Measured]] = {}
    for one in there:
        how, said = how_of(next(iter(one.records.values())).config), _recipes(one.cell)
        if how != said:
            apart.setdefault((how, said), []).append(one)
    told = [
        f"In {how_words(how)}, where the recipe has {how_words(said)}: "
        f"{'all that is run' if len(some) == len(there) else _names(some)}."
        for (how, said), some in apart.items()
    ]
    return told + [
        f"{_names([one])}: {_counted(one.left_out)} not counted, since a mean is of one precision and most of what is "
        f"there is in {how_words(how_of(next(iter(one.records.values())).config))}."
        for one in there
        if one.left_out
    ]


def _recipes(cell: Cell) -> How:
    train, usual = cell.values.get("train", {}), TrainConfig()
    return train.get("precision", usual.precision), train.get("deterministic", usual.deterministic)


def _names(some: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(one.cell.words for one in some))


def _counted(left: Mapping[str, int]) -> str:
    seeds = " and ".join(f"{count} seed{'s' if count > 1 else ''} in {how}" for how, count in left.items())
    return f"{seeds} {'is' if sum(left.values()) == 1 else 'are'}"
