"""Builds a multi-label data set with a progress bar, and describes its content and its missing images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm.bench.data.coco import find_instances, list_cocoseq
from contnorm.bench.data.csv_dataset import list_own
from contnorm.bench.data.id_lists import find_lists, read_lists
from contnorm.bench.data.multilabel_build import MISSING, build
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed
from contnorm.bench.data.multilabel_store import Manifest
from contnorm.bench.data.nus_wide import list_nus_wideseq, read_nus_wide
from contnorm.bench.data.published_streams import PUBLISHED_STREAMS, published_stream
from contnorm.bench.data.registry import SOURCES, data_root
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError

__all__ = ["Asked", "build_with_bar", "describe"]

PUBLISHED_SIZES = (256, 224)  # in the code that made the streams, and in the paper's table of data sets
SMALLEST, LARGEST = 8, 1024
NAMED = 8  # missing images that are named
ALIASES = {"nus-wide": "nus-wideseq", "nuswide": "nus-wideseq", "nuswideseq": "nus-wideseq", "coco": "cocoseq"}


@dataclass(frozen=True)
class Asked:
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


def build_with_bar(name: str, asked: Asked, root: Path | None, console: Console) -> int:
    """Build a data set, or resume a partial build; returns the exit code."""
    name = ALIASES.get(name, name)
    list_images = _maker(name, asked)
    side = _checked_side(name, asked.size)
    jobs = _checked_jobs(asked.jobs)
    out = asked.out or data_root(root, create=True) / name
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("reading lists and labels", total=None)
            listed = list_images(out)
            _print_lines(_missing_lines(listed), console)
            progress.update(bar, description=name)
            manifest = build(
                listed,
                out,
                side,
                allow_missing=asked.allow_missing,
                jobs=jobs,
                report=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    except KeyboardInterrupt:
        _print_lines([f"{out}: stopped. What is decoded is kept; the same command goes on."], console)
        return 130
    _print_lines([f"{out}: {line}" if i == 0 else line for i, line in enumerate(describe(manifest))], console)
    return 0


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(safe_text(line), soft_wrap=True)


def _maker(name: str, request: Asked) -> Callable[[Path], Listed]:
    """Function that lists the images, given the folder of the data set to build."""
    sources = {"--coco": request.coco, "--nus": request.nus, "--csv": request.csv or request.images}
    options = [option for option, value in sources.items() if value is not None]
    if len(options) > 1:
        raise UserError(f"{' and '.join(options)}: build from one of them.")
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
        raise UserError(f"{option}: builds {published}, not {name!r}: contnorm data {published} {option} DIR.")
    if published is None and (name in SOURCES or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)):
        raise UserError(
            f"--csv: {name!r} can't be the name of a data set of your own. Use letters, digits, - and _, and none of "
            f"{', '.join(SOURCES)}."
        )


def _check_options(option: str, request: Asked) -> None:
    """Reject options that have no effect on this kind of build."""
    if option != "--csv" and request.groups is not None:
        raise UserError("--groups: the groups of the published streams are fixed. Leave it out, or build from --csv.")
    if option == "--csv" and request.ids is not None:
        raise UserError("--ids: is for --coco and --nus. A table says the task of each picture itself.")


def _checked_side(name: str, size: int | None) -> int:
    side = PUBLISHED_SIZES[0] if size is None else size
    if name in PUBLISHED_STREAMS and side not in PUBLISHED_SIZES:
        raise UserError(f"--size {side}: use {' or '.join(map(str, PUBLISHED_SIZES))} for {name}.")
    if not SMALLEST <= side <= LARGEST:
        raise UserError(f"--size {side}: use {SMALLEST} to {LARGEST} pixels.")
    return side


def _checked_jobs(jobs: int | None) -> int:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: use 1 or more.")
    return jobs or os.cpu_count() or 1


def _cocoseq(request: Asked, out: Path) -> Listed:
    assert request.coco is not None
    instances = find_instances(request.coco)
    stream = published_stream("cocoseq")
    lists = read_lists(stream, find_lists(stream, request.ids, request.coco, out, request.base))
    return list_cocoseq(request.coco, instances, lists)


def _nus_wideseq(request: Asked, out: Path) -> Listed:
    assert request.nus is not None
    nus_wide = read_nus_wide(request.nus)
    stream = published_stream("nus-wideseq")
    lists = read_lists(stream, find_lists(stream, request.ids, request.nus, out, request.base))
    return list_nus_wideseq(request.nus, nus_wide, lists)


def _csv_dataset(name: str, request: Asked) -> Listed:
    if request.csv is None:
        assert request.images is not None
        return list_own(name, request.images / "labels.csv", request.images, request.groups)
    return list_own(name, request.csv, request.images or request.csv.parent, request.groups)


def _missing_lines(listed: Listed) -> list[str]:
    """Numbers of missing images by task and class, as lines; empty if none are missing."""
    lines: list[str] = []
    for split in SPLITS:
        absent = listed.absent(split)
        count = listed.count(absent)
        tasks = dict(zip(listed.task_names, count.by_task, strict=True))
        kinds = dict(zip(listed.class_names, count.by_class, strict=True))
        lines += _missing(split, count.images, tasks, kinds, [str(picture.id) for picture in absent])
    return lines


def _missing(
    split: str, images: int, tasks: dict[str, int], kinds: dict[str, int], names: Sequence[str] = ()
) -> Iterator[str]:
    if images:
        some = f", such as {', '.join(names[:NAMED])}" if names else ""
        yield f"missing of {split}: {images:,}{some}"
        yield f"  by task: {', '.join(f'{task}: {count:,}' for task, count in tasks.items() if count)}"
        most = sorted(((count, kind) for kind, count in kinds.items() if count), key=lambda pair: (-pair[0], pair[1]))
        yield f"  by class: {', '.join(f'{kind}: {count:,}' for count, kind in most) or 'none of a class'}"


def describe(manifest: Manifest) -> Iterator[str]:
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
        yield f"{split} by task, in the order learned: {', '.join(f'{task}: {count:,}' for task, count in counts)}"
    empty = train["unlabelled"] + test["unlabelled"]
    if empty:
        yield f"without any label, and kept: {empty:,}"
    if not manifest["complete"]:
        yield f"not complete; {MISSING} beside it lists all that is missing"
    for split in SPLITS:
        lacking = manifest["missing"][split]
        tasks = dict(zip(manifest["task_names"], lacking["by_task"], strict=True))
        yield from _missing(split, lacking["images"], tasks, lacking["by_class"])
