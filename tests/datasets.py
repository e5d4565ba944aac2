"""Small data sets in the usual layouts, made here; and where the real ones are, if anywhere."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve()


def real_data(*wanted: str) -> Path:
    """The folder of real data: ``CONTNORM_DATA``, or one beside the checkout; skips where a file is not there."""
    places = [Path(os.environ["CONTNORM_DATA"])] if "CONTNORM_DATA" in os.environ else []
    places += [parent / "shared" / "data" for parent in HERE.parents]
    for place in places:
        if all((place / name).exists() for name in wanted):
            return place
    pytest.skip(f"no real data with {', '.join(wanted)}: set CONTNORM_DATA to its folder")


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def small_mnist(root: Path, train: int = 300, test: int = 100, ending: str = "", folder: str = "mnist") -> Path:
    """Ten classes of blobs that a network can learn, as MNIST's four files."""
    chance = np.random.default_rng(0)
    centres = chance.integers(0, 200, size=(10, 28, 28))
    for stem, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.clip(centres[labels] + chance.integers(0, 56, size=(count, 28, 28)), 0, 255).astype(np.uint8)
        write_idx(root / folder / f"{stem}-images-idx3-ubyte{ending}", images)
        write_idx(root / folder / f"{stem}-labels-idx1-ubyte{ending}", labels)
    return root


def small_cifar100(root: Path, per_class: int = 6, binary: bool = True) -> Path:
    """A hundred classes of noise, in one of CIFAR-100's two layouts."""
    chance = np.random.default_rng(0)
    for split, count in (("train", per_class * 100), ("test", 200)):
        fine = (np.arange(count) % 100).astype(np.uint8)
        images = chance.integers(0, 256, size=(count, 3072), dtype=np.uint8)
        if binary:
            path = root / "cifar-100-binary" / f"{split}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.concatenate([(fine // 5)[:, None], fine[:, None], images], axis=1).tobytes())
        else:
            path = root / "cifar-100-python" / split
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps({b"data": images, b"fine_labels": fine.tolist()}, protocol=2))
    return root
