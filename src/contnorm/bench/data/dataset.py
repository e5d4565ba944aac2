"""What a data set gives, however it lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contnorm.bench.data.formats import Images, Labels

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A data set in memory or mapped: images as uint8 (samples, channels, height, width), and classes.

    Attributes:
        fingerprint: Which samples, labels and split it has; see `contnorm.bench.fingerprint`.
        details: What else a record says about the data: how many images are missing, how it was split and decoded.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    fingerprint: str
    details: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
