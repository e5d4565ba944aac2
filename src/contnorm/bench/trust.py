"""Trust in user code: which Python files may be executed.

Records, notes of stopped runs, recipes and settings files can name code as ``path/to/file.py:Name``. Such a file may
come from anyone, so a name in it is no permission: code is executed only if the user names its file on the command
line. Commands restrict execution to these files (`only_trusted`). A Python program that passes a name to the package
chooses the file itself, and is not restricted.
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
    """Restrict the execution of user code to these files; None removes the restriction.

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
    """Return the files that may be executed, for use in another process; None if there is no restriction."""
    return _allowed.get()


def is_trusted(path: Path) -> bool:
    """Whether a file may be executed."""
    allowed = _allowed.get()
    return allowed is None or _absolute(path) in allowed


def untrusted(path: Path, what: str, name: str) -> str:
    """Return why a file may not be executed, and how to allow it; empty if it may."""
    if is_trusted(path):
        return ""
    # The name is untrusted: it must not contain terminal control codes, or shell syntax that acts when it is copied.
    quoted = shlex.quote(str(path)) if str(path).isprintable() else ascii(str(path))
    return (
        f"{what} {name!r}: names code in {quoted}, which is not executed unless it is named on this call. Read it, and "
        f"add --trust-code {quoted} if you trust it."
    )


def require_trust(path: Path, what: str, name: str) -> None:
    """Raise `UserError` if a file may not be executed."""
    reason = untrusted(path, what, name)
    if reason:
        raise UserError(reason)


def check_files(files: Iterable[Path]) -> list[Path]:
    """Return the files of --trust-code; raises `UserError` if one does not exist."""
    paths = list(files)
    for path in paths:
        if not path.is_file():
            raise UserError(f"--trust-code {path}: there is no such file. Give the file itself, such as net.py.")
    return paths


def _absolute(path: Path) -> Path:
    return path.resolve()  # "~" is not expanded, as when the file is loaded
