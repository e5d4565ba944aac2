"""The learning rates tried on the validation tasks, as rows: for each choice the whole grid, the winner marked."""

from __future__ import annotations

import math

from contnorm.paper.selection import Selection, Tried

__all__ = ["GRID_NOTE", "grid_rows"]

GRID_NOTE = (
    "Mean ACC on the validation tasks, which the table leaves out, over seeds; the chosen one in brackets: the "
    "highest, and of several the smallest learning rate. One that lost a seed, because its loss was no longer finite, "
    "does not count, whatever the others have: it would fail in the table too. A dash was not tried."
)


def grid_rows(selection: Selection) -> list[list[str]]:
    """Heads and rows of what was tried: a row for each choice, a column for each learning rate.

    Example:
        >>> from contnorm.paper.selection import Chosen
        >>> grid = (Tried(0.03, 61.0, 1.5, 3), Tried(0.1, 64.0, 1.0, 3), Tried(0.3, 66.0, 2.0, 2, lost=1))
        >>> for row in grid_rows(Selection("x", (Chosen({"norm": "cn", "momentum": "own"}, 0.1, "fp32", grid),))):
        ...     print(row)
        ['of', 'precision', 'lr 0.03', 'lr 0.1', 'lr 0.3']
        ['cn', 'fp32', '61.00 +- 1.50', '[64.00 +- 1.00]', '66.00 +- 2.00, 1 lost']
    """
    rates = sorted({tried.lr for one in selection.chosen for tried in one.grid})
    rows = [["of", "precision", *(f"lr {rate:g}" for rate in rates)]]
    for one in selection.chosen:
        found = {tried.lr: _words(tried, tried.lr == one.lr) for tried in one.grid}
        what = " ".join(str(value) for value in one.where.values() if value != "own")
        rows.append([what, one.precision, *(found.get(rate, "-") for rate in rates)])
    return rows


def _words(tried: Tried, chosen: bool) -> str:
    words = [] if math.isnan(tried.mean) else [f"{tried.mean:.2f}"]
    words += [] if math.isnan(tried.sd) else [f"+- {tried.sd:.2f}"]
    lost = [f"{tried.lost} lost"] if tried.lost else []
    said = ", ".join([*([" ".join(words)] if words else []), *lost]) or "-"
    return f"[{said}]" if chosen else said
