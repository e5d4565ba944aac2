"""One record: the settings and results of a run with one seed, as a JSON object.

A record has a status: a finished run has counts (an accuracy matrix or label statistics), a diverged run has a reason
instead. Its seal is a checksum of its content. Reading a record checks the seal, the content, and that its settings
have the hash that it names.

Schemas: 1 has no seal, 2 has one, 3 has a status. Up to schema 2 a diverged run is a divergence note with the key
``lost``, in a file ``<seed>.lost.json``. All schemas can be read; schema 3 is written.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.metrics.accuracy_matrix import SCORES, AccuracyMatrix, score
from contnorm.bench.metrics.multilabel import LABEL_SCORES, LabelMatrix, label_score
from contnorm.bench.record_checks import check_fields, check_reason, check_whole, checked_counts, finite_drift
from contnorm.errors import UserError

__all__ = [
    "DIVERGED",
    "FINISHED",
    "LARGEST_FILE",
    "LARGEST_SEED",
    "SCHEMA",
    "DivergedRun",
    "Record",
    "RecordShape",
    "is_hash",
    "parse_json",
    "parse_record",
    "read_json",
    "record_error",
    "seal_of",
    "write_sealed",
]

SCHEMA = 3
SEALED_SINCE = 2  # records of an older schema have no seal
STATUS_SINCE = 3  # records of an older schema have no status
FINISHED, DIVERGED = "finished", "diverged"
LARGEST_SEED = 2**64 - 1
LARGEST_FILE = 2**28  # bytes of a record
_LONGEST_REASON = 300  # characters of an error message about a record
_HASH = re.compile(r"[0-9a-f]{12}")
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RecordShape:
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
        raw: All content of the record, including times, versions and device.
        path: File that the record was read from; for an archive, the file and the line.

    Example:
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> record = Record(RunConfig(), 0, AccuracyMatrix([[9, None], [6, 8]], [10, 10]), {}, {})
        >>> record.status, record.config.train.lr
        ('finished', 0.03)
    """

    config: RunConfig
    seed: int
    counted: AccuracyMatrix | LabelMatrix
    drift: Mapping[str, Any]
    raw: Mapping[str, Any]
    path: Path | None = field(default=None, compare=False)

    @property
    def hash(self) -> str:
        """Hash of the settings."""
        return self.config.hash

    @property
    def status(self) -> str:
        """Always ``"finished"``."""
        return FINISHED

    @property
    def sealed(self) -> bool:
        """Whether the record has a checksum; records of schema 1 have none."""
        return "seal" in self.raw

    @cached_property
    def shape(self) -> RecordShape:
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
        return RecordShape(counts, layers if capped or not rows else f"{len(rows)} rows of {layers}")

    @property
    def task_ends(self) -> list[int]:
        """Steps done when each task ends; 1, 2, ... in a record of an earlier version, which does not contain them."""
        ends, tasks = list(self.raw.get("task_ends", [])), self.counted.tasks
        return ends if len(ends) == tasks else list(range(1, tasks + 1))

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
                f"run {self.hash} seed {self.seed}: it is multi-label and has no accuracies. Leave it out, or see its "
                f"scores with `contnorm show`."
            )
        return self.counted

    def matrix_of(self, key: str) -> AccuracyMatrix | None:
        """Accuracy matrix of another evaluation of the same network, such as ``matrix_running``; None if missing."""
        raw = self.raw.get(key)
        return None if raw is None else AccuracyMatrix(**raw)

    @property
    def evaluated(self) -> dict[str, AccuracyMatrix]:
        """Accuracy matrices of the same network by the moments used in evaluation, such as ``running`` and ``memory``.

        Task-wise moments need the task of a sample. For class-incremental streams they are those of ``matrix_task``, so
        that this has ``running`` alone.
        """
        moments = self.config.evaluate.moments
        if moments == "task" and self.config.stream.scenario == "class":
            moments = "running"
        running, memory = self.matrix_of("matrix_running"), self.matrix_of("matrix_memory")
        first = {} if running is None else {"running": running}
        last = {} if memory is None else {"memory": memory}
        return {**first, moments: self.matrix, **last}

    def labels_of(self, key: str) -> LabelMatrix | None:
        """Label statistics: ``labels``, or ``labels_running`` with running moments; None if missing."""
        raw = self.raw.get(key)
        return None if raw is None else LabelMatrix.from_json(raw)

    @property
    def labels_evaluated(self) -> dict[str, LabelMatrix]:
        """As `evaluated`, for a multi-label run."""
        keys = {"labels_running": "running", "labels": self.config.evaluate.moments, "labels_memory": "memory"}
        return {moments: counts for key, moments in keys.items() if (counts := self.labels_of(key)) is not None}

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

    @property
    def scores(self) -> dict[str, float]:
        """All scores by name; NaN for a score that needs accuracies which were not measured."""
        return {name: self._score_or_nan(name) for name in (LABEL_SCORES if self.multi_label else SCORES)}

    def _score_or_nan(self, name: str) -> float:
        try:
            return self.score(name)
        except ValueError:  # such as forward transfer without the accuracies before training
            return float("nan")


