"""docs/records/README.md: its numbers are those of the records of the fine grid and of the fresh seeds."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from contnorm.bench.config.schema import from_dict
from contnorm.paper.comparisons import count_comparisons
from contnorm.paper.recipe import find_recipe

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


def finished(name: str) -> list[dict[str, Any]]:
    return [record for record in records(name) if record.get("status", "finished") == "finished"]


def scores(record: dict[str, Any], key: str = "matrix") -> tuple[float, float, float]:
    """ACC, FM and LA in percent, from the counts by the paper's definitions."""
    correct, total = record[key]["correct"], np.array(record[key]["total"], float)
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
    for record in finished(name):
        norm = record["config"]["norm"]
        label = LABELS[norm["name"]] + (", scaled limits" if norm["schedule"] == "scaled" else "")
        strategy = {"er": "ER", "derpp": "DER++"}[record["config"]["strategy"]["name"]]
        runs.setdefault((strategy, label), {})[record["seed"]] = scores(record)
    return runs


@pytest.fixture(scope="module")
def fresh() -> dict[tuple[str, str], dict[int, tuple[float, float, float]]]:
    return by_run("runs/split-cifar100-fresh-seeds.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("split-cifar100-fine-grid.jsonl.gz", 283),
        ("runs/split-cifar100-fresh-seeds.jsonl.gz", 640),
        ("runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz", 226),
        ("runs/permuted-mnist-fresh-seeds.jsonl.gz", 128),
        ("runs/split-cifar100-panel.jsonl.gz", 216),
        ("runs/split-cifar100-panel-weights.jsonl.gz", 32),
        ("split-cifar100-panel-validation.jsonl.gz", 462),
    ],
)
def test_archives_have_the_described_runs(name: str, count: int) -> None:
    contents = records(name)
    assert len(contents) == count == len({(record["hash"], record["seed"]) for record in contents})
    assert all(from_dict(record["config"]).hash == record["hash"] for record in contents)
    device = {(record["config"]["train"]["precision"], record["device"]["name"]) for record in contents}
    assert device == {("fp32", "x86_64") if "mnist" in name else ("tf32", "NVIDIA H200")}
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


@pytest.mark.parametrize(("strategy", "seeds"), [("ER", 64), ("DER++", 32)])
def test_paired_difference_matches_the_records(
    fresh: dict[tuple[str, str], dict[int, tuple[float, float, float]]], strategy: str, seeds: int
) -> None:
    bn, cn = fresh[strategy, "BN"], fresh[strategy, "CN, 32 groups"]
    differences = {seed: cn[seed][0] - bn[seed][0] for seed in sorted(bn.keys() & cn.keys())}
    values = list(differences.values())
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    text = " ".join(PAGE.split())
    assert f"with {strategy} {np.mean(values):+.2f} ± {half:.2f}" in text and f"over {seeds}" in text
    assert len(values) == seeds
    spreads = [np.std([one[0] for one in cell.values()], ddof=1) for cell in (bn, cn)]
    assert "{:.2f} and {:.2f} with {}".format(*spreads, strategy) in text
    _, mean, low, high = staged_rule(COMPARISONS["2"], differences, set())
    outcome = {"ER": "CN and BN are equivalent", "DER++": "BN is better than CN"}[strategy]
    evidence = f"{mean:+.2f} points ({low:+.2f} to {high:+.2f}, {seeds} seeds)"
    assert f"| {strategy}, learning rate tuned for each norm | {outcome} | CN - BN: {evidence} |" in README


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


Scores = dict[int, tuple[float, float, float]]
# Archives of fresh seeds by the choice of the learning rate: selected for each norm, or that of the recipe.
FRESH = {
    "selected": "runs/split-cifar100-fresh-seeds.jsonl.gz",
    "recipe": "runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz",
    "permuted": "runs/permuted-mnist-fresh-seeds.jsonl.gz",
}
RATE_OF_TABLE = {"1": "permuted", "2": "selected"}  # of other tables: the recipe's
STRATEGIES = {"er": "ER", "derpp": "DER++", "single": "Single"}
VARIANTS = ("bn_gn", "cn_tied", "bn_gn_tied")
# The staged rule: comparisons of each table among which 0.05 is divided, and the share of each stage.
COMPARISONS = {"1": 8, "2": 44, "8": 15, "9": 6, "10": 8, "12": 5}
PANEL_COMPARISONS = 74
STAGES = {8: 0.05, 16: 0.1, 32: 0.15, 64: 0.25, 128: 0.35}
MARGIN = 1.0


