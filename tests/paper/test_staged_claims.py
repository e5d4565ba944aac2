"""Claims decided by fresh seeds, on records made by hand: families, outcomes, intervals, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import make_record
from contnorm.bench.sequential import FIRST_SEED, decide_differences, nominal_levels
from contnorm.paper.cells import RecipeCell
from contnorm.paper.claims import ClaimResult, StagedRule, decide_claims, decide_several
from contnorm.paper.comparisons import count_comparisons
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Claim, find_recipe, parse_recipe

RULE = StagedRule()
ABOVE = Claim("cn over bn", "above", "acc", {"norm": "cn"}, ({"norm": "bn"},))
TOTAL = 1_000_000


def decide_staged(claim: Claim, cells: Sequence[MeasuredCell], rule: StagedRule = RULE) -> ClaimResult:
    (result,) = decide_several([claim], cells, rule)
    return result


def cell(norm: str, values: Sequence[float], diverged: Mapping[int, str] | None = None, **place: Any) -> MeasuredCell:
    """A cell whose fresh seeds have the given ACC, in percent; NaN for seeds without a record."""
    names = {**dict.fromkeys(DIMENSIONS), "stream": "s", "strategy": "er", "moments": "running", "norm": norm, **place}
    records = {}
    for seed, value in enumerate(values, FIRST_SEED):
        if value == value:
            correct = round(value / 100 * TOTAL)
            matrix = {"correct": [[correct, None], [correct, correct]], "total": [TOTAL, TOTAL]}
            records[seed] = make_record(RunConfig(), seed, {"matrix": matrix, "parameters": 100})
    return MeasuredCell(RecipeCell(names, {}, VIEWS["plain"]), records, diverged=diverged or {})


def noise(seeds: int, spread: float, mean: float = 0.0, stream: int = 0) -> np.ndarray[Any, Any]:
    """Values whose mean and standard deviation are exactly those given."""
    values = np.random.default_rng([seeds, stream]).standard_normal(seeds)
    return mean + spread * (values - values.mean()) / values.std(ddof=1)


def against_bn(*differences: np.ndarray[Any, Any]) -> list[MeasuredCell]:
    """BN with an ACC of 60, and CN with the given differences; a pair of cells for each, told apart by the memory."""
    cells = []
    for buffer, difference in enumerate(differences, 1):
        cells.append(cell("bn", [60.0] * len(difference), buffer=buffer))
        cells.append(cell("cn", list(60.0 + difference), buffer=buffer))
    return cells


HIGHER, LOWER = noise(16, 0.5, 3.0), noise(16, 0.5, -3.0)
SLIGHTLY_HIGHER = noise(64, 0.3, 0.4)
EQUAL, OPEN = noise(16, 0.2, 0.02), noise(16, 4.0, 1.0)


@pytest.mark.parametrize(
    ("cases", "outcome"),
    [
        ([HIGHER, HIGHER], "holds"),
        ([HIGHER, SLIGHTLY_HIGHER], "holds"),
        ([HIGHER, LOWER], "does not hold"),
        ([LOWER, OPEN], "does not hold"),
        ([HIGHER, OPEN], "undecided"),
        ([EQUAL, OPEN], "undecided"),
        ([HIGHER, EQUAL], "holds in part"),
        ([EQUAL, EQUAL], "equivalent"),
        ([EQUAL, LOWER], "does not hold"),
    ],
)
def test_outcome_of_a_claim_from_its_cases(cases: list[np.ndarray[Any, Any]], outcome: str) -> None:
    result = decide_staged(ABOVE, against_bn(*cases))
    assert result.outcome == outcome and result.evidence == "staged"
    assert [case.seeds for case in result.cases] == [len(case) for case in cases]


def test_score_without_a_value_is_not_divergence() -> None:
    """Forgetting is undefined after one task: the seeds were run, none of them diverged, and none can be compared."""
    counts = {"matrix": {"correct": [[600_000]], "total": [TOTAL]}}
    cells = [cell(norm, [60.0] * 16) for norm in ("cn", "bn")]
    cells = [replace(one, records={s: make_record(RunConfig(), s, counts) for s in one.records}) for one in cells]
    (case,) = decide_staged(replace(ABOVE, score="fm"), cells).cases
    assert (case.outcome, case.seeds, case.note) == ("undecided", 0, "fm has no value in these runs")


def test_verdict_names_a_difference_within_the_margin() -> None:
    (case,) = decide_staged(ABOVE, against_bn(SLIGHTLY_HIGHER)).cases
    assert (case.outcome, case.verdict, case.seeds) == ("holds", "higher, within the margin", 64)


def test_interval_is_that_of_a_family_on_one_stream() -> None:
    """Three cases with a look and none decided: intervals of the first 16 and of all 24 seeds at alpha / 3."""
    differences = noise(24, 4.0, 0.8)
    cells = [*against_bn(differences, OPEN, OPEN), cell("cn", [61.0] * 3, buffer=9), cell("bn", [60.0] * 3, buffer=9)]
    cells += [cell("cn", list(60 + HIGHER), stream="other"), cell("bn", [60.0] * 16, stream="other")]
    first, *_, few, other = decide_staged(ABOVE, cells).cases
    intervals = []
    for count, level in zip((16, 24), nominal_levels((16, 24), 0.05 / 3), strict=True):
        part = differences[:count]
        half = stats.t.ppf(1 - level / 2, count - 1) * part.std(ddof=1) / np.sqrt(count)
        intervals.append((part.mean() - half, part.mean() + half))
    expected = max(low for low, _ in intervals), min(high for _, high in intervals)
    assert first.interval == pytest.approx(expected, abs=1e-3) and few.interval is None
    assert other.interval == decide_differences(list(HIGHER)).interval or other.outcome == "holds"


def test_decided_signs_lend_their_error_rate() -> None:
    """Holm's procedure, and that of Benjamini and Hochberg for a table of our own."""
    half = decide_differences(noise(16, 1.0).tolist(), cases=2).interval.high  # type: ignore[union-attr]
    nearly = noise(16, 1.0, 0.97 * half)
    assert decide_staged(ABOVE, against_bn(nearly, OPEN)).cases[0].outcome == "undecided"
    assert decide_staged(ABOVE, against_bn(nearly, HIGHER)).cases[0].outcome == "holds"
    pair = against_bn(nearly, nearly)
    assert [one.outcome for one in decide_staged(ABOVE, pair).cases] == ["undecided"] * 2
    assert [one.outcome for one in decide_staged(ABOVE, pair, StagedRule(exploratory=True)).cases] == ["holds"] * 2


