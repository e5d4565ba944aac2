"""Error rates and power of the staged rule, simulated with normal and with recorded, skewed differences.

The recorded differences are the scores of pairs of norms in the committed records of Split CIFAR-100, fresh seeds. They
are centered and drawn again with replacement. The simulation has its own vectorized arithmetic, which the first test
compares with the rule. The tables of docs/concepts/deciding.md are held to it.
"""

import itertools
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from contnorm import bench
from contnorm.bench.sequential import LOOKS, SKEWED, decide_differences, nominal_levels

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records" / "runs" / "split-cifar100-fresh-seeds.jsonl.gz"
PAGE = ROOT / "docs" / "concepts" / "deciding.md"
TRIALS = 20_000
Array = NDArray[np.float64]


class Bounds(NamedTuple):
    """Interval in force after each look, of every trial: arrays of shape (looks, trials)."""

    low: Array
    high: Array

    def excludes_zero(self) -> NDArray[np.bool_]:
        return (self.low > 0) | (self.high < 0)

    def within(self, margin: float) -> NDArray[np.bool_]:
        return (self.low > -margin) & (self.high < margin)


def simulate(differences: Array, cases: int = 1) -> Bounds:
    """Apply the rule to rows of 128 differences."""
    low, high = np.full(len(differences), -np.inf), np.full(len(differences), np.inf)
    lows, highs = [], []
    sums, squares = differences.cumsum(axis=1), (differences**2).cumsum(axis=1)
    for seeds, level in zip(LOOKS, nominal_levels(LOOKS, 0.05 / cases), strict=True):
        mean = sums[:, seeds - 1] / seeds
        variance = (squares[:, seeds - 1] - seeds * mean**2) / (seeds - 1)
        half = stats.t.isf(level / 2, seeds - 1) * np.sqrt(variance / seeds)
        overlap = (mean - half <= high) & (mean + half >= low)
        low = np.where(overlap, np.maximum(low, mean - half), low)
        high = np.where(overlap, np.minimum(high, mean + half), high)
        lows.append(low)
        highs.append(high)
    return Bounds(np.array(lows), np.array(highs))


NORMS = ["none", "bn", "brn", "brn-scaled", "in", "gn", "sn", "cn"]
HASHES = {
    "er": "30f54e6db35e 1cde1b2b4f6c cb9cf5fca579 894b214398af 49a36da1593f 067a5d6a9640 8675a7649693 aa4d38bbfd99",
    "derpp": "b36db6d35b91 e10bfe4b96ef 171a7ba10a88 74e53cf8a831 390f2dbdce7a acfe29520ffb 90b35bbbd278 2761c7e0638d",
}


@cache
def scores() -> dict[tuple[str, str], dict[int, float]]:
    """ACC by seed, by strategy and norm, of the first 32 fresh seeds."""
    runs = bench.load_runs(RECORDS).by_run()
    return {
        (strategy, norm): {record.seed: record.score("acc") for record in runs[name] if record.seed < 132}
        for strategy, names in HASHES.items()
        for norm, name in zip(NORMS, names.split(), strict=True)
    }


def recorded(strategy: str, a: str, b: str) -> Array:
    first, second = scores()[strategy, a], scores()[strategy, b]
    return np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def centered(strategy: str, a: str, b: str) -> Array:
    differences = recorded(strategy, a, b)
    return differences - differences.mean()


STD = 1.33  # of normal differences: that of CN and BN with ER


def draw(name: str, seed: int = 0) -> Array:
    """Trials of 128 differences of mean 0: normal ones, or those of a recorded pair, such as ``er cn bn``."""
    generator = np.random.default_rng(seed)
    if name == "normal":
        return generator.normal(0, STD, size=(TRIALS, LOOKS[-1]))
    return generator.choice(centered(*name.split()), size=(TRIALS, LOOKS[-1]))


def error_of(rate: float, trials: int = TRIALS) -> float:
    """Four binomial standard errors."""
    return 4 * math.sqrt(max(rate, 0.001) * (1 - rate) / trials)


def test_simulation_equals_the_rule() -> None:
    differences = np.concatenate([draw("normal")[:12] + 0.4, draw("derpp brn-scaled cn")[:12]])
    for cases in (1, 10):
        bounds = simulate(differences, cases)
        for trial, row in enumerate(differences):
            for k, seeds in enumerate(LOOKS):
                interval = decide_differences(row[:seeds].tolist(), cases=cases).interval
                assert interval == pytest.approx((bounds.low[k, trial], bounds.high[k, trial]))


