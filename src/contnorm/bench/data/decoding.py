"""Decode pictures, resize them to squares and write them to rows of an array file; run in worker processes."""

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
from contnorm.bench.signals import unblock_signals
from contnorm.errors import UserError

__all__ = ["Batch", "Done", "Kept", "Piece", "decode_batch", "decoder_name", "fill", "settle", "squared"]

# Accepted picture formats. Pillow has others that start programs (EPS starts Ghostscript) or are obscure.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# Prefixes of Pillow's modes with more than 8 bits per value: conversion to RGB clips them, and does not scale.
DEEP = ("I", "F")


@dataclass(frozen=True)
class Kept:
    """A picture that an earlier build has decoded: array file and row."""

    array: Path
    row: int


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of an array file and the pictures that are decoded into them.

    Attributes:
        split, number: Split, and number of the piece in it.
        array: File of the array.
        offset: Position of the first row in the file, in bytes.
        side: Height and width of a row, in pixels.
    """

    split: str
    number: int
    array: Path
    offset: int
    side: int
    pictures: tuple[Path | Kept, ...]


@dataclass(frozen=True)
class Done:
    """Result of a piece: the hash of its pixels, or the problems of its pictures, in which case nothing was written."""

    piece: Piece
    digest: str
    problems: tuple[str, ...] = ()


def squared(path: Path, side: int, how: Literal["bicubic", "bilinear"] = "bicubic") -> Images:
    """Decode a picture as RGB and resize it to a square, regardless of its aspect ratio; returns (3, side, side).

    EXIF orientation is ignored, as in the published code.

    Raises:
        UserError: If the picture has another format than `FORMATS`, more than 8 bits per value, or more pixels than
            Pillow's limit.
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
    except Exception as error:  # other files and damaged pictures can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: is no picture that can be read ({reason}); known formats are {', '.join(FORMATS)}"
        ) from error
    return np.asarray(resized).transpose(2, 0, 1)


def fill(piece: Piece) -> Done:
    """Decode the pictures of a piece, and write and sync them to disk unless one of them cannot be read."""
    rows = np.empty((len(piece.pictures), 3, piece.side, piece.side), dtype=np.uint8)
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large pictures and odd metadata; errors are reported
        for i, picture in enumerate(piece.pictures):
            try:
                rows[i] = _load_row(picture) if isinstance(picture, Kept) else squared(picture, piece.side)
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
    """Return the versions of the image decoder: decoded JPEG pixels can differ between versions in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"


def _load_row(row_ref: Kept) -> Images:
    row: Images = np.load(row_ref.array, mmap_mode="r")[row_ref.row]
    return row


def settle() -> None:
    """Initialize a worker process: it ignores Ctrl-C, which the parent handles, and ends when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unblock_signals([signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
