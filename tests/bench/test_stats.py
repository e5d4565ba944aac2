"""Confidence intervals, paired differences and spreads, compared with SciPy and with closed forms."""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from contnorm import bench
from contnorm.bench.stats import (
    equivalence_probability,
    spread_ratio,
    t_interval,
    t_test_power,
    variance_ratio_interval,
    welch_interval,
)
from contnorm.errors import UserError

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
    assert t_interval([1.0]) is None and welch_interval([1.0], 1, 1, 5) is None
    assert t_interval([1.0, math.nan]) is None


def test_welch_interval_without_a_deviation_is_none() -> None:
    assert welch_interval([3.0, 3.0], 1.0, 0.5, 5) is None and welch_interval([3.0, 3.1], 1.0, 0.0, 5) is None
    assert welch_interval(OURS, 1.0, 0.5, 1) is None and welch_interval(OURS, 1.0, math.nan, 5) is None


def test_variance_ratio_interval_covers_95_percent() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        result = variance_ratio_interval(generator.normal(0, 2, 5).tolist(), generator.normal(3, 1, 5).tolist())
        assert result is not None
        covered += result.holds(4.0)
    assert covered / 600 == pytest.approx(0.95, abs=0.03)
    assert variance_ratio_interval([1.0, 2.0], [3.0, 3.0]) is None


def test_power_and_probability_of_equivalence_equal_simulations() -> None:
    generator, trials = np.random.default_rng(0), 20_000
    error = 4 * 0.5 / math.sqrt(trials)  # four binomial standard errors
    for seeds, margin, level in ((16, 0.5, 0.95), (32, 0.7, 0.99)):
        values = generator.normal(size=(trials, seeds))
        half = stats.t.ppf((1 + level) / 2, seeds - 1) * values.std(axis=1, ddof=1) / math.sqrt(seeds)
        rate = np.mean(np.abs(values.mean(axis=1)) + half < margin)
        assert equivalence_probability(margin, seeds, level) == pytest.approx(rate, abs=error)
        assert t_test_power(margin, seeds, level) == pytest.approx(
            np.mean(values.mean(axis=1) + margin > half), abs=error
        )


DOCS = Path(__file__).parents[2] / "docs"
RUNS = DOCS / "records" / "runs" / "split-cifar100-fresh-seeds.jsonl.gz"
Array = NDArray[np.float64]


def by_seed(values: Array | list[float]) -> dict[int, float]:
    return dict(enumerate(map(float, values), 100))


def acc(norm: str, strategy: str = "er") -> dict[int, float]:
    runs = bench.load_runs(RUNS).where(f"norm={norm}", f"strategy={strategy}", "seed<132")
    return {record.seed: record.score("acc") for record in runs}


def absolute_deviation(values: Array, axis: int = -1) -> Array:
    median = np.median(values, axis=axis, keepdims=True)
    return np.mean(np.abs(values - median), axis=axis)


def test_ratios_and_intervals_equal_scipy() -> None:
    bn, cn = acc("bn"), acc("cn")
    spread = spread_ratio(bn, cn)
    a, b = (np.array([scores[seed] for seed in sorted(scores)]) for scores in (bn, cn))

    def variance_ratio(x: Array, y: Array, axis: int) -> Array:
        return x.var(axis=axis, ddof=1) / y.var(axis=axis, ddof=1)

    def deviation_ratio(x: Array, y: Array, axis: int) -> Array:
        return absolute_deviation(x, axis) / absolute_deviation(y, axis)

    for ratio, statistic in ((spread.variance, variance_ratio), (spread.deviation, deviation_ratio)):
        assert ratio.value == pytest.approx(statistic(a, b, 0))
        expected = stats.bootstrap((a, b), statistic, paired=True, n_resamples=20_000, method="percentile", rng=1)
        low, high = expected.confidence_interval
        # Two Monte Carlo estimates of 2.5 % quantiles; their relative standard error is about 1 %.
        assert ratio.interval.low == pytest.approx(low, rel=0.05) and ratio.interval.high == pytest.approx(
            high, rel=0.05
        )
    assert spread.seeds == 32 and spread.extremes == 2


def test_ratios_without_extreme_seeds_leave_them_out_of_each() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=40), generator.normal(size=40)
    spread = spread_ratio(by_seed(a), by_seed(b))
    sorted_a, sorted_b = np.sort(a), np.sort(b)
    assert spread.variance_without_extremes.value == pytest.approx(
        sorted_a[2:-2].var(ddof=1) / sorted_b[2:-2].var(ddof=1)
    )
    assert spread.deviation_without_extremes.value == pytest.approx(
        absolute_deviation(sorted_a[2:-2]) / absolute_deviation(sorted_b[2:-2])
    )


def test_larger_spread_is_recognized_and_an_outlier_alone_is_not() -> None:
    generator = np.random.default_rng(2)
    narrow, wide = generator.normal(size=40), 3 * generator.normal(size=40)
    assert spread_ratio(by_seed(wide), by_seed(narrow)).outcome == "larger"
    assert spread_ratio(by_seed(narrow), by_seed(wide)).outcome == "smaller"
    other = generator.normal(size=40)
    other[5] = -15.0
    spread = spread_ratio(by_seed(other), by_seed(narrow))
    assert spread.variance.value > 5 and spread.variance_without_extremes.value < 2
    assert spread.outcome == "undecided"


def test_spread_is_deterministic_and_paired_by_seed() -> None:
    generator = np.random.default_rng(3)
    a, b = by_seed(generator.normal(size=20)), by_seed(generator.normal(size=20))
    shuffled = dict(sorted(a.items(), key=lambda item: item[1]))
    assert spread_ratio(a, b) == spread_ratio(shuffled, b | {7: 1000.0})
    assert spread_ratio(a, a).variance.interval == (1.0, 1.0)


def test_spread_of_few_or_equal_scores_is_an_error() -> None:
    with pytest.raises(UserError, match="needs 8 shared seeds or more, got 2"):
        spread_ratio(by_seed([1.0, 2.0]), by_seed([1.0, 2.0]))
    with pytest.raises(UserError, match="all scores of an experiment are equal"):
        spread_ratio(by_seed([1.0] * 10), by_seed(list(range(10))))


@pytest.mark.slow
def test_coverage_in_the_documentation_is_simulated() -> None:
    hashes = {"BN; ER": "1cde1b2b4f6c", "BRN scaled; ER": "894b214398af", "BRN scaled; DER++": "74e53cf8a831"}
    text = (DOCS / "concepts" / "deciding.md").read_text().partition("## Spread over seeds")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]
    assert [row[0] for row in rows] == list(hashes)
    runs, trials = bench.load_runs(RUNS).by_run(), 400
    for name, skewness, *shown in rows:
        scores = np.array([record.score("acc") for record in runs[hashes[name]] if record.seed < 132])
        assert float(skewness) == pytest.approx(stats.skew(scores), abs=0.051)
        generator, missed = np.random.default_rng(0), np.zeros(3)
        for _ in range(trials):
            a, b = generator.choice(scores, 32), generator.choice(scores, 32)
            spread = spread_ratio(by_seed(a), by_seed(b), resamples=500)
            missed += [
                not spread.variance.interval.holds(1),
                not spread.deviation.interval.holds(1),
                spread.outcome != "undecided",
            ]
        for cell, rate in zip(shown, missed / trials, strict=True):
            # rounded; or up to three binomial standard errors, if the random numbers are others
            assert float(cell) == pytest.approx(rate, abs=0.005 + 3 * math.sqrt(rate * (1 - rate) / trials))
