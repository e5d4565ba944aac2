"""Data sets of the user's: arrays, ``.npz`` files and folders of images, added under the data root or in memory."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contnorm import bench
from contnorm.bench.data.dataset import MANIFEST, find_stored, list_stored
from contnorm.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 4
TRAIN, TEST = slice(40), slice(40, 60)
ARRAYS = X[TRAIN], Y[TRAIN], X[TEST], Y[TEST]


def save_npz(path: Path, **changes: object) -> Path:
    arrays = {"x_train": X[TRAIN], "y_train": Y[TRAIN], "x_test": X[TEST], "y_test": Y[TEST], **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return path


def write_pictures(folder: Path, classes: dict[str, int], side: int = 8) -> Path:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_added_arrays_equal_the_stream_from_arrays(tmp_path: Path) -> None:
    folder = bench.add_dataset("blobs", tmp_path / "root", npz=save_npz(tmp_path / "a.npz"), tasks=[[0, 3], [1, 2]])
    stream = bench.Stream.from_arrays(*ARRAYS, tasks=[[0, 3], [1, 2]], name="blobs")
    added = bench.load_stream("blobs", root=tmp_path / "root")
    assert added.source.name == stream.source.name and added.source.fingerprint == stream.source.fingerprint
    assert isinstance(added.source.train_images, np.memmap)
    np.testing.assert_array_equal(added.source.train_images, X[TRAIN])
    assert [task.classes for task in added.tasks] == [(0, 3), (1, 2)]
    assert find_stored(stream.source.name, tmp_path / "root") == folder
    assert find_stored("blobs@000000000000", tmp_path / "root") is None
    assert list(list_stored(tmp_path / "root")) == ["blobs"] and list((tmp_path / "root").iterdir()) == [folder]


def test_added_folder_equals_the_stream_from_the_folder(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pets", {"cat": 5, "dog": 6, "emu": 5, "fox": 5})
    bench.add_dataset("pets", tmp_path / "root", folder=pictures, tasks=2, size=6)
    stream = bench.Stream.from_folder(pictures, tasks=2, size=6)
    added = bench.load_stream("pets", root=tmp_path / "root")
    assert added.source.name == stream.source.name and added.input_shape == (3, 6, 6)
    np.testing.assert_array_equal(added.source.test_images, stream.source.test_images)
    for part in ("train", "valid"):
        write_pictures(tmp_path / "split" / part, {"cat": 3, "dog": 2})
    assert bench.Stream.from_folder(tmp_path / "split", tasks=2).source.test_labels.tolist() == [0, 0, 0, 1, 1]
    direct = np.asarray(Image.open(pictures / "cat" / "0.png")).transpose(2, 0, 1)
    unscaled = bench.Stream.from_folder(pictures, tasks=2, test_share=0.01).source
    assert any((image == direct).all() for image in [*unscaled.train_images, *unscaled.test_images])


def test_runs_of_an_added_stream_resume_by_the_same_name(tmp_path: Path) -> None:
    bench.add_dataset("blobs", tmp_path, npz=save_npz(tmp_path / "a.npz"), tasks=2)
    stream = bench.load_stream("blobs", root=tmp_path)
    result = bench.run(stream, norm="cn", strategy="er", seeds=2, runs=tmp_path / "runs", lanes=1)
    config = result.records[0].config
    assert config.stream.name == "arrays" and config.stream.source == stream.source.name
    in_memory = bench.Stream.from_arrays(*ARRAYS, tasks=2, name="blobs")
    again = bench.run(in_memory, norm="cn", strategy="er", seeds=2, runs=None, lanes=1)
    np.testing.assert_array_equal(again.accuracy, result.accuracy)


def test_tasks_of_samples_give_a_domain_incremental_stream(tmp_path: Path) -> None:
    ids = np.arange(40) // 20
    npz = save_npz(tmp_path / "a.npz", task_train=ids, task_test=ids[::2])
    bench.add_dataset("blobs", tmp_path, npz=npz)
    stream = bench.load_stream("blobs", root=tmp_path)
    assert stream.settings["scenario"] == "domain" and stream.num_tasks == 2 and stream.num_outputs == 4


def test_npz_without_test_samples_is_split_by_class(tmp_path: Path) -> None:
    stream = bench.Stream.from_npz(save_npz(tmp_path / "a.npz", x_test=None, y_test=None), tasks=2, test_share=0.3)
    assert np.bincount(stream.source.test_labels).tolist() == [3] * 4 and len(stream.source.train_labels) == 28
    together = np.concatenate([stream.source.train_images, stream.source.test_images])
    assert {row.tobytes() for row in together} == {row.tobytes() for row in X[TRAIN]}


def test_from_datasets_reads_tensors_and_images() -> None:
    images = [Image.fromarray(RNG.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in range(8)]
    pairs = [(image, i % 2) for i, image in enumerate(images)]
    stream = bench.Stream.from_datasets(pairs[:6], pairs[6:], tasks=2)
    assert stream.input_shape == (3, 5, 5)
    np.testing.assert_array_equal(stream.source.train_images[3], np.asarray(images[3]).transpose(2, 0, 1))


def test_arrays_may_be_changed_after_the_stream_is_made() -> None:
    x, x_test = X[TRAIN].copy(), X[TEST].copy()
    stream = bench.Stream.from_arrays(x, Y[TRAIN], x_test, Y[TEST], tasks=2)
    x[:], x_test[:] = 0, 0
    np.testing.assert_array_equal(stream.source.train_images, X[TRAIN])


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.int16, bool])
def test_only_bytes_are_scaled(dtype: type) -> None:
    """A table of 0 and 1 is not an image, whatever its type."""
    x = RNG.integers(0, 2, size=(60, 6)).astype(dtype)
    stream = bench.Stream.from_arrays(x[TRAIN], Y[TRAIN], x[TEST], Y[TEST], tasks=2)
    sample, _ = stream.tasks[0].train[0]
    assert sample.max() == pytest.approx(1 / 255 if dtype == np.uint8 else 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"x_test": X[TEST] * 255}, r"x has values from -?\d.* and x_test from -?\d.*Scale both alike"),
        ({"x": (X[TRAIN] - X.min()) / np.ptp(X)}, "Scale both alike"),  # scaled to [0, 1], and the test samples are not
        ({name: np.abs(4 * X[part]).astype(np.uint8) for name, part in (("x", TRAIN), ("x_test", TEST))}, "divided by"),
        ({"tasks": 3}, "4 classes over 3 tasks have 2 or 1 classes each"),
        ({"tasks": [[0, 1, 2], [3]]}, ""),
        ({"y": Y[TRAIN] - 1, "y_test": Y[TEST] - 1}, "-1 is a class as any other"),
        ({"x_test": X[:20], "y_test": Y[:20]}, "20 of 20 test samples are also training samples"),
    ],
)
def test_rare_data_is_remarked(change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = dict(zip(("x", "y", "x_test", "y_test"), ARRAYS, strict=True), tasks=2)
    bench.Stream.from_arrays(**{**arguments, **change})
    assert len(caplog.messages) == bool(words)
    assert not words or re.search(f"^arrays: .*{words}", caplog.messages[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": Y[1:40]}, r"y has shape \(39,\) for 40 samples"),
        ({"x_test": None}, "Save it with np.savez"),
        ({"y_train": None}, "Save it with np.savez"),
        ({"x_train": X[TRAIN] * np.nan}, "NaN or infinity"),
        ({"task_train": np.zeros(40, dtype=int)}, "has one of task_train and task_test"),
        ({"y_train": np.array([{}] * 40)}, "can't be read as an .npz file"),  # objects need pickle
        ({"x_train": np.array(3.0)}, r"x has shape \(\)"),
    ],
)
def test_bad_arrays_are_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    npz = save_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=message):
        bench.add_dataset("blobs", tmp_path / "root", npz=npz, tasks=2)
    assert list_stored(tmp_path / "root") == {} and not list((tmp_path / "root").iterdir())


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    one_class = write_pictures(tmp_path / "one", {"cat": 4})
    sizes = write_pictures(tmp_path / "sizes", {"cat": 3})
    write_pictures(sizes, {"dog": 3}, side=9)
    broken = write_pictures(tmp_path / "broken", {"cat": 2, "dog": 2})
    (broken / "cat" / "0.png").write_bytes(b"no picture")
    for folder, message in (
        (one_class, "two or more classes"),
        (sizes, "is 9 x 9 pixels, and others 8 x 8"),
        (broken, "cannot be read as a picture"),
        (tmp_path / "missing", "has no images"),
    ):
        with pytest.raises(UserError, match=message):
            bench.add_dataset("pets", tmp_path / "root", folder=folder, tasks=2)
        assert list_stored(tmp_path / "root") == {}


@pytest.mark.parametrize("name", ["mnist", "split-cifar10", "SplitMNIST", "add", "a/b", "..", "", "a@b", "a b"])
def test_bad_names_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name="):
        bench.add_dataset(name, tmp_path, npz=save_npz(tmp_path / "a.npz"), tasks=2)


def test_existing_data_is_not_overwritten(tmp_path: Path) -> None:
    npz = save_npz(tmp_path / "a.npz")
    folder = bench.add_dataset("blobs", tmp_path, npz=npz, tasks=2)
    with pytest.raises(UserError, match=r"blobs: exists\. Use another name, or delete it"):
        bench.add_dataset("blobs", tmp_path, npz=npz, tasks=4)
    assert bench.load_stream("blobs", root=tmp_path).num_tasks == 2
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(UserError, match="another version of contnorm"):
        bench.load_stream("blobs", root=tmp_path)
