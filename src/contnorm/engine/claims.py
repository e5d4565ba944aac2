"""The right to run a run: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

__all__ = ["Claim"]

TRIES = 100  # a lock file can vanish between two looks at it, each time its holder has just ended


class Claim:
    """A lock file; it holds the number of the process that has it.

    Args:
        path: The file; it is made, with its folder, and removed when it is given back.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> first, second = Claim(path), Claim(path)
        >>> first.take(), second.take(), second.holder() == str(os.getpid())
        (True, False, True)
        >>> first.give_back()
        >>> second.take(), second.give_back()
        (True, None)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Whether it is ours now; False where another has it."""
        for _ in range(TRIES):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = self.path.open("a+")
            except FileNotFoundError:  # the folder has just been removed
                continue
            if not _locked(file):
                file.close()
                return False
            if _is_at(file, self.path):
                self._file = file
                self._sign()
                return True
            file.close()
        return False

    def _sign(self) -> None:
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def holder(self) -> str:
        """The number of the process that has it, as far as it is known."""
        with suppress(OSError, UnicodeDecodeError):
            return self.path.read_text().strip() or "unknown"
        return "unknown"

    def give_back(self) -> None:
        """Remove the file, then let go of it: in the other order the next one's file would be removed."""
        if self._file is not None:
            with suppress(OSError):
                if _is_at(self._file, self.path):
                    self.path.unlink()
            self._file.close()
            self._file = None


def _locked(file: IO[str]) -> bool:
    if sys.platform == "win32":
        return True  # no such locks there: two commands on one run are not told of each other
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
