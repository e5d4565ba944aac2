"""Export records as tables (CSV, JSON, Parquet) or as logs of TensorBoard, W&B or MLflow. Needs no torch.

There are two tables: one row per run and seed, and one row per run, task learned and task evaluated.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.bench.loggers import (
    LOGGERS,
    LoggedRun,
    Logger,
    create_logger,
    default_log_folder,
    score_metrics,
    system_metrics,
    task_metrics,
)
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix
from contnorm.bench.metrics.task_scores import rows_of
from contnorm.bench.optional_libraries import import_library
from contnorm.bench.records import DivergedRun, Record
from contnorm.bench.runs import Runs, load_runs
from contnorm.bench.selection import RunLike, no_match
from contnorm.errors import UserError, unknown, usable

__all__ = ["ExportedRuns", "export"]

Row = dict[str, Any]
_PROVENANCE = ("versions", "device", "precision", "deterministic", "convolutions", "source", "commit")
_BEFORE = -1  # ``after_task`` of accuracies before the first task


@dataclass(frozen=True, repr=False)
class ExportedRuns(Runs):
    """Runs that `export` wrote.

    Attributes:
        paths: The files of the tables, or the folder of logs.

    Example:
        >>> ExportedRuns([], paths=[Path("cn.csv"), Path("cn-accuracy.csv")]).paths[0].name
        'cn.csv'
    """

    paths: Sequence[Path] = ()


def export(
    runs: str | os.PathLike[str] | Runs,
    to: str,
    path: str | os.PathLike[str] | None = None,
    *,
    where: str | Sequence[str] = (),
    force: bool = False,
) -> ExportedRuns:
    """Export records of runs to tables or to logs.

    ``"csv"``, ``"json"`` and ``"parquet"`` write two tables. The first has one row per run and seed, with the columns
    of `Runs.to_frame`. The second, whose name ends in ``-accuracy``, has one row per task and evaluation: ``hash``,
    ``seed``, ``after_task`` (-1: before the first task), ``task`` and the scores on its test samples.

    ``"tensorboard"``, ``"wandb"`` and ``"mlflow"`` log the runs as `bench.run` does with the argument ``log``, except
    for the losses, which records do not have. Runs that are in the log already are not logged again. Records of
    versions that did not record the steps of each task have the number of learned tasks as the step.

    Args:
        runs: Path of the records, as in `load_runs`, or loaded runs.
        to: ``"csv"``, ``"json"``, ``"parquet"``, ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``.
        path: File of the first table, or folder of logs. Default: a file in the current folder, named after the runs;
            the folder that `bench.run` logs to.
        where: Conditions of the runs to export, as in `Runs.where`.
        force: Whether to replace tables of other content.

    Returns:
        The exported runs, and the paths that were written.

    Raises:
        UserError: If there is no run to export, a library is missing, or a file exists with other content.

    Example:
        >>> import tempfile
        >>> from contnorm.bench.config.schema import from_dict
        >>> matrix = AccuracyMatrix([[9, None], [6, 8]], [10, 10])
        >>> runs = Runs([Record(from_dict({"norm": {"name": "cn"}}), 0, matrix, {}, {})])
        >>> exported = export(runs, "csv", Path(tempfile.mkdtemp()) / "cn.csv")
        >>> print(exported.paths[1].read_text())
        hash,seed,after_task,task,accuracy,correct,total
        ...,0,0,0,90.0,9,10
        ...,0,1,0,60.0,6,10
        ...,0,1,1,80.0,8,10
    """
    targets = [*_FORMATS, *(name for name in LOGGERS if name != "csv")]
    if to not in targets:
        raise unknown("format", to, targets)
    name = "runs" if isinstance(runs, Runs) else _stem(Path(runs))
    every = runs if isinstance(runs, Runs) else load_runs(runs)
    conditions = [where] if isinstance(where, str) else list(where)
    content = every.where(*conditions)
    if not content.records and not content.diverged:
        items: list[RunLike] = [*every.records, *every.diverged]
        if items:
            raise UserError(no_match(items, conditions))
        reasons = f" {'; '.join(content.problems)}" if content.problems else ""
        raise UserError(f"{name}: there are no runs to export.{reasons}")
    if to in _FORMATS:
        _check_suffix(path, to)
        paths = _write_tables(content, to, Path(path or f"{name}.{to}").expanduser(), force)
    else:
        runs_folder = Path(name) if isinstance(runs, Runs) else Path(runs).with_name(name)
        folder = Path(path or default_log_folder(runs_folder)).expanduser()
        _replay(content, create_logger(to, folder), to)
        paths = [folder]
    return ExportedRuns(content.records, content.diverged, content.problems, paths)


def _check_suffix(path: str | os.PathLike[str] | None, to: str) -> None:
    """Reject a file whose name says another format than that of the table."""
    suffix = "" if path is None else Path(path).suffix.lower().removeprefix(".")
    if suffix in _FORMATS and suffix != to:
        raise UserError(f"{path}: is the name of a {suffix} file, and the format is {to}. Use a name in .{to}.")


def _stem(runs: Path) -> str:
    return runs.expanduser().resolve().name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json") or "runs"


def _write_tables(runs: Runs, to: str, path: Path, force: bool) -> list[Path]:
    as_bytes = _FORMATS[to]
    tables = {
        path: as_bytes(runs.to_rows()),
        path.with_name(f"{path.stem}-accuracy{path.suffix}"): as_bytes(
            _same_keys([row for record in runs.records for row in _accuracy_rows(record)])
        ),
    }
    for file, content in tables.items():
        with usable(file, "it can't be read", "Use another path."):
            if not force and file.exists() and (not file.is_file() or file.read_bytes() != content):
                raise UserError(f"{file}: exists with other content. Use another path, or replace it with --force.")
    for file, content in tables.items():
        with usable(file, "it can't be written", "Use another path."):
            write_atomically(file, content)
    return list(tables)


def _accuracy_rows(record: Record) -> Iterator[Row]:
    """Yield a row for each accuracy, or each set of multi-label scores, that was measured."""
    counted = record.counted
    identity = {"hash": record.hash, "seed": record.seed}
    others = {
        f"accuracy_{kind}": matrix
        for kind in ("running", "memory", "task")
        if isinstance(counted, AccuracyMatrix) and (matrix := record.matrix_of(f"matrix_{kind}")) is not None
    }
    if isinstance(counted, AccuracyMatrix) and counted.before is not None:
        for task, correct in enumerate(counted.before):
            if correct is not None:
                yield identity | {"after_task": _BEFORE, "task": task} | _counts(correct, counted.total[task])
    for after, scores in enumerate(rows_of(counted)):
        for task in range(counted.tasks):
            values = {name: by_task[task] for name, by_task in scores.by_task.items()}
            if any(value is None for value in values.values()):
                continue
            row = identity | {"after_task": after, "task": task}
            if isinstance(counted, LabelMatrix):
                stats = counted.own[after][task]
                yield row | values | {"total": None if stats is None else stats.samples}
                continue
            correct = counted.correct[after][task]
            assert correct is not None
            further = {name: matrix.at(after, task) for name, matrix in others.items()}
            yield row | _counts(correct, counted.total[task]) | further


def _counts(correct: int, total: int) -> Row:
    return {"accuracy": 100 * correct / total, "correct": correct, "total": total}


def _same_keys(rows: Sequence[Row]) -> list[Row]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def _csv_bytes(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_csv_cell(value) for value in row.values()] for row in rows)
    return text.getvalue().encode()


def _csv_cell(value: Any) -> Any:
    value = _plain(value)
    return "" if value is None else json.dumps(value) if isinstance(value, list | dict) else value


def _json_bytes(rows: Sequence[Row]) -> bytes:
    plain = [{key: _plain(value) for key, value in row.items()} for row in rows]
    return (json.dumps(plain, indent=1) + "\n").encode()


def _parquet_bytes(rows: Sequence[Row]) -> bytes:
    arrow, parquet = import_library("pyarrow", "parquet"), import_library("pyarrow.parquet", "parquet")
    columns = {key: _column([_plain(row[key]) for row in rows]) for key in (rows[0] if rows else ())}
    buffer = io.BytesIO()
    parquet.write_table(arrow.table(columns), buffer)
    return buffer.getvalue()


def _column(values: Sequence[Any]) -> list[Any]:
    """Values of one type: a column of Parquet has one, such as texts if some numbers of groups are ``auto``."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [float(value) if float in kinds and value is not None else value for value in values]
    if kinds in ({bool}, {str}):
        return list(values)
    return [None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]


