"""Lists of the pictures of multi-label data sets: COCOseq, NUS-WIDEseq, and a user's CSV file.

COCOseq: a picture has a label if it has at least one annotation of that category; the stream uses 70 of COCO's 80
categories. A picture without any of them stays in the stream, with a row of zeros. The 2014 and 2017 releases have the
same pictures under the same numbers.

NUS-WIDEseq: the numbers in the task lists are positions, from 0, in the official lists of training and test images. The
pictures were on Flickr in 2009, and many are no longer available. Missing pictures are counted, and a build without
them is recorded as incomplete.

A user's CSV file has one row per picture, with the columns ``image``, ``split`` (train or test) and ``task``. Labels
are either in one column ``labels``, with names separated by semicolons, or in one column per class, with 0 and 1.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import GROUPS, SPLITS, DatasetListing, ListedPicture, groups_by_count
from contnorm.bench.data.published import IdLists, list_stream, published_stream
from contnorm.bench.files import parse_json, path_inside
from contnorm.errors import UserError, unknown, usable

__all__ = ["NusWideAnnotations", "find_instances", "list_cocoseq", "list_csv", "list_nus_wideseq", "read_nus_wide"]

COCO_FOLDERS = ("images", "train2014", "val2014", "train2017", "val2017")
COCO_PICTURE = re.compile(r"(?:COCO_\w+_)?0*(\d+)\.jpe?g", re.IGNORECASE)
REQUIRED_KEYS = ("images", "annotations", "categories")
USED_KEYS = {*REQUIRED_KEYS, "id", "image_id", "category_id", "name"}
EXAMPLES = 5


def find_instances(coco: Path) -> list[Path]:
    """Return the annotation files: ``instances*.json`` in the folder or in its subfolder ``annotations``."""
    if not coco.is_dir():
        raise UserError(f"--coco {coco}: is not a folder. Use the folder of COCO's pictures and annotations.")
    paths = sorted([*coco.glob("instances*.json"), *coco.glob("annotations/instances*.json")])
    if not paths:
        raise UserError(
            f"{coco}: has no annotations. Add instances*.json or annotations/instances*.json, such as "
            f"annotations/instances_train2014.json; they come in annotations_trainval2014.zip."
        )
    return paths


def list_cocoseq(coco: Path, instances: Sequence[Path], lists: IdLists) -> DatasetListing:
    """Return the pictures of the lists with their labels, and their files if they exist."""
    stream = published_stream("cocoseq")
    labels = _coco_labels(instances, stream.class_names)
    _check_known(labels, lists, instances)
    files = _coco_files(coco)
    if not files:
        raise UserError(f"{coco}: has no pictures. Add a folder of *.jpg files: {', '.join(COCO_FOLDERS)}.")

    def picture(split: str, number: int, task: int) -> ListedPicture:
        return ListedPicture(number, files.get(number), task, labels[number])

    return list_stream(stream, lists, picture)


def _coco_files(coco: Path) -> dict[int, Path]:
    """Return the picture files by number, from all folders of `COCO_FOLDERS` that exist."""
    files: dict[int, Path] = {}
    for name in (*COCO_FOLDERS, *(f"images/{name}" for name in COCO_FOLDERS[1:])):
        folder = coco / name
        with usable(folder, "cannot be read", "Check the permissions."):
            for path in folder.iterdir() if folder.is_dir() else ():
                match = COCO_PICTURE.fullmatch(path.name)
                if match:
                    files.setdefault(int(match[1]), path)
    return files


def _coco_labels(instances: Sequence[Path], class_names: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the label columns of every picture, from all annotation files."""
    column_of = {name: column for column, name in enumerate(class_names)}
    columns_of: dict[int, set[int]] = {}
    for path in instances:
        raw = _read_instances(path)
        try:
            names = {category["id"]: category["name"] for category in raw["categories"]}
            _check_categories(path, column_of, names)
            for image in raw["images"]:
                columns_of.setdefault(image["id"], set())
            for number, column in _annotated(raw, names, column_of):
                columns_of[number].add(column)
        except KeyError as error:
            raise UserError(
                f"{path}: is not an instances file of COCO: {str(error)[:80]}, which an entry must have or refers to, "
                f"is missing. Download it again."
            ) from error
        except TypeError as error:
            raise UserError(
                f"{path}: is not an instances file of COCO: an entry has a wrong type ({error}). Download it again."
            ) from error
    return {number: tuple(sorted(columns)) for number, columns in columns_of.items()}


def _annotated(
    raw: Mapping[str, Any], names: Mapping[int, str], column_of: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    for annotation in raw["annotations"]:
        column = column_of.get(names[annotation["category_id"]])
        if column is not None:
            yield annotation["image_id"], column


def _read_instances(path: Path) -> dict[str, Any]:
    def used_keys(entry: dict[str, Any]) -> dict[str, Any]:
        """Drop unused keys, such as segmentations, which are most of the size of a file."""
        return {key: value for key, value in entry.items() if key in USED_KEYS}

    with usable(path, "cannot be read", "Check the permissions."):
        text = path.read_bytes()
    try:
        raw = parse_json(text, object_hook=used_keys)
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}). Download it again.") from error
    if not isinstance(raw, dict) or any(not isinstance(raw.get(key), list) for key in REQUIRED_KEYS):
        raise UserError(f"{path}: is not an instances file of COCO: it must have the lists {', '.join(REQUIRED_KEYS)}.")
    return raw