def test_incomplete_look_is_not_used() -> None:
    differences = noise(24, 0.5, 3.0)
    differences[20] = np.nan  # neither recorded nor diverged
    (case,) = decide_staged(ABOVE, against_bn(differences)).cases
    assert case.seeds == 16 and case.outcome == "holds"
    (first,) = decide_staged(ABOVE, against_bn(noise(5, 0.1, 3.0))).cases
    assert (first.outcome, first.seeds, first.interval) == ("undecided", 5, None)
    assert first.note == "5 of the 16 seeds of the first look"


def test_diverged_seed_is_a_missing_pair() -> None:
    values = noise(16, 0.5, 63.0)
    values[3] = np.nan
    cells = [cell("bn", [60.0] * 16), cell("cn", list(values), diverged={103: "seed 103: the loss is nan."})]
    (case,) = decide_staged(ABOVE, cells).cases
    assert (case.outcome, case.seeds, case.note) == ("holds", 15, "1 of 16 seeds diverged")


def test_undecided_case_says_how_many_seeds_it_needs() -> None:
    values = against_bn(noise(16, 1.6, 0.1))
    (case,) = decide_staged(ABOVE, values).cases
    needed = int(re.findall(r"would need about (\d+) seeds", case.note)[0])
    halves = [
        stats.t.ppf(1 - nominal_levels(tuple(range(16, n + 1, 8)))[-1] / 2, n - 1) * 1.6 / np.sqrt(n)
        for n in (needed - 8, needed)
    ]
    assert halves[0] > 0.9 > halves[1] and case.outcome == "undecided" and "limit" not in case.note
    limited = decide_staged(ABOVE, values, StagedRule(max_seeds=16)).cases[0]
    assert f"would need about {needed} seeds" in limited.note and "more than the limit of 16" in limited.note


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [(noise(16, 0.2, 0.1), "holds"), (noise(16, 0.2, 3.0), "does not hold"), (noise(16, 2.0, 0.5), "undecided")],
)
def test_near_uses_the_margin_of_the_claim(differences: np.ndarray[Any, Any], outcome: str) -> None:
    near = Claim("", "near", "acc", {"norm": "cn"}, ({"norm": "bn"},), margin=0.5)
    assert decide_staged(near, against_bn(differences)).outcome == outcome


