"""Errors of a person's making, as against bugs: they are told in one line, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["RunBrokeError", "UserError", "unknown", "usable"]


class UserError(Exception):
    """Something a person typed, or a file a person brought, that can't be used as it is."""


class RunBrokeError(UserError):
    """Code of a user's own that breaks a run, and would break it again."""


def unknown(what: str, given: str, known: Iterable[str], near: Sequence[str] | None = None) -> UserError:
    """An error for a name that isn't there: near matches first, then the list.

    Args:
        what: What kind of thing it names.
        given: The name.
        known: The names there are.
        near: What was probably meant; those of ``known`` that are spelled almost alike, where it isn't said.

    Example:
        >>> print(unknown("stream", "split-cifar", ["split-cifar10", "split-mnist"]))
        unknown stream 'split-cifar'. Did you mean 'split-cifar10'? There are: split-cifar10, split-mnist.
    """
    names = list(known)
    near = difflib.get_close_matches(given, names, n=2, cutoff=0.7) if near is None else near
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UserError(f"unknown {what} {given!r}.{hint} There are: {', '.join(names)}.")


@contextmanager
def usable(path: Path, wrong: str, mend: str) -> Iterator[None]:
    """A place that can't be used is a mistake of a person's, not a bug.

    Args:
        path: The place.
        wrong: What can't be done there.
        mend: What to do about it.

    Example:
        >>> with usable(Path("runs"), "nothing can be kept there", "Make room."):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        contnorm.errors.UserError: runs: nothing can be kept there (No space left on device). Make room.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {wrong} ({error.strerror or error}). {mend}") from error
