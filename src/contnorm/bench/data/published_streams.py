"""The two long-tailed streams of Kim et al. (2020) as published: classes, groups, sizes and order of tasks.

This module uses the published indices of tasks; built data sets number the tasks in the order of training. Groups of
classes are those of the whole stream, and are never computed from a part of it.
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
    """Published description of a stream.

    Attributes:
        class_names: Names of the classes, by column of the labels.
        class_groups: Groups of the classes, by column.
        task_order: Indices of the tasks in the order of training.
        sizes: Number of images of each task, by its index, for ``"train"`` and ``"test"``.
        lists: Address and hashes of the lists of images of each task.
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
    """Return one of `PUBLISHED_STREAMS`.

    Example:
        >>> stream = published_stream("cocoseq")
        >>> stream.images, len(stream.class_names), stream.class_groups.count("minority"), stream.task_order
        (41438, 70, 14, (0, 3, 1, 2))
    """
    text = resources.files("contnorm.bench.data").joinpath("published_streams.json").read_text(encoding="utf-8")
    raw = json.loads(text)[name]
    group_of = {class_name: group for group in GROUPS for class_name in raw[group]}
    return PublishedStream(
        name,
        tuple(raw["class_names"]),
        tuple(group_of[class_name] for class_name in raw["class_names"]),
        tuple(raw["task_order"]),
        {"train": tuple(raw["train_sizes"]), "test": tuple(raw["test_sizes"])},
        Fetchable(raw["lists_at"], raw["lists"], folder="ids"),
    )
