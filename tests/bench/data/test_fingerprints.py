"""Fingerprints: versions, comparison, and what they cover."""

import numpy as np
import pytest

from contnorm.bench.data.dataset import compare_fingerprints, fingerprint_arrays, fingerprint_files


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ("2:aa", "2:aa", "same"),
        ("2:aa", "2:bb", "different"),
        ("aa", "aa", "same"),
        ("aa", "bb", "different"),
        ("aa", "2:aa", "unknown"),
        ("3:aa", "2:aa", "unknown"),
        (None, "2:aa", "unknown"),
        (["aa"], 3, "unknown"),
    ],
)
def test_compare_fingerprints(a: object, b: object, match: str) -> None:
    assert compare_fingerprints(a, b) == match == compare_fingerprints(b, a)


def test_array_fingerprint_covers_pixels_labels_and_split() -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(6, 1, 4, 4), dtype=np.uint8)
    labels = np.arange(6)
    whole = fingerprint_arrays((images[:4], labels[:4]), (images[4:], labels[4:]))
    pixel = images.copy()
    pixel[0, 0, 0, 0] ^= 1
    others = {
        fingerprint_arrays((pixel[:4], labels[:4]), (images[4:], labels[4:])),
        fingerprint_arrays((images[:4], labels[:4] + 1), (images[4:], labels[4:])),
        fingerprint_arrays((images[:3], labels[:3]), (images[3:], labels[3:])),
        fingerprint_arrays((images[3::-1], labels[3::-1]), (images[4:], labels[4:])),
    }
    assert len(others) == 4 and whole not in others
    read_only = np.frombuffer(images.tobytes(), dtype=np.uint8).reshape(images.shape)
    small = labels.astype(np.int32)
    assert fingerprint_arrays((read_only[:4], small[:4]), (read_only[4:], small[4:])) == whole


def test_file_fingerprint_covers_content_label_order_and_split() -> None:
    a, b = (b"a" * 32, 0), (b"b" * 32, 1)
    found = [
        fingerprint_files([a, b], []),
        fingerprint_files([b, a], []),
        fingerprint_files([a], [b]),
        fingerprint_files([(b"a" * 32, 1), b], []),
        fingerprint_files([(b"c" * 32, 0), b], []),
    ]
    assert len(set(found)) == 5
