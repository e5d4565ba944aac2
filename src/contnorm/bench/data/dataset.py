"""The common representation of data sets of all file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contnorm.bench.data.formats import Images, Labels

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A data set, in memory or memory-mapped: uint8 images (samples, channels, height, width) and their labels.

    Attributes:
        classes: Number of classes.
        fingerprint: Hash that identifies samples, labels and split; see `contnorm.bench.fingerprint`.
        details: Further entries for records: number of missing images, how the data was split and decoded.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    fingerprint: str
    details: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