def test_under_uses_its_limit() -> None:
    under = Claim("", "under", "acc", {"norm": "cn"}, limit=61.0)
    for mean, outcome in ((60.0, "holds"), (62.0, "does not hold"), (61.0, "undecided")):
        assert decide_staged(under, [cell("cn", list(noise(16, 0.2, mean)))]).outcome == outcome


def test_deterministic_score_needs_no_look() -> None:
    same = Claim("", "near", "parameters", {"norm": "cn"}, ({"norm": "bn"},))
    assert decide_staged(same, [cell("cn", [60.0] * 3), cell("bn", [60.0] * 3)]).outcome == "holds"


def test_cases_without_runs_are_listed_and_do_not_count() -> None:
    cells = [*against_bn(HIGHER), cell("bn", [], stream="absent"), cell("cn", [], stream="absent")]
    result = decide_staged(ABOVE, cells)
    assert result.outcome == "holds" and result.not_run == ("absent er cn against bn",)
    half = decide_staged(ABOVE, [cell("cn", [60.0] * 16), cell("bn", [])])
    assert half.outcome == "undecided" and half.cases[0].note == "no fresh seeds of s er bn"


OWN = """
title = "own"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn", "in", { name = "cn", groups = 4 }, { name = "gn", groups = 4 }]
buffers = [20, 50]
"""
CLAIM = '[[claims]]\nsays = "x"\nscore = "acc"\n'


@pytest.mark.parametrize(
    ("claims", "count"),
    [
        ('kind = "above"\ncells = { norm = "cn" }\nthan = { norm = "bn" }\n', 2),
        ('kind = "above"\ncells = { norm = "cn" }\nthan = [{ norm = "bn" }, { norm = "in" }]\n', 4),
        ('kind = "under"\nlimit = 60\n', 8),
    ],
)
def test_number_of_comparisons(claims: str, count: int) -> None:
    recipe = parse_recipe("own", OWN + CLAIM + claims, "own.toml")
    assert count_comparisons(recipe) == {"split-mnist": count}


def test_comparison_shared_by_claims_counts_once() -> None:
    """The same pair the other way around, and with a margin; but another score is another comparison."""
    one = 'kind = "above"\ncells = { norm = "cn" }\nthan = { norm = "bn" }\n'
    other = 'kind = "near"\nmargin = 1\ncells = { norm = "bn" }\nthan = { norm = "cn" }\n'
    exact = one.replace("above", "near") + "margin = 0\n"
    text = OWN + CLAIM + one + CLAIM + other + CLAIM.replace('"acc"', '"parameters"') + exact
    assert count_comparisons(parse_recipe("own", text, "own.toml")) == {"split-mnist": 2}
    text += CLAIM + one.replace("above", "steadier") + CLAIM.replace('"acc"', '"fm"') + one
    assert count_comparisons(parse_recipe("own", text, "own.toml")) == {"split-mnist": 4}


def test_absent_cells_count_as_not_run() -> None:
    """All cells of the recipe are in the claims, also those that a caller leaves out."""
    result = decide_claims(find_recipe("table12"), [], StagedRule())
    assert [one.outcome for one in result] == ["undecided"] * 2 and [len(one.not_run) for one in result] == [1, 4]


def test_claim_for_each_norm() -> None:
    each = '[[claims]]\nsays = "Is {norm} over BN?"\nkind = "above"\nscore = "acc"\neach_norm_but = ["bn", "cn"]\n'
    recipe = parse_recipe("own", OWN + each + 'than = { norm = "bn" }\n', "own.toml")
    assert [(claim.says, claim.cells) for claim in recipe.claims] == [
        ("Is in over BN?", {"norm": "in"}),
        ("Is gn over BN?", {"norm": "gn"}),
    ]
