"""Published data sets: names, file layouts, published counts, downloads, and loading of any data set.

Published files are decoded once and memory-mapped from then on, as `contnorm.bench.data.dataset` describes. Multi-label
data sets are built beforehand by `contnorm data`.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from contnorm.atomic_files import draft_of
from contnorm.bench.data import formats
from contnorm.bench.data.dataset import (
    MANIFEST,
    Labels,
    Progress,
    Source,
    Split,
    find_stored,
    fingerprint_arrays,
    fingerprint_files,
    list_stored,
    load_decoded,
    load_stored,
    published,
)
from contnorm.bench.data.formats import decode_pictures, decoder_name
from contnorm.errors import UserError, unknown, usable

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBars

ENVIRONMENT = "CONTNORM_DATA"
ALLOW_MISSING = "CONTNORM_ALLOW_MISSING"
DIGITS = "digits"  # the data set that is part of this package


@dataclass(frozen=True)
class FileLayout:
    """A file layout of a data set: its files under the root, and how they are read.

    Attributes:
        files: Files or folders that must exist.
        read: Reads array files.
        list: Lists the pictures of a folder with their labels. With neither this nor ``read``, the data set is built.
        inputs: Patterns of further files and folders that change whenever a picture or its label does.
    """

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], tuple[Split, Split]] | None = None
    list: Callable[[Sequence[Path]], formats.PictureList] | None = None
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedCounts:
    """Images per class, by label, in the training and the test split."""

    train: tuple[int, ...]
    test: tuple[int, ...]

    @property
    def images(self) -> int:
        return sum(self.train) + sum(self.test)


@dataclass(frozen=True)
class SourceSpec:
    """Description of a named data set."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    layouts: tuple[FileLayout, ...]  # empty for the data set inside this package
    summary: str
    built_with: str = ""  # command that builds it, if it must be built
    published: PublishedCounts | None = None


def _idx_layouts(*folders: str) -> tuple[FileLayout, ...]:
    """Return the layouts of the four idx files of MNIST: gzipped or not, in this folder or that of torchvision."""
    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return tuple(
        FileLayout(tuple(f"{folder}/{stem}{ending}" for stem in stems), formats.read_mnist)
        for folder in folders
        for ending in ("", ".gz")
    )


def _balanced(classes: int, train: int, test: int) -> PublishedCounts:
    return PublishedCounts((train,) * classes, (test,) * classes)


