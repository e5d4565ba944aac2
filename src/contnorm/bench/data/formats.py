"""Readers of files: MNIST's idx, CIFAR's pickles and binary files, pictures, and the folders of published data sets.

Nothing in a file is executed. mini-ImageNet has no official archive: its pictures are expected as ``<wnid>/*.jpg`` or
as ``images/<wnid>*.jpg``. The split is that of the four published lists, if they are in the same folder. Without them,
the last 100 pictures of each class by name are the test pictures, which deviates from the published split and is
recorded.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import Images, Labels, Progress, Split, published
from contnorm.errors import UserError, usable

MINI_WNIDS = tuple(published()["mini-imagenet"])  # in the order of the published stream: the first 15 are for selection
MINI_LISTS = (("mini_val_train.csv", "mini_cl_train.csv"), ("mini_val_test.csv", "mini_cl_test.csv"))
BLOCK = 64  # pictures that are decoded and reported together; an interrupt waits for one block of each thread
# Pillow has other formats that start programs: EPS starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
EXAMPLES = 5  # unreadable pictures that a message names

Resize = Literal["bilinear", "bicubic", "crop"]  # resize to a square regardless of the aspect ratio, or crop to one


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


# Decoding of pictures, in threads: Pillow decodes and resizes without the interpreter lock


def cores() -> int:
    """Number of cores that this process may use; in a container this may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_pictures(
    splits: Mapping[str, Sequence[Path]],
    size: int | None,
    resize: Resize,
    folder: Path | None,
    progress: Progress,
    jobs: int | None = None,
) -> tuple[dict[str, Images], dict[str, list[bytes]]]:
    """Decode the pictures of the splits of a data set.

    Args:
        splits: Picture files by split.
        size: Height and width that pictures are resized to; None if all have the same size.
        resize: How they are resized.
        folder: Folder for the files ``train_images.npy`` and ``test_images.npy``; None to keep the pixels in memory.
        progress: Called with what is done, the number of decoded pictures, and the number of all.
        jobs: Number of threads; None for one per core.

    Returns:
        The pixels (pictures, 3, height, width) and the SHA-256 of each file, by split.

    Raises:
        UserError: If pictures cannot be read; it names several of them.
    """
    first = next(chain.from_iterable(splits.values()))
    shape = (3, size, size) if size else read_picture(first, None, resize)[0].shape
    images, digests, problems = {}, {}, list[str]()
    for split, paths in splits.items():
        of_split = (len(paths), *shape)
        digests[split] = [b""] * len(paths)
        if folder is None:
            images[split] = np.empty(of_split, dtype=np.uint8)
        else:
            file = folder / f"{split}_images.npy"
            images[split] = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=of_split)

    def decode_block(split: str, start: int) -> int:
        paths = splits[split][start : start + BLOCK]
        for i, path in enumerate(paths, start):
            try:
                pixels, digests[split][i] = read_picture(path, size, resize)
                if pixels.shape != shape:
                    size_of = "{1} x {2}".format
                    raise UserError(f"{path}: is {size_of(*pixels.shape)} pixels, and others {size_of(*shape)}")
                images[split][i] = pixels
            except UserError as error:
                problems.append(str(error))
        return len(paths)

    done, total = 0, sum(map(len, splits.values()))
    progress("decoding pictures", done, total)
    pool = ThreadPoolExecutor(jobs or cores())
    try:
        blocks = [(split, start) for split, paths in splits.items() for start in range(0, len(paths), BLOCK)]
        for future in as_completed([pool.submit(decode_block, *block) for block in blocks]):
            done += future.result()
            progress("decoding pictures", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        more = f"; {len(problems) - EXAMPLES:,} more" if len(problems) > EXAMPLES else ""
        advice = "Replace or remove them, or resize all with size=N (--size N)."
        raise UserError(f"{'; '.join(sorted(problems)[:EXAMPLES])}{more}. {advice}")
    return images, digests


def read_picture(path: Path, size: int | None, resize: Resize) -> tuple[Images, bytes]:
    """Decode a picture as RGB, and resize it to a square; None keeps its size.

    EXIF orientation is ignored, as in the published code.

    Returns:
        The pixels (3, height, width), and the SHA-256 of the file.
    """
    from PIL import Image, ImageOps

    content = path.read_bytes()
    problem = f"cannot be read as a picture of {', '.join(FORMATS)}"
    with (
        usable(path, problem, "", ValueError, SyntaxError, Image.DecompressionBombError),
        Image.open(io.BytesIO(content), formats=FORMATS) as picture,
    ):
        if picture.mode.startswith(("I", "F")):  # conversion to RGB would clip values above 255
            raise ValueError(f"mode {picture.mode} has more than 8 bits per value")
        image = picture.convert("RGB")
    if size is not None and resize == "crop":
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    elif size is not None:
        image = image.resize((size, size), Image.Resampling[resize.upper()])
    return np.asarray(image).transpose(2, 0, 1), hashlib.sha256(content).digest()


def decoder_name() -> str:
    """Return the versions of the image decoder: decoded JPEG pixels can differ between versions in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"
