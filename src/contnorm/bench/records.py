"""Records: one JSON file per run and seed, ``runs/<hash>/<seed>.json``, written atomically.

A record has a seal, a checksum of its content. Loading a record checks the seal, the content, and that the settings,
the hash, the folder and the file name match. A record that fails a check is reported as a problem and not used.

Records separate training from analysis: the engine writes them and needs torch; scores, comparisons and reports are
computed from these files alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol, TypeVar

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.files import write_atomically
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, score
from contnorm.bench.metrics.multilabel import LabelMatrix, label_score
from contnorm.bench.record_checks import check_fields, check_whole, checked_counts, finite_drift
from contnorm.errors import UserError

__all__ = [
    "LARGEST_SEED",
    "SCHEMA",
    "Described",
    "Found",
    "Layout",
    "Record",
    "RunFolder",
    "Store",
    "by_settings",
    "distinct",
    "diverged_seeds",
    "fitting",
    "is_folder_of_runs",
    "none_finished",
    "run_folders",
    "seal_of",
    "spread_over_seeds",
]

SCHEMA = 2
SEALED_SINCE = 2  # records of an older schema have no seal
LOST = ".lost.json"  # suffix of a divergence note, which a diverged run writes instead of a record
_SEED = re.compile(r"[0-9]+\.json")
_NOTE = re.compile(r"[0-9]+\.lost\.json")
_HASH = re.compile(r"[0-9a-f]{12}")
LARGEST_SEED = 2**64 - 1
_LARGEST_FILE = 2**28  # bytes
_LONGEST_REASON = 300  # characters of an error message about a record


@dataclass(frozen=True)
class Layout:
    """Text descriptions of the shape of a record's counts and of its drift; empty if the record has none."""

    counts: str
    drift: str


@dataclass(frozen=True)
class Record:
    """Settings and results of a finished run.

    Attributes:
        config: Settings of the run.
        seed: Seed of the run.
        counted: Accuracy matrix, or label statistics for multi-label data.
        drift: Distances between running and exact moments; empty if one of them is not finite.
        raw: All content of the file, including times, versions and device.
        path: File that the record was read from.
    """

    config: RunConfig
    seed: int
    counted: AccuracyMatrix | LabelMatrix
    drift: Mapping[str, Any]
    raw: Mapping[str, Any]
    path: Path | None = field(default=None, compare=False)

    @property
    def sealed(self) -> bool:
        """Whether the record has a checksum; records of schema 1 have none."""
        return "seal" in self.raw

    @cached_property
    def layout(self) -> Layout:
        """Shape of the counts and the drift; the same for all seeds of a run."""
        # With train.max_steps, seeds may reach different numbers of tasks.
        capped = self.config.train.max_steps is not None
        tasks = "the tasks reached" if capped else f"{self.counted.tasks} tasks"
        if isinstance(self.counted, LabelMatrix):
            classes = f"{self.counted.tally[0].classes} classes ({_digest(self.raw['classes'])})"
            counts = f"labels of {tasks}, {classes}"
        else:
            counts = f"accuracies of {tasks}"
        rows = self.drift.get("by_task", [])
        layers = _digest(list(rows[0])) if rows else ""
        return Layout(counts, layers if capped or not rows else f"{len(rows)} rows of {layers}")

    @property
    def outcome(self) -> str:
        """All counts as JSON text; equal for copies of a record."""
        return json.dumps([self.raw.get(key) for key in ("matrix", "matrix_running", "labels", "labels_running")])

    @property
    def multi_label(self) -> bool:
        """Whether the run is multi-label; such runs have other scores than ACC, FM and LA."""
        return isinstance(self.counted, LabelMatrix)

    @property
    def matrix(self) -> AccuracyMatrix:
        """Accuracy matrix.

        Raises:
            UserError: If the run is multi-label.
        """
        if isinstance(self.counted, LabelMatrix):
            raise UserError(
                f"run {self.config.hash} seed {self.seed}: its images have several labels, so it has no accuracies. "
                f"Leave it out, or look at it with `contnorm show`."
            )
        return self.counted

    def matrix_of(self, key: str) -> AccuracyMatrix | None:
        """Accuracy matrix of another evaluation of the same network, such as ``matrix_running``; None if missing."""
        raw = self.raw.get(key)
        return None if raw is None else AccuracyMatrix(**raw)

    @property
    def evaluated(self) -> dict[str, AccuracyMatrix]:
        """Accuracy matrices of the same network by the moments used in evaluation: ``running``, ``oracle`` or both."""
        matrices: dict[str, AccuracyMatrix] = {self.config.evaluate.moments: self.matrix}
        running = self.matrix_of("matrix_running")
        return matrices if running is None else {"running": running, **matrices}

    def labels_of(self, key: str) -> LabelMatrix | None:
        """Label statistics: ``labels``, or ``labels_running`` with running moments; None if missing."""
        raw = self.raw.get(key)
        return None if raw is None else LabelMatrix.from_json(raw)

    def classes_of(self, group: str) -> list[int] | None:
        """Class indices of a group such as ``"majority"``; None for ``"overall"``, which means all classes."""
        if group == "overall":
            return None
        return [label for label, label_group in enumerate(self.raw["classes"]["groups"]) if label_group == group]

    def score(self, name: str, group: str = "overall") -> float:
        """Compute a score by name; for a multi-label run optionally over one group of classes."""
        if isinstance(self.counted, LabelMatrix):
            return label_score(self.counted, name, self.classes_of(group))
        return score(self.counted, name)


