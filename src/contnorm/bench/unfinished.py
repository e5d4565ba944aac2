"""Unfinished runs under a folder: their settings, their progress, and whether a process executes them. Needs no torch.

An unfinished run is a folder ``<hash>/<seed>.unfinished`` with a note of its settings, checkpoints, and a lock while it
is executed. `contnorm.bench.engine.run_dir` writes it and reads it to resume the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.files import parse_json
from contnorm.bench.records import is_hash
from contnorm.errors import UserError

__all__ = [
    "CHECKPOINTS",
    "ENDING",
    "LOCK",
    "NOTE",
    "UnfinishedRun",
    "is_unfinished",
    "read_unfinished",
    "unfinished_runs",
]

ENDING = ".unfinished"
NOTE, CHECKPOINTS, LOCK = "run.json", "checkpoints", "lock"  # names inside the folder
_FOLDER = re.compile(rf"[0-9]+{re.escape(ENDING)}")
_STEP = re.compile(r"[0-9]{1,18}\.json")
_LONGEST_NOTE = 2**20  # bytes


@dataclass(frozen=True)
class UnfinishedRun:
    """A run with one seed that is not recorded yet.

    Attributes:
        folder: Its folder.
        config: Its settings; None if its note is missing or invalid.
        step: Step of the newest checkpoint; 0 if there is none. The checkpoint is not read.
        running: Whether a process executes it now.
    """

    folder: Path
    config: RunConfig | None
    step: int
    running: bool

    @property
    def hash(self) -> str:
        """Hash of its settings, from the name of the folder."""
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        """Its seed, from the name of the folder."""
        return int(self.folder.name.removesuffix(ENDING))

    @property
    def status(self) -> str:
        """``"running"`` or ``"stopped"``."""
        return "running" if self.running else "stopped"


def unfinished_runs(root: Path) -> list[UnfinishedRun]:
    """Unfinished runs in the run folders directly under a folder, or in the folder of one run.

    Runs that are recorded, and folders without settings and checkpoints, are not listed.

    Example:
        >>> unfinished_runs(Path("no such folder"))
        []
    """
    runs = (read_unfinished(folder) for folder in _unfinished_folders(root))
    return [run for run in runs if run.config is not None or run.step]


def _unfinished_folders(root: Path) -> Iterator[Path]:
    pattern = f"*{ENDING}" if is_hash(root.name) else f"*/*{ENDING}"
    try:
        folders = sorted(root.glob(pattern))
    except OSError:
        return
    for folder in folders:
        if is_unfinished(folder) and not folder.with_suffix(".json").is_file():
            yield folder


def is_unfinished(folder: Path) -> bool:
    """Whether a path is the folder of an unfinished run, by its name and that of its parent; not a symbolic link."""
    named = _FOLDER.fullmatch(folder.name) is not None and is_hash(folder.parent.name)
    return named and folder.is_dir() and not folder.is_symlink()


def read_unfinished(folder: Path) -> UnfinishedRun:
    """Read the note of an unfinished run, the step of its newest checkpoint and whether it is locked."""
    return UnfinishedRun(folder, _noted_settings(folder / NOTE), _latest_step(folder / CHECKPOINTS), _is_locked(folder))


def _noted_settings(note: Path) -> RunConfig | None:
    try:
        if not note.is_file() or note.stat().st_size > _LONGEST_NOTE:
            return None
        return from_dict(parse_json(note.read_bytes())["config"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
        return None


def _latest_step(checkpoints: Path) -> int:
    if checkpoints.is_symlink():
        return 0
    try:
        steps = [int(path.stem) for path in checkpoints.glob("*.json") if _STEP.fullmatch(path.name)]
    except OSError:
        return 0
    return max(steps, default=0)


def _is_locked(folder: Path) -> bool:
    from contnorm.bench.engine.lock import RunLock

    try:
        return not RunLock(folder / LOCK).is_free()
    except OSError:  # such as a lock file in a read-only folder, where no run is executed
        return False
