"""Recorded runs in Python: load, select and convert to a pandas table. Needs no torch."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contnorm.bench.archives import archives_in, is_archive, write_archive
from contnorm.bench.config.defaults import canonical_strategy
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.memories import MEMORIES
from contnorm.bench.models import NETWORKS
from contnorm.bench.records import DivergedRun, Record, RecordSet, Store, is_folder_of_runs, run_folders
from contnorm.bench.strategies.registry import STRATEGIES
from contnorm.bench.streams.tasks import STREAMS, find_stream
from contnorm.errors import UserError, unknown, usable
from contnorm.registry import NORMS, find_norm

if TYPE_CHECKING:
    import pandas

__all__ = ["ArchivedRuns", "Runs", "archive", "load_runs"]

log = logging.getLogger("contnorm")

_IDENTITY = ("hash", "seed", "status")  # keys that are not settings
_SHORT = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "stream": "stream.name",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
}  # other short keys are names of settings without their group
_KNOWN: dict[str, Collection[str]] = {
    "norm.name": NORMS,
    "strategy.name": STRATEGIES,
    "stream.name": STREAMS,
    "model.name": NETWORKS,
    "memory.kind": MEMORIES,
}
_SHOWN = 5  # folders named in a message

Test = Callable[[Record | DivergedRun], bool]


def load_runs(path: str | os.PathLike[str]) -> Runs:
    """Load all records of a path.

    Args:
        path: A runs folder, an archive (``*.jsonl.gz`` or ``*.jsonl``), a folder of archives, the folder of one run,
            or a record file. Deeper subfolders are not read; a warning names those that have runs.

    Raises:
        UserError: If there is nothing at the path. Invalid records do not raise; see `Runs.problems`.

    Example:
        >>> load_runs("no such folder")
        Traceback (most recent call last):
        contnorm.errors.UserError: no such folder: there is no such file or folder.
    """
    place = Path(path).expanduser()
    content = _load(place, drop=True)
    nested = _nested_folders(place)
    if nested:
        names = ", ".join(folder.name for folder in nested[:_SHOWN])
        rest = f" and {len(nested) - _SHOWN} more" if len(nested) > _SHOWN else ""
        log.warning(f"{place}: runs in its subfolders are not read: {names}{rest}. Load each of them with load_runs.")
    return content


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
    """Subfolders with runs, such as those of timed recipes, that are not read with a folder."""
    reads_subfolders = is_folder_of_runs(runs)
    return [
        folder.path
        for folder in run_folders(runs)
        if (not reads_subfolders and (folder.records or folder.notes))
        or archives_in(folder.path)
        or any(inner.records or inner.notes for inner in run_folders(folder.path))
    ]


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
                ``status``. Names are understood as `bench.run` does: ``norm="cn8"`` is cn with 8 groups, ``norm="cn"``
                is cn with any number of groups, and ``strategy="der++"`` is derpp.

        Raises:
            UserError: If a key is unknown; or if a norm, strategy, stream, model or memory neither is a known name
                nor occurs in a record.
        """
        tests = [self._as_test(key, condition) for key, condition in conditions.items()]
        return replace(
            self,
            records=[record for record in self.records if _matches(record, tests)],
            diverged=[run for run in self.diverged if _matches(run, tests)],
        )

    def _as_test(self, short_key: str, condition: Any) -> Test:
        """Test of one condition of `where`."""
        key = _resolve_key(short_key)
        if callable(condition):
            return lambda item: _has(item, key) and bool(condition(_value(item, key)))
        is_collection = isinstance(condition, list | tuple | set | frozenset | range)
        if key in _KNOWN:
            values = list(condition) if is_collection else [condition]
            self._check_names(short_key, key, values)
            names = [_canonical(key, value) for value in values]
            return lambda item: _has(item, key) and any(_is_named(item, key, name) for name in names)
        if is_collection:
            return lambda item: _has(item, key) and _value(item, key) in condition
        return lambda item: _has(item, key) and bool(_value(item, key) == condition)

    def _check_names(self, short_key: str, key: str, values: Sequence[Any]) -> None:
        """Reject a name that neither is known nor occurs in a record: an empty selection would hide the mistake."""
        items: list[Record | DivergedRun] = [*self.records, *self.diverged]
        recorded = dict.fromkeys(_value(item, key) for item in items if _has(item, key))
        for value in values:
            if value not in recorded and _canonical(key, value)[0] not in _KNOWN[key]:
                names = sorted(recorded) or list(_KNOWN[key])
                near = _nearest(value, [*names, *_KNOWN[key]]) if isinstance(value, str) else []
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(f"{short_key}: no record has {value!r}.{hint} There are {', '.join(names)}.")

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
        ``device``, ``torch`` (version) and ``seconds`` (of training). Missing values are None or NaN, and so are the
        groups of a norm without groups.

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
        contnorm.errors.UserError: where: 'code' is ambiguous. Use one of strategy.code, memory.code, model.code, ...
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


def _canonical(key: str, name: Any) -> tuple[Any, int | None]:
    """Name as records have it, and the number of groups that ends the name of a norm.

    Example:
        >>> _canonical("norm.name", "CN8"), _canonical("strategy.name", "DER++"), _canonical("model.name", "my.py:Net")
        (('cn', 8), ('derpp', None), ('my.py:Net', None))
    """
    if not isinstance(name, str):
        return name, None
    if key == "strategy.name":
        return canonical_strategy(name), None
    with suppress(ValueError, UserError):  # not a name of the registry
        if key == "norm.name":
            spec, groups = find_norm(name)
            return spec.name, groups
        if key == "stream.name":
            return find_stream(name).name, None
    return name, None


def _is_named(item: Record | DivergedRun, key: str, wanted: tuple[Any, int | None]) -> bool:
    name, groups = _canonical(key, _value(item, key))
    if name != wanted[0]:
        return False
    return wanted[1] is None or wanted[1] == (groups or _value(item, "norm.groups"))


def _has(item: Record | DivergedRun, key: str) -> bool:
    """Whether an item has a value for a key: divergence notes can be without settings."""
    return key in _IDENTITY or item.config is not None


def _matches(item: Record | DivergedRun, tests: Sequence[Test]) -> bool:
    return all(test(item) for test in tests)


def _value(item: Record | DivergedRun, key: str) -> Any:
    if key in _IDENTITY:
        return getattr(item, key)
    group, _, name = key.partition(".")
    return getattr(getattr(item.config, group), name)


def _row(item: Record | DivergedRun) -> dict[str, Any]:
    settings = flatten_settings(item.config.as_dict()) if item.config is not None else {}
    if settings and _is_without_groups(settings["norm.name"]):
        settings |= {"norm.groups": None, "norm.auto_channels": None}
    scores = item.scores if isinstance(item, Record) else {}
    return {
        **{key: getattr(item, key) for key in _IDENTITY},
        **settings,
        **scores,
        "device": item.raw.get("device", {}).get("name"),
        "torch": item.raw.get("versions", {}).get("torch"),
        "seconds": item.raw.get("seconds", {}).get("train"),
    }


def _is_without_groups(norm: str) -> bool:
    name, _ = _canonical("norm.name", norm)
    return name in NORMS and not NORMS[name].grouped
