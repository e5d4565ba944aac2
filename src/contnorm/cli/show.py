"""The `show` command: prints the scores of records, or writes them to a file. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.defaults import run_names
from contnorm.bench.config.schema import format_value
from contnorm.bench.records import Record, Runs, Store
from contnorm.bench.selection import SHORT_KEYS, no_match, resolve_key
from contnorm.bench.text import spread
from contnorm.bench.unfinished import unfinished_runs
from contnorm.cli.common import RunsFolder, Where, console, print_error, print_lines, print_text, show_rows
from contnorm.errors import UserError, unknown
from contnorm.report.runs import accuracy_tables, divergence_lines, score_tables
from contnorm.report.tables import Document, Table, markdown

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = "run,stream,strategy,norm,lr,seeds,acc,fm,la,aia"


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
    columns: Annotated[
        str | None,
        typer.Option(help="Settings and scores to show, such as norm,lr,acc,bwt; also run, seeds, seconds, device."),
    ] = None,
    by_task: Annotated[bool, typer.Option("--by-task", help="Show the full accuracy matrix of each run.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="File to write: .csv, .json or .parquet with one row per seed and a column per setting, .md or .tex "
            "with the table that is shown, .jsonl.gz with the records themselves.",
        ),
    ] = None,
) -> None:
    """Show the scores of finished runs, averaged over seeds, or write them to a file.

    Examples:
        # Show the mean scores of all runs.
        contnorm show
        # Show chosen columns of the runs with CN, best accuracy first.
        contnorm show --where norm=cn --columns norm,lr,acc,fm --sort acc
        # Write a table with one row per run and seed.
        contnorm show --to runs.csv
        # Write all records to one file, which every command reads.
        contnorm show --to records.jsonl.gz
    """
    store = Store(runs)
    selected = load_selection(store, run, where or ())
    if not selected.records and not (to and selected.diverged):
        raise UserError(f"all runs with {' '.join(where or ())} diverged, so they have no scores.")
    for problem in selected.problems:
        print_error(problem)
    if to is not None and to.suffix not in (".md", ".tex"):
        selected.save(to, by_task)
        counts = f"{len(selected.records)} finished and {len(selected.diverged)} diverged runs"
        print_lines([f"{counts} written to {to}"])
        raise typer.Exit(2 if selected.problems else 0)
    if by_task:
        tables = list(accuracy_tables(selected.records))
    elif columns or sort:
        tables = [column_table(selected, columns or COLUMNS, sort or "stream,strategy")]
    else:
        tables = score_tables(selected)
    if to is not None:
        text = markdown(Document("runs", "Runs", tables)) if to.suffix == ".md" else _latex(tables)
        write_atomically(to, text.encode())
        return
    _print(tables, console)
    for line in [*divergence_lines(selected), *unfinished_lines(store)]:
        print_text(line, console)


def load_selection(store: Store, names: Sequence[str] | None, where: Sequence[str]) -> Runs:
    """Load the records with some names, or all, that meet all conditions.

    Raises:
        UserError: If there is no such run, with the reason.
    """
    parts = [store.find(name) for name in names] if names else [store.load_all()]
    records = [record for part in parts for record in (*part.records, *part.diverged)]
    every = Runs.of(records, [problem for part in parts for problem in part.problems])
    if not records:
        hint = "".join(unfinished_lines(store)) or "Make one: contnorm run --norm cn"
        raise UserError("; ".join(every.problems) or f"no finished runs under {store.root}. {hint}")
    selected = every.where(*where)
    if not selected.records and not selected.diverged:
        raise UserError(no_match(records, where))
    return selected


def unfinished_lines(store: Store) -> list[str]:
    """One line that counts unfinished runs and names the command that resumes them; none without such runs."""
    unfinished = [] if store.read_only else unfinished_runs(store.root)
    if not unfinished:
        return []
    stopped = sum(not run.running for run in unfinished)
    resume = f" Resume with: contnorm resume --runs {shlex.quote(str(store.root))}" if stopped else ""
    return [f"Unfinished runs: {stopped} stopped, {len(unfinished) - stopped} in progress.{resume}"]


def show_scores(records: Sequence[Record], console: Console) -> None:
    """Print one row per run, with mean and standard deviation over its seeds; multi-label runs in a table below."""
    _print(score_tables(Runs(records)), console)


def show_matrices(records: Sequence[Record], console: Console) -> None:
    """Print the accuracy matrix of each run; for multi-label streams, the matrix of mAP."""
    _print(list(accuracy_tables(records)), console)


def _print(tables: Sequence[Table], console: Console) -> None:
    for table in tables:
        if table.title:
            print_text(table.title, console, "bold")
        show_rows(table.heads, table.rows, console, named=4, wrap_last=table.heads[-1] == "settings")
        for note in table.notes:
            if not note.startswith("Percent,"):  # what the scores are is in `contnorm show --help` and on pages
                print_text(note, console)


def _latex(tables: Sequence[Table]) -> str:
    """Tables for the LaTeX package booktabs."""
    texts = [table.frame.map(lambda cell: cell.replace("+-", "±")).style for table in tables]
    escaped = [style.format(escape="latex").hide(axis="index").to_latex(hrules=True) for style in texts]
    return "\n".join(escaped).replace("±", r"$\pm$")


def column_table(runs: Runs, columns: str, sort: str) -> Table:
    """Table of chosen columns with one row per run, sorted by chosen columns.

    Scores and times are mean and standard deviation over seeds. The best score comes first, of other columns the lowest
    value; missing values are last.
    """
    frame = runs.to_frame()
    frame = frame[frame["status"] == "finished"]
    shown = {name: _column(name, frame) for name in map(str.strip, columns.split(","))}
    numbers = list(frame.columns[frame.columns.get_loc("acc" if "acc" in frame else "c_f1") :])
    numbers = [key for key in numbers if key not in ("device", "torch")]
    groups = frame.groupby("hash", sort=False)
    values = groups.first()
    values[numbers] = groups[numbers].mean()
    values["hash"], values["seeds"] = values.index, groups.size()
    for name in reversed([one for one in sort.split(",") if one]):
        key = _column(name.strip(), frame)
        higher_first = key in numbers and not key.startswith("fm") and key != "seconds"
        values = values.sort_values(key, ascending=not higher_first, kind="stable", na_position="last")
    labels = {
        record.hash: dict(zip(("stream", "strategy", "norm"), run_names(record.config), strict=True)) for record in runs
    }
    rows = []
    for run in values.index:
        seeds = groups.get_group(run)
        cells = [
            labels[run].get(name)
            or (spread(seeds[key].tolist()) if key in numbers else format_value(values.at[run, key]))
            for name, key in shown.items()
        ]
        rows.append(cells)
    return Table("", list(shown), rows)


def _column(name: str, frame: DataFrame) -> str:
    """Column of `Runs.to_frame` of a typed name: a score, a setting, or a part of a run's identity."""
    if name in frame or name == "seeds":
        return name
    if name == "run":
        return "hash"
    try:
        return resolve_key(name, list(frame.columns))
    except UserError:
        raise unknown("column", name, ["run", "seeds", *SHORT_KEYS, *frame.columns]) from None
