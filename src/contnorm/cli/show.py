"""The `show` command: prints the scores of records. Needs no torch.

Scores are printed as a table if it fits, otherwise as a few lines per run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record, RecordSet, Store, drop_duplicates, group_by_run
from contnorm.cli.common import RunsFolder, console
from contnorm.cli.tables import column_widths, print_columns, print_error, print_indented, print_text, safe_text
from contnorm.errors import UserError
from contnorm.paper.tables import LABEL_FORGETTING, data_part, data_remarks, digits_remarks
from contnorm.report.run_tables import (
    DivergedSeeds,
    ScoreRow,
    divergence_lines,
    keys_to_show,
    score_rows,
    unknown_names,
)
from contnorm.report.summaries import Summaries, Summary, find_summaries, summaries_under, summarize

__all__ = ["show", "show_diverged", "show_matrices", "show_scores", "show_unsealed"]


def show(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Runs to show: paths of runs or folders, or prefixes of run hashes; default: all."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    by_task: Annotated[bool, typer.Option("--by-task", help="Show the full accuracy matrix of each run.")] = False,
) -> None:
    """Show the scores of finished runs, averaged over seeds."""
    store = Store(runs)
    matches: list[RecordSet] | list[Summaries]
    if by_task:
        matches = [store.search(name) for name in run] if run else [store.load_all()]
    else:
        matches = [find_summaries(store, name) for name in run] if run else [summaries_under(runs)]
    problems = list(dict.fromkeys(problem for match in matches for problem in match.problems))
    records = drop_duplicates([record for match in matches for record in match.records], problems)
    diverged = {run: notes for match in matches for run, notes in match.diverged.items()}
    if not records:
        none = f"no finished runs under {runs}{', all diverged' if diverged else ''}. Make one: contnorm run --norm cn"
        raise UserError("; ".join(problems) or none)
    for problem in [*problems, *unknown_names(records)]:
        print_error(problem)
    if by_task:
        show_matrices([record for record in records if isinstance(record, Record)], console)
    else:
        show_scores(records, console)
    show_diverged(records, diverged, console)
    if run:
        show_unsealed(records, console)


def show_scores(records: Sequence[Record | Summary], console: Console) -> None:
    """Print one row per configuration, with mean and standard deviation over its seeds; nothing without records.

    Multi-label runs follow the others in a table of their own scores, with one row per group of labels.
    """
    summaries = [summarize(one) if isinstance(one, Record) else one for one in records]
    for several in (False, True):
        _show_scores([one for one in summaries if one.multi_label == several], console)
    for line in _remarks(summaries):
        print_text(line, console)


def _remarks(records: Sequence[Summary]) -> list[str]:
    """Notes below the table of scores."""
    several = [LABEL_FORGETTING] if any(record.multi_label for record in records) else []
    parts = {record.config.hash: part for record in records if (part := data_part(record))}
    return [*several, *(f"{run}: used {part}." for run, part in parts.items()), *data_remarks(records)]


def show_unsealed(records: Sequence[Record | Summary], console: Console) -> None:
    """Print which runs have records that no checksum protects."""
    unsealed = Counter(record.config.hash for record in records if not record.sealed)
    total = Counter(record.config.hash for record in records)
    for run, count in unsealed.items():
        print_text(
            f"{run}: {count} of {total[run]} records have no checksum (schema 1), so changes to them are not detected.",
            console,
        )


def show_diverged(records: Sequence[Record | Summary], diverged: DivergedSeeds, console: Console) -> None:
    """Print which runs lack seeds because they diverged."""
    for line in divergence_lines(records, diverged):
        print_text(line, console)


def _show_scores(records: Sequence[Summary], console: Console) -> None:
    if not records:
        return
    groups = group_by_run(records)
    shown_keys = keys_to_show([group[0].config for group in groups.values()])
    rows = [row for group in groups.values() for row in score_rows(group, shown_keys)]
    with_settings = len(groups) > 1 and any(row.settings for row in rows)
    if _least_width(rows, with_settings) > console.width:
        for row in rows:
            _show_lines(row, console)
        return
    print_columns(*_cells(rows, with_settings), console, wrap_last=with_settings)
    if len(groups) == 1 and rows[0].settings:
        console.print(safe_text(f"changed from the stream's defaults: {rows[0].settings}"))


def _cells(rows: Sequence[ScoreRow], with_settings: bool) -> tuple[list[str], list[list[str]]]:
    """Column headings and cells of the table of scores."""
    labels = ["labels"] if rows[0].labels else []
    settings = ["settings"] if with_settings else []
    heads = ["run", "stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, *settings]
    cells = []
    for row in rows:
        rest = [row.settings] if with_settings else []
        group = [row.labels] if row.labels else []
        cells.append([row.run, *row.names, row.moments, str(row.seeds), *group, *row.scores, *rest])
    return heads, cells


def _least_width(rows: Sequence[ScoreRow], with_settings: bool) -> int:
    """Minimum width of the table without truncation; the settings column may wrap between settings."""
    widths = column_widths(*_cells(rows, False))
    least = sum(widths) + 2 * (len(widths) - 1)
    words = [word for row in rows for word in (*row.settings.split(), "settings")]
    return least + (2 + max(map(len, words)) if with_settings else 0)


def _show_lines(row: ScoreRow, console: Console) -> None:
    seeds = "1 seed" if row.seeds == 1 else f"{row.seeds} seeds"
    scores = "  ".join(f"{title} {value}" for title, value in zip(row.titles, row.scores, strict=True))
    how = ", ".join(filter(None, (seeds, row.moments, row.labels)))
    console.print(safe_text(f"{row.run}  {' '.join(row.names)}"))
    for line in filter(None, (f"{how}: {scores}", row.settings)):
        print_indented(line, console)


def show_matrices(records: Sequence[Record], console: Console) -> None:
    """Print the accuracy matrix of each run; for multi-label streams, the matrix of mAP."""
    for record in records:
        for title, rows in _matrices_by_task(record).items():
            heads = [f"task {j}" for j in range(len(rows))]
            heads += ["all so far"] if record.multi_label else []
            table = Table("after", *heads, title=f"{record.config.hash} seed {record.seed}{title}", box=None)
            table.pad_edge = False
            for i, row in enumerate(rows):
                table.add_row(f"task {i}", *("-" if value is None else f"{value:.1f}" for value in row))
            console.print(table, "")
    for line in digits_remarks(records):
        print_text(line, console)


def _matrices_by_task(record: Record) -> dict[str, list[list[float | None]]]:
    """Matrices measured after each task, by the suffix for their title."""
    if isinstance(record.counted, LabelMatrix):
        return {", mAP": _map_by_task(record.counted)}
    matrices = {moments: _acc_by_task(matrix) for moments, matrix in record.evaluated.items()}
    suffixes = {"running": ", running moments", "oracle": ", exact moments"}
    several = len(matrices) > 1
    return {suffixes[moments] if several or moments == "oracle" else "": rows for moments, rows in matrices.items()}


def _acc_by_task(m: AccuracyMatrix) -> list[list[float | None]]:
    tasks = range(m.tasks)
    return [[None if m.correct[i][j] is None else m.at(i, j) for j in tasks] for i in tasks]


def _map_by_task(m: LabelMatrix) -> list[list[float | None]]:
    """mAP on each task's images, and in the last column on the images of all tasks so far."""
    measured = [[*by_task, overall] for by_task, overall in zip(m.own, m.tally, strict=True)]
    return [[None if stats is None else mean_ap(stats) for stats in row] for row in measured]
