"""Records for tests of the report: real ones of the repository, and random ones of any recipe's cells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import merge_settings
from contnorm.bench.label_metrics import LabelMatrix, LabelStats
from contnorm.bench.records import Store
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.recipe import Recipe
from tests.committed_records import copy_run

TASKS = 3
SIX = ("09ba865b075b", "be94d42372be", "7ab8938428eb", "3f3dcf8bc3c3", "ba9df79f047e", "85d5f7c04f8c")


def six_settings(root: Path) -> Path:
    """Table 1 whole, and BN and CN of Table 2 with ER: real runs, and the same however many more are kept."""
    for name in SIX:
        copy_run(name, root)
    return root


def make_records(
    recipe: Recipe,
    root: Path,
    seeds: int = 3,
    only: Any = lambda cell: True,
    precision: str = "fp32",
    layers: int = 2,
    source: dict[str, Any] | None = None,
) -> None:
    """Under the folder that `contnorm paper` would use; a cell that shares its run with another is made once."""
    store = Store(root / recipe.name if recipe.alone else root)
    for number, cell in enumerate(cell for cell in cells_of(recipe) if only(cell)):
        values = merge_settings(cell.values, {"train": {"precision": precision}})
        config = complete(values, cell.source)
        if config.model.weights is not None:  # as a run fills it in
            config = replace(config, model=replace(config.model, weights_hash="0f" * 6))
        for seed in range(seeds):
            if not store.has(config, seed):
                store.save(config, seed, _content(cell, seed, number, precision, layers, source))


def _content(cell: RecipeCell, seed: int, number: int, precision: str, layers: int, source: Any) -> dict[str, Any]:
    chance = np.random.default_rng([seed, number])
    found: dict[str, Any] = {"matrix": _matrix(chance, 3), "matrix_task": _matrix(chance, 6)}
    if cell.view.labels is not None:
        found = _of_labels(chance)
    elif cell.values.get("evaluate", {}).get("moments") == "oracle":
        found["matrix_running"] = _matrix(chance, 0)
    rows = [
        {
            f"norm{i + 1}": {"mean": float(chance.random() + i), "var": float(chance.random() + 2 * i)}
            for i in range(layers)
        }
        for _ in range(TASKS)
    ]
    return {
        **found,
        "drift": {"by_task": rows},
        "parameters": 1000,
        "seconds": {"train": 10.0 + number + float(chance.random())},
        "precision": precision,
        "deterministic": True,
        "device": {"kind": "cuda", "name": "a card", "threads": 1},
        "versions": {"contnorm": "0.1.0", "torch": "2.11.0"},
        "source": {"name": cell.source, "fingerprint": "f00d", **(source or {})},
        "commit": "c0ffee",
    }


GROUPS = ["majority", "majority", "moderate", "moderate", "minority", "minority"]


def _of_labels(chance: np.random.Generator) -> dict[str, Any]:
    """A hundred pictures a task, of six classes; a memory of twelve that holds as much of the rare as of the common."""
    often = np.array([60, 40, 20, 10, 4, 2])
    own = [[_stats(chance, 100) if j <= i else None for j in range(TASKS)] for i in range(TASKS)]
    tally = [_stats(chance, 100 * (i + 1)) for i in range(TASKS)]
    shown = [" ".join(map(str, often * (i + 1))) for i in range(TASKS)]
    held = ["2 2 2 2 2 2"] * TASKS
    return {
        "labels": LabelMatrix(own, tally).to_json(),
        "classes": {"names": list("abcdef"), "groups": GROUPS},
        "census": {"capacity": 12, "held": held, "shown": shown, "written": [12, 20, 25], "evicted": [0, 8, 13]},
    }


def _stats(chance: np.random.Generator, samples: int) -> LabelStats:
    right = chance.integers(5, 10, 6)
    aps = np.round(0.2 + 0.5 * chance.random(6), 4)
    return LabelStats(samples, tuple(right.tolist()), (12,) * 6, (15,) * 6, tuple(aps.tolist()))


def _matrix(chance: np.random.Generator, better: int) -> dict[str, Any]:
    """A hundred pictures a task; each is forgotten by some after it was learned."""
    rows: list[list[int | None]] = [[None] * TASKS for _ in range(TASKS)]
    for i in range(TASKS):
        for j in range(i + 1):
            rows[i][j] = 70 + better - 5 * (i - j) + int(chance.integers(0, 8))
    return {"correct": rows, "total": [100] * TASKS, "before": None}
