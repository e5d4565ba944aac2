"""Code of a user's own, named on the command line as ``path/to/file.py:Name``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path

from contnorm.errors import RunBrokeError, UserError, usable

__all__ = ["breaks_in", "code_hash", "is_own_code", "load_own_code", "own_error"]


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
    path = _path(name)
    if not is_own_code(name) or not path.is_file():
        return None
    with usable(path, "it can't be read", "Let yourself read it."):
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def load_own_code(name: str, what: str) -> object:
    """The thing a name points to; ``what`` is what an error calls it."""
    path, attribute = _path(name), name.rpartition(":")[2]
    # Dataclasses and pickles look a module up by its name; two files of one name must not be taken for each other.
    unique = f"contnorm_own_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"{what} {name!r}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise own_error(error, what, name, "it can't be loaded") from error
    if not hasattr(module, attribute):
        raise UserError(f"{what} {name!r}: {path} has no {attribute}.")
    return getattr(module, attribute)


def own_error(error: BaseException, what: str, name: str, when: str) -> RunBrokeError:
    """What went wrong in a user's file, in one line: where in it, and what Python says."""
    line = _line(error, _path(name))
    where = f", line {line}" if line else ""
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return RunBrokeError(f"{what} {name!r}: {when}: {_path(name)}{where}: {type(error).__name__}: {said}")


def breaks_in(error: BaseException, name: str) -> bool:
    """Whether an error came by way of the file a name points into."""
    return is_own_code(name) and _line(error, _path(name)) is not None


def _path(name: str) -> Path:
    return Path(name.rpartition(":")[0])


def _line(error: BaseException, path: Path) -> int | None:
    """The line of a file at which an error came; None where it did not come by way of it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path.resolve():
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if Path(f.filename).resolve() == path.resolve()), None)
