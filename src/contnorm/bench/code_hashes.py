"""Files and hashes of code: of a file with the local modules it imports, and of functions and classes."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

from contnorm.bench.local_imports import imported_files, is_installed
from contnorm.errors import UserError, usable

__all__ = ["content_hash", "definition_file", "definition_hash", "file_hash", "loaded_hash"]

_first_hash: dict[str, tuple[object, str]] = {}  # by module: its spec, which a reload replaces, and its hash


def content_hash(path: Path) -> str:
    """Return the hash of the content of a file."""
    with usable(path, "it can't be read", "Check the permissions of the file."):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the hash of a Python file and of the local modules that it imports; that of the file if it imports none.

    Nothing is executed.
    """
    of_file = content_hash(path)
    imported = sorted((module, content_hash(file)) for file, module in imported_files(path).items())
    if not imported:
        return of_file[:12]
    text = "\n".join([of_file, *(f"{module} {content}" for module, content in imported)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def definition_file(value: object) -> Path | None:
    """Return the file that defines a function or class at its top level; None if there is none.

    Example:
        >>> definition_file(UserError).name, definition_file(lambda: None)
        ('errors.py', None)
    """
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if not (inspect.isfunction(value) or inspect.isclass(value)) or not name.isidentifier() or module is None:
        return None
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not value or not Path(file).is_file():
        return None
    return Path(file).resolve()


def definition_hash(value: Any) -> str | None:
    """Return the hash that identifies the code of a function or class; None if no file defines it.

    It is the hash of the file alone if the file belongs to an installed package.
    """
    path = definition_file(value)
    if path is None:
        return None
    return content_hash(path)[:12] if is_installed(path) else loaded_hash(value, path, f"{path}:{value.__qualname__}")


def loaded_hash(value: Any, path: Path, name: str) -> str:
    """Return the hash of the file that defines a function or class, as it was when an object of it was first used.

    Args:
        value: The function or class.
        path: The file that defines it.
        name: Its name for error messages.

    Raises:
        UserError: If the file was edited since: Python still has the earlier code. A script may be edited while it
            runs.
    """
    module, current = sys.modules[value.__module__], file_hash(path)
    spec, earlier = _first_hash.get(module.__name__, (None, current))
    if spec is not module.__spec__:  # it was reloaded
        earlier = current
    _first_hash[module.__name__] = (module.__spec__, earlier)
    if earlier != current and module.__name__ != "__main__":
        raise UserError(
            f"{name}: the file, or a local module that it imports, was edited after it was imported. Import it again "
            f"with importlib.reload, or restart Python."
        )
    return earlier
