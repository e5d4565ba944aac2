"""A user's multi-label data set: a CSV file and a folder of pictures.

The CSV file has one row per picture, with the columns ``image``, ``split`` (train or test) and ``task``. Labels are
either in one column ``labels``, with names separated by semicolons, or in one column per class, with 0 and 1.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from contnorm.bench.data.dataset import GROUPS, SPLITS, DatasetListing, ListedPicture, groups_by_count
from contnorm.bench.files import path_inside
from contnorm.errors import UserError, unknown, usable

__all__ = ["list_csv"]

REQUIRED_COLUMNS = ("image", "split", "task")
LABELS_COLUMN = "labels"
INTEGER = re.compile(r"[+-]?\d{1,18}")
Row = Mapping[str, str]


def list_csv(name: str, table: Path, images: Path, groups: Path | None = None) -> DatasetListing:
    """List the pictures of a CSV file.

    Args:
        name: Name of the data set.
        table: CSV file.
        images: Folder that its paths are relative to.
        groups: CSV file with the columns ``class`` and ``group``; None to group classes by their number of training
            pictures.
    """
    if not images.is_dir():
        raise UserError(
            f"--images {images}: is not a folder. Use the folder that the paths in {table} are relative to."
        )
    numbered, columns = _rows(table)
    rows = list(numbered.values())
    classes = _classes(table, rows, columns)
    tasks = _tasks(table, rows)
    pictures: dict[str, list[ListedPicture]] = {split: [] for split in SPLITS}
    for line, row in numbered.items():
        labels = _labels(table, line, row, classes)
        path = path_inside(images, row["image"])
        if path is None:
            raise UserError(
                f"{table}, line {line}: image is {row['image']!r}. Use a path below {images}, relative to it and "
                f"without '..'."
            )
        with usable(path, "cannot be read", f"Check line {line} of {table} and the permissions of the folder."):
            existing = path if path.is_file() else None
        pictures[row["split"]].append(ListedPicture(row["image"], existing, tasks.index(row["task"]), labels))
    for split in SPLITS:
        pictures[split].sort(key=lambda picture: picture.task)  # stable: keeps the order of the rows within a task
    counts = [sum(column in picture.labels for picture in pictures["train"]) for column in range(len(classes))]
    class_groups = groups_by_count(counts) if groups is None else _groups(groups, classes)
    return DatasetListing(
        name, tuple(classes), class_groups, tuple(tasks), tuple(pictures["train"]), tuple(pictures["test"])
    )


def _read(table: Path) -> tuple[dict[int, Row], list[str]]:
    """Return the rows by the number of their last line, and the names of the columns."""
    rows: dict[int, Row] = {}
    with usable(table, "cannot be read", "Check the path and the permissions."):
        try:
            with table.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, restkey="", strict=True)
                reader.fieldnames = columns = [_text(column) for column in reader.fieldnames or []]
                for row in reader:
                    _check_cells(table, reader.line_num, row)
                    rows[reader.line_num] = {key: _cell(key, value) for key, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{table}: is not a CSV file in UTF-8 ({error}).") from error
    _check_printable(table, rows, columns)
    if "" in columns:
        raise UserError(
            f"{table}: column {columns.index('') + 1} of {len(columns)} has no name in the first line. Name it or "
            f"remove it (with pandas, to_csv(index=False))."
        )
    duplicates = [column for column, count in Counter(columns).items() if count > 1]
    if duplicates:
        raise UserError(f"{table}: has the column {duplicates[0]!r} more than once. Use different column names.")
    return rows, columns


def _check_printable(table: Path, rows: Mapping[int, Row], columns: Sequence[str]) -> None:
    """Raise an error for control characters: names appear in tables and messages, so they must be a single line."""
    unusable = [column for column in columns if not column.isprintable()]
    if unusable:
        raise UserError(f"{table}: the column name {unusable[0][:80]!r} has a control character. Remove it.")
    for line, row in rows.items():
        unusable = [cell for cell in row.values() if not cell.isprintable()]
        if unusable:
            raise UserError(f"{table}, line {line}: {unusable[0][:80]!r} has a control character. Remove it.")


def _check_cells(table: Path, line: int, row: Mapping[str, str | list[str] | None]) -> None:
    """Raise an error for a truncated row: without its last cell, a picture would be read as unlabelled."""
    missing = [column for column, value in row.items() if value is None]
    if missing:
        raise UserError(
            f"{table}, line {line}: has no cell for the column {missing[0]!r}. Each row needs as many cells as the "
            f"first line; a cell can be empty."
        )


def _cell(column: str, value: str | list[str]) -> str:
    """Return the text of a cell. File names are not normalized: most file systems distinguish Unicode forms."""
    if isinstance(value, list):
        return ",".join(value)
    return value.strip() if column == "image" else _text(value)


def _text(value: str) -> str:
    """Normalize a name to composed Unicode (NFC), so that two encodings of a word are the same class."""
    return unicodedata.normalize("NFC", value.strip())


def _rows(table: Path) -> tuple[dict[int, Row], list[str]]:
    rows, columns = _read(table)
    missing = [column for column in REQUIRED_COLUMNS if column not in columns]
    if missing:
        raise UserError(
            f"{table}: has no column {missing[0]!r}, only {', '.join(columns)}. The first line must be "
            f"image,split,task,labels, or image,split,task and a column per class."
        )
    for line, row in rows.items():
        if row.get(""):
            raise UserError(f"{table}, line {line}: has more cells than the first line: {row['']!r}.")
        if row["split"] not in SPLITS:
            raise UserError(f"{table}, line {line}: split is {row['split']!r}. Use train or test.")
        if not row["image"] or not row["task"]:
            raise UserError(f"{table}, line {line}: has no {'task' if row['image'] else 'image'}. Each row needs one.")
    return rows, columns


def _classes(table: Path, rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the classes: the other columns in their order, or all names in the column of labels, sorted."""
    others = [column for column in columns if column not in REQUIRED_COLUMNS]
    if LABELS_COLUMN not in others:
        classes = others
    elif len(others) == 1:
        classes = sorted({label for row in rows for label in _names(row)})
    else:
        raise UserError(
            f"{table}: has a column {LABELS_COLUMN!r} and others: {', '.join(others)}. Use either {LABELS_COLUMN!r} "
            f"or a column per class."
        )
    if not rows:
        raise UserError(f"{table}: has no rows. Add a row per picture after the first line.")
    if not classes:
        raise UserError(f"{table}: has no labels. Add a column 'labels', or a column per class.")
    return classes


