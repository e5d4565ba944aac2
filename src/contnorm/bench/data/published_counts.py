"""Images per class of published data sets, and the deviations of a copy on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.bench.data.formats import Labels
from contnorm.errors import UserError

__all__ = ["ALLOW_MISSING", "PublishedCounts", "check_counts"]

ALLOW_MISSING = "CONTNORM_ALLOW_MISSING"


@dataclass(frozen=True)
class PublishedCounts:
    """Images per class, by label, in the training and the test split."""

    train: tuple[int, ...]
    test: tuple[int, ...]

    @property
    def images(self) -> int:
        return sum(self.train) + sum(self.test)


def check_counts(
    name: str, where: Path, published: PublishedCounts, train: Labels, test: Labels, allow_missing: bool
) -> dict[str, Any]:
    """Compare the labels of a data set with the published counts.

    Args:
        name: Data set.
        where: Folder, for the message.
        published: Expected counts.
        train, test: Labels of both splits, from 0 to the number of classes minus 1.
        allow_missing: Accept other counts than published; also set by the environment variable `ALLOW_MISSING`.

    Returns:
        Entries for records that describe the deviation; empty if there is none.

    Raises:
        UserError: If the counts deviate and that is not allowed.
    """
    deviations = {
        split: np.bincount(labels, minlength=len(counts)) - np.array(counts)
        for split, labels, counts in (("train", train, published.train), ("test", test, published.test))
    }
    missing = {split: int(-by_class[by_class < 0].sum()) for split, by_class in deviations.items()}
    extra = sum(int(by_class[by_class > 0].sum()) for by_class in deviations.values())
    if not (any(missing.values()) or extra):
        return {}
    classes = int(np.any([by_class != 0 for by_class in deviations.values()], axis=0).sum())
    if not (allow_missing or os.environ.get(ALLOW_MISSING, "") not in ("", "0")):
        raise UserError(_refusal(name, where, published, missing, extra, classes))
    details = {
        "images": len(train) + len(test),
        "published_images": published.images,
        "missing_images": sum(missing.values()),
        "missing_by_split": missing,
        "deviating_classes": classes,
    }
    return details | ({"extra_images": extra} if extra else {})


def _refusal(
    name: str, where: Path, published: PublishedCounts, missing: dict[str, int], extra: int, classes: int
) -> str:
    parts = []
    if any(missing.values()):
        splits = ", ".join(f"{count:,} {split}" for split, count in missing.items())
        parts.append(f"{sum(missing.values()):,} of {published.images:,} images are missing ({splits})")
    if extra:
        parts.append(f"{extra:,} images are more than published")
    return (
        f"{where}: {name} is not the published data set: {' and '.join(parts)}, in {classes} of "
        f"{len(published.train)} classes. Complete it, or use it as it is with --allow-missing, which is recorded."
    )
