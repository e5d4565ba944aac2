"""Claims by exploratory seeds, on records made by hand: their numbers, which decide nothing, and their cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Record, make_record
from contnorm.bench.stats import t_interval
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.claims import ClaimResult, decide_several
from contnorm.paper.measured import MeasuredCell, baseline_of, training_seconds
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Claim, View, find_recipe


def record(seed: int, right: int, seconds: float = 1.0, drift: list[Any] | None = None) -> Record:
    matrix = {"correct": [[900, None], [right, right]], "total": [1000, 1000]}
    raw = {"matrix": matrix, "seconds": {"train": seconds}, "parameters": 100}
    return make_record(RunConfig(), seed, {**raw, "drift": {"by_task": drift or []}})


def measured(norm: str, right: list[int], baseline: Mapping[int, Record] | None = None, **more: Any) -> MeasuredCell:
    place = {**dict.fromkeys(DIMENSIONS), "stream": "s", "strategy": "er", "moments": "running", "norm": norm}
    cell = RecipeCell({**place, **more.pop("place", {})}, {}, VIEWS["plain"])
    return MeasuredCell(cell, {seed: record(seed, n, **more) for seed, n in enumerate(right)}, baseline)


def decide(claim: Claim, cells: list[MeasuredCell]) -> ClaimResult:
    (result,) = decide_several([claim], cells, None)
    return result


ABOVE = Claim("cn over bn", "above", "acc", {"norm": "cn"}, ({"norm": "bn"},))


def test_exploratory_seeds_have_an_interval_and_decide_nothing() -> None:
    """However clear the difference: the interval is of one comparison, and settings were chosen with these seeds."""
    cn, bn = [720, 715, 730], [700, 690, 710]
    decided = decide(ABOVE, [measured("bn", bn), measured("cn", cn)])
    (case,) = decided.cases
    wanted = [(a - b) / 10 for a, b in zip(cn, bn, strict=True)]
    assert case.paired is not None and case.paired.differences == pytest.approx(wanted)
    assert case.interval == t_interval(case.paired.differences) and case.interval is not None and case.interval.low > 0
    assert decided.outcome == case.outcome == "undecided" and decided.evidence_text == "exploratory: 3 seeds"


def test_case_label_names_the_partner() -> None:
    cells = [measured("bn", [700, 690], place={"strategy": s, "labels": "minority"}) for s in ("prs", "crs")]
    claim = Claim("prs over crs", "above", "acc", {"strategy": "prs"}, ({"strategy": "crs"},))
    assert [case.what for case in decide(claim, cells).cases] == ["s prs minority bn against crs"]
    (case,) = decide(ABOVE, [measured("bn", [700]), measured("cn", [710])]).cases
    assert case.what == "s er cn against bn"


def test_cells_without_records_are_cases_without_seeds() -> None:
    best = Claim("best", "above", "acc", {"norm": "cn"}, ({"norm": "bn"}, {"norm": "gn"}))
    found = decide(best, [measured("cn", [720, 715, 730]), measured("bn", [700, 690, 710])])
    assert [case.seeds for case in found.cases] == [3, 0] and decide(ABOVE, []).cases == ()


def test_claim_without_norm_compares_equal_norms() -> None:
    star = Claim("bn* over bn", "above", "acc", {"norm": "bn", "moments": "oracle"}, ({"moments": "running"},))
    cells = [
        measured("bn", [700, 690, 710]),
        measured("bn", [730, 722, 738], place={"moments": "oracle"}),
        measured("cn", [900, 900, 900]),
    ]
    (case,) = decide(star, cells).cases
    assert case.paired is not None and case.paired.mean == pytest.approx(3.0)


def test_scores_that_are_equal_for_all_seeds_are_decided() -> None:
    same = Claim("", "near", "parameters", {"norm": "cn"}, ({"norm": "bn"},))
    assert decide(same, [measured("bn", [700, 690]), measured("cn", [1, 2])]).outcome == "holds"


def test_values_of_other_kinds_of_claims() -> None:
    base = {seed: record(seed, 1, seconds=10.0) for seed in range(3)}
    under = Claim("", "under", "extra_time", {"norm": "cn"}, limit=5.0)
    cell = measured("cn", [1, 2, 3], baseline=base, seconds=10.3)
    (case,) = decide(under, [cell]).cases
    assert case.paired is not None and case.paired.mean == pytest.approx(3.0 - 5.0)
    drift = [{"a": {"mean": 1.0, "var": 1.0}, "b": {"mean": 2.0, "var": 3.0}}]
    drift += [{"a": {"mean": 9.0, "var": 2.0}, "b": {"mean": 2.1, "var": 7.0}}]
    cell = measured("bn", [700, 710, 690], drift=drift)
    flat, depth = (
        Claim("", "flat", "drift_mean_2", margin=0.5),
        Claim("", "above", "drift_var_2", than_score="drift_var_1"),
    )
    for claim, mean in ((flat, 0.1), (depth, 5.0)):
        (case,) = decide(claim, [cell]).cases
        assert case.paired is not None and case.paired.mean == pytest.approx(mean)
    calm, wild = measured("cn", [700, 701, 702, 700, 701]), measured("bn", [600, 700, 800, 650, 750])
    (case,) = decide(Claim("", "steadier", "acc", {"norm": "cn"}, ({"norm": "bn"},)), [calm, wild]).cases
    assert case.is_ratio and case.interval is not None and case.interval.high < 1


def test_curves_and_views() -> None:
    one = measured("bn", [700])
    assert one.curves("acc_so_far")[0] == pytest.approx([90.0, 70.0]) and one.values("fm") == pytest.approx({0: 20.0})
    hidden = MeasuredCell(RecipeCell(one.cell.place, {}, View("matrix_task")), one.records)
    assert hidden.values("acc") == {} and hidden.curves("acc_so_far") == {}


def test_time_baseline_is_plain_bn() -> None:
    cells = cells_of(find_recipe("table3"))
    found = {cell.norm: base and base.norm for cell in cells for base in [baseline_of(cell, cells)]}
    norms = ["bn", "gn32", "sn", "cn32"]
    assert found == dict.fromkeys(norms, "bn") | dict.fromkeys([f"{norm} stock" for norm in norms], "bn stock")


def test_training_time_excludes_warm_up_tasks() -> None:
    def timed(**seconds: object) -> Record:
        return make_record(RunConfig(), 0, {"matrix": {"correct": [[1]], "total": [1]}, "seconds": seconds})

    assert training_seconds(timed(train=111.0, train_by_task=[60.0, 40.0, 5.0, 6.0])) == 11.0
    assert training_seconds(timed(train=9.0, train_by_task=[5.0, 4.0])) == 9.0  # there is nothing after them
    assert training_seconds(timed(train=7.0)) == 7.0  # of a record made before
