"""Summaries of the records of folders, for tables of runs.

A summary has the scores that tables show, without the counts they are computed from. The summaries of a folder of many
runs are cached in an index, ``.index.json`` in that folder, so that showing thousands of runs reads one file. An entry
is valid only while its record's size, times and inode are unchanged; other records are read again. The index can be
deleted at any time, and a read-only folder has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.bench import record, record_checks
from contnorm.bench.config import schema as config_module
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.metrics import accuracy_matrix as matrix
from contnorm.bench.metrics import multilabel
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.bench.metrics.multilabel import label_score
from contnorm.bench.record_sets import drop_finished, reasons_by_run
from contnorm.bench.records import (
    DivergedRun,
    Record,
    RecordShape,
    RunFolder,
    Store,
    drop_duplicates,
    drop_inconsistent,
    is_folder_of_runs,
    no_finished_run,
    read_notes,
    run_folders,
)
from contnorm.errors import UserError

__all__ = [
    "GROUPS_SHOWN",
    "INDEX",
    "LABEL_SCORES_SHOWN",
    "SCORES_SHOWN",
    "Summaries",
    "Summary",
    "find_summaries",
    "summaries_under",
    "summarize",
]

SCORES_SHOWN = matrix.MAIN_SCORES
LABEL_SCORES_SHOWN = ("c_f1", "o_f1", "map", "fm_c_f1", "fm_o_f1", "fm_map")
GROUPS_SHOWN = ("overall", *GROUPS)
INDEX = ".index.json"
MIN_RECORDS = 500  # minimum number of records for an index; fewer are read quickly enough
MIN_AGE_NS = 2 * 10**9  # nanoseconds: a second change within the clock's resolution would not be noticed

Scores = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Summary:
    """The part of a record that a table shows.

    Attributes:
        scores: Values of `SCORES_SHOWN` or `LABEL_SCORES_SHOWN`, by the moments used for evaluation and then by the
            group of labels, which is the empty string for single-label streams.
        source: The record's entry on its data set.
    """

    config: RunConfig
    seed: int
    sealed: bool
    multi_label: bool
    scores: Scores
    source: Mapping[str, Any]
    shape: RecordShape
    file: str = ""

    @property
    def outcome(self) -> str:
        """The scores as text: equal for copies of a record."""
        return repr(self.scores)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The entries of the record's file that a summary has."""
        return {"source": self.source}

    @property
    def path(self) -> Path | None:
        """Path of the record."""
        return Path(self.file) if self.file else None


@dataclass(frozen=True)
class Summaries:
    """Summaries of some records, errors of unreadable records, and the seeds that diverged."""

    records: list[Summary]
    problems: list[str]
    diverged: dict[str, dict[int, str]] = field(default_factory=dict)


def summarize(record: Record) -> Summary:
    """Summarize a record.

    Example:
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> summarize(Record(RunConfig(), 0, AccuracyMatrix([[9, None], [6, 8]], [10, 10]), {}, {})).scores
        {'running': {'': [70.0, 30.0, 85.0]}}
    """
    scores = dict(_label_scores(record) if record.multi_label else _accuracy_scores(record))
    labels, source, file = record.multi_label, record.raw.get("source", {}), str(record.path or "")
    return Summary(record.config, record.seed, record.sealed, labels, scores, source, record.shape, file)


def _accuracy_scores(record: Record) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for moments, counts in record.evaluated.items():
        yield moments, {"": [score(counts, name) for name in SCORES_SHOWN]}


def _label_scores(record: Record) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for moments, counts in record.labels_evaluated.items():
        classes = {group: record.classes_of(group) for group in GROUPS_SHOWN}
        yield (
            moments,
            {
                group: [label_score(counts, name, some) for name in LABEL_SCORES_SHOWN]
                for group, some in classes.items()
            },
        )


def find_summaries(store: Store, query: str) -> Summaries:
    """Summaries of the records that `Store.search` finds."""
    path = Path(query)
    if not is_folder_of_runs(path):
        matches = store.search(query)
        return Summaries(list(map(summarize, matches.records)), matches.problems, matches.diverged)
    summaries = summaries_under(path)
    if not summaries.records and not summaries.problems:
        raise no_finished_run(query, store.root, summaries.diverged)
    return summaries


