"""The paper's first table: how much of a network's forgetting is caused by batch normalization.

Five tasks, each with the same digits under its own permutation of the pixels, are learned in one pass, with replay (ER)
and without (Single), by a network with batch norm (BN) and with continual norm (CN, 4 groups). BN* is the BN network
with the exact moments of all tasks in place of its running moments: the difference is what normalization has forgotten.

Without MNIST it uses the 5,000 included digits; with MNIST under `--data-root` it is the paper's protocol. Every
run is recorded, so a second call runs nothing, and Ctrl-C loses nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from contnorm import bench

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


def experiment(strategy: str, norm: str) -> dict[str, object]:
    """Arguments of `bench.run`. Other settings are the stream's: the paper's MLP, lr 0.03, a ring of 50 per task."""
    moments = "oracle" if norm == "bn" else "running"  # a BN run is evaluated with both
    return {"strategy": strategy, "norm": norm, "settings": {"norm.groups": 4, "evaluate.moments": moments}}


def scores_of(result: bench.Result, moments: str) -> list[list[float]]:
    """ACC, FM and LA of each seed, evaluated with running or with oracle moments."""
    matrices = result.accuracy_by_moments[moments]
    metrics = bench.metrics.average_accuracy, bench.metrics.forgetting, bench.metrics.learning_accuracy
    return [[metric(matrix) for matrix in matrices] for metric in metrics]


def distances_of(result: bench.Result) -> list[list[float]]:
    """L1 distance between running and exact moments at the end, for each seed."""
    last = [record.drift["by_task"][-1] for record in result.records]
    return [[by_layer[layer][moment] for by_layer in last] for layer, moment in MOMENTS]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def cells(ours: Sequence[Sequence[float]], published: Sequence[float] | None) -> list[str]:
    """Our scores and the published ones."""
    shown = []
    for i, values in enumerate(ours):
        shown += [spread(values), "-" if published is None else f"{published[i]:.2f}"]
    return shown


Results = dict[tuple[str, str], bench.Result]


def accuracy_table(results: Results) -> Table:
    table = Table("strategy", "norm", box=None, pad_edge=False)
    for head in ("ACC", "FM", "LA"):
        table.add_column(head, justify="right", no_wrap=True)
        table.add_column("paper", justify="right", style="dim", no_wrap=True)
    for strategy, name in NAMES.items():
        rows = {
            "BN": scores_of(results[strategy, "bn"], "running"),
            "BN*": scores_of(results[strategy, "bn"], "oracle"),
            "CN": scores_of(results[strategy, "cn"], "running"),
        }
        for norm, values in rows.items():
            table.add_row(name, norm, *cells(values, PUBLISHED.get((strategy, norm))))
    return table


def distance_table(results: Results) -> Table:
    table = Table("strategy", "norm", box=None, pad_edge=False)
    for head in ("mean, layer 1", "mean, layer 2", "var, layer 1", "var, layer 2"):
        table.add_column(head, justify="right", no_wrap=True)
    for strategy, name in NAMES.items():
        table.add_row(name, "BN", *(spread(values) for values in distances_of(results[strategy, "bn"])))
        table.add_row(name, "BN, paper", *(f"{value:.2f}" for value in PUBLISHED_DISTANCES[strategy]), style="dim")
    return table


def gain(result: bench.Result) -> str:
    """Difference of ACC between oracle and running moments, over seeds."""
    running, oracle = (scores_of(result, moments)[0] for moments in ("running", "oracle"))
    differences = [b - a for a, b in zip(running, oracle, strict=True)]
    return f"{'+' if fmean(differences) >= 0 else ''}{spread(differences)}"


def describe_data(source: str) -> str:
    if source == "mnist":
        return "MNIST, as in the paper: 2,000 training digits per task, out of 60,000,\nand 10,000 test digits."
    return (
        "the included 5,000 digits, not MNIST: 2,000 training digits per task,\n"
        "out of 4,000, and 1,000 test digits. The paper uses 60,000 and 10,000:\n"
        "`make demo DATA=folder` does so, with MNIST in the folder."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The paper's first table, with the published numbers.")
    parser.add_argument("--data-root", type=Path, help="folder with MNIST; default: $CONTNORM_DATA, or ./data")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of records")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--lanes", type=int, default=None, help="number of parallel runs; default: one per core")
    options = parser.parse_args(arguments)
    try:
        show_table(options.runs, options.data_root, options.seeds, options.lanes)
    except bench.UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except bench.RunInterrupted as stopped:
        parser.exit(128 + stopped.signal, f"{parser.prog}: stopped. Run it again to continue.\n")


def show_table(runs: Path, root: Path | None, seeds: int, lanes: int | None) -> None:
    """Run what is not recorded yet, then print the tables."""
    console, started = Console(), time.perf_counter()
    stream = bench.load_stream("permuted-mnist", root=root)
    many = "1 seed" if seeds == 1 else f"{seeds} seeds"
    console.print(f"[bold]Five tasks of permuted digits, one pass, {many}[/bold] (Table 1 of the paper)")
    console.print(f"Data: {describe_data(stream.source.name)}\n", highlight=False)
    keys = [(strategy, norm) for strategy in NAMES for norm in ("bn", "cn")]
    experiments = [experiment(strategy, norm) for strategy, norm in keys]
    progress = console if console.is_terminal else False
    together = bench.run_all(stream, experiments, seeds=seeds, runs=runs, lanes=lanes, progress=progress)
    results = dict(zip(keys, together, strict=True))
    console.print("ACC, forgetting (FM), learning accuracy (LA): percent, mean ± deviation")
    console.print(accuracy_table(results), "")
    console.print("L1 distance between running and exact moments at the end, over 100 units")
    console.print(distance_table(results), "")
    console.print("ACC with exact minus running moments, what normalization had forgotten:")
    gains = {name: gain(results[strategy, "bn"]) for strategy, name in NAMES.items()}
    console.print(f"{', '.join(f'{value} points with {name}' for name, value in gains.items())}.\n", highlight=False)
    took = f"{time.perf_counter() - started:.0f} s"
    console.print(f"Records in {runs}; {took}. Next: docs/quickstart.md", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
