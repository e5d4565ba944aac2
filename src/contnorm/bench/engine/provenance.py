"""Which commit of the package runs: that of its own checkout, or none."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import contnorm

__all__ = ["commit_of", "package_commit"]


@cache
def package_commit() -> str | None:
    """The commit of the checkout that this package is imported from, marked ``-dirty`` where it has changes."""
    return commit_of(Path(contnorm.__file__).resolve())


def commit_of(file: Path) -> str | None:
    """The commit of the repository that tracks a file; None where no repository does.

    A repository may surround a file without tracking it, such as a project with a virtual environment inside. Its
    commit says nothing about the file.

    Example:
        >>> import tempfile
        >>> commit_of(Path(tempfile.mkdtemp()) / "module.py") is None
        True
    """
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in a folder; None where it fails, or is not installed."""
    # GIT_DIR and the like, which a hook sets, would name another repository than the folder's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
