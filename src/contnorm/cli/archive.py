"""The `archive` command: writes all records of a runs folder to one file. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contnorm import bench
from contnorm.cli.common import console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_error, safe_text

__all__ = ["archive"]


@examples(
    Example("Write all records to one file.", "contnorm archive runs --out records.jsonl.gz"),
    Example("Update the file after more runs.", "contnorm archive runs --out records.jsonl.gz --force"),
)
def archive(
    runs: Annotated[Path, typer.Argument(help="Runs folder, or folder of archives.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Archive to write: FILE.jsonl.gz, or FILE.jsonl.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that has different content.")] = False,
) -> None:
    """Write all records of a runs folder to one file, which every command reads like a folder."""
    content = bench.archive(runs, out, force)
    for problem in content.problems:
        print_error(problem)
    action = "written to" if content.written else "already in"
    counts = f"{len(content.records)} finished and {len(content.diverged)} diverged runs"
    console.print(safe_text(f"{counts} {action} {out}"), soft_wrap=True)
    for folder in content.nested_folders:
        print_error(f"{folder}: is another runs folder and is not in the archive. Archive it separately.")
    if content.problems:
        print_error(f"{out}: is incomplete, because {len(content.problems)} problems were reported above.")
    raise typer.Exit(2 if content.problems else 0)
