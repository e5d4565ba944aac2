"""Recorded runs in Python: load, select and convert to a pandas table. Needs no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contnorm.bench.archives import is_archive, write_archive
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.records import DivergedRun, Record, RecordSet, Store, is_folder_of_runs, run_folders
from contnorm.errors import UserError, unknown, usable

if TYPE_CHECKING:
    import pandas

__all__ = ["ArchivedRuns", "Runs", "archive", "load_runs"]

_IDENTITY = ("hash", "seed", "status")  # keys that are not settings
_SHORT = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "stream": "stream.name",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
}  # other short keys are names of settings without their group


def load_runs(path: str | os.PathLike[str]) -> Runs:
    """Load all records of a path.

    Args:
        path: A runs folder, an archive (``*.jsonl.gz`` or ``*.jsonl``), a folder of archives, the folder of one run,
            or a record file.

    Raises:
        UserError: If there is nothing at the path. Invalid records do not raise; see `Runs.problems`.

    Example:
        >>> load_runs("no such folder")
        Traceback (most recent call last):
        contnorm.errors.UserError: no such folder: there is no such file or folder.
    """
    return _load(Path(path).expanduser(), drop=True)


def _load(place: Path, drop: bool) -> Runs:
    """Load records; ``drop`` is False to keep those that contradict others."""
    if not place.exists():
        raise UserError(f"{place}: there is no such file or folder.")
    if is_archive(place) or is_folder_of_runs(place):
        content = Store(place).load_all(drop=drop)
    elif place.is_dir():
        content = Store(place.parent).load_folder(place)
    else:
        item = Store(place.parent.parent).load_file(place)
        content = RecordSet([item], []) if isinstance(item, Record) else RecordSet([], [], [item])
    return Runs(content.records, _with_settings(content), content.problems)


def archive(runs: str | os.PathLike[str], path: str | os.PathLike[str], force: bool = False) -> ArchivedRuns:
    """Write all records of a runs folder, finished and diverged, to one file, which is read like a folder.

    Args:
        runs: Path of the records, as in `load_runs`.
        path: The archive, ``*.jsonl.gz`` or ``*.jsonl``: one record per line, sorted by hash and seed.
        force: Whether to replace an archive of other content.

    Returns:
        The records of the archive, with `Runs.problems` of those that it lacks.

    Raises:
        UserError: If there is no valid record, or the file exists with other content.

    Example:
        >>> archive("no such folder", "runs.jsonl.gz")
        Traceback (most recent call last):
        contnorm.errors.UserError: no such folder: there is no such file or folder.
    """
    source, target = Path(runs).expanduser(), Path(path).expanduser()
    content = _load(source, drop=False)
    if not content.records and not content.diverged:
        reasons = f" {'; '.join(content.problems)}" if content.problems else ""
        raise UserError(f"{source}: has no valid records to archive.{reasons}")
    with usable(target, "it can't be written", "Use another path."):
        written = write_archive(target, [*content.records, *content.diverged], force)
    return ArchivedRuns(content.records, content.diverged, content.problems, written, _nested_folders(source))


def _nested_folders(runs: Path) -> list[Path]:
    """Folders of runs inside a folder, such as those of timed recipes."""
    folders = [folder.path for folder in run_folders(runs) if not folder.records and not folder.notes]
    return [folder for folder in folders if any(inner.records or inner.notes for inner in run_folders(folder))]


def _with_settings(content: RecordSet) -> list[DivergedRun]:
    """Diverged runs with the settings of a finished seed of the same run, if their own record has none."""
    configs = {record.hash: record.config for record in content.records}
    return [replace(run, config=run.config or configs.get(run.hash)) for run in content.diverged_runs]


@dataclass(frozen=True, repr=False)
class Runs:
    """Records of several runs and seeds. A run is identified by the hash of its settings.

    Iteration and ``len`` are over the records of finished runs.

    Attributes:
        records: Records of finished runs.
        diverged: Diverged runs, which have no scores.
        problems: One message per record, line or folder that could not be used.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> matrix = AccuracyMatrix([[9, None], [6, 8]], [10, 10])
        >>> configs = [from_dict({"norm": {"name": norm}}) for norm in ("bn", "cn")]
        >>> runs = Runs([Record(config, seed, matrix, {}, {}) for config in configs for seed in range(3)])
        >>> runs
        Runs(2 runs, 6 records, 0 diverged, 0 problems)
        >>> runs.where(norm="cn", seed=[0, 2], lr=lambda lr: lr < 0.1)
        Runs(1 runs, 2 records, 0 diverged, 0 problems)
        >>> [len(seeds) for seeds in runs.by_run().values()]
        [3, 3]
        >>> runs.to_frame().groupby("norm.name")["acc"].mean().to_dict()
        {'bn': 70.0, 'cn': 70.0}
    """

    records: Sequence[Record]
    diverged: Sequence[DivergedRun] = ()
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

    def where(self, **conditions: Any) -> Runs:
        """Select records by settings, seed, hash or status.

        Args:
            conditions: A value, a collection of allowed values (list, tuple, set, range) or a function that returns
                whether a value is allowed, by key. A key is a dotted setting such as ``train.batch``, passed as
                ``**{"train.batch": 10}``; a setting's name without its group if it is unique, such as ``lr``; one of
                ``norm``, ``strategy``, ``stream``, ``model``, ``memory`` and ``buffer``; or ``seed``, ``hash`` or
                ``status``.

        Raises:
            UserError: If a key is unknown.
        """
        tests = {_resolve_key(key): _as_test(value) for key, value in conditions.items()}
        return replace(
            self,
            records=[record for record in self.records if _matches(record, tests)],
            diverged=[run for run in self.diverged if _matches(run, tests)],
        )

    def by_run(self) -> dict[str, Runs]:
        """Group by run: the seeds of each hash, finished and diverged, in the order of their first occurrence."""
        groups: dict[str, tuple[list[Record], list[DivergedRun]]] = {}
        for record in self.records:
            groups.setdefault(record.hash, ([], []))[0].append(record)
        for run in self.diverged:
            groups.setdefault(run.hash, ([], []))[1].append(run)
        return {name: Runs(records, diverged) for name, (records, diverged) in groups.items()}

    def to_frame(self) -> pandas.DataFrame:
        """One row per run and seed, diverged ones included, as a pandas table.

        Columns: ``hash``, ``seed``, ``status``, all settings by their dotted names, all scores by name in percent,
        ``device``, ``torch`` (version) and ``seconds`` (of training). Missing values are None or NaN.

        Raises:
            UserError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_frame: needs pandas. Install it with `pip install pandas`.") from error
        rows = [*map(_row, self.records), *map(_row, self.diverged)]
        columns = dict.fromkeys([*_IDENTITY, *_setting_keys(), *(key for row in rows for key in row)])
        last = ("device", "torch", "seconds")
        ordered = [*(key for key in columns if key not in last), *last]
        return pandas.DataFrame(rows, columns=ordered)