@dataclass(frozen=True)
class DivergedRun:
    """A run with one seed whose loss was not finite. It has no scores, and would diverge again.

    Attributes:
        hash: Hash of the settings.
        seed: Seed of the run.
        reason: Message about the divergence; empty if the file can't be read.
        config: Settings; None in divergence notes of schemas 1 and 2.
        raw: All content of the record.
        path: File that it was read from; for an archive, the file and the line.
    """

    hash: str
    seed: int
    reason: str
    config: RunConfig | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)

    @property
    def status(self) -> str:
        """Always ``"diverged"``."""
        return DIVERGED


def parse_record(raw: Mapping[str, Any], path: Path) -> Record | DivergedRun:
    """Check the content of a record: schema, fields, seal, and the hash of its settings.

    Args:
        raw: The JSON object.
        path: File, or file and line, that it was read from; the error message names it.

    Raises:
        UserError: If a check fails.
    """
    schema = raw.get("schema")
    if schema is not None and (type(schema) is not int or schema < 1):
        raise record_error(path, f"schema={schema!r} must be a whole number from 1 to {SCHEMA}")
    if schema is not None and schema > SCHEMA:
        raise UserError(
            f"{path}: is a record of schema {schema}; this version of contnorm reads schemas up to {SCHEMA}. "
            f"Upgrade contnorm to read it."
        )
    missing = {"schema", *_required_keys(raw)} - raw.keys()
    if missing:
        raise record_error(path, f"without {', '.join(sorted(missing))}")
    try:
        if _is_diverged(raw):
            return _parse_diverged(raw, path)
        config, counts = _config_of(raw["config"]), checked_counts(raw)
        seed = check_whole(raw["seed"], "seed", most=LARGEST_SEED)
        check_fields(raw)
        _check_seal(raw)
        _check_hash(raw, config)
        return Record(config, seed, counts, finite_drift(raw.get("drift", {})), raw, path)
    except _PARSE_ERRORS as error:
        raise record_error(path, error) from error


def make_record(config: RunConfig, seed: int, results: Mapping[str, Any], path: Path | None = None) -> Record:
    """Make the record of a finished run from its results; it equals the one that is read from its file."""
    raw = json.loads(json.dumps({**identity(config, seed), "status": FINISHED, **results}))
    raw["seal"] = seal_of(raw)
    counted = LabelMatrix.from_json(raw["labels"]) if "labels" in raw else AccuracyMatrix(**raw["matrix"])
    return Record(config, seed, counted, finite_drift(raw["drift"]), raw, path)


def identity(config: RunConfig, seed: int) -> dict[str, Any]:
    """Return the fields of a record that identify its run."""
    return {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed}


def _is_diverged(raw: Mapping[str, Any]) -> bool:
    if raw["schema"] < STATUS_SINCE:
        return _is_note(raw)
    if raw["status"] not in (FINISHED, DIVERGED):
        raise ValueError(f"status={raw['status']!r} must be {FINISHED!r} or {DIVERGED!r}")
    return bool(raw["status"] == DIVERGED)


