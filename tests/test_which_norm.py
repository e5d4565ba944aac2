"""docs/which-norm.md, docs/results/evidence.md and the README: their numbers and words are those of the records.

The numbers are computed here again, from the archives, with numpy and scipy alone.
"""

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from tools.comparisons import NEWER, STRATEGIES, comparisons
from tools.evidence import Cell, Comparison, MeanCell

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOWTO = DOCS / "howto" / "moments-from-memory.md"
EVIDENCE = (DOCS / "results" / "evidence.md").read_text()
PAGE = (DOCS / "which-norm.md").read_text()
README = (ROOT / "README.md").read_text()
PLACES = {  # of conditions in a record
    "norm": ("norm", "name"),
    "groups": ("norm", "groups"),
    "momentum": ("norm", "momentum"),
    "schedule": ("norm", "schedule"),
    "freeze_after": ("norm", "freeze_after"),
    "strategy": ("strategy", "name"),
    "stream": ("stream", "name"),
    "part": ("stream", "part"),
    "tasks": ("stream", "tasks"),
    "lr": ("train", "lr"),
    "buffer": ("memory", "size"),
    "memory": ("memory", "kind"),
    "evaluate.moments": ("evaluate", "moments"),
}
MINI_TRIALS = "split-mini-imagenet-validation.jsonl.gz"
Accuracies = NDArray[np.float64]


@cache
def records(archive: str) -> list[dict[str, Any]]:
    with gzip.open(DOCS / "records" / archive, "rt") as lines:
        return [json.loads(line) for line in lines]


def setting(record: dict[str, Any], name: str) -> Any:
    section, key = PLACES[name]
    return record["config"][section].get(key)


