"""The rule of comparisons: levels, intervals and verdicts, compared with published tables and with SciPy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from contnorm.bench.sequential import (
    LOOKS,
    crossing_levels,
    decide_differences,
    decide_family,
    looks_up_to,
    nominal_levels,
    reach,
    seeds_for_difference,
)
from contnorm.errors import UserError


def draw(seeds: int, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, std, size=seeds).tolist()


def normal_bounds(sizes: tuple[int, ...], spent: list[float]) -> list[float]:
    """Critical values of normal test statistics."""
    return [float(stats.norm.isf(level / 2)) for level in crossing_levels(sizes, spent)]


def test_critical_values_equal_published_tables() -> None:
    """Lan and DeMets 1983, spending alpha * t; R's gsDesign (sfLDOF, one-sided 0.025, k=3); Pocock 1977."""
    linear = normal_bounds((1, 2, 3, 4, 5), [0.01, 0.02, 0.03, 0.04, 0.05])
    assert linear == pytest.approx([2.576, 2.490, 2.411, 2.34, 2.28], abs=0.005)
    obrien_fleming = [4 * stats.norm.sf(stats.norm.isf(0.0125) / math.sqrt(k / 3)) for k in (1, 2, 3)]
    assert normal_bounds((1, 2, 3), obrien_fleming) == pytest.approx([3.710303, 2.511427, 1.993048], abs=2e-6)
    for looks, constant in {2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413}.items():  # the same bound at each look
        spent = [crossing_probability(constant, k) for k in range(1, looks + 1)]
        assert spent[-1] == pytest.approx(0.05, abs=2e-4)
        assert normal_bounds(tuple(range(1, looks + 1)), spent) == pytest.approx([constant] * looks, abs=1e-3)


def crossing_probability(bound: float, looks: int) -> float:
    """Probability that any of some equally spaced looks exceeds a bound, by the multivariate normal distribution."""
    k = np.arange(1, looks + 1)
    covariance = np.sqrt(np.minimum.outer(k, k) / np.maximum.outer(k, k))
    inside = stats.multivariate_normal.cdf(
        [bound] * looks, cov=covariance, lower_limit=[-bound] * looks, abseps=1e-5, releps=1e-5, rng=0
    )
    return float(1 - inside)


@pytest.mark.parametrize("cases", [1, 4, 74, 10_000])
def test_intervals_of_a_larger_alpha_lie_within(cases: int) -> None:
    """Holm's procedure may go on from look to look only if this holds at each look."""
    strict, loose = nominal_levels(LOOKS, 0.05 / cases), nominal_levels(LOOKS, 0.05 / cases * 1.05)
    assert all(a < b for a, b in zip(strict, loose, strict=True))
    assert strict[0] == pytest.approx(0.95 * 0.05 / cases * 16 / 128) and sum(strict) > 0.95 * 0.05 / cases


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, 28])
def test_t_statistics_cross_at_most_as_often_as_alpha(cases: int) -> None:
    """Over all looks, with the variance estimated: four standard errors of the simulation below 5 % more than alpha."""
    generator, n = np.random.default_rng(cases), np.array(LOOKS)
    critical = stats.t.isf(np.array(nominal_levels(LOOKS, 0.05 / cases)) / 2, n - 1)
    trials, crossed = 1_000_000, 0
    for _ in range(trials // 50_000):
        values = generator.normal(size=(50_000, LOOKS[-1]))
        sums, squares = values.cumsum(axis=1)[:, n - 1], (values**2).cumsum(axis=1)[:, n - 1]
        t = sums / n / np.sqrt((squares - sums**2 / n) / (n - 1) / n)
        crossed += int((np.abs(t) > critical).any(axis=1).sum())
    rate = cases * crossed / trials
    assert rate == pytest.approx(0.0495, abs=0.001 + 4 * math.sqrt(0.05 * cases / trials))


def test_looks_up_to_a_limit() -> None:
    assert LOOKS == (16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
    assert looks_up_to(16) == (16,) and looks_up_to(39) == (16, 24, 32) and looks_up_to(1000) == LOOKS
    with pytest.raises(UserError, match="max_seeds=15: use 16 or more"):
        looks_up_to(15)


@pytest.mark.parametrize("cases", [1, 7])
def test_interval_of_a_look_equals_scipy(cases: int) -> None:
    values = draw(39, 0.3)
    decision = decide_differences(values, cases=cases)
    assert [look.seeds for look in decision.looks] == [16, 24, 32]
    for look, level in zip(decision.looks, nominal_levels((16, 24, 32), 0.05 / cases), strict=True):
        expected = stats.ttest_1samp(values[: look.seeds], 0.0).confidence_interval(1 - level)
        assert look.interval == pytest.approx((expected.low, expected.high))
        assert look.mean == pytest.approx(np.mean(values[: look.seeds]))


def test_interval_in_force_is_the_intersection() -> None:
    decision = decide_differences(draw(64, 0.2))
    intervals = [look.interval for look in decision.looks]
    assert decision.interval == (max(i.low for i in intervals if i), min(i.high for i in intervals if i))
    assert decision.seeds == decision.pairs == 64 and decision.mean == decision.looks[-1].mean


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values, 100))


