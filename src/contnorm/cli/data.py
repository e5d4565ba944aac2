"""The `ls` and `data` commands: list what is available; list, show, download, add and build data sets.

They need no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm import bench
from contnorm.bench.data import registry
from contnorm.bench.data.dataset import SPLITS, Manifest, find_stored, list_stored, read_manifest
from contnorm.bench.data.multilabel import PUBLISHED_STREAMS, published_stream
from contnorm.bench.data.registry import ENVIRONMENT, FETCHABLE, SOURCES, SourceSpec, data_root, location_of
from contnorm.bench.registries import Listing, streams_of_source
from contnorm.cli.common import DataRoot, console, print_lines, print_text, show_rows
from contnorm.errors import UserError, unknown
from contnorm.paper.recipe import find_recipe, recipe_names

EXAMPLES = 8  # missing pictures or classes that are listed


def ls(
    what: Annotated[str, typer.Argument(help="Kind to list, such as norms, streams or tables; default: all.")] = "",
    data_root: DataRoot = None,
) -> None:
    """List available norms, streams, strategies, memories, models, launchers and tables.

    Examples:
        # List the norms.
        contnorm ls norms
        # List all streams, with those of your own data sets.
        contnorm ls streams
    """
    tables = {name: Listing(find_recipe(name).title, "contnorm") for name in recipe_names()}
    registries = {**bench.available(data_root), "tables": tables}
    if what and what not in registries:
        raise unknown("listing", what, registries)
    for kind in [what] if what else registries:
        print_text(kind, style="bold")
        rows = [(name, str(one.origin), one.summary) for name, one in registries[kind].items()]
        show_rows(("name", "from", "what it is"), rows, wrap_last=True)
        console.print()


def data(
    name: Annotated[str, typer.Argument(help="Data set to show, fetch or build; `add` to add one. Default: all.")] = "",
    added: Annotated[str, typer.Argument(metavar="NAME", help="After `add`: the name of your data set.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Add images: DIR/CLASS/*, or DIR/train and DIR/test.")] = None,
    npz: Annotated[Path | None, typer.Option(help="Add arrays of a file: x_train, y_train, x_test, y_test.")] = None,
    tasks: Annotated[str | None, typer.Option(help="With add: number of tasks, or the classes: 'a,b;c'.")] = None,
    test_share: Annotated[float, typer.Option(help="With add: share of each class that is the test split.")] = 0.2,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download it from its public source and verify it.")] = False,
    base: Annotated[str | None, typer.Option(help="Base URL to download from instead of the public source.")] = None,
    coco: Annotated[Path | None, typer.Option(help="Build cocoseq from MS-COCO in this folder.")] = None,
    nus: Annotated[Path | None, typer.Option(help="Build nus-wideseq from NUS-WIDE in this folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Build a multi-label data set from this CSV table.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images; without --csv, with labels.csv.")] = None,
    groups: Annotated[Path | None, typer.Option(help="Table that assigns classes to groups; default: by size.")] = None,
    ids: Annotated[Path | None, typer.Option(help="Folder of the task lists; default: DIR/ids, or download.")] = None,
    size: Annotated[int | None, typer.Option(help="Image side: 256 or 224; any size with add or --csv.")] = None,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Build without missing images.")] = False,
    data_root: DataRoot = None,
) -> None:
    """List data sets, download one, add one of yours, or build a multi-label one.

    Examples:
        # Show which data sets are there, and how to get the others.
        contnorm data
        # Show the folder layout of mini-ImageNet.
        contnorm data mini-imagenet
    """
    if name == "add":
        with _bars(MofNCompleteColumn()) as update:
            path = bench.add_dataset(
                added, data_root, folder=folder, npz=npz, tasks=_parse_tasks(tasks, npz), size=size,
                test_share=test_share, progress=update,
            )  # fmt: skip
        elsewhere = "" if data_root is None else f" --data-root {shlex.quote(str(data_root))}"
        lines = [f"{path}: added", *_describe_added(read_manifest(path))]
        print_lines([*lines, f"run it: contnorm run --stream {added}{elsewhere}"])
    elif added or folder or npz or tasks:
        raise UserError("--folder, --npz and --tasks are for `contnorm data add NAME`, which adds a data set.")
    elif coco or nus or csv or images:
        with _bars(MofNCompleteColumn()) as update:
            path = bench.build_dataset(
                name, data_root, coco=coco, nus=nus, csv=csv, images=images, groups=groups, ids=ids, base=base,
                size=size or 256, allow_missing=allow_missing, progress=update,
            )  # fmt: skip
        first, *lines = _describe_build(read_manifest(path))
        print_lines([f"{path}: {first}", *lines])
    else:
        if fetch:
            if name not in FETCHABLE:
                raise unknown("data set to download", name, FETCHABLE)
            with _bars(DownloadColumn()) as update:
                registry.fetch(FETCHABLE[name], registry.data_root(data_root, create=True), base, update)
        if name:
            _show_data_set(name, data_root)
        else:
            _show_data_sets(data_root)


@contextmanager
def _bars(count: Any) -> Iterator[Any]:
    """Context manager that gives a function to report progress with; there is one bar for each kind of work."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=None)
            progress.update(bars[what], completed=done, total=total or None)

        yield update


def _parse_tasks(text: str | None, npz: Path | None) -> int | list[list[Any]] | None:
    """Parse ``--tasks``: a number, or the classes of each task. Labels of an .npz file may be whole numbers."""
    if text is None or text.strip().isdecimal():
        return None if text is None else int(text)
    blocks: list[list[Any]] = [[name.strip() for name in block.split(",") if name.strip()] for block in text.split(";")]
    if npz is not None and all(name.removeprefix("-").isdecimal() for block in blocks for name in block):
        return [[int(name) for name in block] for block in blocks]
    return blocks


