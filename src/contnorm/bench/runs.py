"""Recorded runs in Python: load, select and convert to a table, also of pandas. Needs no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contnorm.bench.archives import archives_in, is_archive, write_archive
from contnorm.bench.config.defaults import resolved_settings
from contnorm.bench.records import DivergedRun, Record, RecordSet, Store, is_folder_of_runs, run_folders
from contnorm.bench.selection import IDENTITY, RunLike, check_conditions, conditions_of, select, setting_keys
from contnorm.errors import UserError, usable

if TYPE_CHECKING:
    import pandas

__all__ = ["ArchivedRuns", "Runs", "archive", "load_runs"]

log = logging.getLogger("contnorm")

_SHOWN = 5  # folders named in a message
_LAST_COLUMNS = ("device", "torch", "seconds")


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
    return Runs.of(content)


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
        >>> runs.where("norm=bn,cn,seed<2")
        Runs(2 runs, 4 records, 0 diverged, 0 problems)
        >>> [len(seeds) for seeds in runs.by_run().values()]
        [3, 3]
        >>> runs.to_frame().groupby("norm.name")["acc"].mean().to_dict()
        {'bn': 70.0, 'cn': 70.0}
    """

    records: Sequence[Record]
    diverged: Sequence[DivergedRun] = ()
    problems: Sequence[str] = ()

    @classmethod
    def of(cls, content: RecordSet) -> Runs:
        """The runs of some records."""
        return cls(content.records, _with_settings(content), content.problems)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return (
            f"Runs({len(self.by_run())} runs, {len(self.records)} records, {len(self.diverged)} diverged, "
            f"{len(self.problems)} problems)"
        )

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
            UserError: If a key is unknown; or if a norm, strategy, stream, model or memory neither is a known name
                nor occurs in a record.
        """
        items: list[RunLike] = [*self.records, *self.diverged]
        parsed = conditions_of(selections, conditions, setting_keys(items))
        check_conditions(items, parsed)
        return replace(self, records=select(self.records, parsed), diverged=select(self.diverged, parsed))

    def by_run(self) -> dict[str, Runs]:
        """Group by run: the seeds of each hash, finished and diverged, in the order of their first occurrence."""
        groups: dict[str, tuple[list[Record], list[DivergedRun]]] = {}
        for record in self.records:
            groups.setdefault(record.hash, ([], []))[0].append(record)
        for run in self.diverged:
            groups.setdefault(run.hash, ([], []))[1].append(run)
        return {name: Runs(records, diverged) for name, (records, diverged) in groups.items()}

    def to_rows(self) -> list[dict[str, Any]]:
        """One dict per run and seed, diverged ones included, with the columns of `to_frame`; needs no pandas.

        Example:
            >>> Runs([], []).to_rows()
            []
        """
        items: list[RunLike] = [*self.records, *self.diverged]
        rows = [*map(_row, self.records), *map(_row, self.diverged)]
        columns = _columns(rows, setting_keys(items))
        return [{key: row.get(key) for key in columns} for row in rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row per run and seed, diverged ones included, as a pandas table.

        Columns: ``hash``, ``seed``, ``status``; one for each setting, by its dotted name, with the value that the run
        used; all scores by name in percent; ``device``, ``torch`` (version) and ``seconds`` (of training). A setting
        that has no value for a run, such as the groups of a norm without groups, is None or NaN, and so are missing
        scores.

        Raises:
            UserError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_frame: needs pandas. Install it with `pip install pandas`.") from error
        rows = self.to_rows()
        return pandas.DataFrame(rows, columns=list(rows[0]) if rows else _columns([], setting_keys()))


@dataclass(frozen=True, repr=False)
class ArchivedRuns(Runs):
    """Records that `archive` wrote.

    Attributes:
        written: Whether the file was written; False if it had this content already.
        nested_folders: Other runs folders inside the folder, which are not in the archive.

    Example:
        >>> ArchivedRuns([], written=True).written
        True
    """

    written: bool = True
    nested_folders: Sequence[Path] = ()


def _columns(rows: Sequence[dict[str, Any]], settings: Sequence[str]) -> list[str]:
    """Names of columns in order: identity, settings, scores, then device, version and time."""
    columns = dict.fromkeys([*IDENTITY, *settings, *(key for row in rows for key in row)])
    return [*(key for key in columns if key not in _LAST_COLUMNS), *_LAST_COLUMNS]


def _row(item: Record | DivergedRun) -> dict[str, Any]:
    settings = resolved_settings(item.config) if item.config is not None else {}
    scores = item.scores if isinstance(item, Record) else {}
    return {
        **{key: getattr(item, key) for key in IDENTITY},
        **settings,
        **scores,
        "device": item.raw.get("device", {}).get("name"),
        "torch": item.raw.get("versions", {}).get("torch"),
        "seconds": item.raw.get("seconds", {}).get("train"),
    }
