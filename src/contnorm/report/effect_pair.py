"""Two networks beside each other: how much re-estimated statistics recover in each, in one sentence; no torch.

The two should differ in their norm alone, so that what is different comes of it; pairs are of one seed each.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from contnorm.comparison.pairs import summed_up

if TYPE_CHECKING:
    from contnorm.report.effect import Diagnosis

__all__ = ["pair_sentence"]

SEEN = 0.05  # points: less is printed as 0.0


def pair_sentence(pairs: Sequence[tuple[Diagnosis, Diagnosis]], here: str, there: str) -> str:
    """What is recovered in the second of each pair, less than in the first.

    Args:
        pairs: Diagnoses of two networks on the same tasks, a pair a seed.
        here: What the first of each is called.
        there: What the second is.

    Example:
        >>> from contnorm.report.effect import Diagnosis
        >>> def found(running, oracle):
        ...     exact, learned = (oracle, 90.0), (95.0, 90.0)
        ...     return Diagnosis("Net", ("0", "1"), (), (running, 90.0), exact, exact, learned, held_out=True)
        >>> pair_sentence([(found(75.0, 78.0), found(83.0, 83.5))], "bn", "cn32")
        'With cn32 re-estimated statistics recover 0.5 of the 12.0 points forgotten, with bn 3.0 of 20.0: 2.5 less.'
    """
    for first, second in pairs:
        _check(first, second)
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    if _unforgotten(firsts) or _unforgotten(seconds):
        over = "" if len(pairs) == 1 else f", over {len(pairs)} seeds"
        return f"{_of_nothing((there, seconds), (here, firsts))}{over}."
    less = [first.recovered - second.recovered for first, second in pairs]
    said = f"With {there} re-estimated statistics recover {_recovered(seconds, ' points forgotten')}, with {here} "
    said += f"{_recovered(firsts)}: {_difference(fmean(less))}"
    if len(pairs) == 1:
        return f"{said}."
    interval = summed_up(less).t
    between = "" if interval is None else f"; the 95 % interval of what is less is {interval}"
    return f"{said}, over {len(pairs)} seeds{between}."


def _check(first: Diagnosis, second: Diagnosis) -> None:
    if first.tasks != second.tasks:
        raise ValueError(
            f"beside: the one was diagnosed on the tasks {', '.join(first.tasks)} and the other on "
            f"{', '.join(second.tasks)}. Give both the same."
        )
    if (first.learned is None) != (second.learned is None):
        raise ValueError(
            "beside: what was forgotten is known of one of the two alone. Give learned= for both, or none."
        )


def _of_nothing(*sides: tuple[str, Sequence[Diagnosis]]) -> str:
    """Where there is nothing to recover in one of two, or in both: no part of nothing is spoken of."""
    whole = [name for name, found in sides if _unforgotten(found)]
    if len(whole) == 1:
        ((other, found),) = [side for side in sides if not _unforgotten(side[1])]
        said = f"With {whole[0]} nothing was forgotten, so there is nothing to recover; with {other} re-estimated"
        return f"{said} statistics recover {_recovered(found, ' points forgotten')}"
    said = f"Nothing was forgotten, neither with {whole[0]} nor with {whole[1]}, so there is nothing to recover;"
    points = [(fmean(one.recovered for one in found), name) for name, found in sides]
    if all(abs(value) < SEEN for value, _ in points):
        return f"{said} re-estimated statistics leave the accuracy as it is"
    moved = " and ".join(f"{value:+.1f} with {name}" for value, name in points)
    return f"{said} re-estimated statistics change the accuracy by {moved}"


def _unforgotten(found: Sequence[Diagnosis]) -> bool:
    forgotten = _forgotten(found)
    return forgotten is not None and forgotten < SEEN


def _forgotten(found: Sequence[Diagnosis]) -> float | None:
    """On average; None where it is not known."""
    known = [one.forgotten for one in found if one.forgotten is not None]
    return fmean(known) if known else None


def _recovered(found: Sequence[Diagnosis], unit: str = "") -> str:
    points, forgotten = fmean(one.recovered for one in found), _forgotten(found)
    if forgotten is None:
        return f"{points:.1f}{' points of accuracy' if unit else ''}"
    the = "the " if unit else ""
    return f"{points:.1f} of {the}{forgotten:.1f}{unit}"


def _difference(less: float) -> str:
    if abs(less) < SEEN:
        return "as much"
    return f"{abs(less):.1f} {'less' if less > 0 else 'more'}"
