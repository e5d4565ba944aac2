"""Writes a report to the terminal, to a file, or to a folder with one file per table. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from contnorm.bench.files import write_output
from contnorm.cli.report import ENDINGS, Report, counted, report_files, report_text
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, usable

__all__ = ["write_report"]


def write_report(report: Report, form: str, part: str, out: Path | None, console: Console) -> None:
    """Write a report.

    Args:
        report: What to write.
        form: One of ``html``, ``md``, ``latex`` and ``csv``.
        part: One of ``all``, ``tables``, ``claims`` and ``runs``.
        out: File to write. A path without a suffix, or of an existing folder, is a folder with one file per table.
            None writes ``report.html``, or prints the other formats.
        console: Terminal to print to.
    """
    if out is None and form != "html":
        print(report_text(report, form, part), end="")
        return
    path = out or Path("report.html")
    if not path.is_dir():
        _check_ending(path, form)
    if path.is_dir() or not path.suffix:
        texts = {path / name: text for name, text in report_files(report, form, part).items()}
    else:
        texts = {path: report_text(report, form, part)}
    for file, text in texts.items():
        with usable(file, "it can't be written", "Say with -o where else."):
            write_output(file, text.encode())
    where = str(path) if list(texts) == [path] else f"{len(texts)} files under {path}"
    console.print(safe_text(f"{counted(report.runs, 'run')} in {where}"), soft_wrap=True)


def _check_ending(path: Path, form: str) -> None:
    """Raise a `UserError` if the suffix of a file belongs to another format."""
    suffix_format = {f".{ending}": name for name, ending in ENDINGS.items()}.get(path.suffix.lower(), form)
    if form in ENDINGS and suffix_format != form:
        raise UserError(
            f"-o {path}: the name is of another format than {form}. Use --format {suffix_format}, or another name."
        )
