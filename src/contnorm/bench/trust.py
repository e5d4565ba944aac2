"""Which files of Python code may be executed.

A record, the note of a stopped run, a recipe and a settings file can name code as ``path/to/file.py:Name``. Such a file
may come from anybody, so a name in it is no permission: code is executed only if the user names its file on this call.
The commands restrict execution to the files that were typed (`only_trusted`); a Python program that passes a name to
the package names the file itself, and is not restricted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from contnorm.errors import UserError

__all__ = ["check_files", "is_trusted", "only_trusted", "require_trust", "trusted_files", "untrusted"]

_allowed: ContextVar[frozenset[Path] | None] = ContextVar("allowed", default=None)  # None: no restriction


@contextmanager
def only_trusted(files: Iterable[Path] | None) -> Iterator[None]:
    """Restrict the execution of user code to these files; None lifts the restriction.

    Example:
        >>> with only_trusted([Path("net.py")]):
        ...     is_trusted(Path("net.py")), is_trusted(Path("other.py"))
        (True, False)
    """
    token = _allowed.set(None if files is None else frozenset(_absolute(file) for file in files))
    try:
        yield
    finally:
        _allowed.reset(token)


def trusted_files() -> frozenset[Path] | None:
    """The files that may be executed, to pass on to another process; None where there is no restriction."""
    return _allowed.get()


def is_trusted(path: Path) -> bool:
    """Whether a file may be executed."""
    allowed = _allowed.get()
    return allowed is None or _absolute(path) in allowed


def untrusted(path: Path, what: str, name: str) -> str:
    """Why a file may not be executed, and how to allow it; empty where it may."""
    if is_trusted(path):
        return ""
    # The name comes from a file of anybody's: nothing in it may act on a terminal or, copied from there, on a shell.
    shown = shlex.quote(str(path)) if str(path).isprintable() else ascii(str(path))
    return (
        f"{what} {name!r}: names code in {shown}, which is not executed unless it is named on this call. Read it, and "
        f"add --trust-code {shown} if you trust it."
    )


def require_trust(path: Path, what: str, name: str) -> None:
    """Refuse to execute a file that was not named on this call."""
    why = untrusted(path, what, name)
    if why:
        raise UserError(why)


def check_files(files: Iterable[Path]) -> list[Path]:
    """The files typed with --trust-code; refuses one that does not exist."""
    typed = list(files)
    for path in typed:
        if not path.is_file():
            raise UserError(f"--trust-code {path}: there is no such file. Give the file itself, such as net.py.")
    return typed


def _absolute(path: Path) -> Path:
    return path.resolve()  # "~" stands for itself, as it does where the file is loaded
