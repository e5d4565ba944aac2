"""Records of runs: their schema, the folders and archives they are in, and tables of them. Needs no torch.

A run with one seed that ended has one record: the JSON file ``<hash>/<seed>.json`` of a runs folder, or one line of an
archive (``*.jsonl`` or ``*.jsonl.gz``), which every command reads like a folder. The engine writes records; scores,
comparisons and reports are computed from them alone. A record that is not valid is reported as a problem and not used.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.defaults import resolved_settings
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.label_metrics import LABEL_SCORES, LabelMatrix, label_score, rows_of
from contnorm.bench.metrics import SCORES, AccuracyMatrix, score
from contnorm.bench.rng import LARGEST_SEED
from contnorm.bench.selection import IDENTITY, conditions_of, setting_keys
from contnorm.errors import UserError, unknown, usable

if TYPE_CHECKING:
    from pandas import DataFrame

_log = logging.getLogger("contnorm")

SCHEMA = 3
FINISHED: Literal["finished"] = "finished"
DIVERGED: Literal["diverged"] = "diverged"
ARCHIVES = (".jsonl.gz", ".jsonl")
_HASH = re.compile(r"[0-9a-f]{12}")
_RECORD = re.compile(r"[0-9]+\.json")


# --- The schema of a record ------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _shared_settings(text: str) -> RunConfig:
    """Settings from JSON; records with equal settings share one object, so that the hash is computed once."""
    return from_dict(json.loads(text))


Drift = dict[Literal["by_task"], list[dict[str, dict[str, float]]]]  # after each task, by layer and moment


def _finite(drift: Drift) -> Drift:
    """Drift of a record; empty if a distance is not finite, since it could be neither averaged nor plotted."""
    rows = drift.get("by_task", [])
    values = (value for row in rows for layer in row.values() for value in layer.values())
    return drift if all(map(isfinite, values)) else {}


Count = Annotated[int, Field(strict=True, ge=0)]
Matrix = AccuracyMatrix | None
Labels = Annotated[LabelMatrix, PlainValidator(LabelMatrix.from_json)] | None


class Record(BaseModel):
    """Settings and results of a run with one seed: a finished run has counts, a diverged one a reason.

    Attributes:
        config: Settings.
        hash: Hash of the settings.
        seed: Seed.
        status: ``"finished"`` or ``"diverged"``.
        reason: Message about the divergence.
        drift: Distances between running and exact moments; empty if one of them is not finite.
        task_ends: Steps done when each task ends; 1, 2, ... in records of versions that did not record them.
        seconds: Times.

    Example:
        >>> counts = {"correct": [[9, None], [6, 8]], "total": [10, 10]}
        >>> record = make_record(RunConfig(), 0, {"matrix": counts})
        >>> record.status, record.config.train.lr, record.score("acc")
        ('finished', 0.03, 70.0)
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    schema_: Literal[3] = Field(alias="schema")
    config: Annotated[RunConfig, PlainValidator(lambda values: _shared_settings(json.dumps(values, sort_keys=True)))]
    hash: str
    seed: Annotated[int, Field(strict=True, ge=0, le=LARGEST_SEED)]
    status: Literal["finished", "diverged"]
    seal: str
    reason: str = ""
    accuracies: Matrix = Field(None, alias="matrix")
    matrix_running: Matrix = None
    matrix_memory: Matrix = None
    matrix_task: Matrix = None
    matrix_task_running: Matrix = None
    matrix_task_memory: Matrix = None
    labels: Labels = None
    labels_running: Labels = None
    labels_memory: Labels = None
    classes: dict[str, list[str]] = {}
    drift: Annotated[Drift, AfterValidator(_finite)] = {}
    seconds: dict[str, Any] = {}
    task_ends: list[Count] = []
    parameters: Count | None = None
    versions: dict[str, str | None] = {}
    source: dict[str, Any] = {}
    device: Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})] = {}
    _raw: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _path: Path | None = PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Record:
        if self.hash != self.config.hash:
            raise ValueError(f"its hash is {self.hash}, but that of its settings is {self.config.hash}")
        counts = [one for one in (*self._matrices.values(), self.labels, self.labels_running) if one is not None]
        if self.status == DIVERGED:
            return self
        if not counts or len({one.tasks for one in counts}) > 1:
            raise ValueError("it has no counts" if not counts else "its counts are of different numbers of tasks")
        for matrix in self._matrices.values():
            if any(None in row[: i + 1] for i, row in enumerate(matrix.correct)):
                raise ValueError("every task needs to be measured from when it was learned on")
        if self.labels is not None and len(self.groups) != self.labels.tally[0].classes:
            raise ValueError(f"its counts are of {self.labels.tally[0].classes} classes, its groups {len(self.groups)}")
        if len(self.task_ends) != self.counted.tasks:
            object.__setattr__(self, "task_ends", list(range(1, self.counted.tasks + 1)))
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash((self.hash, self.seed))

    @property
    def raw(self) -> Mapping[str, Any]:
        """All content of the record as it is stored."""
        return self._raw

    @property
    def path(self) -> Path | None:
        """File that the record was read from; for an archive, the file and the line."""
        return self._path

    @property
    def groups(self) -> list[str]:
        """Group of each class of a multi-label stream, such as ``"minority"``."""
        return self.classes.get("groups", [])

    @property
    def multi_label(self) -> bool:
        """Whether the run is multi-label; such runs have other scores than ACC, FM and LA."""
        return self.labels is not None

    @property
    def counted(self) -> AccuracyMatrix | LabelMatrix:
        """Accuracy matrix, or label statistics for multi-label data."""
        return self.matrix if self.labels is None else self.labels

    @property
    def matrix(self) -> AccuracyMatrix:
        """Accuracy matrix.

        Raises:
            UserError: If the run is multi-label, or diverged.
        """
        if self.accuracies is None:
            why = "diverged and has no scores" if self.status == DIVERGED else "is multi-label and has no accuracies"
            raise UserError(f"run {self.hash} seed {self.seed}: it {why}. See it with `contnorm show`.")
        return self.accuracies

    @property
    def _matrices(self) -> dict[str, AccuracyMatrix]:
        names = ("accuracies", "matrix_running", "matrix_memory", "matrix_task", "matrix_task_running")
        every = {name: getattr(self, name) for name in (*names, "matrix_task_memory")}
        return {name: matrix for name, matrix in every.items() if matrix is not None}

    def matrix_of(self, key: str) -> AccuracyMatrix | None:
        """Accuracy matrix of another evaluation of the same network, such as ``matrix_running``; None if missing."""
        return self._matrices.get("accuracies" if key == "matrix" else key)

    @property
    def evaluated(self) -> dict[str, Any]:
        """Accuracy matrices, or label statistics, by the moments used in evaluation, such as ``running``, ``memory``.

        Task-wise moments need the task of a sample. For class-incremental streams they are those of ``matrix_task``, so
        that this has ``running`` alone.
        """
        moments = self.config.evaluate.moments
        if moments == "task" and self.config.stream.scenario == "class" and not self.multi_label:
            moments = "running"
        kind = "labels" if self.multi_label else "matrix"
        several = {"running": getattr(self, f"{kind}_running"), moments: self.counted}
        several |= {"memory": memory} if (memory := getattr(self, f"{kind}_memory")) is not None else {}
        return {name: counts for name, counts in several.items() if counts is not None}

    def classes_of(self, group: str) -> list[int] | None:
        """Class indices of a group such as ``"majority"``; None for ``"overall"``, which means all classes."""
        if group == "overall":
            return None
        return [label for label, label_group in enumerate(self.groups) if label_group == group]

    def score(self, name: str, group: str = "overall") -> float:
        """Compute a score by name; for a multi-label run optionally over one group of classes."""
        if self.labels is not None:
            return label_score(self.labels, name, self.classes_of(group))
        return score(self.matrix, name)

    @property
    def scores(self) -> dict[str, float]:
        """All scores by name; NaN for a score that needs accuracies which were not measured."""
        return dict.fromkeys(LABEL_SCORES if self.multi_label else SCORES, nan) | self.counted.scores()


