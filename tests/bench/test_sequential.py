"""The staged rule: stages, levels, intervals and verdicts, compared with SciPy and with hand-worked cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from contnorm.bench.sequential import (
    ALPHA,
    STAGES,
    Decision,
    decide_differences,
    reachable,
    seeds_for_difference,
    stage_level,
    stage_seeds,
    stage_weight,
    stages_up_to,
)
from contnorm.bench.stats import equivalence_probability
from contnorm.errors import UserError


def draw(seeds: int, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, std, size=seeds).tolist()


def test_stages_double_and_weights_stay_below_one() -> None:
    assert tuple(stage_seeds(k) for k in range(5)) == STAGES == (8, 16, 32, 64, 128)
    assert [stage_weight(k) for k in range(5)] == [0.05, 0.10, 0.15, 0.25, 0.35]
    assert stage_weight(5) == 0.025 and stage_weight(6) == 0.0125
    assert math.fsum(stage_weight(k) for k in range(200)) == pytest.approx(0.95)


def test_stages_up_to_a_limit() -> None:
    assert stages_up_to(8) == (8,) and stages_up_to(127) == (8, 16, 32, 64) and stages_up_to(300)[-1] == 256
    with pytest.raises(UserError, match="max_seeds=7: use 8 or more"):
        stages_up_to(7)


@pytest.mark.parametrize("cases", [1, 7])
def test_interval_of_a_stage_equals_scipy(cases: int) -> None:
    values = draw(32, 0.3)
    decision = decide_differences(values, cases=cases)
    assert [look.seeds for look in decision.looks] == [8, 16, 32]
    for look, weight in zip(decision.looks, (0.05, 0.10, 0.15), strict=True):
        expected = stats.ttest_1samp(values[: look.seeds], 0.0).confidence_interval(1 - 0.05 / cases * weight)
        assert look.interval == pytest.approx((expected.low, expected.high))
        assert look.mean == pytest.approx(np.mean(values[: look.seeds]))


def test_interval_in_force_is_the_intersection() -> None:
    decision = decide_differences(draw(64, 0.2))
    intervals = [look.interval for look in decision.looks]
    assert decision.interval == (max(i.low for i in intervals if i), min(i.high for i in intervals if i))
    assert decision.seeds == decision.pairs == 64 and decision.mean == decision.looks[-1].mean


@pytest.mark.parametrize(
    ("mean", "std", "margin", "verdict"),
    [
        (3.0, 1.0, 1.0, "higher"),
        (-3.0, 1.0, 1.0, "lower"),
        (0.5, 0.1, 1.0, "higher, within the margin"),
        (-0.5, 0.1, 1.0, "lower, within the margin"),
        (0.0, 0.3, 1.0, "equivalent"),
        (0.0, 3.0, 1.0, "undecided"),
        (0.0, 3.0, 9.0, "equivalent"),
    ],
)
def test_verdict_of_a_difference(mean: float, std: float, margin: float, verdict: str) -> None:
    values = np.array(draw(16))
    values = mean + std * (values - values.mean()) / values.std()  # of exactly this mean
    decision = decide_differences(values.tolist(), margin=margin)
    assert decision.verdict == verdict and decision.is_decided == (verdict != "undecided")
    assert decision.within_margin == (verdict == "equivalent" or verdict.endswith("the margin"))


def test_verdict_as_text() -> None:
    assert str(decide_differences([0.5, 0.6] * 4)).startswith(
        "higher by 0.55 points, within the margin of 1 point (int"
    )
    assert str(decide_differences([0.1, -0.1] * 4, margin=2)).startswith(
        "equivalent within the margin of 2 points, mean"
    )
    assert str(decide_differences([5.0, -6.0] * 4)).startswith("undecided, mean difference -0.50 (interval -")
    assert str(decide_differences([5.0] * 7)) == "undecided (0 seeds, a stage needs 8)"


def test_seeds_beyond_a_stage_and_exploratory_seeds_do_not_count() -> None:
    values = draw(15, 1.0)
    assert decide_differences(values) == decide_differences(values[:8])
    by_seed = dict(enumerate(values, 100)) | dict.fromkeys(range(5), -50.0)
    assert decide_differences(by_seed) == decide_differences(values[:8])
    assert decide_differences(dict(enumerate(values, 0)), first_seed=0).seeds == 8


def test_stage_with_a_missing_seed_does_not_count() -> None:
    by_seed = dict(enumerate(draw(16, 5.0), 100))
    del by_seed[112]
    assert decide_differences(by_seed).seeds == 8
    del by_seed[100]
    decision = decide_differences(by_seed)
    assert decision.verdict == "undecided" and decision.seeds == 0 and decision.interval is None


def test_diverged_seed_is_left_out_and_named() -> None:
    values = draw(8, 5.0)
    with_nan = decide_differences([*values[:3], math.nan, *values[4:]])
    by_seed = {seed: value for seed, value in enumerate(values, 100) if seed != 103}
    named = decide_differences(by_seed, diverged=[103])
    remaining = values[:3] + values[4:]
    expected = stats.ttest_1samp(remaining, 0.0).confidence_interval(1 - 0.05 * 0.05)
    for decision in (with_nan, named):
        assert decision.interval == pytest.approx((expected.low, expected.high))
        assert (decision.seeds, decision.pairs, decision.diverged) == (8, 7, 1)
        assert "8 seeds, 1 of them diverged" in str(decision)


def test_all_seeds_diverged_is_undecided() -> None:
    decision = decide_differences({}, diverged=range(100, 108))
    assert decision.verdict == "undecided" and decision.seeds == 8 and decision.pairs == 0
    assert math.isnan(decision.mean) and "8 of them diverged" in str(decision)


def test_limit_ends_the_stages() -> None:
    values = draw(128)
    assert decide_differences(values, max_seeds=40).seeds == 32
    with pytest.raises(UserError, match="max_seeds=4"):
        decide_differences(values, max_seeds=4)


def test_disjoint_stages_are_named_and_the_first_stands() -> None:
    values = [*([1.0, 1.1] * 4), *([-9.0, -9.1] * 28)]
    decision = decide_differences(values)
    assert decision.conflict and decision.verdict == "higher"
    assert "do not overlap" in str(decision)


def test_skewed_differences_are_named() -> None:
    decision = decide_differences([0.1, -0.1] * 15 + [0.0, -10.0])
    assert decision.skewness == pytest.approx(stats.skew([0.1, -0.1] * 15 + [0.0, -10.0]))
    assert "skewed differences (-5.4)" in str(decision)
    assert "skewed" not in str(decide_differences(draw(32)))


@pytest.mark.parametrize(
    ("argument", "value"), [("margin", 0.0), ("margin", math.nan), ("cases", 0), ("alpha", 1.0), ("alpha", 0.0)]
)
def test_argument_out_of_range_is_named(argument: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{argument}={value}: use"):
        decide_differences(draw(8), **{argument: value})  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-20, 20), min_size=8, max_size=70),
    st.integers(1, 40),
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
    word, comma, rest = decision.verdict.partition(",")
    assert mirrored.verdict == swapped.get(word, word) + comma + rest
    assert (word == "higher") == (low > 0) and (word == "lower") == (high < 0)
    assert decision.within_margin == (max(-low, high) < margin)


@given(st.integers(0, 2**32 - 1), st.floats(-1, 1))
@settings(max_examples=40, deadline=None)
def test_sign_stands_once_it_is_decided(seed: int, mean: float) -> None:
    """A later stage may narrow a verdict to the margin, but not take it back."""
    values = draw(128, mean, seed=seed)
    verdicts = [decide_differences(values[:size]).verdict.partition(",")[0] for size in STAGES]
    decided = [verdict for verdict in verdicts if verdict in ("higher", "lower")]
    assert len(set(decided)) <= 1
    assert not decided or verdicts[verdicts.index(decided[0]) :] == decided


@pytest.mark.parametrize(("max_seeds", "cases"), [(8, 1), (32, 5), (128, 37), (256, 1)])
def test_half_width_equals_that_of_a_decision(max_seeds: int, cases: int) -> None:
    values = np.array(draw(stages_up_to(max_seeds)[-1]))
    values = 1.7 * (values - values.mean()) / values.std(ddof=1)
    interval = decide_differences(values.tolist(), cases=cases).looks[-1].interval
    reach = reachable(1.7, 1.0, cases, max_seeds)
    assert interval is not None and reach.half_width == pytest.approx(interval.high)
    assert reach.is_reachable == (interval.high <= 1) and reach.seeds == len(values)


def test_probability_of_equivalence_equals_a_simulation() -> None:
    generator, trials = np.random.default_rng(0), 20_000
    for seeds, margin, level in ((16, 0.5, 0.95), (32, 0.7, 0.99)):
        values = generator.normal(size=(trials, seeds))
        half = stats.t.ppf((1 + level) / 2, seeds - 1) * values.std(axis=1, ddof=1) / math.sqrt(seeds)
        rate = np.mean(np.abs(values.mean(axis=1)) + half < margin)
        # four binomial standard errors
        assert equivalence_probability(margin, seeds, level) == pytest.approx(rate, abs=4 * 0.5 / math.sqrt(trials))


@pytest.mark.parametrize(("std", "difference", "cases"), [(1.0, 1.0, 1), (1.3, 0.5, 1), (1.3, 0.5, 20), (2.0, 3.0, 4)])
def test_seeds_for_a_difference_have_the_power(std: float, difference: float, cases: int) -> None:
    """The stage alone has a power of at least 80 %, and the stage before has less, in a simulation."""
    seeds = seeds_for_difference(std, difference, cases)
    assert seeds is not None
    generator, trials = np.random.default_rng(1), 4000
    powers = []
    for k in (STAGES.index(seeds), STAGES.index(seeds) - 1):
        values = generator.normal(difference, std, size=(trials, STAGES[k]))
        level = stage_level(k, cases, ALPHA)
        low = stats.ttest_1samp(values, 0.0, axis=1).confidence_interval(level).low
        powers.append(np.mean(low > 0))
    error = 4 * math.sqrt(0.8 * 0.2 / trials)  # four binomial standard errors
    assert powers[0] > 0.8 - error and powers[1] < 0.8 + error


def test_seeds_for_no_difference_are_unknown() -> None:
    assert seeds_for_difference(1.0, 0.0) is None and seeds_for_difference(1.0, 1e-9) is None
    assert seeds_for_difference(1.0, math.nan) is None and seeds_for_difference(0.0, 1.0) == 8


def test_decision_before_the_first_stage_is_undecided() -> None:
    decision = decide_differences([])
    assert isinstance(decision, Decision) and decision.verdict == "undecided" and not decision.looks