def _describe_added(manifest: Manifest) -> Iterator[str]:
    """Describe the content of a data set of the user's, as lines."""
    samples, names = manifest["samples"], manifest["class_names"]
    yield (
        f"{manifest['name']}: {samples['train']:,} training and {samples['test']:,} test samples of shape "
        f"{'x'.join(map(str, manifest['shape']))}, {len(names)} classes, fingerprint {manifest['fingerprint']}"
    )
    if manifest["task_classes"] is None:
        yield "tasks: given for each sample"
        return
    parts = {f"task {i}": block for i, block in enumerate(manifest["task_classes"])}
    parts["in no task"] = sorted(set(range(len(names))).difference(*parts.values()))
    for part, block in parts.items():
        if block:
            yield f"{part}: {', '.join(str(names[i]) for i in block[:EXAMPLES])}{', ...' * (len(block) > EXAMPLES)}"


def _show_data_sets(folder: Path | None) -> None:
    """Print one line per data set: its folder under the root, or how to get it."""
    root = data_root(folder)
    print_lines([f"data sets under {root} (set another folder with --data-root or {ENVIRONMENT})"])
    rows, stored = [], list_stored(root)
    for spec in SOURCES.values():
        location = location_of(spec, root)
        where = f"{location}{_stored_status(stored.get(spec.name))}" if location else "-"
        rows.append((spec.name, where, "" if location else _instructions(spec)))
    rows += [(name, f"{name}{_stored_status(path)}", "") for name, path in stored.items() if name not in SOURCES]
    show_rows(("data set", "folder", "how to get it"), rows)


def _stored_status(folder: Path | None) -> str:
    """Number of samples of a data set that was added or built, and of missing pictures."""
    if folder is None:
        return ""
    manifest = read_manifest(folder)
    published, missing = manifest.get("published_images"), manifest.get("missing_images")
    images = sum(manifest["samples"].values())
    of = f" of {published:,} pictures" if published else " samples"
    return f" ({images:,}{of}{f', {missing:,} missing' if missing else ''})"


def _show_data_set(name: str, folder: Path | None) -> None:
    """Print the details of a data set: what it is, the streams that use it, where it was searched, how to get it."""
    root = data_root(folder)
    stored = find_stored(name, root)
    if name not in SOURCES and stored is None:
        raise unknown("data set", name, list(dict.fromkeys([*SOURCES, *list_stored(root)])))
    if name in SOURCES:
        print_lines(list(_details(SOURCES[name], root)))
    else:
        print_lines([f"folder: {stored}"])
    if stored is not None:
        manifest = read_manifest(stored)
        describe = _describe_added if "task_classes" in manifest else _describe_build
        print_lines(list(describe(manifest)))


def _details(spec: SourceSpec, root: Path) -> Iterator[str]:
    yield f"{spec.name}: {spec.summary}"
    yield f"streams: {', '.join(streams_of_source(spec.name))}"
    location = location_of(spec, root)
    absent = f"not found under {root} (set another folder with --data-root or {ENVIRONMENT})"
    if spec.layouts:
        yield f"folder: {root / location}" if location else absent
        yield "file layouts, in the order of the search:"
        for layout in spec.layouts:
            missing = [name for name in layout.files if not (root / name).exists()]
            more = f" and {len(layout.files) - 1} more" if len(layout.files) > 1 else ""
            some = f" (missing: {', '.join(missing)})" if 0 < len(missing) < len(layout.files) else ""
            yield f"  {layout.files[0]}{more}{some}"
    else:
        yield "included in contnorm"
    if not location:
        yield f"how to get it: {_instructions(spec)}"
        if spec.name in PUBLISHED_STREAMS:
            source = published_stream(spec.name).lists.base
            yield f"lists of its tasks: in DIR/ids, or in the folder of --ids, or downloaded from {source}"
    if spec.name in FETCHABLE:
        yield f"public source: {FETCHABLE[spec.name].base}"


def _instructions(spec: SourceSpec) -> str:
    if spec.name in FETCHABLE:
        return f"contnorm data {spec.name} --fetch"
    return spec.built_with or f"put its pictures in {spec.layouts[0].files[0]}/"


def _describe_build(manifest: Manifest) -> Iterator[str]:
    """Describe the content and the missing images of a data set that was built, as lines."""
    about, published = manifest["about"], manifest["published_images"]
    train, test = (about["images"][split]["images"] for split in SPLITS)
    size = "x".join(map(str, manifest["shape"][1:]))
    yield (
        f"{manifest['name']}, {train + test:,} pictures of {size} ({train:,} train, {test:,} test), "
        f"{manifest['tasks']} tasks, {manifest['classes']} classes, fingerprint "
        f"{manifest['fingerprint']}"
    )
    if published is not None:
        whole = about["lists_as_published"] and about["complete"]
        part = f"a part of the published stream: {train + test:,} of {published:,}"
        yield "the whole published stream" if whole else part
    for split in SPLITS:
        counts = zip(about["task_names"], about["images"][split]["by_task"], strict=True)
        yield f"{split} by task, in the order of training: {', '.join(f'{task}: {count:,}' for task, count in counts)}"
    if not about["complete"]:
        missing = ", ".join(f"{about['missing'][split]['images']:,} {split}" for split in SPLITS)
        yield f"missing pictures: {missing}; missing_pictures in dataset.json lists them"
