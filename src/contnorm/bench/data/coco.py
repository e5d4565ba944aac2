"""List COCOseq from the published files of MS-COCO: folders of pictures, instances files, and lists of the tasks.

A picture has a label if it has at least one annotation of that category; the stream uses 70 of COCO's 80 categories. A
picture without any of them stays in the stream, with a row of zeros. The 2014 and 2017 releases have the same pictures
under the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contnorm.bench.data.id_lists import IdLists, listed_as
from contnorm.bench.data.json_text import parse_json
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed, ListedPicture
from contnorm.bench.data.published_streams import published_stream
from contnorm.errors import UserError, usable

__all__ = ["find_instances", "list_cocoseq"]

FOLDERS = ("images", "train2014", "val2014", "train2017", "val2017")
PICTURE = re.compile(r"(?:COCO_\w+_)?0*(\d+)\.jpe?g", re.IGNORECASE)
NEEDED = ("images", "annotations", "categories")
KEYS = {*NEEDED, "id", "image_id", "category_id", "name"}
NAMED = 5


def find_instances(coco: Path) -> list[Path]:
    """Return the annotation files: ``instances*.json`` in the folder or in its subfolder ``annotations``."""
    if not coco.is_dir():
        raise UserError(f"--coco {coco}: is no folder. Give the one that holds COCO's pictures and annotations.")
    paths = sorted([*coco.glob("instances*.json"), *coco.glob("annotations/instances*.json")])
    if not paths:
        raise UserError(
            f"{coco}: has no annotations. Looked for instances*.json and annotations/instances*.json, such as "
            f"annotations/instances_train2014.json; they come in annotations_trainval2014.zip."
        )
    return paths


def list_cocoseq(coco: Path, instances: Sequence[Path], lists: IdLists) -> Listed:
    """Return the pictures of the lists with their labels, and their files if they exist."""
    stream = published_stream("cocoseq")
    labels = _labels(instances, stream.class_names)
    _check_known(labels, lists, instances)
    files = _files(coco)
    if not files:
        raise UserError(f"{coco}: has no pictures. Looked in {', '.join(FOLDERS)} for *.jpg.")

    def picture(split: str, number: int, task: int) -> ListedPicture:
        return ListedPicture(number, files.get(number), task, labels[number])

    return listed_as(stream, lists, picture)


def _files(coco: Path) -> dict[int, Path]:
    """Return the picture files by number, from all folders of `FOLDERS` that exist."""
    files: dict[int, Path] = {}
    for name in (*FOLDERS, *(f"images/{name}" for name in FOLDERS[1:])):
        folder = coco / name
        with usable(folder, "it can't be read", "Let yourself read it."):
            for path in folder.iterdir() if folder.is_dir() else ():
                match = PICTURE.fullmatch(path.name)
                if match:
                    files.setdefault(int(match[1]), path)
    return files


def _labels(instances: Sequence[Path], class_names: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the label columns of every picture, from all annotation files."""
    column_of = {name: column for column, name in enumerate(class_names)}
    columns_of: dict[int, set[int]] = {}
    for path in instances:
        raw = _read(path)
        try:
            names = {category["id"]: category["name"] for category in raw["categories"]}
            _check_categories(path, column_of, names)
            for image in raw["images"]:
                columns_of.setdefault(image["id"], set())
            for number, column in _annotated(raw, names, column_of):
                columns_of[number].add(column)
        except KeyError as error:
            raise UserError(
                f"{path}: is no instances file of COCO: {str(error)[:80]} is missing, which an entry should have or "
                f"refers to. Bring it again."
            ) from error
        except TypeError as error:
            raise UserError(
                f"{path}: is no instances file of COCO: an entry is of another kind than it should be ({error}). Bring "
                f"it again."
            ) from error
    return {number: tuple(sorted(columns)) for number, columns in columns_of.items()}


def _annotated(
    raw: Mapping[str, Any], names: Mapping[int, str], column_of: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    for annotation in raw["annotations"]:
        column = column_of.get(names[annotation["category_id"]])
        if column is not None:
            yield annotation["image_id"], column


def _read(path: Path) -> dict[str, Any]:
    def used_keys(entry: dict[str, Any]) -> dict[str, Any]:
        """Drop unused keys, such as segmentations, which are most of the size of a file."""
        return {key: value for key, value in entry.items() if key in KEYS}

    with usable(path, "it can't be read", "Let yourself read it."):
        text = path.read_bytes()
    try:
        raw = parse_json(text, object_hook=used_keys)
    except ValueError as error:
        raise UserError(f"{path}: is no JSON, or is cut short ({error}). Bring it again.") from error
    if not isinstance(raw, dict) or any(not isinstance(raw.get(key), list) for key in NEEDED):
        raise UserError(f"{path}: is no instances file of COCO: it should have lists of {', '.join(NEEDED)}.")
    return raw


def _check_categories(path: Path, column_of: Mapping[str, int], names: Mapping[int, str]) -> None:
    absent = [name for name in column_of if name not in set(names.values())]
    if absent:
        raise UserError(
            f"{path}: {len(absent)} of the {len(column_of)} classes are not among its categories, such as "
            f"{absent[0]!r}. Bring an instances file of COCO's 80 categories."
        )


def _check_known(labels: Mapping[int, object], lists: IdLists, instances: Sequence[Path]) -> None:
    for split in SPLITS:
        for path, numbers in zip(lists.where[split], lists.ids[split], strict=True):
            unknown = [number for number in numbers if number not in labels]
            if unknown:
                raise UserError(
                    f"{path}: {len(unknown):,} of its {len(numbers):,} pictures are in no annotations, such as "
                    f"{', '.join(map(str, unknown[:NAMED]))}. Looked in {', '.join(file.name for file in instances)}; "
                    f"the whole stream needs those of both train and val."
                )