def _parse_diverged(raw: Mapping[str, Any], path: Path) -> DivergedRun:
    reason = check_reason(raw["reason"] if raw["schema"] >= STATUS_SINCE else raw["lost"])
    seed = check_whole(raw["seed"], "seed", most=LARGEST_SEED)
    if not isinstance(raw["hash"], str) or not is_hash(raw["hash"]):
        raise ValueError(f"hash={str(raw['hash'])[:40]!r} must be 12 hexadecimal digits")
    check_fields(raw)
    _check_seal(raw)
    config = _config_of(raw["config"]) if "config" in raw else None
    if config is not None:
        _check_hash(raw, config)
    return DivergedRun(raw["hash"], seed, reason, config, raw, path)


def _required_keys(raw: Mapping[str, Any]) -> set[str]:
    """Required keys of a record: of a finished run its counts, of a diverged one its reason."""
    counts = {"config", "seed", *(("labels", "classes") if "labels" in raw else ("matrix",))}
    if raw.get("schema", SCHEMA) < STATUS_SINCE:
        return {"hash", "seed"} if _is_note(raw) else counts
    return {"config", "hash", "seed", "status", "reason"} if raw.get("status") == DIVERGED else counts | {"status"}


def _is_note(raw: Mapping[str, Any]) -> bool:
    """Whether a record of schema 1 or 2 is a divergence note."""
    return "lost" in raw and "matrix" not in raw and "labels" not in raw


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        UserError: If the file can't be read, is too large, or is not a JSON object.
    """
    try:
        _check_file(path)
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise record_error(path, error) from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Parse one JSON object; the error message names the path.

    Example:
        >>> parse_json(b'{"seed": 3}', Path("a.jsonl:1"))
        {'seed': 3}
        >>> parse_json(b"[]", Path("a.jsonl:1"))
        Traceback (most recent call last):
        contnorm.errors.UserError: a.jsonl:1: is not a valid record (not a JSON object).
    """
    try:
        raw = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise record_error(path, error) from error
    if not isinstance(raw, dict):
        raise record_error(path, "not a JSON object")
    return raw


def _check_file(path: Path) -> None:
    """Reject files that could be read without end (pipes, devices) and files too large for a record."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > LARGEST_FILE:
        raise ValueError(f"{status.st_size:,} bytes, more than the {LARGEST_FILE:,} that a record can have")


def seal_of(content: Mapping[str, Any]) -> str:
    """Checksum of a record: SHA-256 over the canonical JSON of its content without the seal.

    Example:
        >>> seal_of({"seed": 0, "hash": "a"}) == seal_of({"hash": "a", "seed": 0, "seal": "old"})
        True
    """
    rest = {key: value for key, value in content.items() if key != "seal"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_sealed(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a JSON object with its seal, atomically."""
    plain = json.loads(json.dumps(content))  # the form that loading returns: string keys, lists for tuples
    write_atomically(path, (json.dumps({**plain, "seal": seal_of(plain)}, indent=1) + "\n").encode())
    return path


def _check_seal(raw: Mapping[str, Any]) -> None:
    if raw["schema"] >= SEALED_SINCE and "seal" not in raw:
        raise ValueError("without seal")
    if "seal" in raw and raw["seal"] != seal_of(raw):
        raise ValueError("its content does not match its seal: it was changed after it was written")


def _check_hash(raw: Mapping[str, Any], config: RunConfig) -> None:
    if raw.get("hash") != config.hash:
        raise ValueError(f"its hash is {raw.get('hash')!r}, but that of its settings is {config.hash}")


def is_hash(text: str) -> bool:
    """Whether a text is the hash of settings.

    Example:
        >>> is_hash("75cc28cb778a"), is_hash("tuning")
        (True, False)
    """
    return _HASH.fullmatch(text) is not None


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


def record_error(path: Path, reason: object) -> UserError:
    """Error message in one printable line, whatever the file contains.

    It suggests to delete the file only if it has the place and name of a record in the folder of a run.
    """
    text = "".join(letter if letter.isprintable() else " " for letter in str(reason))
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
    in_run_folder = is_hash(path.parent.name) and path.suffix == ".json" and path.name.partition(".")[0].isdecimal()
    hint = " Delete it to run it again." if in_run_folder else ""
    return UserError(f"{path}: is not a valid record ({text}).{hint}")
