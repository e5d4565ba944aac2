"""Encoded claims are the paper's: its own numbers satisfy them, and none is there twice."""

from __future__ import annotations

from collections import Counter

import pytest

from contnorm.paper.cells import cells_of
from contnorm.paper.comparisons import CellComparison, comparisons_of, published_values
from contnorm.paper.recipe import Claim, Recipe, find_recipe, recipe_names

RECIPES = [recipe for name in recipe_names() if not (recipe := find_recipe(name)).ours]
CLAIMS = [(recipe, claim) for recipe in RECIPES for claim in recipe.claims]
UNPUBLISHED = {  # claims about curves, and about a stream that the paper does not have in the table
    "CN is over BN in ACC at the end",
    "the mean of the second layer stays where it is",
    "on Split CIFAR-100, too, the variants of CN forget more than CN (FM)",
}


def is_satisfied(recipe: Recipe, claim: Claim, comparison: CellComparison) -> bool | None:
    """Whether the published numbers of a comparison are as claimed; None without them."""
    numbers = published_values(recipe, claim, comparison)
    if not numbers:
        return None
    means = [number.mean or 0.0 for number in numbers]
    if claim.kind == "under":
        return means[0] < claim.limit
    if claim.kind == "near":
        return abs(means[0] - means[1]) <= claim.margin
    if claim.kind == "steadier":
        return (numbers[0].std or 0.0) < (numbers[1].std or 0.0)
    return means[0] > means[1]


@pytest.mark.parametrize(("recipe", "claim"), CLAIMS, ids=[f"{r.name}: {c.says}" for r, c in CLAIMS])
def test_published_numbers_satisfy_claim(recipe: Recipe, claim: Claim) -> None:
    cells = cells_of(recipe)
    outcomes = {one.label: is_satisfied(recipe, claim, one) for one in comparisons_of(claim, cells)}
    assert [label for label, satisfied in outcomes.items() if satisfied is False] == []
    assert (True in outcomes.values()) != (claim.says in UNPUBLISHED)


def test_claim_that_the_published_numbers_contradict_is_found() -> None:
    """On Split Tiny-ImageNet with a memory of 500, the paper has CN at 6.5 and BN at 6.7."""
    table = find_recipe("table4")
    claim = Claim("CN is over BN", "above", "acc", {"norm": "cn", "groups": 32}, ({"norm": "bn"},))
    outcomes = [is_satisfied(table, claim, one) for one in comparisons_of(claim, cells_of(table))]
    assert Counter(outcomes) == {True: 11, False: 1}


def test_no_claim_is_encoded_twice() -> None:
    """Neither with the same cells in two tables, nor as a case of another claim of the same table."""
    places = Counter(
        (claim.kind, claim.score, claim.than_score, tuple(sorted(one.label.replace("*", "\\*") for one in found)))
        for recipe, claim in CLAIMS
        if recipe.kind == "runs" and (found := list(comparisons_of(claim, cells_of(recipe))))
    )
    assert [place for place, count in places.items() if count > 1] == []
    run = [claim for recipe, claim in CLAIMS if recipe.name not in ("table5", "table6") and "COCOseq" not in claim.says]
    assert len(run) <= 27
