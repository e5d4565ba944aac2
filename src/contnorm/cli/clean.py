"""The `clean` command: lists and removes leftovers of unfinished runs. Needs no torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contnorm import bench
from contnorm.bench.config.defaults import run_names
from contnorm.cli.common import console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import print_error, print_indented, print_text, show_rows

__all__ = ["clean", "show_leftovers"]

UNITS = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
AGES = (("day", 86400), ("hour", 3600), ("minute", 60))


@examples(
    Example("Show what can be removed from the folder runs.", "contnorm clean --dry-run"),
    Example("Remove it without asking.", "contnorm clean runs --yes"),
)
def clean(
    runs: Annotated[Path, typer.Argument(help="Folder of runs, or of one run.")] = Path("runs"),
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Also remove stopped runs, which `contnorm resume` would finish.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Show the leftovers of unfinished runs, with size and age, then ask whether to remove them."""
    leftovers = bench.clean(runs)
    show_leftovers(leftovers, runs, stopped, console)
    chosen = [*leftovers.removable, *(leftovers.stopped if stopped else ())]
    asks = not (yes or dry_run) and _at_terminal()
    if chosen and (dry_run or not (yes or asks)):
        print_text(f"Would remove {_total(chosen)}.{'' if dry_run else ' Use --yes to remove them.'}", console)
    if dry_run or not (yes or asks):
        return
    if chosen and asks and not typer.confirm(f"Remove {_total(chosen)}?"):
        print_text("Nothing was removed.", console)
        return
    if asks and leftovers.stopped and not stopped:
        stopped = typer.confirm(f"Remove {_total(leftovers.stopped, 'stopped run')} too, and lose the progress?")
    if chosen or stopped:
        _remove(leftovers, stopped)


def _remove(leftovers: bench.Leftovers, stopped: bool) -> None:
    shown = len(leftovers.problems)
    leftovers.remove(stopped)
    for problem in leftovers.problems[shown:]:
        print_error(problem)
    print_text(f"Removed {_counted(len(leftovers.removed), 'leftover')}.", console)
    raise typer.Exit(2 if leftovers.problems[shown:] else 0)


def _total(leftovers: Sequence[bench.Leftover], noun: str = "leftover") -> str:
    return f"{_counted(len(leftovers), noun)} ({format_size(sum(one.size for one in leftovers))})"


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and console.is_terminal


def show_leftovers(leftovers: bench.Leftovers, runs: Path, stopped: bool, console: Console) -> None:
    """Print what can be removed, what can be resumed and what is being executed."""
    for problem in leftovers.problems:
        print_error(problem)
    if leftovers.removable:
        table = [(one.kind, str(one.path), *_measures(one)) for one in leftovers.removable]
        _show(("leftover", "path", "size", "age"), table, console)
    elif not leftovers.stopped:
        print_text(f"{runs}: has no leftovers.", console)
    if leftovers.stopped:
        if leftovers.removable:
            console.print()
        rows = [(_run_name(one), str(one.path), f"step {_step(one):,}", *_measures(one)) for one in leftovers.stopped]
        _show(("stopped run", "path", "progress", "size", "age"), rows, console)
        one = len(leftovers.stopped) == 1
        resume = f"`contnorm resume {shlex.quote(str(runs))}` finishes {'it' if one else 'them'}"
        fate = "with --stopped, removed too" if stopped else "removed only with --stopped"
        print_text(f"{_counted(len(leftovers.stopped), 'stopped run')}: {resume}; {fate}.", console)
    if leftovers.running:
        holders = ", ".join(dict.fromkeys(one.kind for one in leftovers.running))
        print_text(f"{_counted(len(leftovers.running), 'run')} in progress, by {holders}: not touched.", console)


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table; on a narrow terminal, two lines per row."""
    width = sum(max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))) + 2 * len(heads) - 2
    if width <= console.width:
        show_rows(heads, rows, console)
        return
    print_text(f"{heads[0]}s:", console)
    for name, path, *rest in rows:
        print_text(path, console)
        print_indented(", ".join((name, *rest)), console)


def _run_name(leftover: bench.Leftover) -> str:
    run = leftover.run
    if run is None or run.config is None:
        return "unknown settings"
    return f"{' '.join(run_names(run.config))} lr={run.config.train.lr} seed {run.seed}"


def _step(leftover: bench.Leftover) -> int:
    return 0 if leftover.run is None else leftover.run.step


def _measures(leftover: bench.Leftover) -> tuple[str, str]:
    return format_size(leftover.size), format_age(time.time() - leftover.modified)


def format_size(size: int) -> str:
    """Format a number of bytes.

    Example:
        >>> format_size(0), format_size(999), format_size(12_345_678)
        ('0 B', '999 B', '12.3 MB')
    """
    unit, factor = next(((u, f) for u, f in reversed(UNITS) if size >= f), UNITS[0])
    return f"{size} B" if factor == 1 else f"{size / factor:.1f} {unit}"


def format_age(seconds: float) -> str:
    """Format an age in its largest unit.

    Example:
        >>> format_age(59), format_age(7200), format_age(86400)
        ('less than a minute', '2 hours', '1 day')
    """
    for unit, length in AGES:
        if seconds >= length:
            return _counted(int(seconds // length), unit)
    return "less than a minute"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
