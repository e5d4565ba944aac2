"""Intervals and verdicts against scipy's own tests and cases made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.stats.intervals import (
    bootstrap_apart,
    bootstrap_interval,
    effect_apart,
    effect_size,
    t_interval,
    variance_ratio_interval,
    welch_interval,
)
from contnorm.bench.stats.paired import paired
from contnorm.paper.format import verdict_text
from contnorm.paper.published import compare_published

OURS = [64.1, 66.0, 65.2, 63.3, 67.9]


@pytest.mark.parametrize(("mean", "std"), [(64.97, 1.09), (69.0, 0.4), (60.0, 3.0), (65.3, 0.01)])
def test_welch_interval_equals_scipy(mean: float, std: float) -> None:
    """scipy tests a mean for being so far off: at an end of the interval the chance is 5 %, and beyond it less."""
    found = welch_interval(OURS, mean, std, 5)
    assert found is not None
    for end in found:
        test = stats.ttest_ind_from_stats(np.mean(OURS) - end, np.std(OURS, ddof=1), 5, mean, std, 5, equal_var=False)
        assert test.pvalue == pytest.approx(0.05, abs=1e-9)
    whole = stats.ttest_ind_from_stats(np.mean(OURS), np.std(OURS, ddof=1), 5, mean, std, 5, equal_var=False)
    assert (compare_published(OURS, mean, std).verdict == "agrees") == (whole.pvalue >= 0.05)


def test_t_interval_equals_scipy() -> None:
    theirs = stats.ttest_1samp(OURS, 0.0).confidence_interval(0.95)
    assert t_interval(OURS) == pytest.approx((theirs.low, theirs.high))


def test_no_interval_for_fewer_than_two_values() -> None:
    assert t_interval([1.0]) is None and bootstrap_interval([1.0]) is None and welch_interval([1.0], 1, 1, 5) is None
    assert t_interval([1.0, math.nan]) is None and bootstrap_interval([1.0, math.nan]) is None
    assert math.isnan(effect_size([1.0])) and math.isnan(effect_size([2.0, 2.0]))


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


def test_welch_interval_needs_spread_on_both_sides() -> None:
    assert welch_interval([3.0, 3.0], 1.0, 0.5, 5) is None and welch_interval([3.0, 3.1], 1.0, 0.0, 5) is None
    assert welch_interval(OURS, 1.0, 0.5, 1) is None and welch_interval(OURS, 1.0, math.nan, 5) is None


def test_bootstrap_equals_scipy_and_is_reproducible() -> None:
    found = bootstrap_interval(OURS)
    assert found is not None and found == bootstrap_interval(OURS)
    theirs = stats.bootstrap((OURS,), np.mean, n_resamples=50_000, method="percentile", rng=1).confidence_interval
    assert found == pytest.approx((theirs.low, theirs.high), abs=0.06)  # three standard errors of such a quantile


def test_variance_ratio_interval_coverage() -> None:
    chance = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        found = variance_ratio_interval(chance.normal(0, 2, 5).tolist(), chance.normal(3, 1, 5).tolist())
        assert found is not None
        held += found.holds(4.0)
    assert held / 600 == pytest.approx(0.95, abs=0.03)
    assert variance_ratio_interval([1.0, 2.0], [3.0, 3.0]) is None


def test_verdict_without_published_std_uses_our_interval() -> None:
    found = compare_published(OURS, 66.0, None)
    assert found.how == "ours" and found.verdict == "agrees" and found.interval is not None
    ours = t_interval(OURS)
    assert ours is not None and found.interval == pytest.approx((ours.low - 66.0, ours.high - 66.0))
    assert (
        compare_published(OURS, 70.0, None).verdict == "below"
        and compare_published(OURS, 60.0, None).verdict == "above"
    )


def test_unpaired_bootstrap_resamples_each_side() -> None:
    others = [60.2, 61.9, 63.0, 62.4, 59.1, 61.3]
    found = bootstrap_apart(OURS, others)
    assert found is not None and found == bootstrap_apart(OURS, others)

    def between(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return a.mean(axis=axis) - b.mean(axis=axis)

    theirs = stats.bootstrap((OURS, others), between, n_resamples=50_000, method="percentile", rng=1)
    theirs = theirs.confidence_interval
    assert found == pytest.approx((theirs.low, theirs.high), abs=0.1)  # three standard errors of such a quantile
    assert bootstrap_apart(OURS, [1.0]) is None and bootstrap_apart(OURS, [1.0, math.nan]) is None


def test_unpaired_effect_uses_pooled_std() -> None:
    """scipy's t with equal variances is the same but for the counts: t = d / sqrt(1/n + 1/m)."""
    others = [60.2, 61.9, 63.0]
    t = stats.ttest_ind(OURS, others).statistic
    assert effect_apart(OURS, others) == pytest.approx(t * math.sqrt(1 / 5 + 1 / 3))
    assert math.isnan(effect_apart(OURS, [1.0])) and math.isnan(effect_apart([2.0, 2.0], [1.0, 1.0]))


def test_paired_uses_shared_seeds() -> None:
    found = paired({0: 5.0, 1: 7.0, 4: 1.0}, {1: 4.0, 0: 4.0, 3: 9.0})
    assert found is not None and found.differences == (1.0, 3.0)
    assert found.effect == pytest.approx(2 / math.sqrt(2))
    assert paired({0: 1.0}, {1: 1.0}) is None
