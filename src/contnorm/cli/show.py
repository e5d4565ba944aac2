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

from contnorm.bench.config.sources import format_value
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.record_sets import reasons_by_run
from contnorm.bench.records import Record, Store, drop_duplicates, group_by_run
from contnorm.bench.runs import Runs
from contnorm.bench.selection import conditions_of, select
from contnorm.bench.unfinished import UnfinishedRun
from contnorm.cli.common import RunsFolder, Where, console
from contnorm.cli.examples import Example, examples
from contnorm.cli.run_columns import FORMATS, format_rows, show_columns, sort_runs
from contnorm.cli.run_selection import find_unfinished, load_selection, naming_unfinished, no_runs, unfinished_lines
from contnorm.cli.tables import column_widths, print_columns, print_error, print_indented, print_text, safe_text
from contnorm.errors import UserError, unknown
from contnorm.paper.record_remarks import LABEL_FORGETTING, data_part, data_remarks, digits_remarks
from contnorm.report.run_tables import (
    DivergedSeeds,
    ScoreRow,
    divergence_lines,
    keys_to_show,
    score_rows,
    unknown_names,
)
from contnorm.report.summaries import Summary, find_summaries, summaries_under, summarize

__all__ = ["show", "show_diverged", "show_matrices", "show_scores", "show_unsealed"]


