"""Download a data set from its public source, or build a multi-label one from images and labels. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.data.dataset import DatasetListing
from contnorm.bench.data.fetch import FETCHABLE, fetch
from contnorm.bench.data.multilabel_build import build
from contnorm.bench.data.multilabel_listings import (
    find_instances,
    list_cocoseq,
    list_csv,
    list_nus_wideseq,
    read_nus_wide,
)
from contnorm.bench.data.published import PUBLISHED_STREAMS, find_lists, published_stream, read_lists
from contnorm.bench.data.registry import SOURCES, data_root
from contnorm.bench.files import Progress
from contnorm.errors import UserError, unknown

__all__ = ["BuildOptions", "build_dataset", "canonical_name", "fetch_dataset"]

SMALLEST, LARGEST = 8, 1024
PUBLISHED_SIZES = (256, 224)  # in the code that made the streams, and in the paper's table of data sets
ALIASES = {"nus-wide": "nus-wideseq", "nuswide": "nus-wideseq", "nuswideseq": "nus-wideseq", "coco": "cocoseq"}


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a data set: what to build from, and how.

    Attributes:
        coco: Folder of MS-COCO, to build cocoseq.
        nus: Folder of NUS-WIDE, to build nus-wideseq.
        csv: CSV table of images with their tasks and labels, to build a data set of your own.
        images: Folder of the images; without ``csv``, its ``labels.csv`` is the table.
        groups: Table that assigns classes to groups; None to group by number of images.
        ids: Folder of the task lists; None for ``ids`` in the source folder, otherwise they are downloaded.
        out: Folder to build the data set in; None for one under the data root.
        size: Image side in pixels; None for 256.
        allow_missing: Whether to build without missing images.
        jobs: Number of decoding processes; None for one per core.
        base: Address to download the task lists from.

    Example:
        >>> BuildOptions(csv=Path("pets.csv"), images=Path("pets"), size=32).size
        32
    """

    coco: Path | None = None
    nus: Path | None = None
    csv: Path | None = None
    images: Path | None = None
    groups: Path | None = None
    ids: Path | None = None
    out: Path | None = None
    size: int | None = None
    allow_missing: bool = False
    jobs: int | None = None
    base: str | None = None


def canonical_name(name: str) -> str:
    """Return the name of a data set that may be given by another common name.

    Example:
        >>> canonical_name("coco"), canonical_name("cifar10")
        ('cocoseq', 'cifar10')
    """
    return ALIASES.get(name, name)


def fetch_dataset(
    name: str, root: Path | None = None, *, base: str | None = None, progress: Progress = lambda *_: None
) -> None:
    """Download a data set from its public source, verify it and unpack it.

    Args:
        name: Name of the data set, as in ``contnorm data``.
        root: Folder of data sets; None for the default one.
        base: Address to download from instead of the public source.
        progress: Called with the name of a file, its bytes received so far, and its size.

    Example:
        >>> fetch_dataset("cocoseq")
        Traceback (most recent call last):
        contnorm.errors.UserError: cocoseq: cannot be downloaded. Build it with ...
    """
    name = canonical_name(name)
    if not name:
        raise UserError(f"--fetch: needs the name of a data set: {', '.join(FETCHABLE)}.")
    if name in SOURCES and SOURCES[name].built_with:
        raise UserError(
            f"{name}: cannot be downloaded. Build it with {SOURCES[name].built_with}, which downloads the lists of its "
            f"tasks."
        )
    if name not in FETCHABLE:
        raise unknown("data set for --fetch", name, FETCHABLE)
    fetch(FETCHABLE[name], data_root(root, create=True), base, progress)


