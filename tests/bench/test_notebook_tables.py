"""What notebooks show of a decision and of a plan of seeds: tables with the numbers of the text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contnorm.bench.decision import PairedDecision
from contnorm.bench.power_analysis import power_of_spread
from contnorm.bench.sequential import decide_differences
from contnorm.bench.spread import spread_ratio


def decision_of(differences: list[float]) -> PairedDecision:
    return PairedDecision(**vars(decide_differences(differences)), names=("<cn>", "bn"))


def test_decision_shows_verdict_and_stages() -> None:
    decision = decision_of([2.0, 2.5] * 8)
    table = decision._repr_html_()
    assert "&lt;cn&gt; is higher than bn" in table and "<cn>" not in table
    assert [look.seeds for look in decision.looks] == [8, 16]
    for look in decision.looks:
        assert f"<tr><td>{look.seeds}</td><td>+2.25</td><td>{look.interval}</td></tr>" in table


def test_decision_has_no_negative_zero() -> None:
    assert "<td>+0.00</td>" in decision_of([0.5, -0.508] * 4)._repr_html_()


def test_decision_before_the_first_stage_has_no_table() -> None:
    assert "<table>" not in decision_of([1.0])._repr_html_()


def test_power_shows_seeds_of_each_difference() -> None:
    table = power_of_spread([1.2, -0.3, 0.8, 2.0, -1.1, 0.4], differences=[1, 2])
    shown = replace(table, names=("<cn>", "bn"))._repr_html_()
    assert "<tr><td>1</td><td>12</td><td>32</td></tr><tr><td>2</td><td>5</td><td>16</td></tr>" in shown
    assert "&lt;cn&gt;" in shown and "<cn>" not in shown


@pytest.mark.parametrize(("difference", "text"), [(1, "1 point:"), (0.5, "0.5 points:"), (2, "2 points:")])
def test_power_counts_points(difference: float, text: str) -> None:
    assert f"a difference of {text}" in str(power_of_spread([1.2, -0.3, 0.8], differences=[difference]))


def test_spread_shows_verdict_and_ratios() -> None:
    wide = {seed: 3.0 * (-1) ** seed + seed / 40 for seed in range(40)}
    narrow = {seed: 0.5 * (-1) ** seed + seed / 40 for seed in range(40)}
    spread = replace(spread_ratio(wide, narrow), names=("<bn>", "cn"), score="ACC")
    shown = spread._repr_html_()
    assert "<p>&lt;bn&gt; has a larger spread of ACC over seeds than cn.</p>" in shown and "<bn>" not in shown
    assert f"<td>variances</td><td>{spread.variance}</td><td>{spread.variance_without_extremes}</td>" in shown
