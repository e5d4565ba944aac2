"""Records: one JSON file a run, ``runs/<hash>/<seed>.json``, written at once or not at all.

A record has a seal, a checksum of its content. Loading a record checks the seal, the content, and that the settings,
the hash, the folder and the file name belong together; a record that fails is named and left out.

This is the wall in the middle of the house: to the left of it runs are made, with torch; to the right they are scored,
compared and shown, from these files alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
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
    "write_atomically",
    "write_output",
]

SCHEMA = 2
SEALED_SINCE = 2  # records of an older schema have no seal
LOST = ".lost.json"  # the end of the name of a note, in place of a record
_SEED = re.compile(r"[0-9]+\.json")
_NOTE = re.compile(r"[0-9]+\.lost\.json")
_HASH = re.compile(r"[0-9a-f]{12}")
LARGEST_SEED = 2**64 - 1
_LARGEST_FILE = 2**28  # bytes
_LONGEST_REASON = 300  # characters of what is wrong with a record


@dataclass(frozen=True)
class Layout:
    """The shape of what a record holds, in words: of its counts, and of its drift; empty where it has none."""

    counts: str
    drift: str


@dataclass(frozen=True)
class Record:
    """What a finished run left.

    Attributes:
        counted: Right answers, or, where images have several labels, what was counted of each label.
        drift: Distances of running from exact moments; empty where one of them is not finite.
        raw: The file whole: times, versions, device.
        path: Where it was read from.
    """

    config: RunConfig
    seed: int
    counted: AccuracyMatrix | LabelMatrix
    drift: Mapping[str, Any]
    raw: Mapping[str, Any]
    path: Path | None = field(default=None, compare=False)

    @property
    def sealed(self) -> bool:
        """Whether a checksum protects it; records of schema 1 have none."""
        return "seal" in self.raw

    @cached_property
    def layout(self) -> Layout:
        """What the records of all seeds of a run have in common."""
        # Where steps are capped, seeds may reach different numbers of tasks.
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
        """All that was counted, as text: equal for copies of a record."""
        return json.dumps([self.raw.get(key) for key in ("matrix", "matrix_running", "labels", "labels_running")])

    @property
    def several_labels(self) -> bool:
        """Whether it is of images with several labels, which have other scores than ACC, FM and LA."""
        return isinstance(self.counted, LabelMatrix)

    @property
    def matrix(self) -> AccuracyMatrix:
        """Of right answers; an error where images have several labels."""
        if isinstance(self.counted, LabelMatrix):
            raise UserError(
                f"run {self.config.hash} seed {self.seed}: its images have several labels, so it has no accuracies. "
                f"Leave it out, or look at it with `contnorm show`."
            )
        return self.counted

    def matrix_of(self, key: str) -> AccuracyMatrix | None:
        """The matrix of another way to evaluate the same network, such as ``matrix_running``; None where it was not."""
        raw = self.raw.get(key)
        return None if raw is None else AccuracyMatrix(**raw)

    @property
    def evaluated(self) -> dict[str, AccuracyMatrix]:
        """Its matrices by the moments they were measured with: ``running``, ``oracle``, or both of the same network."""
        found: dict[str, AccuracyMatrix] = {self.config.evaluate.moments: self.matrix}
        running = self.matrix_of("matrix_running")
        return found if running is None else {"running": running, **found}

    def labels_of(self, key: str) -> LabelMatrix | None:
        """What was counted of labels, ``labels`` or with running moments ``labels_running``; None where it was not."""
        raw = self.raw.get(key)
        return None if raw is None else LabelMatrix.from_json(raw)

    def classes_of(self, group: str) -> list[int] | None:
        """The labels of a group, ``"majority"`` and so on; None for ``"overall"``, which is all of them."""
        if group == "overall":
            return None
        return [label for label, own in enumerate(self.raw["classes"]["groups"]) if own == group]

    def score(self, name: str, group: str = "overall") -> float:
        """A score by its name; where images have several labels, also of a group of them alone."""
        if isinstance(self.counted, LabelMatrix):
            return label_score(self.counted, name, self.classes_of(group))
        return score(self.counted, name)


@dataclass(frozen=True)
class Found:
    """The records that were looked for, and what is wrong with those that can't be read.

    ``lost`` has, by the hash of a run, its seeds that have no record because their loss was no longer finite, and what
    was said of each.
    """

    records: list[Record]
    problems: list[str]
    lost: dict[str, dict[int, str]] = field(default_factory=dict)


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that it is either the old one or the new one, whatever happens meanwhile.

    Args:
        path: The file; its folder is made.
        parts: What it holds, one after the other.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomically(folder / "a" / "b.json", b"{}")
        >>> (folder / "a" / "b.json").read_bytes()
        b'{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Random, since processes of several hosts or containers that share the folder can have the same number.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:  # never through a link that somebody put there
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write a file that a user named: into the target of a link, and into a device or pipe instead of replacing it."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            file.write(content)
    else:
        write_atomically(target, content)


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
        """Those of the seeds that are recorded of a run."""
        return {seed for seed in among if self.has(config, seed)}

    def save(self, config: RunConfig, seed: int, found: Mapping[str, Any]) -> Path:
        """Write the record of a run, with its seal."""
        content = {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed, **found}
        return _write_sealed(self.path(config, seed), content)

    def note_lost(self, config: RunConfig, seed: int, why: str) -> Path:
        """Write a note, in place of a record, of a run whose loss is no longer finite."""
        content = {"schema": SCHEMA, "hash": config.hash, "seed": seed, "lost": why}
        return _write_sealed(self._note_of_lost(config, seed), content)

    def lost(self, config: RunConfig, seed: int) -> bool:
        """Whether a run has a note that it was lost, and no record."""
        return self._note_of_lost(config, seed).is_file() and not self.has(config, seed)

    def all_lost(self, config: RunConfig) -> dict[int, str]:
        """The seeds of a run that were lost and have no record, and what was said of each."""
        return diverged_seeds(_scanned(self.root / config.hash), [])

    def _note_of_lost(self, config: RunConfig, seed: int) -> Path:
        return self.root / config.hash / f"{seed}{LOST}"

    def load(self, path: Path) -> Record:
        """A record, checked: its seal, its content, and that its hash, folder and file name are those of its settings.

        The names of folder and file are checked under this store's folder and wherever the folder is named by a hash;
        a copy of a record may have any other name.
        """
        raw = _read(path)
        if raw["schema"] > SCHEMA:
            raise UserError(
                f"{path}: is a record of version {raw['schema']}, and this is contnorm that knows up to {SCHEMA}. "
                f"Upgrade contnorm to read it."
            )
        missing = _needed(raw) - raw.keys()
        if missing:
            raise _no_record(path, f"without {', '.join(sorted(missing))}")
        try:
            config, counted = _config_of(raw["config"]), checked_counts(raw)
            seed = check_whole(raw["seed"], "seed", most=LARGEST_SEED)
            check_fields(raw)
            _check_seal(raw)
            _check_identity(raw, config.hash)
            _check_place(path, self.root, config.hash, seed)
            return Record(config, seed, counted, finite_drift(raw.get("drift", {})), raw, path)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise _no_record(path, error) from error

    def load_seeds(self, config: RunConfig, seeds: Iterable[int]) -> Found:
        """The records of some seeds of a run, but for those that are broken: of each of these why."""
        found = Found([], [])
        for seed in seeds:
            try:
                found.records.append(self.load(self.path(config, seed)))
            except UserError as error:
                found.problems.append(str(error))
        return replace(found, records=fitting(found.records, found.problems))

    def __iter__(self) -> Iterator[Record]:
        for folder in run_folders(self.root):
            for entry in folder.records:
                yield self.load(Path(entry.path))

    def readable(self) -> Found:
        """All records, but for those that are broken: of each of these why."""
        return self._read_folders(run_folders(self.root))

    def search(self, given: str) -> Found:
        """The records of a path, of a folder of runs, or of the beginning of a hash, all its seeds."""
        path = Path(given)
        if path.is_file() and path.name.endswith(LOST):
            raise UserError(
                f"{path}: is a note of a run that was lost, so it has no scores. {_lost_reason(path)}".rstrip()
            )
        if path.is_file():
            return Found([self.load(path)], [])
        many = is_folder_of_runs(path)
        found = Store(path).readable() if many else self._read_folders(map(_scanned, self._folders(given)))
        if not found.records and not found.problems:
            raise none_finished(given, self.root, found.lost)
        return found

    def find(self, given: str) -> list[Record]:
        """The records of one run, by its path or the beginning of its hash, all its seeds; none may be broken."""
        found = self.find_one(given)
        if found.problems:
            raise UserError("; ".join(found.problems))
        return found.records

    def find_one(self, given: str) -> Found:
        """The same, with its seeds that were lost and what is wrong with records that can't be read."""
        found = self.search(given)
        hashes = {record.config.hash for record in found.records}
        if not hashes:
            raise UserError("; ".join(found.problems))
        if len(hashes) > 1:
            raise UserError(f"{given!r} holds {len(hashes)} runs: {', '.join(sorted(hashes))}. Say which.")
        return replace(found, records=sorted(found.records, key=lambda record: record.seed))

    def _read_folders(self, folders: Iterable[RunFolder]) -> Found:
        """The records in the folders of some runs."""
        found = Found([], [])
        for folder in folders:
            if folder.problem:
                found.problems.append(folder.problem)
            records = []
            for entry in folder.records:
                try:
                    records.append(self.load(Path(entry.path)))
                except UserError as error:
                    found.problems.append(str(error))
            found.records.extend(fitting(records, found.problems))
            if lost := diverged_seeds(folder, found.problems):
                found.lost[_name(folder.path)] = lost
        return replace(found, records=distinct(found.records, found.problems))

    def _beginning_with(self, given: str) -> list[Path]:
        """Compared as text: stars and brackets are no pattern."""
        return [folder for folder in self.root.glob("*") if folder.name.startswith(given) and folder.is_dir()]

    def _folders(self, given: str) -> list[Path]:
        path = Path(given)
        folders = [path] if path.is_dir() else sorted(self._beginning_with(given))
        if len(folders) > 1:
            raise UserError(f"{given!r} begins {len(folders)} hashes: {', '.join(f.name for f in folders)}. Say more.")
        return folders


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: The folder.
        records: Its records, by seed.
        notes: Its notes of runs whose loss was no longer finite, by seed.
        problem: Why the folder can't be looked into; empty where it can.
    """

    path: Path
    records: Sequence[os.DirEntry[str]] = ()
    notes: Sequence[os.DirEntry[str]] = ()
    problem: str = ""


def run_folders(root: Path) -> Iterator[RunFolder]:
    """The folders of runs under a folder, in the order of their names.

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
        yield _scanned(root / name)