def build_dataset(
    name: str,
    options: BuildOptions,
    root: Path | None = None,
    *,
    progress: Progress = lambda *_: None,
    on_listing: Callable[[DatasetListing], None] = lambda _: None,
) -> Path:
    """Build a multi-label data set, or resume a partial build. One that is already built is not changed.

    Args:
        name: Name of the data set: ``cocoseq`` or ``nus-wideseq``, or a new name with ``options.csv``.
        options: What to build from, and how.
        root: Folder of data sets; None for the default one.
        progress: Called with what is done, the number of decoded pictures, and the number of all.
        on_listing: Called with the pictures and labels before they are decoded; it knows which are missing.

    Returns:
        The folder of the data set.

    Raises:
        UserError: If options contradict each other, or pictures are missing and may not be.
        KeyboardInterrupt: After Ctrl-C. Decoded pictures are kept, and the same call resumes the build.

    Example:
        >>> build_dataset("my data", BuildOptions(csv=Path("labels.csv")))
        Traceback (most recent call last):
        contnorm.errors.UserError: --csv: 'my data' cannot be the name of a new data set. ...
    """
    name = canonical_name(name)
    list_pictures = _lister(name, options)
    side = _checked_side(name, options.size)
    jobs = _checked_jobs(options.jobs)
    out = options.out or data_root(root, create=True) / name
    listing = list_pictures(out)
    on_listing(listing)
    build(listing, out, side, allow_missing=options.allow_missing, jobs=jobs, progress=progress)
    return out


def _lister(name: str, request: BuildOptions) -> Callable[[Path], DatasetListing]:
    """Return a function that lists the pictures, given the folder of the data set to build."""
    sources = {"--coco": request.coco, "--nus": request.nus, "--csv": request.csv or request.images}
    options = [option for option, value in sources.items() if value is not None]
    if len(options) > 1:
        raise UserError(f"{' and '.join(options)}: cannot be combined. Use one of them.")
    _check_name(name, options[0])
    _check_options(options[0], request)
    if request.coco is not None:
        return lambda out: _cocoseq(request, out)
    if request.nus is not None:
        return lambda out: _nus_wideseq(request, out)
    return lambda out: _csv_dataset(name, request)


def _check_name(name: str, option: str) -> None:
    published = {"--coco": "cocoseq", "--nus": "nus-wideseq"}.get(option)
    if published is not None and name != published:
        raise UserError(f"{option}: builds {published}, not {name!r}. Use contnorm data {published} {option} DIR.")
    if published is None and (name in SOURCES or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)):
        raise UserError(
            f"--csv: {name!r} cannot be the name of a new data set. Use letters, digits, - and _, but none of "
            f"{', '.join(SOURCES)}."
        )


def _check_options(option: str, request: BuildOptions) -> None:
    """Reject options that have no effect on this kind of build."""
    if option != "--csv" and request.groups is not None:
        raise UserError("--groups: the groups of the published streams are fixed. Remove it, or build from --csv.")
    if option == "--csv" and request.ids is not None:
        raise UserError("--ids: is for --coco and --nus only. A CSV file has the task of each picture in a column.")


def _checked_side(name: str, size: int | None) -> int:
    side = PUBLISHED_SIZES[0] if size is None else size
    if name in PUBLISHED_STREAMS and side not in PUBLISHED_SIZES:
        raise UserError(f"--size {side}: must be {' or '.join(map(str, PUBLISHED_SIZES))} for {name}.")
    if not SMALLEST <= side <= LARGEST:
        raise UserError(f"--size {side}: must be {SMALLEST} to {LARGEST} pixels.")
    return side


def _checked_jobs(jobs: int | None) -> int:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1.")
    return jobs or os.cpu_count() or 1


def _cocoseq(request: BuildOptions, out: Path) -> DatasetListing:
    assert request.coco is not None
    instances = find_instances(request.coco)
    stream = published_stream("cocoseq")
    lists = read_lists(stream, find_lists(stream, request.ids, request.coco, out, request.base))
    return list_cocoseq(request.coco, instances, lists)


def _nus_wideseq(request: BuildOptions, out: Path) -> DatasetListing:
    assert request.nus is not None
    nus_wide = read_nus_wide(request.nus)
    stream = published_stream("nus-wideseq")
    lists = read_lists(stream, find_lists(stream, request.ids, request.nus, out, request.base))
    return list_nus_wideseq(request.nus, nus_wide, lists)


def _csv_dataset(name: str, request: BuildOptions) -> DatasetListing:
    if request.csv is None:
        assert request.images is not None
        return list_csv(name, request.images / "labels.csv", request.images, request.groups)
    return list_csv(name, request.csv, request.images or request.csv.parent, request.groups)
