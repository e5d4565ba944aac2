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
        ("runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz", 225),
        ("runs/permuted-mnist-fresh-seeds.jsonl.gz", 128),
        ("runs/split-cifar100-panel.jsonl.gz", 88),
        ("split-cifar100-panel-validation.jsonl.gz", 265),
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
    _, mean, low, high = staged_rule("2", differences, set())
    assert f"{mean:+.2f} points with {strategy} ({low:+.2f} to {high:+.2f}, {seeds} seeds)" in README


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


def staged_rule(table: str, differences: dict[int, float], diverged: set[int]) -> tuple[int, float, float, float]:
    """Seeds and mean difference of the last complete stage, and the intersection of the intervals of all stages."""
    size, mean, low, high = 0, np.nan, -np.inf, np.inf
    for seeds, share in STAGES.items():
        if not set(range(100, 100 + seeds)) <= differences.keys() | diverged:
            break
        values = [differences[seed] for seed in range(100, 100 + seeds) if seed in differences]
        half = stats.t.ppf(1 - 0.05 / COMPARISONS[table] * share / 2, len(values) - 1) * stats.sem(values)
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
    what = r"^\| (\d+) \| ([^|]+) \| (ACC|FM|LA) \| (.+) less (.+)"
    pattern = what + r" \| (\d+) \| (\S+) \| (?:(\S+) to (\S+)|-) \| ([^|]+) \|$"
    rows = re.findall(pattern, PAGE, re.M)
    counts = Counter(row[0] for row in rows)
    assert counts == {"1": 6, "2": 22, "8": 3, "9": 4, "10": 4, "12": 5}
    for table, runs, score, first, second, *printed in rows:
        cells = by_rate[RATE_OF_TABLE.get(table, "recipe"), runs]
        column = ("ACC", "FM", "LA").index(score)
        both = cells[first].keys() & cells[second].keys()
        differences = {seed: cells[first][seed][column] - cells[second][seed][column] for seed in both}
        lost = set().union(*(diverged_seeds().get((runs, norm), set()) for norm in (first, second)))
        seeds, mean, low, high = staged_rule(table, differences, lost)
        place = (table, runs, score, first, second)
        assert printed[0] == str(seeds), place
        if not seeds:  # before the first stage
            assert printed[1:] == ["-", "", "", "undecided"]
            continue
        assert all(text[0] in "+-" for text in printed[1:4])
        assert all(map(is_rounded, printed[1:4], (mean, low, high))), (place, mean, low, high)
        assert printed[4] == verdict(low, high), place


@pytest.mark.parametrize("strategy", ["single", "er"])
def test_drift_of_variances_matches_the_records(strategy: str) -> None:
    """Table 1: of BN at the end, the second layer less the first."""
    runs = [record for record in records(FRESH["permuted"]) if record["config"]["norm"]["name"] == "bn"]
    last = {
        record["seed"]: record["drift"]["by_task"][-1]
        for record in runs
        if record["config"]["strategy"]["name"] == strategy
    }
    differences = {seed: float(drift["norm2"]["var"]) - float(drift["norm1"]["var"]) for seed, drift in last.items()}
    seeds, mean, low, high = staged_rule("1", differences, set())
    row = f"| 1 | {STRATEGIES[strategy]} | drift of variances | BN, layer 2 less layer 1 | {seeds} | {mean:+.2f} | "
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
PANEL_COMPARISONS = 74
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


@pytest.fixture(scope="module")
def panel(fresh: dict[tuple[str, str], Scores]) -> dict[str, Scores]:
    """Scores with ER and seeds 100 to 107 of the panel's entries, and of BN and CN from the other archive."""
    found: dict[str, Scores] = {}
    for record in finished(PANEL):
        label, running = panel_label(record["config"]), record.get("matrix_running")
        found.setdefault(label, {})[record["seed"]] = scores(record)
        if running:
            found.setdefault(f"{label}, evaluated with running ones", {})[record["seed"]] = scores(
                record, "matrix_running"
            )
    for label in ("BN", "CN, 32 groups"):
        known = fresh["ER", label]
        found[label.removesuffix(", 32 groups")] = {seed: known[seed] for seed in range(100, 108)}
    return found


