"""Claims on records made by hand: by exploratory seeds, which decide nothing, and by fresh seeds in stages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Record, make_record
from contnorm.bench.sequential import FIRST_SEED, decide_differences, nominal_levels
from contnorm.bench.stats import t_interval
from contnorm.paper.cells import MeasuredCell, RecipeCell
from contnorm.paper.claims import ClaimResult, StagedRule, decide_claims
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Claim, Recipe, find_recipe

RULE = StagedRule()
ABOVE = Claim("cn over bn", "above", "acc", {"norm": "cn"}, ({"norm": "bn"},))
TOTAL = 1_000_000


def decide_staged(
    claim: Claim, cells: Sequence[MeasuredCell], rule: StagedRule = RULE, ours: bool = False
) -> ClaimResult:
    (result,) = decide_claims(Recipe("", claims=(claim,), ours=ours), cells, rule)
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
    assert [one.outcome for one in decide_staged(ABOVE, pair, ours=True).cases] == ["holds"] * 2


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


def test_absent_cells_count_as_not_run() -> None:
    """All cells of the recipe are in the claims, also those that a caller leaves out."""
    result = decide_claims(find_recipe("table12"), [], StagedRule())
    assert [one.outcome for one in result] == ["undecided"] * 2 and [len(one.not_run) for one in result] == [1, 4]


# --- Exploratory seeds ---


def record(seed: int, right: int, seconds: float = 1.0, drift: list[Any] | None = None) -> Record:
    matrix = {"correct": [[900, None], [right, right]], "total": [1000, 1000]}
    raw = {"matrix": matrix, "seconds": {"train": seconds}, "parameters": 100}
    return make_record(RunConfig(), seed, {**raw, "drift": {"by_task": drift or []}})


def exploratory(norm: str, right: list[int], baseline: Mapping[int, Record] | None = None, **more: Any) -> MeasuredCell:
    place = {**dict.fromkeys(DIMENSIONS), "stream": "s", "strategy": "er", "moments": "running", "norm": norm}
    cell = RecipeCell({**place, **more.pop("place", {})}, {}, VIEWS["plain"])
    return MeasuredCell(cell, {seed: record(seed, n, **more) for seed, n in enumerate(right)}, baseline)


def decide(claim: Claim, cells: list[MeasuredCell]) -> ClaimResult:
    (result,) = decide_claims(Recipe("", claims=(claim,)), cells)
    return result


def test_exploratory_seeds_have_an_interval_and_decide_nothing() -> None:
    """However clear the difference: the interval is of one comparison, and settings were chosen with these seeds."""
    cn, bn = [720, 715, 730], [700, 690, 710]
    decided = decide(ABOVE, [exploratory("bn", bn), exploratory("cn", cn)])
    (case,) = decided.cases
    wanted = [(a - b) / 10 for a, b in zip(cn, bn, strict=True)]
    assert case.paired is not None and case.paired.differences == pytest.approx(wanted)
    assert case.interval == t_interval(case.paired.differences) and case.interval is not None and case.interval.low > 0
    assert decided.outcome == case.outcome == "undecided" and decided.evidence_text == "exploratory: 3 seeds"


def test_case_label_names_the_partner() -> None:
    cells = [exploratory("bn", [700, 690], place={"strategy": s, "labels": "minority"}) for s in ("prs", "crs")]
    claim = Claim("prs over crs", "above", "acc", {"strategy": "prs"}, ({"strategy": "crs"},))
    assert [case.what for case in decide(claim, cells).cases] == ["s prs minority bn against crs"]
    (case,) = decide(ABOVE, [exploratory("bn", [700]), exploratory("cn", [710])]).cases
    assert case.what == "s er cn against bn"


def test_cells_without_records_are_cases_without_seeds() -> None:
    best = Claim("best", "above", "acc", {"norm": "cn"}, ({"norm": "bn"}, {"norm": "gn"}))
    found = decide(best, [exploratory("cn", [720, 715, 730]), exploratory("bn", [700, 690, 710])])
    assert [case.seeds for case in found.cases] == [3, 0] and decide(ABOVE, []).cases == ()


def test_claim_without_norm_compares_equal_norms() -> None:
    star = Claim("bn* over bn", "above", "acc", {"norm": "bn", "moments": "oracle"}, ({"moments": "running"},))
    cells = [
        exploratory("bn", [700, 690, 710]),
        exploratory("bn", [730, 722, 738], place={"moments": "oracle"}),
        exploratory("cn", [900, 900, 900]),
    ]
    (case,) = decide(star, cells).cases
    assert case.paired is not None and case.paired.mean == pytest.approx(3.0)


def test_scores_that_are_equal_for_all_seeds_are_decided() -> None:
    same = Claim("", "near", "parameters", {"norm": "cn"}, ({"norm": "bn"},))
    assert decide(same, [exploratory("bn", [700, 690]), exploratory("cn", [1, 2])]).outcome == "holds"


def test_values_of_other_kinds_of_claims() -> None:
    base = {seed: record(seed, 1, seconds=10.0) for seed in range(3)}
    under = Claim("", "under", "extra_time", {"norm": "cn"}, limit=5.0)
    cell = exploratory("cn", [1, 2, 3], baseline=base, seconds=10.3)
    (case,) = decide(under, [cell]).cases
    assert case.paired is not None and case.paired.mean == pytest.approx(3.0 - 5.0)
    drift = [{"a": {"mean": 1.0, "var": 1.0}, "b": {"mean": 2.0, "var": 3.0}}]
    drift += [{"a": {"mean": 9.0, "var": 2.0}, "b": {"mean": 2.1, "var": 7.0}}]
    cell = exploratory("bn", [700, 710, 690], drift=drift)
    flat, depth = (
        Claim("", "flat", "drift_mean_2", margin=0.5),
        Claim("", "above", "drift_var_2", than_score="drift_var_1"),
    )
    for claim, mean in ((flat, 0.1), (depth, 5.0)):
        (case,) = decide(claim, [cell]).cases
        assert case.paired is not None and case.paired.mean == pytest.approx(mean)
    calm, wild = exploratory("cn", [700, 701, 702, 700, 701]), exploratory("bn", [600, 700, 800, 650, 750])
    (case,) = decide(Claim("", "steadier", "acc", {"norm": "cn"}, ({"norm": "bn"},)), [calm, wild]).cases
    assert case.is_ratio and case.interval is not None and case.interval.high < 1