def seal_of(content: Mapping[str, Any]) -> str:
    """Checksum of a record: SHA-256 over the canonical JSON of its content without the seal.

    Example:
        >>> seal_of({"seed": 0, "hash": "a"}) == seal_of({"hash": "a", "seed": 0, "seal": "old"})
        True
    """
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_hash(text: str) -> bool:
    """Whether a text is the hash of settings.

    Example:
        >>> is_hash("75cc28cb778a"), is_hash("tuning")
        (True, False)
    """
    return _HASH.fullmatch(text) is not None


def make_record(config: RunConfig, seed: int, results: Mapping[str, Any], path: Path | None = None) -> Record:
    """Make the record of a run from its results; it equals the one that is read from its file.

    Args:
        config: Settings.
        seed: Seed.
        results: The other fields: of a finished run ``matrix`` or ``labels``, of a diverged one ``status`` and
            ``reason``.
        path: File of the record.
    """
    identity = {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed, "status": FINISHED}
    raw = json.loads(json.dumps({**identity, **results}))  # as loading returns it: string keys, lists for tuples
    return _record({**raw, "seal": seal_of(raw)}, path)


def _record(raw: Mapping[str, Any], path: Path | None) -> Record:
    record = Record.model_validate(raw)
    record._raw, record._path = raw, path
    return record