def test_panel_has_the_scores_of_its_records(panel: dict[str, Scores]) -> None:
    rates = {panel_label(record["config"]): record["config"]["train"]["lr"] for record in records(PANEL)}
    rates |= {"BN": 0.005, "CN": 0.01}
    for label, cell in panel.items():
        values = np.array([cell[seed] for seed in range(100, 108)])
        rate = rates[label.removesuffix(", evaluated with running ones")]
        texts = " | ".join(f"{column.mean():.2f} ± {column.std(ddof=1):.2f}" for column in values.T)
        assert f"| {label} | {rate:g} | {texts} |" in PAGE
    assert len(panel) == 15


def test_panel_comparisons_match_the_records(panel: dict[str, Scores]) -> None:
    """Paired differences in ACC with ordinary 95 % intervals, and with those of the staged rule and its verdicts."""
    assert count_comparisons(find_recipe("panel")) == PANEL_COMPARISONS
    assert f"the {PANEL_COMPARISONS} comparisons of the panel" in " ".join(PAGE.split())
    rows = re.findall(r"^\| (.+) less (BN|CN) \| (\S+) \| (\S+) to (\S+) \| (\S+) to (\S+) \| ([^|]+) \|$", PAGE, re.M)
    others = [label for label in panel if label not in ("BN", "CN") and "running" not in label]
    only_bn = ("BN, frozen after the first task", "BN, moments of each task")  # no question compares them with CN
    pairs = [(first, second) for first in others for second in ("BN", "CN") if second == "BN" or first not in only_bn]
    assert Counter(row[:2] for row in rows) == Counter(pairs)
    for first, second, *printed, outcome in rows:
        differences = [panel[first][seed][0] - panel[second][seed][0] for seed in range(100, 108)]
        mean, error = float(np.mean(differences)), float(stats.sem(differences))
        half = stats.t.ppf(0.975, 7) * error
        wide = stats.t.ppf(1 - 0.05 / PANEL_COMPARISONS * STAGES[8] / 2, 7) * error
        expected = (mean, mean - half, mean + half, mean - wide, mean + wide)
        assert all(map(is_rounded, printed, expected)), (first, second, expected)
        assert outcome == verdict(mean - wide, mean + wide)
    memory = "BN, moments of the memory"
    mean = {label: np.mean([one[0] for one in panel[label].values()]) for label in panel}
    running = mean[f"{memory}, evaluated with running ones"]
    parts = (
        f"{running - mean['BN']:.2f} points are due to its learning rate, and {mean[memory] - running:.2f} to the eval"
    )
    assert parts in " ".join(PAGE.split())
    assert not any(outcome.startswith("higher") for _, second, *_, outcome in rows if second == "BN")
    assert "Of eight newer norms with ER, none is shown to be above BN (8 seeds)." in README
    assert max(mean, key=lambda label: mean[label]) == memory
    assert f"has the highest mean, {mean[memory] - mean['BN']:.2f} points above BN, which is undecided." in README


def test_panel_runs_have_equal_budgets_and_repeat_the_earlier_training() -> None:
    contents = records(PANEL_VALIDATION)
    assert {record["config"]["stream"]["part"] for record in contents} == {"validate"}
    assert {record["seed"] for record in contents} == {0, 1, 2}
    budgets = Counter((record["config"]["strategy"]["name"], panel_label(record["config"])) for record in contents)
    assert {strategy: {budgets[of] for of in budgets if of[0] == strategy} for strategy in ("er", "derpp")} == {
        "er": {21},
        "derpp": {19, 15},
    }
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
    assert len(pairs) == 58 and all(again == first for again, first in pairs)
    assert "in all 58 cases" in " ".join(PAGE.split())


def test_other_settings_of_the_panel_have_the_scores_of_their_records() -> None:
    """Settings of round 2 other than rates: mean ACC of three seeds on the validation tasks."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in finished(PANEL_VALIDATION):
        config = record["config"]
        if config["strategy"]["name"] == "er" and config["train"]["lr"] == 0.003:
            setting = str(config["norm"].get("kappa", config["evaluate"].get("weights", "plain")))
            found.setdefault((panel_label(config), setting), []).append(scores(record)[0])
    memory = {weights: np.mean(found["BN, moments of the memory", weights]) for weights in ("plain", "task", "batch")}
    ada = {kappa: np.mean(found["AdaB2N", kappa]) for kappa in ("plain", "0.4", "0.1")}
    text = " ".join(PAGE.split())
    assert (
        "ACC of {plain:.2f} with equal weights, {task:.2f} by task and {batch:.2f} as a batch".format(**memory) in text
    )
    assert "{:.2f} with `kappa` 1, {:.2f} with 0.4 and {:.2f} with 0.1".format(*ada.values()) in text


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