def _check_categories(path: Path, column_of: Mapping[str, int], names: Mapping[int, str]) -> None:
    missing = [name for name in column_of if name not in set(names.values())]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of the {len(column_of)} classes are not among its categories, such as "
            f"{missing[0]!r}. Use an instances file of COCO's 80 categories."
        )


def _check_known(labels: Mapping[int, object], lists: IdLists, instances: Sequence[Path]) -> None:
    for split in SPLITS:
        for path, numbers in zip(lists.files[split], lists.ids[split], strict=True):
            unknown = [number for number in numbers if number not in labels]
            if unknown:
                raise UserError(
                    f"{path}: {len(unknown):,} of its {len(numbers):,} pictures have no annotations, such as "
                    f"{', '.join(map(str, unknown[:EXAMPLES]))}. Searched {', '.join(file.name for file in instances)}"
                    f"; the whole stream needs the annotations of both train and val."
                )


NUS_LIST_FOLDERS = ("ImageList", "Imagelist", ".")
NUS_LABEL_FOLDERS = ("TrainTestLabels", "Groundtruth/TrainTestLabels")
NUS_PICTURE_FOLDERS = ("image", "images", "Flickr", "images/Flickr")


@dataclass(frozen=True)
class NusWideAnnotations:
    """Annotations of NUS-WIDE by split: file names in the order of the official list, and labels (images, classes)."""

    names: dict[str, list[str]]
    labels: dict[str, NDArray[np.bool_]]


def read_nus_wide(nus: Path) -> NusWideAnnotations:
    """Read the image lists, and the label files of the classes of the stream."""
    if not nus.is_dir():
        raise UserError(f"--nus {nus}: is not a folder. Use the folder of NUS-WIDE's lists, labels and pictures.")
    names, labels = {}, {}
    for split in SPLITS:
        path = _first(nus, [f"{folder}/{split.title()}Imagelist.txt" for folder in NUS_LIST_FOLDERS], "image list")
        names[split] = _lines(path)
        labels[split] = _nus_labels(nus, split, path, len(names[split]))
    return NusWideAnnotations(names, labels)


def list_nus_wideseq(nus: Path, annotations: NusWideAnnotations, lists: IdLists) -> DatasetListing:
    """Return the pictures of the lists with their labels, and their files if they exist."""
    stream = published_stream("nus-wideseq")
    for split in SPLITS:
        _check_positions(annotations.names[split], lists, split)

    def picture(split: str, position: int, task: int) -> ListedPicture:
        columns = tuple(np.flatnonzero(annotations.labels[split][position]).tolist())
        return ListedPicture(position, _nus_file(nus, annotations.names[split][position]), task, columns)

    return list_stream(stream, lists, picture)


def _first(nus: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (nus / name).is_file():
            return nus / name
    raise UserError(f"{nus}: has no {what}. Add one of {', '.join(str(Path(name)) for name in names)}.")


def _lines(path: Path) -> list[str]:
    with usable(path, "cannot be read", "Check the permissions."):
        return [
            line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]


def _nus_labels(nus: Path, split: str, image_list: Path, count: int) -> NDArray[np.bool_]:
    """Read one column per class from files with a 0 or 1 per line, in the order of the image list."""
    columns = []
    for name in published_stream("nus-wideseq").class_names:
        path = _first(nus, [f"{folder}/Labels_{name}_{split.title()}.txt" for folder in NUS_LABEL_FOLDERS], "labels")
        lines = _lines(path)
        if len(lines) != count:
            raise UserError(
                f"{path}: has {len(lines):,} labels for the {count:,} images of {image_list}. Download it again."
            )
        if not set(lines) <= {"0", "1"}:
            wrong = next(line for line in lines if line not in ("0", "1"))
            raise UserError(f"{path}: has {wrong!r}. Each line must be 0 or 1.")
        columns.append(np.array(lines) == "1")
    return np.stack(columns, axis=1)


def _check_positions(names: Sequence[str], lists: IdLists, split: str) -> None:
    for path, positions in zip(lists.files[split], lists.ids[split], strict=True):
        outside = [position for position in positions if not 0 <= position < len(names)]
        if outside:
            raise UserError(
                f"{path}: {len(outside):,} of its numbers, such as {outside[0]}, are not positions in the {split} "
                f"image list, which has {len(names):,} images. Use the official list."
            )


def _nus_file(nus: Path, listed: str) -> Path | None:
    """Return the file of a listed picture, with or without its subfolder; None if it does not exist.

    The lists have Windows paths, such as ``actor\\0001_2124494179.jpg``. Of an absolute path, only the file name is
    used: its folders are those of the machine that wrote the list.
    """
    name = PureWindowsPath(listed)
    if ".." in name.parts or not listed.isprintable():
        raise UserError(
            f"{nus}: an image list names {listed[:200]!r}. Names must not contain '..' or control characters."
        )
    relative = name.name if name.anchor else Path(*name.parts)
    for folder in NUS_PICTURE_FOLDERS:
        for path in (nus / folder / relative, nus / folder / name.name):
            with usable(path, "cannot be read", "Check the permissions of the folder."):
                if path.is_file():
                    return path
    return None


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
