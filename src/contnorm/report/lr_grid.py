"""Rows of the learning rates tried on the validation tasks, with the chosen rate marked."""

from __future__ import annotations

import math

from contnorm.paper.selection import RateResult, Selection

__all__ = ["GRID_NOTE", "grid_rows"]

GRID_NOTE = (
    "Mean ACC on the validation tasks, which the table leaves out, over seeds; the chosen one in brackets: the "
    "highest, and of several the smallest learning rate. One that lost a seed, because its loss was no longer finite, "
    "does not count, whatever the others have: it would fail in the table too. A dash was not tried."
)


def grid_rows(selection: Selection) -> list[list[str]]:
    """Headings and rows: one row per chosen learning rate, one column per rate that was tried.

    Example:
        >>> from contnorm.paper.selection import SelectedRate
        >>> grid = (RateResult(0.03, 61.0, 1.5, 3), RateResult(0.1, 64.0, 1.0, 3), RateResult(0.3, 66.0, 2.0, 2, 1))
        >>> for row in grid_rows(Selection("x", (SelectedRate({"norm": "cn", "momentum": "own"}, 0.1, "fp32", grid),))):
        ...     print(row)
        ['of', 'precision', 'lr 0.03', 'lr 0.1', 'lr 0.3']
        ['cn', 'fp32', '61.00 +- 1.50', '[64.00 +- 1.00]', '66.00 +- 2.00, 1 lost']
    """
    rates = sorted({tried.lr for one in selection.rates for tried in one.grid})
    rows = [["of", "precision", *(f"lr {rate:g}" for rate in rates)]]
    for one in selection.rates:
        by_rate = {tried.lr: _words(tried, tried.lr == one.lr) for tried in one.grid}
        what = " ".join(str(value) for value in one.where.values() if value != "own")
        rows.append([what, one.precision, *(by_rate.get(rate, "-") for rate in rates)])
    return rows


def _words(tried: RateResult, chosen: bool) -> str:
    words = [] if math.isnan(tried.mean) else [f"{tried.mean:.2f}"]
    words += [] if math.isnan(tried.sd) else [f"+- {tried.sd:.2f}"]
    diverged = [f"{tried.diverged} lost"] if tried.diverged else []
    text = ", ".join([*([" ".join(words)] if words else []), *diverged]) or "-"
    return f"[{text}]" if chosen else text
