"""Data from which moments are re-estimated inside of a framework's training loop, in all its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

__all__ = ["Batches", "all_processes", "check_batches", "select_batches"]

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def check_batches(batches: int | Batches, where: str) -> None:
    """Raise a ValueError for a number of batches below 1.

    Args:
        batches: The argument of the user.
        where: The class and the name of the argument.

    Example:
        >>> check_batches(0, "ReestimateMoments: batches")
        Traceback (most recent call last):
        ...
        ValueError: ReestimateMoments: batches=0 must be at least 1, or batches of data.
    """
    if isinstance(batches, int) and (isinstance(batches, bool) or batches < 1):
        raise ValueError(f"{where}={batches!r} must be at least 1, or batches of data.")


def select_batches(batches: int | Batches, training: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    """Return batches that can be iterated repeatedly.

    Args:
        batches: A number of batches of the training data; batches; or a function that returns batches.
        training: A function that returns the training data.

    Example:
        >>> select_batches(2, lambda: range(5)), select_batches(lambda: [7], lambda: range(5))
        ([0, 1], [7])
    """
    if isinstance(batches, int):
        return list(islice(training(), batches))
    if callable(batches) and not isinstance(batches, Iterable):
        return batches()
    return batches


def all_processes() -> Any:
    """Return the group of all processes of ``torch.distributed``; None if there is one process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if distributed else None
