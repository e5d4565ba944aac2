"""Leftovers in a runs folder: find them, and remove them. Needs no torch.

Leftovers are files that nothing reads again: checkpoints of runs that are recorded, folders of runs that ended before
their first checkpoint, temporary files of interrupted writes, and empty run folders. Stopped runs, which can still be
resumed, are listed separately. Records, kept weights, archives and files that this package did not write are never
removed, and neither is anything of a run that a process executes. `discard` removes given runs on request.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.lock import RunLock
from contnorm.bench.records import is_hash, read_record
from contnorm.bench.unfinished import (
    CHECKPOINTS,
    LOCK,
    NOTE,
    UnfinishedRun,
    is_unfinished,
    read_unfinished,
)
from contnorm.errors import UserError

__all__ = ["Leftover", "Leftovers", "clean", "discard"]

STOPPED = "stopped run"
MIN_AGE = 3600  # seconds: a younger temporary file may be in use
_DRAFT = r"\.{}\.[0-9a-f]{{1,20}}"  # temporary file of an atomic write; version 0.1 used the process id
_CHECKPOINT = r"[0-9]{1,18}\.(json|safetensors)"
_RUN_FILES = re.compile(
    "|".join([NOTE, LOCK, rf"{LOCK}\.json", rf"{LOCK}\.soft(\.[\w.]+)?", _DRAFT.format(rf"({NOTE}|{LOCK}\.json)")])
)
_CHECKPOINT_FILES = re.compile(f"{_CHECKPOINT}|{_DRAFT.format(_CHECKPOINT)}")
_RECORD_FILES = re.compile(r"[0-9]+\.(json|lost\.json|safetensors)")
_RECORD_DRAFTS = re.compile(_DRAFT.format(_RECORD_FILES.pattern))
_FOLDER_DRAFTS = re.compile(_DRAFT.format(r"(\.index\.json|[^/]*\.jsonl(\.gz)?)"))


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can be removed.

    Attributes:
        path: The file or folder.
        kind: What it is.
        size: Bytes of all files in it.
        modified: Time of the last change, in seconds since the epoch.
        run: The unfinished run in the folder; None for other kinds.

    Example:
        >>> Leftover(Path("runs/75cc28cb778a/0.run"), "checkpoint of a recorded run", 2048, 1.7e9).size
        2048
    """

    path: Path
    kind: str
    size: int
    modified: float
    run: UnfinishedRun | None = None


@dataclass(frozen=True)
class Leftovers:
    """Leftovers in a runs folder.

    Attributes:
        removable: What nothing reads again.
        stopped: Stopped runs, which `bench.resume` would finish; removing them loses their progress.
        running: Runs that a process executes now; they are not removed.
        problems: Messages about what can't be removed.
        removed: Paths that were removed.

    Example:
        >>> leftovers = Leftovers()
        >>> leftovers.remove()
        >>> leftovers.removed
        []
    """

    removable: list[Leftover] = field(default_factory=list)
    stopped: list[Leftover] = field(default_factory=list)
    running: list[Leftover] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)

    def remove(self, stopped: bool = False) -> None:
        """Remove what is listed, unless it has changed since; fills `removed`, and adds to `problems`.

        Args:
            stopped: Whether to remove stopped runs too.
        """
        for leftover in [*self.removable, *(self.stopped if stopped else ())]:
            problem = _remove(leftover)
            if problem:
                self.problems.append(problem)
            else:
                self.removed.append(leftover.path)


def clean(runs: str | os.PathLike[str] = "runs", *, stopped: bool = False, dry_run: bool = True) -> Leftovers:
    """Find the leftovers under a runs folder, and remove them if ``dry_run`` is False.

    Args:
        runs: Folder of runs, of folders of runs, or of one run. Symbolic links in it are not followed.
        stopped: Whether to remove stopped runs too, which could be resumed.
        dry_run: Whether to only list what would be removed.

    Returns:
        The leftovers, and the paths that were removed.

    Raises:
        UserError: If there is no such folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     (Path(runs) / "75cc28cb778a" / "0.unfinished").mkdir(parents=True)
        ...     [leftover.kind for leftover in clean(runs).removable], len(clean(runs, dry_run=False).removed)
        (['unfinished run without a checkpoint'], 1)
    """
    root = Path(runs).expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: is not a folder. Use the folder of your runs.")
    leftovers = _find(root)
    if not dry_run:
        leftovers.remove(stopped)
    return leftovers


