"""Multi-label data sets: lists of their pictures (COCOseq, NUS-WIDEseq, a user's CSV table), and their build.

The two long-tailed streams of Kim et al. (2020) are described by their classes, groups, sizes and order of tasks, and
by lists of the pictures of each task, which are read from a folder or downloaded. The lists have the published indices
of tasks; built data sets number the tasks in the order of training. Groups of classes are those of the whole stream.

COCOseq: a picture has a label if it has at least one annotation of that category; the stream uses 70 of COCO's 80
categories. A picture without any of them stays in the stream, with a row of zeros. The 2014 and 2017 releases have the
same pictures under the same numbers.

NUS-WIDEseq: the numbers in the task lists are positions, from 0, in the official lists of training and test images. The
pictures were on Flickr in 2009, and many are no longer available.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from contnorm.bench.data.dataset import (
    GROUPS,
    MANIFEST,
    SPLITS,
    MultiLabelSource,
    Progress,
    groups_by_count,
    new_folder,
    published,
    read_manifest,
    save_source,
)
from contnorm.bench.data.formats import BLOCK, decode_pictures
from contnorm.bench.data.registry import Fetchable, fetch
from contnorm.errors import UserError

PUBLISHED_STREAMS = ("cocoseq", "nus-wideseq")


@dataclass(frozen=True)
class Picture:
    """A picture of a listing.

    Attributes:
        id: Name or number in the list.
        path: File; None if it is missing.
        task: Index of its task, in the order of training.
        labels: Columns of its labels.
    """

    id: int | str
    path: Path | None
    task: int
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """Pictures, labels and tasks of a multi-label data set to be built.

    Attributes:
        task_names: Name of each task in the list, in the order of training.
        train, test: Pictures by task.
        published_images: Number of images of the published stream; None for a user's data set.
        as_published: Whether the lists are identical to the published ones.
    """

    name: str
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    task_names: tuple[str, ...]
    train: tuple[Picture, ...]
    test: tuple[Picture, ...]
    published_images: int | None = None
    as_published: bool = False

    def pictures(self, split: str, missing: bool = False) -> list[Picture]:
        """Return the pictures of a split whose file exists, or those whose file is missing."""
        of_split = self.train if split == "train" else self.test
        return [picture for picture in of_split if (picture.path is None) == missing]

    def count(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Count pictures in all, without a label, by task and by class."""
        labels = [column for picture in pictures for column in picture.labels]
        return {
            "images": len(pictures),
            "unlabelled": sum(not picture.labels for picture in pictures),
            "by_task": [sum(picture.task == task for picture in pictures) for task in range(len(self.task_names))],
            "by_class": {name: labels.count(column) for column, name in enumerate(self.class_names)},
        }


@dataclass(frozen=True)
class PublishedStream:
    """Published description of a stream.

    Attributes:
        class_names: Names of the classes, by column of the labels.
        class_groups: Groups of the classes, by column.
        task_order: Indices of the tasks in the order of training.
        sizes: Number of images of each task, by its index, for ``"train"`` and ``"test"``.
        lists: Address and hashes of the lists of images of each task.
    """

    name: str
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    task_order: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    lists: Fetchable

    @property
    def images(self) -> int:
        return sum(map(sum, self.sizes.values()))


@cache
def published_stream(name: str) -> PublishedStream:
    """Return one of `PUBLISHED_STREAMS`.

    Example:
        >>> stream = published_stream("cocoseq")
        >>> stream.images, len(stream.class_names), stream.class_groups.count("minority"), stream.task_order
        (41438, 70, 14, (0, 3, 1, 2))
    """
    raw = published()["streams"][name]
    group_of = {class_name: group for group in GROUPS for class_name in raw[group]}
    return PublishedStream(
        name,
        tuple(raw["class_names"]),
        tuple(group_of[class_name] for class_name in raw["class_names"]),
        tuple(raw["task_order"]),
        {"train": tuple(raw["train_sizes"]), "test": tuple(raw["test_sizes"])},
        Fetchable(raw["lists_at"], raw["lists"], folder="ids"),
    )


