"""The `report` command: writes records as an HTML page, or as Markdown, LaTeX or CSV tables. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contnorm.cli.common import console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_error, safe_text
from contnorm.report.report import collect_report, counted, report_text, write_report

__all__ = ["report"]


@examples(
    Example("Write report.html, which compares the norms of your runs.", "contnorm report"),
    Example("Print the comparison as a LaTeX table.", "contnorm report --format latex --part comparison"),
)
def report(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file, or folder for one file per table; default: report.html."),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Output format: html, md, latex or csv.")] = "html",
    part: Annotated[
        str, typer.Option(help="Part to write: all, comparison, tables, claims or runs; html always has all.")
    ] = "all",
    table: Annotated[
        list[str] | None,
        typer.Option(help="Table to include: table2, ... or a TOML file; repeatable; default: all of the paper's."),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Folder or archive of records; repeatable, for one report over several."),
    ] = None,
) -> None:
    """Write a report that compares the norms in your runs: an HTML page, Markdown, LaTeX or CSV."""
    content = collect_report(runs or [Path("runs")], table or ())
    content.require_runs()
    for problem in content.problems:
        print_error(problem)
    if out is None and form != "html":
        print(report_text(content, form, part), end="")
        return
    files = write_report(content, out, form=form, part=part)
    alone = len(files) == 1 and not (out and out.is_dir())
    where = str(files[0]) if alone else f"{counted(len(files), 'file')} under {out}"
    console.print(safe_text(f"{counted(content.runs, 'run')} in {where}"), soft_wrap=True)
