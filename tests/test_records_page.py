"""docs/records/README.md: the archives are what it says, and settings were selected by the rule that it states."""

import gzip
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "records"
PAGE = " ".join((FOLDER / "README.md").read_text().split())
ARCHIVES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.jsonl.gz"))
FRESH, PANEL = "runs/split-cifar100-fresh-seeds.jsonl.gz", "runs/split-cifar100-panel.jsonl.gz"
TRIALS = "split-cifar100-panel-validation.jsonl.gz"
GRIDS = ("split-cifar100-coarse-grid.jsonl.gz", "split-cifar100-fine-grid.jsonl.gz")
MINI, MOMENTS = "split-mini-imagenet-derpp.jsonl.gz", "split-cifar100-er-memory-moments.jsonl.gz"
NORMS = {
    "none": "none",
    "bn": "BN",
    "brn": "BRN",
    "scaled": "BRN with scaled limits",
    "in": "IN",
    "gn": "GN",
    "sn": "SN",
}


@cache
def records(name: str) -> list[dict[str, Any]]:
    with gzip.open(FOLDER / name, "rt") as lines:
        return [json.loads(line) for line in lines]


def acc(record: dict[str, Any]) -> float:
    """Mean accuracy after the last task, from the counts."""
    matrix = record["matrix"]
    return 100 * fmean(right / total for right, total in zip(matrix["correct"][-1], matrix["total"], strict=True))


def diverged(record: dict[str, Any]) -> bool:
    return record.get("status") == "diverged" or not {"matrix", "labels"} & record.keys()


def strategy(record: dict[str, Any]) -> str:
    return str(record["config"]["strategy"]["name"])


def norm(record: dict[str, Any]) -> str:
    """Name of the norm, with the schedule of BRN and the evaluation of BN."""
    config = record["config"]
    name = "scaled" if config["norm"]["schedule"] == "scaled" else str(config["norm"]["name"])
    frozen = "frozen" if config["norm"].get("freeze_after") else config["evaluate"]["moments"]
    return name if frozen == "running" else f"{name} {frozen}"


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_has_the_described_runs(name: str) -> None:
    contents = records(name)
    places = [(record["hash"], record["seed"]) for record in contents]
    assert places == sorted(set(places))
    assert re.search(rf"\| `{re.escape(name)}` \| [^|]*\b{len(contents)} runs", PAGE)


def test_rates_of_the_paper_s_norms_follow_the_stated_rule() -> None:
    """The highest mean on the validation tasks among the rates with five seeds, and the smaller one of equal means."""
    tried: dict[tuple[str, str], dict[float, dict[int, float]]] = {}
    for record in (record for grid in GRIDS for record in records(grid)):
        assert record["config"]["stream"]["part"] == "validate"
        if not diverged(record):
            rates = tried.setdefault((norm(record), strategy(record)), {})
            rates.setdefault(record["config"]["train"]["lr"], {})[record["seed"]] = acc(record)
    used = {(norm(record), strategy(record)): record["config"]["train"]["lr"] for record in records(FRESH)}
    assert used.keys() == tried.keys()
    for of, rates in tried.items():
        means = {rate: fmean(seeds.values()) for rate, seeds in sorted(rates.items()) if len(seeds) == 5}
        assert used[of] == max(means, key=lambda rate: means[rate]), of
        assert min(rates) < used[of] < max(rates), of
    for name, label in {**NORMS, "cn": "CN"}.items():
        assert f"{label} {used[name, 'er']:g} and {used[name, 'derpp']:g}" in PAGE
    close = [fmean(tried["cn", "derpp"][rate].values()) for rate in (0.01, 0.005)]
    assert "{:.2f} at 0.01 and {:.2f} at 0.005".format(*close) in PAGE


def test_panel_has_equal_budgets_and_repeats_the_earlier_training() -> None:
    contents = records(TRIALS)
    assert {(record["config"]["stream"]["part"], record["seed"]) for record in contents} == {
        ("validate", seed) for seed in range(3)
    }
    budgets = Counter((strategy(record), norm(record)) for record in contents)
    assert len(budgets) == 22 and set(budgets.values()) == {21}
    older = [record for grid in GRIDS for record in records(grid)]
    assert set(Counter((strategy(record), norm(record)) for record in older).values()) == {31, 34}
    bn = {(strategy(r), r["config"]["train"]["lr"], r["seed"]): r["matrix"] for r in older if norm(r) == "bn"}
    places = [(r, (strategy(r), r["config"]["train"]["lr"], r["seed"])) for r in contents if "matrix_running" in r]
    pairs = [(record["matrix_running"], bn[place]) for record, place in places if place in bn]
    assert len(pairs) == 78 and all(again == first for again, first in pairs) and "all 78 cases" in PAGE


def test_diverged_runs_are_named() -> None:
    found = Counter(
        (name, strategy(record), norm(record), record["config"]["train"]["lr"])
        for name in (FRESH, PANEL, TRIALS)
        for record in records(name)
        if diverged(record)
    )
    assert found == {
        (FRESH, "derpp", "none", 0.05): 1,
        **{(TRIALS, name, "adab2n", 0.1): 3 for name in ("er", "derpp")},
        **{(TRIALS, "derpp", "rbn", rate): 2 for rate in (0.03, 0.1)},
        **{(TRIALS, "derpp", "bn frozen", rate): 1 for rate in (0.01, 0.03, 0.1)},
    }
    assert sum(diverged(record) for name in ARCHIVES for record in records(name)) == 22
    assert "seed 116 diverged" in PAGE and "Twenty-two of the runs diverged" in PAGE


def test_repeated_runs_have_the_same_counts() -> None:
    first = {(record["hash"], record["seed"]): record for record in records("runs/tables.jsonl.gz")}
    again = [r for r in records("split-cifar100-exploratory.jsonl.gz") if (r["hash"], r["seed"]) in first]
    assert len(again) == 20
    assert all(record["matrix"] == first[record["hash"], record["seed"]]["matrix"] for record in again)