def norm_label(norm: dict[str, Any]) -> str:
    if norm["momentum"] is not None:
        return "BN, cumulative" if norm["momentum"] == "cumulative" else f"BN, weight {norm['momentum']}"
    if norm["name"] in VARIANTS:
        return f"`{norm['name']}`"
    return LABELS[norm["name"]].removesuffix(", 32 groups") + (", scaled" if norm["schedule"] == "scaled" else "")


@pytest.fixture(scope="module")
def by_rate() -> dict[tuple[str, str], dict[str, Scores]]:
    """Scores of the fresh seeds by learning rate (selected or the recipe's), runs, norm and seed."""
    found: dict[tuple[str, str], dict[str, Scores]] = {}
    for rate, name in FRESH.items():
        for record in finished(name):
            config = record["config"]
            tasks = f", {config['stream']['tasks']} tasks" if config["stream"]["tasks"] else ""
            cells = found.setdefault((rate, STRATEGIES[config["strategy"]["name"]] + tasks), {})
            label = norm_label(config["norm"])
            if config["evaluate"]["moments"] == "oracle":
                cells.setdefault(label + "\\*", {})[record["seed"]] = scores(record)
                cells.setdefault(label, {})[record["seed"]] = scores(record, "matrix_running")
            else:
                cells.setdefault(label, {})[record["seed"]] = scores(record)
    return found


def is_rounded(text: str, value: float) -> bool:
    """Whether a text is a value with two decimals; of a tie, either neighbor."""
    return re.fullmatch(r"[+-]?\d+\.\d\d", text) is not None and abs(float(text) - value) < 0.005 + 1e-9


def test_more_tables_have_the_scores_of_their_records(by_rate: dict[tuple[str, str], dict[str, Scores]]) -> None:
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \| ([^|]+) \| ([^|]+) \| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M)
    printed = {(RATE_OF_TABLE.get(table, "recipe"), runs, norm) for table, runs, norm, *_ in rows}
    assert printed == {(*of, norm) for of, cells in by_rate.items() if of[0] != "selected" for norm in cells}
    assert len(rows) == len(printed)
    for table, runs, norm, seeds, *texts in rows:
        values = np.array(list(by_rate[RATE_OF_TABLE.get(table, "recipe"), runs][norm].values()))
        assert int(seeds) == len(values)
        for text, column in zip(texts, values.T, strict=True):
            mean, deviation = text.split(" ± ")
            assert is_rounded(mean, column.mean()) and is_rounded(deviation, column.std(ddof=1)), (runs, norm, text)


def staged_rule(comparisons: int, differences: dict[int, float], diverged: set[int]) -> tuple[int, float, float, float]:
    """Seeds and mean difference of the last complete stage, and the intersection of the intervals of all stages."""
    size, mean, low, high = 0, np.nan, -np.inf, np.inf
    for seeds, share in STAGES.items():
        if not set(range(100, 100 + seeds)) <= differences.keys() | diverged:
            break
        values = [differences[seed] for seed in range(100, 100 + seeds) if seed in differences]
        half = stats.t.ppf(1 - 0.05 / comparisons * share / 2, len(values) - 1) * stats.sem(values)
        size, mean = seeds, float(np.mean(values))
        low, high = max(low, mean - half), min(high, mean + half)
    return size, mean, low, high


def verdict(low: float, high: float) -> str:
    within = low > -MARGIN and high < MARGIN
    if low <= 0 <= high:
        return "equivalent" if within else "undecided"
    return ("higher" if low > 0 else "lower") + (", within the margin" if within else "")


