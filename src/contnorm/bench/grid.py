"""The best of several settings, and the search along one numeric setting: extension at the edges, one refinement.

Nothing here runs an experiment, so a search can be tested with any function in place of one. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar, get_args

from contnorm.errors import UserError, unknown

Refine = Literal["between", "around"]
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
_MOST_DIGITS = 6  # significant digits of a value that a search adds


class Candidate(Protocol):
    """A setting that can be chosen."""

    @property
    def mean(self) -> float:
        """Mean score over its seeds."""

    @property
    def eligible(self) -> bool:
        """Whether all its seeds finished, and none diverged."""


_C = TypeVar("_C", bound=Candidate)


def best_candidate(candidates: Iterable[_C], order: Callable[[_C], Any], lower_is_better: bool = False) -> _C | None:
    """Return the candidate with the best mean; on ties, the first by ``order``. None if none is eligible.

    A candidate with a diverged or missing seed, or without a mean, is never chosen.

    Example:
        >>> from types import SimpleNamespace as Trial
        >>> trials = [Trial(lr=lr, mean=mean, eligible=lr < 1) for lr, mean in ((0.1, 61.0), (0.03, 61.0), (3, 70.0))]
        >>> best_candidate(trials, order=lambda trial: trial.lr).lr
        0.03
    """
    sign = 1 if lower_is_better else -1
    eligible = [candidate for candidate in candidates if candidate.eligible and not math.isnan(candidate.mean)]
    return min(eligible, key=lambda candidate: (sign * candidate.mean, order(candidate)), default=None)


class LineSearch:
    """A search for the best value of one positive setting.

    It tries the given values. While the best one is the smallest or the largest tried, it tries the next value beyond,
    at the ratio of the grid; if no value is usable, smaller ones. Then it tries values between the best one and its
    neighbors, once.

    Call `propose` for the values to try, and `record` with the score of each, until nothing is proposed.

    Args:
        values: Values of the grid, at least two, above 0.
        extensions: Largest number of values beyond the grid.
        refine: ``"between"`` for the geometric mean of the best value and the better one of its neighbors;
            ``"around"`` for those of the best value and each neighbor; None for no refinement.
        lower_is_better: Whether the best score is the lowest.
        name: Name of the setting, for error messages.

    Attributes:
        extended: Number of values beyond the grid so far.

    Example:
        >>> search = LineSearch([0.003, 0.01, 0.03])
        >>> while values := search.propose():
        ...     for value in values:
        ...         search.record(value, -abs(value - 0.17))  # the score of a run
        >>> search.tried, search.best
        ([0.003, 0.01, 0.03, 0.1, 0.2, 0.3], 0.2)
    """

    def __init__(
        self,
        values: Iterable[float],
        *,
        extensions: int = 3,
        refine: Refine | None = "between",
        lower_is_better: bool = False,
        name: str = "values",
    ) -> None:
        self._grid = sorted(set(values))
        shown = ",".join(f"{value:g}" for value in self._grid)
        if not self._grid or not 0 < self._grid[0] <= self._grid[-1] < math.inf:
            raise UserError(f"{name}={shown}: use numbers above 0, such as 0.01,0.03,0.1.")
        if len(self._grid) < 2 and (extensions or refine):
            raise UserError(f"{name}={shown}: a search needs two or more values. Add one.")
        if refine not in (None, *get_args(Refine)):
            raise unknown("refinement", str(refine), [*get_args(Refine), "none"])
        self._extensions, self._refine = extensions, refine
        self._sign = 1 if lower_is_better else -1
        self._whole = all(isinstance(value, int) for value in self._grid)
        self._scores: dict[float, float] = {}  # infinite for a value that can't be chosen; the lowest is the best
        self._refined = refine is None
        self.extended = 0

    @property
    def tried(self) -> list[float]:
        """All values that have a score or diverged, in order."""
        return sorted(self._scores)

    def record(self, value: float, score: float | None) -> None:
        """Record the score of a value; None if it can't be chosen, because a run diverged."""
        self._scores[value] = math.inf if score is None or math.isnan(score) else self._sign * score

    @property
    def best(self) -> float | None:
        """Value with the best score; on ties, the smallest. None if no value has a score."""
        best = min(self._scores, key=lambda value: (self._scores[value], value), default=None)
        return best if best is not None and self._scores[best] < math.inf else None

    @property
    def at_edge(self) -> bool:
        """Whether the best value is the smallest or the largest that was tried, and no value between is as good."""
        best, tried = self.best, self.tried
        if best is None or len(tried) < 2:
            return False
        return all(value in (tried[0], tried[-1]) for value in tried if self._scores[value] == self._scores[best])

    def propose(self) -> list[float]:
        """Return the values to try next; empty at the end."""
        if missing := [value for value in self._grid if value not in self._scores]:
            return missing
        best, tried = self.best, self.tried
        may_extend = self.extended < self._extensions and not (self._refined and self._refine)
        if may_extend and (best is None or self.at_edge):
            beyond = next_value(tried if best == tried[-1] else tried[::-1], self._whole)
            if beyond is not None:
                self.extended += 1
                return [beyond]
        if self._refined or best is None:
            return []
        self._refined = True
        place = tried.index(best)
        neighbors = [tried[i] for i in (place - 1, place + 1) if 0 <= i < len(tried)]
        if self._refine == "between":
            neighbors = [min(neighbors, key=lambda value: (self._scores[value], value))]
        middles = [midpoint(best, neighbor, self._whole) for neighbor in neighbors]
        return sorted(value for value in middles if value is not None)


