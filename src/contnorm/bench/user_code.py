"""Code of the user's own, named as ``path/to/file.py:Name``: whether it may run, what it is, and how it is loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from contnorm.bench.config.schema import dotted
from contnorm.bench.local_imports import imported_files, is_local
from contnorm.bench.trust import require_trust, untrusted
from contnorm.errors import RunBrokeError, UserError, usable

__all__ = [
    "breaks_in",
    "code_files",
    "code_hash",
    "forget_imports",
    "imported_modules",
    "is_own_code",
    "load_own_code",
    "loaded_modules",
    "own_error",
    "untrusted_code",
]

# Modules that user code imported, with their file and its hash at that time.
_imported: dict[str, tuple[Path, str]] = {}

_NO_FOLDER = os.path.join(tempfile.gettempdir(), f"contnorm-{secrets.token_hex(16)}")  # never made


def is_own_code(name: str) -> bool:
    """Whether a name points into a file.

    Example:
        >>> is_own_code("mine.py:Net"), is_own_code("resnet18")
        (True, False)
    """
    return ".py:" in name


def code_hash(name: str) -> str | None:
    """The hash of the file a name points into and of the local modules it imports; None for names of the package.

    An edit of any of them makes another run. Of a file that imports no local module it is the hash of the file alone.
    Nothing is executed.

    Example:
        >>> code_hash("er") is None
        True
    """
    path = _path(name)
    if not is_own_code(name) or not path.is_file():
        return None
    own = _content_hash(path)
    imported = sorted((module, _content_hash(file)) for file, module in imported_files(path).items())
    if not imported:
        return own[:12]
    listed = "\n".join([own, *(f"{module} {content}" for module, content in imported)])
    return hashlib.sha256(listed.encode()).hexdigest()[:12]


def code_files(values: Mapping[str, Any]) -> list[Path]:
    """The files of code that nested settings name.

    Example:
        >>> code_files({"strategy": {"name": "er"}, "model": {"name": "nets/mine.py:make"}})
        [PosixPath('nets/mine.py')]
    """
    flat = dotted(values)
    names = [flat.get(key) for key in ("strategy.name", "model.name")]
    return [_path(name) for name in names if isinstance(name, str) and is_own_code(name)]


def untrusted_code(name: str, what: str) -> str:
    """Why the code that a name points to may not be executed on this call; empty where it may, or is the package's."""
    return untrusted(_path(name), what, name) if is_own_code(name) else ""


def load_own_code(name: str, what: str) -> object:
    """The object a name points to; its file is executed, if it was named on this call.

    Args:
        name: ``path/to/file.py:Name``.
        what: What error messages call it.

    Raises:
        UserError: Where the file is not trusted, is missing, fails, or imports local modules that `code_hash` misses.
    """
    path, attribute = _path(name), name.rpartition(":")[2]
    require_trust(path, what, name)
    unique = _module_name(path)
    if not path.is_file():
        raise UserError(f"{what} {name!r}: there is no file {path}.")
    _ignore_stored_bytecode()
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    files = imported_files(path)
    _forget_edited(files)
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise own_error(error, what, name, "it can't be loaded") from error
    _register_imports(set(sys.modules) - before - {unique}, files, path, f"{what} {name!r}")
    if not hasattr(module, attribute):
        raise UserError(f"{what} {name!r}: {path} has no {attribute}.")
    return getattr(module, attribute)


def loaded_modules(name: str) -> dict[str, ModuleType]:
    """The modules of user code that are loaded for a name: of its file, as it was loaded last, and of its imports."""
    path = _path(name)
    files = {path.resolve(), *imported_files(path)}
    own = {_module_name(path), *(module for module, (file, _) in _imported.items() if file in files)}
    return {module: sys.modules[module] for module in sorted(own) if module in sys.modules}


def imported_modules() -> dict[str, ModuleType]:
    """The local modules that user code has imported in this process."""
    return {name: sys.modules[name] for name in _imported if name in sys.modules}


def forget_imports() -> None:
    """Have the local modules that user code imports loaded afresh when it is loaded next."""
    for name in _imported:
        sys.modules.pop(name, None)
    _imported.clear()


def _ignore_stored_bytecode() -> None:
    """Have user code compiled from its source text, not read from ``__pycache__`` folders that lie next to it.

    Bytecode there counts for a source of the same size and second, or, if its header says so, of any source. So it may
    be that of an earlier version, or of other code than the file that was read and trusted.
    """
    sys.dont_write_bytecode = True
    sys.pycache_prefix = _NO_FOLDER  # stays: functions of user code may import modules later


def _module_name(path: Path) -> str:
    """Dataclasses and pickles look a module up by its name; two files of one name must not be taken for each other."""
    return f"contnorm_own_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def _content_hash(path: Path) -> str:
    with usable(path, "it can't be read", "Let yourself read it."):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _forget_edited(files: dict[Path, str]) -> None:
    """Have modules imported afresh where one was edited since: Python would go on with what it has loaded."""
    known = [(file, content) for file, content in _imported.values() if file in files]
    if any(_content_hash(file) != content for file, content in known):
        forget_imports()


def _register_imports(names: set[str], files: dict[Path, str], path: Path, what: str) -> None:
    """Note the local modules that were just imported; refuses those whose edits `code_hash` would not notice."""
    located = {name: Path(file).resolve() for name in names if (file := getattr(sys.modules[name], "__file__", None))}
    local = {name: file for name, file in located.items() if is_local(file, path)}
    missed = next((file for file in local.values() if file not in files), None)
    if missed is not None:
        for name in local:  # or a second attempt would not see that they are imported
            del sys.modules[name]
        raise UserError(
            f"{what}: imports {missed}, which its import statements don't lead to, so an edit of it would go "
            f"unnoticed. Use an import statement, and name the folder in PYTHONPATH instead of changing sys.path."
        )
    _imported.update({name: (file, _content_hash(file)) for name, file in local.items()})


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
