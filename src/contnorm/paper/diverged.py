"""Diverged runs of a table: they count for no number, and remarks report them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from contnorm.bench.config.schema import RunConfig
from contnorm.paper.precisions import HOWS, computed
from contnorm.paper.series import Measured

__all__ = ["lost_remarks", "lost_words", "with_lost"]

Notes = Callable[[RunConfig], Mapping[int, str]]


def with_lost(one: Measured, config: RunConfig, notes: Notes) -> Measured:
    """Add the diverged seeds of a cell.

    They are those of the precision of its records; if the cell has no records, those of any precision.
    """
    records = list(one.records.values())
    runs = [records[0].config] if records else [computed(config, how) for how in HOWS]
    diverged = {seed: reason for run in runs for seed, reason in notes(run).items() if seed not in one.records}
    return replace(one, lost=dict(sorted(diverged.items())))


def lost_remarks(measured: Sequence[Measured]) -> list[str]:
    """One remark per run with diverged seeds: the number of seeds and the reasons.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe_file import find_recipe
        >>> cell = next(iter(cells_of(find_recipe("table10"))))
        >>> lost_remarks([Measured(cell, {}, lost={1: "seed 1: the loss is nan at step 9 of 60 (task 2)."})])
        ['split-cifar100 single bn: the only seed was lost. seed 1: the loss is nan at step 9 of 60 (task 2).']
    """
    return list(
        dict.fromkeys(f"{one.cell.words}: {lost_words(one.lost, len(one.records))}" for one in measured if one.lost)
    )


def lost_words(notes: Mapping[int, str], through: int) -> str:
    """Describe how many seeds of a run diverged and why; ``through`` is the number of seeds that finished.

    Example:
        >>> lost_words({3: "seed 3: the loss is nan at step 9 of 60 (task 2)."}, through=4)
        '1 of 5 seeds was lost; the numbers are of the rest. seed 3: the loss is nan at step 9 of 60 (task 2).'
    """
    count = len(notes)
    if through:
        what = f"{count} of {count + through} seeds {'was' if count == 1 else 'were'} lost; the numbers are of the rest"
    else:
        what = {1: "the only seed was lost", 2: "both seeds were lost"}.get(count, f"all {count} seeds were lost")
    return " ".join(filter(None, [f"{what}.", *notes.values()]))
