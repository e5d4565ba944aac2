"""Files: output, signatures and checksums, JSON and paths from untrusted files, locks and the user's cache.

Files are checked again only after they have changed, not at every start. A file counts as unchanged while its size,
modification time and inode are those of the last check. Signatures of checked files are stored in a small state file
next to the data, or in the user's cache where that folder is read-only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.errors import UserError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Progress",
    "Signature",
    "clock_ns",
    "file_sha256",
    "file_signature",
    "is_plain_name",
    "is_unchanged",
    "load_state",
    "locked",
    "parse_json",
    "path_inside",
    "save_state",
    "signatures",
    "user_cache",
    "write_output",
]

BLOCK = 2**24  # bytes per read: the thread that hashes needs the interpreter lock between blocks
# A file that is written again within the resolution of its time stamp keeps the same time. As git does, trust a time
# stamp only if it was clearly in the past when the file was checked; 2 s is the coarsest resolution in use (FAT).
RESOLUTION_NS = 2 * 10**9

Signature = list[int]  # size (0 for a folder), modification time in ns, inode
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


def signatures(paths: Iterable[Path], base: Path) -> dict[str, Signature]:
    """Return size, modification time and inode of files and folders, by their path relative to ``base``.

    A path that does not exist has an empty signature.
    """
    return {os.path.relpath(path, base): file_signature(path) for path in paths}


def file_signature(path: Path) -> Signature:
    """Return size (0 for a folder), modification time in ns and inode; empty if the path does not exist."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return []
    folder = stat.S_ISDIR(info.st_mode)
    return [0 if folder else info.st_size, info.st_mtime_ns, info.st_ino]


def is_unchanged(now: Mapping[str, Signature], state: Mapping[str, object], key: str) -> bool:
    """Whether all signatures equal those of the last check, and are reliable: all files were old enough then.

    Args:
        now: Current signatures.
        state: State file, as `load_state` returns it.
        key: Key of the signatures in the state.
    """
    checked = state.get("checked_ns")
    if not isinstance(checked, int) or state.get(key) != now:
        return False
    return all(signature[1] + RESOLUTION_NS < checked for signature in now.values() if signature)


def load_state(path: Path) -> dict[str, object]:
    """Load a state file; returns an empty state, so that everything is checked again, if it cannot be read."""
    try:
        state = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def save_state(path: Path, checked_ns: int, **checked: Mapping[str, Signature]) -> None:
    """Store signatures of files whose check started at time ``checked_ns``."""
    with suppress(OSError):  # the next start checks again
        write_atomically(path, json.dumps({"checked_ns": checked_ns, **checked}).encode())


def clock_ns() -> int:
    """Return the current time of the clock that sets modification times."""
    return time.time_ns()


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


def path_inside(folder: Path, name: str) -> Path | None:
    """Join a folder and a relative path read from a list; None if the path could leave the folder.

    The check is lexical: absolute paths, drives and ``..`` are refused. Symbolic links in the folder are followed,
    because whoever owns the folder made them, not whoever wrote the list.

    Example:
        >>> path_inside(Path("images"), "sea/1.png").as_posix()
        'images/sea/1.png'
        >>> path_inside(Path("images"), "../1.png"), path_inside(Path("images"), "/1.png")
        (None, None)
    """
    path = Path(name)
    if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
        return None
    return folder / path


def is_plain_name(name: object) -> bool:
    """Whether a value is the name of a file or folder, without any path and without control characters.

    Example:
        >>> is_plain_name("build-1"), is_plain_name("../build-1"), is_plain_name(None)
        (True, False, False)
    """
    if not isinstance(name, str) or not name.isprintable():
        return False
    return path_inside(Path(), name) is not None and Path(name).name == name


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


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if necessary; the lock ends with the process.

    On Windows, and on file systems without locks, nothing is locked.

    Args:
        path: Lock file.
        wait: Whether to wait for another process that holds the lock.

    Raises:
        BlockingIOError: If another process holds the lock and ``wait`` is false.
    """
    with path.open("w") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError:
                pass
        yield
