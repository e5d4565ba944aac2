"""CSV files: ``csv/<hash>/<seed>.csv`` with one metric per line, and ``<seed>.json`` with settings and status."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from contnorm.atomic_files import write_atomically
from contnorm.bench.loggers.base import LoggedRun, Logger

__all__ = ["CSVLogger"]

COLUMNS = ("step", "metric", "value")


class CSVLogger(Logger):
    """Writes the metrics of each run to a CSV file with the columns ``step``, ``metric`` and ``value``.

    Args:
        folder: Folder of logs; the files are in its subfolder ``csv``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "csv"
        self._files: dict[str, TextIO] = {}

    def path(self, run: LoggedRun) -> Path:
        """Return the CSV file of a run."""
        return self.folder / run.hash / f"{run.seed}.csv"

    def start(self, run: LoggedRun) -> None:
        path = self.path(run)
        rows = [row for row in _read(path) if int(row[0]) <= run.done] if run.done else []
        lines = [",".join(row) for row in (COLUMNS, *rows)]
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        self._files[run.id] = path.open("a", newline="")
        self._describe(run, "running")

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        file = self._files[run.id]
        csv.writer(file, lineterminator="\n").writerows((step, name, repr(value)) for name, value in values.items())
        file.flush()

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        self._files.pop(run.id).close()
        self._describe(run, status, reason)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _describe(self, run: LoggedRun, status: str, reason: str = "") -> None:
        content: dict[str, Any] = {"hash": run.hash, "seed": run.seed, "status": status, "settings": dict(run.settings)}
        content |= {"provenance": dict(run.provenance), **({"reason": reason} if reason else {})}
        write_atomically(self.path(run).with_suffix(".json"), json.dumps(content, indent=1).encode())


def _read(path: Path) -> list[list[str]]:
    """Return the complete rows of a log; the last line may be cut off if its process was killed."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    if rows and not path.read_text().endswith("\n"):
        rows.pop()
    return [row for row in rows[1:] if len(row) == len(COLUMNS) and row[0].isdigit()]
