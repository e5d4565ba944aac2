"""Records: one JSON file a run, ``runs/<hash>/<seed>.json``, written at once or not at all.

This is the wall in the middle of the house: to the left of it runs are made, with torch; to the right they are scored,
compared and shown, from these files alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from contnorm.config import RunConfig, from_dict
from contnorm.errors import UserError
from contnorm.metrics.matrix import AccuracyMatrix, score
from contnorm.metrics.multilabel import LabelMatrix, label_score

__all__ = ["SCHEMA", "Found", "Record", "Store", "by_settings", "spread_over_seeds", "write_atomically"]

SCHEMA = 1
LOST = ".lost.json"  # the end of the name of a note, in place of a record


@dataclass(frozen=True)
class Record:
    """What a finished run left.

    Attributes:
        counted: Right answers, or, where images have several labels, what was counted of each label.
        raw: The file whole: times, versions, device.
    """

    config: RunConfig
    seed: int
    counted: AccuracyMatrix | LabelMatrix
    drift: Mapping[str, Any]
    raw: Mapping[str, Any]

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
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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
        content = {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed, **found}
        path = self.path(config, seed)
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
        return path

    def note_lost(self, config: RunConfig, seed: int, why: str) -> Path:
        """Leave a note, in place of a record, of a run whose loss is no longer finite."""
        path = self._note_of_lost(config, seed)
        write_atomically(path, (json.dumps({"schema": SCHEMA, "lost": why}, indent=1) + "\n").encode())
        return path

    def lost(self, config: RunConfig, seed: int) -> bool:
        """Whether a run has a note that it was lost, and no record."""
        return self._note_of_lost(config, seed).is_file() and not self.has(config, seed)

    def all_lost(self, config: RunConfig) -> dict[int, str]:
        """The seeds of a run that were lost and have no record, and what was said of each."""
        return _lost_in(self.root / config.hash)

    def _note_of_lost(self, config: RunConfig, seed: int) -> Path:
        return self.root / config.hash / f"{seed}{LOST}"

    def load(self, path: Path) -> Record:
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
            config, counted = from_dict(raw["config"], str(path)), _counted(raw)
            return Record(config, int(raw["seed"]), counted, raw.get("drift", {}), raw)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise _no_record(path, error) from error

    def __iter__(self) -> Iterator[Record]:
        for path in sorted(self.root.glob("*/*.json")):
            if path.stem.isdigit():
                yield self.load(path)

    def readable(self) -> Found:
        """All records, but for those that are broken: of each of these why."""
        return _found(folder for folder in self.root.glob("*") if folder.is_dir())

    def search(self, given: str) -> Found:
        """The records of a path, of a folder of runs, or of the beginning of a hash, all its seeds."""
        path = Path(given)
        if path.is_file() and path.name.endswith(LOST):
            raise UserError(
                f"{path}: is a note of a run that was lost, so it has no scores. {_why_lost(path)}".rstrip()
            )
        if path.is_file():
            return Found([self.load(path)], [])
        of_many = path.is_dir() and not _is_of_run(path)
        found = Store(path).readable() if of_many else _found(self._folders(given))
        if not found.records and not found.problems:
            raise _none_finished(given, self.root, found.lost)
        return found

    def find(self, given: str) -> list[Record]:
        """The records of one run, by its path or the beginning of its hash, all its seeds."""
        return self.find_one(given).records

    def find_one(self, given: str) -> Found:
        """The same, with its seeds that were lost."""
        found = self.search(given)
        hashes = {record.config.hash for record in found.records}
        if found.problems:
            raise UserError("; ".join(found.problems))
        if len(hashes) > 1:
            raise UserError(f"{given!r} holds {len(hashes)} runs: {', '.join(sorted(hashes))}. Say which.")
        return replace(found, records=sorted(found.records, key=lambda record: record.seed))

    def _folders(self, given: str) -> list[Path]:
        path = Path(given)
        folders = [path] if path.is_dir() else sorted(f for f in self.root.glob(f"{given}*") if f.is_dir())
        if len(folders) > 1:
            raise UserError(f"{given!r} begins {len(folders)} hashes: {', '.join(f.name for f in folders)}. Say more.")
        return folders


def _found(folders: Iterable[Path]) -> Found:
    """What lies in the folders of some runs."""
    found = Found([], [])
    for folder in sorted(folders):
        for path in sorted((p for p in folder.glob("*.json") if p.stem.isdigit()), key=lambda p: int(p.stem)):
            try:
                found.records.append(Store(folder.parent).load(path))
            except UserError as error:
                found.problems.append(str(error))
        if lost := _lost_in(folder):
            found.lost[folder.resolve().name] = lost
    return found


def _lost_in(folder: Path) -> dict[int, str]:
    """The seeds of a run's folder that have a note in place of a record, and what it says."""
    notes = {path.name.removesuffix(LOST): path for path in folder.glob(f"*{LOST}")}
    found = {int(seed): _why_lost(path) for seed, path in notes.items() if seed.isdigit()}
    return {seed: found[seed] for seed in sorted(found) if not (folder / f"{seed}.json").is_file()}


