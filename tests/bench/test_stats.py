"""Confidence intervals and paired differences, compared with SciPy and with hand-worked cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.stats import (
    bootstrap_difference,
    bootstrap_interval,
    cohens_d,
    effect_size,
    paired_difference,
    t_interval,
    variance_ratio_interval,
    welch_interval,
)

OURS = [64.1, 66.0, 65.2, 63.3, 67.9]


@pytest.mark.parametrize(("mean", "std"), [(64.97, 1.09), (69.0, 0.4), (60.0, 3.0), (65.3, 0.01)])
def test_welch_interval_equals_scipy(mean: float, std: float) -> None:
    """If the difference is shifted by an end of the interval, SciPy's p-value is 5 %."""
    interval = welch_interval(OURS, mean, std, 5)
    assert interval is not None
    for end in interval:
        test = stats.ttest_ind_from_stats(np.mean(OURS) - end, np.std(OURS, ddof=1), 5, mean, std, 5, equal_var=False)
        assert test.pvalue == pytest.approx(0.05, abs=1e-9)


def test_t_interval_equals_scipy() -> None:
    expected = stats.ttest_1samp(OURS, 0.0).confidence_interval(0.95)
    assert t_interval(OURS) == pytest.approx((expected.low, expected.high))


def test_intervals_of_one_value_or_nan_are_none() -> None:
    assert t_interval([1.0]) is None and bootstrap_interval([1.0]) is None and welch_interval([1.0], 1, 1, 5) is None
    assert t_interval([1.0, math.nan]) is None and bootstrap_interval([1.0, math.nan]) is None
    assert math.isnan(effect_size([1.0])) and math.isnan(effect_size([2.0, 2.0]))


def test_welch_interval_without_a_deviation_is_none() -> None:
    assert welch_interval([3.0, 3.0], 1.0, 0.5, 5) is None and welch_interval([3.0, 3.1], 1.0, 0.0, 5) is None
    assert welch_interval(OURS, 1.0, 0.5, 1) is None and welch_interval(OURS, 1.0, math.nan, 5) is None


def test_bootstrap_interval_is_reproducible_and_close_to_another_seed() -> None:
    result = bootstrap_interval(OURS)
    assert result is not None and result == bootstrap_interval(OURS)
    expected = stats.bootstrap((OURS,), np.mean, n_resamples=50_000, method="percentile", rng=1).confidence_interval
    assert result == pytest.approx((expected.low, expected.high), abs=0.06)  # three standard errors of such a quantile


def test_variance_ratio_interval_covers_95_percent() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        result = variance_ratio_interval(generator.normal(0, 2, 5).tolist(), generator.normal(3, 1, 5).tolist())
        assert result is not None
        covered += result.holds(4.0)
    assert covered / 600 == pytest.approx(0.95, abs=0.03)
    assert variance_ratio_interval([1.0, 2.0], [3.0, 3.0]) is None


def test_bootstrap_difference_resamples_both_sides() -> None:
    others = [60.2, 61.9, 63.0, 62.4, 59.1, 61.3]
    result = bootstrap_difference(OURS, others)
    assert result is not None and result == bootstrap_difference(OURS, others)

    def between(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return a.mean(axis=axis) - b.mean(axis=axis)

    expected = stats.bootstrap((OURS, others), between, n_resamples=50_000, method="percentile", rng=1)
    expected = expected.confidence_interval
    assert result == pytest.approx((expected.low, expected.high), abs=0.1)  # three standard errors of such a quantile
    assert bootstrap_difference(OURS, [1.0]) is None and bootstrap_difference(OURS, [1.0, math.nan]) is None


def test_cohens_d_uses_the_pooled_deviation() -> None:
    """scipy's t with equal variances is the same but for the counts: t = d / sqrt(1/n + 1/m)."""
    others = [60.2, 61.9, 63.0]
    t = stats.ttest_ind(OURS, others).statistic
    assert cohens_d(OURS, others) == pytest.approx(t * math.sqrt(1 / 5 + 1 / 3))
    assert math.isnan(cohens_d(OURS, [1.0])) and math.isnan(cohens_d([2.0, 2.0], [1.0, 1.0]))


def test_paired_difference_uses_shared_seeds() -> None:
    result = paired_difference({0: 5.0, 1: 7.0, 4: 1.0}, {1: 4.0, 0: 4.0, 3: 9.0})
    assert result is not None and result.differences == (1.0, 3.0)
    assert result.effect == pytest.approx(2 / math.sqrt(2))
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_bootstrap_resamples_are_those_of_recorded_tables() -> None:
    """The resampling of NumPy's generator by hand, which made the committed tables."""
    generator = np.random.default_rng(0)
    means = np.asarray(OURS)[generator.integers(5, size=(10_000, 5))].mean(axis=1)
    assert bootstrap_interval(OURS) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), rel=1e-12)


def test_bootstrap_difference_resamples_are_those_of_recorded_tables() -> None:
    generator = np.random.default_rng(0)
    others = [60.2, 61.9, 63.0]
    means = [
        np.asarray(side)[generator.integers(len(side), size=(10_000, len(side)))].mean(axis=1)
        for side in (OURS, others)
    ]
    expected = np.quantile(means[0] - means[1], [0.025, 0.975])
    assert bootstrap_difference(OURS, others) == pytest.approx(tuple(expected), rel=1e-12)
