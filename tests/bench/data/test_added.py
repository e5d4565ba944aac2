"""Data sets of the user's under the data root."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contnorm import bench
from contnorm.bench.data.added import MANIFEST, find_added, list_added, load_added
from contnorm.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 4


def save_npz(path: Path, **changes: object) -> Path:
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:20], "y_test": Y[:20], **changes}
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
    stream = bench.Stream.from_arrays(X, Y, X[:20], Y[:20], tasks=[[0, 3], [1, 2]], name="blobs")
    added = bench.load_stream("blobs", root=tmp_path / "root")
    assert added.source.name == stream.source.name and added.source.fingerprint == stream.source.fingerprint
    np.testing.assert_array_equal(added.source.train_images, X)
    assert [task.classes for task in added.tasks] == [(0, 3), (1, 2)]
    assert find_added(stream.source.name, tmp_path / "root") == folder
    assert find_added("blobs@000000000000", tmp_path / "root") is None and list(list_added(tmp_path / "root")) == [
        "blobs"
    ]
    assert not [path for path in (tmp_path / "root").iterdir() if path.name != "blobs"]  # no lock, nothing temporary


def test_added_folder_equals_the_stream_from_the_folder(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pets", {"cat": 5, "dog": 6, "emu": 5, "fox": 5})
    bench.add_dataset("pets", tmp_path / "root", folder=pictures, tasks=2, size=6)
    stream = bench.Stream.from_folder(pictures, tasks=2, size=6)
    added = bench.load_stream("pets", root=tmp_path / "root")
    assert added.source.name == stream.source.name and added.input_shape == (3, 6, 6)
    np.testing.assert_array_equal(added.source.test_images, stream.source.test_images)
    direct = np.asarray(Image.open(pictures / "cat" / "0.png")).transpose(2, 0, 1)
    unscaled = bench.Stream.from_folder(pictures, tasks=2, test_share=0.01).source
    assert any((image == direct).all() for image in [*unscaled.train_images, *unscaled.test_images])


def test_runs_of_an_added_stream_resume_by_the_same_name(tmp_path: Path) -> None:
    bench.add_dataset("blobs", tmp_path, npz=save_npz(tmp_path / "a.npz"), tasks=2)
    stream = bench.load_stream("blobs", root=tmp_path)
    result = bench.run(stream, norm="cn", strategy="er", seeds=2, runs=tmp_path / "runs", lanes=2)
    config = result.records[0].config
    assert config.stream.name == "arrays" and config.stream.source == stream.source.name
    in_memory = bench.Stream.from_arrays(X, Y, X[:20], Y[:20], tasks=2, name="blobs")
    again = bench.run(in_memory, norm="cn", strategy="er", seeds=2, runs=None, lanes=1)
    np.testing.assert_array_equal(again.accuracy, result.accuracy)


def test_tasks_of_samples_give_a_domain_incremental_stream(tmp_path: Path) -> None:
    ids = np.arange(40) // 20
    npz = save_npz(tmp_path / "a.npz", task_train=ids, task_test=np.arange(20) // 10)
    bench.add_dataset("blobs", tmp_path, npz=npz)
    stream = bench.load_stream("blobs", root=tmp_path)
    assert stream.num_tasks == 2 and stream.num_outputs == 4 and "'domain'" in repr(stream)


def test_npz_without_test_samples_is_split_by_class(tmp_path: Path) -> None:
    stream = bench.Stream.from_npz(save_npz(tmp_path / "a.npz", x_test=None, y_test=None), tasks=2, test_share=0.3)
    assert np.bincount(stream.source.test_labels).tolist() == [3] * 4 and len(stream.source.train_labels) == 28
    together = np.concatenate([stream.source.train_images, stream.source.test_images])
    assert {row.tobytes() for row in together} == {row.tobytes() for row in X}


def test_from_datasets_reads_tensors_and_images() -> None:
    images = [Image.fromarray(RNG.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in range(8)]
    pairs = [(image, i % 2) for i, image in enumerate(images)]
    stream = bench.Stream.from_datasets(pairs, pairs, tasks=2)
    assert stream.input_shape == (3, 5, 5)
    np.testing.assert_array_equal(stream.source.train_images[3], np.asarray(images[3]).transpose(2, 0, 1))
    with pytest.raises(UserError, match="train: can't be read as a data set"):
        bench.Stream.from_datasets([(np.zeros(3), 0), (np.zeros(4), 1)], pairs, tasks=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": Y[:-1]}, r"y has shape \(39,\) for 40 samples"),
        ({"x_test": None}, "has one of x_test and y_test"),
        ({"y_train": None}, "but no y_train"),
        ({"x_train": X * np.nan}, "NaN or infinity"),
        ({"task_train": np.zeros(40, dtype=int)}, "has one of task_train and task_test"),
        ({"y_train": np.array([{}] * 40)}, "can't be read as an .npz file"),  # objects need pickle
        ({"x_train": np.array(3.0)}, r"x has shape \(\)"),
    ],
)
def test_bad_arrays_give_one_line_and_write_nothing(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    npz = save_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=message) as error:
        bench.add_dataset("blobs", tmp_path / "root", npz=npz, tasks=2)
    assert "\n" not in str(error.value) and not (tmp_path / "root").exists()


def test_files_of_other_formats_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", X)
    (tmp_path / "text.csv").write_text("x,y\n1,2\n")
    np.savez(tmp_path / "objects.npz", x=np.array([object()]), y=Y[:1])
    reasons = {"array.npy": "is a single array", "text.csv": "another format", "objects.npz": "it has Python objects"}
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason) as error:
            bench.Stream.from_npz(tmp_path / name, tasks=2)
        assert "pickle" not in str(error.value) and "\n" not in str(error.value)


def test_data_root_is_not_created_for_data_that_is_refused(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "blobs.npz", y_train=Y[1:])
    for _ in range(2):
        with pytest.raises(UserError, match="one label per sample"):
            bench.add_dataset("blobs", tmp_path / "new" / "root", npz=path, tasks=2)
        assert not (tmp_path / "new").exists()
    (tmp_path / "root").mkdir()  # existed before, so it stays
    with pytest.raises(UserError, match="one label per sample"):
        bench.add_dataset("blobs", tmp_path / "root", npz=path, tasks=2)
    assert (tmp_path / "root").is_dir()


def test_data_root_that_is_not_writable_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_npz(tmp_path / "blobs.npz")
    with pytest.raises(UserError, match=r"root: no data set can be written there \(Not a directory\)\. Use another"):
        bench.add_dataset("blobs", path / "root", npz=path, tasks=2)
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)  # permissions do not bind a superuser
    with pytest.raises(UserError, match=r"root: no data set can be written there \(Permission denied\)\."):
        bench.add_dataset("blobs", tmp_path / "root", npz=path, tasks=2)


def test_bad_folders_give_one_line_and_write_nothing(tmp_path: Path) -> None:
    one_class = write_pictures(tmp_path / "one", {"cat": 4})
    sizes = write_pictures(tmp_path / "sizes", {"cat": 3})
    write_pictures(sizes, {"dog": 3}, side=9)
    broken = write_pictures(tmp_path / "broken", {"cat": 2, "dog": 2})
    (broken / "cat" / "0.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (one_class, "one class only"),
        (sizes, r"8 x 8 pixels and .* is 9 x 9"),
        (broken, "can't be read as an image"),
        (tmp_path / "empty", "no images in class folders"),
        (tmp_path / "missing", "there is no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            bench.add_dataset("pets", tmp_path / "root", folder=folder, tasks=2)
        assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "name", ["mnist", "split-cifar10", "SplitMNIST", "add", "a/b", "..", "", "a@b", ".hidden", "a b"]
)
def test_bad_names_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name="):
        bench.add_dataset(name, tmp_path, npz=save_npz(tmp_path / "a.npz"), tasks=2)


def test_existing_data_is_not_overwritten(tmp_path: Path) -> None:
    npz = save_npz(tmp_path / "a.npz")
    bench.add_dataset("blobs", tmp_path, npz=npz, tasks=2)
    with pytest.raises(UserError, match=r"blobs: exists\. Use another name, or delete it"):
        bench.add_dataset("blobs", tmp_path, npz=npz, tasks=4)
    assert bench.load_stream("blobs", root=tmp_path).num_tasks == 2
    with pytest.raises(UserError, match=r"either a folder of images or an \.npz file"):
        bench.add_dataset("more", tmp_path)


def test_changed_files_are_detected(tmp_path: Path) -> None:
    folder = bench.add_dataset("blobs", tmp_path, npz=save_npz(tmp_path / "a.npz"), tasks=2)
    load_added(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copies" / "blobs"))
    load_added(copy)  # other time stamps, same content
    np.save(copy / "train_labels.npy", np.roll(np.load(copy / "train_labels.npy"), 1))
    with pytest.raises(UserError, match="do not match the fingerprint"):
        load_added(copy)
    (folder / "test_images.npy").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"test_images\.npy: is missing or damaged"):
        load_added(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for content in ("{", "[]", json.dumps({**manifest, "class_names": 3}), json.dumps({**manifest, "version": 99})):
        (folder / MANIFEST).write_text(content)
        with pytest.raises(UserError, match=r"dataset\.json"):
            bench.load_stream("blobs", root=tmp_path)