def list_cocoseq(coco: Path, ids: Path | None, out: Path, base: str | None = None) -> Listing:
    """List the pictures of COCOseq.

    Args:
        coco: Folder of MS-COCO: pictures, and ``instances*.json`` in it or in its subfolder ``annotations``.
        ids: Folder of the task lists; None for ``ids`` in ``coco``; if it does not exist, they are downloaded.
        out: Folder of the data set, for downloaded lists.
        base: Address to download the lists from, in place of the default.
    """
    instances = sorted([*coco.glob("instances*.json"), *coco.glob("annotations/instances*.json")])
    if not instances:
        raise UserError(
            f"--coco {coco}: has no annotations. Add instances*.json or annotations/instances*.json, such as "
            f"annotations/instances_train2014.json; they come in annotations_trainval2014.zip."
        )
    stream = published_stream("cocoseq")
    labels = _coco_labels(instances, stream.class_names)
    years = ("train2014", "val2014", "train2017", "val2017")
    folders = [coco / name for name in ("images", *years, *(f"images/{year}" for year in years))]
    files: dict[int, Path] = {}
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if match := re.fullmatch(r"(?:COCO_\w+_)?0*(\d+)\.jpe?g", path.name, re.IGNORECASE):
            files.setdefault(int(match[1]), path)

    def picture(split: str, number: int, task: int) -> Picture:
        if number not in labels:
            raise UserError(
                f"picture {number} of the {split} lists has no annotations in "
                f"{', '.join(path.name for path in instances)}. The whole stream needs those of both train and val."
            )
        return Picture(number, files.get(number), task, labels[number])

    return _list_stream(stream, ids or coco / "ids", out, base, picture)