def has_settings(record: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a finished run satisfies conditions; one that they do not name has its default."""
    if record.get("status", "finished") != "finished":
        return False
    wanted = {"freeze_after": None, **where}
    if where.get("norm") == "bn" and "evaluate.moments" not in where and "matrix_running" not in record:
        wanted["evaluate.moments"] = "running"
    return all(setting(record, name) == value for name, value in wanted.items())


def matrix(record: dict[str, Any], key: str) -> Accuracies:
    """Accuracy in percent after each task (rows) on each task; NaN if a task was not measured then."""
    counts = record[key]
    tasks = len(counts["total"])
    rows = [[np.nan if n is None else n for n in row] + [np.nan] * (tasks - len(row)) for row in counts["correct"]]
    percent: Accuracies = 100 * np.array(rows[-tasks:], float) / np.array(counts["total"], float)
    return percent


def after_each_task(accuracies: Accuracies) -> Accuracies:
    """Mean accuracy on the tasks so far, after each task."""
    return np.array([row[: place + 1].mean() for place, row in enumerate(accuracies)])


def scores(accuracies: Accuracies) -> dict[str, float]:
    last = accuracies[-1]
    forgetting = [max(accuracies[task:-1, task]) - last[task] for task in range(len(last) - 1)]
    means = {"acc": last, "aia": after_each_task(accuracies), "fm": forgetting, "la": np.diag(accuracies)}
    return {name: float(np.mean(values)) for name, values in means.items()}


def of_cell(cell: Cell | MeanCell, score: str) -> dict[int, float]:
    """Score by seed."""
    if isinstance(cell, MeanCell):
        parts = [of_cell(one, score) for one in cell.cells]
        return {seed: float(np.mean([part[seed] for part in parts])) for seed in parts[0]}
    runs = [r for archive in cell.archives for r in records(archive) if has_settings(r, dict(cell.where))]
    found = {record["seed"]: scores(matrix(record, cell.matrix))[score] for record in runs}
    assert len(found) == len(runs) > 0, cell
    return found


def paired(first: dict[int, float], second: dict[int, float]) -> NDArray[np.float64]:
    return np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def differences(comparison: Comparison, score: str) -> NDArray[np.float64]:
    return paired(of_cell(comparison.first, score), of_cell(comparison.second, score))


def text(values: NDArray[np.float64]) -> str:
    """Mean with its 95 % interval, as the pages write it."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{values.mean():+.2f} ({values.mean() - half:+.2f} to {values.mean() + half:+.2f})"


def interval(name: str, score: str = "aia") -> tuple[float, float]:
    values = differences(comparisons()[name], score)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean() - half, values.mean() + half


@pytest.mark.parametrize("name", [name for name, one in comparisons().items() if one.scores != ("map",)])
def test_row_of_evidence_is_that_of_the_records(name: str) -> None:
    """Recomputed without contnorm: scores, pairs, and Student's interval."""
    one = comparisons()[name]
    (row,) = [
        line
        for line in EVIDENCE.splitlines()
        if line.startswith(f"| {one.what} | {one.situation} |") and one.basis in line
    ]
    for score in one.scores:
        values = differences(one, score)
        assert text(values) in row and f"| {len(values)} |" in row, (score, text(values), row)


@pytest.mark.parametrize("page", [README, PAGE], ids=["README", "which-norm"])
def test_differences_of_a_page_are_in_the_evidence(page: str) -> None:
    """Signed numbers with two decimals; the README's with their intervals."""
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    numbers = re.findall(r"[+-]\d+\.\d\d \([+-][^)]+\)", tables) or re.findall(r"[+-]\d+\.\d\d", tables)
    assert len(numbers) >= 18 and [number for number in numbers if number not in EVIDENCE] == []


def test_words_about_bn_and_cn_are_supported() -> None:
    readme = " ".join(README.split())
    assert "CN is not above batch norm on Split CIFAR-100, nor with ER on Split mini-ImageNet." in readme
    assert all(interval(f"tuned {strategy}")[1] < 0 for strategy in STRATEGIES)
    for name in ("order er", "order derpp", "mini tuned er"):
        low, high = interval(name)
        assert low + high < 0 and high < 0.25, "over the stream"
    assert "With DER++ on Split mini-ImageNet and Split CIFAR-10, CN is ahead in exploratory runs." in readme
    for rate in (0.003, 0.005, 0.01, 0.03):
        for score in ("acc", "aia"):
            assert (differences(comparisons()[f"mini derpp {rate}"], score) > 0).all(), "on every seed"
    for size in (500, 2560):
        for known in ("known", "unknown"):
            values = differences(comparisons()[f"cifar10 {size} {known}"], "aia")
            assert len(values) == 16 and interval(f"cifar10 {size} {known}")[0] > 0
            assert differences(comparisons()[f"cifar10 {size} {known}"], "acc").mean() > 0


def test_moments_of_the_memory_gain_task_incrementally_and_lose_class_incrementally() -> None:
    readme, howto = (" ".join(path.read_text().split()) for path in (ROOT / "README.md", HOWTO))
    assert "Batch norm and CN both gain on Split CIFAR-100 and Split mini-ImageNet, where that was run." in readme
    same = {name: one for name, one in comparisons().items() if one.what.endswith("moments of the memory - running")}
    lost = [name for name in same if name.startswith("class")]
    gained = [name for name in same if name not in lost]
    assert len(gained) == 10 and all(interval(name, score)[0] > 0 for name in gained for score in ("aia", "acc"))
    assert "on Split MNIST both lose" in readme and len(lost) == 4
    assert all(interval(name, score)[1] < 0 for name in lost for score in ("aia", "acc"))
    spans = {
        (score, kind): sorted(abs(differences(comparisons()[name], score).mean()) for name in names)
        for score in ("aia", "acc")
        for kind, names in (("gained", gained), ("lost", lost))
    }
    gain, loss, end = (spans[key] for key in (("aia", "gained"), ("aia", "lost"), ("acc", "lost")))
    assert f"gain {gain[0]:.1f} to {gain[-1]:.1f} points of mean accuracy over the stream" in howto
    assert f"lose {loss[0]:.1f} to {loss[-1]:.1f} points with one weight" in howto
    assert f"and {end[0]:.1f} to {end[-1]:.1f} points at the end" in howto
    batch = [name for name in comparisons() if name.startswith("class batch")]
    assert len(batch) == 4 and all(interval(name)[0] > -0.2 for name in batch)


def test_best_rates_with_moments_of_the_memory_are_those_of_the_validation_tasks() -> None:
    for strategy, words in (
        ("er", "{:.2f} (BN, at {:g}) and {:.2f} (CN, at {:g}) with ER"),
        ("derpp", "{:.2f} (BN, at {:g}) and {:.2f} (CN, at {:g}) with DER++"),
    ):
        found: list[float] = []
        for norm in ("bn", "cn"):
            runs = [r for r in records(MINI_TRIALS) if has_settings(r, {"norm": norm, "strategy": strategy})]
            by_rate: dict[float, list[float]] = {}
            for record in runs:
                acc = scores(matrix(record, "matrix_memory"))["acc"]
                by_rate.setdefault(record["config"]["train"]["lr"], []).append(acc)
            assert {len(values) for values in by_rate.values()} == {5}
            best = max(by_rate, key=lambda rate: np.mean(by_rate[rate]))
            found += [float(np.mean(by_rate[best])), best]
        assert words.format(*found) in " ".join(PAGE.split())


def test_deviations_over_seeds_are_those_of_the_records() -> None:
    again, tuned = comparisons()["memory again"], comparisons()["tuned er"]
    cells = again.second, again.first, tuned.first
    bn, memory, cn = (np.std(list(of_cell(cell, "acc").values()), ddof=1) for cell in cells)
    words = f"BN {bn:.2f}, the same networks with moments of the memory {memory:.2f}; CN {cn:.2f}"
    assert words in PAGE and memory < cn < bn


def test_newer_norms_are_not_shown_to_be_above_bn() -> None:
    widths = []
    for strategy in STRATEGIES:
        for entry in NEWER:
            low, high = interval(f"{entry} {strategy}", "acc")
            assert low < 0, (entry, strategy)
            widths.append((high - low) / 2)
    assert f"intervals of ACC of ±{min(widths):.1f} to ±{max(widths):.1f}" in PAGE
    rivals = " ".join((DOCS / "concepts" / "rivals.md").read_text().split())
    assert "FRN, robust batch norm and EvoNorm-S0 are below BN." in rivals
    for entry in ("FRN", "RBN", "EvoNorm-S0"):
        assert all(interval(f"{entry} {strategy}", score)[1] < 0 for strategy in STRATEGIES for score in ("acc", "aia"))
