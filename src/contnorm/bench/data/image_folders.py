"""Data sets that are folders of pictures: Tiny-ImageNet as published, mini-ImageNet, and a user's class folders.

mini-ImageNet has no official archive. Its pictures are expected as ``<wnid>/*.jpg`` or as ``images/<wnid>*.jpg``. The
split is that of the four published lists, if they are in the same folder. Without them, the last 100 pictures of each
class by name are the test pictures, which deviates from the published split and is recorded.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from contnorm.bench.data.class_share import check_test_share, choose_test_samples
from contnorm.bench.files import Progress, is_plain_name
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.errors import UserError

__all__ = [
    "MINI_LISTS",
    "MINI_WNIDS",
    "PictureList",
    "list_mini_imagenet",
    "list_tiny_imagenet",
    "mini_imagenet_inputs",
    "read_class_folders",
    "tiny_imagenet_inputs",
]

# fmt: off
# Classes in the order of the published stream: the first 15 are for selection.
MINI_WNIDS = (
    "n09246464", "n03017168", "n03908618", "n02971356", "n02108551", "n04509417", "n01910747", "n02606052",
    "n04275548", "n02091244", "n02120079", "n01749939", "n07584110", "n01704323", "n01770081", "n04243546",
    "n02091831", "n04146614", "n02110341", "n09256479", "n04296562", "n02074367", "n02174001", "n03146219",
    "n03075370", "n03272010", "n13054560", "n02747177", "n04258138", "n03888605", "n01855672", "n02687172",
    "n01981276", "n03127925", "n03854065", "n13133613", "n07613480", "n03207743", "n03838899", "n03998194",
    "n02111277", "n03584254", "n01558993", "n04418357", "n02165456", "n03544143", "n01532829", "n03924679",
    "n02108915", "n06794110", "n03676483", "n03347037", "n02981792", "n07747607", "n02113712", "n04389033",
    "n04149813", "n02457408", "n03527444", "n03770439", "n02114548", "n02219486", "n02138441", "n01843383",
    "n03047690", "n04067472", "n02101006", "n04604644", "n02443484", "n03535780", "n02108089", "n02129165",
    "n04443257", "n03775546", "n07697537", "n03400231", "n02089867", "n02823428", "n01930112", "n02099601",
    "n03980874", "n02105505", "n04596742", "n02950826", "n03773504", "n03417042", "n02871525", "n03337140",
    "n02110063", "n02966193", "n02116738", "n04251144", "n04515003", "n03220513", "n04522168", "n04435653",
    "n03062245", "n02795169", "n03476684", "n04612504",
)
# fmt: on
MINI_LISTS = (("mini_val_train.csv", "mini_cl_train.csv"), ("mini_val_test.csv", "mini_cl_test.csv"))
BY_LISTS, BY_NAME = "published lists", "last sixth of each class by name"
TINY_CLASSES = 200
LABEL = re.compile(r"[0-9]{1,2}")
WNID = re.compile(r"n\d{8}")

Labelled = list[tuple[Path, int]]


@dataclass(frozen=True)
class PictureList:
    """Picture files of a data set with their labels, in the order of its samples.

    Attributes:
        split: How pictures were assigned to the training and the test split; empty if there is only one official split.
    """

    train: Labelled
    test: Labelled
    split: str = ""


def tiny_imagenet_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the files and folders that change if a picture, a label or the split of Tiny-ImageNet changes."""
    names, annotations = paths
    root = names.parent
    return [
        names,
        annotations,
        root / "train",
        *(root / "train" / wnid / "images" for wnid in _tiny_wnids(names)),
        root / "val" / "images",
    ]


def list_tiny_imagenet(paths: Sequence[Path]) -> PictureList:
    """List pictures by ``wnids.txt`` and ``val/val_annotations.txt``; the official validation set is the test split."""
    names, annotations = paths
    root = names.parent
    label_of = {wnid: label for label, wnid in enumerate(_tiny_wnids(names))}
    train = [
        (path, label) for wnid, label in label_of.items() for path in _pictures(root / "train" / wnid / "images", "")
    ]
    present = {path.name: path for path in _pictures(root / "val" / "images", "")}
    test = []
    for number, line in enumerate(_text(annotations).splitlines(), start=1):
        name, wnid, *_ = (*line.split("\t"), "")
        if not is_plain_name(name):
            raise UserError(f"{annotations}, line {number}: must begin with the name of a picture, got {line!r}.")
        if wnid not in label_of:
            raise UserError(f"{annotations}: line {number}: {name!r} is of class {wnid!r}, which is not in {names}.")
        if name in present:
            test.append((present[name], label_of[wnid]))
    return PictureList(train, test)