def _scanned(folder: Path) -> RunFolder:
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
    """Whether a path is a folder of several runs, not of one, whose records or notes are in it."""
    if not path.is_dir():
        return False
    one = _scanned(path)
    return not one.records and not one.notes


class Described(Protocol):
    """A record, or a summary of one: its settings, and of its file at least what is said of the data set."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def raw(self) -> Mapping[str, Any]: ...


class _Placed(Protocol):
    """A record, or a summary of one: where it is, and what shape it has."""

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
    """One record for each run and seed, the first; a mean over seeds must not count a copy again.

    Copies come from links, from folders that are named twice and from folders that share runs. A record of the same run
    and seed with other counts, such as one of another device, is named as a problem.
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
    """Those records whose counts have the shape of most records of the same run; the others are named as problems.

    Seeds of one run have the same tasks, classes and layers. A record that differs can't be averaged with the others.
    """
    if len({(record.config.hash, record.layout) for record in records}) == len({r.config.hash for r in records}):
        return list(records)  # one layout a run, as it should be
    layouts: dict[str, Counter[Layout]] = {}
    for record in records:
        layouts.setdefault(record.config.hash, Counter())[record.layout] += 1
    usual = {run: _usual_layout(counts) for run, counts in layouts.items()}
    fits = []
    for record in records:
        layout, expected = record.layout, usual[record.config.hash]
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


