"""Files: output paths, checksums, JSON, and the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.errors import UserError

__all__ = [
    "Progress",
    "file_sha256",
    "file_signature",
    "parse_json",
    "user_cache",
    "write_output",
]

BLOCK = 2**24  # bytes per read: the thread that hashes needs the interpreter lock between blocks

Progress = Callable[[str, int, int], None]  # what is done, units done, units in total


def write_output(path: Path, content: bytes) -> None:
    """Write to an output path from the user.

    A symbolic link is followed, and a device or pipe is written to instead of being replaced.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            file.write(content)
    else:
        write_atomically(target, content)


def file_signature(path: Path) -> tuple[int, int, int]:
    """Return size, modification time in ns and inode, which change if a file does."""
    info = path.stat()
    return info.st_size, info.st_mtime_ns, info.st_ino


def user_cache() -> Path:
    """Return the folder of contnorm in the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache_home or Path.home() / ".cache") / "contnorm"
    except RuntimeError as error:  # no HOME and no passwd entry, as in some containers
        raise UserError(
            "this user has no home folder, which is needed for a cache. Set XDG_CACHE_HOME to a folder."
        ) from error


def file_sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Compute the SHA-256 of a file's content.

    Args:
        path: File.
        advance: Called with the number of bytes of each block that was read.
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(min(BLOCK, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()


def parse_json(text: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse like ``json.loads``, but raise a ValueError, not a RecursionError, for deeply nested lists.

    Example:
        >>> parse_json(b"[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