def _tiny_wnids(path: Path) -> list[str]:
    wnids = _text(path).split()
    if len(set(wnids)) != TINY_CLASSES or len(wnids) != TINY_CLASSES or not all(map(WNID.fullmatch, wnids)):
        raise UserError(
            f"{path}: must list {TINY_CLASSES} different classes such as n01443537, but lists {len(set(wnids))}. "
            f"Extract the archive of Tiny-ImageNet again."
        )
    return wnids


def mini_imagenet_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the files and folders that change if a picture, a label or the split of mini-ImageNet changes.

    A list that appears or disappears changes the folder itself.
    """
    root = paths[0]
    return [
        root,
        *_picture_folders(root),
        *(root / name for names in MINI_LISTS for name in names if (root / name).is_file()),
    ]


def _picture_folders(root: Path) -> list[Path]:
    names = (entry.name for entry in os.scandir(root) if entry.name[:1] in ("n", "i") and entry.is_dir())
    return [root / name for name in sorted(names) if name == "images" or name.startswith("n")]


def list_mini_imagenet(paths: Sequence[Path]) -> PictureList:
    """List the pictures of the 100 classes; labels are positions in the published order of classes."""
    root = paths[0]
    by_class = _mini_pictures(root)
    empty = [wnid for wnid, pictures in by_class.items() if len(pictures) < 2]
    if empty:
        raise UserError(
            f"{root}: is not mini-ImageNet: {len(empty)} of {len(MINI_WNIDS)} classes have fewer than 2 pictures, such "
            f"as {empty[0]}. Pictures are expected as <wnid>/*.jpg or images/<wnid>*.jpg."
        )
    test_names = _listed_test_names(root, by_class)
    train: Labelled = []
    test: Labelled = []
    for label, pictures in enumerate(by_class.values()):
        last = set(pictures[-max(1, len(pictures) // 6) :])  # 100 of 600
        for path in pictures:
            is_test = path in last if test_names is None else path.name in test_names
            (test if is_test else train).append((path, label))
    return PictureList(train, test, BY_NAME if test_names is None else BY_LISTS)


def _mini_pictures(root: Path) -> dict[str, list[Path]]:
    """Return pictures by class, sorted by path; the class is the folder name or the prefix of the file name."""
    by_class: dict[str, list[Path]] = {wnid: [] for wnid in MINI_WNIDS}
    for folder in _picture_folders(root):
        for path in _pictures(folder, ".jpg"):
            wnid = folder.name if folder.name in by_class else path.name[:9]
            if wnid in by_class:
                by_class[wnid].append(path)
    return by_class


def _pictures(folder: Path, ending: str) -> list[Path]:
    """Return the files of a folder with an ending, sorted, without hidden files; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in os.scandir(folder))
    return [folder / name for name in sorted(names) if name.endswith(ending) and not name.startswith(".")]


