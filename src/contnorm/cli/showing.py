"""Records as tables at a terminal; needs no torch."""

from __future__ import annotations

import math
from collections import defaultdict

from rich.console import Console
from rich.table import Column, Table
from scipy import stats

from contnorm.catalog import find_norm
from contnorm.errors import UserError
from contnorm.metrics.matrix import AccuracyMatrix, score
from contnorm.results import Record, spread_over_seeds

__all__ = ["show_comparison", "show_matrices", "show_scores"]

SHOWN = {"acc": "ACC", "fm": "FM", "la": "LA"}


def show_scores(records: list[Record], console: Console) -> None:
    """A row for each setting: mean and standard deviation over its seeds."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.config.hash].append(record)
    table = Table(
        Column("run", no_wrap=True), "stream", "strategy", "norm", "moments", "seeds", box=None, pad_edge=False
    )
    for title in SHOWN.values():
        table.add_column(title, no_wrap=True)
    for name, group in groups.items():
        c = group[0].config
        cells = [_spread([r.score(s) for r in group]) for s in SHOWN]
        source = "" if c.stream.source in (None, "mnist", *_own_name(c.stream.name)) else f" ({c.stream.source})"
        tried = "" if c.train.max_steps is None else f", first {c.train.max_steps} steps"
        row = [name, c.stream.name + source + tried, c.strategy.name, _norm(group[0])]
        if "matrix_running" in group[0].raw:  # the same networks, evaluated both ways
            table.add_row(*row, "running", str(len(group)), *_running_scores(group))
        table.add_row(*row, c.evaluate.moments, str(len(group)), *cells)
    console.print(table)


def _running_scores(group: list[Record]) -> list[str]:
    matrices = [AccuracyMatrix(**record.raw["matrix_running"]) for record in group]
    return [_spread([score(matrix, name) for matrix in matrices]) for name in SHOWN]


def _own_name(stream: str) -> tuple[str, ...]:
    return (stream.partition("-")[2],)


def _norm(record: Record) -> str:
    spec, groups = find_norm(record.config.norm.name)
    return f"{spec.name}{groups or record.config.norm.groups}" if spec.grouped else spec.name


def _spread(values: list[float]) -> str:
    mean, std = spread_over_seeds(values)
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} +- {std:.2f}"


def show_matrices(records: list[Record], console: Console) -> None:
    """The accuracies of each run, row after row."""
    for record in records:
        m = record.matrix
        heads = [f"task {j}" for j in range(m.tasks)]
        table = Table("after", *heads, title=f"{record.config.hash} seed {record.seed}", box=None, pad_edge=False)
        for i in range(m.tasks):
            cells = ["-" if m.correct[i][j] is None else f"{m.at(i, j):.1f}" for j in range(m.tasks)]
            table.add_row(f"task {i}", *cells)
        console.print(table, "")


def show_comparison(a: list[Record], b: list[Record], console: Console) -> None:
    """Paired over the seeds both have, with the 95 % interval of the mean difference."""
    first, second = ({r.seed: r for r in records} for records in (a, b))
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise UserError(f"the two runs share no seed: {sorted(first)} and {sorted(second)}.")
    table = Table("score", a[0].config.hash, b[0].config.hash, "difference", "95 % interval", box=None, pad_edge=False)
    for name, title in SHOWN.items():
        ours, theirs = ([runs[s].score(name) for s in seeds] for runs in (first, second))
        differences = [y - x for x, y in zip(ours, theirs, strict=True)]
        table.add_row(title, _spread(ours), _spread(theirs), _spread(differences), _interval(differences))
    console.print(table)
    console.print(f"{len(seeds)} seeds, paired; the second less the first. Student's t, two-sided.")


def _interval(differences: list[float]) -> str:
    if len(differences) < 2:
        return "one seed has none"
    mean, std = spread_over_seeds(differences)
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * std / math.sqrt(len(differences))
    return f"{mean - half:+.2f} to {mean + half:+.2f}"