def _is_of_run(folder: Path) -> bool:
    """Whether a folder is that of one run, with its records or notes in it."""
    return any(path.name.removesuffix(LOST).removesuffix(".json").isdigit() for path in folder.glob("*.json"))


def _none_finished(given: str, root: Path, lost: Mapping[str, Mapping[int, str]]) -> UserError:
    whys = " ".join(why for notes in lost.values() for why in notes.values())
    if lost:
        return UserError(f"{given!r}: has no scores, for each of its seeds was lost. {whys}")
    return UserError(f"no finished run {given!r} under {root}. A run is a path or the beginning of a hash.")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object with a version in it."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # no JSON, or no text
        raise _no_record(path, error) from error
    if not isinstance(raw, dict):
        raise _no_record(path, "no JSON object")
    if "schema" in raw and not isinstance(raw["schema"], int):
        raise _no_record(path, f"schema={raw['schema']!r} is no whole number")
    if "schema" not in raw:
        raise _no_record(path, f"without {', '.join(sorted({'schema', *_needed(raw)} - raw.keys()))}")
    return raw


def _why_lost(path: Path) -> str:
    """What a note says; one that can't be read still says that the run was lost."""
    try:
        return str(_read(path).get("lost", ""))
    except UserError:
        return ""


def _needed(raw: Mapping[str, Any]) -> set[str]:
    """What a record must have, by what it is of."""
    return {"config", "seed", *(("labels", "classes") if "labels" in raw else ("matrix",))}


def _counted(raw: Mapping[str, Any]) -> AccuracyMatrix | LabelMatrix:
    """What was counted, once it is checked that all of it can be read."""
    if "labels" in raw:
        for again in ("labels", "labels_running"):
            if raw.get(again) is not None:
                counted = LabelMatrix.from_json(raw[again])
                if len(raw["classes"]["groups"]) != counted.tally[0].classes:
                    raise ValueError(f"{again} and classes are not of the same labels")
        return LabelMatrix.from_json(raw["labels"])
    for again in ("matrix_running", "matrix_task"):
        if raw.get(again) is not None:
            AccuracyMatrix(**raw[again])
    return AccuracyMatrix(**raw["matrix"])


def _no_record(path: Path, why: object) -> UserError:
    return UserError(f"{path}: is no record of a run ({why}). Delete it, and it can be run again.")


def by_settings(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the hash of their settings: the seeds of each run together, in the order they come.

    Example:
        >>> by_settings([])
        {}
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.config.hash, []).append(record)
    return groups


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is not a number for a single seed, both where a value is none.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    spread = len(values) > 1 and not any(map(isnan, values))  # `stdev` fails on what is not a number
    return fmean(values), stdev(values) if spread else float("nan")
