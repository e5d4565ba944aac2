"""Where a report goes: to the terminal, into a file, or into a folder, a file a table. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from contnorm.bench.records import write_output
from contnorm.cli.report import ENDINGS, Report, counted, report_files, report_text
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, usable

__all__ = ["write_report"]


def write_report(report: Report, form: str, part: str, out: Path | None, console: Console) -> None:
    """Text goes to the terminal unless a place is named; what has no ending, or is there already, is a folder."""
    if out is None and form != "html":
        print(report_text(report, form, part), end="")
        return
    path = out or Path("report.html")
    if not path.is_dir():
        _check_ending(path, form)
    if path.is_dir() or not path.suffix:
        found = {path / name: text for name, text in report_files(report, form, part).items()}
    else:
        found = {path: report_text(report, form, part)}
    for file, text in found.items():
        with usable(file, "it can't be written", "Say with -o where else."):
            write_output(file, text.encode())
    where = str(path) if list(found) == [path] else f"{len(found)} files under {path}"
    console.print(safe_text(f"{counted(report.runs, 'run')} in {where}"), soft_wrap=True)


def _check_ending(path: Path, form: str) -> None:
    """Refuse a file whose name says another format."""
    named = {f".{ending}": name for name, ending in ENDINGS.items()}.get(path.suffix.lower(), form)
    if form in ENDINGS and named != form:
        raise UserError(f"-o {path}: the name is of another format than {form}. Use --format {named}, or another name.")
