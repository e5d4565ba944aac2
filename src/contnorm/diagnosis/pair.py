"""Two networks beside each other: how much re-estimated statistics recover in each, in one sentence; no torch.

The two should differ in their norm alone, so that what is different comes of it; pairs are of one seed each.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from contnorm.bench.stats.paired import summed_up

if TYPE_CHECKING:
    from contnorm.diagnosis.result import Diagnosis

__all__ = ["gain", "pair_sentence"]

SEEN = 0.05  # points: less is printed as 0.0


def pair_sentence(pairs: Sequence[tuple[Diagnosis, Diagnosis]], here: str, there: str) -> str:
    """What is recovered in the second of each pair, less than in the first.

    Args:
        pairs: Diagnoses of two networks on the same tasks, a pair a seed.
        here: What the first of each is called.
        there: What the second is.

    Example:
        >>> from contnorm.diagnosis.result import Diagnosis
        >>> def found(running, oracle):
        ...     exact, learned = (oracle, 90.0), (95.0, 90.0)
        ...     return Diagnosis("Net", ("0", "1"), (), (running, 90.0), exact, exact, learned, held_out=True)
        >>> pair_sentence([(found(75.0, 78.0), found(83.0, 83.5))], "bn", "cn32")
        'With cn32 re-estimated statistics recover 0.5 of the 12.0 points forgotten, with bn 3.0 of 20.0: 2.5 less.'
    """
    for first, second in pairs:
        _check(first, second)
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    kept = [_unforgotten(some) for some in (firsts, seconds)]
    if any(kept) and not all(kept):
        named = ((here, firsts), (there, seconds))
        return f"{_one_forgot_nothing(*sorted(named, key=lambda one: not _unforgotten(one[1])))}{_over(len(pairs))}."
    less = [first.recovered - second.recovered for first, second in pairs]
    unit = " points of accuracy" if all(kept) or _forgotten(firsts) is None else " points forgotten"
    said = f"Nothing was forgotten, neither with {there} nor with {here}; with" if all(kept) else "With"
    said += f" {there} re-estimated statistics recover {_recovered(seconds, unit)}, with {here} "
    said += f"{_recovered(firsts, unit, again=True)}: {_difference(fmean(less))}{_over(len(pairs))}"
    interval = summed_up(less).t
    return f"{said}." if interval is None else f"{said}; the 95 % interval of what is less is {interval}."


def gain(points: float) -> str:
    """What re-estimated statistics do to the accuracy.

    Example:
        >>> gain(2.0), gain(-1.5), gain(0.01)
        ('recover 2.0 points of accuracy', 'cost 1.5 points of accuracy', 'leave the accuracy as it is')
    """
    if abs(points) < SEEN:
        return "leave the accuracy as it is"
    return f"recover {points:.1f} points of accuracy" if points > 0 else f"cost {-points:.1f} points of accuracy"


def _one_forgot_nothing(kept: tuple[str, Sequence[Diagnosis]], other: tuple[str, Sequence[Diagnosis]]) -> str:
    """No part of nothing is spoken of."""
    moved = gain(fmean(one.recovered for one in kept[1]))
    recovered = _recovered(other[1], " points forgotten")
    return (
        f"With {kept[0]} nothing was forgotten, and re-estimated statistics {moved}; with {other[0]} they recover "
        f"{recovered}"
    )


def _over(seeds: int) -> str:
    return "" if seeds == 1 else f", over {seeds} seeds"


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


def _unforgotten(found: Sequence[Diagnosis]) -> bool:
    forgotten = _forgotten(found)
    return forgotten is not None and forgotten < SEEN


def _forgotten(found: Sequence[Diagnosis]) -> float | None:
    """On average; None where it is not known."""
    known = [one.forgotten for one in found if one.forgotten is not None]
    return fmean(known) if known else None


def _recovered(found: Sequence[Diagnosis], unit: str, again: bool = False) -> str:
    """In points, or of those forgotten; ``again`` leaves out what was said before."""
    points = fmean(one.recovered for one in found)
    if unit != " points forgotten":
        return f"{points:.1f}{'' if again else unit}"
    return f"{points:.1f} of {'' if again else 'the '}{_forgotten(found):.1f}{'' if again else unit}"


def _difference(less: float) -> str:
    if abs(less) < SEEN:
        return "as much"
    return f"{abs(less):.1f} {'less' if less > 0 else 'more'}"