def _parse(content: bytes, path: Path) -> Record:
    """Read a record from JSON; its settings must have the hash that it names, and its content the checksum."""
    try:
        raw = json.loads(content)
        record = _record(raw, path)
        if record.seal != seal_of(raw):
            raise ValueError("its content does not match its seal: it was changed")
    except (ValueError, TypeError, LookupError, AttributeError, UserError) as error:
        why = str(error)
        if isinstance(error, pydantic.ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            why = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise UserError(f"{path}: is not a valid record ({why}).") from error
    return record


def read_record(path: Path) -> Record:
    """Read the record of a file, finished or diverged; a file that has not changed is read once.

    Raises:
        UserError: If it can't be read, or is not valid.
    """
    with usable(path, "can't be read", "Use another file."):
        stat = path.stat()
        return _read_file(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=2048)
def _read_file(path: Path, size: int, modified: int, inode: int) -> Record:
    record = _parse(path.read_bytes(), path)
    named = _RECORD.fullmatch(path.name) is not None and is_hash(path.parent.name)
    if named and (path.parent.name, path.name) != (record.hash, f"{record.seed}.json"):
        raise UserError(f"{path}: is the record of run {record.hash}, seed {record.seed}. Give it that name.")
    return record


# --- Runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Runs:
    """Records of several runs and seeds. A run is identified by the hash of its settings.

    Iteration and ``len`` are over the records of finished runs.

    Attributes:
        records: Records of finished runs.
        diverged: Records of diverged runs, which have no scores.
        problems: One message per record, line or folder that could not be used.

    Example:
        >>> counts = {"matrix": {"correct": [[9, None], [6, 8]], "total": [10, 10]}}
        >>> configs = [from_dict({"norm": {"name": norm}}) for norm in ("bn", "cn")]
        >>> runs = Runs([make_record(config, seed, counts) for config in configs for seed in range(3)])
        >>> runs
        Runs(2 runs, 6 records, 0 diverged, 0 problems)
        >>> runs.where(norm="cn", seed=[0, 2], lr=lambda lr: lr < 0.1)
        Runs(1 runs, 2 records, 0 diverged, 0 problems)
        >>> runs.where("norm=bn,cn,seed<2")
        Runs(2 runs, 4 records, 0 diverged, 0 problems)
        >>> runs.to_frame().groupby("norm.name")["acc"].mean().to_dict()
        {'bn': 70.0, 'cn': 70.0}
    """

    records: Sequence[Record]
    diverged: Sequence[Record] = ()
    problems: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return (
            f"Runs({len(self.by_run())} runs, {len(self.records)} records, {len(self.diverged)} diverged, "
            f"{len(self.problems)} problems)"
        )

    @classmethod
    def of(cls, records: Iterable[Record], problems: Iterable[str] = ()) -> Runs:
        """Runs of finished and diverged records, each run and seed once: copies are left out, and so is a divergence of
        a run that also finished.

        A copy with other counts, such as one from another device, is reported as a problem.
        """
        reports = list(problems)
        first: dict[tuple[str, int], Record] = {}
        for record in sorted(records, key=lambda record: record.status == DIVERGED):
            other = first.setdefault((record.hash, record.seed), record)
            if record.status == FINISHED and other.counted != record.counted:
                reports.append(
                    f"{record.path}: is ignored. {other.path} is of the same run and seed, with different results."
                )
        kept = {kind: [one for one in first.values() if one.status == kind] for kind in (FINISHED, DIVERGED)}
        return cls(kept[FINISHED], kept[DIVERGED], list(dict.fromkeys(reports)))

    def where(self, *selections: str, **conditions: Any) -> Runs:
        """Select records by settings, seed, hash or status. All conditions must hold.

        Args:
            selections: Conditions as the commands take them, such as ``"lr<=0.1"``, ``"norm=bn,cn"`` or
                ``"norm!=bn,seed<5"``; a comma separates values, and conditions.
            conditions: A value, a collection of allowed values (list, tuple, set, range) or a function that returns
                whether a value is allowed, by key. A key is a dotted setting such as ``train.batch``, passed as
                ``**{"train.batch": 10}``; a setting's name without its group if it is unique, such as ``lr``; one of
                ``norm``, ``strategy``, ``stream``, ``model``, ``memory`` and ``buffer``; or ``seed``, ``hash`` (a
                prefix is enough) or ``status``. Names are understood as `bench.run` does: ``norm="cn8"`` is cn with 8
                groups, ``norm="cn"`` is cn with any number of groups, and ``strategy="der++"`` is derpp.

        Raises:
            UserError: If a key is unknown.
        """
        parsed = conditions_of(selections, conditions, setting_keys([*self.records, *self.diverged]))

        def select(records: Sequence[Record]) -> list[Record]:
            return [record for record in records if all(condition.holds(record) for condition in parsed)]

        return replace(self, records=select(self.records), diverged=select(self.diverged))

    def by_run(self) -> dict[str, Runs]:
        """Group by run: the seeds of each hash, finished and diverged, in the order of their first occurrence."""
        finished, diverged = group_by_run(self.records), group_by_run(self.diverged)
        return {run: Runs(finished.get(run, []), diverged.get(run, [])) for run in (finished | diverged)}

    def to_frame(self, by_task: bool = False) -> DataFrame:
        """One row per run and seed, diverged ones included, as a pandas table.

        Columns: ``hash``, ``seed``, ``status``; one for each setting, by its dotted name, with the value that the run
        used; all scores by name in percent; ``device``, ``torch`` (version) and ``seconds`` (of training). A setting
        that has no value for a run, such as the groups of a norm without groups, is None or NaN, and so are missing
        scores.

        Args:
            by_task: Whether to have one row per evaluation instead: ``hash``, ``seed``, ``moments``, ``after_task``,
                ``task`` and the scores on the test samples of that task.
        """
        import pandas as pd

        if by_task:
            return pd.DataFrame([row for record in self.records for row in _task_rows(record)])
        every = [*self.records, *self.diverged]
        rows = [
            {
                **{key: getattr(record, key) for key in IDENTITY},
                **resolved_settings(record.config),
                **(record.scores if record.status == FINISHED else {}),
                "device": record.device.get("name"),
                "torch": record.versions.get("torch"),
                "seconds": record.seconds.get("train"),
            }
            for record in every
        ]
        last = ("device", "torch", "seconds")
        keys = dict.fromkeys(
            [*IDENTITY, *setting_keys(every), *(key for row in rows for key in row if key not in last)]
        )
        return pd.DataFrame(rows, columns=[*keys, *last])

    def save(self, path: str | os.PathLike[str], by_task: bool = False) -> None:
        """Write the runs to a file, in the format of its name.

        An archive (``.jsonl.gz`` or ``.jsonl``) has all records as they are, sorted by hash and seed: every command
        reads it like the folder, and equal records give equal bytes. ``.csv``, ``.json`` and ``.parquet`` have the
        table of `to_frame`.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "runs.csv"
            >>> record = make_record(RunConfig(), 7, {"matrix": {"correct": [[9]], "total": [10]}})
            >>> Runs([record]).save(path, by_task=True)
            >>> print(path.read_text())
            hash,seed,moments,after_task,task,accuracy,correct,total
            ...,7,running,0,0,90.0,9,10
        """
        target = Path(path).expanduser()
        if is_archive(target):
            every = sorted([*self.records, *self.diverged], key=lambda record: (record.hash, record.seed))
            text = "".join(json.dumps(record.raw, separators=(",", ":")) + "\n" for record in every).encode()
            write_atomically(target, gzip.compress(text, mtime=0) if target.suffix == ".gz" else text)
            return

        def mixed_columns(frame: DataFrame) -> dict[str, str]:
            """Columns such as numbers of groups and ``auto``, which Parquet can only hold as text."""
            from pandas.api.types import infer_dtype

            return {str(name): "string" for name in frame if infer_dtype(frame[name]).startswith("mixed")}

        writers: dict[str, Callable[[DataFrame], Any]] = {
            ".csv": lambda frame: frame.to_csv(target, index=False),
            ".json": lambda frame: frame.to_json(target, orient="records", indent=1),
            ".parquet": lambda frame: frame.astype(mixed_columns(frame)).to_parquet(target, index=False),
        }
        if target.suffix not in writers:
            raise unknown("format", target.suffix or target.name, [*ARCHIVES, *writers])
        writers[target.suffix](self.to_frame(by_task))


def _task_rows(record: Record) -> Iterator[dict[str, Any]]:
    """A row for each accuracy, or each set of multi-label scores, that was measured."""
    identity = {"hash": record.hash, "seed": record.seed}
    for moments, counted in record.evaluated.items():
        for after, scores in enumerate(rows_of(counted)):
            for task in range(counted.tasks):
                values = {name: by_task[task] for name, by_task in scores.by_task.items()}
                if any(value is None for value in values.values()):
                    continue
                row = {**identity, "moments": moments, "after_task": after, "task": task, **values}
                if isinstance(counted, AccuracyMatrix):
                    row |= {"correct": counted.correct[after][task], "total": counted.total[task]}
                yield row


def group_by_run(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by the hash of their settings; the seeds of a run keep their order.

    Example:
        >>> group_by_run([])
        {}
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.hash, []).append(record)
    return groups


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, which is NaN for a single seed or if a value is not finite.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    has_stdev = len(values) > 1 and all(map(isfinite, values))  # `stdev` fails on NaN and infinity
    return fmean(values), stdev(values) if has_stdev else nan


# --- Folders and archives --------------------------------------------------------------------------------------------


def is_archive(path: Path) -> bool:
    """Whether a path has the name of an archive and is not a folder.

    Example:
        >>> is_archive(Path("tuning.jsonl.gz")), is_archive(Path("runs"))
        (True, False)
    """
    return path.name.endswith(ARCHIVES) and not path.is_dir()


def load_runs(path: str | os.PathLike[str]) -> Runs:
    """Load all records of a path.

    Args:
        path: A runs folder, an archive (``*.jsonl.gz`` or ``*.jsonl``), a folder of archives, the folder of one run,
            or a record file. Deeper subfolders are not read.

    Raises:
        UserError: If there is nothing at the path. Invalid records do not raise; see `Runs.problems`.

    Example:
        >>> load_runs("no such folder")
        Traceback (most recent call last):
        contnorm.errors.UserError: no such folder: there is no such file or folder.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"{place}: there is no such file or folder.")
    if place.is_file() and not is_archive(place):
        return Runs.of([read_record(place)])
    runs = Store(place).load_all()
    if not (runs or runs.diverged or runs.problems):
        _log.warning(f"{place}: has no records. Name a folder of runs, an archive, or a folder of archives.")
    return runs


Archived = tuple[dict[tuple[str, int], Record], list[str]]  # by hash and seed; and problems


@lru_cache(maxsize=16)
def _read_archive(path: Path, size: int, modified: int) -> Archived:
    """Read an archive. Invalid lines are reported by number; a damaged file is reported and not read.

    Size and time of modification are part of the key of the cache.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            lines = file.readlines()
    except (OSError, EOFError, zlib.error) as error:
        return {}, [f"{path}: the archive is damaged ({error})."]
    places = [Path(f"{path}:{number}") for number in range(1, len(lines) + 1)]
    records, problems = _read_each(partial(_parse, line, place) for line, place in zip(lines, places, strict=True))
    of_runs: dict[tuple[str, int], Record] = {}
    for record in records:
        of_runs.setdefault((record.hash, record.seed), record)
    return of_runs, problems


def _read_each(reads: Iterable[Callable[[], Record]]) -> tuple[list[Record], list[str]]:
    """Call functions that read a record; returns the records, and the messages of those that are not valid."""
    records, problems = list[Record](), list[str]()
    for read in reads:
        try:
            records.append(read())
        except UserError as error:
            problems.append(str(error))
    return records, problems


class Store:
    """The records under a folder, which may contain archives next to its run folders, or in an archive.

    Archives are read-only.

    Args:
        root: A runs folder, or an archive.

    Example:
        >>> Store(Path("no such folder")).load_all()
        Runs(0 runs, 0 records, 0 diverged, 0 problems)
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __iter__(self) -> Iterator[Record]:
        return iter(self.load_all())

    @property
    def read_only(self) -> bool:
        """Whether the store is an archive, to which no run can be added."""
        return is_archive(self.root)

    def check_writable(self) -> None:
        """Raise a `UserError` if the store is an archive."""
        if self.read_only:
            raise UserError(f"{self.root}: is an archive, and archives are read-only. Use a folder of runs.")

    @cached_property
    def _archived(self) -> Archived:
        """Content of the archive, or of all archives directly in the folder; of copies the first one."""
        inside = sorted(path for ending in ARCHIVES for path in self.root.glob(f"*{ending}"))
        records, problems = dict[tuple[str, int], Record](), list[str]()
        for path in [self.root] if self.read_only else inside:
            if path.is_file():
                content = _read_archive(path, path.stat().st_size, path.stat().st_mtime_ns)
                records = content[0] | records
                problems += content[1]
        return records, problems

    def path(self, config: RunConfig, seed: int) -> Path:
        """File of a run's record in a runs folder."""
        return self.root / config.hash / f"{seed}.json"

    def _find(self, config: RunConfig, seed: int) -> Record | None:
        """Record of a run; a finished one, if there is one."""
        path, archived = self.path(config, seed), self._archived[0].get((config.hash, seed))
        if path.is_file() and (archived is None or archived.status == DIVERGED):
            return read_record(path)
        return archived

    def has(self, config: RunConfig, seed: int) -> bool:
        """Whether there is a record of a finished run, or a file that is none, which no run replaces."""
        with suppress(UserError):
            record = self._find(config, seed)
            return record is not None and record.status == FINISHED
        return True

    def divergence(self, config: RunConfig, seed: int) -> Record | None:
        """The record of a diverged run; None if it is not known to diverge."""
        return None if self.has(config, seed) else self._find(config, seed)

    def is_diverged(self, config: RunConfig, seed: int) -> bool:
        """Whether a run is known to diverge and has no record of a finished run."""
        return self.divergence(config, seed) is not None

    def _archived_of(self, run: str) -> list[Record]:
        return [record for (name, _), record in self._archived[0].items() if name == run]

    def save(self, config: RunConfig, seed: int, results: Mapping[str, Any]) -> Path:
        """Write the record of a finished run."""
        self.check_writable()
        path = self.path(config, seed)
        write_atomically(path, (json.dumps(make_record(config, seed, results, path).raw, indent=1) + "\n").encode())
        return path

    def save_diverged(
        self, config: RunConfig, seed: int, reason: str, environment: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the record of a diverged run; the record of a finished run is not replaced.

        Args:
            config: Settings of the run.
            seed: Seed of the run.
            reason: Message about the divergence.
            environment: Further fields of the record, such as device and versions.
        """
        if self.has(config, seed):
            return self.path(config, seed)
        return self.save(config, seed, {"status": DIVERGED, "reason": reason, **(environment or {})})

    def load_run(self, config: RunConfig, seed: int) -> Record:
        """Load the record of a finished run from its file or from an archive.

        Raises:
            UserError: If there is none, if it is invalid, or if the run diverged.
        """
        record = self._find(config, seed) or read_record(self.path(config, seed))
        if record.status == DIVERGED:
            raise UserError(f"{record.path}: has no scores, because the run diverged. {record.reason}".rstrip())
        return record

    def load_seeds(self, config: RunConfig, seeds: Iterable[int] | None = None) -> Runs:
        """Load the records of a run, or of some of its seeds; invalid ones are reported as problems."""
        return self._folder(self.root / config.hash, self._archived_of(config.hash), seeds)

    def load_all(self) -> Runs:
        """Load all records; invalid ones are reported as problems."""
        own = [self.root] if is_hash(self.root.resolve().name) else []
        folders = [] if self.read_only or not self.root.is_dir() else [*own, *sorted(self.root.iterdir())]
        parts = [self._folder(folder) for folder in folders]
        records = [record for part in parts for record in (*part.records, *part.diverged)]
        problems = [*(problem for part in parts for problem in part.problems), *self._archived[1]]
        return Runs.of([*records, *(record for _, record in sorted(self._archived[0].items()))], problems)

    def _folder(self, folder: Path, more: Iterable[Record] = (), seeds: Iterable[int] | None = None) -> Runs:
        """Records in the folder of a run, and some more."""
        wanted = seeds if seeds is None or isinstance(seeds, range) else set(seeds)
        paths = [path for path in folder.glob("*.json") if _RECORD.fullmatch(path.name)]
        paths = [path for path in paths if wanted is None or int(path.stem) in wanted]
        paths.sort(key=lambda path: int(path.stem))
        records, problems = _read_each(partial(read_record, path) for path in paths)
        return Runs.of([*records, *(one for one in more if wanted is None or one.seed in wanted)], problems)

    def find(self, query: str) -> Runs:
        """Find records by path (a file, an archive, a folder) or by a prefix of a hash, with all its seeds.

        Raises:
            UserError: If there is no finished run, or a prefix is of several runs.
        """
        if Path(query).exists():
            runs = load_runs(query)
        else:
            names = [path.name for path in self.root.glob("*") if path.is_dir()]
            names = sorted({*names, *(run for run, _ in self._archived[0])})
            matches = [name for name in names if name.startswith(query)]
            if len(matches) > 1:
                raise UserError(
                    f"{query!r} is a prefix of {len(matches)} hashes: {', '.join(matches)}. Use a longer one."
                )
            parts = [self._folder(self.root / name, self._archived_of(name)) for name in matches]
            runs = parts[0] if parts else Runs([])
        if runs.records or runs.problems:
            return replace(runs, records=sorted(runs.records, key=lambda record: (record.hash, record.seed)))
        if runs.diverged:
            raise UserError(f"{query!r}: has no scores, because all its seeds diverged. {runs.diverged[0].reason}")
        raise UserError(
            f"no finished run {query!r} under {self.root}. Use a path, the beginning of a hash, or a setting: "
            f"norm={query} for `contnorm compare`, --where norm={query} for `contnorm show`."
        )

    def find_run(self, query: str) -> Runs:
        """Find the records of one run by path or hash prefix.

        Raises:
            UserError: If a record is invalid, or if several runs match.
        """
        runs = self.find(query)
        if runs.problems:
            raise UserError("; ".join(runs.problems))
        if len(hashes := dict.fromkeys(record.hash for record in runs.records)) > 1:
            raise UserError(f"{query!r} has {len(hashes)} runs: {', '.join(hashes)}. Use the hash of one.")
        return runs
