"""A small stream of vectors that networks learn in seconds."""

import numpy as np
import pytest

from contnorm import bench


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Six classes of Gaussian vectors with distinct means: 40 training and 20 test samples of each."""
    rng = np.random.default_rng(0)
    means = 2 * rng.normal(size=(6, 12))
    labels, test_labels = np.repeat(np.arange(6), 40), np.repeat(np.arange(6), 20)
    x, x_test = (means[y] + rng.normal(size=(len(y), 12)) for y in (labels, test_labels))
    return x, labels, x_test, test_labels


@pytest.fixture
def stream(arrays: tuple[np.ndarray, ...]) -> bench.Stream:
    return bench.Stream.from_arrays(*arrays, tasks=3)
