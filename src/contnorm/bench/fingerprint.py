"""Fingerprints of data sets: hashes of the samples, labels and splits of a run.

A fingerprint is a string with its version in front, ``"2:0123456789abcdef"``. Version 2 is computed from the samples
in their order, their labels and their split, so the same images in another file format have the same fingerprint.
A string without a version is of version 1, which covered file names and file contents; data sets that `contnorm data`
builds have always hashed their content and keep version 1. Fingerprints of different versions are not comparable:
they say nothing about whether the data is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Match", "compare_fingerprints", "fingerprint_arrays", "fingerprint_files", "not_comparable"]

VERSION = 2
DIGITS = 16

ArraySplit: TypeAlias = "tuple[NDArray[np.uint8], NDArray[Any]]"
FileSplit = Sequence[tuple[bytes, int]]


class Match(Enum):
    """Result of a comparison of two fingerprints."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def compare_fingerprints(a: object, b: object) -> Match:
    """Compare two fingerprints from records.

    Returns `Match.UNKNOWN` if their versions differ or if one is missing.

    Example:
        >>> compare_fingerprints("2:00ff", "2:00ff"), compare_fingerprints("2:00ff", "00ff")
        (<Match.SAME: 'same'>, <Match.UNKNOWN: 'unknown'>)
    """
    if not (isinstance(a, str) and isinstance(b, str)) or _version(a) != _version(b):
        return Match.UNKNOWN
    return Match.SAME if a == b else Match.DIFFERENT


def not_comparable(a: object, b: object) -> str:
    """Reason why two fingerprints cannot be compared; empty if they can be, or if one is missing.

    Example:
        >>> not_comparable("2:00ff", "00ff")
        'fingerprints 2:00ff and 00ff are of different versions and cannot be compared'
    """
    if not (isinstance(a, str) and isinstance(b, str)) or _version(a) == _version(b):
        return ""
    return f"fingerprints {a} and {b} are of different versions and cannot be compared"


def _version(fingerprint: str) -> str:
    head, colon, _ = fingerprint.partition(":")
    return head if colon else "1"


def fingerprint_arrays(train: ArraySplit, test: ArraySplit) -> str:
    """Fingerprint of decoded images and their labels.

    Example:
        >>> images, labels = np.zeros((2, 1, 4, 4), dtype=np.uint8), np.array([0, 1])
        >>> fingerprint_arrays((images, labels), (images, labels))[:2]
        '2:'
    """
    digest = hashlib.sha256(b"images\n")
    for name, (images, labels) in (("train", train), ("test", test)):
        digest.update(f"{name} {list(images.shape)}\n".encode())
        digest.update(np.ascontiguousarray(images).data)
        digest.update(np.ascontiguousarray(labels, dtype="<i8").data)
    return _versioned(digest.hexdigest())


def fingerprint_files(train: FileSplit, test: FileSplit) -> str:
    """Fingerprint of image files: for each the SHA-256 of its bytes and its label, in order.

    JPEG files are identified by their encoded bytes, not by decoded pixels. JPEG decoders differ in the last bit of a
    pixel between versions, so a fingerprint of pixels would call the same files different data after an upgrade of
    Pillow. File names count through what they decide: the order, the label and the split. The decoder that was used
    is recorded next to the fingerprint.
    """
    digest = hashlib.sha256(b"files\n")
    for name, files in (("train", train), ("test", test)):
        digest.update(f"{name} {len(files)}\n".encode())
        digest.update(b"".join(_entries(files)))
    return _versioned(digest.hexdigest())


def _entries(files: FileSplit) -> Iterable[bytes]:
    return (content + label.to_bytes(8, "little") for content, label in files)


def _versioned(hexdigest: str) -> str:
    return f"{VERSION}:{hexdigest[:DIGITS]}"
