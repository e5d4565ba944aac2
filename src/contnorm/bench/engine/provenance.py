"""The git commit of the package, if it is imported from a checkout."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import contnorm

__all__ = ["commit_of", "package_commit"]


@cache
def package_commit() -> str | None:
    """Return the commit of the checkout that this package is imported from, with ``-dirty`` if it has changes."""
    return commit_of(Path(contnorm.__file__).resolve())


def commit_of(file: Path) -> str | None:
    """Return the commit of the repository that tracks a file; None if no repository does.

    A repository may contain a file without tracking it, such as a project with a virtual environment inside. Its commit
    says nothing about the file.

    Example:
        >>> import tempfile
        >>> commit_of(Path(tempfile.mkdtemp()) / "module.py") is None
        True
    """
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder; None if it fails, or git is not installed."""
    # Variables such as GIT_DIR, which git sets for hooks, could point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()
