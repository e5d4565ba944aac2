"""Lists of the picture numbers of each task of a published stream: read from a folder, or downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.data.fetch import Report, fetch
from contnorm.bench.data.json_text import parse_json
from contnorm.bench.data.multilabel_manifest import SPLITS, Listed, ListedPicture
from contnorm.bench.data.published_streams import PublishedStream
from contnorm.errors import UserError, usable

__all__ = ["IdLists", "find_lists", "listed_as", "read_lists"]


@dataclass(frozen=True)
class IdLists:
    """Picture numbers by split and by the published index of the task.

    Attributes:
        ids: Lists of numbers.
        as_published: Whether all lists are identical to the published ones.
        where: File of each list, for messages.
    """

    ids: Mapping[str, Sequence[Sequence[int]]]
    as_published: bool
    where: Mapping[str, Sequence[Path]]


def listed_as(stream: PublishedStream, lists: IdLists, picture: Callable[[str, int, int], ListedPicture]) -> Listed:
    """Return the pictures of the lists by task, in the order of training.

    Args:
        stream: Published stream.
        lists: Published or modified lists.
        picture: Returns the picture for a split, a number of the list, and a task.
    """
    train, test = (
        tuple(
            picture(split, number, task)
            for task, index in enumerate(stream.task_order)
            for number in lists.ids[split][index]
        )
        for split in SPLITS
    )
    return Listed(
        stream.name,
        stream.class_names,
        stream.class_groups,
        tuple(map(str, stream.task_order)),
        train,
        test,
        stream.images,
        lists.as_published,
    )


def find_lists(
    stream: PublishedStream,
    given: Path | None,
    beside: Path,
    out: Path,
    base: str | None = None,
    report: Report = lambda *_: None,
) -> Path:
    """Return the folder of the lists.

    This is ``given``, or the subfolder ``ids`` of the pictures if it exists. Otherwise the lists are downloaded once
    into the folder of the data set.

    Args:
        stream: Published stream.
        given: Folder of the lists; None to search for them.
        beside: Folder of the pictures.
        out: Folder of the data set to be built.
        base: Address to download from, in place of the default.
        report: Called with the progress of each file.
    """
    if given is not None:
        if not given.is_dir():
            raise UserError(f"--ids {given}: is no folder. Give the one that holds {next(iter(stream.lists.files))}.")
        return given
    if (beside / "ids").is_dir():
        return beside / "ids"
    try:
        with usable(out, "the lists can't be kept there", "Say with --out where else."):
            fetch(stream.lists, out, base, report)
    except ImportError as error:
        raise UserError('fetching the lists needs pooch: pip install "contnorm[bench]"; or give --ids DIR.') from error
    except UserError as error:
        raise UserError(f"{error} Or say with --ids which folder holds the lists.") from error
    return out / stream.lists.folder


def read_lists(stream: PublishedStream, folder: Path) -> IdLists:
    """Read the lists of all tasks: ``train_task0_id_coco.json``, the published name, or ``train_task0.json``."""
    ids: dict[str, list[list[int]]] = {}
    where: dict[str, list[Path]] = {}
    as_published = True
    for split, sizes in stream.sizes.items():
        where[split] = [_file(stream, folder, split, task) for task in range(len(sizes))]
        ids[split] = [_numbers(path) for path in where[split]]
        as_published &= all(
            _hash(numbers) == stream.lists.files[_published_name(stream, split, task)]
            for task, numbers in enumerate(ids[split])
        )
    return IdLists(ids, as_published, where)


def _published_name(stream: PublishedStream, split: str, task: int) -> str:
    return next(name for name in stream.lists.files if name.startswith(f"{split}_task{task}_"))


def _file(stream: PublishedStream, folder: Path, split: str, task: int) -> Path:
    names = (_published_name(stream, split, task), f"{split}_task{task}.json")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{folder}: has no list of task {task} to {'learn' if split == 'train' else split}: looked for "
        f"{' and '.join(names)}. Put it there, or say with --ids where the lists are."
    )


def _numbers(path: Path) -> list[int]:
    with usable(path, "it can't be read", "Let yourself read it."):
        text = path.read_bytes()
    try:
        numbers = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: is no JSON, or is cut short ({error}). Bring it again.") from error
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise UserError(f"{path}: should be a list of whole numbers of at least 0, such as [813, 1392].")
    return numbers


def _hash(numbers: Sequence[int]) -> str:
    """Hash a list in the format of the published files, that of ``json.dumps``; white space in the file is ignored."""
    return f"sha256:{hashlib.sha256(json.dumps(numbers).encode()).hexdigest()}"