def _usual_layout(layouts: Counter[Layout]) -> Layout:
    """The most common counts, and of those the most common drift."""
    if len(layouts) == 1:
        return next(iter(layouts))
    counts: Counter[str] = Counter()
    drifts: Counter[str] = Counter()
    for layout, many in layouts.items():
        counts[layout.counts] += many
    [(usual, _)] = counts.most_common(1)
    for layout, many in layouts.items():
        if layout.counts == usual and layout.drift:
            drifts[layout.drift] += many
    return Layout(usual, drifts.most_common(1)[0][0] if drifts else "")


def diverged_seeds(folder: RunFolder, problems: list[str]) -> dict[int, str]:
    """The seeds of a run that have a note in place of a record, and what it says; notes that are wrong are named.

    A note that can't be read still says that its run diverged. A note of another run or seed says nothing.
    """
    recorded = {entry.name for entry in folder.records}
    found = {}
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
            found[int(seed)] = str(raw.get("lost", "")) if isinstance(raw.get("lost"), str) else ""
        except UserError as error:
            problems.append(str(error))
            found[int(seed)] = ""
        except (ValueError, RecursionError) as error:
            problems.append(str(_no_record(Path(entry.path), error, "note of a run that was lost")))
            found[int(seed)] = ""
    return found


def none_finished(given: str, root: Path, lost: Mapping[str, Mapping[int, str]]) -> UserError:
    """An error for a name under which no finished run is."""
    whys = " ".join(why for notes in lost.values() for why in notes.values())
    if lost:
        return UserError(f"{given!r}: has no scores, for each of its seeds was lost. {whys}")
    return UserError(f"no finished run {given!r} under {root}. A run is a path or the beginning of a hash.")


