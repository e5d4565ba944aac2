"""Summaries of records: the scores that tables show, without the counts they are made of.

The summaries of a folder of many runs are kept in an index, ``.index.json`` in that folder, so that showing thousands
of runs reads one file. An entry counts only while its record's size, times and inode are what they were; other records
are read again. The index is a cache: it can be deleted, and a folder that can't be written to has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contnorm.bench import record_checks
from contnorm.bench import records as results
from contnorm.bench.config import schema as config_module
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.data.multilabel import GROUPS
from contnorm.bench.metrics import accuracy_matrix as matrix
from contnorm.bench.metrics import label_stats, multilabel
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.bench.metrics.multilabel import label_score
from contnorm.bench.records import (
    Layout,
    Record,
    RunFolder,
    Store,
    distinct,
    diverged_seeds,
    fitting,
    is_folder_of_runs,
    none_finished,
    run_folders,
    write_atomically,
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

SCORES_SHOWN = ("acc", "fm", "la")
LABEL_SCORES_SHOWN = ("c_f1", "o_f1", "map", "fm_c_f1", "fm_o_f1", "fm_map")
GROUPS_SHOWN = ("overall", *GROUPS)
INDEX = ".index.json"
FEWEST = 500  # records of a folder that gets an index; fewer are read in no time
SETTLED = 2 * 10**9  # nanoseconds: a file changed within the clock's step of its last change would look unchanged

Scores = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Summary:
    """What a table shows of a record.

    Attributes:
        scores: By the moments the network was evaluated with, then by the group of labels, which is empty where images
            have one label: the values of `SCORES_SHOWN` or of `LABEL_SCORES_SHOWN`.
        source: What the record says of its data set.
    """

    config: RunConfig
    seed: int
    sealed: bool
    several_labels: bool
    scores: Scores
    source: Mapping[str, Any]
    layout: Layout
    file: str = ""

    @property
    def outcome(self) -> str:
        """The scores as text: equal for copies of a record."""
        return repr(self.scores)

    @property
    def raw(self) -> Mapping[str, Any]:
        """What a summary has of its record's file."""
        return {"source": self.source}

    @property
    def path(self) -> Path | None:
        """Where the record is."""
        return Path(self.file) if self.file else None


@dataclass(frozen=True)
class Summaries:
    """The summaries of some records, what is wrong with records that can't be read, and the seeds that diverged."""

    records: list[Summary]
    problems: list[str]
    lost: dict[str, dict[int, str]] = field(default_factory=dict)


def summarize(record: Record) -> Summary:
    """The summary of a record.

    Example:
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> summarize(Record(RunConfig(), 0, AccuracyMatrix([[9, None], [6, 8]], [10, 10]), {}, {})).scores
        {'running': {'': [70.0, 30.0, 85.0]}}
    """
    scores = dict(_label_scores(record) if record.several_labels else _accuracy_scores(record))
    labels, source, file = record.several_labels, record.raw.get("source", {}), str(record.path or "")
    return Summary(record.config, record.seed, record.sealed, labels, scores, source, record.layout, file)


def _accuracy_scores(record: Record) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for moments, counts in record.evaluated.items():
        yield moments, {"": [score(counts, name) for name in SCORES_SHOWN]}


def _label_scores(record: Record) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for key, moments in (("labels_running", "running"), ("labels", record.config.evaluate.moments)):
        counts = record.labels_of(key)
        if counts is not None:
            classes = {group: record.classes_of(group) for group in GROUPS_SHOWN}
            yield (
                moments,
                {
                    group: [label_score(counts, name, some) for name in LABEL_SCORES_SHOWN]
                    for group, some in classes.items()
                },
            )


def find_summaries(store: Store, given: str) -> Summaries:
    """The summaries of what `Store.search` finds."""
    path = Path(given)
    if not is_folder_of_runs(path):
        found = store.search(given)
        return Summaries(list(map(summarize, found.records)), found.problems, found.lost)
    many = summaries_under(path)
    if not many.records and not many.problems:
        raise none_finished(given, store.root, many.lost)
    return many