def test_family_decides_by_holm() -> None:
    """The sign of one question, once decided, lends its error rate to the others, but not to the margin."""
    values = np.array(draw(16))
    values = (values - values.mean()) / values.std(ddof=1)
    half = decide_differences(values.tolist(), cases=2).interval.high  # type: ignore[union-attr]
    nearly, clear = (values + 0.97 * half).tolist(), (values + 9).tolist()
    assert decide_differences(nearly, cases=2).outcome == "undecided"
    alone = {name: decide_differences(row, margin=1.9 * half) for name, row in (("a", nearly), ("b", clear))}
    decided = decide_family(alone)
    assert [one.outcome for one in decided.values()] == ["higher", "higher"]
    assert decided["a"].interval == decide_differences(nearly).interval
    assert alone["a"].outcome == "higher, within the margin"  # as a family of its own
    assert decide_family({"a": alone["a"]}, size=2)["a"].outcome == "undecided"
    assert decide_family({"a": alone["a"]}) == {"a": alone["a"]} and decide_family({}) == {}


def test_exploratory_family_decides_by_benjamini_and_hochberg() -> None:
    """The nominal p values of a single look, decided by SciPy's procedure."""
    rows = [draw(16, mean, seed=seed) for seed, mean in enumerate([0.0, 0.6, 0.8, 0.9, 1.0, 1.2])]
    cases = {k: decide_differences(row) for k, row in enumerate(rows)}
    p = [stats.ttest_1samp(row, 0.0).pvalue / (0.95 * 16 / 128) for row in rows]
    expected = [q <= 0.05 for q in stats.false_discovery_control(np.minimum(p, 1))]
    decided = decide_family(cases, correction="benjamini-hochberg")
    assert [one.outcome != "undecided" for one in decided.values()] == expected
    assert 1 < sum(expected) < len(expected)
    assert sum(one.is_decided for one in decide_family(cases).values()) < sum(expected)


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ([0.5, 0.6] * 8, "cn is higher than bn in ACC by 0.55 points, within the margin of 1 point (interval +0."),
        ([5.0, -6.0] * 8, "Undecided whether cn or bn is higher in ACC: mean difference -0.50 (interval -"),
        ([5.0], "Undecided whether cn or bn is higher in ACC: mean difference +5.00 (1 shared seed); the first look "),
        ([], "Undecided whether cn or bn is higher in ACC: no shared seed; the first look needs 16."),
    ],
)
def test_sentence_of_a_verdict(differences: list[float], sentence: str) -> None:
    verdict = decide_differences(differences, score="acc", names=("cn", "bn"))
    assert str(verdict).startswith(sentence) and sentence in verdict._repr_html_()


def test_plan_has_the_seeds_of_true_differences() -> None:
    values = draw(20, std=1.5)
    plan = decide_differences(values).seeds_needed
    std = float(np.std(values, ddof=1))
    assert (
        f"of 0.5 points {seeds_for_difference(std, 0.5) or 'over 128'}, 1 point {seeds_for_difference(std, 1.0)}"
        in plan
    )
    assert f"{reach(std)}" in plan and decide_differences([1.0, 1.0]).seeds_needed == ""


def test_seeds_beyond_a_look_and_exploratory_seeds_do_not_count() -> None:
    values = draw(23, 1.0)
    assert decide_differences(values).interval == decide_differences(values[:16]).interval
    assert (
        decide_differences(by_seed(values) | dict.fromkeys(range(5), -50.0)).looks == decide_differences(values).looks
    )
    assert decide_differences(dict(enumerate(values, 0)), first_seed=0).seeds == 16
    assert decide_differences(draw(150)).looks == decide_differences(draw(150)[:128]).looks  # the rule ends there
    assert decide_differences(draw(128), max_seeds=39).seeds == 32


def test_look_with_a_missing_seed_does_not_count() -> None:
    values = by_seed(draw(24, 5.0))
    del values[118]
    assert decide_differences(values).seeds == 16
    del values[100]
    decision = decide_differences(values)
    assert decision.outcome == "undecided" and decision.seeds == 0 and decision.interval is None


def test_diverged_seed_is_left_out_and_named() -> None:
    values = draw(16, 5.0)
    with_nan = decide_differences([*values[:3], math.nan, *values[4:]])
    finished = {seed: value for seed, value in enumerate(values, 100) if seed != 103}
    named = decide_differences(finished, diverged=[103])
    remaining = values[:3] + values[4:]
    expected = stats.ttest_1samp(remaining, 0.0).confidence_interval(1 - 0.95 * 0.05 * 15 / 128)
    for decision in (with_nan, named):
        assert decision.interval == pytest.approx((expected.low, expected.high))
        assert (decision.seeds, decision.pairs, decision.diverged) == (16, 15, 1)
        assert "16 seeds, 1 of them diverged" in str(decision)


