"""Comparisons that several pages state: the archives in docs/records, the cells in them, and the decisions.

The results of Split CIFAR-100 have fresh seeds, from 100 on, which no setting was chosen with.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

from contnorm.bench.sequential import FIRST_SEED, LOOKS, Decision
from contnorm.bench.stats import PairedDifference, paired_difference
from contnorm.paper.comparisons import count_comparisons
from contnorm.paper.recipe import find_recipe
from tools.evidence import Cell, staged

# Archives in docs/records.
FRESH = "runs/split-cifar100-fresh-seeds.jsonl.gz"
MORE = "runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz"
GRID = "split-cifar100-coarse-grid.jsonl.gz"
FINE_GRID = "split-cifar100-fine-grid.jsonl.gz"
CIFAR10 = "split-cifar10-more-seeds.jsonl.gz"
MINI = "runs/split-mini-imagenet.jsonl.gz"
TINY = "runs/split-tiny-imagenet.jsonl.gz"
COCOSEQ = "cocoseq-mini.jsonl.gz"
TABLES = "runs/tables.jsonl.gz"
PANEL = "runs/split-cifar100-panel.jsonl.gz"
PANEL_WEIGHTS = "runs/split-cifar100-panel-weights.jsonl.gz"
PANEL_TRIALS = "split-cifar100-panel-validation.jsonl.gz"
PERMUTED = "runs/permuted-mnist-fresh-seeds.jsonl.gz"
NAMES = {"er": "ER", "derpp": "DER++", "single": "no replay", "prs": "PRS", "crs": "CRS (reservoir)"}
STRATEGIES = ("er", "derpp")
MEMORY = "BN, moments of the memory"
WS = "GN with weight standardization"
HIGH_RATES = (0.03, 0.1, 0.3)  # above the rates selected for BN and for CN
# Entries of the panel that are not norms of the paper, by their settings.
RIVALS: dict[str, dict[str, Any]] = {
    MEMORY: {"norm": "bn", "evaluate.moments": "memory"},
    "AdaB2N": {"norm": "adab2n"},
    "TBBN": {"norm": "tbbn"},
    "BNT": {"norm": "bnt"},
    WS: {"norm": "gn_ws"},
    "EvoNorm-S0": {"norm": "evonorm_s0"},
    "FRN": {"norm": "frn"},
    "IABN": {"norm": "iabn"},
    "RBN": {"norm": "rbn"},
    "BN, frozen after the first task": {"norm": "bn", "freeze_after": 1},
    "BN, moments of each task": {"norm": "bn", "evaluate.moments": "task"},
}


def cases(table: str) -> int:
    """Number of comparisons of a table, over which its error rate is divided."""
    return count_comparisons(find_recipe(table))


def selected(norm: str, strategy: str, **where: Any) -> Cell:
    """A norm at its selected learning rate, with fresh seeds."""
    schedule = {"schedule": where.pop("schedule", "published")} if norm == "brn" else {}
    return Cell(FRESH, {"norm": norm, "strategy": strategy, **schedule, **where})


def recipe(norm: str, strategy: str = "er", tasks: int | None = None, **where: Any) -> Cell:
    """A norm at the learning rate of the recipes, with fresh seeds."""
    weight = {"momentum": None} if norm == "bn" else {}
    return Cell(MORE, {"norm": norm, "strategy": strategy, "tasks": tasks, **weight, **where})


def table2(first: str, second: str, strategy: str, score: str = "acc", **where: Any) -> Decision:
    """Two norms at their selected learning rates, decided as in Table 2."""
    return staged(selected(first, strategy), selected(second, strategy, **where), cases("table2"), score)


def over_rates(first: str, second: str, strategy: str) -> PairedDifference:
    """Difference on the validation tasks, averaged for each seed over rates too high for both norms."""
    a, b = (
        [Cell(GRID, {"norm": norm, "strategy": strategy, "lr": rate}).scores() for rate in HIGH_RATES]
        for norm in (first, second)
    )
    mean_a, mean_b = ({seed: fmean(scores[seed] for scores in by_rate) for seed in by_rate[0]} for by_rate in (a, b))
    pair = paired_difference(mean_a, mean_b)
    assert pair is not None
    return pair


def plain_mean(norm: str, strategy: str) -> float:
    """Mean ACC of BN or CN over the seeds of the first look."""
    scores = selected(norm, strategy).scores()
    return fmean(scores[seed] for seed in range(FIRST_SEED, FIRST_SEED + LOOKS[0]))


def forgetting_of_others() -> dict[str, Decision]:
    """FM of BN and of CN minus that of GN, without replay."""
    gn = recipe("gn", "single")
    return {n: staged(recipe(n.lower(), "single"), gn, cases("table10"), "fm") for n in ("BN", "CN")}


def rival(entry: str, strategy: str, matrix: str = "matrix") -> Cell:
    """An entry of the panel at its selected setting, with fresh seeds."""
    return Cell(PANEL, {"strategy": strategy, **RIVALS[entry]}, matrix)


@cache
def against(entry: str, other: str, strategy: str) -> Decision:
    """An entry of the panel compared with BN or CN."""
    return staged(rival(entry, strategy), selected(other.lower(), strategy), cases("panel"))