@dataclass(frozen=True)
class Found:
    """Result of a search for records.

    Attributes:
        records: Valid records.
        problems: One message per record or folder that could not be used.
        lost: Diverged seeds by the hash of their run, each with the message of its divergence note. The loss of a
            diverged seed was not finite, so it has no record.
    """

    records: list[Record]
    problems: list[str]
    lost: dict[str, dict[int, str]] = field(default_factory=dict)


class Store:
    """The records under a folder.

    Example:
        >>> list(Store(Path("no such folder")))
        []
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, config: RunConfig, seed: int) -> Path:
        return self.root / config.hash / f"{seed}.json"

    def has(self, config: RunConfig, seed: int) -> bool:
        return self.path(config, seed).is_file()

    def seeds(self, config: RunConfig, among: Iterable[int]) -> set[int]:
        """Subset of the seeds that have a record of this run."""
        return {seed for seed in among if self.has(config, seed)}

    def save(self, config: RunConfig, seed: int, found: Mapping[str, Any]) -> Path:
        """Write the sealed record of a run."""
        content = {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed, **found}
        return _write_sealed(self.path(config, seed), content)

    def note_lost(self, config: RunConfig, seed: int, why: str) -> Path:
        """Write a divergence note instead of a record, for a run whose loss is not finite."""
        content = {"schema": SCHEMA, "hash": config.hash, "seed": seed, "lost": why}
        return _write_sealed(self._divergence_note(config, seed), content)

    def lost(self, config: RunConfig, seed: int) -> bool:
        """Whether a run has a divergence note and no record."""
        return self._divergence_note(config, seed).is_file() and not self.has(config, seed)

    def all_lost(self, config: RunConfig) -> dict[int, str]:
        """Diverged seeds of a run that have no record, each with the message of its divergence note."""
        return diverged_seeds(_scan_folder(self.root / config.hash), [])

    def _divergence_note(self, config: RunConfig, seed: int) -> Path:
        return self.root / config.hash / f"{seed}{LOST}"

    def load(self, path: Path) -> Record:
        """Load a record and check its seal, its content, and that hash, folder and file name match its settings.

        The names of the folder and the file are checked under this store's root and wherever the folder's name is a
        hash; a copy of a record elsewhere may have any name.

        Raises:
            UserError: If a check fails.
        """
        raw = _read(path)
        if raw["schema"] > SCHEMA:
            raise UserError(
                f"{path}: is a record of version {raw['schema']}, and this is contnorm that knows up to {SCHEMA}. "
                f"Upgrade contnorm to read it."
            )
        missing = _required_keys(raw) - raw.keys()
        if missing:
            raise _record_error(path, f"without {', '.join(sorted(missing))}")
        try:
            config, counted = _config_of(raw["config"]), checked_counts(raw)
            seed = check_whole(raw["seed"], "seed", most=LARGEST_SEED)
            check_fields(raw)
            _check_seal(raw)
            _check_identity(raw, config.hash)
            _check_place(path, self.root, config.hash, seed)
            return Record(config, seed, counted, finite_drift(raw.get("drift", {})), raw, path)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise _record_error(path, error) from error

    def load_seeds(self, config: RunConfig, seeds: Iterable[int]) -> Found:
        """Load the records of some seeds of a run; invalid ones are reported as problems."""
        result = Found([], [])
        for seed in seeds:
            try:
                result.records.append(self.load(self.path(config, seed)))
            except UserError as error:
                result.problems.append(str(error))
        return replace(result, records=fitting(result.records, result.problems))

    def __iter__(self) -> Iterator[Record]:
        for folder in run_folders(self.root):
            for entry in folder.records:
                yield self.load(Path(entry.path))

    def readable(self) -> Found:
        """Load all records; invalid ones are reported as problems."""
        return self._read_folders(run_folders(self.root))

    def search(self, given: str) -> Found:
        """Find records by file, by folder of runs, or by a prefix of a hash (all seeds)."""
        path = Path(given)
        if path.is_file() and path.name.endswith(LOST):
            raise UserError(
                f"{path}: is a note of a run that was lost, so it has no scores. {_divergence_reason(path)}".rstrip()
            )
        if path.is_file():
            return Found([self.load(path)], [])
        many = is_folder_of_runs(path)
        result = Store(path).readable() if many else self._read_folders(map(_scan_folder, self._folders(given)))
        if not result.records and not result.problems:
            raise none_finished(given, self.root, result.lost)
        return result

    def find(self, given: str) -> list[Record]:
        """Find the records of all seeds of one run by path or hash prefix.

        Raises:
            UserError: If a record is invalid, or if several runs match.
        """
        result = self.find_one(given)
        if result.problems:
            raise UserError("; ".join(result.problems))
        return result.records

    def find_one(self, given: str) -> Found:
        """Like `find`, but returns diverged seeds and problems with invalid records too."""
        result = self.search(given)
        hashes = {record.config.hash for record in result.records}
        if not hashes:
            raise UserError("; ".join(result.problems))
        if len(hashes) > 1:
            raise UserError(f"{given!r} holds {len(hashes)} runs: {', '.join(sorted(hashes))}. Say which.")
        return replace(result, records=sorted(result.records, key=lambda record: record.seed))

    def _read_folders(self, folders: Iterable[RunFolder]) -> Found:
        """Load the records in the folders of some runs."""
        result = Found([], [])
        for folder in folders:
            if folder.problem:
                result.problems.append(folder.problem)
            records = []
            for entry in folder.records:
                try:
                    records.append(self.load(Path(entry.path)))
                except UserError as error:
                    result.problems.append(str(error))
            result.records.extend(fitting(records, result.problems))
            if diverged := diverged_seeds(folder, result.problems):
                result.lost[_name(folder.path)] = diverged
        return replace(result, records=distinct(result.records, result.problems))

    def _folders_with_prefix(self, prefix: str) -> list[Path]:
        """Compare names as text: ``*`` and ``[`` in the prefix are not a glob pattern."""
        return [folder for folder in self.root.glob("*") if folder.name.startswith(prefix) and folder.is_dir()]

    def _folders(self, query: str) -> list[Path]:
        path = Path(query)
        folders = [path] if path.is_dir() else sorted(self._folders_with_prefix(query))
        if len(folders) > 1:
            raise UserError(f"{query!r} begins {len(folders)} hashes: {', '.join(f.name for f in folders)}. Say more.")
        return folders


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
    except FileNotFoundError:
        return RunFolder(folder)
    except OSError as error:
        return RunFolder(folder, problem=f"{folder}: can't be looked into ({error.strerror}).")
    records, notes = ([entry for entry in files if name.fullmatch(entry.name)] for name in (_SEED, _NOTE))
    return RunFolder(folder, records, notes)


def is_folder_of_runs(path: Path) -> bool:
    """Whether a path is a folder of run folders; the folder of a single run contains records or notes itself."""
    if not path.is_dir():
        return False
    folder = _scan_folder(path)
    return not folder.records and not folder.notes


class Described(Protocol):
    """A record or a summary of one: its settings, and at least the data-set fields of its file."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def raw(self) -> Mapping[str, Any]: ...


class _Placed(Protocol):
    """A record or a summary of one: its path, the shape of its content and its counts."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def seed(self) -> int: ...
    @property
    def outcome(self) -> str: ...


P = TypeVar("P", bound=_Placed)


def distinct(records: Iterable[P], problems: list[str]) -> list[P]:
    """Keep the first record of each run and seed, so that a mean over seeds counts no copy twice.

    Copies come from links, from folders that are listed twice and from folders that share runs. A record of the same
    run and seed with different counts, such as one from another device, is reported as a problem.
    """
    first: dict[tuple[str, int], P] = {}
    for record in records:
        other = first.setdefault((record.config.hash, record.seed), record)
        if other is not record and other.outcome != record.outcome:
            problems.append(
                f"{record.path}: is not counted. It is of the same run and seed as {other.path}, with other results."
            )
    return list(first.values())


def fitting(records: Sequence[P], problems: list[str]) -> list[P]:
    """Keep the records whose layout is the most common one of their run; report the others as problems.

    Seeds of one run have the same tasks, classes and layers. A record that differs can't be averaged with the others.
    """
    if len({(record.config.hash, record.layout) for record in records}) == len({r.config.hash for r in records}):
        return list(records)  # each run has a single layout
    layouts: dict[str, Counter[Layout]] = {}
    for record in records:
        layouts.setdefault(record.config.hash, Counter())[record.layout] += 1
    common = {run: _most_common_layout(counts) for run, counts in layouts.items()}
    fits = []
    for record in records:
        layout, expected = record.layout, common[record.config.hash]
        if layout.counts != expected.counts:
            problems.append(
                f"{record.path}: does not fit the other seeds of its run and is left out: it has {layout.counts}, they "
                f"have {expected.counts}."
            )
        elif layout.drift and layout.drift != expected.drift:
            problems.append(
                f"{record.path}: does not fit the other seeds of its run and is left out: its drift is of other layers "
                f"or tasks."
            )
        else:
            fits.append(record)
    return fits


def _most_common_layout(layouts: Counter[Layout]) -> Layout:
    """Most common counts, and among those the most common drift."""
    if len(layouts) == 1:
        return next(iter(layouts))
    counts: Counter[str] = Counter()
    drifts: Counter[str] = Counter()
    for layout, frequency in layouts.items():
        counts[layout.counts] += frequency
    [(common_counts, _)] = counts.most_common(1)
    for layout, frequency in layouts.items():
        if layout.counts == common_counts and layout.drift:
            drifts[layout.drift] += frequency
    return Layout(common_counts, drifts.most_common(1)[0][0] if drifts else "")


def diverged_seeds(folder: RunFolder, problems: list[str]) -> dict[int, str]:
    """Seeds of a run that have a divergence note and no record, each with the note's message.

    Invalid notes are reported as problems. A note that can't be read still counts as a divergence. A note of another
    run or seed does not.
    """
    recorded = {entry.name for entry in folder.records}
    diverged = {}
    for entry in folder.notes:
        seed = entry.name.removesuffix(LOST)
        if f"{seed}.json" in recorded:
            continue
        try:
            raw = _read(Path(entry.path), "note of a run that was lost")
            if raw["schema"] >= SEALED_SINCE and (raw.get("hash"), raw.get("seed")) != (_name(folder.path), int(seed)):
                problems.append(f"{entry.path}: is the note of another run or seed, and is not counted. Delete it.")
                continue
            _check_seal(raw)
            diverged[int(seed)] = str(raw.get("lost", "")) if isinstance(raw.get("lost"), str) else ""
        except UserError as error:
            problems.append(str(error))
            diverged[int(seed)] = ""
        except (ValueError, RecursionError) as error:
            problems.append(str(_record_error(Path(entry.path), error, "note of a run that was lost")))
            diverged[int(seed)] = ""
    return diverged


def none_finished(given: str, root: Path, lost: Mapping[str, Mapping[int, str]]) -> UserError:
    """Error for a name that matches no finished run."""
    reasons = " ".join(reason for notes in lost.values() for reason in notes.values())
    if lost:
        return UserError(f"{given!r}: has no scores, for each of its seeds was lost. {reasons}")
    return UserError(f"no finished run {given!r} under {root}. A run is a path or the beginning of a hash.")


def seal_of(content: Mapping[str, Any]) -> str:
    """Checksum of a record: SHA-256 over the canonical JSON of its content without the seal.

    Example:
        >>> seal_of({"seed": 0, "hash": "a"}) == seal_of({"hash": "a", "seed": 0, "seal": "old"})
        True
    """
    rest = {key: value for key, value in content.items() if key != "seal"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write_sealed(path: Path, content: Mapping[str, Any]) -> Path:
    plain = json.loads(json.dumps(content))  # the form that loading returns: string keys, lists for tuples
    write_atomically(path, (json.dumps({**plain, "seal": seal_of(plain)}, indent=1) + "\n").encode())
    return path


def _check_seal(raw: Mapping[str, Any]) -> None:
    if raw["schema"] >= SEALED_SINCE and "seal" not in raw:
        raise ValueError("without seal")
    if "seal" in raw and raw["seal"] != seal_of(raw):
        raise ValueError("its content does not match its seal: it was changed after it was written")


def _check_identity(raw: Mapping[str, Any], expected: str) -> None:
    if raw.get("hash") != expected:
        recorded = raw.get("hash")
        raise ValueError(f"its hash is {recorded!r}, but that of its settings is {expected}: one of them was changed")


def _check_place(path: Path, root: Path, run: str, seed: int) -> None:
    """Check that a record in a run folder has the hash as its folder name and the seed as its file name."""
    if not _SEED.fullmatch(path.name):
        return
    name = _name(path.parent)
    if not (_HASH.fullmatch(name) or path.parent.parent == root):
        return
    if name != run:
        raise ValueError(f"it is of run {run}, but in the folder of run {name}")
    if path.name != f"{seed}.json":
        raise ValueError(f"it is of seed {seed}, but named {path.name}")


def _name(folder: Path) -> str:
    """Name of a folder; links and ``.`` are resolved first."""
    return folder.name if _HASH.fullmatch(folder.name) else folder.resolve().name


def _config_of(values: Any) -> RunConfig:
    """Settings of a record. Records with equal settings share one object, so that the hash is computed once."""
    try:
        return _shared_config(json.dumps(values, sort_keys=True))
    except UserError as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=4096)
def _shared_config(text: str) -> RunConfig:
    return from_dict(json.loads(text))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _read(path: Path, what: str = "record of a run") -> dict[str, Any]:
    """Read a JSON object that has a schema version."""
    try:
        _check_file(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise _record_error(path, error, what) from error
    if not isinstance(raw, dict):
        raise _record_error(path, "no JSON object", what)
    if "schema" in raw and (type(raw["schema"]) is not int or raw["schema"] < 1):
        raise _record_error(path, f"schema={raw['schema']!r} is no whole number", what)
    if "schema" not in raw:
        raise _record_error(path, f"without {', '.join(sorted({'schema', *_required_keys(raw)} - raw.keys()))}", what)
    return raw


def _check_file(path: Path) -> None:
    """Reject files that could be read without end (pipes, devices) and files too large for a record."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > _LARGEST_FILE:
        raise ValueError(f"{status.st_size:,} bytes, more than the {_LARGEST_FILE:,} that a record can have")


def _divergence_reason(path: Path) -> str:
    """Message of a divergence note; empty if the note can't be read."""
    try:
        return str(_read(path).get("lost", ""))
    except UserError:
        return ""


def _required_keys(raw: Mapping[str, Any]) -> set[str]:
    """Required keys of a record; multi-label records have other ones."""
    return {"config", "seed", *(("labels", "classes") if "labels" in raw else ("matrix",))}


def _record_error(path: Path | None, why: object, what: str = "record of a run") -> UserError:
    """Error message in one printable line, whatever the file contains."""
    reason = "".join(letter if letter.isprintable() else " " for letter in str(why))
    reason = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
    return UserError(f"{path}: is no {what} ({reason}). Delete it, and it can be run again.")


def by_settings(records: Iterable[P]) -> dict[str, list[P]]:
    """Group records by the hash of their settings; the seeds of a run keep their order.

    Example:
        >>> by_settings([])
        {}
    """
    groups: dict[str, list[P]] = {}
    for record in records:
        groups.setdefault(record.config.hash, []).append(record)
    return groups


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation.

    The standard deviation is NaN for a single seed or if a value is not finite.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    has_stdev = len(values) > 1 and all(map(isfinite, values))  # `stdev` fails on NaN and infinity
    return fmean(values), stdev(values) if has_stdev else float("nan")