def _coco_labels(instances: Sequence[Path], class_names: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the label columns of every picture, from all annotation files."""
    column_of = {name: column for column, name in enumerate(class_names)}
    columns_of: dict[int, set[int]] = {}
    for path in instances:
        raw = json.loads(path.read_bytes())
        names = {category["id"]: category["name"] for category in raw["categories"]}
        for image in raw["images"]:
            columns_of.setdefault(image["id"], set())
        for annotation in raw["annotations"]:
            if (column := column_of.get(names[annotation["category_id"]])) is not None:
                columns_of[annotation["image_id"]].add(column)
    return {number: tuple(sorted(columns)) for number, columns in columns_of.items()}


def list_nus_wideseq(nus: Path, ids: Path | None, out: Path, base: str | None = None) -> Listing:
    """List the pictures of NUS-WIDEseq.

    Args:
        nus: Folder of NUS-WIDE: pictures, image lists and label files.
        ids, out, base: As in `list_cocoseq`.
    """
    stream = published_stream("nus-wideseq")
    names, labels = {}, {}
    for split in SPLITS:
        title = split.title()
        names[split] = _lines(nus, [f"{folder}{title}Imagelist.txt" for folder in ("ImageList/", "Imagelist/", "")])
        columns = []
        for kind in stream.class_names:
            file = f"TrainTestLabels/Labels_{kind}_{title}.txt"
            columns.append(_lines(nus, [file, f"Groundtruth/{file}"]))
        labels[split] = np.array(columns).T == "1"

    def picture(split: str, position: int, task: int) -> Picture:
        # The lists have Windows paths, such as ``actor\0001_2124494179.jpg``, some with folders of their author.
        listed = PureWindowsPath(names[split][position])
        paths = [
            nus / folder / name
            for folder in ("image", "images", "Flickr", "images/Flickr")
            for name in (Path(*listed.parts[-2:]), listed.name)
        ]
        path = next((path for path in paths if path.is_file()), None)
        return Picture(position, path, task, tuple(np.flatnonzero(labels[split][position]).tolist()))

    return _list_stream(stream, ids or nus / "ids", out, base, picture)


def _lines(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the lines of the first of these files that exists, without empty ones."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"--nus {folder}: has none of {', '.join(names)}. Add one of them.")
    lines = map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line for line in lines if line]


def _list_stream(
    stream: PublishedStream, folder: Path, out: Path, base: str | None, picture: Callable[[str, int, int], Picture]
) -> Listing:
    """Return the pictures of the lists in a folder by task, in the order of training.

    The lists are called ``train_task0_id_coco.json``, as published, or ``train_task0.json``. If the folder does not
    exist, they are downloaded once into the folder of the data set.
    """
    if not folder.is_dir():
        fetch(stream.lists, out, base)
        folder = out / stream.lists.folder
    pictures: dict[str, list[Picture]] = {split: [] for split in SPLITS}
    as_published = True
    for name, checksum in stream.lists.files.items():
        split, index = re.fullmatch(r"(train|test)_task(\d)_.*", name).groups()  # type: ignore[union-attr]
        path = folder / name
        if not path.is_file():
            path = folder / f"{split}_task{index}.json"
        if not path.is_file():
            raise UserError(f"{folder}: has no {name}. Add it, or use --ids DIR for the folder of the lists.")
        numbers: list[int] = json.loads(path.read_bytes())
        digest = hashlib.sha256(json.dumps(numbers).encode()).hexdigest()  # white space in the file is ignored
        as_published &= checksum == f"sha256:{digest}"
        task = stream.task_order.index(int(index))
        pictures[split] += [picture(split, number, task) for number in numbers]
    train, test = (tuple(sorted(pictures[split], key=lambda picture: picture.task)) for split in SPLITS)
    names = tuple(map(str, stream.task_order))
    return Listing(
        stream.name, stream.class_names, stream.class_groups, names, train, test, stream.images, as_published
    )


def list_csv(name: str, table: Path, images: Path, groups: Path | None = None) -> Listing:
    """List the pictures of a CSV table with one row per picture.

    Args:
        name: Name of the data set.
        table: The table, with the columns ``image``, ``split`` (train or test) and ``task``. Labels are either in one
            column ``labels``, with names separated by semicolons, or in one column per class, with 0 and 1.
        images: Folder that its paths are relative to.
        groups: Table with the columns ``class`` and ``group``; None to group classes by their number of training
            pictures.
    """
    rows = _read_table(table, ("image", "split", "task"))
    classes = [column for column in rows[0] if column not in ("image", "split", "task")]
    labels_of = [[column for column in classes if row[column] == "1"] for row in rows]
    if classes == ["labels"]:
        labels_of = [[label.strip() for label in row["labels"].split(";") if label.strip()] for row in rows]
        classes = sorted({label for labels in labels_of for label in labels})
    elif not all(row[column] in ("0", "1") for row in rows for column in classes):
        raise UserError(f"{table}: a column per class must have 0 and 1 only: {', '.join(classes)}.")
    if not classes:
        raise UserError(f"{table}: has no labels. Add a column 'labels', or a column per class.")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if all(re.fullmatch(r"[+-]?\d{1,18}", task) for task in tasks):
        tasks.sort(key=int)
    pictures: dict[str, list[Picture]] = {split: [] for split in SPLITS}
    for row, labels in zip(rows, labels_of, strict=True):
        if row["split"] not in SPLITS:
            raise UserError(f"{table}: split is {row['split']!r} in the row of {row['image']}. Use train or test.")
        path = images / row["image"]
        columns = tuple(sorted({classes.index(label) for label in labels}))
        pictures[row["split"]].append(
            Picture(row["image"], path if path.is_file() else None, tasks.index(row["task"]), columns)
        )
    train, test = (tuple(sorted(pictures[split], key=lambda picture: picture.task)) for split in SPLITS)
    class_groups = groups_by_count(sum(i in picture.labels for picture in train) for i in range(len(classes)))
    if groups is not None:
        group_of = {row["class"]: row["group"] for row in _read_table(groups, ("class", "group"))}
        if not set(classes) <= group_of.keys() or not set(group_of.values()) <= set(GROUPS):
            raise UserError(f"{groups}: give each class of {table} one of the groups {', '.join(GROUPS)}.")
        class_groups = tuple(group_of[class_name] for class_name in classes)
    return Listing(name, tuple(classes), class_groups, tuple(tasks), train, test)


def _read_table(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Read a CSV table with at least one row and the required columns."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, restkey=""))
    if not rows or not set(required) <= {column.strip() for column in rows[0]}:
        raise UserError(f"{path}: must have the columns {', '.join(required)} and at least one row.")
    for row in rows:
        if "" in row or None in row.values():  # without its last cell, a picture would be read as unlabelled
            raise UserError(f"{path}: row {list(row.values())} has not as many cells as the first line.")
    return [{column.strip(): cell.strip() for column, cell in row.items()} for row in rows]


def build(
    listing: Listing,
    out: Path,
    side: int,
    *,
    allow_missing: bool = False,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Build a data set into a folder. A data set that is already built is not changed, unless pictures were missing.

    Args:
        listing: Pictures, labels and tasks of the data set.
        out: Folder of the data set.
        side: Height and width that pictures are resized to, in pixels.
        allow_missing: Whether to build without pictures that are missing; the data set is then recorded as incomplete.
        jobs: Number of threads; None for one per core.
        progress: Called with what is done, the number of decoded pictures, and the number of all.

    Returns:
        The manifest of the data set.
    """
    _check_pictures(listing, allow_missing)
    splits = {split: listing.pictures(split) for split in SPLITS}
    missing = {split: listing.pictures(split, missing=True) for split in SPLITS}
    kinds = [listing.class_names, listing.class_groups, listing.task_names]
    content: dict[str, Any] = {"name": listing.name, "side": side, "kinds": kinds}
    paths: dict[str, list[Path]] = {}
    for split, pictures in splits.items():  # pictures count by name, labels and size in bytes
        paths[split] = [picture.path for picture in pictures if picture.path is not None]
        sizes = [path.stat().st_size for path in paths[split]]
        content[split] = [[p.id, size, p.task, p.labels] for p, size in zip(pictures, sizes, strict=True)]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    if (out / MANIFEST).is_file():
        about = read_manifest(out)["about"]
        if about["made_of"] == key:
            return read_manifest(out)
        if about["complete"]:
            raise UserError(f"{out}: contains another data set. Delete it, or use another folder (out=).")
    with new_folder(out) as folder:
        images, _ = decode_pictures(paths, side, "bicubic", folder, progress, jobs)
        arrays: dict[str, Any] = {}
        digest = hashlib.sha256(json.dumps(kinds[:2]).encode())
        for split, pictures in splits.items():
            labels = np.zeros((len(pictures), len(listing.class_names)), dtype=np.uint8)
            for row, picture in enumerate(pictures):
                labels[row, list(picture.labels)] = 1
            task = np.array([picture.task for picture in pictures], dtype=np.int64)
            arrays |= {f"{split}_images": images[split], f"{split}_labels": labels, f"{split}_task": task}
            for start in range(0, len(pictures), BLOCK):
                digest.update(hashlib.sha256(images[split][start : start + BLOCK].data).hexdigest().encode())
            digest.update(labels.data)
            digest.update(task.data)
        source = MultiLabelSource(
            name=listing.name,
            **arrays,
            classes=len(listing.class_names),
            fingerprint=digest.hexdigest()[:16],
            tasks=len(listing.task_names),
            class_names=listing.class_names,
            class_groups=listing.class_groups,
            published_images=listing.published_images,
            missing_images=sum(map(len, missing.values())),
        )
        save_source(
            source,
            folder,
            stream="multi-label",
            made_of=key,
            complete=not any(missing.values()),
            lists_as_published=listing.as_published,
            task_names=listing.task_names,
            images={split: listing.count(splits[split]) for split in SPLITS},
            missing={split: listing.count(missing[split]) for split in SPLITS},
            missing_pictures={split: [[picture.id, picture.task] for picture in missing[split]] for split in SPLITS},
        )
        if (out / "ids").is_dir():  # downloaded lists
            shutil.copytree(out / "ids", folder / "ids")
    return read_manifest(out)


def _check_pictures(listing: Listing, allow_missing: bool) -> None:
    """Raise an error for pictures that are missing or listed twice, and for tasks without pictures."""
    listed = (*listing.train, *listing.test)
    missing = [str(picture.id) for picture in listed if picture.path is None]
    if missing and not allow_missing:
        raise UserError(
            f"{listing.name}: {len(missing):,} of {len(listed):,} pictures are missing, such as "
            f"{', '.join(missing[:5])}. Add them, or build without them with --allow-missing, which records what is "
            f"missing, by task and class."
        )
    train, test = (listing.pictures(split) for split in SPLITS)
    untrained = set(range(len(listing.task_names))) - {picture.task for picture in train}
    if untrained or not test:
        what = f"task {listing.task_names[min(untrained)]} has no train pictures" if untrained else "no test pictures"
        raise UserError(f"{listing.name}: {what}. Check the folder of the pictures.")
    if not listing.as_published:  # trained on twice, or in both splits
        often, number = Counter(str(picture.path) for picture in (*train, *test)).most_common(1)[0]
        if number > 1:
            raise UserError(f"{listing.name}: {often} is listed {number} times. List it once, with all of its labels.")