@examples(
    Example("Show the mean scores of all runs.", "contnorm show"),
    Example(
        "Show chosen columns of the runs with CN, best accuracy first.",
        "contnorm show --where norm=cn --columns norm,lr,acc,fm --sort acc",
    ),
)
def show(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Runs to show: paths of runs or folders, or prefixes of run hashes; default: all."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    where: Where = None,
    sort: Annotated[
        str | None,
        typer.Option(help="Scores or settings to sort by, such as acc or norm,acc: best score or lowest value first."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order of --sort.")] = False,
    columns: Annotated[
        str | None,
        typer.Option(help="Settings and scores to show, such as norm,lr,acc,bwt; also run, seeds, seconds, device."),
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", help="Output: table; csv or json, with one row per seed and a column per setting."),
    ] = "table",
    by_task: Annotated[bool, typer.Option("--by-task", help="Show the full accuracy matrix of each run.")] = False,
) -> None:
    """Show the scores of finished runs, averaged over seeds."""
    if form not in FORMATS:
        raise unknown("--format", form, FORMATS)
    if by_task and (columns or form != "table"):
        raise UserError("--by-task prints accuracy matrices. Leave out --columns and --format.")
    if reverse and not sort:
        raise UserError("--reverse reverses the order of --sort. Use both.")
    store, unfinished = Store(runs), find_unfinished(run, runs)
    if not (where or sort or columns or by_task or form != "table"):
        _show_summaries(run, store, unfinished)
        return
    content, keys = load_selection(store, run, where or (), unfinished, need_scores=form == "table")
    if sort:
        content = sort_runs(content, sort, reverse)
    unfinished = select(unfinished, conditions_of(where or (), {}, keys))
    if form != "table":
        text = format_rows(content, columns, form)
        for line in [*content.problems, *unfinished_lines(unfinished)]:
            print_error(line)
        print(text, end="")
    else:
        _show_selection(content, columns, by_task, bool(run))
        _show_notes(content.records, reasons_by_run(content.diverged), unfinished)


def _show_selection(content: Runs, columns: str | None, by_task: bool, named: bool) -> None:
    """Show runs as matrices, as a table of chosen columns or as the usual one."""
    for problem in [*content.problems, *unknown_names(content.records)]:
        print_error(problem)
    if by_task:
        show_matrices(content.records, console)
    elif columns:
        show_columns(content, columns, console)
    else:
        show_scores(content.records, console)
    if named:
        show_unsealed(content.records, console)


def _show_summaries(run: list[str] | None, store: Store, unfinished: Sequence[UnfinishedRun]) -> None:
    """Show all runs, or those that are named; summaries of unchanged records are read from the index."""
    with naming_unfinished(store.root):
        matches = [find_summaries(store, name) for name in run] if run else [summaries_under(store.root)]
    problems = list(dict.fromkeys(problem for match in matches for problem in match.problems))
    records = drop_duplicates([record for match in matches for record in match.records], problems)
    diverged = {run: notes for match in matches for run, notes in match.diverged.items()}
    if not records:
        raise UserError("; ".join(problems) or no_runs(store.root, bool(diverged), unfinished))
    for problem in [*problems, *unknown_names(records)]:
        print_error(problem)
    show_scores(records, console)
    _show_notes(records, diverged, unfinished)
    if run:
        show_unsealed(records, console)


def _show_notes(
    records: Sequence[Record | Summary], diverged: DivergedSeeds, unfinished: Sequence[UnfinishedRun]
) -> None:
    show_diverged(records, diverged, console)
    for line in unfinished_lines(unfinished):
        print_text(line, console)


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
    if len(groups) > 1:
        shown_keys -= {"train.lr"}  # has a column
    rows = [
        (format_value(group[0].config.train.lr), row)
        for group in groups.values()
        for row in score_rows(group, shown_keys)
    ]
    with_settings = len(groups) > 1 and any(row.settings for _, row in rows)
    if _least_width(rows, with_settings) > console.width:
        for lr, row in rows:
            _show_lines(lr, row, console)
        return
    print_columns(*_cells(rows, with_settings), console, wrap_last=with_settings)
    settings = rows[0][1].settings
    if len(groups) == 1 and settings:
        console.print(safe_text(f"changed from the stream's defaults: {settings}"))


LrRow = tuple[str, ScoreRow]  # a learning rate, which is always shown, and a row of scores


def _cells(rows: Sequence[LrRow], with_settings: bool) -> tuple[list[str], list[list[str]]]:
    """Column headings and cells of the table of scores."""
    first = rows[0][1]
    labels = ["labels"] if first.labels else []
    settings = ["settings"] if with_settings else []
    heads = ["run", "stream", "strategy", "norm", "lr", "moments", "seeds", *labels, *first.titles, *settings]
    cells = []
    for lr, row in rows:
        rest = [row.settings] if with_settings else []
        group = [row.labels] if row.labels else []
        cells.append([row.run, *row.names, lr, row.moments, str(row.seeds), *group, *row.scores, *rest])
    return heads, cells


def _least_width(rows: Sequence[LrRow], with_settings: bool) -> int:
    """Minimum width of the table without truncation; the settings column may wrap between settings."""
    widths = column_widths(*_cells(rows, False))
    least = sum(widths) + 2 * (len(widths) - 1)
    words = [word for _, row in rows for word in (*row.settings.split(), "settings")]
    return least + (2 + max(map(len, words)) if with_settings else 0)


def _show_lines(lr: str, row: ScoreRow, console: Console) -> None:
    seeds = "1 seed" if row.seeds == 1 else f"{row.seeds} seeds"
    scores = "  ".join(f"{title} {value}" for title, value in zip(row.titles, row.scores, strict=True))
    how = ", ".join(filter(None, (seeds, row.moments, row.labels)))
    console.print(safe_text(f"{row.run}  {' '.join(row.names)} lr={lr}"))
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
    task_wise = record.matrix_of("matrix_task") if record.config.evaluate.moments == "task" else None
    known = {} if task_wise is None else {", task known, task-wise moments": _acc_by_task(task_wise)}
    several = len(matrices) > 1 or task_wise is not None
    titles = {moments: _MOMENTS[moments] if several or moments != "running" else "" for moments in matrices}
    return known | {titles[moments]: rows for moments, rows in matrices.items()}


_MOMENTS = {
    "running": ", running moments",
    "oracle": ", exact moments",
    "memory": ", moments of the memory",
    "task": ", task-wise moments",
}


def _acc_by_task(m: AccuracyMatrix) -> list[list[float | None]]:
    tasks = range(m.tasks)
    return [[None if m.correct[i][j] is None else m.at(i, j) for j in tasks] for i in tasks]


def _map_by_task(m: LabelMatrix) -> list[list[float | None]]:
    """mAP on each task's images, and in the last column on the images of all tasks so far."""
    measured = [[*by_task, overall] for by_task, overall in zip(m.own, m.tally, strict=True)]
    return [[None if stats is None else mean_ap(stats) for stats in row] for row in measured]
