"""Readers of published data sets: MNIST's idx files, CIFAR's pickles and binary files, and folders of pictures.

Nothing in a file is executed. mini-ImageNet has no official archive: its pictures are expected as ``<wnid>/*.jpg`` or
as ``images/<wnid>*.jpg``. The split is that of the four published lists, if they are in the same folder. Without them,
the last 100 pictures of each class by name are the test pictures, which deviates from the published split and is
recorded.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import Images, Labels, Split, published
from contnorm.errors import UserError

MINI_WNIDS = tuple(published()["mini-imagenet"])  # in the order of the published stream: the first 15 are for selection
MINI_LISTS = (("mini_val_train.csv", "mini_cl_train.csv"), ("mini_val_test.csv", "mini_cl_test.csv"))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read()
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"it starts with {content[:4]!r} and is not an idx file of bytes")
    rank = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=rank, offset=4).tolist()
    if len(content) != 4 + 4 * rank + math.prod(shape):
        raise ValueError(f"it has {len(content):,} bytes, which do not fit its shape {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_mnist(paths: Sequence[Path]) -> tuple[Split, Split]:
    """Read the four idx files: training images and labels, test images and labels."""
    images, labels, test_images, test_labels = map(read_idx, paths)
    return (images[:, None], labels.astype(np.int64)), (test_images[:, None], test_labels.astype(np.int64))


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of numbers, strings, lists, dictionaries and NumPy arrays: it refuses to import anything else."""

    allowed = (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not data")
        return super().find_class(module, name)


def read_cifar_pickle(path: Path, labels: str) -> tuple[Images, Labels]:
    """Read an official pickled batch; ``labels`` is the key of its labels. Nothing in the file is executed."""
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    content = {key if isinstance(key, bytes) else key.encode(): value for key, value in batch.items()}
    images = np.asarray(content[b"data"], dtype=np.uint8)
    return images.reshape(-1, 3, 32, 32), np.asarray(content[labels.encode()], dtype=np.int64)


def read_cifar_binary(path: Path, label_bytes: int) -> tuple[Images, Labels]:
    """Read records of 3,072 bytes of pixels after one label (CIFAR-10), or a coarse and a fine one (CIFAR-100)."""
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, label_bytes + 3072)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def read_splits(
    read: Callable[..., tuple[Images, Labels]], *arguments: object
) -> Callable[[Sequence[Path]], tuple[Split, Split]]:
    """Return a reader of files of which the last is the test split, and the others are the training split."""

    def read_files(paths: Sequence[Path]) -> tuple[Split, Split]:
        parts = [read(path, *arguments) for path in paths]
        images, labels = zip(*parts[:-1], strict=True)
        return (np.concatenate(images), np.concatenate(labels)), parts[-1]

    return read_files


@dataclass(frozen=True)
class PictureList:
    """Picture files of a data set with their labels, in the order of its samples.

    Attributes:
        split: How pictures were assigned to the training and the test split; empty if there is only one official split.
    """

    train: list[tuple[Path, int]]
    test: list[tuple[Path, int]]
    split: str = ""


def list_tiny_imagenet(paths: Sequence[Path]) -> PictureList:
    """List pictures by ``wnids.txt`` and ``val/val_annotations.txt``; the official validation set is the test split."""
    names, annotations = paths
    root = names.parent
    label_of = {wnid: label for label, wnid in enumerate(names.read_text().split())}
    train = [(path, label) for wnid, label in label_of.items() for path in _pictures(root / "train" / wnid / "images")]
    present = {path.name: path for path in _pictures(root / "val" / "images")}
    rows = [line.split("\t")[:2] for line in annotations.read_text().splitlines()]
    return PictureList(train, [(present[name], label_of[wnid]) for name, wnid in rows if name in present])


def _pictures(folder: Path) -> list[Path]:
    """Return the files of a folder, sorted, without hidden files; empty if the folder does not exist."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if not name.startswith(".")]


def list_mini_imagenet(paths: Sequence[Path]) -> PictureList:
    """List the pictures of the 100 classes; labels are positions in the published order of classes."""
    root = paths[0]
    by_class: dict[str, list[Path]] = {wnid: [] for wnid in MINI_WNIDS}
    for folder in (root / name for name in (*MINI_WNIDS, "images")):
        for path in _pictures(folder):
            wnid = path.name[:9] if folder.name == "images" else folder.name
            if wnid in by_class and path.suffix == ".jpg":
                by_class[wnid].append(path)
    empty = [wnid for wnid, pictures in by_class.items() if len(pictures) < 2]
    if empty:
        raise UserError(
            f"{root}: is not mini-ImageNet: {len(empty)} of {len(MINI_WNIDS)} classes have fewer than 2 pictures, such "
            f"as {empty[0]}. Pictures are expected as <wnid>/*.jpg or images/<wnid>*.jpg."
        )
    missing = [name for names in MINI_LISTS for name in names if not (root / name).is_file()]
    if 0 < len(missing) < 4:
        raise UserError(f"{root}: {', '.join(missing)} missing. Add what is missing, or remove the others.")
    listed: list[dict[str, int]] = []  # label by name, of the training and of the test pictures
    for names in () if missing else MINI_LISTS:
        rows = csv.reader(line for name in names for line in (root / name).read_text().splitlines())
        listed.append({Path(path).name: int(label) for path, label in rows})
    train, test = list[tuple[Path, int]](), list[tuple[Path, int]]()
    for label, pictures in enumerate(by_class.values()):
        last = set(pictures[-max(1, len(pictures) // 6) :])  # 100 of 600
        for path in pictures:
            is_test = path.name in listed[1] if listed else path in last
            if listed and listed[is_test].get(path.name) != label:
                raise UserError(
                    f"{root}: the split lists are of other pictures: {path.name} of class {label} is not there. Use "
                    f"the published lists, or remove all of them."
                )
            (test if is_test else train).append((path, label))
    return PictureList(train, test, "published lists" if listed else "last sixth of each class by name")
