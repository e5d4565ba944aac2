"""Loads a data set with a progress bar. The first load decodes its images, which may take a minute."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from contnorm.bench.data.registry import Source, load_source

__all__ = ["cores", "load_with_progress"]


def load_with_progress(
    name: str, root: Path, console: Console, *, allow_missing: bool = False, bars: Progress | None = None
) -> Source:
    """Load a data set with all cores; on a terminal, show a progress bar while files are decoded or checked.

    Ctrl-C raises `KeyboardInterrupt` immediately, even if the installed handler would wait.

    Args:
        name: Name of the data set.
        root: Folder of data sets.
        console: Terminal for the bar.
        allow_missing: Accept a published data set with other image counts than published.
        bars: Progress display to add the bar to; None creates one.
    """
    with _interruptible(), _shown(name, console, bars) as bar:
        # Decoding in processes imports the main module again, which only the command allows.
        jobs = cores() if _is_command() else 1
        return load_source(name, root, allow_missing=allow_missing, progress=bar.update, jobs=jobs)


def _is_command() -> bool:
    """Whether this process is the ``contnorm`` command."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem == "contnorm" or (spec is not None and spec.name.partition(".")[0] == "contnorm")


def cores() -> int:
    """Number of cores that this process may use; in a container this may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


class _Bar:
    """One progress bar per kind of work, added with its first report; a data set that is ready shows none."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress
        self.tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(f"{self.name}: {what}", total=total)
        self.progress.update(self.tasks[what], completed=done, total=total)


@contextmanager
def _shown(name: str, console: Console, bars: Progress | None) -> Iterator[_Bar]:
    if bars is not None:
        bar = _Bar(name, bars)
        try:
            yield bar
        finally:
            for task in bar.tasks.values():
                bars.remove_task(task)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(name, progress)