_MNIST_COUNTS = PublishedCounts(
    train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
_CIFAR10_PARTS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10 = (
    FileLayout(
        tuple(f"cifar-10-batches-py/{name}" for name in _CIFAR10_PARTS),
        formats.read_splits(formats.read_cifar_pickle, "labels"),
    ),
    FileLayout(
        tuple(f"cifar-10-batches-bin/{name}.bin" for name in _CIFAR10_PARTS),
        formats.read_splits(formats.read_cifar_binary, 1),
    ),
)
_CIFAR100 = (
    FileLayout(
        ("cifar-100-python/train", "cifar-100-python/test"),
        formats.read_splits(formats.read_cifar_pickle, "fine_labels"),
    ),
    FileLayout(
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"), formats.read_splits(formats.read_cifar_binary, 2)
    ),
)
_TINY_IMAGENET = FileLayout(
    ("tiny-imagenet-200/wnids.txt", "tiny-imagenet-200/val/val_annotations.txt"),
    list=formats.list_tiny_imagenet,
    inputs=("train/*/images", "val", "val/images"),
)
_MINI_IMAGENET = tuple(
    FileLayout((folder,), list=formats.list_mini_imagenet, inputs=("n*", "images", "*.csv"))
    for folder in ("mini-imagenet", "miniimagenet", "mini_imagenet")
)
_GREY, _SMALL, _LARGE = (1, 28, 28), (3, 32, 32), (3, 256, 256)
_COCOSEQ = "41,438 pictures in 4 tasks, with several of 70 labels; built from your MS-COCO"
_NUS_WIDESEQ = "51,114 pictures in 6 tasks, with several of 49 labels; built from your NUS-WIDE"

# fmt: off
_SPECS = (
    SourceSpec("digits", 10, _GREY, (), "5,000 digits of MNIST, included: 4,000 train, 1,000 test"),
    SourceSpec("mnist", 10, _GREY, _idx_layouts("mnist", "MNIST/raw"), "70,000 handwritten digits",
               published=_MNIST_COUNTS),
    SourceSpec("fashion-mnist", 10, _GREY, _idx_layouts("fashion-mnist", "FashionMNIST/raw"),
               "70,000 pictures of clothing", published=_balanced(10, 6000, 1000)),
    SourceSpec("cifar10", 10, _SMALL, _CIFAR10, "60,000 small pictures of 10 kinds",
               published=_balanced(10, 5000, 1000)),
    SourceSpec("cifar100", 100, _SMALL, _CIFAR100, "60,000 small pictures of 100 kinds",
               published=_balanced(100, 500, 100)),
    SourceSpec("tiny-imagenet", 200, (3, 64, 64), (_TINY_IMAGENET,), "110,000 pictures of 200 kinds",
               published=_balanced(200, 500, 50)),
    SourceSpec("mini-imagenet", 100, (3, 84, 84), _MINI_IMAGENET,
               "60,000 pictures of 100 kinds; no public archive", published=_balanced(100, 500, 100)),
    SourceSpec("cocoseq", 70, _LARGE, (FileLayout((f"cocoseq/{MANIFEST}",)),), _COCOSEQ,
               "contnorm data cocoseq --coco DIR"),
    SourceSpec("nus-wideseq", 49, _LARGE, (FileLayout((f"nus-wideseq/{MANIFEST}",)),), _NUS_WIDESEQ,
               "contnorm data nus-wideseq --nus DIR"),
)
# fmt: on
SOURCES = {spec.name: spec for spec in _SPECS}


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
        contnorm.errors.UserError: data root elsewhere: does not exist. Set the folder of data sets with root=, ...
    """
    from_environment = os.environ.get(ENVIRONMENT)
    if folder is None and not from_environment:
        return Path("data")
    root = Path(from_environment or "") if folder is None else folder
    if not (create or root.is_dir()):
        raise UserError(
            f"data root {root}: does not exist. Set the folder of data sets with root=, --data-root or {ENVIRONMENT}."
        )
    return root


def digits_notice(source: str | None, stream: str, root: Path) -> str:
    """Return a notice for runs that use the embedded digits in place of a downloaded data set; empty for other data.

    Example:
        >>> digits_notice("digits", "permuted-mnist", Path("data"))
        'permuted-mnist uses the included 5,000 digits (stream.source=digits), not MNIST: no mnist under data.'
        >>> digits_notice("mnist", "permuted-mnist", Path("data"))
        ''
    """
    if source != DIGITS:
        return ""
    missing = "" if find_layout(SOURCES["mnist"], root) else f": no mnist under {root}"
    return f"{stream} uses the included 5,000 digits (stream.source=digits), not MNIST{missing}."


def describe_layouts(spec: SourceSpec) -> str:
    """Describe the layouts of a data set for messages."""
    suffixes = [f" (and {len(layout.files) - 1} more)" if len(layout.files) > 1 else "" for layout in spec.layouts]
    return ", or ".join(f"{layout.files[0]}{suffix}" for layout, suffix in zip(spec.layouts, suffixes, strict=True))


def find_layout(spec: SourceSpec, root: Path) -> tuple[FileLayout, list[Path]] | None:
    """Return the first layout whose files all exist, with their paths."""
    for layout in spec.layouts:
        paths = [root / name for name in layout.files]
        if all(path.exists() for path in paths):
            return layout, paths
    return None


def location_of(spec: SourceSpec, root: Path) -> str:
    """Path of a data set relative to the root; empty if it is absent."""
    if not spec.layouts:
        return "included"
    match = find_layout(spec, root)
    return "" if match is None else str(_folder(match[1]).relative_to(root))


def _folder(paths: Sequence[Path]) -> Path:
    return paths[0] if paths[0].is_dir() else paths[0].parent


def load_source(name: str, root: Path, *, allow_missing: bool = False, progress: Progress = lambda *_: None) -> Source:
    """Load a data set, memory-mapped; it is decoded the first time.

    Args:
        name: One of `SOURCES`; or a data set that was added or built, by its name under the root or its path.
        root: Folder of all data.
        allow_missing: Accept a published data set with other counts than published.
        progress: Called with what is done and how much of it, while pictures are decoded.
    """
    stored = find_stored(name, root)
    if stored is not None:
        return load_stored(stored)
    if name not in SOURCES:
        raise unknown("data set", name, list(dict.fromkeys([*SOURCES, *list_stored(root)])))
    spec = SOURCES[name]
    if not spec.layouts:
        return _digits(spec)
    match = find_layout(spec, root)
    if match is None:
        action = f"Build it with {spec.built_with}" if spec.built_with else "Put it there"
        raise UserError(
            f"no {name} under {root} ({describe_layouts(spec)}). {action}, or set its folder with root=, --data-root "
            f"or {ENVIRONMENT}; see `contnorm data {name}`."
        )
    layout, paths = match

    def check(train: Labels, test: Labels) -> dict[str, Any]:
        return check_counts(name, _folder(paths), spec.published, train, test, allow_missing) if spec.published else {}

    def decode(target: Path) -> Source:
        if layout.list is not None:
            return _decode_folder(spec, layout.list(paths), check, target, progress)
        assert layout.read is not None
        damaged = EOFError, ValueError, KeyError, pickle.UnpicklingError
        with usable(_folder(paths), f"{name} cannot be read", "Download it again.", *damaged):
            train, test = layout.read(paths)
        check(train[1], test[1])
        return Source(name, *train, *test, spec.classes, fingerprint_arrays(train, test))

    inputs = [path for pattern in layout.inputs for path in sorted(_folder(paths).glob(pattern))]
    source = load_decoded(name, paths[0].parent, [*paths, *inputs], decode)
    return replace(source, details={**source.details, **check(source.train_labels, source.test_labels)})


def _decode_folder(
    spec: SourceSpec,
    listed: formats.PictureList,
    check: Callable[[Labels, Labels], object],
    target: Path,
    progress: Progress,
) -> Source:
    splits = {"train": listed.train, "test": listed.test}
    labels = {split: np.array([label for _, label in pictures], dtype=np.int64) for split, pictures in splits.items()}
    check(labels["train"], labels["test"])  # before minutes of decoding
    paths = {split: [path for path, _ in pictures] for split, pictures in splits.items()}
    images, digests = decode_pictures(paths, spec.shape[1], "bilinear", target, progress)
    train, test = (list(zip(digests[split], labels[split].tolist(), strict=True)) for split in splits)
    details = {"decoder": decoder_name()} | ({"split": listed.split} if listed.split else {})
    return Source(
        spec.name, images["train"], labels["train"], images["test"], labels["test"], spec.classes,
        fingerprint_files(train, test), details=details,
    )  # fmt: skip


def load_with_progress(name: str, root: Path, bars: ProgressBars, allow_missing: bool = False) -> Source:
    """Load a data set as `load_source` does, with a bar in this display while its pictures are decoded."""
    bar = bars.add_task(name, visible=False)  # shown with the first report

    def show(what: str, done: int, total: int) -> None:
        text = f"{name}: {what}"
        bars.update(bar, description=text, completed=done, total=total, visible=True, refresh=not done)

    try:
        return load_source(name, root, allow_missing=allow_missing, progress=show)
    finally:
        bars.remove_task(bar)


def check_counts(
    name: str, folder: Path, published: PublishedCounts, train: Labels, test: Labels, allow_missing: bool
) -> dict[str, Any]:
    """Compare the labels of a data set with the published counts.

    Args:
        name: Data set.
        folder: Folder, for the message.
        published: Expected counts.
        train, test: Labels of both splits, from 0 to the number of classes minus 1.
        allow_missing: Accept other counts than published; also set by the environment variable `ALLOW_MISSING`.

    Returns:
        Entries for records that describe the deviation; empty if there is none.
    """
    deviations = {
        "train": np.bincount(train, minlength=len(published.train)) - np.array(published.train),
        "test": np.bincount(test, minlength=len(published.test)) - np.array(published.test),
    }
    missing = {split: int(-by_class[by_class < 0].sum()) for split, by_class in deviations.items()}
    extra = sum(int(by_class[by_class > 0].sum()) for by_class in deviations.values())
    if not (any(missing.values()) or extra):
        return {}
    if not (allow_missing or os.environ.get(ALLOW_MISSING, "") not in ("", "0")):
        raise UserError(
            f"{folder}: {name} is not the published data set: of {published.images:,} images, {missing['train']:,} "
            f"train and {missing['test']:,} test images are missing, and {extra:,} are more than published. Complete "
            f"it, or use it as it is with --allow-missing; the record states this."
        )
    details = {
        "images": len(train) + len(test),
        "published_images": published.images,
        "missing_images": sum(missing.values()),
        "missing_by_split": missing,
        "deviating_classes": int(((deviations["train"] != 0) | (deviations["test"] != 0)).sum()),
    }
    return details | ({"extra_images": extra} if extra else {})


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the digits that are part of this package: 5,000 of MNIST, 500 of each class, sorted by class.

    Returns:
        Images (5000, 28, 28) from 0 to 255, and their labels. ``source="digits"`` is a stream of them; every fifth is
        a test sample there.

    Example:
        >>> images, labels = load_digits()
        >>> images.shape, labels[::500].tolist()
        ((5000, 28, 28), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    with resources.files(__package__).joinpath("digits.npy.xz").open("rb") as packed, lzma.open(packed) as file:
        return np.lib.format.read_array(file, allow_pickle=False), np.repeat(np.arange(10), 500)


@cache  # reading the digits takes longer than a short run
def _digits(spec: SourceSpec) -> Source:
    """Return the included digits; every fifth is in the test split, so both splits have the same class shares."""
    images, labels = load_digits()
    test = np.arange(len(labels)) % 5 == 4
    splits = [(images[rows, None], labels[rows]) for rows in (~test, test)]
    return Source(spec.name, *splits[0], *splits[1], spec.classes, fingerprint_arrays(*splits))


@dataclass(frozen=True)
class Fetchable:
    """Download address and hashes of a data set. Another address can be used; the hashes must match.

    Attributes:
        base: Default address of the folder of its files.
        files: Hashes of the files by name; the same as in other loaders of the field.
        folder: Target folder under the data root.
    """

    base: str
    files: dict[str, str]
    folder: str = ""


FETCHABLE = {name: Fetchable(**facts) for name, facts in published()["downloads"].items()}


def fetch(dataset: Fetchable, root: Path, base: str | None = None, progress: Progress = lambda *_: None) -> None:
    """Download a data set, verify its hashes and unpack it. Valid files that exist are not downloaded again.

    Args:
        dataset: Data set.
        root: Data root.
        base: Address to download from, in place of the default.
        progress: Called with the name of a file, its bytes received so far, and its size.
    """
    folder = root / dataset.folder
    for name, checksum in dataset.files.items():
        url, path = (base or dataset.base).rstrip("/") + "/" + name, folder / name
        kind, _, expected = checksum.partition(":")
        if not path.is_file() or hashlib.new(kind, path.read_bytes()).hexdigest() != expected:
            digest = hashlib.new(kind)
            advice = "Try again, or another address with --base."
            with usable(url, "download failed", advice, HTTPException, ValueError):
                request = Request(url, headers={"User-Agent": "contnorm"})
                with draft_of(path) as draft, urlopen(request, timeout=60) as reply, draft.open("xb") as file:
                    size = int(reply.headers.get("Content-Length", 0))
                    while block := reply.read(2**16):
                        file.write(block)
                        digest.update(block)
                        progress(name, file.tell(), size)
                    if digest.hexdigest() != expected:
                        raise ValueError(f"its {kind} is {digest.hexdigest()}, not {expected}")
        if name.endswith((".tar.gz", ".zip")):
            safe: Any = {"filter": "data"} if name.endswith(".tar.gz") else {}
            shutil.unpack_archive(path, folder, **safe)
