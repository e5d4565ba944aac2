"""User errors, as opposed to bugs. The command line prints them in one line, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["RunBrokeError", "UserError", "unknown", "usable"]


class UserError(Exception):
    """Invalid input from the user: an argument, a setting or a file that cannot be used."""


class RunBrokeError(UserError):
    """User code failed during a run, and would fail again if the run were repeated."""


def unknown(what: str, given: str, known: Iterable[str], near: Sequence[str] | None = None) -> UserError:
    """Return an error for an unknown name, with close matches and the list of known names.

    Args:
        what: The kind of thing that the name refers to.
        given: The unknown name.
        known: The known names.
        near: The suggestions. By default, the names in ``known`` with a similar spelling.

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
    """Turn an ``OSError`` raised inside the block into a `UserError` about a path.

    Args:
        path: The path that the message names.
        wrong: What failed.
        mend: How to fix it.

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
