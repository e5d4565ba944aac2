"""Small data sets in the usual layouts, made here; and where the real ones are, if anywhere."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contnorm.streams.image_folders import MINI_LISTS, MINI_WNIDS
from contnorm.streams.multilabel import GROUPS, MultiLabelSource

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


def small_cifar100(
    root: Path, per_class: int = 6, binary: bool = True, test_labels: Sequence[int] = tuple(range(100)) * 2
) -> Path:
    """A hundred classes of noise, in one of CIFAR-100's two layouts."""
    chance = np.random.default_rng(0)
    for split, labels in (("train", list(range(100)) * per_class), ("test", list(test_labels))):
        fine = np.array(labels, dtype=np.uint8)
        images = chance.integers(0, 256, size=(len(fine), 3072), dtype=np.uint8)
        if binary:
            path = root / "cifar-100-binary" / f"{split}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.concatenate([(fine // 5)[:, None], fine[:, None], images], axis=1).tobytes())
        else:
            path = root / "cifar-100-python" / split
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps({b"data": images, b"fine_labels": fine.tolist()}, protocol=2))
    return root


def small_cifar10(root: Path, per_class: int = 20, test_labels: Sequence[int] = range(10)) -> Path:
    """Ten classes of noise, in CIFAR-10's binary layout: five files to learn from, one to test."""
    chance = np.random.default_rng(0)
    labels = np.array(list(range(10)) * per_class, dtype=np.uint8)
    parts = {f"data_batch_{i + 1}": part for i, part in enumerate(np.array_split(labels, 5))}
    parts["test_batch"] = np.array(test_labels, dtype=np.uint8)
    for name, part in parts.items():
        images = chance.integers(0, 256, size=(len(part), 3072), dtype=np.uint8)
        path = root / "cifar-10-batches-bin" / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.concatenate([part[:, None], images], axis=1).tobytes())
    return root


def picture(path: Path, side: int, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (level, 0, 0)).save(path, format="JPEG")


def small_tiny_imagenet(root: Path, per_class: int = 2, test_labels: Sequence[int] = range(200)) -> Path:
    """Two hundred plain colours, in the official layout of Tiny-ImageNet."""
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{10000000 + i}" for i in range(200)]
    for i, wnid in enumerate(wnids):
        for j in range(per_class):
            picture(folder / "train" / wnid / "images" / f"{wnid}_{j}.JPEG", 64, i)
    for i in test_labels:
        picture(folder / "val" / "images" / f"val_{i}.JPEG", 64, i)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = [f"val_{i}.JPEG\t{wnids[i]}\t0\t0\t63\t63" for i in test_labels]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def small_mini_imagenet(root: Path, per_class: int = 3, test_labels: Sequence[int] = range(100)) -> Path:
    """A hundred plain colours, a folder a class, with lists that make one picture of some classes a test picture."""
    folder = root / "mini-imagenet"
    for i, wnid in enumerate(MINI_WNIDS):
        for j in range(per_class):
            picture(folder / wnid / f"{wnid}{j:08d}.jpg", 84, 2 * i)
    for names in MINI_LISTS:
        for name in names:
            (folder / name).write_text("")
    rows = [f"{MINI_WNIDS[i]}{0:08d}.jpg,{i}" for i in test_labels]
    (folder / MINI_LISTS[1][0]).write_text("\n".join(rows) + "\n")
    return root


def long_tailed_labels(samples: int, labels: int, tasks: int, seed: int) -> np.ndarray:
    """Rows of one to six labels, task after task; each task has labels of its own, by Zipf's law."""
    chance = np.random.default_rng(seed)
    rows = np.zeros((samples, labels), dtype=np.uint8)
    for task, own in enumerate(np.array_split(np.random.default_rng(0).permutation(labels), tasks)):
        weights = 1 / np.arange(1, len(own) + 1)
        for i in range(task * samples // tasks, (task + 1) * samples // tasks):
            some = min(int(chance.integers(1, 7)), len(own))
            rows[i, chance.choice(own, some, replace=False, p=weights / weights.sum())] = 1
    return rows


def small_multi_label(train: int = 180, test: int = 60, labels: int = 12, tasks: int = 3) -> MultiLabelSource:
    """Pictures that are the sum of a pattern for each of their labels, so that a network can learn them."""
    patterns = np.random.default_rng(1).integers(0, 60, size=(labels, 3 * 8 * 8))
    parts = []
    for seed, samples in ((2, train), (3, test)):
        rows = long_tailed_labels(samples, labels, tasks, seed)
        images = np.clip(rows.astype(np.int64) @ patterns, 0, 255).astype(np.uint8).reshape(-1, 3, 8, 8)
        parts.append((images, rows, np.arange(samples) * tasks // samples))
    (train_images, train_rows, train_task), (test_images, test_rows, test_task) = parts
    names, groups = tuple(f"thing {i}" for i in range(labels)), tuple(np.tile(GROUPS, labels)[:labels].tolist())
    return MultiLabelSource(
        "cocoseq", train_images, train_rows, test_images, test_rows, labels, "0" * 16,
        train_task, test_task, tasks, names, groups,
    )  # fmt: skip
