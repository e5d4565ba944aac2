"""Unfinished runs under a folder: their settings, their progress, and whether a process executes them. Needs no torch.

An unfinished run is a folder ``<hash>/<seed>.unfinished`` with a note of its settings, a checkpoint, and a lock while
it is executed. `contnorm.bench.engine.checkpoint` writes it. It is removed when the run is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.errors import UserError

UNFINISHED_SUFFIX = ".unfinished"
NOTE, CHECKPOINT, LOCK = "run.json", "checkpoint.safetensors", "lock"  # names inside the folder


@dataclass(frozen=True)
class UnfinishedRun:
    """A run with one seed that is not recorded yet.

    Attributes:
        folder: Its folder.
        config: Its settings; None if its note is missing or invalid.
        step: Step of its checkpoint; 0 if there is none.
        running: Whether a process executes it now.
        note: The content of its note.
    """

    folder: Path
    config: RunConfig | None
    step: int
    running: bool
    note: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """Hash of its settings, from the name of the folder."""
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        """Its seed, from the name of the folder."""
        return int(self.folder.name.removesuffix(UNFINISHED_SUFFIX))

    @property
    def status(self) -> str:
        """``"running"`` or ``"stopped"``."""
        return "running" if self.running else "stopped"


def unfinished_runs(root: Path) -> list[UnfinishedRun]:
    """Return the unfinished runs of a folder of runs, of one experiment in it, or the one in its own folder.

    Example:
        >>> unfinished_runs(Path("no such folder"))
        []
    """
    root = Path(root)
    name = root.resolve().name
    inside = sorted([*root.glob(f"*{UNFINISHED_SUFFIX}"), *root.glob(f"*/*{UNFINISHED_SUFFIX}")])
    folders = [root] if name.endswith(UNFINISHED_SUFFIX) else inside
    runs = []
    for folder in folders:
        if folder.with_suffix(".json").is_file() or not folder.stem.isdecimal():
            continue
        note, config, step = dict[str, Any](), None, 0
        with suppress(OSError, ValueError, LookupError, TypeError, UserError):
            content = json.loads((folder / NOTE).read_bytes())
            note, config = content, from_dict(content["config"])
        with suppress(OSError, ValueError, LookupError):  # there is none, or the run is just being recorded
            step = int(read_progress(folder / CHECKPOINT)["done"])
        runs.append(UnfinishedRun(folder, config, step, is_locked(folder), note))
    return [run for run in runs if run.config is not None or run.step]


def is_locked(folder: Path) -> bool:
    """Whether a process executes the run of a folder now."""
    if not (folder / LOCK).exists():
        return False
    from filelock import FileLock, Timeout  # commands that find no such run start without it

    try:
        with FileLock(folder / LOCK, timeout=0, thread_local=False):
            return False
    except OSError as error:
        return isinstance(error, Timeout)  # others are of a read-only folder, where no run is executed


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Return the progress in the header of a checkpoint: steps done, and what was measured by then."""
    with checkpoint.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    progress: dict[str, Any] = json.loads(header["__metadata__"]["progress"])
    return progress