def summaries_under(root: Path) -> Summaries:
    """Summaries of all records under a folder of runs or in an archive; unchanged files are taken from the index.

    Example:
        >>> summaries_under(Path("no such folder")).records
        []
    """
    folders = list(run_folders(root))
    indexed = sum(len(folder.records) for folder in folders) >= MIN_RECORDS
    index = _Index(root, _load_index(root) if indexed else {})
    archived = Store(root).archived
    records: list[Summary] = []
    diverged: list[DivergedRun] = []
    problems: list[str] = []
    for folder in folders:
        if folder.problem:
            problems.append(folder.problem)
        records.extend(_read(folder, root, index, problems, diverged))
        diverged.extend(read_notes(folder, problems))
    if indexed and (index.added or len(index.used) < len(index.entries)):
        _save_index(root, index.used)
    problems.extend(archived.problems)
    records = drop_duplicates([*records, *map(summarize, archived.records)], problems)
    finished = {(record.config.hash, record.seed) for record in records}
    remaining = drop_finished([*diverged, *archived.diverged_runs], finished)
    return Summaries(drop_inconsistent(records, problems), problems, reasons_by_run(remaining))


@dataclass
class _Index:
    """Entries (file identity and summary) by the path of a record under the folder."""

    root: Path
    entries: dict[str, _Entry]
    used: dict[str, _Entry] = field(default_factory=dict)
    added: bool = False


@dataclass(frozen=True)
class _Entry:
    identity: tuple[int, ...]
    summary: Summary


def _read(
    folder: RunFolder, root: Path, index: _Index, problems: list[str], diverged: list[DivergedRun]
) -> Iterator[Summary]:
    store = Store(root)
    for file in folder.records:
        name = f"{folder.path.name}/{file.name}"
        try:
            identity = _identity(file.stat())
        except OSError:
            continue  # the file was removed meanwhile
        entry = index.entries.get(name)
        if entry is not None and entry.identity == identity:
            index.used[name] = entry
            yield entry.summary
            continue
        started = time.time_ns()
        try:
            item = store.load_file(Path(file.path))
        except UserError as error:
            problems.append(str(error))
            continue
        if isinstance(item, DivergedRun):
            diverged.append(item)
            continue
        summary = summarize(item)
        if started - max(identity[1:3]) > MIN_AGE_NS:
            index.used[name], index.added = _Entry(identity, summary), True
        yield summary


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _save_index(root: Path, entries: Mapping[str, _Entry]) -> None:
    """Write the index. Several processes may write it: each write is atomic, and the last one wins."""
    configs: dict[RunConfig, int] = {}
    shapes: dict[RecordShape, int] = {}
    sources: dict[str, int] = {}
    files = {}
    for name, entry in entries.items():
        one = entry.summary
        number = configs.setdefault(one.config, len(configs))
        shape = shapes.setdefault(one.shape, len(shapes))
        source = sources.setdefault(json.dumps(one.source), len(sources))
        values = (number, one.seed, one.sealed, one.multi_label, one.scores, source, shape)
        files[name] = (entry.identity, *values)
    content = {
        "code": _code(),
        "configs": [_non_default(config) for config in configs],
        "shapes": [[shape.counts, shape.drift] for shape in shapes],
        "sources": [json.loads(source) for source in sources],
        "files": files,
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    try:
        write_atomically(root / INDEX, hashlib.sha256(text).hexdigest().encode(), b"\n", text)
    except OSError:
        return  # a read-only folder has no index


def _non_default(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Settings that differ from the defaults. Validating all settings would take most of the time of `show`."""
    defaults = RunConfig().as_dict()
    groups = config.as_dict().items()
    return {
        group: {key: value for key, value in values.items() if value != defaults[group][key]}
        for group, values in groups
    }


def _load_index(root: Path) -> dict[str, _Entry]:
    """Entries of a folder's index; none if it is missing, corrupt, or written by another version of the code."""
    try:
        checksum, _, text = (root / INDEX).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != checksum:
            return {}
        content = json.loads(text)
        if content["code"] != _code():
            return {}
        configs = [from_dict(values) for values in content["configs"]]
        shapes, sources = [RecordShape(*values) for values in content["shapes"]], content["sources"]
        return {
            name: _Entry(
                tuple(identity),
                Summary(
                    configs[number], seed, sealed, labels, scores, sources[source], shapes[shape], f"{root}/{name}"
                ),
            )
            for name, (identity, number, seed, sealed, labels, scores, source, shape) in content["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, UserError):
        return {}


def _code() -> list[list[Any]]:
    """Identity of the code that makes summaries; if definitions or checks change, an old index is not used."""
    modules = (config_module, record, record_checks, matrix, multilabel)
    files = [Path(str(module.__file__)) for module in modules] + [Path(__file__)]
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
