"""The comparisons behind the claims of a recipe: which cells and scores each case of a claim compares."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from contnorm.paper.cells import RecipeCell, cells_of, comparable, matches
from contnorm.paper.published import PublishedNumber
from contnorm.paper.recipe import Claim, Recipe

__all__ = [
    "DETERMINISTIC",
    "CellComparison",
    "comparison_key",
    "comparisons_of",
    "count_comparisons",
    "published_values",
]

DETERMINISTIC = ("parameters",)  # scores that are equal for all seeds, so that they need no interval


class CellComparison(NamedTuple):
    """Cells that one case of a claim compares.

    Attributes:
        cell: The cell that the claim is about.
        partner: The cell it is compared with; None if it is compared with a bound or with another score of its own, or
            if the cells have none to compare with.
        than: Selector of the partner; None if it needs none.
    """

    cell: RecipeCell
    partner: RecipeCell | None = None
    than: Mapping[str, Any] | None = None

    @property
    def cells(self) -> tuple[RecipeCell, ...]:
        """The one or two cells."""
        return (self.cell,) if self.partner is None else (self.cell, self.partner)

    @property
    def stream(self) -> str:
        """Name of the stream, whose comparisons are a family."""
        return str(self.cell.place["stream"])

    @property
    def is_complete(self) -> bool:
        """Whether it lacks no partner."""
        return self.partner is not None or self.than is None

    @property
    def label(self) -> str:
        """Description of the cells."""
        if self.than is None:
            return self.cell.label
        other = " ".join(map(str, self.than.values())) if self.partner is None else self._partner_label(self.partner)
        return f"{self.cell.label} against {other}"

    def _partner_label(self, partner: RecipeCell) -> str:
        """The dimensions in which the partner differs, and its norm."""
        a, b = self.cell.place, partner.place
        keys = ("stream", "strategy", "forward", "buffer", "batch", "replay", "tasks", "labels")
        differing = [str(b[key]) for key in keys if a[key] != b[key]]
        return " ".join([*differing, *([] if differing and self.cell.norm == partner.norm else [partner.norm])])


def comparisons_of(claim: Claim, cells: Sequence[RecipeCell]) -> Iterator[CellComparison]:
    """All comparisons of a claim among some cells; one without its partner if no cell matches a selector.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> table9 = find_recipe("table9")
        >>> [one.label for one in comparisons_of(table9.claims[0], cells_of(table9))][0]
        'split-cifar100 er tasks 4 bn* against bn'
    """
    for cell in cells:
        if not matches(cell.place, claim.cells):
            continue
        if claim.kind in ("under", "flat") or claim.than_score:
            yield CellComparison(cell)
        for than in claim.than:
            partners = [partner for partner in cells if comparable(cell, partner, than)]
            yield from (CellComparison(cell, partner, than) for partner in partners)
            if not partners:
                yield CellComparison(cell, None, than)


def published_values(recipe: Recipe, claim: Claim, comparison: CellComparison) -> tuple[PublishedNumber, ...]:
    """Published numbers that a comparison is about, in the order of its cells; empty if one is not published.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> table9 = find_recipe("table9")
        >>> first = next(comparisons_of(table9.claims[0], cells_of(table9)))
        >>> [number.mean for number in published_values(table9, table9.claims[0], first)]
        [61.38, 60.14]
    """
    metrics = {score: metric for metric, score in recipe.scores.items()}
    of = [(cell, claim.score) for cell in comparison.cells]
    of += [(comparison.cell, claim.than_score)] if claim.than_score else []
    numbers = [cell.published.get(metrics.get(score or "", "")) for cell, score in of]
    found = tuple(number for number in numbers if number is not None and number.mean is not None)
    return found if len(found) == len(of) and comparison.is_complete else ()


def count_comparisons(recipe: Recipe, cells: Sequence[RecipeCell] | None = None) -> dict[str, int]:
    """Number of distinct comparisons of a recipe's claims on each stream, which share an error rate.

    A comparison is a pair of cells and a score. Claims that need the same interval share it; the change of a score over
    the tasks is a score of its own. Deterministic scores and spreads over seeds are not decided, and do not count.

    Args:
        recipe: The recipe.
        cells: The cells that are run; all by default.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> count_comparisons(find_recipe("table12"))
        {'split-cifar100': 5}
    """
    cells = cells_of(recipe) if cells is None else cells
    keys: dict[str, set[Hashable]] = {}
    for claim in recipe.claims:
        for one in comparisons_of(claim, cells):
            if claim.score not in DETERMINISTIC and claim.kind != "steadier" and one.is_complete:
                keys.setdefault(one.stream, set()).add(comparison_key(claim, one))
    return {stream: len(some) for stream, some in keys.items()}


def comparison_key(claim: Claim, comparison: CellComparison) -> Hashable:
    """Equal for comparisons of the same cells and scores, which share an interval."""
    statistic = "change" if claim.kind == "flat" else "mean"
    return frozenset(comparison.cells), statistic, frozenset({claim.score, claim.than_score or claim.score})
