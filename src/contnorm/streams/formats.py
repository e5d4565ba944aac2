"""The usual files of the field, read as they are found: MNIST's idx, CIFAR's pickles and binaries.

Each reader gives uint8 images as (samples, channels, height, width) and int64 labels, and names the file and the check
where something is wrong. CIFAR's official pickles are opened by an unpickler that knows nothing but arrays.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.errors import UserError

__all__ = ["Images", "Labels", "read_cifar_binary", "read_cifar_pickle", "read_idx"]

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes, gzipped or not."""
    content = _content(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise UserError(f"{path}: is no idx file of bytes (its first bytes are {content[:4]!r}).")
    rank = content[3]
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    body = content[4 + 4 * rank :]
    if len(body) != int(np.prod(sizes)):
        raise UserError(f"{path}: should hold {int(np.prod(sizes)):,} values after its head, and holds {len(body):,}.")
    return np.frombuffer(body, dtype=np.uint8).reshape(sizes)


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: can't be read: it is cut short or damaged ({error}).") from error


def read_cifar_binary(path: Path, coarse: bool) -> tuple[Images, Labels]:
    """Records of one label (CIFAR-10), or a coarse and a fine one (CIFAR-100), and 3,072 bytes."""
    head = 2 if coarse else 1
    raw = np.frombuffer(_content(path), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % (head + 3072):
        raise UserError(f"{path}: its {len(raw):,} bytes are no whole number of records of {head + 3072}.")
    records = raw.reshape(-1, head + 3072)
    return records[:, head:].reshape(-1, 3, 32, 32), records[:, head - 1].astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and nothing else: a pickle that asks for anything more is refused."""

    _allowed = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar_pickle(path: Path, labels: str) -> tuple[Images, Labels]:
    """One of the official pickled batches; ``labels`` is the key of its labels."""
    try:
        found = _ArraysOnly(io.BytesIO(_content(path)), encoding="bytes").load()
        images, given = found[b"data"], found[labels.encode()]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: is no CIFAR batch ({error}).") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape != (len(given), 3072):
        raise UserError(
            f"{path}: should hold rows of 3,072 bytes, one a label, and holds {images.dtype} {images.shape}."
        )
    return images.reshape(-1, 3, 32, 32), np.asarray(given, dtype=np.int64)
