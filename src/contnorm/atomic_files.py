"""Atomic replacement of a file: after a crash it has either the old or the new content."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Context manager that gives the path of a draft, which replaces the file at the end; not after an exception.

    Args:
        path: The file; its folder is created. The draft is in the same folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with draft_of(path) as draft:
        ...     _ = draft.write_text("new")
        ...     print(path.exists())
        False
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('new', 1)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Random, since processes of several hosts or containers that share the folder can have the same process id.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):  # one of a write, such as to a full disk, names no file
            error.filename = str(path)
        raise


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically: after a crash it has either the old or the new content.

    Args:
        path: The file; its folder is created.
        parts: Content, written one part after the other.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomically(folder / "a" / "b.json", b"{}")
        >>> (folder / "a" / "b.json").read_bytes()
        b'{}'
    """
    with draft_of(path) as draft, draft.open("xb") as file:  # "x" does not follow a symbolic link at this path
        for part in parts:
            file.write(part)
