"""Ratios of spreads over seeds, compared with SciPy's bootstrap and with closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from contnorm import bench
from contnorm.bench.spread import spread_ratio
from contnorm.errors import UserError

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
    assert spread.variance_without_lowest.value == pytest.approx(sorted_a[2:].var(ddof=1) / sorted_b[2:].var(ddof=1))
    assert spread.deviation_without_extremes.value == pytest.approx(
        absolute_deviation(sorted_a[2:-2]) / absolute_deviation(sorted_b[2:-2])
    )


def test_ratio_is_inverted_by_exchange_and_scaled_by_units() -> None:
    generator = np.random.default_rng(1)
    a, b = generator.normal(size=30), generator.normal(size=30)
    spread, exchanged = spread_ratio(by_seed(a), by_seed(b)), spread_ratio(by_seed(b), by_seed(a))
    assert exchanged.variance.value == pytest.approx(1 / spread.variance.value)
    # Percentiles of the inverse are the inverse percentiles, up to interpolation between neighbours.
    assert exchanged.deviation.interval == pytest.approx(
        (1 / spread.deviation.interval.high, 1 / spread.deviation.interval.low), rel=1e-3
    )
    scaled = spread_ratio(by_seed(60 + 3 * a), by_seed(b))
    assert scaled.variance.value == pytest.approx(9 * spread.variance.value)
    assert scaled.deviation.interval == pytest.approx([3 * end for end in spread.deviation.interval])


def test_larger_spread_is_recognized_and_an_outlier_alone_is_not() -> None:
    generator = np.random.default_rng(2)
    narrow, wide = generator.normal(size=40), 3 * generator.normal(size=40)
    assert spread_ratio(by_seed(wide), by_seed(narrow)).verdict == "larger"
    assert spread_ratio(by_seed(narrow), by_seed(wide)).verdict == "smaller"
    other = generator.normal(size=40)
    other[5] = -15.0
    spread = spread_ratio(by_seed(other), by_seed(narrow))
    assert spread.variance.value > 5 and spread.variance_without_extremes.value < 2
    assert spread.verdict == "undecided"


def test_spread_is_deterministic_and_paired_by_seed() -> None:
    generator = np.random.default_rng(3)
    a, b = by_seed(generator.normal(size=20)), by_seed(generator.normal(size=20))
    shuffled = dict(sorted(a.items(), key=lambda item: item[1]))
    assert spread_ratio(a, b) == spread_ratio(shuffled, b | {7: 1000.0})
    same = spread_ratio(a, a)
    assert same.variance.interval == (1.0, 1.0) and same.verdict == "undecided"


def test_wider_level_gives_a_wider_interval() -> None:
    generator = np.random.default_rng(4)
    a, b = by_seed(generator.normal(size=30)), by_seed(generator.normal(size=30))
    narrow, wide = spread_ratio(a, b).variance.interval, spread_ratio(a, b, level=0.999).variance.interval
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], {}, "needs 8 shared seeds or more, got 2"),
        ([1.0] * 10, list(range(10)), {}, "all scores of an experiment are equal"),
        (list(range(10)), list(range(10)), {"extremes": 4}, "extremes=4: use 0 to 3 of 10 seeds"),
        (list(range(10)), list(range(10)), {"level": 1.0}, "level=1.0: use a number between 0 and 1"),
    ],
)
def test_unusable_input_is_named(a: list[float], b: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spread_ratio(by_seed(a), by_seed(b), **options)  # type: ignore[arg-type]


def test_compare_spread_names_the_experiments() -> None:
    runs = bench.load_runs(RUNS).where("strategy=er")
    spread = bench.compare_spread(runs.where(norm="bn"), runs.where(norm="cn"))
    assert spread.verdict == "larger" and spread.names == ("norm=bn, lr=0.005", "norm=cn, lr=0.01")
    assert spread.sentence.startswith("norm=bn, lr=0.005 has a larger spread of ACC over seeds than norm=cn, lr=0.01: ")


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
            missed += [spread.variance.is_resolved, spread.deviation.is_resolved, spread.verdict != "undecided"]
        for cell, rate in zip(shown, missed / trials, strict=True):
            # rounded; or up to three binomial standard errors, if the random numbers are others
            assert float(cell) == pytest.approx(rate, abs=0.005 + 3 * math.sqrt(rate * (1 - rate) / trials))