def test_standard_deviation_of_normal_differences_is_the_recorded_one() -> None:
    assert recorded("er", "cn", "bn").std(ddof=1) == pytest.approx(STD, abs=0.005)


@pytest.mark.slow
def test_wrong_signs_of_recorded_differences_depend_on_the_skewness() -> None:
    """Below the skewness that is named, the rate exceeds alpha by 0.015 at most."""
    names = [f"{s} {a} {b}" for (s, a), (t, b) in itertools.combinations(scores(), 2) if s == t]
    assert len(names) == 56
    rates = {name: simulate(draw(name)).excludes_zero()[-1].mean() for name in names}
    for name, rate in rates.items():
        if abs(stats.skew(centered(*name.split()))) < SKEWED:
            assert rate <= 0.065 + error_of(0.065), name
    exceeding = sorted(name for name, rate in rates.items() if rate > 0.05 + error_of(0.05))
    text = " ".join(PAGE.read_text().split())
    assert f"In {sum(rate <= 0.05 for rate in rates.values())} of these 56 pairs" in text
    assert f"{len(exceeding)} exceed it by more than" in text


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of the page, without its two header lines."""
    lines = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 2, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def check_rate(shown: str, rate: float) -> None:
    """The page has the rate of this simulation, rounded; or up to its error, if the random numbers are others."""
    rounding = 0.501 * 10 ** -len(shown.partition(".")[2])
    assert float(shown) == pytest.approx(rate, abs=max(rounding, error_of(rate)))


@pytest.mark.slow
def test_error_rates_in_the_documentation_are_simulated() -> None:
    names = {"normal": "normal", "CN, BN; ER": "er cn bn", "CN, BN; DER++": "derpp cn bn"}
    names |= {
        "BN, IN; ER": "er bn in",
        "none, BN; DER++": "derpp none bn",
        "BRN scaled, CN; DER++": "derpp brn-scaled cn",
    }
    rows = rows_of("How often it is wrong")
    assert [row[0] for row in rows] == list(names)
    for (_, skewness, first, last, margin), name in zip(rows, names.values(), strict=True):
        values = draw(name)
        expected = 0.0 if name == "normal" else stats.skew(centered(*name.split()))
        assert float(skewness) == pytest.approx(expected, abs=0.051)
        signs = simulate(values).excludes_zero().mean(axis=1)
        check_rate(first, signs[0])
        check_rate(last, signs[-1])
        check_rate(margin, max(simulate(values + sign).within(1.0)[-1].mean() for sign in (1, -1)))


@pytest.mark.slow
def test_power_in_the_documentation_is_simulated() -> None:
    for difference, *shown, name in rows_of("How many seeds it takes"):
        bounds = simulate(draw({"normal": "normal", "CN, BN; ER": "er cn bn"}[name]) + float(difference))
        decided = (bounds.excludes_zero() if float(difference) else bounds.within(1.0)).mean(axis=1)
        for cell, seeds in zip(shown, (16, 24, 32, 48, 64, 96, 128), strict=True):
            check_rate(cell, decided[LOOKS.index(seeds)])


def tables_of(strategy: str, trials: int = 4000) -> float:
    """Rate of tables of all pairs of norms with a wrong sign: seeds are drawn together, all differences are 0."""
    norms = [norm for of, norm in scores() if of == strategy]
    seeds = sorted(set.intersection(*(set(scores()[strategy, norm]) for norm in norms)))
    values = {norm: np.array([scores()[strategy, norm][seed] for seed in seeds]) for norm in norms}
    drawn = np.random.default_rng(0).integers(0, len(seeds), (trials, LOOKS[-1]))
    pairs = list(itertools.combinations(norms, 2))
    errors = np.zeros(trials, dtype=bool)
    for a, b in pairs:
        differences = values[a] - values[b]
        errors |= simulate((differences - differences.mean())[drawn], cases=len(pairs)).excludes_zero()[-1]
    return float(errors.mean())


@pytest.mark.slow
def test_error_rates_of_whole_tables_in_the_documentation_are_simulated() -> None:
    rows = rows_of("A whole table")
    assert [row[0] for row in rows] == ["ER", "DER++"]
    for (_, _, shown), strategy in zip(rows, ("er", "derpp"), strict=True):
        rate = tables_of(strategy)
        assert float(shown) == pytest.approx(rate, abs=max(0.0051, error_of(rate, 4000)))
