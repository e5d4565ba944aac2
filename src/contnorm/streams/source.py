"""What a data set gives, however it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass

from contnorm.streams.formats import Images, Labels

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A data set in memory or mapped: images as uint8 (samples, channels, height, width), and classes."""

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    fingerprint: str
