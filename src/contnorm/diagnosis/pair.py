"""Compare how much re-estimated statistics recover in two networks, in one sentence. It does not import torch.

The two networks should differ only in their norm, so that the norm causes the difference. There is one pair per seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from contnorm.bench.stats.paired import summed_up

if TYPE_CHECKING:
    from contnorm.diagnosis.result import Diagnosis

__all__ = ["gain", "pair_sentence"]

SEEN = 0.05  # points; smaller values are printed as 0.0


def pair_sentence(pairs: Sequence[tuple[Diagnosis, Diagnosis]], here: str, there: str) -> str:
    """Describe how much less is recovered in the second network than in the first.

    Args:
        pairs: Diagnoses of two networks on the same tasks, one pair per seed.
        here: Name of the first network.
        there: Name of the second network.

    Example:
        >>> from contnorm.diagnosis.result import Diagnosis
        >>> def make_diagnosis(running, oracle):
        ...     exact, learned = (oracle, 90.0), (95.0, 90.0)
        ...     return Diagnosis("Net", ("0", "1"), (), (running, 90.0), exact, exact, learned, held_out=True)
        >>> pair_sentence([(make_diagnosis(75.0, 78.0), make_diagnosis(83.0, 83.5))], "bn", "cn32")
        'With cn32 re-estimated statistics recover 0.5 of the 12.0 points forgotten, with bn 3.0 of 20.0: 2.5 less.'
    """
    for first, second in pairs:
        _check(first, second)
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    unforgotten = [_unforgotten(diagnoses) for diagnoses in (firsts, seconds)]
    if any(unforgotten) and not all(unforgotten):
        named = ((here, firsts), (there, seconds))
        return (
            f"{_one_forgot_nothing(*sorted(named, key=lambda entry: not _unforgotten(entry[1])))}{_over(len(pairs))}."
        )
    less = [first.recovered - second.recovered for first, second in pairs]
    unit = " points of accuracy" if all(unforgotten) or _forgotten(firsts) is None else " points forgotten"
    text = f"Nothing was forgotten, neither with {there} nor with {here}; with" if all(unforgotten) else "With"
    text += f" {there} re-estimated statistics recover {_recovered(seconds, unit)}, with {here} "
    text += f"{_recovered(firsts, unit, again=True)}: {_difference(fmean(less))}{_over(len(pairs))}"
    interval = summed_up(less).t
    return f"{text}." if interval is None else f"{text}; the 95 % interval of what is less is {interval}."


def gain(points: float) -> str:
    """Describe the effect of re-estimated statistics on accuracy.

    Example:
        >>> gain(2.0), gain(-1.5), gain(0.01)
        ('recover 2.0 points of accuracy', 'cost 1.5 points of accuracy', 'leave the accuracy as it is')
    """
    if abs(points) < SEEN:
        return "leave the accuracy as it is"
    return f"recover {points:.1f} points of accuracy" if points > 0 else f"cost {-points:.1f} points of accuracy"


def _one_forgot_nothing(unforgotten: tuple[str, Sequence[Diagnosis]], other: tuple[str, Sequence[Diagnosis]]) -> str:
    """Sentence for one network that forgot nothing, for which no recovered share is defined."""
    effect = gain(fmean(diagnosis.recovered for diagnosis in unforgotten[1]))
    recovered = _recovered(other[1], " points forgotten")
    return (
        f"With {unforgotten[0]} nothing was forgotten, and re-estimated statistics {effect}; with {other[0]} "
        f"they recover {recovered}"
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


def _unforgotten(diagnoses: Sequence[Diagnosis]) -> bool:
    forgotten = _forgotten(diagnoses)
    return forgotten is not None and forgotten < SEEN


def _forgotten(diagnoses: Sequence[Diagnosis]) -> float | None:
    """Mean of the forgotten points; None if unknown."""
    known = [diagnosis.forgotten for diagnosis in diagnoses if diagnosis.forgotten is not None]
    return fmean(known) if known else None


def _recovered(diagnoses: Sequence[Diagnosis], unit: str, again: bool = False) -> str:
    """Recovered points, or recovered of forgotten points; ``again`` omits the unit, which was stated before."""
    points = fmean(diagnosis.recovered for diagnosis in diagnoses)
    if unit != " points forgotten":
        return f"{points:.1f}{'' if again else unit}"
    return f"{points:.1f} of {'' if again else 'the '}{_forgotten(diagnoses):.1f}{'' if again else unit}"


def _difference(less: float) -> str:
    if abs(less) < SEEN:
        return "as much"
    return f"{abs(less):.1f} {'less' if less > 0 else 'more'}"
