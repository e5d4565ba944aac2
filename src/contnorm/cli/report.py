"""The `report` command: writes records as an HTML page or as Markdown files. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contnorm.cli.common import print_error, print_lines
from contnorm.report.report import collect_report, write_report


def report(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File in .html or .md, or folder for Markdown files.")
    ] = Path("report.html"),
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Table of the paper to include: table2, ... or a TOML file; repeatable; default: all that the runs "
            "belong to."
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Folder or archive of records; repeatable, for one report over several."),
    ] = None,
) -> None:
    """Write a report that compares the norms in your runs: an HTML page or Markdown.

    Examples:
        # Write report.html, which compares the norms of your runs.
        contnorm report
        # Write the tables as Markdown.
        contnorm report --out report.md
    """
    content = collect_report(runs or [Path("runs")], table or ())
    for problem in content.runs.problems:
        print_error(problem)
    files = write_report(content, out)
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files under {out}"
    print_lines([f"{content.lead[0]} See {where}"])
