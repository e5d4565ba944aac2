"""Verdicts about published numbers, against scipy's own tests and cases made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.stats import t_interval
from contnorm.paper.format import verdict_text
from contnorm.paper.published import compare_published

OURS = [64.1, 66.0, 65.2, 63.3, 67.9]


@pytest.mark.parametrize(("mean", "std"), [(64.97, 1.09), (69.0, 0.4), (60.0, 3.0), (65.3, 0.01)])
def test_verdict_agrees_with_scipys_welch_test(mean: float, std: float) -> None:
    whole = stats.ttest_ind_from_stats(np.mean(OURS), np.std(OURS, ddof=1), 5, mean, std, 5, equal_var=False)
    assert (compare_published(OURS, mean, std).verdict == "agrees") == (whole.pvalue >= 0.05)


@pytest.mark.parametrize(
    ("values", "std", "why"),
    [
        ([65.0], 0.1, "one seed"),
        ([65.0], None, "one seed"),
        ([65.0, 65.0], 0.1, "our seeds are all equal"),
        ([65.0, 65.0], None, "our seeds are all equal"),
        ([65.0, 65.1], 0.0, "the published std is 0"),
        ([65.0, math.nan], 0.1, "a seed has no value"),
    ],
)
def test_no_verdict_without_spread(values: list[float], std: float | None, why: str) -> None:
    """A spread of zero would make an interval of no width, by which any number is above or below any other."""
    found = compare_published(values, 70.0, std)
    assert (found.verdict, found.interval, found.why) == ("none", None, why)
    assert verdict_text(found)[1:] == ("-", f"no interval: {why}")


def test_verdict_without_published_std_uses_our_interval() -> None:
    found = compare_published(OURS, 66.0, None)
    assert found.how == "ours" and found.verdict == "agrees" and found.interval is not None
    ours = t_interval(OURS)
    assert ours is not None and found.interval == pytest.approx((ours.low - 66.0, ours.high - 66.0))
    assert (
        compare_published(OURS, 70.0, None).verdict == "below"
        and compare_published(OURS, 60.0, None).verdict == "above"
    )