def _names(row: Row) -> list[str]:
    return [label.strip() for label in row[LABELS_COLUMN].split(";") if label.strip()]


def _labels(table: Path, line: int, row: Row, classes: Sequence[str]) -> tuple[int, ...]:
    if LABELS_COLUMN in row:
        return tuple(sorted({classes.index(label) for label in _names(row)}))
    for name in classes:
        if row[name] not in ("0", "1"):
            raise UserError(f"{table}, line {line}: {name} is {row[name]!r}. Use 0 or 1.")
    return tuple(column for column, name in enumerate(classes) if row[name] == "1")


def _tasks(table: Path, rows: Sequence[Row]) -> list[str]:
    """Return the tasks in the order of training: by number if all are integers, otherwise by first occurrence."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not all(map(INTEGER.fullmatch, tasks)):
        return tasks
    spelling: dict[int, str] = {}
    for task in tasks:
        if spelling.setdefault(int(task), task) != task:
            raise UserError(f"{table}: task {spelling[int(task)]!r} is also written as {task!r}. Use one spelling.")
    return sorted(tasks, key=int)


def _groups(path: Path, classes: Sequence[str]) -> tuple[str, ...]:
    rows, columns = _read(path)
    if not {"class", "group"} <= set(columns):
        raise UserError(f"{path}: the first line is {','.join(columns)}, but must be class,group.")
    group_of: dict[str, str] = {}
    for line, row in rows.items():
        if group_of.setdefault(row["class"], row["group"]) != row["group"]:
            raise UserError(
                f"{path}, line {line}: class {row['class']!r} has group {row['group']!r}, but an earlier line has "
                f"{group_of[row['class']]!r}. Use one group per class."
            )
    missing = [name for name in classes if name not in group_of]
    if missing:
        raise UserError(f"{path}: has no group of class {missing[0]!r}. Use one of {', '.join(GROUPS)} for each class.")
    wrong = [name for name in classes if group_of[name] not in GROUPS]
    if wrong:
        raise unknown(f"group of class {wrong[0]!r} in {path}:", group_of[wrong[0]], GROUPS)
    return tuple(group_of[name] for name in classes)
