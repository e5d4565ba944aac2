"""Folders of images with one label each: ``train/<class>/*`` and ``test/<class>/*``, or ``<class>/*``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.rng import generator
from contnorm.errors import UserError

__all__ = ["read_class_folders"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
Labelled = list[tuple[Path, str]]
Arrays = tuple[NDArray[np.uint8], list[str], NDArray[np.uint8], list[str]]


def read_class_folders(folder: Path, size: int | None, test_share: float) -> Arrays:
    """Read the images of a folder into memory as uint8, with the names of their class folders.

    Args:
        folder: The folder.
        size: Height and width to resize and center-crop to; None if all images have the same size.
        test_share: Share of each class in the test split, if the folder has no subfolder ``test``.

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
    images = _read([path for path, _ in train + test], size)
    labels = [label for _, label in train + test]
    count = len(train)
    return images[:count], labels[:count], images[count:], labels[count:]


def _list_images(folder: Path) -> Labelled:
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


def _split(images: Labelled, share: float) -> tuple[Labelled, Labelled]:
    """Split each class into training and test images, at random with a fixed seed."""
    if not 0 < share < 1:
        raise UserError(f"test_share={share}: use a number between 0 and 1.")
    train: Labelled = []
    test: Labelled = []
    for label in sorted({label for _, label in images}):
        of_class = [image for image in images if image[1] == label]
        if len(of_class) < 2:
            raise UserError(f"class {label!r} has one image. Use at least two, so that one is in the test split.")
        count = min(len(of_class) - 1, max(1, round(share * len(of_class))))
        chosen = set(generator(0, f"test {label}").permutation(len(of_class))[:count].tolist())
        test += [image for i, image in enumerate(of_class) if i in chosen]
        train += [image for i, image in enumerate(of_class) if i not in chosen]
    return train, test


def _read(paths: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        images = list(workers.map(lambda path: _read_image(path, size), paths))
    shapes = {image.shape: path for image, path in zip(images, paths, strict=True)}
    if len(shapes) > 1:
        (a, first), (b, second) = list(shapes.items())[:2]
        raise UserError(
            f"{first} is {a[1]} x {a[2]} pixels and {second} is {b[1]} x {b[2]}. Use size=N to resize all images."
        )
    return np.stack(images)


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
