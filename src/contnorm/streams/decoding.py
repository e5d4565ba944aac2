"""A piece of a data set: some pictures decoded, squared, and written to their rows. Done by one process of several."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contnorm.errors import UserError
from contnorm.signals import signals_let_go
from contnorm.streams.formats import Images

__all__ = ["Done", "Kept", "Piece", "fill", "settle", "squared"]


@dataclass(frozen=True)
class Kept:
    """A picture that an earlier build has decoded: the array it is in, and its row."""

    array: Path
    row: int


@dataclass(frozen=True)
class Piece:
    """Rows of an array, and the pictures that go there.

    Attributes:
        split, number: Which piece it is.
        array: The file of the array.
        offset: Where in the file its rows begin.
    """

    split: str
    number: int
    array: Path
    offset: int
    side: int
    pictures: tuple[Path | Kept, ...]


@dataclass(frozen=True)
class Done:
    """A piece that is written, with the hash of its pixels; or what is wrong with its pictures, and nothing written."""

    piece: Piece
    digest: str
    problems: tuple[str, ...] = ()


def squared(path: Path, side: int) -> Images:
    """A picture as bytes, channels first: bicubic to a square whatever its shape, grey in three channels."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            resized = picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{path}: is no picture that can be read ({said})") from error
    return np.asarray(resized).transpose(2, 0, 1)


def fill(piece: Piece) -> Done:
    """Decode the pictures of a piece and write them, to the disk and not just towards it, unless one can't be read."""
    rows = np.empty((len(piece.pictures), 3, piece.side, piece.side), dtype=np.uint8)
    problems = []
    for i, picture in enumerate(piece.pictures):
        try:
            rows[i] = _copied(picture) if isinstance(picture, Kept) else squared(picture, piece.side)
        except UserError as error:
            problems.append(str(error))
    if problems:
        return Done(piece, "", tuple(problems))
    with piece.array.open("r+b") as file:
        file.seek(piece.offset)
        file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())
    return Done(piece, hashlib.sha256(rows.data).hexdigest())


def _copied(kept: Kept) -> Images:
    row: Images = np.load(kept.array, mmap_mode="r")[kept.row]
    return row


def settle() -> None:
    """At the start of a process of several: it leaves Ctrl-C to the one that began it, and does not outlive that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals_let_go([signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
