"""The `archive` command: writes all records of a runs folder to one file. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from contnorm.bench.archives import write_archive
from contnorm.bench.records import RecordSet, Store, run_folders
from contnorm.cli.tables import print_error, safe_text
from contnorm.errors import UserError, usable

__all__ = ["archive_runs"]


def archive_runs(runs: Path, out: Path, force: bool, console: Console) -> int:
    """Write the finished and diverged runs of a folder to an archive.

    Args:
        runs: Runs folder, archive, or folder of archives.
        out: Archive to write.
        force: Whether to replace a file with different content.
        console: Terminal to print to.

    Returns:
        The exit code: 0, or 2 if the archive lacks records of the folder that are invalid.
    """
    if not runs.exists():
        raise UserError(f"{runs}: there is no such folder. Use a runs folder.")
    content = Store(runs).load_all(drop=False)
    for problem in content.problems:
        print_error(problem)
    if not content.records and not content.diverged_runs:
        raise UserError(
            f"{runs}: there are no valid records. Use a runs folder, such as that of `contnorm run --runs`."
        )
    with usable(out, "it can't be written", "Use -o with another path."):
        written = write_archive(out, [*content.records, *content.diverged_runs], force)
    action = "written to" if written else "already in"
    console.print(safe_text(f"{_counted(content)} {action} {out}"), soft_wrap=True)
    for folder in _nested_folders(runs):
        print_error(f"{folder}: is another runs folder and is not in the archive. Archive it separately.")
    if content.problems:
        print_error(f"{out}: is incomplete, because {len(content.problems)} problems were reported above.")
    return 2 if content.problems else 0


def _counted(content: RecordSet) -> str:
    finished, diverged = len(content.records), len(content.diverged_runs)
    return f"{finished} finished and {diverged} diverged runs"


def _nested_folders(runs: Path) -> list[Path]:
    """Folders of runs inside the folder, such as those of timed recipes."""
    folders = [folder.path for folder in run_folders(runs) if not folder.records and not folder.notes]
    return [folder for folder in folders if any(inner.records or inner.notes for inner in run_folders(folder))]
