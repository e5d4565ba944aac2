"""The primary questions of each stream, decided again from the archives with NumPy and SciPy alone.

Scores, the critical values of the looks (by convolution on a grid), Student's intervals, their intersection, and Holm's
procedure are written again here. They agree with `bench.compare`, `decide_family` and docs/results/evidence.md.
"""

import gzip
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from tools.comparisons import comparisons

from contnorm import bench
from contnorm.bench.sequential import decide_family
from tests.committed_records import FOLDER

FRESH, PANEL = (FOLDER / "runs" / f"split-cifar100-{name}.jsonl.gz" for name in ("fresh-seeds", "panel"))
HASHES = {"er": ("aa4d38bbfd99", "1cde1b2b4f6c"), "derpp": ("2761c7e0638d", "e10bfe4b96ef")}  # CN and BN
LOOKS = range(16, 129, 8)
STEP = 0.02  # of the grid of sums
Questions = dict[str, dict[int, float]]


@cache
def lines(path: Any) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as text:
        return [record for record in map(json.loads, text) if record.get("status", "finished") == "finished"]


def score(counts: dict[str, Any], name: str) -> float:
    rows = [[np.nan if n is None else 100 * n / of for n, of in zip(row, counts["total"], strict=True)]
            for row in counts["correct"]]  # fmt: skip
    so_far = [np.mean(row[: place + 1]) for place, row in enumerate(rows)]
    return float(so_far[-1] if name == "acc" else np.mean(so_far))


def questions(name: str) -> Questions:
    """Differences by seed: CN minus BN, and moments of the memory minus running ones of the same networks."""
    found: Questions = {}
    for strategy, hashes in HASHES.items():
        cn, bn = ({r["seed"]: score(r["matrix"], name) for r in lines(FRESH) if r["hash"] == h} for h in hashes)
        found[f"cn {strategy}"] = {seed: cn[seed] - bn[seed] for seed in sorted(cn.keys() & bn.keys())}
        memory = [
            r for r in lines(PANEL)
            if r["config"]["norm"]["name"] == "bn" and r["config"]["strategy"]["name"] == strategy
            and r["config"]["evaluate"]["moments"] == "memory"
            and r["config"]["evaluate"].get("weights", "plain") == "plain"
        ]  # fmt: skip
        of = {r["seed"]: score(r["matrix"], name) - score(r["matrix_running"], name) for r in memory}
        found[f"memory {strategy}"] = dict(sorted(of.items()))
    return found


