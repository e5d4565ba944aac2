"""Choose which precision of a run counts in a table when it was recorded in several, with remarks on the choice.

Precision is not a dimension of a table, so runs in float32 and in TF32 are both accepted. One cell never mixes them,
and a table uses the same precision for as many cells as possible, since paired runs should be computed the same way.
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
HOWS: tuple[How, ...] = tuple(product(PRECISIONS, (True, False)))  # most precise first


def how_of(config: RunConfig) -> How:
    return config.train.precision, config.train.deterministic


def computed(config: RunConfig, how: How) -> RunConfig:
    """Settings of the same run in another precision.

    Example:
        >>> computed(RunConfig(), ("tf32", True)).train.precision
        'tf32'
    """
    precision, deterministic = how
    return replace(config, train=replace(config.train, precision=precision, deterministic=deterministic))  # type: ignore[arg-type]


def how_words(how: How) -> str:
    """Format a precision for messages.

    Example:
        >>> how_words(("tf32", True)), how_words(("fp32", False))
        ('tf32', 'fp32, not deterministic')
    """
    return how[0] if how[1] else f"{how[0]}, not deterministic"


def taken(runs: Sequence[Mapping[How, Sized]]) -> list[How | None]:
    """Precision that counts for each run of a table: the one with the most records in the table; None without records.

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
    """Cells with the records of the precision that counts; empty if a cell was not run.

    The baseline for training times has the same precision, since precision alone changes the speed.
    """
    by_cell = dict(zip(cells, runs, strict=True))
    return [_measured(cell, by_cell, how) for cell, how in zip(cells, taken(runs), strict=True)]


def _measured(cell: Cell, runs: Mapping[Cell, Mapping[How, Seeds]], how: How | None) -> Measured:
    if how is None:
        return Measured(cell, {})
    base = baseline_of(cell, list(runs))
    records = runs[cell][how]
    left_out = {how_words(other): len(seeds) for other, seeds in runs[cell].items() if other != how and seeds}
    return Measured(cell, records, None if base is None else runs[base].get(how, {}), left_out)


def precision_remarks(measured: Sequence[Measured]) -> list[str]:
    """Remarks on cells that are not in the precision of the recipe, and on records that do not count."""
    with_records = [one for one in measured if one.records]
    deviating: dict[tuple[How, How], list[Measured]] = {}
    for one in with_records:
        how, expected = how_of(next(iter(one.records.values())).config), _recipe_precision(one.cell)
        if how != expected:
            deviating.setdefault((how, expected), []).append(one)
    lines = [
        f"In {how_words(how)}, where the recipe has {how_words(expected)}: "
        f"{'all that is run' if len(cells) == len(with_records) else _names(cells)}."
        for (how, expected), cells in deviating.items()
    ]
    return lines + [
        f"{_names([one])}: {_counted(one.left_out)} not counted, since a mean is of one precision and most of what is "
        f"there is in {how_words(how_of(next(iter(one.records.values())).config))}."
        for one in with_records
        if one.left_out
    ]


def _recipe_precision(cell: Cell) -> How:
    train, defaults = cell.values.get("train", {}), TrainConfig()
    return train.get("precision", defaults.precision), train.get("deterministic", defaults.deterministic)


def _names(measured: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(one.cell.words for one in measured))


def _counted(left_out: Mapping[str, int]) -> str:
    seeds = " and ".join(f"{count} seed{'s' if count > 1 else ''} in {how}" for how, count in left_out.items())
    return f"{seeds} {'is' if sum(left_out.values()) == 1 else 'are'}"
