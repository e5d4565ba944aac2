"""Data sets that are folders of pictures: Tiny-ImageNet as published, mini-ImageNet, and a user's class folders.

mini-ImageNet has no official archive. Its pictures are expected as ``<wnid>/*.jpg`` or as ``images/<wnid>*.jpg``. The
split is that of the four published lists, if they are in the same folder. Without them, the last 100 pictures of each
class by name are the test pictures, which deviates from the published split and is recorded.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contnorm.bench.data.arrays import choose_test_samples
from contnorm.bench.data.dataset import Images, Progress, published
from contnorm.bench.data.pictures import decode, read_cropped
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

MINI_WNIDS = tuple(published()["mini-imagenet"])  # in the order of the published stream: the first 15 are for selection
MINI_LISTS = (("mini_val_train.csv", "mini_cl_train.csv"), ("mini_val_test.csv", "mini_cl_test.csv"))
BY_LISTS, BY_NAME = "published lists", "last sixth of each class by name"
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}

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
    return [names, annotations, *(root / "train" / wnid / "images" for wnid in names.read_text().split()), root / "val"]


def list_tiny_imagenet(paths: Sequence[Path]) -> PictureList:
    """List pictures by ``wnids.txt`` and ``val/val_annotations.txt``; the official validation set is the test split."""
    names, annotations = paths
    root = names.parent
    label_of = {wnid: label for label, wnid in enumerate(names.read_text().split())}
    train = [(path, label) for wnid, label in label_of.items() for path in _pictures(root / "train" / wnid / "images")]
    present = {path.name: path for path in _pictures(root / "val" / "images")}
    rows = [line.split("\t")[:2] for line in annotations.read_text().splitlines()]
    return PictureList(train, [(present[name], label_of[wnid]) for name, wnid in rows if name in present])


def mini_imagenet_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the files and folders that change if a picture, a label or the split of mini-ImageNet changes."""
    root = paths[0]  # changes if a list appears or disappears
    lists = [root / name for names in MINI_LISTS for name in names]
    return [root, *_picture_folders(root), *(path for path in lists if path.is_file())]


def _picture_folders(root: Path) -> list[Path]:
    """Return the folders of classes, and the folder of all pictures."""
    return [root / name for name in sorted(os.listdir(root)) if name in (*MINI_WNIDS, "images")]


def list_mini_imagenet(paths: Sequence[Path]) -> PictureList:
    """List the pictures of the 100 classes; labels are positions in the published order of classes."""
    root = paths[0]
    by_class: dict[str, list[Path]] = {wnid: [] for wnid in MINI_WNIDS}
    for folder in _picture_folders(root):
        for path in _pictures(folder, ".jpg"):
            wnid = path.name[:9] if folder.name == "images" else folder.name
            if wnid in by_class:
                by_class[wnid].append(path)
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


def _pictures(folder: Path, ending: str = "") -> list[Path]:
    """Return the files of a folder with an ending, sorted, without hidden files; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(ending) and not name.startswith(".")]


def _listed_test_names(root: Path, by_class: dict[str, list[Path]]) -> set[str] | None:
    """Return the names of the test pictures in the published lists; None if there are no lists."""
    missing = [name for part in MINI_LISTS for name in part if not (root / name).is_file()]
    if len(missing) == 4:
        return None
    if missing:
        raise UserError(f"{root}: {', '.join(missing)} missing. Add what is missing, or remove the others.")
    rows = [[line for name in part for line in (root / name).read_text().splitlines()] for part in MINI_LISTS]
    train, test = ({Path(path).name: int(label) for path, label in csv.reader(lines)} for lines in rows)
    listed = train | test
    for label, pictures in enumerate(by_class.values()):
        for path in pictures:
            if listed.get(path.name) != label:
                raise UserError(
                    f"{root}: the split lists are of other pictures: {path.name} of class {label} has the label "
                    f"{listed.get(path.name)} there. Use the published lists, or remove all of them."
                )
    return set(test)


def read_class_folders(
    folder: Path,
    size: int | None,
    test_share: float,
    target: Path | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[Images, list[str], Images, list[str]]:
    """Read the images of a folder as uint8, with the names of their class folders.

    Args:
        folder: The folder.
        size: Height and width to resize and center-crop to; None if all images have the same size.
        test_share: Share of each class in the test split, if the folder has no subfolder ``test``.
        target: Folder for the files ``train_images.npy`` and ``test_images.npy``; None to keep the images in memory.
        progress: Called with what is done, and how much of it.

    Returns:
        Training images, their labels, test images and their labels.
    """
    tested = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and tested is not None:
        splits = {"train": _list_images(folder / "train"), "test": _list_images(tested)}
    else:
        paths, labels = _list_images(folder)
        test = choose_test_samples(labels, test_share).tolist()
        splits = {
            split: ([path for path, chosen in zip(paths, test, strict=True) if chosen == (split == "test")],
                    [label for label, chosen in zip(labels, test, strict=True) if chosen == (split == "test")])
            for split in ("train", "test")
        }  # fmt: skip
    first = splits["train"][0][0]
    shape = read_cropped(first, size).shape

    def read(path: Path) -> tuple[Images, bytes]:
        image = read_cropped(path, size)
        if image.shape != shape:
            raise UserError(
                f"{first} is {shape[1]} x {shape[2]} pixels and {path} is {image.shape[1]} x {image.shape[2]}; use "
                f"size=N (--size N) to resize all images"
            )
        return image, b""

    images, done, total = {}, 0, sum(len(paths) for paths, _ in splits.values())
    for split, (paths, _) in splits.items():
        count = (len(paths), *shape)
        if target is None:
            images[split] = np.empty(count, dtype=np.uint8)
        else:
            file = target / f"{split}_images.npy"
            images[split] = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=count)
        for _, digests in decode(paths, images[split], read):
            done += len(digests)
            progress("decoding", done, total)
    return images["train"], splits["train"][1], images["test"], splits["test"][1]


def _list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the image files in the class folders of a folder, and the names of their classes."""
    images = [
        (path, entry.name)
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if entry.is_dir() and not entry.name.startswith(".")
        for path in sorted(entry.rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if len({label for _, label in images}) < 2:
        raise UserError(f"{folder}: has no images in folders of two or more classes, such as {folder}/cats/1.png.")
    paths, labels = zip(*images, strict=True)
    return list(paths), list(labels)
