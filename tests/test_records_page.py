"""docs/records/README.md: its numbers are those of the records of the fine grid and of the fresh seeds."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.config.schema import from_dict

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "records"
PAGE = (FOLDER / "README.md").read_text()
README = " ".join((FOLDER.parents[1] / "README.md").read_text().split())
LABELS = {
    "none": "none",
    "bn": "BN",
    "brn": "BRN",
    "in": "IN",
    "gn": "GN, 32 groups",
    "sn": "SN",
    "cn": "CN, 32 groups",
}


def records(name: str) -> list[dict[str, Any]]:
    with gzip.open(FOLDER / name, "rt") as lines:
        return [json.loads(line) for line in lines]


def scores(record: dict[str, Any]) -> tuple[float, float, float]:
    """ACC, FM and LA in percent, from the counts by the paper's definitions."""
    correct, total = record["matrix"]["correct"], np.array(record["matrix"]["total"], float)
    tasks = len(total)
    matrix = np.full((tasks, tasks), np.nan)
    for row, counts in enumerate(correct[-tasks:]):
        known = [np.nan if count is None else count for count in counts]
        matrix[row, : len(known)] = np.array(known, float) / total[: len(known)] * 100
    last = matrix[-1]
    forgetting = [max(matrix[j:-1, j]) - last[j] for j in range(tasks - 1)]
    return float(np.mean(last)), float(np.mean(forgetting)), float(np.mean(np.diag(matrix)))


def by_run(name: str) -> dict[tuple[str, str], dict[int, tuple[float, float, float]]]:
    runs: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    for record in records(name):
        norm = record["config"]["norm"]
        label = LABELS[norm["name"]] + (", scaled limits" if norm["schedule"] == "scaled" else "")
        strategy = {"er": "ER", "derpp": "DER++"}[record["config"]["strategy"]["name"]]
        runs.setdefault((strategy, label), {})[record["seed"]] = scores(record)
    return runs


@pytest.fixture(scope="module")
def fresh() -> dict[tuple[str, str], dict[int, tuple[float, float, float]]]:
    return by_run("split-cifar100-fresh-seeds.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "count"),
    [("split-cifar100-fine-grid.jsonl.gz", 283), ("split-cifar100-fresh-seeds.jsonl.gz", 264)],
)
def test_archives_have_the_described_runs(name: str, count: int) -> None:
    contents = records(name)
    assert len(contents) == count == len({(record["hash"], record["seed"]) for record in contents})
    assert all(from_dict(record["config"]).hash == record["hash"] for record in contents)
    assert {record["config"]["train"]["precision"] for record in contents} == {"tf32"}
    assert {record["device"]["name"] for record in contents} == {"NVIDIA H200"}
    assert re.search(rf"\| `{name}` \| .*\b{count} runs", PAGE)


def test_page_lists_all_archives_with_their_number_of_runs() -> None:
    archives = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.jsonl.gz")}
    listed = dict(re.findall(r"^\| `(\S+\.jsonl\.gz)` \| .*?\b(\d+) runs", PAGE, re.M))
    assert {name: len(records(name)) for name in archives} == {name: int(count) for name, count in listed.items()}


def test_seeds_of_test_tasks_are_new(
    fresh: dict[tuple[str, str], dict[int, tuple[float, float, float]]],
) -> None:
    assert min(seed for seeds in fresh.values() for seed in seeds) == 100
    parts = {record["config"]["stream"]["part"] for record in records("split-cifar100-fine-grid.jsonl.gz")}
    assert parts == {"validate"}


def test_table_matches_the_records(fresh: dict[tuple[str, str], dict[int, tuple[float, float, float]]]) -> None:
    rows = re.findall(r"^\| (ER|DER\+\+) \| (.+?) \| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M)
    assert {(strategy, label) for strategy, label, *_ in rows} == set(fresh)
    for strategy, label, seeds, *printed in rows:
        values = np.array(list(fresh[strategy, label].values()))
        assert int(seeds) == len(values)
        for text, column in zip(printed, values.T, strict=True):
            assert text == f"{column.mean():.2f} ± {column.std(ddof=1):.2f}"


@pytest.mark.parametrize(
    ("strategy", "printed"), [("ER", "with ER +0.34 ± 0.48"), ("DER++", "with DER++ -0.93 ± 0.40")]
)
def test_paired_difference_matches_the_records(
    fresh: dict[tuple[str, str], dict[int, tuple[float, float, float]]], strategy: str, printed: str
) -> None:
    bn, cn = fresh[strategy, "BN"], fresh[strategy, "CN, 32 groups"]
    differences = [cn[seed][0] - bn[seed][0] for seed in sorted(bn)]
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    assert len(differences) == 32 and f"with {strategy} {np.mean(differences):+.2f} ± {half:.2f}" == printed
    assert printed in PAGE.replace("\n", " ")
    assert f"{printed.partition(strategy)[2].strip()} points with {strategy}" in README


def test_split_cifar10_page_has_the_numbers_of_its_records() -> None:
    accuracy: dict[tuple[int, str, str], dict[int, float]] = {}
    for record in records("split-cifar10-more-seeds.jsonl.gz"):
        size, norm = record["config"]["memory"]["size"], record["config"]["norm"]["name"]
        for scenario, key in (("class", "matrix"), ("task", "matrix_task")):
            last, total = record[key]["correct"][-1], np.array(record[key]["total"])
            mean = float((100 * np.array(last) / total).mean())
            accuracy.setdefault((size, scenario, norm), {})[record["seed"]] = mean
    assert len(accuracy) == 8 and all(sorted(seeds) == list(range(5, 16)) for seeds in accuracy.values())
    for size in (500, 2560):
        for scenario in ("class", "task"):
            bn, cn = (
                np.array([accuracy[size, scenario, norm][seed] for seed in range(5, 16)]) for norm in ("bn", "cn")
            )
            difference = cn - bn
            half = stats.t.ppf(0.975, 10) * difference.std(ddof=1) / np.sqrt(11)
            row = f"| {size:,} | {scenario}-incremental | {bn.mean():.2f} | {cn.mean():.2f} | "
            row += f"{difference.mean():+.2f} ± {half:.2f} | {(difference > 0).sum()} of 11 |"
            assert row in PAGE
