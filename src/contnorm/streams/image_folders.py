"""Data sets that come as folders of pictures: Tiny-ImageNet as it is published, mini-ImageNet as it is passed around.

mini-ImageNet has no official archive. It is read as ``<wnid>/*.jpg``, or as one folder of pictures whose names begin
with the wnid. Which pictures are test pictures is told by the published lists of this stream where they lie beside;
else the last 100 of each class by name are, which is a deviation.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from contnorm.errors import UserError
from contnorm.streams.decoding import squared
from contnorm.streams.formats import Images, Labels
from contnorm.streams.safe_paths import is_plain_name

__all__ = ["MINI_WNIDS", "read_mini_imagenet", "read_tiny_imagenet"]

Split = tuple[Images, Labels]

# fmt: off
# The class at each place of the published stream: the first 15 are for selection.
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


def read_tiny_imagenet(paths: Sequence[Path]) -> tuple[Split, Split]:
    """From ``wnids.txt`` and ``val/val_annotations.txt``; the official validation pictures are the test pictures."""
    names, annotations = paths
    root = names.parent
    wnids = _text(names).split()
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    unusable = [wnid for wnid in wnids if not is_plain_name(wnid)]
    if unusable:
        raise UserError(f"{names}: {unusable[0]!r} is not the name of a class, such as n01443537.")
    train = [(path, label_of[wnid]) for wnid in wnids for path in sorted((root / "train" / wnid / "images").iterdir())]
    test = []
    for number, line in enumerate(_text(annotations).splitlines(), 1):
        name, wnid, *_ = (*line.split("\t"), "")
        if not is_plain_name(name):
            raise UserError(f"{annotations}, line {number}: should begin with the name of a picture, and is {line!r}.")
        if wnid not in label_of:
            raise UserError(f"{annotations}: {name!r} is of class {wnid!r}, which is not in {names}.")
        test.append((root / "val" / "images" / name, label_of[wnid]))
    return _decoded(train, 64), _decoded(test, 64)


def read_mini_imagenet(paths: Sequence[Path]) -> tuple[Split, Split]:
    """From the folder of the pictures; labels are places in the published order of classes."""
    root = paths[0]
    by_class: dict[str, list[Path]] = {wnid: [] for wnid in MINI_WNIDS}
    for path in sorted([*root.glob("n*/*.jpg"), *root.glob("images/n*.jpg")]):
        wnid = path.parent.name if path.parent.name in by_class else path.name[:9]
        if wnid in by_class:
            by_class[wnid].append(path)
    short = {wnid: len(found) for wnid, found in by_class.items() if len(found) < 2}
    if short:
        raise UserError(
            f"{root}: is no whole mini-ImageNet: of 100 classes, {len(short)} have no pictures, such as "
            f"{next(iter(short))}. Looked for <wnid>/*.jpg and images/<wnid>*.jpg."
        )
    is_test = _listed_test_names(root)
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, wnid in enumerate(MINI_WNIDS):
        found = by_class[wnid]
        held_out = set(found[-max(1, len(found) // 6) :])  # the last 100 of 600
        for path in found:
            testing = path in held_out if is_test is None else path.name in is_test
            (test if testing else train).append((path, label))
    return _decoded(train, 84), _decoded(test, 84)


def _listed_test_names(root: Path) -> set[str] | None:
    """The names of the test pictures by the published lists, where all four lie beside the pictures."""
    if not all((root / name).is_file() for part in MINI_LISTS for name in part):
        return None
    names = set()
    for listed in MINI_LISTS[1]:
        try:
            rows = list(csv.reader(io.StringIO(_text(root / listed), newline="")))
        except csv.Error as error:
            raise UserError(f"{root / listed}: is not a CSV file ({error}). Bring it again.") from error
        names |= {Path(row[0]).name for row in rows if row and row[0].strip()}
    return names


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text file in UTF-8 ({error}). Bring it again.") from error


def _decoded(pictures: list[tuple[Path, int]], side: int) -> Split:
    """All pictures as bytes, squared to one side, grey ones in three channels; decoded on several threads."""

    def decode(path: Path) -> Images:
        try:
            return squared(path, side, "bilinear")
        except UserError as error:
            raise UserError(f"{error}. Bring it again.") from error

    images = np.empty((len(pictures), 3, side, side), dtype=np.uint8)
    with ThreadPoolExecutor() as pool:
        for i, image in enumerate(pool.map(decode, (path for path, _ in pictures))):
            images[i] = image
    return images, np.array([label for _, label in pictures], dtype=np.int64)