@cache
def bounds(alpha: float) -> NDArray[np.float64]:
    """Critical values of the looks: 0.95 * alpha * n / 128 is spent by n seeds."""
    grid = np.arange(-60, 60 + STEP, STEP)
    density, found, before = np.zeros_like(grid), [], 0
    density[len(grid) // 2] = 1 / STEP
    for seeds in LOOKS:
        kernel = stats.norm.pdf(np.arange(-30, 30 + STEP, STEP), scale=np.sqrt(seeds - before))
        density = np.convolve(density, kernel, mode="same") * STEP
        outside = 2 * (density[::-1].cumsum()[::-1] - density / 2) * STEP  # beyond each point, on both sides
        place = len(grid) // 2 + np.argmax(outside[len(grid) // 2 :] <= 0.95 * alpha * (seeds - before) / 128)
        low, high = outside[place - 1], outside[place]
        share = (low - 0.95 * alpha * (seeds - before) / 128) / (low - high)
        bound = grid[place - 1] + share * STEP
        density = np.where(np.abs(grid) <= bound, density, 0.0)
        found.append(bound / np.sqrt(seeds))
        before = seeds
    return np.array(found)


def interval(differences: dict[int, float], alpha: float) -> tuple[float, float]:
    """Intersection of Student's intervals at the nominal levels of the looks."""
    low, high = -np.inf, np.inf
    for seeds, bound in zip(LOOKS, bounds(alpha), strict=True):
        if not all(seed in differences for seed in range(100, 100 + seeds)):
            break
        values = [differences[seed] for seed in range(100, 100 + seeds)]
        half = stats.t.isf(stats.norm.sf(bound), seeds - 1) * stats.sem(values)
        low, high = max(low, np.mean(values) - half), min(high, np.mean(values) + half)
    return low, high


def family(differences: Questions) -> dict[str, tuple[float, float]]:
    """Holm's procedure: each decided sign lends its error rate to the others."""
    decided = -1
    while True:
        intervals = {name: interval(values, 0.05 / (4 - max(decided, 0))) for name, values in differences.items()}
        signs = sum(low > 0 or high < 0 for low, high in intervals.values())
        if signs in (decided, 4):
            return intervals
        decided = signs


@pytest.mark.parametrize("name", ["aia", "acc"])
def test_primary_family_is_that_of_an_independent_computation(name: str) -> None:
    fresh, panel = bench.load_runs(FRESH), bench.load_runs(PANEL)
    verdicts = {}
    for strategy, hashes in HASHES.items():
        cn, bn = (fresh.by_run()[run] for run in hashes)
        verdicts[f"cn {strategy}"] = bench.compare(cn, bn, name)
        where = {"evaluate.moments": "memory", "evaluate.weights": "plain"}
        memory = panel.where(norm="bn", strategy=strategy, **where)
        verdicts[f"memory {strategy}"] = bench.compare(memory, memory, name, moments=("memory", "running"))
    mine = questions(name)
    for question, verdict in verdicts.items():
        assert verdict.differences == pytest.approx(mine[question], abs=1e-9)
    expected = family(mine)
    for question, verdict in decide_family(verdicts).items():
        low, high = expected[question]
        assert verdict.interval == pytest.approx((low, high), abs=2e-3), question
        assert verdict.outcome.startswith("higher") == (low > 0) and verdict.outcome.startswith("lower") == (high < 0)


@pytest.mark.parametrize("name", ["aia", "acc"])
@pytest.mark.parametrize(
    ("archive", "tuned", "prefix"),
    [("split-cifar100-class-order", "order", "order"), ("split-mini-imagenet-fresh-seeds", "mini tuned", "mini")],
)
def test_verdicts_of_the_evidence_page_are_those_of_an_independent_computation(
    archive: str, tuned: str, prefix: str, name: str
) -> None:
    by_place: dict[tuple[str, str, str], dict[int, float]] = {}
    for record in lines(FOLDER / "runs" / f"{archive}.jsonl.gz"):
        for key in ("matrix", "matrix_memory"):
            place = record["config"]["norm"]["name"], record["config"]["strategy"]["name"], key
            by_place.setdefault(place, {})[record["seed"]] = score(record[key], name)
    mine: Questions = {}
    for strategy in HASHES:
        bn = by_place["bn", strategy, "matrix"]
        sides = {f"{tuned} {strategy}": ("cn", strategy, "matrix")}
        sides[f"{prefix} bn {strategy}"] = ("bn", strategy, "matrix_memory")
        sides = {question: place for question, place in sides.items() if place in by_place}
        mine |= {question: {seed: by_place[place][seed] - bn[seed] for seed in bn} for question, place in sides.items()}
    page = (FOLDER.parent / "results" / "evidence.md").read_text()
    for question, (low, high) in family(mine).items():
        one = comparisons()[question]
        (row,) = [row for row in page.splitlines() if row.startswith(f"| {one.what} | {one.situation} |")]
        written = row.split(" | ")[5].partition("; at the end ")[0 if name == "aia" else 2]
        if low > 0 or high < 0:
            assert written.partition(",")[0] == ("higher" if low > 0 else "lower"), question
        else:
            low, high = interval(mine[question], 0.05 / 4)
            assert written == ("equivalent" if low > -1 and high < 1 else "undecided"), question
