"""Code of a user's own, named on the command line as ``path/to/file.py:Name``."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from contnorm.errors import UserError

__all__ = ["code_hash", "is_own_code", "load_own_code"]


def is_own_code(name: str) -> bool:
    """Whether a name points into a file.

    Example:
        >>> is_own_code("mine.py:Net"), is_own_code("resnet18")
        (True, False)
    """
    return ".py:" in name


def code_hash(name: str) -> str | None:
    """The hash of the file a name points into, so that an edited file is another run; None for names of ours.

    Example:
        >>> code_hash("er") is None
        True
    """
    path = Path(name.rpartition(":")[0])
    if not is_own_code(name) or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def load_own_code(name: str, what: str) -> object:
    """The thing a name points to; ``what`` is what an error calls it."""
    place, _, attribute = name.rpartition(":")
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"{what} {name!r}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise UserError(f"{what} {name!r}: {path} has no {attribute}.")
    return getattr(module, attribute)
