"""Readers of idx files and CIFAR batches."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contnorm.bench.data.formats import read_cifar_binary, read_cifar_pickle, read_idx
from tests.datasets import python2_batch, write_idx

IMAGES = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)


def read(tmp_path: Path, content: bytes, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    (tmp_path / "batch").write_bytes(content)
    return read_cifar_pickle(tmp_path / "batch", labels)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("text_keys", [False, True])
def test_cifar_pickle_of_every_protocol(tmp_path: Path, protocol: int, order: str, text_keys: bool) -> None:
    images = np.asarray(IMAGES, order=order)  # type: ignore[call-overload]
    batch: dict[Any, Any] = {b"batch_label": b"1", b"labels": [3, 7], b"data": images, b"filenames": [b"a.png"]}
    if text_keys:
        batch = {key.decode(): value for key, value in batch.items()}
    data, labels = read(tmp_path, pickle.dumps(batch, protocol))
    np.testing.assert_array_equal(data, IMAGES.reshape(2, 3, 32, 32))
    assert labels.tolist() == [3, 7] and labels.dtype == np.int64


def test_cifar_pickle_of_python_2(tmp_path: Path) -> None:
    data, labels = read(tmp_path, python2_batch(IMAGES, [3, 200], "fine_labels"), "fine_labels")
    np.testing.assert_array_equal(data, IMAGES.reshape(2, 3, 32, 32))
    assert labels.tolist() == [3, 200]


@pytest.mark.parametrize("function", [os.system, print, eval, np.load, np.fromfile])
def test_pickle_with_code_is_not_executed(tmp_path: Path, function: object) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (function, (f"touch {tmp_path}/executed",))

    with pytest.raises(pickle.UnpicklingError, match="is not data"):
        read(tmp_path, pickle.dumps({b"data": Evil()}))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_file_is_read(tmp_path: Path, ending: str) -> None:
    write_idx(tmp_path / f"a{ending}", IMAGES)
    np.testing.assert_array_equal(read_idx(tmp_path / f"a{ending}"), IMAGES)
    content = (gzip.decompress if ending else bytes)((tmp_path / f"a{ending}").read_bytes())
    (tmp_path / "cut").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="do not fit its shape"):
        read_idx(tmp_path / "cut")


def test_cifar_binary_is_read(tmp_path: Path) -> None:
    records = np.concatenate([[[9, 3], [8, 4]], IMAGES], axis=1).astype(np.uint8)
    (tmp_path / "a.bin").write_bytes(records.tobytes())
    images, labels = read_cifar_binary(tmp_path / "a.bin", 2)
    np.testing.assert_array_equal(images, IMAGES.reshape(2, 3, 32, 32))
    assert labels.tolist() == [3, 4]
