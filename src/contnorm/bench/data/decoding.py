"""A piece of a data set: some pictures decoded, squared, and written to their rows. Done by one process of several."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from contnorm.bench.data.formats import Images
from contnorm.bench.signals import signals_let_go
from contnorm.errors import UserError

__all__ = ["Batch", "Done", "Kept", "Piece", "decode_batch", "decoder_name", "fill", "settle", "squared"]

# The formats that pictures may have. Pillow knows others that start programs (EPS starts Ghostscript) or are obscure.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
DEEP = ("I", "F")  # how Pillow's modes of more than 8 bits a value begin: made RGB, they are clipped, not scaled


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


def squared(path: Path, side: int, how: Literal["bicubic", "bilinear"] = "bicubic") -> Images:
    """A picture as bytes, channels first: made a square whatever its shape, grey in three channels.

    As its pixels are stored: a turn that a camera noted beside them (EXIF) is not made, as in the published code.
    Pictures of other formats than `FORMATS`, or with more pixels than Pillow's limit, raise a `UserError`.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as picture:
            if picture.mode.startswith(DEEP):
                raise UserError(
                    f"{path}: has more than 8 bits a value (mode {picture.mode}), and all above 255 would be cut off; "
                    f"save it with 8"
                )
            resized = picture.convert("RGB").resize((side, side), Image.Resampling[how.upper()])
    except UserError:
        raise
    except Exception as error:  # what is no picture, or a damaged one, can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: is no picture that can be read ({reason}); known formats are {', '.join(FORMATS)}"
        ) from error
    return np.asarray(resized).transpose(2, 0, 1)


def fill(piece: Piece) -> Done:
    """Decode the pictures of a piece and write them, to the disk and not just towards it, unless one can't be read."""
    rows = np.empty((len(piece.pictures), 3, piece.side, piece.side), dtype=np.uint8)
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large pictures and odd notes beside the pixels; what is wrong is told
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


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of an array file and the pictures that are decoded into them.

    Attributes:
        start: Index of the first picture among all that are decoded.
        array: File of the array.
        offset: Position of the first row in the file, in bytes.
        side: Height and width of a row, in pixels.
    """

    start: int
    array: Path
    offset: int
    side: int
    pictures: tuple[Path, ...]


def decode_batch(batch: Batch) -> list[bytes]:
    """Decode pictures into their rows; returns the SHA-256 of each encoded file."""
    rows = np.empty((len(batch.pictures), 3, batch.side, batch.side), dtype=np.uint8)
    digests = []
    for i, path in enumerate(batch.pictures):
        rows[i] = squared(path, batch.side, "bilinear")
        digests.append(hashlib.sha256(path.read_bytes()).digest())
    with batch.array.open("r+b") as file:
        file.seek(batch.offset)
        file.write(rows.data)
    return digests


def decoder_name() -> str:
    """Versions of the image decoder: decoded JPEG pixels may differ between them in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"


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
