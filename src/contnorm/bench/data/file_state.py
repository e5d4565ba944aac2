"""Checks of files that are repeated only after a file has changed, not at every start.

A file counts as unchanged while its size, modification time and inode are those of the last check. Signatures of
checked files are stored in a small state file next to the data, or in the user's cache where that folder is read-only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from contnorm.bench.records import write_atomically
from contnorm.errors import UserError

__all__ = [
    "Progress",
    "Signature",
    "clock_ns",
    "file_sha256",
    "load_state",
    "save_state",
    "signatures",
    "trusted",
    "user_cache",
]

BLOCK = 2**24  # bytes per read: the thread that hashes needs the interpreter lock between blocks
# A file that is written again within the resolution of its time stamp keeps the same time. As git does, trust a time
# stamp only if it was clearly in the past when the file was checked; 2 s is the coarsest resolution in use (FAT).
RESOLUTION_NS = 2 * 10**9

Signature = list[int]  # size (0 for a folder), modification time in ns, inode
Progress = Callable[[str, int, int], None]  # what is done, units done, units in total


def signatures(paths: Iterable[Path], base: Path) -> dict[str, Signature]:
    """Return size, modification time and inode of files and folders, by their path relative to ``base``.

    A path that does not exist has an empty signature.
    """
    return {os.path.relpath(path, base): _signature(path) for path in paths}


def _signature(path: Path) -> Signature:
    try:
        info = path.stat()
    except FileNotFoundError:
        return []
    folder = stat.S_ISDIR(info.st_mode)
    return [0 if folder else info.st_size, info.st_mtime_ns, info.st_ino]


def trusted(now: Mapping[str, Signature], state: Mapping[str, object], key: str) -> bool:
    """Whether all signatures equal those of the last check, and are reliable: all files were old enough then."""
    checked, known = state.get("checked_ns"), state.get(key)
    if not isinstance(checked, int) or known != now:
        return False
    return all(signature[1] + RESOLUTION_NS < checked for signature in now.values() if signature)


def load_state(path: Path) -> dict[str, object]:
    """Load a state file; returns an empty state, so that everything is checked again, if it cannot be read."""
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def save_state(path: Path, checked_ns: int, **known: Mapping[str, Signature]) -> None:
    """Store signatures of files whose check started at time ``checked_ns``."""
    with suppress(OSError):  # the next start checks again
        write_atomically(path, json.dumps({"checked_ns": checked_ns, **known}).encode())


def clock_ns() -> int:
    """Return the current time of the clock that sets modification times."""
    return time.time_ns()


def user_cache() -> Path:
    """Return the folder of contnorm in the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache_home or Path.home() / ".cache") / "contnorm"
    except RuntimeError as error:  # no HOME and no passwd entry, as in some containers
        raise UserError("this user has no home folder for a cache. Set XDG_CACHE_HOME to a folder.") from error


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
