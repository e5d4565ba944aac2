"""Stores of records: a runs folder with one JSON file per run and seed, ``<hash>/<seed>.json``, or an archive.

A folder may also contain archives next to its run folders; their records are read as well. Archives are read-only. A
record that fails a check is reported as a problem and not used.

Records separate training from analysis: the engine writes them and needs torch; scores, comparisons and reports are
computed from these files alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from contnorm.bench.archives import archives_in, is_archive, read_archive
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.record import (
    DIVERGED,
    FINISHED,
    LARGEST_SEED,
    SCHEMA,
    DivergedRun,
    Record,
    RecordShape,
    identity,
    is_hash,
    make_record,
    parse_record,
    read_json,
    record_error,
    seal_of,
    write_sealed,
)
from contnorm.bench.record_checks import LONGEST_TEXT
from contnorm.bench.record_sets import (
    RecordLike,
    RecordSet,
    drop_duplicates,
    drop_finished,
    drop_inconsistent,
    group_by_run,
    spread_over_seeds,
)
from contnorm.errors import UserError

__all__ = [
    "LARGEST_SEED",
    "SCHEMA",
    "DivergedRun",
    "NoFinishedRunError",
    "Record",
    "RecordLike",
    "RecordSet",
    "RecordShape",
    "RunFolder",
    "Store",
    "drop_duplicates",
    "drop_inconsistent",
    "group_by_run",
    "is_folder_of_runs",
    "make_record",
    "no_finished_run",
    "read_notes",
    "run_folders",
    "seal_of",
    "spread_over_seeds",
]

NOTE_ENDING = ".lost.json"  # of a divergence note, which schemas 1 and 2 have instead of a record
_RECORD_NAME = re.compile(r"[0-9]+\.json")
_NOTE_NAME = re.compile(r"[0-9]+\.lost\.json")


class Store:
    """The records under a folder or in an archive.

    Args:
        root: A runs folder, which may contain archives, or an archive.

    Example:
        >>> list(Store(Path("no such folder")))
        []
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def read_only(self) -> bool:
        """Whether the store is an archive, or a path in one, to which no run can be added."""
        return any(is_archive(path) for path in (self.root, *self.root.parents))

    def check_writable(self) -> None:
        """Raise a `UserError` if the store is an archive."""
        if self.read_only:
            raise UserError(f"{self.root}: is an archive, and archives are read-only. Use a folder of runs.")

    @cached_property
    def archived(self) -> RecordSet:
        """Content of the archive, or of all archives directly in the folder; read once per store."""
        archives = [self.root] if is_archive(self.root) else archives_in(self.root)
        contents = [read_archive(path) for path in archives]
        return RecordSet(
            [record for content in contents for record in content.records],
            [problem for content in contents for problem in content.problems],
            [run for content in contents for run in content.diverged_runs],
        )

    @cached_property
    def _archived_records(self) -> dict[tuple[str, int], Record]:
        first: dict[tuple[str, int], Record] = {}
        for record in self.archived.records:
            first.setdefault((record.hash, record.seed), record)
        return first

    def path(self, config: RunConfig, seed: int) -> Path:
        """File of a run's record in a runs folder."""
        return self.root / config.hash / f"{seed}.json"

    def has(self, config: RunConfig, seed: int) -> bool:
        """Whether there is a record of a finished run."""
        path = self.path(config, seed)
        return (path.is_file() and not _is_diverged(path)) or (config.hash, seed) in self._archived_records

    def seeds(self, config: RunConfig, among: Iterable[int]) -> set[int]:
        """Subset of the seeds that have a record of a finished run."""
        if isinstance(among, range):  # which may be long
            entries = _scan_folder(self.root / config.hash).records
            known = {int(Path(entry.name).stem) for entry in entries}
            known |= {seed for run, seed in self._archived_records if run == config.hash}
            among = sorted(seed for seed in known if seed in among)
        return {seed for seed in among if self.has(config, seed)}

    def save(self, config: RunConfig, seed: int, results: Mapping[str, Any]) -> Path:
        """Write the sealed record of a finished run."""
        self.check_writable()
        return write_sealed(self.path(config, seed), {**identity(config, seed), "status": FINISHED, **results})

    def save_diverged(
        self, config: RunConfig, seed: int, reason: str, environment: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the sealed record of a diverged run; the record of a finished run is not replaced.

        Args:
            config: Settings of the run.
            seed: Seed of the run.
            reason: Message about the divergence.
            environment: Further fields of the record, such as device and versions.
        """
        self.check_writable()
        path = self.path(config, seed)
        if self.has(config, seed):
            return path
        content = {"status": DIVERGED, "reason": reason[:LONGEST_TEXT], **(environment or {})}
        return write_sealed(path, {**identity(config, seed), **content})

    def is_diverged(self, config: RunConfig, seed: int) -> bool:
        """Whether a run is known to diverge and has no record of a finished run."""
        return self.divergence(config, seed) is not None

    def divergence(self, config: RunConfig, seed: int) -> DivergedRun | None:
        """The diverged run of a seed; None if it is not known to diverge."""
        return next((run for run in self._diverged_runs(config) if run.seed == seed), None)

    def diverged_seeds(self, config: RunConfig) -> dict[int, str]:
        """Seeds of a run that are known to diverge, each with its reason; empty if that can't be read."""
        return {run.seed: run.reason for run in sorted(self._diverged_runs(config), key=lambda run: run.seed)}

    def _diverged_runs(self, config: RunConfig) -> list[DivergedRun]:
        folder = _scan_folder(self.root / config.hash)
        records = [entry for entry in folder.records if _is_diverged(Path(entry.path))]
        diverged = self._load_folder(replace(folder, records=records)).diverged_runs
        diverged += [run for run in self.archived.diverged_runs if run.hash == config.hash]
        return [run for run in drop_finished(diverged, ()) if not self.has(config, run.seed)]

    def load(self, path: Path) -> Record:
        """Load the record of a finished run from a file, and check it.

        The names of the folder and the file are checked under this store's root and wherever the folder's name is a
        hash; a copy of a record elsewhere may have any name.

        Raises:
            UserError: If a check fails, or if the run diverged.
        """
        item = self.load_file(path)
        if isinstance(item, DivergedRun):
            raise UserError(f"{path}: has no scores, because the run diverged. {item.reason}".rstrip())
        return item

    def load_file(self, path: Path) -> Record | DivergedRun:
        """Like `load`, but also returns diverged runs."""
        raw = read_json(path)
        if path.name.endswith(NOTE_ENDING) and raw.get("schema") == 1:  # these notes name neither run nor seed
            seed = path.name.removesuffix(NOTE_ENDING)
            raw = {"schema": 1, "hash": _name(path.parent), "seed": int(seed) if seed.isdecimal() else seed, **raw}
        item = parse_record(raw, path)
        try:
            _check_place(path, self.root, item.hash, item.seed)
        except ValueError as error:
            raise record_error(path, error) from error
        return item

    def load_run(self, config: RunConfig, seed: int) -> Record:
        """Load the record of a finished run from its file or from an archive.

        Raises:
            UserError: If there is none, or if it is invalid.
        """
        archived = self._archived_records.get((config.hash, seed))
        path = self.path(config, seed)
        return archived if archived is not None and not path.is_file() else self.load(path)

    def load_seeds(self, config: RunConfig, seeds: Iterable[int]) -> RecordSet:
        """Load the records of some seeds of a run; invalid ones are reported as problems."""
        result = RecordSet([], [])
        for seed in seeds:
            try:
                result.records.append(self.load_run(config, seed))
            except UserError as error:
                result.problems.append(str(error))
        return replace(result, records=drop_inconsistent(result.records, result.problems))

    def __iter__(self) -> Iterator[Record]:
        for folder in run_folders(self.root):
            for entry in folder.records:
                item = self.load_file(Path(entry.path))
                if isinstance(item, Record):
                    yield item
        if self.archived.problems:
            raise UserError("; ".join(self.archived.problems))
        yield from self.archived.records

    def load_all(self, drop: bool = True) -> RecordSet:
        """Load all records; invalid ones are reported as problems.

        Args:
            drop: Whether to drop records whose shape differs from the other seeds of their run.
        """
        return _merged([*map(self._load_folder, run_folders(self.root)), self.archived], drop)

    def load_folder(self, path: Path) -> RecordSet:
        """Load the records in the folder of one run; invalid ones are reported as problems."""
        return _merged([self._load_folder(_scan_folder(path))])

    def search(self, query: str) -> RecordSet:
        """Find records by file, archive, folder, or a prefix of a hash (all seeds)."""
        path = Path(query)
        if is_archive(path):
            result = Store(path).load_all()
        elif path.is_file():
            return RecordSet([self.load(path)], [])
        elif is_folder_of_runs(path):
            result = Store(path).load_all()
        elif path.is_dir():
            result = self.load_folder(path)
        else:
            result = self._search_hash(query)
        if not result.records and not result.problems:
            raise no_finished_run(query, self.root, result.diverged)
        return result

    def _search_hash(self, prefix: str) -> RecordSet:
        # Names are compared as text: `*` and `[` in the prefix are not a glob pattern.
        folders = {folder.name: folder for folder in self.root.glob("*") if folder.is_dir()}
        archived = self.archived
        hashes = [*(r.hash for r in archived.records), *(run.hash for run in archived.diverged_runs)]
        matches = sorted({name for name in (*folders, *hashes) if name.startswith(prefix)})
        if len(matches) > 1:
            raise UserError(
                f"{prefix!r} is a prefix of {len(matches)} hashes: {', '.join(matches)}. Use a longer prefix."
            )
        contents = [self._load_folder(_scan_folder(folders[name])) for name in matches if name in folders]
        records = [record for record in archived.records if record.hash in matches]
        diverged = [run for run in archived.diverged_runs if run.hash in matches]
        return _merged([*contents, RecordSet(records, archived.problems, diverged)])

    def find(self, query: str) -> list[Record]:
        """Find the records of all seeds of one run by path or hash prefix.

        Raises:
            UserError: If a record is invalid, or if several runs match.
        """
        result = self.find_one(query)
        if result.problems:
            raise UserError("; ".join(result.problems))
        return result.records

    def find_one(self, query: str) -> RecordSet:
        """Like `find`, but returns diverged seeds and problems with invalid records too."""
        result = self.search(query)
        hashes = {record.hash for record in result.records}
        if not hashes:
            raise UserError("; ".join(result.problems))
        if len(hashes) > 1:
            raise UserError(f"{query!r} has {len(hashes)} runs: {', '.join(sorted(hashes))}. Use the hash of one.")
        return replace(result, records=sorted(result.records, key=lambda record: record.seed))

    def _load_folder(self, folder: RunFolder) -> RecordSet:
        """Load the records in the folder of a run."""
        result = RecordSet([], [folder.problem] if folder.problem else [])
        for entry in folder.records:
            try:
                item = self.load_file(Path(entry.path))
            except UserError as error:
                result.problems.append(str(error))
                continue
            if isinstance(item, Record):
                result.records.append(item)
            else:
                result.diverged_runs.append(item)
        result.diverged_runs.extend(read_notes(folder, result.problems))
        return result


def _merged(contents: Iterable[RecordSet], drop: bool = True) -> RecordSet:
    """Join the content of folders and archives, without copies and without divergences of finished runs."""
    parts = list(contents)
    problems = [problem for part in parts for problem in part.problems]
    records = drop_duplicates([record for part in parts for record in part.records], problems)
    finished = {(record.hash, record.seed) for record in records}
    diverged = drop_finished((run for part in parts for run in part.diverged_runs), finished)
    return RecordSet(drop_inconsistent(records, problems) if drop else records, problems, diverged)


@dataclass(frozen=True)
class RunFolder:
    """Files of one run.

    Attributes:
        path: The folder.
        records: Record files, ordered by seed.
        notes: Divergence notes, ordered by seed.
        problem: Reason why the folder can't be read; empty if it can.
    """

    path: Path
    records: Sequence[os.DirEntry[str]] = ()
    notes: Sequence[os.DirEntry[str]] = ()
    problem: str = ""


def run_folders(root: Path) -> Iterator[RunFolder]:
    """Iterate over the run folders under a folder, ordered by name.

    Example:
        >>> list(run_folders(Path("no such folder")))
        []
    """
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return
    for name in names:
        yield _scan_folder(root / name)


def _scan_folder(folder: Path) -> RunFolder:
    try:
        with os.scandir(folder) as entries:
            files = sorted(entries, key=lambda entry: (len(entry.name), entry.name))  # by seed: 2 before 10
    except (FileNotFoundError, NotADirectoryError):  # such as a folder "in" an archive
        return RunFolder(folder)
    except OSError as error:
        return RunFolder(folder, problem=f"{folder}: can't be read ({error.strerror}). Check its permissions.")
    records, notes = ([entry for entry in files if name.fullmatch(entry.name)] for name in (_RECORD_NAME, _NOTE_NAME))
    return RunFolder(folder, records, notes)


def is_folder_of_runs(path: Path) -> bool:
    """Whether a path is a folder of run folders or archives; the folder of a single run contains records itself."""
    if not path.is_dir():
        return False
    folder = _scan_folder(path)
    return not folder.records and not folder.notes


def read_notes(folder: RunFolder, problems: list[str]) -> list[DivergedRun]:
    """Diverged runs of a run's folder according to the divergence notes of schemas 1 and 2.

    Invalid notes are reported as problems. A note that can't be read still counts as a divergence. A note of another
    run or seed does not, nor one of a seed that has a record.
    """
    diverged = []
    run = _name(folder.path)
    recorded = {entry.name for entry in folder.records}
    for entry in folder.notes:
        path = Path(entry.path)
        seed = int(entry.name.removesuffix(NOTE_ENDING))
        if f"{seed}.json" in recorded:
            continue
        try:
            item = Store(folder.path.parent).load_file(path)
        except UserError as error:
            problems.append(str(error))
            item = DivergedRun(run, seed, "", raw={"schema": 1, "hash": run, "seed": seed, "lost": ""}, path=path)
        if isinstance(item, Record) or (item.hash, item.seed) != (run, seed):
            problems.append(f"{path}: is ignored. It is not the divergence note of this run and seed; delete it.")
        else:
            diverged.append(item)
    return diverged


class NoFinishedRunError(UserError):
    """A query that matches no finished and no diverged run.

    Attributes:
        query: The query, a path or the prefix of a hash.
        reason: What was not found, without the advice that follows it in the message.
    """

    def __init__(self, query: str, root: Path) -> None:
        self.query = query
        if Path(query).is_dir():
            self.reason, advice = f"no finished runs under {query}.", "Use another folder of runs."
        else:
            self.reason, advice = f"no finished run {query!r} under {root}.", "Use a path, or the beginning of a hash."
        super().__init__(f"{self.reason} {advice}")


def no_finished_run(query: str, root: Path, diverged: Mapping[str, Mapping[int, str]]) -> UserError:
    """Error for a query that matches no finished run."""
    reasons = " ".join(reason for seeds in diverged.values() for reason in seeds.values())
    if diverged:
        return UserError(f"{query!r}: has no scores, because all its seeds diverged. {reasons}".rstrip())
    return NoFinishedRunError(query, root)


def _is_diverged(path: Path) -> bool:
    """Whether a file is the valid record of a diverged run."""
    try:
        status = path.stat()
    except OSError:
        return False
    return _has_diverged_status(path, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


@lru_cache(maxsize=2**16)
def _has_diverged_status(path: Path, identity: tuple[int, ...]) -> bool:
    try:
        diverged = read_json(path).get("status") == DIVERGED
        return diverged and isinstance(Store(path.parent.parent).load_file(path), DivergedRun)
    except UserError:
        return False


def _check_place(path: Path, root: Path, run: str, seed: int) -> None:
    """Check that a record in a run folder has the hash as its folder name and the seed as its file name."""
    if not _RECORD_NAME.fullmatch(path.name):
        return
    name = _name(path.parent)
    if not (is_hash(name) or path.parent.parent == root):
        return
    if name != run:
        raise ValueError(f"it is of run {run}, but in the folder of run {name}")
    if path.name != f"{seed}.json":
        raise ValueError(f"it is of seed {seed}, but named {path.name}")


def _name(folder: Path) -> str:
    """Name of a folder; links and ``.`` are resolved first."""
    return folder.name if is_hash(folder.name) else folder.resolve().name
