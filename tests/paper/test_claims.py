"""Claims, on records made by hand: what they decide, and what they leave open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Record, make_record
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.claims import decide
from contnorm.paper.measured import MeasuredCell, baseline_of, training_seconds
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Claim, View, find_recipe


def record(seed: int, right: int, seconds: float = 1.0, drift: list[Any] | None = None) -> Record:
    matrix = {"correct": [[900, None], [right, right]], "total": [1000, 1000]}
    fields = {"seconds": {"train": seconds}, "parameters": 100, "drift": {"by_task": drift or []}}
    return make_record(RunConfig(), seed, {"matrix": matrix, **fields})


def measured(norm: str, right: list[int], baseline: Mapping[int, Record] | None = None, **more: Any) -> MeasuredCell:
    place = {**dict.fromkeys(DIMENSIONS), "stream": "s", "strategy": "er", "moments": "running", "norm": norm}
    cell = RecipeCell({**place, **more.pop("place", {})}, {}, VIEWS["plain"])
    return MeasuredCell(cell, {seed: record(seed, n, **more) for seed, n in enumerate(right)}, baseline)


ABOVE = Claim("cn over bn", "above", "acc", {"norm": "cn"}, ({"norm": "bn"},))


@pytest.mark.parametrize(
    ("cn", "outcome"),
    [([720, 715, 730], "holds"), ([620, 615, 630], "does not hold"), ([720, 600, 700], "undecided")],
)
def test_above(cn: list[int], outcome: str) -> None:
    decided = decide(ABOVE, [measured("bn", [700, 690, 710]), measured("cn", cn)])
    assert decided.outcome == outcome
    (case,) = decided.cases
    wanted = [(a - b) / 10 for a, b in zip(cn, [700, 690, 710], strict=True)]
    assert case.paired is not None and case.paired.differences == pytest.approx(wanted)


def test_claim_outcome_from_its_cases() -> None:
    bn = [measured("bn", [700, 690, 710], place={"buffer": b}) for b in (1, 2)]
    good, bad, open_ = [720, 715, 730], [620, 615, 630], [720, 600, 700]
    for second, outcome in ((good, "holds"), (bad, "does not hold"), (open_, "undecided")):
        cn = [measured("cn", good, place={"buffer": 1}), measured("cn", second, place={"buffer": 2})]
        decided = decide(ABOVE, [*bn, *cn])
        assert decided.outcome == outcome and len(decided.cases) == 2  # cells of one buffer alone are compared


def test_case_label_names_the_partner() -> None:
    cells = [measured("bn", [700, 690], place={"strategy": s, "labels": "minority"}) for s in ("prs", "crs")]
    claim = Claim("prs over crs", "above", "acc", {"strategy": "prs"}, ({"strategy": "crs"},))
    assert [case.what for case in decide(claim, cells).cases] == ["s prs minority bn against crs"]
    (case,) = decide(ABOVE, [measured("bn", [700]), measured("cn", [710])]).cases
    assert case.what == "s er cn against bn"


def test_claim_undecided_without_records() -> None:
    assert decide(ABOVE, []).outcome == "undecided"
    assert decide(ABOVE, [measured("cn", [700, 710])]).outcome == "undecided"
    assert decide(ABOVE, [measured("cn", [700]), measured("bn", [600])]).outcome == "undecided"
    best = Claim("best", "above", "acc", {"norm": "cn"}, ({"norm": "bn"}, {"norm": "gn"}))
    found = decide(best, [measured("cn", [720, 715, 730]), measured("bn", [700, 690, 710])])
    assert found.outcome == "undecided" and [case.seeds for case in found.cases] == [3, 0]


def test_claim_without_norm_compares_equal_norms() -> None:
    star = Claim("bn* over bn", "above", "acc", {"norm": "bn", "moments": "oracle"}, ({"moments": "running"},))
    cells = [
        measured("bn", [700, 690, 710]),
        measured("bn", [730, 722, 738], place={"moments": "oracle"}),
        measured("cn", [900, 900, 900]),
    ]
    decided = decide(star, cells)
    assert decided.outcome == "holds" and len(decided.cases) == 1


def test_near_and_under() -> None:
    near = Claim("", "near", "acc", {"norm": "cn"}, ({"norm": "bn"},), margin=1.0)
    bn = measured("bn", [700, 690, 710])
    for cn, outcome in (([703, 694, 712], "holds"), ([750, 739, 762], "does not hold"), ([710, 700, 721], "undecided")):
        assert decide(near, [bn, measured("cn", cn)]).outcome == outcome
    same = Claim("", "near", "parameters", {"norm": "cn"}, ({"norm": "bn"},))
    assert decide(same, [bn, measured("cn", [1, 2, 3])]).outcome == "holds"
    base = {seed: record(seed, 1, seconds=10.0) for seed in range(3)}
    under = Claim("", "under", "extra_time", {"norm": "cn"}, limit=5.0)
    for seconds, outcome in ((10.3, "holds"), (12.0, "does not hold")):
        cell = measured("cn", [1, 2, 3], baseline=base, seconds=seconds)
        assert decide(under, [cell]).outcome == outcome
        assert cell.values("extra_time") == pytest.approx(dict.fromkeys(range(3), 10 * seconds - 100))


def test_flat_steadier_and_depth() -> None:
    drift = [{"a": {"mean": 1.0, "var": 1.0}, "b": {"mean": 2.0, "var": 3.0}}]
    drift += [{"a": {"mean": 9.0, "var": 2.0}, "b": {"mean": 2.1, "var": 7.0}}]
    cell = measured("bn", [700, 710, 690], drift=drift)
    assert decide(Claim("", "flat", "drift_mean_2", margin=0.5), [cell]).outcome == "holds"
    assert decide(Claim("", "flat", "drift_mean_1", margin=0.5), [cell]).outcome == "does not hold"
    assert decide(Claim("", "above", "drift_var_2", than_score="drift_var_1"), [cell]).outcome == "holds"
    assert decide(Claim("", "above", "drift_var_1", than_score="drift_var_2"), [cell]).outcome == "does not hold"
    calm, wild = measured("cn", [700, 701, 702, 700, 701]), measured("bn", [600, 700, 800, 650, 750])
    claim = Claim("", "steadier", "acc", {"norm": "cn"}, ({"norm": "bn"},))
    assert decide(claim, [calm, wild]).outcome == "holds"
    assert decide(Claim("", "steadier", "acc", {"norm": "bn"}, ({"norm": "cn"},)), [calm, wild]).outcome == (
        "does not hold"
    )


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