@dataclass(frozen=True, repr=False)
class ArchivedRuns(Runs):
    """Records that `archive` wrote.

    Attributes:
        written: Whether the file was written; False if it had this content already.
        nested_folders: Other runs folders inside the folder, which are not in the archive.
    """

    written: bool = True
    nested_folders: Sequence[Path] = ()


def _setting_keys() -> list[str]:
    return list(flatten_settings(RunConfig().as_dict()))


def _resolve_key(key: str) -> str:
    """Dotted setting or identity key of a full or short key.

    Example:
        >>> [_resolve_key(key) for key in ("norm", "lr", "train.batch", "seed")]
        ['norm.name', 'train.lr', 'train.batch', 'seed']
        >>> _resolve_key("code")
        Traceback (most recent call last):
        contnorm.errors.UserError: where: 'code' is ambiguous. Use one of strategy.code, model.code.
    """
    settings = _setting_keys()
    if key in (*_IDENTITY, *settings):
        return key
    if key in _SHORT:
        return _SHORT[key]
    matches = [setting for setting in settings if setting.rpartition(".")[2] == key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"where: {key!r} is ambiguous. Use one of {', '.join(matches)}.")
    short = [setting.rpartition(".")[2] for setting in settings]
    near = _nearest(key, [*settings, *_SHORT, *short, *_IDENTITY])
    raise unknown("key", key, [*_IDENTITY, *settings], near)


def _nearest(key: str, known: Collection[str]) -> list[str]:
    return difflib.get_close_matches(key, dict.fromkeys(known), n=1, cutoff=0.6)


def _as_test(condition: Any) -> Callable[[Any], bool]:
    if callable(condition):
        return lambda value: bool(condition(value))
    if isinstance(condition, list | tuple | set | frozenset | range):
        return lambda value: value in condition
    return lambda value: bool(value == condition)


def _matches(item: Record | DivergedRun, tests: dict[str, Callable[[Any], bool]]) -> bool:
    if item.config is None and any(key not in _IDENTITY for key in tests):
        return False  # a divergence note without settings
    return all(test(_value(item, key)) for key, test in tests.items())


def _value(item: Record | DivergedRun, key: str) -> Any:
    if key in _IDENTITY:
        return getattr(item, key)
    group, _, name = key.partition(".")
    return getattr(getattr(item.config, group), name)


def _row(item: Record | DivergedRun) -> dict[str, Any]:
    settings = flatten_settings(item.config.as_dict()) if item.config is not None else {}
    scores = item.scores if isinstance(item, Record) else {}
    return {
        **{key: getattr(item, key) for key in _IDENTITY},
        **settings,
        **scores,
        "device": item.raw.get("device", {}).get("name"),
        "torch": item.raw.get("versions", {}).get("torch"),
        "seconds": item.raw.get("seconds", {}).get("train"),
    }
