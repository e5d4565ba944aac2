"""Verdicts, p values and the seeds needed, compared with SciPy and with a power computed by integration."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from contnorm.bench.comparison import compare, differing_keys, experiment_names, paired_verdict, unpaired_verdict
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Record, make_record
from contnorm.bench.stats import MOST_SEEDS, paired_p_value, seeds_for_effect, welch_p_value
from contnorm.errors import UserError

RNG = np.random.default_rng(5)
A, B = RNG.normal(60, 2, 9).tolist(), RNG.normal(61, 1, 7).tolist()


def config(**groups: Any) -> RunConfig:
    return from_dict({"stream": {"name": "split-mnist", "scenario": "task", "part": "all", "augment": False}, **groups})


def experiment(values: list[int], **groups: Any) -> list[Record]:
    """Seed s has an accuracy of values[s] percent."""
    made = config(**groups)
    return [make_record(made, seed, {"matrix": {"correct": [[v]], "total": [100]}}) for seed, v in enumerate(values)]


def power(effect: float, seeds: int, samples: int) -> float:
    """P(T > c) = E[Phi(nc - c s)], where s is the standard deviation that is estimated, over the true one."""
    df = samples * (seeds - 1)
    critical, shift = stats.t.ppf(0.975, df), effect * math.sqrt(seeds / samples)
    end = 1 + 12 / math.sqrt(df)
    density = lambda s: stats.norm.cdf(shift - critical * s) * stats.chi.pdf(s, df, scale=1 / math.sqrt(df))  # noqa: E731
    return float(integrate.quad(density, 0, end, limit=400)[0])


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("effect", [0.2, 0.5, 1.0, 2.5, 9.0])
def test_seeds_needed_have_the_power(effect: float, samples: int) -> None:
    needed = seeds_for_effect(effect, samples)
    assert needed is not None and needed == seeds_for_effect(-effect, samples)
    assert power(effect, needed, samples) >= 0.8 - 1e-6
    assert needed == 2 or power(effect, needed - 1, samples) < 0.8


def test_seeds_needed_are_limited() -> None:
    assert seeds_for_effect(1e-9) == MOST_SEEDS
    assert seeds_for_effect(0.0) is seeds_for_effect(math.nan) is seeds_for_effect(math.inf) is None


def test_p_values_equal_scipy() -> None:
    differences = [a - b for a, b in zip(A, B, strict=False)]
    assert paired_p_value(differences) == pytest.approx(stats.ttest_rel(A[:7], B).pvalue)
    assert welch_p_value(A, B) == pytest.approx(stats.ttest_ind(A, B, equal_var=False).pvalue)
    assert math.isnan(paired_p_value([1.0])) and math.isnan(paired_p_value([1.0, 1.0]))
    assert math.isnan(welch_p_value([1.0], B)) and math.isnan(welch_p_value([1.0, 1.0], B))


def test_resolved_verdict_has_interval_seeds_and_p() -> None:
    cn, bn = experiment([64, 66, 67, 65], norm={"name": "cn"}), experiment([60, 61, 64, 62])
    result = compare(cn, bn)
    test = stats.ttest_rel([64, 66, 67, 65], [60, 61, 64, 62])
    low, high = test.confidence_interval(0.95)
    assert result.resolved and result.p == pytest.approx(test.pvalue) and result.names == ("cn32", "bn")
    assert result.verdict.startswith("cn32 is higher than bn in ACC by 3.75 points (")
    assert f"95 % interval {low:.2f} to {high:.2f}, 4 paired seeds, p = {test.pvalue:.3f}" in result.verdict
    lower = compare(bn, cn).verdict
    assert lower.startswith("bn is lower than cn32") and f"95 % interval {low:.2f} to {high:.2f}" in lower


def test_undecided_verdict_has_the_seeds_needed() -> None:
    result = compare(experiment([64, 60, 67], train={"lr": 0.1}), experiment([60, 61, 64]), "acc")
    assert not result.resolved and result.seeds_needed is not None
    assert result.verdict.startswith("Undecided: lr=0.1 is 2.00 points higher than lr=0.03 in ACC")
    assert f"About {result.seeds_needed} seeds would resolve" in result.verdict and "power 80 %" in result.verdict
    effect = float(np.mean([4, -1, 3]) / np.std([4, -1, 3], ddof=1))
    assert power(effect, result.seeds_needed, 1) >= 0.8 > power(effect, result.seeds_needed - 1, 1)


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([0.0, 0.0], "No difference: a and b have the same ACC in 2 paired seeds"),
        ([1.0], "Undecided: a is 1.00 points higher .*1 paired seed.*two seeds"),
        ([-1.0, -1.0, -1.0], "Undecided: a is 1.00 points lower .*each of 3 paired seeds.*no interval"),
        ([1.0, -1.0], "Undecided: a and b have the same mean ACC .*p = 1.00\\).$"),
        ([1e-9, 1.0, -1.0], "More than 1,000,000 seeds"),
    ],
)
def test_verdict_without_an_estimate(differences: list[float], words: str) -> None:
    assert re.search(words, paired_verdict("acc", ("a", "b"), differences))


def test_unpaired_verdict_is_welchs() -> None:
    test = stats.ttest_ind(A, B, equal_var=False)
    text = unpaired_verdict("fm", ("a", "b"), A, B)
    low, high = test.confidence_interval(0.95)
    assert f"95 % interval {low:+.2f} to {high:+.2f}, 9 and 7 unpaired seeds, p = {test.pvalue:.2f}" in text
    assert "Undecided" in text and "seeds of each would resolve" in text
    assert "two seeds or more of each" in unpaired_verdict("fm", ("a", "b"), A, B[:1])


def test_names_are_the_settings_that_differ() -> None:
    bn, cn8 = config(), config(norm={"name": "cn", "groups": 8})
    both = config(norm={"name": "cn"}, train={"lr": 0.1})
    assert experiment_names(bn, cn8) == ("bn", "cn8")
    assert experiment_names(cn8, config(norm={"name": "cn"})) == ("cn8", "cn32")
    assert experiment_names(bn, both) == ("norm=bn, lr=0.03", "norm=cn, lr=0.1")
    assert experiment_names(bn, bn) == ("a", "b")
    assert differing_keys(bn, both) == ["norm.name", "train.lr"], "batch norm has no groups"


def test_several_experiments_are_rejected_by_name() -> None:
    several = [*experiment([1, 2]), *experiment([1, 2], train={"lr": 0.1})]
    with pytest.raises(UserError, match=r"2 experiments, which differ in train.lr \(0.03, 0.1\)"):
        compare(several, experiment([1, 2], norm={"name": "cn"}))
