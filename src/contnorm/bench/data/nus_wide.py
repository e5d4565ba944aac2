"""List NUS-WIDEseq from the published files of NUS-WIDE: image lists, label files, pictures, and lists of the tasks.

The numbers in the task lists are positions, from 0, in the official lists of training and test images. The pictures
were on Flickr in 2009, and many are no longer available. Missing pictures are counted, and a build without them is
recorded as incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.id_lists import IdLists, listed_as
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed, ListedPicture
from contnorm.bench.data.published_streams import published_stream
from contnorm.errors import UserError, usable

__all__ = ["NusWide", "list_nus_wideseq", "read_nus_wide"]

IMAGE_LISTS = ("ImageList", "Imagelist", ".")
LABELS = ("TrainTestLabels", "Groundtruth/TrainTestLabels")
PICTURES = ("image", "images", "Flickr", "images/Flickr")


@dataclass(frozen=True)
class NusWide:
    """Annotations of NUS-WIDE by split: file names in the order of the official list, and labels (images, classes)."""

    names: dict[str, list[str]]
    labels: dict[str, NDArray[np.bool_]]


def read_nus_wide(nus: Path) -> NusWide:
    """Read the image lists, and the label files of the classes of the stream."""
    if not nus.is_dir():
        raise UserError(f"--nus {nus}: is no folder. Give the one that holds NUS-WIDE's lists, labels and pictures.")
    names, labels = {}, {}
    for split in SPLITS:
        path = _first(nus, [f"{folder}/{split.title()}Imagelist.txt" for folder in IMAGE_LISTS], "image list")
        names[split] = _lines(path)
        labels[split] = _labels(nus, split, path, len(names[split]))
    return NusWide(names, labels)


def list_nus_wideseq(nus: Path, found: NusWide, lists: IdLists) -> Listed:
    """Return the pictures of the lists with their labels, and their files if they exist."""
    stream = published_stream("nus-wideseq")
    for split in SPLITS:
        _check_places(found.names[split], lists, split)

    def picture(split: str, place: int, task: int) -> ListedPicture:
        columns = tuple(np.flatnonzero(found.labels[split][place]).tolist())
        return ListedPicture(place, _file(nus, found.names[split][place]), task, columns)

    return listed_as(stream, lists, picture)


def _first(nus: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (nus / name).is_file():
            return nus / name
    raise UserError(f"{nus}: has no {what}. Looked for {', '.join(str(Path(name)) for name in names)}. Bring it.")


def _lines(path: Path) -> list[str]:
    with usable(path, "it can't be read", "Let yourself read it."):
        return [
            line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]


def _labels(nus: Path, split: str, image_list: Path, count: int) -> NDArray[np.bool_]:
    """Read one column per class from files with a 0 or 1 per line, in the order of the image list."""
    columns = []
    for name in published_stream("nus-wideseq").class_names:
        path = _first(nus, [f"{folder}/Labels_{name}_{split.title()}.txt" for folder in LABELS], "labels")
        lines = _lines(path)
        if len(lines) != count:
            raise UserError(
                f"{path}: has {len(lines):,} labels for the {count:,} images of {image_list}. Bring it again."
            )
        if not set(lines) <= {"0", "1"}:
            wrong = next(line for line in lines if line not in ("0", "1"))
            raise UserError(f"{path}: should have 0 or 1 in each line, and has {wrong!r}.")
        columns.append(np.array(lines) == "1")
    return np.stack(columns, axis=1)


def _check_places(names: Sequence[str], lists: IdLists, split: str) -> None:
    for path, places in zip(lists.where[split], lists.ids[split], strict=True):
        outside = [place for place in places if not 0 <= place < len(names)]
        if outside:
            raise UserError(
                f"{path}: {len(outside):,} of its numbers are no places in the {split} image list, which has "
                f"{len(names):,}, such as {outside[0]}. Bring the official list."
            )


def _file(nus: Path, listed: str) -> Path | None:
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
    for folder in PICTURES:
        for path in (nus / folder / relative, nus / folder / name.name):
            with usable(path, "it can't be looked for", "Let yourself read there."):
                if path.is_file():
                    return path
    return None
