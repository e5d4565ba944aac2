"""Load a data set with a progress bar. The first load decodes its images, which may take a minute."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from contnorm.bench.data.pictures import cores
from contnorm.bench.data.registry import Source, load_source

__all__ = ["cores", "load_with_progress"]


def load_with_progress(
    name: str, root: Path, console: Console, *, allow_missing: bool = False, bars: Progress | None = None
) -> Source:
    """Load a data set; on a terminal, show a progress bar while pictures are decoded.

    Ctrl-C raises `KeyboardInterrupt` immediately, even if the installed handler would wait.

    Args:
        name: Name of the data set.
        root: Folder of data sets.
        console: Terminal for the bar.
        allow_missing: Accept a published data set with other image counts than published.
        bars: Progress display to add the bar to; None creates one.
    """
    if bars is None:
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            return load_with_progress(name, root, console, allow_missing=allow_missing, bars=bars)
    bar = bars.add_task(name, visible=False)  # shown with the first report
    try:
        with _interruptible():
            return load_source(
                name,
                root,
                allow_missing=allow_missing,
                progress=lambda what, done, total: bars.update(
                    bar, description=f"{name}: {what}", completed=done, total=total, visible=True, refresh=done == total
                ),
            )
    finally:
        bars.remove_task(bar)


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
