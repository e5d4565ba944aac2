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

from contnorm.bench.data.multilabel import GROUPS, groups_by_count
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed, ListedPicture
from contnorm.bench.data.safe_paths import path_inside
from contnorm.errors import UserError, unknown, usable

__all__ = ["list_own"]

FIRST = ("image", "split", "task")
JOINED = "labels"
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}")
Row = Mapping[str, str]


def list_own(name: str, table: Path, images: Path, groups: Path | None = None) -> Listed:
    """List the pictures of a CSV file.

    Args:
        name: Name of the data set.
        table: CSV file.
        images: Folder that its paths are relative to.
        groups: CSV file with the columns ``class`` and ``group``; None to group classes by their number of training
            pictures.
    """
    if not images.is_dir():
        raise UserError(f"--images {images}: is no folder. Give the one that the paths of {table} begin in.")
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
        with usable(path, "it can't be looked for", f"Mend line {line} of {table}, or let yourself read there."):
            existing = path if path.is_file() else None
        pictures[row["split"]].append(ListedPicture(row["image"], existing, tasks.index(row["task"]), labels))
    for split in SPLITS:
        pictures[split].sort(key=lambda picture: picture.task)  # stable: keeps the order of the rows within a task
    counts = [sum(column in picture.labels for picture in pictures["train"]) for column in range(len(classes))]
    class_groups = groups_by_count(counts) if groups is None else _groups(groups, classes)
    return Listed(name, tuple(classes), class_groups, tuple(tasks), tuple(pictures["train"]), tuple(pictures["test"]))


def _read(table: Path) -> tuple[dict[int, Row], list[str]]:
    """Return the rows by the number of their last line, and the names of the columns."""
    rows: dict[int, Row] = {}
    with usable(table, "it can't be read", "Say which file it is."):
        try:
            with table.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, restkey="", strict=True)
                reader.fieldnames = columns = [_text(column) for column in reader.fieldnames or []]
                for row in reader:
                    _check_cells(table, reader.line_num, row)
                    rows[reader.line_num] = {key: _cell(key, value) for key, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{table}: is no CSV file in UTF-8 ({error}).") from error
    _check_printable(table, rows, columns)
    if "" in columns:
        raise UserError(
            f"{table}: column {columns.index('') + 1} of {len(columns)} has no name in the first line. Name it, or "
            f"leave it out (with pandas, to_csv(index=False))."
        )
    duplicates = [column for column, count in Counter(columns).items() if count > 1]
    if duplicates:
        raise UserError(f"{table}: has the column {duplicates[0]!r} more than once. Name each column in its own way.")
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
    absent = [column for column, value in row.items() if value is None]
    if absent:
        raise UserError(
            f"{table}, line {line}: has no cell for the column {absent[0]!r}. Give each row as many cells as the first "
            f"line has names; a cell may be empty."
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
    absent = [column for column in FIRST if column not in columns]
    if absent:
        raise UserError(
            f"{table}: has no column {absent[0]!r}. Its first line should be image,split,task,labels; or "
            f"image,split,task and a column for each class. It is: {', '.join(columns)}."
        )
    for line, row in rows.items():
        if row.get(""):
            raise UserError(f"{table}, line {line}: has more cells than the first line has names: {row['']!r}.")
        if row["split"] not in SPLITS:
            raise UserError(f"{table}, line {line}: split is {row['split']!r}. Use train or test.")
        if not row["image"] or not row["task"]:
            raise UserError(f"{table}, line {line}: has no {'task' if row['image'] else 'image'}. Give each row one.")
    return rows, columns


def _classes(table: Path, rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the classes: the other columns in their order, or all names in the column of labels, sorted."""
    others = [column for column in columns if column not in FIRST]
    if JOINED not in others:
        classes = others
    elif len(others) == 1:
        classes = sorted({label for row in rows for label in _names(row)})
    else:
        raise UserError(f"{table}: has a column {JOINED!r} and others: {', '.join(others)}. Use one or the others.")
    if not rows:
        raise UserError(f"{table}: lists no picture. Give it a row for each, below the first line.")
    if not classes:
        raise UserError(f"{table}: has no labels. Give it a column 'labels', or a column for each class.")
    return classes


def _names(row: Row) -> list[str]:
    return [label.strip() for label in row[JOINED].split(";") if label.strip()]


def _labels(table: Path, line: int, row: Row, classes: Sequence[str]) -> tuple[int, ...]:
    if JOINED in row:
        return tuple(sorted({classes.index(label) for label in _names(row)}))
    for name in classes:
        if row[name] not in ("0", "1"):
            raise UserError(f"{table}, line {line}: {name} is {row[name]!r}. Use 0 or 1.")
    return tuple(column for column, name in enumerate(classes) if row[name] == "1")


def _tasks(table: Path, rows: Sequence[Row]) -> list[str]:
    """Return the tasks in the order of training: by number if all are integers, otherwise by first occurrence."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not all(map(WHOLE_NUMBER.fullmatch, tasks)):
        return tasks
    spelling: dict[int, str] = {}
    for task in tasks:
        if spelling.setdefault(int(task), task) != task:
            raise UserError(f"{table}: task {spelling[int(task)]!r} is also written {task!r}. Write it in one way.")
    return sorted(tasks, key=int)


def _groups(path: Path, classes: Sequence[str]) -> tuple[str, ...]:
    rows, columns = _read(path)
    if not {"class", "group"} <= set(columns):
        raise UserError(f"{path}: its first line should be class,group, and is {','.join(columns)}.")
    group_of: dict[str, str] = {}
    for line, row in rows.items():
        if group_of.setdefault(row["class"], row["group"]) != row["group"]:
            raise UserError(
                f"{path}, line {line}: class {row['class']!r} is {row['group']!r}, and before "
                f"{group_of[row['class']]!r}. Give each class one group."
            )
    absent = [name for name in classes if name not in group_of]
    if absent:
        raise UserError(f"{path}: has no group of class {absent[0]!r}. Give each class one of {', '.join(GROUPS)}.")
    wrong = [name for name in classes if group_of[name] not in GROUPS]
    if wrong:
        raise unknown(f"group of class {wrong[0]!r} in {path}:", group_of[wrong[0]], GROUPS)
    return tuple(group_of[name] for name in classes)
