"""File signatures of the pictures of a build, to detect a picture that was replaced by another of the same size.

A picture counts as unchanged while it has the size, modification time and inode that it had when it was decoded. The
size is part of the plan of a build. The others are stored next to the arrays, row by row.
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
    """Return the modification time in ns and the inode of an existing picture."""
    assert picture.path is not None
    info = picture.path.stat()
    return [info.st_mtime_ns, info.st_ino]


def save_signatures(folder: Path, listed: Listed) -> None:
    """Store the signatures of all pictures; called before decoding, so that a change during decoding is detected."""
    signatures = {split: [picture_signature(picture) for picture in listed.present(split)] for split in SPLITS}
    write_atomically(folder / FILE, json.dumps(signatures).encode())


def load_signatures(folder: Path) -> Signatures:
    """Load the signatures that `save_signatures` stored; empty for builds of earlier versions, which have none."""
    state = load_state(folder / FILE)
    by_split = {split: rows for split, rows in state.items() if split in SPLITS and isinstance(rows, list)}
    return by_split if len(by_split) == len(SPLITS) else {}


def changed_rows(folder: Path, listed: Listed) -> Iterator[tuple[str, int, ListedPicture]]:
    """Yield split, row and picture of the rows whose file is not the one that was decoded."""
    known = load_signatures(folder)
    for split in SPLITS if known else ():
        present = listed.present(split)
        rows = known[split] if len(known[split]) == len(present) else [None] * len(present)
        for row, (signature, picture) in enumerate(zip(rows, present, strict=True)):
            if signature != picture_signature(picture):
                yield split, row, picture


def changed_pictures(folder: Path, listed: Listed, side: int, jobs: int) -> list[ListedPicture]:
    """Return pictures whose pixels differ from their rows of a finished build; only changed files are decoded."""
    rows = list(changed_rows(folder, listed))
    if not rows:
        return []
    arrays = {split: np.load(folder / f"{split}_images.npy", mmap_mode="r") for split in SPLITS}

    def differs(row: tuple[str, int, ListedPicture]) -> bool:
        split, index, picture = row
        assert picture.path is not None
        try:
            return not np.array_equal(squared(picture.path, side), arrays[split][index])
        except UserError:  # it can no longer be read
            return True

    with ThreadPoolExecutor(jobs) as pool:
        changed = [row[2] for row, has_changed in zip(rows, pool.map(differs, rows), strict=True) if has_changed]
    if not changed:
        with suppress(OSError):  # the next build compares them again
            save_signatures(folder, listed)
    return changed