def _plain(value: Any) -> Any:
    """Return None for a number that is not finite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_FORMATS: dict[str, Callable[[Sequence[Row]], bytes]] = {
    "csv": _csv_bytes,
    "json": _json_bytes,
    "parquet": _parquet_bytes,
}


def _replay(runs: Runs, logger: Logger, to: str) -> None:
    """Log records as if the runs were executed now."""
    try:
        for record in runs.records:
            _replay_record(record, logger)
        for run in runs.diverged:
            if run.config is not None:
                logged = LoggedRun.of(run.config, run.seed, _provenance(run))
                logger.start(logged)
                logger.end(logged, run.status, run.reason)
    except UserError:
        raise
    except Exception as error:  # of the library: no connection, no permission and the like
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{to}: the runs can't be logged ({reason}). What was logged before stays.") from error
    finally:
        logger.close()


def _replay_record(record: Record, logger: Logger) -> None:
    run = LoggedRun.of(record.config, record.seed, _provenance(record))
    logger.start(run)
    ends = record.task_ends
    for end, scores in zip(ends, rows_of(record.counted), strict=True):
        logger.metrics(run, end, task_metrics(scores))
    seconds = {key: value for key, value in record.raw.get("seconds", {}).items() if key in ("train", "evaluate")}
    system = system_metrics(seconds, ends[-1], record.config.train.batch, None)
    if not record.raw.get("task_ends"):  # the number of steps is unknown
        system = {name: value for name, value in system.items() if not name.endswith("_per_second")}
    logger.metrics(run, ends[-1], {**system, **score_metrics(record.scores)})
    logger.end(run, record.status)


def _provenance(item: Record | DivergedRun) -> Mapping[str, Any]:
    return {key: item.raw[key] for key in _PROVENANCE if key in item.raw}