def _listed_test_names(root: Path, by_class: dict[str, list[Path]]) -> set[str] | None:
    """Return the names of the test pictures in the published lists; None if there are no lists."""
    names = [name for part in MINI_LISTS for name in part]
    missing = [name for name in names if not (root / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise UserError(
            f"{root}: {', '.join(missing)} missing: the split needs all {len(names)} lists. Add what is missing, or "
            f"remove the others to split by name."
        )
    train, test = (dict(row for name in part for row in _list_rows(root / name)) for part in MINI_LISTS)
    both = train.keys() & test.keys()
    if both:
        raise UserError(f"{root}: {len(both):,} pictures are in a train and a test list, such as {min(both)}.")
    listed = train | test
    for label, (wnid, pictures) in enumerate(by_class.items()):
        for path in pictures:
            if listed.get(path.name) != label:
                wrong = f"label {listed[path.name]}" if path.name in listed else "no entry"
                raise UserError(
                    f"{root}: the split lists are of other pictures: {path.name} of class {wnid} has {wrong} in them, "
                    f"not label {label}. Use the published lists, or remove all {len(names)}."
                )
    return set(test)


def _list_rows(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the file name and label of each row ``path,label``."""
    try:
        rows = list(csv.reader(io.StringIO(_text(path), newline="")))
    except csv.Error as error:
        raise UserError(f"{path}: is not a CSV file ({error}). Replace it with the published one.") from error
    for number, row in enumerate(rows, start=1):
        if row and not (len(row) == 2 and LABEL.fullmatch(row[1].strip())):
            raise UserError(f"{path}: row {number} is not a path and a label. Replace it with the published list.")
        if row:
            yield Path(row[0]).name, int(row[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not a text file in UTF-8 ({error.reason}). Replace it with the published one."
        ) from error


SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
NamedImages = list[tuple[Path, str]]
Arrays: TypeAlias = "tuple[NDArray[np.uint8], list[str], NDArray[np.uint8], list[str]]"
Allocate: TypeAlias = "Callable[[str, tuple[int, ...]], NDArray[np.uint8]]"
AT_ONCE = 256  # images that are decoded between two reports of progress
MAX_SIZE = 4096


def read_class_folders(
    folder: Path,
    size: int | None,
    test_share: float,
    allocate: Allocate | None = None,
    progress: Progress = lambda *_: None,
) -> Arrays:
    """Read the images of a folder as uint8, with the names of their class folders.

    Args:
        folder: The folder.
        size: Height and width to resize and center-crop to; None if all images have the same size.
        test_share: Share of each class in the test split, if the folder has no subfolder ``test``.
        allocate: Allocates the array of a split (``"train"`` or ``"test"``) of a shape; None for memory.
        progress: Called with what is done, and how much of it.

    Returns:
        Training images, their labels, test images and their labels.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    if (folder / "train").is_dir():
        test_folder = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
        if test_folder is None:
            raise UserError(f"{folder}: has a folder train and no folder test. Add one, or use <class>/* folders.")
        train, test = _list_images(folder / "train"), _list_images(test_folder)
        classes, test_classes = {label for _, label in train}, {label for _, label in test}
        if classes != test_classes:
            only = sorted(classes ^ test_classes)
            raise UserError(f"{folder}: class {only[0]!r} is not in both train and {test_folder.name}.")
    else:
        train, test = _split(_list_images(folder), test_share)
    if len({label for _, label in train}) < 2:
        raise UserError(f"{folder}: has images of one class only. Use at least two classes.")
    if size is not None and (type(size) is not int or not 1 <= size <= MAX_SIZE):
        raise UserError(f"size={size}: use a number of pixels from 1 to {MAX_SIZE}.")
    images = _read(
        {"train": train, "test": test}, size, allocate or (lambda _, shape: np.empty(shape, np.uint8)), progress
    )
    return images["train"], [label for _, label in train], images["test"], [label for _, label in test]


def _list_images(folder: Path) -> NamedImages:
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    images = [
        (path, entry.name)
        for entry in classes
        for path in sorted(entry.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    if not images:
        raise UserError(f"{folder}: has no images in class folders, such as {folder}/cats/1.png.")
    return images


def _split(images: NamedImages, share: float) -> tuple[NamedImages, NamedImages]:
    """Split each class into training and test images, at random with a fixed seed."""
    check_test_share(share)
    train: NamedImages = []
    test: NamedImages = []
    for label in sorted({label for _, label in images}):
        of_class = [image for image in images if image[1] == label]
        if len(of_class) < 2:
            raise UserError(f"class {label!r} has one image. Use at least two, so that one is in the test split.")
        chosen = set(choose_test_samples(label, len(of_class), share).tolist())
        test += [image for i, image in enumerate(of_class) if i in chosen]
        train += [image for i, image in enumerate(of_class) if i not in chosen]
    return train, test


def _read(
    splits: dict[str, NamedImages], size: int | None, allocate: Allocate, progress: Progress
) -> dict[str, NDArray[np.uint8]]:
    first = splits["train"][0][0]
    shape, total, done = _read_image(first, size).shape, sum(map(len, splits.values())), 0
    arrays = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        for split, images in splits.items():
            arrays[split] = allocate(split, (len(images), *shape))
            for start in range(0, len(images), AT_ONCE):  # a bounded number of decoded images is in memory
                paths = [path for path, _ in images[start : start + AT_ONCE]]
                for i, image in enumerate(workers.map(lambda path: _read_image(path, size), paths), start):
                    if image.shape != shape:
                        raise UserError(
                            f"{first} is {shape[1]} x {shape[2]} pixels and {images[i][0]} is {image.shape[1]} x "
                            f"{image.shape[2]}. Use size=N (--size N) to resize all images."
                        )
                    arrays[split][i] = image
                done += len(paths)
                progress("decoding", done, total)
    return arrays


def _read_image(path: Path, size: int | None) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps  # only where images are read

    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
            if size is not None:
                rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BILINEAR)
            return np.ascontiguousarray(np.asarray(rgb, dtype=np.uint8).transpose(2, 0, 1))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: can't be read as an image ({error}). Repair or remove it.") from error