def test_look_without_a_new_pair_spends_nothing() -> None:
    values = draw(24, 1.0)
    decision = decide_differences(values[:16], diverged=range(116, 124))
    assert decision.looks[1].interval is None and decision.interval == decide_differences(values[:16]).interval
    assert (decision.seeds, decision.pairs) == (24, 16)


def test_all_seeds_diverged_is_undecided() -> None:
    decision = decide_differences({}, diverged=range(100, 116))
    assert decision.outcome == "undecided" and decision.seeds == 16 and decision.pairs == 0
    assert math.isnan(decision.mean) and "16 of them diverged" in str(decision)


def test_disjoint_looks_are_named_and_the_first_stands() -> None:
    values = [*([1.0, 1.1] * 8), *([-90.0, -90.1] * 24)]
    decision = decide_differences(values)
    assert decision.conflict and decision.outcome == "higher"
    assert "do not overlap" in str(decision)


def test_skewed_differences_are_named() -> None:
    decision = decide_differences([0.1, -0.1] * 15 + [0.0, -10.0])
    assert decision.skewness == pytest.approx(stats.skew([0.1, -0.1] * 15 + [0.0, -10.0]))
    assert "skewed differences (-5.4)" in str(decision)
    assert "skewed" not in str(decide_differences(draw(32)))


@pytest.mark.parametrize(("argument", "value"), [("margin", math.nan), ("cases", 0), ("alpha", 1.0)])
def test_argument_out_of_range_is_named(argument: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{argument}={value}: use"):
        decide_differences(draw(16), **{argument: value})  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-20, 20), min_size=16, max_size=70),
    st.sampled_from([1, 4, 40]),
    st.floats(0.1, 5),
)
@settings(max_examples=60, deadline=None)
def test_verdict_follows_from_the_interval(values: list[float], cases: int, margin: float) -> None:
    decision = decide_differences(values, cases=cases, margin=margin)
    assert decision.interval is not None
    low, high = decision.interval
    mirrored = decide_differences([-value for value in values], cases=cases, margin=margin)
    assert mirrored.interval == pytest.approx((-high, -low))
    swapped = {"higher": "lower", "lower": "higher"}
    word, comma, rest = decision.outcome.partition(",")
    assert mirrored.outcome == swapped.get(word, word) + comma + rest
    assert (word == "higher") == (low > 0) and (word == "lower") == (high < 0)
    within = word == "equivalent" or decision.outcome.endswith("within the margin")
    assert within == (max(-low, high) < margin)


@given(st.integers(0, 2**32 - 1), st.floats(-1, 1))
@settings(max_examples=20, deadline=None)
def test_sign_stands_once_it_is_decided(seed: int, mean: float) -> None:
    """A later look may narrow a verdict to the margin, but not take it back."""
    values = draw(128, mean, seed=seed)
    verdicts = [decide_differences(values[:size]).outcome.partition(",")[0] for size in LOOKS]
    decided = [verdict for verdict in verdicts if verdict in ("higher", "lower")]
    assert len(set(decided)) <= 1
    assert not decided or verdicts[verdicts.index(decided[0]) :] == decided


@pytest.mark.parametrize(("max_seeds", "cases"), [(16, 1), (32, 5), (128, 37)])
def test_half_width_equals_that_of_a_decision(max_seeds: int, cases: int) -> None:
    values = np.array(draw(max_seeds))
    values = 1.7 * (values - values.mean()) / values.std(ddof=1)
    interval = decide_differences(values.tolist(), cases=cases).looks[-1].interval
    last = reach(1.7, 1.0, cases, max_seeds)
    assert interval is not None and last.half_width == pytest.approx(interval.high)
    assert last.is_possible == (interval.high <= 1) and last.seeds == len(values)


@pytest.mark.parametrize(("std", "difference", "cases"), [(1.0, 1.0, 1), (1.3, 0.5, 1), (1.3, 0.7, 20)])
def test_seeds_for_a_difference_have_the_power(std: float, difference: float, cases: int) -> None:
    """The look alone has a power of at least 80 %, and the look before has less, in a simulation."""
    seeds = seeds_for_difference(std, difference, cases)
    assert seeds is not None
    generator, trials = np.random.default_rng(1), 4000
    powers = []
    for k in (LOOKS.index(seeds), LOOKS.index(seeds) - 1):
        values = generator.normal(difference, std, size=(trials, LOOKS[k]))
        level = 1 - nominal_levels(LOOKS, 0.05 / cases)[k]
        low = stats.ttest_1samp(values, 0.0, axis=1).confidence_interval(level).low
        powers.append(np.mean(low > 0))
    error = 4 * math.sqrt(0.8 * 0.2 / trials)  # four binomial standard errors
    assert powers[0] > 0.8 - error and powers[1] < 0.8 + error


def test_seeds_for_no_difference_are_unknown() -> None:
    assert seeds_for_difference(1.0, 0.0) is None and seeds_for_difference(1.0, 1e-9) is None
    assert seeds_for_difference(1.0, math.nan) is None and seeds_for_difference(0.0, 1.0) == 16
