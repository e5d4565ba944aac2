"""Columns of runs that the user chooses, their order, and CSV and JSON with one column per setting. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console

from contnorm.bench.config.defaults import run_names
from contnorm.bench.config.sources import format_value
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record, group_by_run
from contnorm.bench.runs import Runs
from contnorm.bench.selection import IDENTITY, SHORT_KEYS, nearest, resolve_key, setting_keys, value_of
from contnorm.cli.tables import print_table
from contnorm.errors import UserError
from contnorm.paper.format import spread
from contnorm.report.text_tables import csv_text

__all__ = ["FORMATS", "format_rows", "show_columns", "sort_runs"]

FORMATS = ("table", "csv", "json")
ENVIRONMENT = ("device", "torch", "seconds")
_ALL_SCORES = (*SCORES, *(name for name in LABEL_SCORES if name not in SCORES))


@dataclass(frozen=True)
class _Column:
    """A column: its heading, and the key of a row of `Runs.to_rows`, or ``"seeds"``."""

    title: str
    key: str

    @property
    def is_number(self) -> bool:
        """Whether the table shows mean and standard deviation over seeds."""
        return self.key in _ALL_SCORES or self.key == "seconds"


def _find_column(name: str, keys: Sequence[str], option: str) -> _Column:
    """Column of a typed name: a score, a setting, or a part of a run's identity or environment."""
    if name in ("run", *IDENTITY):
        return _Column(name, "hash" if name == "run" else name)
    if name in (*_ALL_SCORES, *ENVIRONMENT, "seeds"):
        return _Column(name, name)
    try:
        return _Column(name, resolve_key(name, keys))
    except UserError as error:
        if "ambiguous" in str(error):
            raise UserError(f"{option}: {error}") from error
    short = [key.rpartition(".")[2] for key in keys]
    near = nearest(name, [*_ALL_SCORES, *SHORT_KEYS, *short, *keys, "run", "seeds", *ENVIRONMENT])
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{option}: unknown column {name!r}.{hint} Use scores ({', '.join(_ALL_SCORES)}), settings (norm, lr, "
        f"train.batch, ...), run, seeds, {', '.join(ENVIRONMENT)}."
    )


def _find_columns(text: str, runs: Runs, option: str) -> list[_Column]:
    keys = setting_keys(runs.records)
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UserError(f"{option} {text!r}: a name is missing. Separate names by commas, such as norm,lr,acc.")
    columns = [_find_column(name, keys, option) for name in names]
    scores = dict.fromkeys(name for record in runs.records for name in (LABEL_SCORES if record.multi_label else SCORES))
    for column in columns:
        if column.key in _ALL_SCORES and column.key not in scores:
            known = f"There are {', '.join(scores)}." if scores else "All of them diverged."
            raise UserError(f"{option}: no selected run has the score {column.title!r}. {known}")
    return columns


def sort_runs(runs: Runs, by: str, reverse: bool = False) -> Runs:
    """Order runs by scores (the mean over seeds, best first) and settings (ascending); missing values are last.

    Args:
        runs: Runs of any number of experiments; all seeds of one stay together.
        by: Names of scores and settings, separated by commas; the first one decides first.
        reverse: Whether to reverse the order.
    """
    columns = _find_columns(by, runs, "--sort")
    groups = list(group_by_run(runs.records).values())
    for column in reversed(columns):
        values = [_sort_value(group, column) for group in groups]
        present = [(value, group) for value, group in zip(values, groups, strict=True) if value is not None]
        missing = [group for value, group in zip(values, groups, strict=True) if value is None]
        descending = (_is_higher_better(column.key)) != reverse
        present.sort(key=lambda entry: _order(entry[0]), reverse=descending)
        groups = [*(group for _, group in present), *missing]
    return replace(runs, records=[record for group in groups for record in group])


def _is_higher_better(key: str) -> bool:
    """Whether a larger value comes first: all scores but forgetting.

    Example:
        >>> [_is_higher_better(key) for key in ("acc", "bwt", "fm", "fm_map", "train.lr")]
        [True, True, False, False, False]
    """
    return key in _ALL_SCORES and not key.startswith("fm")


def _sort_value(group: Sequence[Record], column: _Column) -> Any:
    if column.key == "seeds":
        return len(group)
    if column.is_number or column.key in ENVIRONMENT:
        rows = Runs(group).to_rows()
        values = [row.get(column.key) for row in rows]
        if not column.is_number:
            return values[0]
        known = [value for value in values if value is not None and not math.isnan(value)]
        return fmean(known) if known else None
    return value_of(group[0], column.key)


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers before text, such as groups of 8 before auto."""
    return isinstance(value, str), value


def show_columns(runs: Runs, names: str, console: Console) -> None:
    """Print a table of chosen columns, one row per experiment; scores are mean and standard deviation over seeds."""
    columns = _find_columns(names, runs, "--columns")
    rows = [_cells(group, columns) for group in group_by_run(runs.records).values()]
    print_table([column.title for column in columns], rows, console)


def _cells(group: Sequence[Record], columns: Sequence[_Column]) -> list[str]:
    rows = Runs(group).to_rows()
    labels = dict(zip(("stream", "strategy", "norm"), run_names(group[0].config), strict=True))
    cells = []
    for column in columns:
        values = [row.get(column.key) for row in rows]
        if column.title in labels:
            cells.append(labels[column.title])  # with the source of the data, and the groups of the norm
        elif column.key == "seeds":
            cells.append(str(len(group)))
        elif column.is_number:
            cells.append(spread([math.nan if value is None else value for value in values]))
        else:
            cells.append(", ".join(dict.fromkeys(map(format_value, values))))
    return cells


def format_rows(runs: Runs, names: str | None, form: str) -> str:
    """CSV or JSON with one row per run and seed, diverged ones last; one column per setting with its resolved value.

    Args:
        runs: The runs.
        names: Columns, separated by commas; None for all.
        form: ``"csv"`` or ``"json"``.
    """
    rows = runs.to_rows()
    keys = list(rows[0]) if rows else []
    if names is not None:
        columns = _find_columns(names, runs, "--columns")
        if any(column.key == "seeds" for column in columns):
            raise UserError(
                "--columns: seeds counts the rows of a table; csv and json have one row per seed. Use seed."
            )
        keys = list(dict.fromkeys(column.key for column in columns))
    plain = [[_plain(row.get(key)) for key in keys] for row in rows]
    if form == "csv":
        return csv_text(keys, [["" if value is None else value for value in row] for row in plain])
    return _json_lines(dict(zip(keys, row, strict=True)) for row in plain)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A JSON array with one object per line."""
    return "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
