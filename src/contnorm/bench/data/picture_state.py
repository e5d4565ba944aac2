"""Which files the pictures of a build were decoded from, to notice one that was replaced by another of the same size.

A picture counts as unchanged while its size, modification time and inode are what they were when it was decoded. The
size is part of the plan of a build; the others are kept next to the arrays, row by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from contnorm.bench.data.decoding import squared
from contnorm.bench.data.file_state import Signature, load_state
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed, ListedPicture
from contnorm.bench.records import write_atomically
from contnorm.errors import UserError

__all__ = ["changed_pictures", "changed_rows", "load_signatures", "picture_signature", "save_signatures"]

FILE = "pictures.json"
Signatures = Mapping[str, list[Signature]]  # by split, in the order of the rows


def picture_signature(picture: ListedPicture) -> Signature:
    """Modification time in ns and inode of a picture that is there."""
    assert picture.path is not None
    info = picture.path.stat()
    return [info.st_mtime_ns, info.st_ino]


def save_signatures(folder: Path, listed: Listed) -> None:
    """Remember the files of all pictures; called before they are decoded, so that a change meanwhile is noticed."""
    signatures = {split: [picture_signature(picture) for picture in listed.present(split)] for split in SPLITS}
    write_atomically(folder / FILE, json.dumps(signatures).encode())


def load_signatures(folder: Path) -> Signatures:
    """What `save_signatures` wrote; empty for builds of earlier versions, which have none."""
    state = load_state(folder / FILE)
    found = {split: rows for split, rows in state.items() if split in SPLITS and isinstance(rows, list)}
    return found if len(found) == len(SPLITS) else {}


def changed_rows(folder: Path, listed: Listed) -> Iterator[tuple[str, int, ListedPicture]]:
    """Rows of a build whose picture is another file than the one that was decoded: split, row and picture."""
    known = load_signatures(folder)
    for split in SPLITS if known else ():
        present = listed.present(split)
        rows = known[split] if len(known[split]) == len(present) else [None] * len(present)
        for row, (was, picture) in enumerate(zip(rows, present, strict=True)):
            if was != picture_signature(picture):
                yield split, row, picture


def changed_pictures(folder: Path, listed: Listed, side: int, jobs: int) -> list[ListedPicture]:
    """Pictures that have other pixels than their rows of a finished build; only changed files are decoded for this."""
    rows = list(changed_rows(folder, listed))
    if not rows:
        return []
    arrays = {split: np.load(folder / f"{split}_images.npy", mmap_mode="r") for split in SPLITS}

    def differs(row: tuple[str, int, ListedPicture]) -> bool:
        split, place, picture = row
        assert picture.path is not None
        try:
            return not np.array_equal(squared(picture.path, side), arrays[split][place])
        except UserError:  # it cannot be read any more
            return True

    with ThreadPoolExecutor(jobs) as pool:
        changed = [row[2] for row, is_other in zip(rows, pool.map(differs, rows), strict=True) if is_other]
    if not changed:
        with suppress(OSError):  # the next build compares them again
            save_signatures(folder, listed)
    return changed
