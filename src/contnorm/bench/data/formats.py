"""Readers of the published file formats: MNIST's idx files, and CIFAR's pickles and binary files.

CIFAR's readers return uint8 images (samples, channels, height, width) and int64 labels. Errors name the file and the
check that failed. CIFAR's official pickles are parsed without unpickling them: see `array_pickle`.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.array_pickle import PickleFormatError, parse_array_pickle
from contnorm.errors import UserError

__all__ = ["Images", "Labels", "read_cifar_binary", "read_cifar_pickle", "read_idx"]

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
MAX_BYTES = 2**30  # limit for decompressed files; the largest official one has 160 million


def read_idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not.

    Args:
        path: File.
        rank: Required number of dimensions: 3 for images, 1 for labels.
    """
    content = _content(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise UserError(
            f"{path}: is not an idx file of bytes: it starts with {content[:4]!r} instead of b'\\x00\\x00\\x08'."
        )
    if content[3] != rank:
        raise UserError(f"{path}: has {content[3]} dimensions according to its header; {rank} are expected.")
    if len(content) < 4 + 4 * rank:
        raise UserError(f"{path}: the header is cut short: {len(content)} of {4 + 4 * rank} bytes.")
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    body = content[4 + 4 * rank :]
    if not all(sizes) or len(body) != math.prod(sizes):
        shape = " x ".join(f"{size:,}" for size in sizes)
        raise UserError(
            f"{path}: holds {len(body):,} values after its header, which announces {shape}. The file is damaged or cut "
            f"short: bring it again."
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(sizes)


def _content(path: Path) -> bytes:
    """Read a file, decompressed, up to `MAX_BYTES`: a small gzip file can expand to any size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: can't be read: it is cut short or damaged ({error}).") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: holds more than {MAX_BYTES:,} bytes, so it can't be the expected file.")
    return content


def read_cifar_binary(path: Path, coarse: bool) -> tuple[Images, Labels]:
    """Read records of one label (CIFAR-10), or a coarse and a fine label (CIFAR-100), and 3,072 bytes of pixels."""
    head = 2 if coarse else 1
    raw = np.frombuffer(_content(path), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % (head + 3072):
        raise UserError(f"{path}: its {len(raw):,} bytes are no whole number of records of {head + 3072}.")
    records = raw.reshape(-1, head + 3072)
    return records[:, head:].reshape(-1, 3, 32, 32), records[:, head - 1].astype(np.int64)


def read_cifar_pickle(path: Path, labels: str) -> tuple[Images, Labels]:
    """Read an official pickled batch; ``labels`` is the key of its labels. Nothing in the file is executed."""
    try:
        batch = parse_array_pickle(_content(path))
    except PickleFormatError as error:
        raise UserError(f"{path}: is not a CIFAR batch: {error}.") from error
    absent = [key for key in ("data", labels) if key.encode() not in batch]
    if absent:
        raise UserError(f"{path}: is not a CIFAR batch: it has no {absent[0]!r}.")
    images, classes = batch[b"data"], batch[labels.encode()]
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
        raise UserError(f"{path}: is not a CIFAR batch: 'data' should be rows of 3,072 bytes.")
    numbers = _checked_labels(path, labels, classes)
    if len(numbers) != len(images):
        raise UserError(
            f"{path}: has {len(images):,} images and {len(numbers):,} {labels}; there must be one label per image."
        )
    return images.reshape(-1, 3, 32, 32), numbers


def _checked_labels(path: Path, key: str, labels: object) -> Labels:
    """Convert labels from a list of integers or an array of bytes."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        return labels.astype(np.int64)
    if not isinstance(labels, list):
        raise UserError(f"{path}: is not a CIFAR batch: {key!r} should be a list of whole numbers.")
    for position, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < 256:
            kind = str(label)[:20] if type(label) is int and abs(label) < 2**63 else type(label).__name__
            raise UserError(
                f"{path}: label {position} of {key!r} should be a whole number from 0 to 255, and is {kind}."
            )
    return np.array(labels, dtype=np.int64)