def discard(
    runs: str | os.PathLike[str],
    settings: RunConfig | str,
    *,
    seeds: Iterable[int] | None = None,
    records: bool = False,
) -> Leftovers:
    """Remove the unfinished runs with given settings from a runs folder: their checkpoints, notes and locks.

    Runs that a process executes now are not removed; they are listed in ``running``.

    Args:
        runs: Folder of runs.
        settings: Settings of the runs, such as the ``config`` of a `bench.TaskDone` or of a `bench.Result`; or their
            hash.
        seeds: Seeds of the runs; None for all.
        records: Whether to remove their records and saved weights too.

    Returns:
        The runs, with the paths that were removed in ``removed``.

    Raises:
        UserError: If ``settings`` is not a hash, or ``seeds`` is not a list.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     (Path(runs) / "75cc28cb778a" / "0.unfinished").mkdir(parents=True)
        ...     len(discard(runs, "75cc28cb778a").removed), len(list(Path(runs).iterdir()))
        (1, 0)
    """
    folder_name = settings.hash if isinstance(settings, RunConfig) else settings
    if not isinstance(folder_name, str) or not is_hash(folder_name):
        raise UserError(f"settings={settings!r}: use a RunConfig, or the hash of settings, such as '75cc28cb778a'.")
    if not isinstance(seeds, Iterable | None):
        raise UserError(f"seeds={seeds!r}: use a list of seeds, such as [0], or None for all.")
    folder, leftovers = Path(runs).expanduser() / folder_name, Leftovers()
    wanted = None if seeds is None else {str(seed) for seed in seeds}
    paths = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    paths = [path for path in paths if wanted is None or path.name.partition(".")[0] in wanted]
    for path in paths:
        if is_unfinished(path):
            _sort_run(path, leftovers)
    running = {path.path.stem for path in leftovers.running}
    for path in paths if records else ():
        kind = "weights" if path.suffix == ".safetensors" else "record"
        if _is_known(path, _RECORD_FILES) and path.name.partition(".")[0] not in running:
            leftovers.removable.append(_measure(path, kind))
    leftovers.remove(stopped=True)
    return leftovers


def _find(root: Path) -> Leftovers:
    leftovers, now = Leftovers(), time.time()
    for folder, names in _folders(root):
        if is_unfinished(folder):
            _sort_run(folder, leftovers)
            continue
        drafts = _RECORD_DRAFTS if is_hash(folder.name) else _FOLDER_DRAFTS
        for name in names:
            path = folder / name
            if drafts.fullmatch(name) and path.is_file() and not path.is_symlink():
                leftover = _measure(path, "temporary file of an interrupted write")
                if now - leftover.modified >= MIN_AGE:
                    leftovers.removable.append(leftover)
        if is_hash(folder.name) and not names and folder != root:
            leftovers.removable.append(_measure(folder, "empty run folder"))
    return leftovers