def seal_of(content: Mapping[str, Any]) -> str:
    """The checksum of a record: SHA-256 over the canonical JSON of everything in it but the seal.

    Example:
        >>> seal_of({"seed": 0, "hash": "a"}) == seal_of({"hash": "a", "seed": 0, "seal": "old"})
        True
    """
    rest = {key: value for key, value in content.items() if key != "seal"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write_sealed(path: Path, content: Mapping[str, Any]) -> Path:
    plain = json.loads(json.dumps(content))  # as it is read back: keys are texts, tuples are lists
    write_atomically(path, (json.dumps({**plain, "seal": seal_of(plain)}, indent=1) + "\n").encode())
    return path


def _check_seal(raw: Mapping[str, Any]) -> None:
    if raw["schema"] >= SEALED_SINCE and "seal" not in raw:
        raise ValueError("without seal")
    if "seal" in raw and raw["seal"] != seal_of(raw):
        raise ValueError("its content does not match its seal: it was changed after it was written")


def _check_identity(raw: Mapping[str, Any], expected: str) -> None:
    if raw.get("hash") != expected:
        said = raw.get("hash")
        raise ValueError(f"its hash is {said!r}, but that of its settings is {expected}: one of them was changed")


def _check_place(path: Path, root: Path, run: str, seed: int) -> None:
    """Under a folder of runs, the folder has to be named by the hash and the file by the seed."""
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
    """The name of a folder; of one that is a link or ``.``, the name of what it stands for."""
    return folder.name if _HASH.fullmatch(folder.name) else folder.resolve().name


def _config_of(values: Any) -> RunConfig:
    """The settings of a record; the same object for records of the same settings, so that their hash is made once."""
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
    """A JSON object with a version in it."""
    try:
        _check_file(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no JSON, or no text
        raise _no_record(path, error, what) from error
    if not isinstance(raw, dict):
        raise _no_record(path, "no JSON object", what)
    if "schema" in raw and (type(raw["schema"]) is not int or raw["schema"] < 1):
        raise _no_record(path, f"schema={raw['schema']!r} is no whole number", what)
    if "schema" not in raw:
        raise _no_record(path, f"without {', '.join(sorted({'schema', *_needed(raw)} - raw.keys()))}", what)
    return raw


def _check_file(path: Path) -> None:
    """Refuse what would be read without end: a pipe, a device, or a file of a size that no record has."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if found.st_size > _LARGEST_FILE:
        raise ValueError(f"{found.st_size:,} bytes, more than the {_LARGEST_FILE:,} that a record can have")


def _lost_reason(path: Path) -> str:
    """What a note says; nothing where it can't be read."""
    try:
        return str(_read(path).get("lost", ""))
    except UserError:
        return ""


def _needed(raw: Mapping[str, Any]) -> set[str]:
    """What a record must have, by what it is of."""
    return {"config", "seed", *(("labels", "classes") if "labels" in raw else ("matrix",))}


def _no_record(path: Path | None, why: object, what: str = "record of a run") -> UserError:
    """An error in one printable line, whatever is in the file."""
    said = "".join(letter if letter.isprintable() else " " for letter in str(why))
    said = said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
    return UserError(f"{path}: is no {what} ({said}). Delete it, and it can be run again.")


def by_settings(records: Iterable[P]) -> dict[str, list[P]]:
    """Records by the hash of their settings: the seeds of each run together, in the order they come.

    Example:
        >>> by_settings([])
        {}
    """
    groups: dict[str, list[P]] = {}
    for record in records:
        groups.setdefault(record.config.hash, []).append(record)
    return groups


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is not a number for a single seed, both where a value is none.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    spread = len(values) > 1 and all(map(isfinite, values))  # `stdev` fails on what is not a number
    return fmean(values), stdev(values) if spread else float("nan")
