"""Published data sets have known counts: other counts are refused, or accepted on request and recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contnorm.bench.data.published import ALLOW_MISSING, PublishedCounts, check_counts
from contnorm.bench.data.registry import SOURCES, find_layout, load_source
from contnorm.errors import UserError
from tests.datasets import (
    small_cifar10,
    small_cifar100,
    small_mini_imagenet,
    small_mnist,
    small_tiny_imagenet,
)

COUNTS = PublishedCounts(train=(3, 3), test=(1, 2))
TRAIN, TEST = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 1])


@pytest.fixture(autouse=True)
def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_MISSING, raising=False)


def test_counts_as_published_have_no_details() -> None:
    assert check_counts("few", Path("x"), COUNTS, TRAIN, TEST, allow_missing=False) == {}


def test_missing_and_extra_images_are_counted_per_class() -> None:
    train = np.array([0, 0, 1, 1, 1, 1])
    with pytest.raises(UserError) as caught:
        check_counts("few", Path("x"), COUNTS, train, TEST[:1], allow_missing=False)
    message = str(caught.value)
    assert "3 of 9 images are missing (1 train, 2 test)" in message and "1 images are more" in message
    assert "2 of 2 classes" in message and "--allow-missing" in message
    assert check_counts("few", Path("x"), COUNTS, train, TEST[:1], allow_missing=True) == {
        "images": 7,
        "published_images": 9,
        "missing_images": 3,
        "missing_by_split": {"train": 1, "test": 2},
        "deviating_classes": 2,
        "extra_images": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "missing"),
    [
        ("mnist", small_mnist, "69,600 of 70,000"),
        ("cifar10", small_cifar10, "59,790 of 60,000"),
        ("cifar100", small_cifar100, "59,200 of 60,000"),
        ("mini-imagenet", small_mini_imagenet, "59,700 of 60,000"),
        ("tiny-imagenet", small_tiny_imagenet, "109,400 of 110,000"),
    ],
)
def test_incomplete_data_set_is_refused_or_recorded(tmp_path: Path, name: str, make, missing: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path)
    with pytest.raises(UserError, match=f"{missing} images are missing"):
        load_source(name, tmp_path)
    assert not list(tmp_path.rglob("*.npy")), "nothing is decoded before it is refused"
    source = load_source(name, tmp_path, allow_missing=True)
    assert source.details["missing_images"] == int(missing.split()[0].replace(",", ""))
    with pytest.raises(UserError, match="--allow-missing"):
        load_source(name, tmp_path)  # from the cache


def test_environment_variable_allows_missing_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_mnist(tmp_path)
    monkeypatch.setenv(ALLOW_MISSING, "0")
    with pytest.raises(UserError, match="missing"):
        load_source("mnist", tmp_path)
    monkeypatch.setenv(ALLOW_MISSING, "1")
    assert load_source("mnist", tmp_path).details["images"] == 400


def test_empty_folder_is_no_data_set(tmp_path: Path) -> None:
    for folder in ("mini-imagenet", "mini-imagenet/n01532829", "mini-imagenet/images"):
        (tmp_path / folder).mkdir()
    assert find_layout(SOURCES["mini-imagenet"], tmp_path) is None
    tiny = small_tiny_imagenet(tmp_path / "tiny", per_class=0)
    assert find_layout(SOURCES["tiny-imagenet"], tiny) is None


def test_published_counts_add_up() -> None:
    images = {spec.name: spec.published.images for spec in SOURCES.values() if spec.published}
    assert images == {
        "mnist": 70_000,
        "fashion-mnist": 70_000,
        "cifar10": 60_000,
        "cifar100": 60_000,
        "tiny-imagenet": 110_000,
        "mini-imagenet": 60_000,
    }
    assert all(len(spec.published.train) == spec.classes for spec in SOURCES.values() if spec.published)
