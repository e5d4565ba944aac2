"""Readers of the published file formats: MNIST's idx files, and CIFAR's pickles and binary files.

They return uint8 images (samples, channels, height, width) and int64 labels of both splits.
"""

from __future__ import annotations

import gzip
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import Images, Labels, Split

__all__ = ["read_cifar_binary", "read_cifar_pickle", "read_idx", "read_mnist", "read_splits"]


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


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of numbers, strings, lists, dictionaries and NumPy arrays: it refuses to import anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
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
