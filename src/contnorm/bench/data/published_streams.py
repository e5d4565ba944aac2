"""The two long-tailed streams of Kim et al. (2020), as published: classes, their groups, sizes, and the order of tasks.

Tasks go by the published indices here, and are numbered in the order they are learned in everything that is built.
Groups were fixed by the whole stream: they are never counted from a part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from contnorm.bench.data.fetch import Fetchable
from contnorm.bench.data.multilabel import GROUPS

__all__ = ["PUBLISHED_STREAMS", "PublishedStream", "published_stream"]

PUBLISHED_STREAMS = ("cocoseq", "nus-wideseq")


@dataclass(frozen=True)
class PublishedStream:
    """What was published of a stream.

    Attributes:
        class_names: By column of the labels.
        class_groups: By column.
        task_order: The indices of the tasks, in the order they are learned.
        sizes: For ``"train"`` and ``"test"``, the images of each task by its index.
        lists: Where the lists of the images of each task are to be had, and their hashes.
    """

    name: str
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    task_order: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    lists: Fetchable

    @property
    def images(self) -> int:
        return sum(map(sum, self.sizes.values()))


@cache
def published_stream(name: str) -> PublishedStream:
    """One of `PUBLISHED_STREAMS`.

    Example:
        >>> stream = published_stream("cocoseq")
        >>> stream.images, len(stream.class_names), stream.class_groups.count("minority"), stream.task_order
        (41438, 70, 14, (0, 3, 1, 2))
    """
    text = resources.files("contnorm.bench.data").joinpath("published_streams.json").read_text(encoding="utf-8")
    raw = json.loads(text)[name]
    group_of = {kind: group for group in GROUPS for kind in raw[group]}
    return PublishedStream(
        name,
        tuple(raw["class_names"]),
        tuple(group_of[kind] for kind in raw["class_names"]),
        tuple(raw["task_order"]),
        {"train": tuple(raw["train_sizes"]), "test": tuple(raw["test_sizes"])},
        Fetchable(raw["lists_at"], raw["lists"], folder="ids"),
    )
