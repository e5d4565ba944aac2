"""Errors of a person's making, as against bugs: they are told in one line, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["UserError", "unknown"]


class UserError(Exception):
    """Something a person typed, or a file a person brought, that can't be used as it is."""


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
