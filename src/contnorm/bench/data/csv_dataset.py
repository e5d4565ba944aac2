"""A data set of one's own whose pictures have several labels: one CSV file, and the folder of the pictures.

A row a picture, with the columns ``image``, ``split`` (train or test) and ``task``, and the labels: either one column
``labels``, with names between semicolons, or a column a class, with 0 and 1.
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
    """What a CSV file lists.

    Args:
        name: What the data set is to be called.
        table: The CSV file.
        images: The folder that its paths begin in.
        groups: A CSV file with the columns ``class`` and ``group``; by the number of training pictures without it.
    """
    if not images.is_dir():
        raise UserError(f"--images {images}: is no folder. Give the one that the paths of {table} begin in.")
    numbered, heads = _rows(table)
    rows = list(numbered.values())
    kinds = _kinds(table, rows, heads)
    tasks = _tasks(table, rows)
    pictures: dict[str, list[ListedPicture]] = {split: [] for split in SPLITS}
    for line, row in numbered.items():
        labels = _labels(table, line, row, kinds)
        path = path_inside(images, row["image"])
        if path is None:
            raise UserError(
                f"{table}, line {line}: image is {row['image']!r}. Use a path below {images}, relative to it and "
                f"without '..'."
            )
        with usable(path, "it can't be looked for", f"Mend line {line} of {table}, or let yourself read there."):
            there = path if path.is_file() else None
        pictures[row["split"]].append(ListedPicture(row["image"], there, tasks.index(row["task"]), labels))
    for split in SPLITS:
        pictures[split].sort(key=lambda picture: picture.task)  # stable: in the order of the rows within a task
    counts = [sum(column in picture.labels for picture in pictures["train"]) for column in range(len(kinds))]
    given = groups_by_count(counts) if groups is None else _groups(groups, kinds)
    return Listed(name, tuple(kinds), given, tuple(tasks), tuple(pictures["train"]), tuple(pictures["test"]))


def _read(table: Path) -> tuple[dict[int, Row], list[str]]:
    """The rows by the line each ends in, and the heads of the columns."""
    rows: dict[int, Row] = {}
    with usable(table, "it can't be read", "Say which file it is."):
        try:
            with table.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, restkey="", strict=True)
                reader.fieldnames = heads = [_text(head) for head in reader.fieldnames or []]
                for row in reader:
                    _check_cells(table, reader.line_num, row)
                    rows[reader.line_num] = {key: _cell(key, value) for key, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{table}: is no CSV file in UTF-8 ({error}).") from error
    _check_printable(table, rows, heads)
    if "" in heads:
        raise UserError(
            f"{table}: column {heads.index('') + 1} of {len(heads)} has no name in the first line. Name it, or leave "
            f"it out (with pandas, to_csv(index=False))."
        )
    twice = [head for head, count in Counter(heads).items() if count > 1]
    if twice:
        raise UserError(f"{table}: has the column {twice[0]!r} more than once. Name each column in its own way.")
    return rows, heads


def _check_printable(table: Path, rows: Mapping[int, Row], heads: Sequence[str]) -> None:
    """Names of columns, pictures, tasks, classes and groups appear in tables and messages, so they must be one line."""
    unusable = [head for head in heads if not head.isprintable()]
    if unusable:
        raise UserError(f"{table}: the column name {unusable[0][:80]!r} has a control character. Remove it.")
    for line, row in rows.items():
        unusable = [cell for cell in row.values() if not cell.isprintable()]
        if unusable:
            raise UserError(f"{table}, line {line}: {unusable[0][:80]!r} has a control character. Remove it.")


def _check_cells(table: Path, line: int, row: Mapping[str, str | list[str] | None]) -> None:
    """Refuse a row that was cut short: without its last cell, a picture would count as one without labels."""
    absent = [head for head, value in row.items() if value is None]
    if absent:
        raise UserError(
            f"{table}, line {line}: has no cell for the column {absent[0]!r}. Give each row as many cells as the first "
            f"line has names; a cell may be empty."
        )


def _cell(head: str, value: str | list[str]) -> str:
    """The text of a cell. Names of files stay as they are: most file systems tell composed letters from others."""
    if isinstance(value, list):
        return ",".join(value)
    return value.strip() if head == "image" else _text(value)


def _text(value: str) -> str:
    """A name, with composed letters: the same word in two encodings of its letters is one class, not two."""
    return unicodedata.normalize("NFC", value.strip())


def _rows(table: Path) -> tuple[dict[int, Row], list[str]]:
    rows, heads = _read(table)
    absent = [head for head in FIRST if head not in heads]
    if absent:
        raise UserError(
            f"{table}: has no column {absent[0]!r}. Its first line should be image,split,task,labels; or "
            f"image,split,task and a column for each class. It is: {', '.join(heads)}."
        )
    for line, row in rows.items():
        if row.get(""):
            raise UserError(f"{table}, line {line}: has more cells than the first line has names: {row['']!r}.")
        if row["split"] not in SPLITS:
            raise UserError(f"{table}, line {line}: split is {row['split']!r}. Use train or test.")
        if not row["image"] or not row["task"]:
            raise UserError(f"{table}, line {line}: has no {'task' if row['image'] else 'image'}. Give each row one.")
    return rows, heads


def _kinds(table: Path, rows: Sequence[Row], heads: Sequence[str]) -> list[str]:
    """The classes: the other columns in their order, or the names that occur, in the order of the alphabet."""
    others = [head for head in heads if head not in FIRST]
    if JOINED not in others:
        kinds = others
    elif len(others) == 1:
        kinds = sorted({label for row in rows for label in _names(row)})
    else:
        raise UserError(f"{table}: has a column {JOINED!r} and others: {', '.join(others)}. Use one or the others.")
    if not rows:
        raise UserError(f"{table}: lists no picture. Give it a row for each, below the first line.")
    if not kinds:
        raise UserError(f"{table}: has no labels. Give it a column 'labels', or a column for each class.")
    return kinds


def _names(row: Row) -> list[str]:
    return [label.strip() for label in row[JOINED].split(";") if label.strip()]


def _labels(table: Path, line: int, row: Row, kinds: Sequence[str]) -> tuple[int, ...]:
    if JOINED in row:
        return tuple(sorted({kinds.index(label) for label in _names(row)}))
    for kind in kinds:
        if row[kind] not in ("0", "1"):
            raise UserError(f"{table}, line {line}: {kind} is {row[kind]!r}. Use 0 or 1.")
    return tuple(column for column, kind in enumerate(kinds) if row[kind] == "1")


def _tasks(table: Path, rows: Sequence[Row]) -> list[str]:
    """Tasks in the order they are learned: by number if all are whole numbers, else as they first occur."""
    found = list(dict.fromkeys(row["task"] for row in rows))
    if not all(map(WHOLE_NUMBER.fullmatch, found)):
        return found
    spelling: dict[int, str] = {}
    for task in found:
        if spelling.setdefault(int(task), task) != task:
            raise UserError(f"{table}: task {spelling[int(task)]!r} is also written {task!r}. Write it in one way.")
    return sorted(found, key=int)


def _groups(path: Path, kinds: Sequence[str]) -> tuple[str, ...]:
    rows, heads = _read(path)
    if not {"class", "group"} <= set(heads):
        raise UserError(f"{path}: its first line should be class,group, and is {','.join(heads)}.")
    given: dict[str, str] = {}
    for line, row in rows.items():
        if given.setdefault(row["class"], row["group"]) != row["group"]:
            raise UserError(
                f"{path}, line {line}: class {row['class']!r} is {row['group']!r}, and before {given[row['class']]!r}. "
                f"Give each class one group."
            )
    absent = [kind for kind in kinds if kind not in given]
    if absent:
        raise UserError(f"{path}: has no group of class {absent[0]!r}. Give each class one of {', '.join(GROUPS)}.")
    wrong = [kind for kind in kinds if given[kind] not in GROUPS]
    if wrong:
        raise unknown(f"group of class {wrong[0]!r} in {path}:", given[wrong[0]], GROUPS)
    return tuple(given[kind] for kind in kinds)