def _folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders that may have leftovers, each with the names in it; not the insides of unfinished runs or hidden folders.

    The root is resolved if its path lacks the names that identify it, as in the folder of a run.
    """
    resolved = root.resolve()
    needs_parent = root.name in ("", "..") or (is_unfinished(resolved) and not is_unfinished(root))
    start = resolved if needs_parent else root
    for place, folders, files in os.walk(start):  # does not follow symbolic links
        folder = Path(place)
        yield folder, sorted([*folders, *files])
        within = [] if is_unfinished(folder) else folders
        folders[:] = sorted(name for name in within if not name.startswith("."))


def _sort_run(folder: Path, leftovers: Leftovers) -> None:
    """Add the folder of an unfinished run to the list that it belongs to."""
    run = read_unfinished(folder)
    if run.running:
        leftovers.running.append(_measure(folder, RunLock(folder / LOCK).holder(), run))
        return
    unknown = _unknown_files(folder)
    if unknown:
        leftovers.problems.append(
            f"{folder}: is not removed, because contnorm did not write {', '.join(unknown[:3])} in it. Move such files "
            f"elsewhere."
        )
    elif (kind := _kind(run)) == STOPPED:
        leftovers.stopped.append(_measure(folder, kind, run))
    else:
        leftovers.removable.append(_measure(folder, kind, run))


def _kind(run: UnfinishedRun) -> str:
    if _is_recorded(run.folder):
        return "checkpoints of a recorded run"
    return STOPPED if run.config is not None or run.step else "unfinished run without a checkpoint"


def _is_recorded(folder: Path) -> bool:
    """Whether the run of a folder has a valid record; checkpoints of a run with a damaged one are still needed."""
    try:
        read_record(folder.with_suffix(".json"))
    except UserError:
        return False
    return True


def _unknown_files(folder: Path) -> list[str]:
    """Files in the folder of an unfinished run that this package did not write, by their path in it."""
    unknown = []
    for path in sorted(folder.iterdir()):
        if path.name == CHECKPOINTS and path.is_dir() and not path.is_symlink():
            inside = sorted(path.iterdir())
            unknown += [f"{CHECKPOINTS}/{p.name}" for p in inside if not _is_known(p, _CHECKPOINT_FILES)]
        elif not _is_known(path, _RUN_FILES):
            unknown.append(path.name)
    return unknown


def _is_known(path: Path, names: re.Pattern[str]) -> bool:
    return names.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _measure(path: Path, kind: str, run: UnfinishedRun | None = None) -> Leftover:
    size, modified = 0, 0.0
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        with suppress(FileNotFoundError):  # removed meanwhile
            info = each.lstat()
            size += 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            modified = max(modified, info.st_mtime)
    return Leftover(path, kind, size, modified, run)


def _remove(leftover: Leftover) -> str:
    """Remove a leftover; returns why it could not be removed, or an empty text."""
    path = leftover.path
    try:
        if leftover.run is None:
            path.rmdir() if path.is_dir() else path.unlink()
        elif problem := _remove_run(leftover):
            return problem
        if path.parent != path and is_hash(path.parent.name):
            with suppress(OSError):  # it is not empty
                path.parent.rmdir()
    except FileNotFoundError:
        return ""  # another process has removed it
    except OSError as error:
        return f"{path}: can't be removed ({error.strerror}). Check its permissions."
    return ""


def _remove_run(leftover: Leftover) -> str:
    """Remove the folder of an unfinished run while its lock is held, so that no process can start to execute it."""
    folder = leftover.path
    if not folder.is_dir():
        return ""
    lock = RunLock(folder / LOCK)
    if not lock.acquire():
        return f"{folder}: is not removed, because {lock.holder()} executes the run now."
    try:
        # The lock is held here, so only the note, the checkpoints and the record can have changed.
        if _kind(read_unfinished(folder)) != leftover.kind or _unknown_files(folder):
            return f"{folder}: is not removed, because it has changed since it was listed."
        _remove_files(folder, lock)
    finally:
        lock.release()
    return ""


def _remove_files(folder: Path, lock: RunLock) -> None:
    for path in _files(folder / CHECKPOINTS, _CHECKPOINT_FILES):
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (folder / CHECKPOINTS).rmdir()
    for path in _files(folder, _RUN_FILES):
        if not path.name.startswith(LOCK):
            path.unlink(missing_ok=True)
    lock.remove_files()  # last, while the lock is held
    folder.rmdir()


def _files(folder: Path, names: re.Pattern[str]) -> Sequence[Path]:
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [path for path in folder.iterdir() if _is_known(path, names)]
