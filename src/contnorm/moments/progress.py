"""A progress bar for passes over data, with rich where it is installed and with plain lines elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PassProgress", "check_progress", "show_progress"]


class PassProgress(Protocol):
    """Shows how many batches of how many passes over the data are done."""

    def update(self, done: int, batches: int | None, passes: int | None) -> None:
        """Show progress.

        Args:
            done: Batches done, in all passes.
            batches: Batches of a pass; None if unknown.
            passes: Number of passes; None if unknown.
        """


def check_progress(progress: object) -> None:
    """Raise a TypeError unless progress is a bool or a console of rich."""
    if not isinstance(progress, bool) and not (hasattr(progress, "is_terminal") and hasattr(progress, "print")):
        raise TypeError(
            f"reestimate: progress is a {type(progress).__name__}. Give True, False, or a rich.console.Console."
        )


@contextmanager
def show_progress(progress: bool | Console, title: str) -> Iterator[PassProgress]:
    """Context manager that shows a bar on a console of rich; without rich, a line for each pass on stderr.

    Args:
        progress: The console; True for one on stderr, False to show nothing.
        title: Text before the bar.
    """
    rich = None if progress is False else _rich()
    if progress is False:
        yield _Silent()
    elif rich is None:
        yield _Lines(title)
    else:
        console = importlib.import_module("rich.console").Console(stderr=True) if progress is True else progress
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
        with rich.Progress(*columns, rich.TextColumn("batches"), rich.TimeRemainingColumn(), console=console) as bar:
            yield _Bar(bar, title)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.progress")
    except ModuleNotFoundError:
        return None


class _Silent:
    def update(self, done: int, batches: int | None, passes: int | None) -> None:
        pass


class _Bar:
    def __init__(self, bar: Any, title: str) -> None:
        self._bar, self._title, self._task = bar, title, bar.add_task(title, total=None)

    def update(self, done: int, batches: int | None, passes: int | None) -> None:
        total = None if batches is None or passes is None else batches * passes
        self._bar.update(self._task, completed=done, total=total)


class _Lines:
    def __init__(self, title: str) -> None:
        self._title = title

    def update(self, done: int, batches: int | None, passes: int | None) -> None:
        if done and batches and passes and done % batches == 0:
            print(f"{self._title}: pass {done // batches} of {passes}, {batches} batches", file=sys.stderr, flush=True)