def summaries_under(root: Path) -> Summaries:
    """The summaries of all records under a folder of runs, from its index where a record is unchanged.

    Example:
        >>> summaries_under(Path("no such folder")).records
        []
    """
    folders = list(run_folders(root))
    many = sum(len(folder.records) for folder in folders) >= FEWEST
    index = _Index(root, _load_index(root) if many else {})
    found = Summaries([], [])
    for folder in folders:
        if folder.problem:
            found.problems.append(folder.problem)
        found.records.extend(fitting(list(_read(folder, root, index, found.problems)), found.problems))
        if lost := diverged_seeds(folder, found.problems):
            found.lost[folder.path.resolve().name] = lost
    if many and (index.added or len(index.used) < len(index.entries)):
        _save_index(root, index.used)
    return replace(found, records=distinct(found.records, found.problems))


@dataclass
class _Index:
    """Entries by the path of a record under the folder: what identifies the file, and its summary."""

    root: Path
    entries: dict[str, _Entry]
    used: dict[str, _Entry] = field(default_factory=dict)
    added: bool = False


@dataclass(frozen=True)
class _Entry:
    identity: tuple[int, ...]
    summary: Summary


def _read(folder: RunFolder, root: Path, index: _Index, problems: list[str]) -> Iterator[Summary]:
    store = Store(root)
    for file in folder.records:
        name = f"{folder.path.name}/{file.name}"
        try:
            identity = _identity(file.stat())
        except OSError:
            continue  # it was removed meanwhile
        known = index.entries.get(name)
        if known is not None and known.identity == identity:
            index.used[name] = known
            yield known.summary
            continue
        started = time.time_ns()
        try:
            summary = summarize(store.load(Path(file.path)))
        except UserError as error:
            problems.append(str(error))
            continue
        if started - max(identity[1:3]) > SETTLED:
            index.used[name], index.added = _Entry(identity, summary), True
        yield summary


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _save_index(root: Path, entries: Mapping[str, _Entry]) -> None:
    """Several processes may write it: each writes a whole one, and the last stays."""
    configs: dict[RunConfig, int] = {}
    layouts: dict[Layout, int] = {}
    sources: dict[str, int] = {}
    files = {}
    for name, entry in entries.items():
        one = entry.summary
        number = configs.setdefault(one.config, len(configs))
        layout = layouts.setdefault(one.layout, len(layouts))
        source = sources.setdefault(json.dumps(one.source), len(sources))
        values = (number, one.seed, one.sealed, one.several_labels, one.scores, source, layout)
        files[name] = (entry.identity, *values)
    content = {
        "code": _code(),
        "configs": [_unusual(config) for config in configs],
        "layouts": [[layout.counts, layout.drift] for layout in layouts],
        "sources": [json.loads(source) for source in sources],
        "files": files,
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    try:
        write_atomically(root / INDEX, hashlib.sha256(text).hexdigest().encode(), b"\n", text)
    except OSError:
        return  # a folder that can't be written to has no index


def _unusual(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings that differ from the defaults; checking all of them would take most of the time of `show`."""
    usual = RunConfig().as_dict()
    groups = config.as_dict().items()
    return {
        group: {key: value for key, value in values.items() if value != usual[group][key]} for group, values in groups
    }


def _load_index(root: Path) -> dict[str, _Entry]:
    """The entries of a folder's index; none where it is missing, broken, or made by other code than this."""
    try:
        checksum, _, text = (root / INDEX).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != checksum:
            return {}
        content = json.loads(text)
        if content["code"] != _code():
            return {}
        configs = [from_dict(values) for values in content["configs"]]
        layouts, sources = [Layout(*values) for values in content["layouts"]], content["sources"]
        return {
            name: _Entry(
                tuple(identity),
                Summary(
                    configs[number], seed, sealed, labels, scores, sources[source], layouts[layout], f"{root}/{name}"
                ),
            )
            for name, (identity, number, seed, sealed, labels, scores, source, layout) in content["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, UserError):
        return {}


def _code() -> list[list[Any]]:
    """Which version of the code makes summaries: with other definitions or checks, an old index does not count."""
    modules = (config_module, record_checks, results, label_stats, matrix, multilabel)
    files = [Path(str(module.__file__)) for module in modules] + [Path(__file__)]
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