def diverged_seeds() -> dict[tuple[str, str], set[int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for record in (record for name in FRESH.values() for record in records(name) if record.get("status") == "diverged"):
        config = record["config"]
        found.setdefault((STRATEGIES[config["strategy"]["name"]], norm_label(config["norm"])), set()).add(
            record["seed"]
        )
    return found


def test_comparisons_match_the_records(by_rate: dict[tuple[str, str], dict[str, Scores]]) -> None:
    """Paired differences, with the interval and the verdict of the staged rule."""
    what = r"^\| (\d+) \| ([^|]+) \| (ACC|FM|LA) \| (.+) minus (.+)"
    pattern = what + r" \| (\d+) \| (\S+) \| (\S+) to (\S+) \| ([^|]+) \|$"
    rows = re.findall(pattern, PAGE, re.M)
    counts = Counter(row[0] for row in rows)
    assert counts == {"1": 6, "2": 22, "8": 3, "9": 4, "10": 4, "12": 5}
    for table, runs, score, first, second, *printed in rows:
        cells = by_rate[RATE_OF_TABLE.get(table, "recipe"), runs]
        column = ("ACC", "FM", "LA").index(score)
        both = cells[first].keys() & cells[second].keys()
        differences = {seed: cells[first][seed][column] - cells[second][seed][column] for seed in both}
        lost = set().union(*(diverged_seeds().get((runs, norm), set()) for norm in (first, second)))
        seeds, mean, low, high = staged_rule(COMPARISONS[table], differences, lost)
        place = (table, runs, score, first, second)
        assert printed[0] == str(seeds), place
        assert all(text[0] in "+-" for text in printed[1:4])
        assert all(map(is_rounded, printed[1:4], (mean, low, high))), (place, mean, low, high)
        assert printed[4] == verdict(low, high), place


@pytest.mark.parametrize("strategy", ["single", "er"])
def test_drift_of_variances_matches_the_records(strategy: str) -> None:
    """Table 1: of BN at the end, the second layer minus the first."""
    runs = [record for record in records(FRESH["permuted"]) if record["config"]["norm"]["name"] == "bn"]
    last = {
        record["seed"]: record["drift"]["by_task"][-1]
        for record in runs
        if record["config"]["strategy"]["name"] == strategy
    }
    differences = {seed: float(drift["norm2"]["var"]) - float(drift["norm1"]["var"]) for seed, drift in last.items()}
    seeds, mean, low, high = staged_rule(COMPARISONS["1"], differences, set())
    row = f"| 1 | {STRATEGIES[strategy]} | drift of variances | BN, layer 2 minus layer 1 | {seeds} | {mean:+.2f} | "
    assert f"{row}{low:+.2f} to {high:+.2f} | {verdict(low, high)} |" in PAGE


def test_comparisons_divide_the_error_rate_as_the_claims_do() -> None:
    assert {t: count_comparisons(find_recipe(f"table{t}")) for t in COMPARISONS} == COMPARISONS
    text = " ".join(PAGE.split())
    assert "8, 44, 15, 6, 8 and 5 comparisons of Tables 1, 2, 8, 9, 10 and 12" in text


def test_diverged_run_of_the_fresh_seeds_is_named() -> None:
    (diverged,) = [record for record in records(FRESH["selected"]) if record.get("status") == "diverged"]
    config = diverged["config"]
    assert (config["norm"]["name"], config["strategy"]["name"], diverged["seed"]) == ("none", "derpp", 116)
    assert "seed 116" in PAGE


PANEL, PANEL_VALIDATION = "runs/split-cifar100-panel.jsonl.gz", "split-cifar100-panel-validation.jsonl.gz"
PANEL_LABELS = {
    "adab2n": "AdaB2N",
    "tbbn": "TBBN",
    "bnt": "BNT",
    "evonorm_s0": "EvoNorm-S0",
    "frn": "FRN",
    "gn_ws": "GN with weight standardization",
    "iabn": "IABN",
    "rbn": "RBN",
}


def panel_label(config: dict[str, Any]) -> str:
    if config["norm"].get("freeze_after"):
        return "BN, frozen after the first task"
    moments = {"memory": "BN, moments of the memory", "task": "BN, moments of each task", "running": "BN"}
    return PANEL_LABELS.get(config["norm"]["name"], moments[config["evaluate"]["moments"]])


# Entries with the seeds of the second stage, by strategy; the others have those of the first.
MEMORY = "BN, moments of the memory"
LONGER = {"ER": {MEMORY, "TBBN", "GN with weight standardization", "IABN"}, "DER++": {MEMORY}}
RUNNING = ", evaluated with running ones"


@pytest.fixture(scope="module")
def panel(fresh: dict[tuple[str, str], Scores]) -> dict[tuple[str, str], Scores]:
    """Scores of the panel's entries by strategy and label, and of the first 16 seeds of BN and CN."""
    found: dict[tuple[str, str], Scores] = {}
    for record in finished(PANEL):
        key = (STRATEGIES[record["config"]["strategy"]["name"]], panel_label(record["config"]))
        found.setdefault(key, {})[record["seed"]] = scores(record)
        if record.get("matrix_running"):
            found.setdefault((key[0], key[1] + RUNNING), {})[record["seed"]] = scores(record, "matrix_running")
    for strategy in LONGER:
        for label in ("BN", "CN, 32 groups"):
            known = fresh[strategy, label]
            found[strategy, label.removesuffix(", 32 groups")] = {seed: known[seed] for seed in range(100, 116)}
    return found


def part_of_panel(strategy: str) -> str:
    """The section of the page on the panel with one strategy."""
    text = PAGE.partition(f"### The panel with {strategy}\n")[2]
    return re.split(r"^##", text, flags=re.M)[0]


@pytest.mark.parametrize("strategy", LONGER)
def test_panel_has_the_scores_of_its_records(panel: dict[tuple[str, str], Scores], strategy: str) -> None:
    rates = {
        panel_label(record["config"]): record["config"]["train"]["lr"]
        for record in records(PANEL)
        if STRATEGIES[record["config"]["strategy"]["name"]] == strategy
    }
    rates |= {"BN": 0.005, "CN": 0.01}
    expected = []
    for label in (label for of, label in panel if of == strategy):
        base, cell = label.removesuffix(RUNNING), panel[strategy, label]
        assert sorted(cell) == list(range(100, 116 if base in {"BN", "CN", *LONGER[strategy]} else 108))
        texts = " | ".join(f"{one.mean():.2f} ± {one.std(ddof=1):.2f}" for one in np.array(list(cell.values())).T)
        expected.append(f"| {label} | {rates[base]:g} | {len(cell)} | {texts} |")
    printed = re.findall(r"^\| .* ± .* \|$", part_of_panel(strategy), re.M)
    assert len(expected) == 15 and Counter(printed) == Counter(expected)


@pytest.mark.parametrize("strategy", LONGER)
def test_panel_comparisons_match_the_records(panel: dict[tuple[str, str], Scores], strategy: str) -> None:
    """Paired differences in ACC with ordinary 95 % intervals, and with those of the staged rule and its verdicts."""
    assert count_comparisons(find_recipe("panel")) == PANEL_COMPARISONS
    assert f"the {PANEL_COMPARISONS} comparisons of the panel" in " ".join(PAGE.split())
    pattern = r"^\| (.+) minus (BN|CN) \| (\d+) \| (\S+) \| (\S+) to (\S+) \| (\S+) to (\S+) \| ([^|]+) \|$"
    rows = re.findall(pattern, part_of_panel(strategy), re.M)
    others = [label for of, label in panel if of == strategy and label not in ("BN", "CN") and RUNNING not in label]
    only_bn = ("BN, frozen after the first task", "BN, moments of each task")  # no question compares them with CN
    pairs = [(first, second) for first in others for second in ("BN", "CN") if second == "BN" or first not in only_bn]
    assert Counter(row[:2] for row in rows) == Counter(pairs)
    for first, second, seeds, *printed, outcome in rows:
        one, other = panel[strategy, first], panel[strategy, second]
        differences = {seed: one[seed][0] - other[seed][0] for seed in one}
        values = list(differences.values())
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        size, mean, low, high = staged_rule(PANEL_COMPARISONS, differences, set())
        assert int(seeds) == size == len(values)
        expected = (mean, mean - half, mean + half, low, high)
        assert all(map(is_rounded, printed, expected)), (first, second, expected)
        assert outcome == verdict(low, high)
    higher = [row[:2] for row in rows if row[-1].startswith("higher")]
    assert higher == ([(MEMORY, "CN")] if strategy == "DER++" else [])
    on_bn, on_cn = ("undecided", "higher") if strategy == "DER++" else ("undecided", "undecided")
    assert re.search(
        rf"{re.escape(strategy)}, BN evaluated.*? over BN \({on_bn}\), \S+ points over CN \({on_cn}\)", README
    )


@pytest.mark.parametrize("strategy", LONGER)
def test_panel_advantage_of_the_memory_is_stated(panel: dict[tuple[str, str], Scores], strategy: str) -> None:
    mean = {label: np.mean([one[0] for one in cell.values()]) for (of, label), cell in panel.items() if of == strategy}
    running = mean[MEMORY + RUNNING]
    parts = (
        f"{running - mean['BN']:.2f} points are due to its learning rate, and {mean[MEMORY] - running:.2f} to the eval"
    )
    assert parts in " ".join(part_of_panel(strategy).split())
    assert max(mean, key=lambda label: mean[label]) == MEMORY
    if strategy == "DER++":
        above = {label for label in mean if mean[label] > mean["BN"] and RUNNING not in label}
        assert above == {MEMORY, "IABN"} and "no other entry has a higher mean than BN" in " ".join(PAGE.split())
    gain = f"{mean[MEMORY] - mean['BN']:+.2f} points over BN"
    assert (
        f"{strategy}, BN evaluated with moments of the memory | it has the highest mean of all norms | {gain}" in README
    )
    assert "| 8 newer norms, ER and DER++ | none is shown to be above BN | each with 8 or 16 seeds |" in README


def test_panel_runs_have_equal_budgets_and_repeat_the_earlier_training() -> None:
    contents = records(PANEL_VALIDATION)
    assert {record["config"]["stream"]["part"] for record in contents} == {"validate"}
    assert {record["seed"] for record in contents} == {0, 1, 2}
    budgets = Counter((record["config"]["strategy"]["name"], panel_label(record["config"])) for record in contents)
    assert len(budgets) == 22 and set(budgets.values()) == {21}
    older = [r for grid in ("coarse", "fine") for r in records(f"split-cifar100-{grid}-grid.jsonl.gz")]
    names = [
        (r["config"]["strategy"]["name"], r["config"]["norm"]["name"], r["config"]["norm"]["schedule"]) for r in older
    ]
    assert set(Counter(names).values()) == {31, 34} and "21 runs, those of the paper 31 or 34" in " ".join(PAGE.split())
    bn = {
        (name[0], record["config"]["train"]["lr"], record["seed"]): record["matrix"]
        for name, record in zip(names, older, strict=True)
        if name[1] == "bn"
    }
    pairs = [
        (record["matrix_running"], bn[of])
        for record in contents
        if "matrix_running" in record
        and (of := (record["config"]["strategy"]["name"], record["config"]["train"]["lr"], record["seed"])) in bn
    ]
    assert len(pairs) == 78 and all(again == first for again, first in pairs)
    assert "in all 78 cases" in " ".join(PAGE.split())
    balanced = [
        record["matrix"] == bn["derpp", record["config"]["train"]["lr"], record["seed"]]
        for record in contents
        if record["config"]["strategy"]["name"] == "derpp" and record["config"]["norm"]["name"] == "tbbn"
    ]
    assert balanced == [True] * 21 and "the same in all 21 cases" in " ".join(PAGE.split())


def test_panel_selected_no_rate_at_an_end_and_diverged_runs_are_named() -> None:
    contents = records(PANEL_VALIDATION)
    tried: dict[tuple[str, str], set[float]] = {}
    for record in contents:
        config = record["config"]
        tried.setdefault((config["strategy"]["name"], panel_label(config)), set()).add(config["train"]["lr"])
    for record in records(PANEL):
        config = record["config"]
        rates = tried[config["strategy"]["name"], panel_label(config)]
        assert min(rates) < config["train"]["lr"] < max(rates)
    diverged = Counter(
        (record["config"]["strategy"]["name"], panel_label(record["config"]), record["config"]["train"]["lr"])
        for record in contents
        if record.get("status") == "diverged"
    )
    frozen = "BN, frozen after the first task"
    assert diverged == {
        **{(strategy, "AdaB2N", 0.1): 3 for strategy in ("er", "derpp")},
        **{("derpp", "RBN", rate): 2 for rate in (0.03, 0.1)},
        **{("derpp", frozen, rate): 1 for rate in (0.01, 0.03, 0.1)},
    }
    text = " ".join(PAGE.split())
    assert "RBN diverged at 0.03 and 0.1 with two of three seeds" in text
    assert "BN frozen after the first task at 0.01, 0.03 and 0.1 with one" in text
    assert len(finished(PANEL)) == len(records(PANEL)) and "All runs on the test tasks finished." in text


def test_commits_of_the_panel_are_stated() -> None:
    commits = Counter(
        (record["config"]["stream"]["part"], record["config"]["strategy"]["name"], record["commit"][:12])
        for name in (PANEL, PANEL_VALIDATION)
        for record in records(name)
        if record["config"]["strategy"]["name"] == "derpp" or record["seed"] > 107
    )
    assert commits.pop(("validate", "derpp", "12f4381d91ce")) == 34
    assert {commit for *_, commit in commits} == {"da1039b055cf"}
    first = {r["commit"][:12] for n in (PANEL, PANEL_VALIDATION) for r in records(n) if r["seed"] <= 107 and is_er(r)}
    assert first == {"12f4381d91ce"}
    text = " ".join(PAGE.split())
    assert "34 of the trials with DER++ have commit 12f4381d91ce, the other runs da1039b055cf" in text


def is_er(record: dict[str, Any]) -> bool:
    return record["config"]["strategy"]["name"] == "er"


@pytest.mark.parametrize("strategy", ["er", "derpp"])
def test_other_settings_of_the_panel_have_the_scores_of_their_records(strategy: str) -> None:
    """Settings of round 2 other than rates: mean ACC of three seeds on the validation tasks."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in finished(PANEL_VALIDATION):
        config = record["config"]
        if config["strategy"]["name"] == strategy and config["train"]["lr"] == 0.003:
            setting = str(config["norm"].get("kappa", config["evaluate"].get("weights", "plain")))
            found.setdefault((panel_label(config), setting), []).append(scores(record)[0])
    memory = {weights: np.mean(found[MEMORY, weights]) for weights in ("plain", "task", "batch")}
    ada = {kappa: np.mean(found["AdaB2N", kappa]) for kappa in ("plain", "0.4", "0.1")}
    text = " ".join(PAGE.split())
    if strategy == "er":
        weights = "ACC of {plain:.2f} with equal weights, {task:.2f} by task and {batch:.2f} as a batch"
        assert weights.format(**memory) in text
    else:
        assert found[MEMORY, "plain"] == found[MEMORY, "task"] == found[MEMORY, "batch"]
        assert f"DER++ it has {memory['plain']:.2f} with all three weights" in text
    name = STRATEGIES[strategy]
    assert "{:.2f} with `kappa` 1, {:.2f} with 0.4 and {:.2f} with 0.1 with {}".format(*ada.values(), name) in text


EXPLORATORY = {
    "Split mini-ImageNet": "runs/split-mini-imagenet.jsonl.gz",
    "Split Tiny-ImageNet": "runs/split-tiny-imagenet.jsonl.gz",
    "Split CIFAR-100": "split-cifar100-exploratory.jsonl.gz",
}


@pytest.fixture(scope="module")
def exploratory() -> dict[tuple[str, str, str, float], Scores]:
    """Scores of the runs on other data by stream, strategy, norm, learning rate and seed."""
    found: dict[tuple[str, str, str, float], Scores] = {}
    for stream, name in EXPLORATORY.items():
        for record in records(name):
            config = record["config"]
            norm, strategy = config["norm"]["name"].upper(), STRATEGIES[config["strategy"]["name"]]
            cell = found.setdefault((stream, strategy, norm, config["train"]["lr"]), {})
            cell[record["seed"]] = scores(record)
    return found


def test_exploratory_runs_have_the_scores_of_their_records(
    exploratory: dict[tuple[str, str, str, float], Scores],
) -> None:
    rows = re.findall(
        r"^\| (Split [\w-]+) \| (ER|DER\+\+) \| (\w+) \| (\S+) \| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M
    )
    cells = [(stream, strategy, norm, float(rate)) for stream, strategy, norm, rate, *_ in rows]
    assert set(cells) == set(exploratory) and len(cells) == len(exploratory)
    for stream, strategy, norm, rate, seeds, *texts in rows:
        values = np.array(list(exploratory[stream, strategy, norm, float(rate)].values()))
        assert int(seeds) == len(values)
        for text, column in zip(texts, values.T, strict=True):
            mean, deviation = text.split(" ± ")
            assert is_rounded(mean, column.mean()) and is_rounded(deviation, column.std(ddof=1)), (stream, norm, text)


def test_exploratory_differences_are_those_of_the_records(
    exploratory: dict[tuple[str, str, str, float], Scores],
) -> None:
    cn, *bn = (exploratory["Split CIFAR-100", "ER", *cell] for cell in (("CN", 0.01), ("BN", 0.005), ("BN", 0.003)))
    text = " ".join(PAGE.split())
    for rate, other in zip((0.005, 0.003), bn, strict=True):
        differences = [cn[seed][0] - other[seed][0] for seed in range(40)]
        half = stats.t.ppf(0.975, 39) * stats.sem(differences)
        assert f"BN at {rate} is {np.mean(differences):+.2f} ± {half:.2f}" in text
    ratio = np.var([values[0] for values in bn[0].values()]) / np.var([values[0] for values in cn.values()])
    assert f"variances of BN at 0.005 and CN is {ratio:.1f}" in text


def test_provenance_of_the_exploratory_runs_is_stated() -> None:
    for name in EXPLORATORY.values():
        contents = records(name)
        (fingerprint,) = {record["source"]["fingerprint"] for record in contents}
        assert re.search(rf"^\| `{re.escape(name)}` \| [^|]+ \| {fingerprint} \|$", PAGE, re.M)
        assert {(record["schema"], record["commit"]) for record in contents} == {(1, "23124fa5bd3e")}
        assert {record["versions"]["contnorm"] for record in contents} == {"0.1.0"}
        assert {record["device"]["name"] for record in contents} == {"NVIDIA H200"}
        assert all(from_dict(record["config"]).hash == record["hash"] for record in contents)


def test_repeated_runs_have_the_same_counts() -> None:
    """20 of the exploratory runs on Split CIFAR-100 are also among those behind the tables."""
    first = {(record["hash"], record["seed"]): record for record in finished("runs/tables.jsonl.gz")}
    again = [record for record in records(EXPLORATORY["Split CIFAR-100"]) if (record["hash"], record["seed"]) in first]
    assert len(again) == 20
    assert all(record["matrix"] == first[record["hash"], record["seed"]]["matrix"] for record in again)


def test_weights_of_the_memory_have_the_scores_of_their_records(fresh: dict[tuple[str, str], Scores]) -> None:
    section = re.split(r"^##", PAGE.partition("### The weights of the memory's samples\n")[2], flags=re.M)[0]
    runs: dict[str, Scores] = {}
    running: dict[str, Scores] = {}
    commits: Counter[tuple[bool, str]] = Counter()
    for record in finished("runs/split-cifar100-panel-weights.jsonl.gz"):
        config, seed = record["config"], record["seed"]
        assert (config["strategy"]["name"], config["norm"]["name"], config["train"]["lr"]) == ("er", "bn", 0.003)
        weights = config["evaluate"]["weights"]
        runs.setdefault(weights, {})[seed] = scores(record)
        running.setdefault(weights, {})[seed] = scores(record, "matrix_running")
        commits[weights == "task" and seed < 108, record["commit"]] += 1
    assert commits == {(True, "607374746bc0"): 8, (False, "663c788155ea"): 24}
    assert running["task"] == running["batch"]
    for label, weights in (("by task", "task"), ("as a batch", "batch")):
        own = np.array([runs[weights][seed] for seed in range(100, 116)])
        cells = [f"{column.mean():.2f} ± {column.std(ddof=1):.2f}" for column in own.T]
        for norm in ("BN", "CN, 32 groups"):
            other = np.array([fresh["ER", norm][seed][0] for seed in range(100, 116)])
            cells.append(f"{(own[:, 0] - other).mean():+.2f}")
        assert f"| {label} | {' | '.join(cells)} |" in section
    differences = np.array([runs["task"][seed][0] - runs["batch"][seed][0] for seed in range(100, 116)])
    low, high = stats.t.interval(0.95, 15, differences.mean(), stats.sem(differences))
    assert f"{differences.mean():+.2f} (95 % interval {low:+.2f} to {high:+.2f})" in " ".join(section.split())