def next_value(values: Sequence[float], whole: bool = False) -> float | None:
    """Return the value that continues a sequence of values at its ratio, rounded to few digits.

    The ratio is that of the last value to the second before it, taken from the value between. A sequence such as
    0.003, 0.01, 0.03, whose steps alternate, is thus continued with 0.1.

    Args:
        values: At least two values, ascending or descending.
        whole: Whether the values are whole numbers.

    Returns:
        The value; None if rounding gives none beyond the last.

    Example:
        >>> next_value([0.003, 0.01, 0.03]), next_value([0.03, 0.01, 0.003]), next_value([0.1, 0.2]), next_value([2, 1])
        (0.1, 0.001, 0.4, 0.5)
        >>> next_value([10, 20, 40], whole=True), next_value([2, 1], whole=True)
        (80, None)
    """
    last, before = values[-1], values[-2]
    exact = last * last / before if len(values) == 2 else before * last / values[-3]
    if not 0 < exact < math.inf:
        return None
    if whole:
        rounded = round(exact)
        return rounded if rounded > 0 and (rounded - last) * (last - before) > 0 else None
    return _rounded(exact, 0.11, lambda value: (value - last) * (last - before) > 0)


def midpoint(a: float, b: float, whole: bool = False) -> float | None:
    """Return the geometric mean of two values, with as few digits as keep it between them.

    Example:
        >>> midpoint(0.01, 0.03), midpoint(0.1, 0.03), midpoint(0.02, 0.03), midpoint(10, 20, whole=True)
        (0.02, 0.05, 0.024, 14)
        >>> midpoint(1, 2, whole=True) is None
        True
    """
    exact, (low, high) = math.sqrt(a) * math.sqrt(b), sorted((a, b))
    if whole:
        return round(exact) if low < round(exact) < high else None
    return _rounded(exact, 0.2, lambda value: low < value < high)


def _rounded(exact: float, tolerance: float, fits: Callable[[float], bool]) -> float | None:
    """Round to as few significant digits as fit and change the value by no more than the tolerance, as a share."""
    for digits in range(1, _MOST_DIGITS + 1):
        value = float(f"{exact:.{digits}g}")
        if fits(value) and abs(value / exact - 1) <= tolerance:
            return value
    return None
