"""The test split of data without one: a share of each class, at random with a fixed seed."""

from __future__ import annotations

from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.rng import generator
from contnorm.errors import UserError

__all__ = ["check_test_share", "choose_test_samples"]


def check_test_share(share: float) -> None:
    """Raise a `UserError` if a share is not between 0 and 1."""
    if not 0 < share < 1:
        raise UserError(f"test_share={share}: use a number between 0 and 1.")


def choose_test_samples(label: object, samples: int, share: float) -> NDArray[np.int64]:
    """Return the positions of the test samples of a class: at least one, and not all.

    Args:
        label: The class.
        samples: Its number of samples, at least 2.
        share: Share of the samples.

    Example:
        >>> len(choose_test_samples("cat", 10, 0.2)), len(choose_test_samples("cat", 2, 0.9))
        (2, 1)
    """
    count = min(samples - 1, max(1, round(share * samples)))
    return generator(0, f"test {label}").permutation(samples)[:count]
